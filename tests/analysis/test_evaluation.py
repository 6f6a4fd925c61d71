"""Held-out loss: a mean over predicted tokens, without dropout, on rows that tuning does not see."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skipless.analysis.evaluation import evaluate, judged_and_tuning_rows, spread
from skipless.data import prepare
from skipless.data.batches import held_out_batch
from skipless.runs import MODELS
from skipless.training.trainer import fit_vocabulary
from tests.helpers.tiny_runs import MASKED, tiny
from tests.helpers.weights import disturbed


@pytest.fixture(params=[{}, MASKED], ids=["causal", "masked"])
def held_out(request, source, cache_dir):
    """A configuration, its corpus and a model with dropout."""
    cfg = tiny(source, request.param, {"model.dropout": 0.5})
    corpus = prepare(cfg.data, cache_dir=cache_dir)
    cfg = fit_vocabulary(cfg, corpus)
    torch.manual_seed(0)
    return cfg, corpus, disturbed(MODELS[cfg.task](cfg.model), 0.1)


@pytest.mark.parametrize("size", [1, 3, 7])
def test_the_loss_is_the_mean_over_predicted_tokens(held_out, size):
    """Whatever the batches are: the last one may be smaller, and masked ones differ in what they predict."""
    cfg, corpus, model = held_out
    rows = spread(len(corpus.valid), 7)
    ids, labels = (torch.from_numpy(part) for part in held_out_batch(cfg, corpus, corpus.valid, rows, 0))
    with torch.no_grad():
        expected = model.eval().loss(ids, labels).item()
    found = evaluate(model, cfg, corpus, rows=rows, batch_size=size)
    assert found.loss == pytest.approx(expected, rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(found.loss))
    assert (found.sequences, found.tokens) == (7, int((labels != -100).sum()))


@pytest.mark.parametrize("training", [True, False])
def test_there_is_no_dropout_and_the_model_is_left_as_it_was(held_out, training):
    cfg, corpus, model = held_out
    model.train(training)
    rows = np.arange(4)
    first, second = (evaluate(model, cfg, corpus, rows=rows) for _ in range(2))
    assert first == second
    assert model.training == training


def test_bits_per_byte_are_those_of_the_text(held_out):
    cfg, corpus, model = held_out
    found = evaluate(model, cfg, corpus, rows=np.arange(4))
    if cfg.task == "masked":
        assert found.bits_per_byte is None
    else:
        bits_per_token = found.loss / math.log(2)
        bytes_per_token = corpus.valid.n_bytes / corpus.valid.n_tokens
        assert found.bits_per_byte == pytest.approx(bits_per_token / bytes_per_token)


@given(st.integers(1, 60), st.integers(1, 20), st.integers(0, 20))
def test_no_row_is_both_judged_and_tuned_by(n_rows, judged, tuning):
    chosen, others = judged_and_tuning_rows(n_rows, judged, tuning)
    assert not set(chosen) & set(others)
    assert len(set(chosen)) == len(chosen)
    assert len(chosen) >= 1
    assert {*chosen, *others} <= set(range(n_rows))
    if judged + tuning <= n_rows:
        assert (len(chosen), len(others)) == (judged, tuning)
