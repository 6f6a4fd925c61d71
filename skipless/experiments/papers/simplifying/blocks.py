"""Figures 5, 6 and 8: the simplified blocks beside the standard ones, over run time, depth and length of training."""

from collections.abc import Mapping
from functools import partial

from skipless.experiments.claims import (
    LEARNING_RATE_STEP,
    Claim,
    apart,
    at_equal_time,
    compare,
    counted,
    faster,
    learning_rates,
)
from skipless.experiments.evidence import History
from skipless.experiments.experiment import Configs, experiment
from skipless.experiments.papers.simplifying.bounds import (
    MATCH,
    SIX,
    decoders,
    losses,
    matches,
    matches_in_time,
    matches_or_beats,
    paper_parameters,
    slightly_behind,
)
from skipless.experiments.scale import Scale
from skipless.experiments.timings import PAPER_DECODER


@experiment(
    "fig5",
    "Six blocks over run time and over steps",
    "SAS and SAS-P match or beat Pre-LN in run time and per step; without norms the block matches in run time and is "
    "slightly worse per step.",
    decoders(*SIX),
    losses("fig5", "Training speed", "minutes"),
)
def _fig5(scale: Scale) -> list[Claim]:
    per_step = "“essentially match the Pre-LN model in terms of loss reduction per step”"
    in_time = "“our models match (or even slightly outperform) the Pre-LN block”"
    tuned = "the optimal learning rate of SAS and SAS-P “exactly matched that of the default Pre-LN”"
    quicker = "“SAS-P trains even faster in terms of runtime compared to the SAS and Pre-LN blocks”"
    return [
        matches("sas", "pre-ln", per_step),
        matches("sas-p", "pre-ln", per_step),
        *(
            at_equal_time(f"{block} matches or beats pre-ln in run time", in_time, block, "pre-ln", below=MATCH)
            for block in ("sas", "sas-p")
        ),
        *(
            at_equal_time(f"sas-p is below {block} in run time", quicker, "sas-p", block, below=0)
            for block in ("sas", "pre-ln")
        ),
        matches_in_time(
            "sas-p", "parallel", "“matches the training speed of the parallel block despite using 13% fewer parameters”"
        ),
        slightly_behind(
            "sas-p-nonorm", "sas-p", "“a slight degradation in training speed per iteration” without norms"
        ),
        matches_in_time(
            "sas-p-nonorm",
            "pre-ln",
            "without norms “to match the training speed of the Pre-LN block in terms of runtime”",
        ),
        faster("sas", "pre-ln", "“speeds (slightly) outperforming the default Pre-LN transformer”", PAPER_DECODER),
        faster("sas-p", "pre-ln", quicker, PAPER_DECODER),
        faster("sas-p", "sas", quicker, PAPER_DECODER),
        counted(
            "sas-p has about 13% fewer parameters than parallel, in the paper's decoder",
            "“matches the training speed of the parallel block despite using 13% fewer parameters”",
            ("sas-p", "parallel"),
            partial(paper_parameters, "codeparrot"),
            above=-0.135,
            below=-0.12,
        ),
        *(
            learning_rates(
                f"{block} was tuned to pre-ln's learning rate, to half a step of the paper's grid (a factor of 1.8)",
                tuned,
                block,
                "pre-ln",
                above=LEARNING_RATE_STEP**-0.5,
                below=LEARNING_RATE_STEP**0.5,
            )
            for block in ("sas", "sas-p")
        ),
    ]


# -------------------------------------------------------------------------------- figure 6

FOUR = ("pre-ln", "v-skipinit", "sas", "sas-p")
DEPTHS = ("shallow", "deep")


def _fig6_configs(scale: Scale) -> Configs:
    return {f"{block}, {kind}": scale.run(kind, block) for block in FOUR for kind in DEPTHS}


@experiment(
    "fig6",
    "Depth",
    "From 18 to 72 layers (MLP of width 2d) Pre-LN, SAS and SAS-P improve; V-SkipInit gets worse.",
    _fig6_configs,
    losses("fig6", "Shallow and deep"),
)
def _fig6(scale: Scale) -> list[Claim]:
    others = ("pre-ln", "sas", "sas-p")

    def gap_growth(seed: Mapping[str, History]) -> float:
        shallow, deep = (
            [seed[f"v-skipinit, {kind}"].valid_loss / seed[f"{block}, {kind}"].valid_loss for block in others]
            for kind in DEPTHS
        )
        return min(d - s for d, s in zip(deep, shallow, strict=True))

    improve = [
        compare(
            f"{block} improves with depth",
            "“scaling depth from 18 to 72 blocks leads to an increase in performance in our models as well as the "
            "Pre-LN transformer”",
            f"{block}, deep",
            f"{block}, shallow",
            below=0,
        )
        for block in others
    ]
    alike = [
        Claim(
            f"{block}, {kind} follows pre-ln, {kind} throughout the training",
            "“the per-update trajectories … are near-indistinguishable across depths, when using normalisation”",
            (f"{block}, {kind}", f"pre-ln, {kind}"),
            apart(f"{block}, {kind}", f"pre-ln, {kind}"),
            above=-MATCH,
            below=MATCH,
            better="low",
        )
        for block in ("sas", "sas-p")
        for kind in DEPTHS
    ]
    return [
        *improve,
        *alike,
        compare(
            "v-skipinit gets worse with depth",
            "“actually trains slower per update at depth 72 compared to 18”",
            "v-skipinit, deep",
            "v-skipinit, shallow",
            above=0,
        ),
        Claim(
            "the gap between v-skipinit and each of the others grows with depth (the one that grows least)",
            "“the gap in performance between Value-SkipInit and the other models increases with larger depth”",
            tuple(f"{block}, {kind}" for block in ("v-skipinit", *others) for kind in DEPTHS),
            gap_growth,
            above=0,
        ),
    ]


@experiment(
    "fig8",
    "Three times the tokens",
    "SAS and SAS-P go on matching or beating Pre-LN when trained on three times the tokens.",
    lambda scale: {block: scale.run("long", block) for block in ("pre-ln", "sas", "sas-p")},
    losses("fig8", "Longer training"),
)
def _fig8(scale: Scale) -> list[Claim]:
    paper = "“continue to match or outperform the Pre-LN block in training speed when trained on more tokens”"
    return [matches_or_beats(block, "pre-ln", paper) for block in ("sas", "sas-p")]
