"""All experiments: the paper's, in its order, then our own."""

from skipless.experiments import baseline, figures  # they register themselves
from skipless.experiments.experiment import EXPERIMENTS

__all__ = ["EXPERIMENTS", "baseline", "figures"]
