"""Language modelling on books: Languini, in the appendix."""

import math
from functools import partial
from typing import Any

from skipless.experiments.claims import Claim, at_equal_time, compare, counted
from skipless.experiments.evidence import Evidence, History
from skipless.experiments.experiment import experiment
from skipless.experiments.outcome import Plot
from skipless.experiments.papers.simplifying.bounds import paper_parameters
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
    of_sas_p = "(the paper says it of SAS alone)"
    return [
        compare("sas ends with parallel's perplexity", same, "sas", "parallel", measure=perplexity, **match),
        compare("sas-p ends with it as well", of_sas_p, "sas-p", "parallel", measure=perplexity, own=True, **match),
        *(
            at_equal_time(f"{block} has {other}'s perplexity in run time", time, block, other, of=math.exp, **match)
            for block in ("sas", "sas-p")
            for other in ("pre-ln", "parallel")
        ),
        counted(
            "sas has about 15% fewer parameters than parallel, in the paper's model",
            "“despite using 15% fewer parameters”",
            ("sas", "parallel"),
            partial(paper_parameters, "languini"),
            above=-0.16,
            below=-0.135,
        ),
    ]
