"""The official metrics of GLUE against scikit-learn and scipy."""

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skipless.tasks.metrics import METRICS

sklearn = pytest.importorskip("sklearn.metrics")
stats = pytest.importorskip("scipy.stats")

JUDGES = {
    "accuracy": lambda p, t: sklearn.accuracy_score(t, p),
    "f1": lambda p, t: sklearn.f1_score(t, p, zero_division=0.0),
    "macro_f1": lambda p, t: sklearn.f1_score(t, p, average="macro", zero_division=0.0),
    "matthews": lambda p, t: sklearn.matthews_corrcoef(t, p),
    "pearson": lambda p, t: stats.pearsonr(p, t).statistic,
    "rmse": lambda p, t: sklearn.root_mean_squared_error(t, p),
    "spearman": lambda p, t: stats.spearmanr(p, t).statistic,
}
CLASSES = ["accuracy", "f1", "macro_f1", "matthews"]
NUMBERS = ["pearson", "spearman"]


def judge(name, predicted, true):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scipy warns of constants, and says nan
        return float(np.nan_to_num(JUDGES[name](predicted, true), nan=0.0))


def test_every_metric_has_a_judge():
    assert set(JUDGES) == set(METRICS)


@pytest.mark.parametrize("name", CLASSES)
@settings(deadline=None)
@given(pairs=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=60))
def test_classes(name, pairs):
    predicted, true = (np.array(column) for column in zip(*pairs, strict=True))
    assert METRICS[name](predicted, true) == pytest.approx(judge(name, predicted, true), abs=1e-12)


@settings(deadline=None)
@given(pairs=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=60))
def test_several_classes(pairs):
    predicted, true = (np.array(column) for column in zip(*pairs, strict=True))
    assert METRICS["macro_f1"](predicted, true) == pytest.approx(judge("macro_f1", predicted, true), abs=1e-12)


@pytest.mark.parametrize("name", [*NUMBERS, "rmse"])
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("ties", [False, True])
def test_numbers(name, seed, ties):
    rng = np.random.default_rng(seed)
    true = rng.uniform(0, 5, 80)
    predicted = (true + rng.normal(0, 1 + seed, 80)).astype(np.float32)
    if ties:
        true, predicted = true.round(), predicted.round()
    assert METRICS[name](predicted, true) == pytest.approx(judge(name, predicted, true), abs=1e-6)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [0.0, 2.7, 1e9, 0.1])
def test_a_constant_prediction_has_no_correlation(name, value):
    true = np.array([0.0, 1.0, 2.5, 5.0])
    constant = np.full(4, value, dtype=np.float32)
    assert METRICS[name](constant, true) == judge(name, constant, true) == 0.0
    assert METRICS[name](true, constant) == 0.0


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("predicted", [0, 1])
@pytest.mark.parametrize("true", [[0, 0, 0], [1, 1, 1], [0, 1, 1]])
def test_one_class_only(name, predicted, true):
    one, other = np.full(3, predicted), np.array(true)
    assert METRICS[name](one, other) == pytest.approx(judge(name, one, other), abs=1e-12)


def test_an_error_is_in_the_units_of_the_answers():
    true = np.array([0.0, 1.0, 3.0, 4.0])
    assert METRICS["rmse"](true, true) == 0
    assert METRICS["rmse"](true + 2, true) == pytest.approx(2)


@pytest.mark.parametrize("name", [name for name in METRICS if name != "rmse"])
def test_perfect_and_opposite(name):
    true = np.array([0, 1, 1, 0, 1])
    assert METRICS[name](true, true) == pytest.approx(1)
    assert METRICS[name](1 - true, true) == pytest.approx(-1 if name in ("matthews", *NUMBERS) else 0)
