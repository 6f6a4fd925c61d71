import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipless.data import Tokens
from skipless.data.counter_rng import mix, permute, uniform
from skipless.errors import UserError


@pytest.fixture
def make(tmp_path):
    def tokens(n, packing="stream", seq_len=4, dtype="uint16"):
        path = tmp_path / "t.bin"
        np.arange(n, dtype=np.dtype(dtype).newbyteorder("<")).tofile(path)
        return Tokens(path, dtype, seq_len, packing)

    return tokens


@given(n=st.integers(1, 500), seed=st.integers(-(2**63), 2**64))
def test_the_permutation_is_one(n, seed):
    assert sorted(permute(np.arange(n), n, mix(seed))) == list(range(n))


@given(n=st.integers(1, 2**50), seed=st.integers(0, 2**64), data=st.data())
def test_the_permutation_of_a_large_range_stays_in_it_and_repeats_nothing(n, seed, data):
    position = np.array(sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=50))))
    moved = permute(position, n, mix(seed))
    assert moved.max() < n
    assert len(set(moved.tolist())) == len(position)


def test_every_row_is_equally_likely_to_be_first():
    n, seeds = 10, 4000
    first = permute(np.zeros(seeds, dtype=np.int64), n, mix(np.arange(seeds)))
    counts = np.bincount(first.astype(int), minlength=n)
    assert ((counts - seeds / n) ** 2 / (seeds / n)).sum() < 27.9  # chi-squared, 9 degrees of freedom, p = 0.001


def test_neighbours_are_torn_apart():
    n = 10_000
    order = permute(np.arange(n), n, mix(0)).astype(float)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
    assert abs(np.corrcoef(order, np.arange(n))[0, 1]) < 0.05
    assert (np.abs(np.diff(order)) == 1).sum() < 20


def test_draws_are_uniform_and_depend_on_each_word():
    draw = uniform(mix(1, np.arange(20_000)))
    assert draw.min() >= 0
    assert draw.max() < 1
    counts = np.histogram(draw, bins=20, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # 19 degrees of freedom, p = 0.001
    assert len({int(mix(*words)) for words in [(1, 2), (2, 1), (1, 3), (0, 2), (1,), (1, 2, 0)]}) == 6


def test_rows_of_a_stream_overlap_by_one(make):
    tokens = make(13)
    assert (tokens.n_tokens, len(tokens), tokens.row_len) == (13, 3, 5)
    rows = tokens.rows([2, 0])
    assert rows.dtype == np.int64
    assert rows.tolist() == [[8, 9, 10, 11, 12], [0, 1, 2, 3, 4]]


def test_rows_of_chunks_do_not(make):
    tokens = make(13, "chunks")
    assert (len(tokens), tokens.row_len) == (3, 4)
    assert tokens.rows(np.arange(3)).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


@pytest.mark.parametrize(
    ("n", "packing", "rows"),
    [(0, "stream", 0), (1, "stream", 0), (4, "stream", 0), (5, "stream", 1), (3, "chunks", 0), (4, "chunks", 1)],
)
def test_the_number_of_rows(make, n, packing, rows):
    assert len(make(n, packing)) == rows


def test_wide_tokens(make):
    assert make(70_001, dtype="uint32").rows([17_499])[0, -1] == 70_000


@pytest.mark.parametrize("index", [-1, 3, 2**40])
def test_a_row_that_is_not_there(make, index):
    with pytest.raises(IndexError, match="which has 3"):
        make(13).rows([0, index])


def test_an_epoch_visits_every_row_once_and_the_next_in_another_order(make):
    tokens = make(401)
    n = len(tokens)
    epochs = [tokens.batch(7, e * n, n)[:, 0] // 4 for e in range(3)]
    for epoch in epochs:
        assert sorted(epoch.tolist()) == list(range(n))
    assert not np.array_equal(epochs[0], epochs[1])
    assert not np.array_equal(epochs[1], epochs[2])
    assert not np.array_equal(epochs[0], tokens.batch(8, 0, n)[:, 0] // 4)


@given(first=st.integers(0, 10_000), cuts=st.lists(st.integers(0, 60), max_size=5), seed=st.integers(0, 2**32))
def test_any_slicing_gives_the_same_rows(tmp_path_factory, first, cuts, seed):
    path = tmp_path_factory.getbasetemp() / "slices.bin"
    if not path.exists():
        np.arange(101, dtype="<u2").tofile(path)
    tokens = Tokens(path, "uint16", 4, "stream")
    edges = [0, *sorted(cuts), 60]
    parts = [tokens.batch(seed, first + a, b - a) for a, b in itertools.pairwise(edges)]
    assert np.array_equal(np.concatenate(parts), tokens.batch(seed, first, 60))


def test_no_rows_no_batch(make):
    with pytest.raises(UserError, match="has 3 tokens: not one row of 5"):
        make(3).batch(0, 0, 1)
    with pytest.raises(ValueError, match="numbered from 0"):
        make(13).batch(0, -1, 2)
    assert make(13).batch(0, 5, 0).shape == (0, 5)
