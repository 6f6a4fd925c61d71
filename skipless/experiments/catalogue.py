"""All experiments by id: the paper's in its order, then our own."""

from skipless.experiments import bits, checks  # they register themselves
from skipless.experiments.experiment import EXPERIMENTS as REGISTERED
from skipless.experiments.papers.simplifying import appendix, attention, bert, blocks, books, values

__all__ = ["EXPERIMENTS", "appendix", "attention", "bert", "bits", "blocks", "books", "checks", "values"]

ORDER = (
    *("fig2", "fig3", "fig4", "fig5", "fig6", "fig7", "tab1", "tab2", "fig8", "vp-lr", "schedule", "matrix"),
    *("mlp-gain", "tied", "gains", "preln-identity", "first-value", "mlp-skipless", "languini"),
)
"""The paper's experiments, in its order."""

EXPERIMENTS = {id: REGISTERED[id] for id in (*ORDER, *(id for id in REGISTERED if id not in ORDER))}
