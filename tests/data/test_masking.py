import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipless.data import mask_tokens
from skipless.errors import UserError

SPECIALS = (0, 1, 2, 3, 4)
OPTIONS = {"mask_id": 4, "vocab_size": 1000, "special_ids": SPECIALS}


def make_ids(rows, length, seed=0, low=5):
    return np.random.default_rng(seed).integers(low, 1000, (rows, length))


@given(
    rows=st.integers(1, 6),
    length=st.integers(1, 40),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**63),
    first=st.integers(0, 2**40),
    low=st.sampled_from([0, 5]),
)
def test_what_holds_of_every_masking(rows, length, share, seed, first, low):
    ids = make_ids(rows, length, seed % 1000, low)
    ids[:, ::3] = 3
    before = ids.copy()
    inputs, labels = mask_tokens(ids, seed=seed, first=first, share=share, **OPTIONS)
    chosen = labels != -100
    special = np.isin(ids, SPECIALS)
    assert np.array_equal(ids, before)
    assert inputs.dtype == labels.dtype == np.int64
    assert not (chosen & special).any()
    assert np.array_equal(chosen.sum(1), np.minimum(round(share * length), (~special).sum(1)))
    assert np.array_equal(inputs[~chosen], ids[~chosen])
    assert np.array_equal(labels[chosen], ids[chosen])
    assert set(inputs[chosen].tolist()) & set(SPECIALS) <= {4}
    assert inputs.max() < 1000


@given(seed=st.integers(0, 2**32), first=st.integers(0, 2**32), cut=st.integers(0, 12))
def test_a_row_does_not_depend_on_its_batch(seed, first, cut):
    ids = make_ids(12, 20)
    whole = mask_tokens(ids, seed=seed, first=first, **OPTIONS)
    head = mask_tokens(ids[:cut], seed=seed, first=first, **OPTIONS)
    tail = mask_tokens(ids[cut:], seed=seed, first=first + cut, **OPTIONS)
    for together, start, end in zip(whole, head, tail, strict=True):
        assert np.array_equal(together, np.concatenate([start, end]))


def test_eighty_ten_ten():
    ids = make_ids(400, 128)
    inputs, labels = mask_tokens(ids, seed=1, first=0, **OPTIONS)
    chosen = labels != -100
    n = chosen.sum()
    assert n == 400 * 32
    masked, kept = (inputs[chosen] == 4).sum(), (inputs[chosen] == ids[chosen]).sum()
    for count, p in ((masked, 0.8), (kept, 0.1), (n - masked - kept, 0.1)):
        assert abs(count - p * n) < 4 * np.sqrt(n * p * (1 - p)) + n * 0.1 / 995


def test_positions_and_replacements_are_uniform():
    ids = np.full((4000, 16), 7)
    inputs, labels = mask_tokens(ids, seed=2, first=0, mask_id=4, vocab_size=15, special_ids=SPECIALS)
    by_position = (labels != -100).sum(0)
    assert ((by_position - 1000) ** 2 / 750).sum() < 43  # 15 degrees of freedom, p = 0.0002
    replaced = np.bincount(inputs[(inputs != 7) & (inputs != 4)], minlength=15)
    expected = 16_000 * 0.1 / 10
    assert replaced[:5].sum() == replaced[7] == 0
    assert ((replaced[[5, 6, *range(8, 15)]] - expected) ** 2 / expected).sum() < 30


def test_seeds_and_numbers_change_the_choice():
    ids = make_ids(1, 64)
    draws = [mask_tokens(ids, seed=s, first=f, **OPTIONS)[1].tobytes() for s, f in [(0, 0), (1, 0), (0, 1)]]
    assert len(set(draws)) == 3


def test_bad_input():
    ids = make_ids(1, 8)
    with pytest.raises(UserError, match="tokenizer with a mask token, and this one has none"):
        mask_tokens(ids, seed=0, first=0, mask_id=None, vocab_size=1000, special_ids=())
    with pytest.raises(UserError, match=r"between 0 and 1, got 1\.5"):
        mask_tokens(ids, seed=0, first=0, share=1.5, **OPTIONS)
    with pytest.raises(UserError, match="no ordinary token"):
        mask_tokens(ids, seed=0, first=0, mask_id=4, vocab_size=5, special_ids=SPECIALS)
