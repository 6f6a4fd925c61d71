"""Decoding with a cache equals a pass over everything: every block, mode, kind of positions, and way to feed it."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skipless import BLOCKS, CausalLM, ModelConfig
from skipless.config.block import parse_block
from skipless.nn.blocks import SequentialBlock
from skipless.nn.kernels import slabs
from tests.helpers.variants import VARIANTS
from tests.helpers.weights import disturbed

POSITIONS = ["sinusoidal", "scaled-sinusoidal", "learned", "alibi", "rotary"]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
V = 40


def make(block, positions="sinusoidal", dtype=torch.float64, length=48):
    cfg = ModelConfig(
        block=VARIANTS[block], n_layer=3, d_model=24, n_head=3, vocab_size=V, max_seq_len=length, positions=positions
    )
    # small changes, so that float32 rounding stays small beside the logits' size
    return disturbed(CausalLM(cfg), 0.1).to(dtype).eval()


def modes(model):
    """The modes that can serve a model."""
    found = []
    for mode in ("kv", "kx", "x"):
        try:
            model.new_cache(1, mode=mode)
            found.append(mode)
        except ValueError:
            pass
    return found


def feed(model, ids, cuts, mode, **first):
    """The logits of all positions, from a cache that is fed the pieces between the cuts."""
    cache = model.new_cache(ids.shape[0], mode=mode)
    edges = [0, *cuts, ids.shape[1]]
    pieces = [ids[:, a:b] for a, b in itertools.pairwise(edges) if b > a]
    out = [model(piece, cache=cache, **(first if number == 0 else {})) for number, piece in enumerate(pieces)]
    assert cache.length == ids.shape[1]
    return torch.cat(out, dim=1)


def assert_equal(got, expected):
    error = (got - expected).abs().max().item()
    assert error <= TOLERANCE[got.dtype] * max(1.0, expected.abs().max().item()), error


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("block", BLOCKS)
def test_cached_equals_uncached(block, positions, dtype):
    """One token at a time, in one pass, in chunks, and prompt then tokens; every mode."""
    model = make(block, positions, dtype)
    ids = torch.randint(V, (2, 20))
    with torch.no_grad():
        expected = model(ids)
    for mode in modes(model):
        for cuts in (range(1, 20), [], [7, 8, 15], range(13, 20)):
            assert_equal(feed(model, ids, list(cuts), mode), expected)


@pytest.mark.parametrize("block", VARIANTS)
def test_every_variant_can_be_cached(block):
    model = make(block)
    ids = torch.randint(V, (2, 12))
    with torch.no_grad():
        expected = model(ids)
    for mode in [*modes(model), "auto"]:
        assert_equal(feed(model, ids, [5, 6, 7], mode), expected)


@settings(max_examples=40)
@given(
    block=st.sampled_from(["pre-ln", "v-skipinit", "sas", "sas-p", "sas-p-nonorm"]),
    positions=st.sampled_from(POSITIONS),
    lengths=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    side=st.sampled_from(["left", "right"]),
    new=st.integers(0, 6),
    data=st.data(),
)
def test_ragged_batches(block, positions, lengths, side, new, data):
    """Prompts of different lengths, padded on either side: each row as if it were alone."""
    model = make(block, positions)
    mode = data.draw(st.sampled_from(modes(model)))
    longest = max(lengths)
    rows = [torch.randint(V, (1, n + new)) for n in lengths]
    padded, real = torch.randint(V, (len(rows), longest)), torch.zeros(len(rows), longest, dtype=torch.bool)
    for number, (row, n) in enumerate(zip(rows, lengths, strict=True)):
        place = slice(longest - n, longest) if side == "left" else slice(0, n)
        padded[number, place], real[number, place] = row[0, :n], True
    cache = model.new_cache(len(rows), mode=mode)
    prompt = model(padded, attention_mask=real, cache=cache)
    later = [model(torch.cat([row[:, n + i : n + i + 1] for row, n in zip(rows, lengths, strict=True)]), cache=cache)
             for i in range(new)]  # fmt: skip
    for number, (row, n) in enumerate(zip(rows, lengths, strict=True)):
        with torch.no_grad():
            alone = model(row)
        assert_equal(prompt[number, real[number]], alone[0, :n])
        for i, logits in enumerate(later):
            assert_equal(logits[number, 0], alone[0, n + i])


def test_bytes():
    """Mode x is exactly half of keys and values, and neither counts what does not grow."""
    model = make("sas-p", dtype=torch.float32)
    half, full = model.new_cache(2, mode="x"), model.new_cache(2, mode="kx")
    assert full.bytes_per_token == 2 * 24 * 3 * 4
    assert half.bytes_per_token * 2 == full.bytes_per_token
    running_sums = 3 * 2 * 24 * 4
    assert half.nbytes == 2 * 48 * half.bytes_per_token + running_sums
    assert full.nbytes == 2 * 48 * full.bytes_per_token + running_sums
    assert make("pre-ln", dtype=torch.float32).new_cache(2).nbytes == 2 * 48 * full.bytes_per_token


def test_the_sum_so_far_is_kept_in_float32():
    """In bfloat16 itself a sum of ones stops at 256, and from then on the mean would fall."""
    model = make("sas-p", dtype=torch.bfloat16, length=600)
    cache = model.new_cache(1)
    ones = torch.ones(1, 3, 1, 8, dtype=torch.bfloat16)
    for _ in range(600):
        cache.begin(torch.zeros(1, 1, dtype=torch.long), None)
        mean = cache.layers[0].mean(ones)
        cache.advance(1)
    assert torch.equal(mean, ones)


@pytest.mark.parametrize("mode", ["kx", "x"])
@pytest.mark.parametrize("new", [1, 3])
def test_a_pass_that_was_interrupted_can_be_tried_again(mode, new):
    """What its first layers had remembered counts once."""
    model, ids = make("sas"), torch.randint(V, (2, 13))
    with torch.no_grad():
        expected = model(ids)
    cache = model.new_cache(2, mode=mode)

    def stop(*_):
        raise KeyboardInterrupt

    for piece in (slice(10), slice(10, 10 + new)):
        handle = model.blocks[1].register_forward_pre_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            model(ids[:, piece], cache=cache)
        handle.remove()
        with torch.inference_mode(mode=new == 1):
            assert_equal(model(ids[:, piece], cache=cache), expected[:, piece])
    cache.reset()
    assert_equal(model(ids, cache=cache), expected)


def test_padding_of_a_pass_that_failed_is_forgotten():
    model, ids = make("sas"), torch.randint(V, (2, 9))
    cache, real = model.new_cache(2), torch.ones(2, 9, dtype=torch.long)
    real[0, :3] = 0
    with pytest.raises(IndexError):
        model(ids + V, attention_mask=real, cache=cache)
    with torch.no_grad():
        assert_equal(model(ids, cache=cache), model(ids))


def test_modes():
    sas, pre_ln = make("sas"), make("pre-ln")
    assert pre_ln.new_cache(1).mode == "kv"
    assert sas.new_cache(1, mode="kv").mode == "kx"
    for block in ("rotary", "qk-norm"):
        model = make("sas", "rotary") if block == "rotary" else make("qk-norm")
        assert model.new_cache(1).mode == "kx"
        with pytest.raises(ValueError, match=r"not exact here: .*(rotary|normalised)"):
            model.new_cache(1, mode="x")
    with pytest.raises(ValueError, match=r"W\^V in every layer"):
        pre_ln.new_cache(1, mode="x")
    with pytest.raises(ValueError, match="known: auto, kv, kx, x"):
        sas.new_cache(1, mode="z")


def test_bad_use():
    model = make("sas")
    cache = model.new_cache(2, max_len=4)
    ids = torch.randint(V, (2, 3))
    model(ids, cache=cache)
    with pytest.raises(ValueError, match="holds 4 tokens: 3 are there and 2 more do not fit"):
        model(ids[:, :2], cache=cache)
    with pytest.raises(ValueError, match="for 2 sequences, got 1"):
        model(ids[:1, :1], cache=cache)
    with pytest.raises(ValueError, match="first tokens of a cache"):
        model(ids[:, :1], attention_mask=torch.ones(2, 1, dtype=torch.long), cache=cache)
    with pytest.raises(ValueError, match="documents"):
        model(ids[:, :1], documents=torch.ones(2, 1), cache=cache)
    for wrong in (0, 49):
        with pytest.raises(ValueError, match="max_len must lie in 1…48"):
            model.new_cache(1, max_len=wrong)
    cache.reset()
    with torch.no_grad():
        assert_equal(model(ids, cache=cache), model(ids))


@pytest.mark.parametrize("slabs_from", [0, slabs.LARGE_MATRIX])
@pytest.mark.parametrize("block", VARIANTS)
def test_folding_changes_nothing(block, slabs_from, monkeypatch):
    """Beyond rounding, with and without a cache, by slabs and without; and there is less to do."""
    monkeypatch.setattr(slabs, "LARGE_MATRIX", slabs_from)
    model = make(block)
    ids = torch.randint(V, (2, 24))
    with torch.no_grad():
        expected = model(ids)
        short = model.fold()
        assert_equal(short(ids), expected)
        assert torch.equal(model(ids), expected)  # which may go on training
    for mode in modes(model):  # pieces of fewer and of more tokens than a head is wide
        for one in (model, short):
            assert_equal(feed(one, ids, [3, 4, 16, 17], mode), expected)
    assert short.blocks[0].beta_ff in (1.0, None)
    assert not any(parameter.requires_grad for parameter in short.parameters())
    assert len(list(short.parameters())) <= len(list(model.parameters()))


@pytest.mark.parametrize("block", ["pre-ln", "parallel", "sas", "sas-p"])
def test_folding_stores_nothing_twice(block):
    model = make(block)
    short = model.fold()
    tensors = [*short.parameters(), *short.buffers()]
    stored = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    assert sum(stored.values()) <= sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


class Shifted(torch.nn.Linear):
    """Somebody's own map."""

    def forward(self, input):
        return super().forward(input) + input.sum(-1, keepdim=True)


class Wrapped(torch.nn.Module):
    """An adapter around a map."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) + x.sum(-1, keepdim=True)


class OwnBlock(SequentialBlock):
    """A block that uses its gain twice."""

    def forward(self, x, mask, rope=None):
        return x + self.beta_ff * self.beta_ff * self.mlp(self.norm_ff(x))


def subclassed(model, where):
    model.blocks[0].get_submodule(where).__class__ = Shifted


def wrapped(model, where):
    model.blocks[0].set_submodule(where, Wrapped(model.blocks[0].get_submodule(where)))


def parametrised(model, where):
    torch.nn.utils.parametrizations.weight_norm(model.blocks[0].get_submodule(where))


def hooked(model, where):
    model.blocks[0].get_submodule(where).register_forward_hook(lambda _m, _i, output: output + 0.3)


def sharing(model, where):
    model.blocks[1].get_submodule(where).weight = model.blocks[0].get_submodule(where).weight


@pytest.mark.parametrize(
    ("block", "where", "change"),
    [
        *(
            ("sas:first_value={kind: dense}", "attention.key", change)
            for change in (subclassed, wrapped, parametrised, hooked)
        ),
        *(
            ("sas:first_value={kind: dense}", "attention.value", change)
            for change in (subclassed, wrapped, parametrised, hooked)
        ),
        *(("sas", "attention.value", change) for change in (wrapped, hooked)),
    ],
)
def test_a_cache_of_inputs_calls_maps_that_are_more_than_a_matrix(block, where, change):
    """With fewer new tokens than a head is wide, where W^K and W^V would be absorbed."""
    cfg = ModelConfig(block=parse_block(block), n_layer=2, d_model=24, n_head=3, vocab_size=V, max_seq_len=48)
    model = disturbed(CausalLM(cfg), 0.1).double().eval()
    change(model, where)
    ids = torch.randint(V, (2, 9))
    with torch.no_grad():
        expected = model(ids)
    for cuts in (range(1, 9), [2, 4]):
        assert_equal(feed(model, ids, cuts, "x"), expected)


def assert_folds(model, mode="auto"):
    """The folded copy computes the same, whole and by tokens."""
    ids = torch.randint(V, (2, 9))
    with torch.no_grad():
        expected = model(ids)
        short = model.fold()
        assert_equal(short(ids), expected)
    assert_equal(feed(short, ids, range(1, 9), mode), expected)
    return short


@pytest.mark.parametrize("where", ["attention.query", "attention.key", "mlp.up", "mlp.down"])
@pytest.mark.parametrize("change", [subclassed, wrapped, parametrised, hooked, sharing])
@pytest.mark.parametrize("block", ["pre-ln", "sas", "sas-p"])
def test_folding_leaves_what_is_not_ours(block, change, where):
    model = make(block)
    change(model, where)
    assert_folds(model)


@pytest.mark.parametrize("where", ["attention", "mlp", "attention.value", "attention.mixing"])
@pytest.mark.parametrize("block", ["sas", "sas-p"])
def test_folding_leaves_what_is_hooked(block, where):
    model = make(block)
    hooked(model, where)
    assert_folds(model)


def test_folding_leaves_shared_modules_and_blocks_of_ones_own():
    model = make("sas")
    model.blocks[1].mlp = model.blocks[0].mlp
    short = assert_folds(model)
    assert isinstance(short.blocks[0].beta_ff, torch.nn.Parameter)
    assert short.blocks[2].beta_ff == 1.0
    model = make("sas")
    model.blocks[1].__class__ = OwnBlock
    ids = torch.randint(V, (2, 9))
    with torch.no_grad():
        assert_equal(model.fold()(ids), model(ids))
        assert_equal(model.fold().fold()(ids), model(ids))


@pytest.mark.parametrize("mode", ["kx", "x"])
@pytest.mark.parametrize("where", ["attention", "attention.query", "attention.key", "mlp", "mlp.up"])
@pytest.mark.parametrize("block", ["sas", "sas-p"])
def test_what_is_hooked_or_replaced_after_folding_is_called(block, where, mode):
    model = make(block).fold()
    ids, one = torch.randint(V, (2, 9)), torch.randint(V, (2, 1))
    cache = model.new_cache(2, mode=mode)
    model(ids, cache=cache)
    expected, calls = model(ids), []
    handle = model.blocks[0].get_submodule(where).register_forward_hook(lambda *_: calls.append(1))
    assert_equal(model(ids), expected)
    assert len(calls) == 1
    model(one, cache=cache)
    assert len(calls) > 1
    handle.remove()
    if "." in where:
        wrapped(model, where)
        assert not torch.allclose(model(ids), expected)


@pytest.mark.parametrize("along", ["rows", "columns", "part of the columns"])
@pytest.mark.parametrize("shape", [(1,), (1, 1), (3, 2), (16,), (17,), (0,), (2, 3, 1)])
@pytest.mark.parametrize(("rows", "columns"), [(512, 520), (520, 512), (513, 521), (1000, 264)])
def test_slabs_are_a_product(rows, columns, shape, along):
    """Value and gradients, with a bias and without, for any layout, number of rows and sizes."""
    weight = torch.randn(rows, columns, dtype=torch.float64)
    if along != "rows":
        weight = torch.randn(columns, rows + 8, dtype=torch.float64)[:, 8 * (along != "columns") :][:, :rows].mT
    x = torch.randn(*shape, columns, dtype=torch.float64)
    for bias in (None, torch.randn(rows, dtype=torch.float64)):
        given = [one.detach().requires_grad_() for one in (x, weight, *([] if bias is None else [bias]))]
        got, expected = slabs.slab_product(*given), torch.nn.functional.linear(*given)
        assert got.shape == expected.shape
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
        probe = torch.randn_like(got)
        torch.testing.assert_close(torch.autograd.grad(got, given, probe), torch.autograd.grad(expected, given, probe))


def test_few_rows_go_by_slabs(monkeypatch):
    """What is fast is used: the products of a folded model's token, and no plain one."""
    monkeypatch.setattr(slabs, "LARGE_MATRIX", 0)
    model = make("sas-p").fold()
    cache = model.new_cache(1)
    model(torch.zeros(1, 4, dtype=torch.long), cache=cache)
    calls = []
    monkeypatch.setattr(slabs.F, "linear", lambda *given: calls.append(given))
    model(torch.zeros(1, 1, dtype=torch.long), cache=cache)
    assert not calls
