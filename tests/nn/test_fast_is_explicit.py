"""The fast form of every block equals its explicit form: outputs and all gradients, for every kind of mask."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from skipless import BLOCKS, CausalLM, MaskedLM, ModelConfig
from skipless.nn import Mask, explicit_form
from skipless.nn.mask import QUERY_BLOCK, alibi_slopes
from tests.variants import VARIANTS

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


def disturbed(model, size=0.3):
    """Move every weight, so that no gain, no ΔW and no query hides behind its initial value."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * size)
    return model


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
def test_fast_equals_explicit(name, kind):
    for dtype, tolerance in TOLERANCE.items():
        model = small(VARIANTS[name], dtype)
        for length in LENGTHS:
            x, weight = torch.randn(2, B, length, 8, dtype=dtype)
            mask = MASKS[kind](length)
            fast = run(model, x, mask, weight)
            with explicit_form(model):
                slow = run(model, x, mask, weight)
            assert_close(fast, slow, tolerance, (dtype, length))


@pytest.mark.parametrize("positions", ["sinusoidal", "scaled-sinusoidal", "learned", "alibi", "rotary"])
@pytest.mark.parametrize("kind", [CausalLM, MaskedLM])
@pytest.mark.parametrize("block", ["pre-ln", "sas", "sas-p"])
def test_whole_models_agree(block, kind, positions):
    cfg = ModelConfig(block=block, n_layer=2, d_model=16, n_head=4, vocab_size=64, max_seq_len=300, positions=positions)
    model = disturbed(kind(cfg)).double()
    ids, labels = torch.randint(64, (2, B, 270))
    for extra in ({}, {"attention_mask": padding(270, "left")}, {"documents": packed(270)}):
        fast = torch.autograd.grad(model.loss(ids, labels, **extra), list(model.parameters()), allow_unused=True)
        with explicit_form(model):
            slow = torch.autograd.grad(model.loss(ids, labels, **extra), list(model.parameters()), allow_unused=True)
        assert_close(fast, slow, 1e-9, extra.keys())


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
