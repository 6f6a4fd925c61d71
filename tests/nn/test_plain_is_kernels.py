"""Every block with its kernels equals its plain equations with an explicit matrix: outputs and all gradients.

For every kind of mask, many lengths, under autocast; and hooks of every kind fire as they do on the plain model.
"""

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from skipless import BLOCKS, CausalLM, MaskedLM, ModelConfig, UserError
from skipless.distributed.devices import check_cpu_bf16
from skipless.nn import Mask, explicit_form
from skipless.nn.kernels import disabled, install, plain_type
from skipless.nn.kernels import modules as kernels
from skipless.nn.layers import MLP
from skipless.nn.masks import QUERY_BLOCK, alibi_slopes
from tests.helpers.variants import VARIANTS
from tests.helpers.weights import disturbed

LENGTHS = (1, 2, 7, 128, 257)
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
B, H = 2, 2


def padding(length, side):
    real = torch.ones(B, length, dtype=torch.bool)
    pad = length // 3
    if pad:
        real[0, :pad] = real[0, :pad] if side == "right" else False
        real[0, length - pad :] = real[0, length - pad :] if side == "left" else False
    return real


def packed(length):
    """Three documents in the first row, one in the second."""
    documents = torch.zeros(B, length, dtype=torch.long)
    documents[0, length // 4 :] = 1
    documents[0, length // 2 :] = 2
    return documents


MASKS = {
    "causal": lambda n: Mask(True),
    "bidirectional": lambda n: Mask(False),
    "causal-left-padded": lambda n: Mask(True, padding=padding(n, "left")),
    "causal-right-padded": lambda n: Mask(True, padding=padding(n, "right")),
    "bidirectional-left-padded": lambda n: Mask(False, padding=padding(n, "left")),
    "bidirectional-right-padded": lambda n: Mask(False, padding=padding(n, "right")),
    "causal-documents": lambda n: Mask(True, documents=packed(n)),
    "bidirectional-documents": lambda n: Mask(False, documents=packed(n)),
    "causal-documents-padded": lambda n: Mask(True, documents=packed(n), padding=padding(n, "right")),
    "causal-alibi": lambda n: Mask(True, alibi=alibi_slopes(H)),
    "bidirectional-alibi": lambda n: Mask(False, alibi=alibi_slopes(H)),
    "causal-alibi-padded": lambda n: Mask(True, padding=padding(n, "left"), alibi=alibi_slopes(H)),
    "bidirectional-alibi-documents": lambda n: Mask(False, documents=packed(n), alibi=alibi_slopes(H)),
}


def small(block, dtype=torch.float32, **changes):
    settings = {"n_layer": 2, "d_model": 8, "n_head": H, "d_ff": 16, "vocab_size": 32, "max_seq_len": 600}
    cfg = ModelConfig(block=block, **{**settings, **changes})
    return disturbed(CausalLM(cfg)).to(dtype)


def run(model, x, mask, weight):
    """Output at the real tokens, and the gradients of its weighted sum."""
    x = x.clone().requires_grad_()
    out = x
    for block in model.blocks:
        out = block(out, mask)
    if mask.padding is not None:
        out = out * mask.padding[..., None]
    inside = [parameter for parameter in model.blocks.parameters() if parameter.requires_grad]
    return [out, *torch.autograd.grad((out * weight).sum(), [x, *inside], allow_unused=True)]


def assert_close(fast, slow, tolerance, what):
    """Largest error of each tensor, relative to its largest entry, or to a tenth of the largest of all.

    A gain's gradient is a sum of thousands of terms that may cancel (behind a norm it is zero), and then has no
    accuracy relative to itself in either form.
    """
    assert [a is None for a in fast] == [b is None for b in slow]
    pairs = [(a, b) for a, b in zip(fast, slow, strict=True) if a is not None]
    largest = max(b.abs().max().item() for _, b in pairs)
    for number, (a, b) in enumerate(pairs):
        assert a.isfinite().all(), (what, number)
        error, size = (a - b).abs().max().item(), max(b.abs().max().item(), largest / 10)
        assert error <= tolerance * size, (what, number, error, size)


CROSSED = [(name, kind) for name in VARIANTS for kind in MASKS]
# each preset with every mask, and each variant with one mask of every way that the fast form takes
USUAL = [
    (name, kind)
    for name, kind in CROSSED
    if name in BLOCKS
    or kind in ("causal", "bidirectional-left-padded", "causal-documents-padded", "bidirectional-alibi")
]


@pytest.mark.parametrize(
    ("name", "kind"),
    [pytest.param(*pair, marks=[] if pair in USUAL else pytest.mark.slow, id="-".join(pair)) for pair in CROSSED],
)
def test_kernels_equal_the_plain_equations(name, kind):
    for dtype, tolerance in TOLERANCE.items():
        model = small(VARIANTS[name], dtype)
        for length in LENGTHS:
            x, weight = torch.randn(2, B, length, 8, dtype=dtype)
            mask = MASKS[kind](length)
            fast = run(model, x, mask, weight)
            with disabled(model):
                assert_close(fast, run(model, x, mask, weight), tolerance, (dtype, length, "plain"))
                if dtype == torch.float64 and length <= 128:
                    with explicit_form(model):
                        slow = run(model, x, mask, weight)
                    assert_close(fast, slow, tolerance, (dtype, length, "explicit"))


@pytest.mark.parametrize("positions", ["sinusoidal", "scaled-sinusoidal", "learned", "alibi", "rotary"])
@pytest.mark.parametrize("kind", [CausalLM, MaskedLM])
@pytest.mark.parametrize("block", [pytest.param("pre-ln", marks=pytest.mark.slow), "sas", "sas-p"])
def test_whole_models_agree(block, kind, positions):
    cfg = ModelConfig(block=block, n_layer=2, d_model=16, n_head=4, vocab_size=64, max_seq_len=300, positions=positions)
    model = disturbed(kind(cfg)).double()
    ids, labels = torch.randint(64, (2, B, 270))
    for extra in ({}, {"attention_mask": padding(270, "left")}, {"documents": packed(270)}):
        fast = torch.autograd.grad(model.loss(ids, labels, **extra), list(model.parameters()), allow_unused=True)
        with disabled(model), explicit_form(model):
            slow = torch.autograd.grad(model.loss(ids, labels, **extra), list(model.parameters()), allow_unused=True)
        assert_close(fast, slow, 1e-9, extra.keys())


@pytest.mark.parametrize("block", ["pre-ln", "parallel", "sas", "sas-p"])
def test_dropout_is_that_of_the_plain_equations(block):
    """Drawn in the same places and in the same order."""
    model = small(block, torch.float64, dropout=0.5).train()
    ids, labels = torch.randint(32, (2, B, 16))
    torch.manual_seed(1)
    fast = model.loss(ids, labels)
    torch.manual_seed(1)
    with disabled(model):
        plain = model.loss(ids, labels)
    torch.testing.assert_close(fast, plain, rtol=1e-12, atol=1e-12)
    torch.manual_seed(2)
    assert not torch.allclose(model.loss(ids, labels), plain)


class LargestTensor(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else [out]:
            if isinstance(value, torch.Tensor):
                self.numel = max(self.numel, value.untyped_storage().nbytes() // value.element_size())
        return out


def test_alibi_rows_are_made_a_few_at_a_time():
    """With many heads too, the largest tensor grows with T and not with T²."""
    sizes = []
    for length in (4 * QUERY_BLOCK, 8 * QUERY_BLOCK):
        model = small("sas", n_layer=1, d_model=24, n_head=12, max_seq_len=length)
        with LargestTensor() as largest:
            run(model, torch.randn(1, length, 24), Mask(True, alibi=alibi_slopes(12)), torch.ones(1))
        sizes.append(largest.numel)
    assert sizes[1] <= 2.1 * sizes[0]


@pytest.mark.parametrize("kind", MASKS)
def test_fast_form_makes_no_square_matrix(kind):
    """No operation of the forward or the backward returns as many elements as one (T, T) matrix."""
    length = 16 * QUERY_BLOCK
    model = small("sas", n_layer=1)
    x, weight = torch.randn(2, 1, length, 8)
    mask = MASKS[kind](length)
    mask = Mask(
        mask.causal,
        None if mask.padding is None else mask.padding[:1],
        None if mask.documents is None else mask.documents[:1],
        mask.alibi,
    )
    with LargestTensor() as largest:
        run(model, x, mask, weight)
    assert largest.numel < length * length
    with LargestTensor() as largest, explicit_form(model), torch.no_grad():
        model.blocks[0](x[:, :64], Mask(True))
    assert largest.numel >= 64 * 64


def test_the_explicit_form_can_be_asked_for_twice():
    model, x = small("sas", n_layer=1), torch.randn(1, 64, 8)
    with explicit_form(model), torch.no_grad():
        with explicit_form(model):
            pass
        with LargestTensor() as largest:
            model.blocks[0](x, Mask(True))
    assert largest.numel >= 64 * 64
    assert not any("forward" in vars(module) for module in model.modules())


# ---------------------------------------------------------------------------------- autocast


@pytest.mark.parametrize("length", [1, 7, 11, 16, 128])
@pytest.mark.parametrize("block", BLOCKS)
def test_training_under_bf16_autocast(block, length):
    """The loss and its gradients, to bfloat16's rounding; where bfloat16 products would end the process, skipped."""
    try:
        check_cpu_bf16()
    except UserError as error:
        pytest.skip(str(error))
    model = small(block, n_layer=1)
    ids, labels = torch.randint(32, (2, B, length))
    exact = [model.loss(ids, labels)]
    exact += torch.autograd.grad(exact[0], list(model.parameters()), allow_unused=True)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.loss(ids, labels)
    assert loss.dtype == torch.float32
    rounded = [loss, *torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)]
    assert_close(rounded, exact, 0.2, (block, length))


# --------------------------------------------------------------------------------------- hooks

KINDS = ["forward", "forward-pre", "full-backward", "backward-pre", "global-forward", "global-forward-pre"]
KINDS += ["global-backward", "global-backward-pre"]


def calls(model, kind, ids, labels):
    """How often a hook of a kind fires on each module of a model in a loss and its backward."""
    names = {module: name for name, module in model.named_modules()}
    seen = Counter()

    def hook(module, *_):
        seen[names.get(module)] += 1

    everywhere = torch.nn.modules.module
    register = {
        "forward": lambda m: m.register_forward_hook(hook),
        "forward-pre": lambda m: m.register_forward_pre_hook(hook),
        "full-backward": lambda m: m.register_full_backward_hook(hook),
        "backward-pre": lambda m: m.register_full_backward_pre_hook(hook),
    }
    globally = {
        "global-forward": everywhere.register_module_forward_hook,
        "global-forward-pre": everywhere.register_module_forward_pre_hook,
        "global-backward": everywhere.register_module_full_backward_hook,
        "global-backward-pre": everywhere.register_module_full_backward_pre_hook,
    }
    handles = [globally[kind](hook)] if kind in globally else [register[kind](module) for module in model.modules()]
    try:
        model.loss(ids, labels).backward()
    finally:
        for handle in handles:
            handle.remove()
        model.zero_grad()
    return seen


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", BLOCKS)
def test_hooks_fire_as_on_the_plain_model(block, kind):
    model = small(block)
    ids, labels = torch.randint(32, (2, B, 16))
    ours = calls(model, kind, ids, labels)
    with disabled(model):
        theirs = calls(model, kind, ids, labels)
    assert ours == theirs
    leaves = {name for name, one in model.named_modules() if name.startswith("blocks.0") and not [*one.children()]}
    if "backward" not in kind:
        assert leaves <= ours.keys()


@pytest.mark.parametrize("block", BLOCKS)
def test_a_hook_on_one_module_alone_fires_and_sees_what_a_plain_model_shows(block):
    """On each in turn, with the others untouched: what it sees, and what it changes, counts."""
    model = small(block, torch.float64)
    ids, labels = torch.randint(32, (2, B, 16))
    for name, module in list(model.named_modules())[1:]:

        def look(model=model, module=module):
            seen = []
            handle = module.register_forward_hook(lambda _m, _i, output: seen.append(output) or output * 1.5)
            try:
                loss = model.loss(ids, labels)
                loss.backward()
            finally:
                handle.remove()
            grads = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
            model.zero_grad()
            return [*seen, loss, *grads]

        if isinstance(module, torch.nn.ModuleList):
            continue
        ours = look()
        with disabled(model):
            theirs = look()
        assert len(ours) == len(theirs), name
        assert_close(ours, theirs, 1e-9, name)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("block", ["pre-ln", "sas-p"])
def test_what_a_hook_has_seen_stays_as_it_was(block, grad):
    """A kernel that overwrites its input must not overwrite what somebody looks at."""
    model = small(block, torch.float64)
    ids = torch.randint(32, (B, 16))
    for name, module in model.named_modules():
        seen = []
        handle = module.register_forward_hook(lambda _m, _i, output, seen=seen: seen.append((output, output.clone())))
        with torch.set_grad_enabled(grad):
            model(ids)
        handle.remove()
        assert seen or isinstance(module, torch.nn.ModuleList), name
        assert all(torch.equal(now, then) for now, then in seen), name


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("block", ["pre-ln", "sas-p"])
def test_what_a_hook_inside_a_wrapper_has_seen_stays_as_it_was(block, grad):
    class Wrapper(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x)

    model, seen = small(block, torch.float64), []
    mlp = model.blocks[0].mlp
    mlp.up.register_forward_hook(lambda _m, _i, output: seen.append((output, output.clone())))
    mlp.up = Wrapper(mlp.up)
    with torch.set_grad_enabled(grad):
        model(torch.randint(32, (B, 16)))
    assert torch.equal(*seen[0])


@pytest.mark.parametrize("change", [{"padding_idx": 0}, {"max_norm": 0.5}, {"scale_grad_by_freq": True}])
def test_an_embedding_that_does_more_than_look_up(change):
    """Its loss with a tied head, as in the plain form."""
    model = small("sas", torch.float64)
    vars(model.embedding).update(change)
    ids, labels = torch.randint(4, (2, B, 16))
    parameters = list(model.parameters())
    fast = torch.autograd.grad(model.loss(ids, labels), parameters)
    with disabled(model):
        assert_close(fast, torch.autograd.grad(model.loss(ids, labels), parameters), 1e-9, change)


class Doubled(torch.nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


def give_bias(model):
    model.head = torch.nn.Linear(8, 32).double()


def give_subclass(model):
    model.head.__class__ = Doubled


def hook_head(model):
    model.head.register_forward_hook(lambda _m, _i, output: output * 1.5)


@pytest.mark.parametrize("length", [16, 300])
@pytest.mark.parametrize("kind", [CausalLM, MaskedLM])
@pytest.mark.parametrize("change", [give_bias, give_subclass, hook_head])
def test_a_head_that_is_more_than_a_matrix_is_called(change, kind, length):
    """In logits and in losses, in the plain form too."""
    cfg = ModelConfig(block="sas", n_layer=1, d_model=8, n_head=H, vocab_size=32, max_seq_len=300, tie_embeddings=False)
    model = disturbed(kind(cfg)).double()
    change(model)
    ids, labels = torch.randint(32, (2, B, length))
    labels[:, :3] = -100
    parameters = list(model.parameters())
    for context in (nullcontext(), disabled(model)):
        with context:
            expected = model.head(model.hidden(ids))
            torch.testing.assert_close(model(ids), expected, rtol=1e-12, atol=1e-12)
            slow = torch.nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten())
            fast = model.loss(ids, labels)
        grads = [torch.autograd.grad(loss, parameters, allow_unused=True) for loss in (fast, slow)]
        assert_close([fast, *grads[0]], [slow, *grads[1]], 1e-9, change)


# -------------------------------------------------------------------------------- swapping


@pytest.mark.parametrize("block", VARIANTS)
def test_swapping_leaves_names_and_parameters(block):
    model = small(VARIANTS[block])
    before = dict(model.named_parameters())
    state = list(model.state_dict())
    kinds = [type(module) for module in model.modules()]
    with disabled(model):
        assert type(model) is CausalLM
        assert all(not type(module).__module__.startswith("skipless.nn.kernels") for module in model.modules())
        assert list(model.state_dict()) == state
    assert [type(module) for module in model.modules()] == kinds
    assert dict(model.named_parameters()).keys() == before.keys()
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


def test_only_exact_classes_are_swapped():
    class Mine(MLP):
        def contract(self, hidden):
            return super().contract(hidden) * 2

    model = small("sas-p")
    expected = model.blocks[0](torch.ones(1, 4, 8), Mask(True))
    model.blocks[0].mlp.__class__ = Mine
    install(model)
    assert type(model.blocks[0].mlp) is Mine
    assert not torch.equal(model.blocks[0](torch.ones(1, 4, 8), Mask(True)), expected)
    parametrised = torch.nn.utils.parametrizations.weight_norm(model.blocks[1].mlp.up)
    assert "Parametrized" in type(parametrised).__name__
    x, weight = torch.randn(2, B, 16, 8)
    fast = run(model, x, Mask(True), weight)
    with disabled(model):
        plain = run(model, x, Mask(True), weight)
    assert_close(fast, plain, 1e-4, "parametrised")
    assert plain_type(model) is CausalLM


def test_models_have_kernels_and_their_subclasses_stay_plain():
    class Mine(CausalLM):
        pass

    cfg = ModelConfig(block="sas-p", n_layer=1, d_model=8, n_head=2, vocab_size=32)
    assert type(CausalLM(cfg)) is kernels.CausalLM
    assert isinstance(CausalLM(cfg), CausalLM)
    mine = Mine(cfg)
    assert type(mine) is Mine
    assert type(mine.blocks[0]) is kernels.ParallelBlock
    assert repr(CausalLM(cfg)).startswith("CausalLM(")


def test_torch_func_differentiates_a_model():
    model = small("sas-p", torch.float64)
    ids, labels = torch.randint(32, (2, B, 16))
    parameters = dict(model.named_parameters())

    class Loss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self):
            return self.model.loss(ids, labels)

    named = {f"model.{name}": parameter.detach() for name, parameter in parameters.items()}
    found = torch.func.grad(lambda p: torch.func.functional_call(Loss(), p, ()))(named)
    expected = torch.autograd.grad(model.loss(ids, labels), list(parameters.values()))
    assert_close([found[f"model.{name}"] for name in parameters], list(expected), 1e-9, "torch.func")
