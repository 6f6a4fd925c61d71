"""The properties that our own parts are held to, for parts of yours: each is a function of a block that raises.

    import pytest
    from skipless.testing import PROPERTIES, check

    @pytest.mark.parametrize("name", PROPERTIES)
    def test_my_block(name):
        check("pre-ln-dyt", name)

Models are small, in float64, with weights moved away from where they start: a gain that begins at zero would hide what
is behind it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from skipless.config.block import BlockConfig
from skipless.config.model import ModelConfig
from skipless.config.parts import PartValue
from skipless.errors import UserError, unknown
from skipless.nn.init import init_weights
from skipless.nn.kernels import disabled
from skipless.nn.mixing import Softmax, explicit_form
from skipless.nn.model import CausalLM, LanguageModel, MaskedLM

TOLERANCE = 1e-9
"""In float64, of what is about 1 in size."""

BATCH, LENGTH, WORDS = 2, 10, 32


def check(block: str | BlockConfig, name: str | None = None, *, positions: PartValue = "sinusoidal") -> None:
    """Hold a block to a property by its name, or to all of them; an AssertionError says what does not hold."""
    if name is not None and name not in PROPERTIES:
        raise unknown("property", name, PROPERTIES)
    cfg = ModelConfig.model_validate(
        {
            **{"block": block, "positions": positions, "n_layer": 2, "d_model": 16, "n_head": 2, "d_ff": 32},
            **{"vocab_size": WORDS, "max_seq_len": LENGTH + 2},
        }
    )
    for one in [name] if name else PROPERTIES:
        PROPERTIES[one](cfg)


def make(cfg: ModelConfig, kind: type[LanguageModel] = CausalLM, *, moved: bool = True) -> LanguageModel:
    """A small model in float64, its weights moved away from where they start."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind(cfg).double().eval()
        with torch.no_grad():
            for parameter in model.parameters() if moved else ():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def tokens(batch: int = BATCH, length: int = LENGTH) -> Tensor:
    """Random token ids, the same each time."""
    return torch.randint(WORDS, (batch, length), generator=torch.Generator().manual_seed(1))


def _same(found: Tensor, wanted: Tensor, what: str) -> None:
    assert found.shape == wanted.shape, f"{what}: {tuple(found.shape)} is not {tuple(wanted.shape)}"
    assert found.isfinite().all(), f"{what}: not finite"
    apart = (found - wanted).abs().max().item() if found.numel() else 0.0
    assert apart <= TOLERANCE * max(1.0, wanted.abs().max().item()), f"{what}: {apart:.3g} apart"


# ------------------------------------------------------------------------------ properties


def causality(cfg: ModelConfig) -> None:
    """A token does not see those after it."""
    model, ids = make(cfg), tokens()
    whole = model(ids)
    for seen in range(1, LENGTH):
        later = ids.clone()
        later[:, seen:] = (later[:, seen:] + 7) % WORDS
        _same(model(later)[:, :seen], whole[:, :seen], f"the first {seen} tokens, with others after them")


def padding(cfg: ModelConfig) -> None:
    """Padding, on either side, changes nothing for the real tokens."""
    for kind in (CausalLM, MaskedLM):
        model, ids = make(cfg, kind), tokens()
        alone = model(ids[:1, :6])
        for side, real in {"right": slice(0, 6), "left": slice(4, None)}.items():
            padded, mask = ids.clone(), torch.ones_like(ids, dtype=torch.bool)
            padded[0], mask[0] = 3, False
            padded[0, real], mask[0, real] = ids[0, :6], True
            found = model(padded, attention_mask=mask)
            _same(found[:1, real], alone, f"{kind.__name__}, a row padded on the {side}")
            _same(found[1:], model(ids[1:]), f"{kind.__name__}, a whole row beside one padded on the {side}")


def packing(cfg: ModelConfig) -> None:
    """Documents packed into a row do not see each other."""
    for kind in (CausalLM, MaskedLM):
        model, ids = make(cfg, kind), tokens(1)
        documents = torch.tensor([[0] * 4 + [1] * (LENGTH - 4)])
        apart = torch.cat([model(ids[:, :4]), model(ids[:, 4:])], dim=1)
        _same(model(ids, documents=documents), apart, f"{kind.__name__}, two documents in a row")


def caching(cfg: ModelConfig) -> None:
    """Token by token with a cache is what all at once is, in every mode that the block has."""
    model, ids = make(cfg), tokens()
    assert isinstance(model, CausalLM)
    whole = model(ids).detach()
    for mode in ("kv", "x"):
        try:
            cache = model.new_cache(BATCH, LENGTH, mode)
        except UserError:
            continue  # it says why
        steps = [model(ids[:, :4], cache=cache), *(model(ids[:, t : t + 1], cache=cache) for t in range(4, LENGTH))]
        _same(torch.cat(steps, dim=1), whole, f"decoding with a cache of mode {mode!r}")


def explicit(cfg: ModelConfig) -> None:
    """The fast form is the explicit one, outputs and all gradients, where the mixing has one."""
    _alike(cfg, lambda model: explicit_form(model), "the explicit form")


def kernels(cfg: ModelConfig) -> None:
    """With kernels in the place of our modules it computes the same, outputs and all gradients."""
    _alike(cfg, lambda model: disabled(model), "the plain equations")


def _alike(cfg: ModelConfig, other: Callable[[nn.Module], AbstractContextManager[None]], what: str) -> None:
    for kind in (CausalLM, MaskedLM):
        model, ids = make(cfg, kind), tokens()
        if what.startswith("the explicit") and any(_has_no_matrix(module) for module in model.modules()):
            return
        fast = _with_gradients(model, ids)
        with other(model):
            slow = _with_gradients(model, ids)
        for name, value in slow.items():
            _same(fast[name], value, f"{kind.__name__}, {what}, {name}")


def _has_no_matrix(module: nn.Module) -> bool:
    own = str(getattr(module, "own_part", "")).startswith("mixing ")
    return own and (not isinstance(module, Softmax) or type(module).matrix is Softmax.matrix)


def _with_gradients(model: LanguageModel, ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    output = model(ids)
    model.loss(ids, ids.roll(-1, 1)).backward()
    gradients = {f"the gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"the output": output.detach(), **{name: grad.clone() for name, grad in gradients.items()}}


def gradients(cfg: ModelConfig) -> None:
    """Every trainable parameter has a finite gradient that is not zero."""
    model = make(cfg)
    found = _with_gradients(model, tokens())
    for name, _ in model.named_parameters():
        gradient = found.get(f"the gradient of {name}")
        assert gradient is not None, f"{name} has no gradient: nothing depends on it"
        assert gradient.isfinite().all(), f"the gradient of {name} is not finite"
        assert gradient.any(), f"the gradient of {name} is zero everywhere"


def initialisation(cfg: ModelConfig) -> None:
    """`init_weights` sets every weight: a model without memory that is given some becomes the same model."""
    wanted = make(cfg, moved=False).state_dict()
    with torch.device("meta"):
        model = CausalLM(cfg)
    model = model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(float("nan"))
    init_weights(model)
    for name, tensor in model.state_dict().items():
        assert tensor.isfinite().all(), f"nothing sets {name}"
        if wanted[name].numel() == 1 or not wanted[name].std() > 0:  # what is drawn at random differs
            _same(tensor.double(), wanted[name], f"{name}, set a second time")


def folding(cfg: ModelConfig) -> None:
    """The copy for inference gives the same."""
    model, ids = make(cfg), tokens()
    _same(model.fold()(ids), model(ids).detach(), "the folded model")


def compiling(cfg: ModelConfig) -> None:
    """torch.compile can trace it in one graph, and the graph gives the same."""
    model, ids = make(cfg), tokens()
    plain = model(ids).detach()
    try:
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        _same(compiled(ids).detach(), plain, "the compiled model")
    finally:
        torch.compiler.reset()


def saving(cfg: ModelConfig) -> None:
    """Its configuration and its weights are all there is to it: both go to a file and come back."""
    again = ModelConfig.model_validate_json(cfg.model_dump_json())
    assert again == cfg, "the configuration that comes back is another"
    model, other = make(cfg), CausalLM(again).double().eval()
    other.load_state_dict(model.state_dict())
    _same(other(tokens()), model(tokens()), "the model with the weights of another")


PROPERTIES: dict[str, Callable[[ModelConfig], None]] = {
    one.__name__: one
    for one in (
        *(causality, padding, packing, caching, explicit, kernels),
        *(gradients, initialisation, folding, compiling, saving),
    )
}
"""By name."""
