"""Language modelling on books: Languini, in the appendix."""

import math
from typing import Any

from skipless.experiments.claims import Claim, at_equal_time, compare
from skipless.experiments.evidence import Evidence, History
from skipless.experiments.experiment import experiment
from skipless.experiments.outcome import Plot
from skipless.experiments.report.series import loss_plot
from skipless.experiments.scale import Scale

PERPLEXITY_MATCH = 0.05
"""Perplexities at most 5% apart match: some 1.2% of the loss."""


def _plots(scale: Scale, evidence: Evidence) -> list[Plot]:
    label = "held-out perplexity per token"
    return [loss_plot(evidence, "languini", "Books", "minutes", measure="valid_perplexity", label=label)]


def perplexity(history: History) -> float:
    """Held-out perplexity per token."""
    return history.perplexity


@experiment(
    "languini",
    "Language modelling on books",
    "SAS and SAS-P match Pre-LN and Parallel in run time at 512 tokens with ALiBi; after 19K steps SAS has a "
    "perplexity of 22.37, Parallel 22.39, with 15% fewer parameters.",
    lambda scale: {block: scale.run("books", block) for block in ("pre-ln", "parallel", "sas", "sas-p")},
    _plots,
)
def _languini(scale: Scale) -> list[Claim]:
    time = "“our models are able to match the training speed of default Pre-LN and Parallel blocks”"
    same = "“achieves the same final perplexity … (22.37 vs 22.39) as the Parallel block”"
    match: dict[str, Any] = {"above": -PERPLEXITY_MATCH, "below": PERPLEXITY_MATCH, "better": "low"}
    final = [
        compare(f"{block} ends with parallel's perplexity", paper, block, "parallel", measure=perplexity, **match)
        for block, paper in {"sas": same, "sas-p": "as SAS does (figure of perplexity over run time)"}.items()
    ]
    return [
        *final,
        *(
            at_equal_time(f"{block} has {other}'s perplexity in run time", time, block, other, of=math.exp, **match)
            for block in ("sas", "sas-p")
            for other in ("pre-ln", "parallel")
        ),
    ]
