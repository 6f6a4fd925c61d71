"""Figures 5, 6 and 8: the simplified blocks beside the standard ones, over run time, depth and length of training."""

from collections.abc import Mapping

from skipless.experiments.claims import Claim, at_equal_time, compare, faster, throughout
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
    quicker = "“SAS-P trains even faster in terms of runtime compared to the SAS and Pre-LN blocks”"
    return [
        matches("sas", "pre-ln", per_step),
        matches("sas-p", "pre-ln", per_step),
        at_equal_time(
            "sas matches or beats pre-ln in run time",
            "“our models match (or even slightly outperform) the Pre-LN block”",
            "sas",
            "pre-ln",
            below=MATCH,
        ),
        at_equal_time("sas-p matches or beats pre-ln in run time", quicker, "sas-p", "pre-ln", below=MATCH),
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
    def gap_growth(seed: Mapping[str, History]) -> float:
        shallow, deep = (seed[f"v-skipinit, {kind}"].valid_loss / seed[f"pre-ln, {kind}"].valid_loss for kind in DEPTHS)
        return deep - shallow

    improve = [
        compare(
            f"{block} improves with depth",
            "“scaling depth from 18 to 72 blocks leads to an increase in performance in our models as well as the "
            "Pre-LN transformer”",
            f"{block}, deep",
            f"{block}, shallow",
            below=0,
        )
        for block in ("pre-ln", "sas", "sas-p")
    ]
    alike = [
        Claim(
            f"{block}, {kind} follows pre-ln, {kind} throughout the training",
            "“the per-update trajectories … are near-indistinguishable across depths, when using normalisation”",
            (f"{block}, {kind}", f"pre-ln, {kind}"),
            throughout(f"{block}, {kind}", f"pre-ln, {kind}"),
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
            "the gap between v-skipinit and pre-ln grows with depth",
            "“the gap in performance between Value-SkipInit and the other models increases with larger depth”",
            tuple(f"{block}, {kind}" for block in ("v-skipinit", "pre-ln") for kind in DEPTHS),
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
