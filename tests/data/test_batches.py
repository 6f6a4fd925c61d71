"""Inputs and labels of a batch, as numpy arrays."""

import subprocess
import sys

import numpy as np
import pytest

from skipless.data import prepare
from skipless.data.batches import held_out_batch, training_batch
from tests.helpers.processes import ROOT
from tests.helpers.tiny_runs import MASKED, tiny


@pytest.mark.parametrize("module", ["skipless.data", "skipless.data.batches", "skipless.training.observer"])
def test_it_does_not_load_torch(module):
    script = f"import sys, {module}; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert out == "False\n"


@pytest.mark.parametrize("changes", [{}, MASKED], ids=["causal", "masked"])
def test_batches_are_arrays_that_follow_from_the_numbers_of_their_sequences(source, cache_dir, changes):
    cfg = tiny(source, changes)
    corpus = prepare(cfg.data, cache_dir=cache_dir)
    whole = training_batch(cfg, corpus, 10, 6)
    for array, tail in zip(whole, training_batch(cfg, corpus, 13, 3), strict=True):
        assert isinstance(array, np.ndarray)
        assert (array.dtype, array.shape) == (np.int64, (6, 16))
        assert np.array_equal(array[3:], tail)
    other = training_batch(cfg.override({"train.seed": 1}), corpus, 10, 6)
    assert not np.array_equal(whole[0], other[0])


def test_the_label_of_a_causal_model_is_the_next_token(source, cache_dir):
    cfg = tiny(source)
    corpus = prepare(cfg.data, cache_dir=cache_dir)
    for ids, labels in (
        training_batch(cfg, corpus, 0, 4),
        held_out_batch(cfg, corpus, corpus.valid, np.arange(4), 0),
    ):
        assert np.array_equal(ids[:, 1:], labels[:, :-1])


def test_the_mask_of_a_held_out_row_follows_its_number_in_the_evaluation(source, cache_dir):
    cfg = tiny(source, MASKED)
    corpus = prepare(cfg.data, cache_dir=cache_dir)
    rows = np.arange(8)
    _, held_out = held_out_batch(cfg, corpus, corpus.train, rows, 0)
    _, again = held_out_batch(cfg, corpus, corpus.train, rows[4:], 4)
    assert np.array_equal(held_out[4:], again)
    _, elsewhere = held_out_batch(cfg, corpus, corpus.train, rows[4:], 0)
    assert not np.array_equal(held_out[4:], elsewhere)


def test_a_held_out_row_has_a_mask_that_no_training_uses(source, cache_dir):
    """What is hidden in row n of an evaluation is not what a training with seed 0 hides in its sequence n."""
    cfg = tiny(source, MASKED, {"train.seed": 0})
    corpus = prepare(cfg.data, cache_dir=cache_dir)
    _, trained = training_batch(cfg, corpus, 0, 8)
    _, held_out = held_out_batch(cfg, corpus, corpus.valid, np.arange(8), 0)
    assert not any(np.array_equal(one != -100, other != -100) for one, other in zip(trained, held_out, strict=True))
