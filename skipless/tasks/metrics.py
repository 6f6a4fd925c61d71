"""The official metrics of GLUE and two for tasks of one's own, as short as their formulas.

The tests hold them against scikit-learn and scipy.

Where a formula divides zero by zero, the value is 0: a classifier that knows one answer, or a constant prediction, has
shown no agreement beyond chance. (scikit-learn says 0 too, scipy says not a number.)
"""

from collections.abc import Callable

import numpy as np


def accuracy(predicted: np.ndarray, true: np.ndarray) -> float:
    """Share of right answers."""
    return float(np.mean(predicted == true))


def f1(predicted: np.ndarray, true: np.ndarray) -> float:
    """Harmonic mean of precision and recall of class 1."""
    hits = np.sum((predicted == 1) & (true == 1))
    named = np.sum(predicted == 1) + np.sum(true == 1)
    return float(2 * hits / named) if named else 0.0


def macro_f1(predicted: np.ndarray, true: np.ndarray) -> float:
    """Mean of F1 over the classes that are predicted or true somewhere."""
    classes = np.union1d(predicted, true)
    return float(np.mean([f1((predicted == one).astype(int), (true == one).astype(int)) for one in classes]))


def rmse(predicted: np.ndarray, true: np.ndarray) -> float:
    """Root of the mean squared error, in the units of the answers; 0 is perfect."""
    return float(np.sqrt(np.mean(np.square(predicted.astype(np.float64) - true.astype(np.float64)))))


def matthews(predicted: np.ndarray, true: np.ndarray) -> float:
    """Matthews's correlation of two classes, which is Pearson's of their numbers."""
    return pearson(predicted, true)


def pearson(predicted: np.ndarray, true: np.ndarray) -> float:
    """Linear correlation."""
    x, y = predicted.astype(np.float64), true.astype(np.float64)
    if np.ptp(x) == 0 or np.ptp(y) == 0:  # rounding could leave a spread of 1e-17 about the mean
        return 0.0
    x, y = x - x.mean(), y - y.mean()
    x, y = x / np.linalg.norm(x), y / np.linalg.norm(y)
    return float(np.clip(x @ y, -1.0, 1.0))


def spearman(predicted: np.ndarray, true: np.ndarray) -> float:
    """Correlation of the ranks."""
    return pearson(_ranks(predicted), _ranks(true))


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1; equal values share the mean of theirs."""
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[group]


METRICS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "macro_f1": macro_f1,
    "matthews": matthews,
    "pearson": pearson,
    "rmse": rmse,
    "spearman": spearman,
}
"""By name: predictions and true answers → a number; 1 is perfect, but for `rmse`."""
