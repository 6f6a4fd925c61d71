"""Figures 2 to 4: attention without its skip, and what W^V and W^P have to do with it."""

from collections.abc import Callable, Mapping, Sequence

from skipless.experiments.claims import Claim, compare
from skipless.experiments.evidence import Evidence, History, final_ratios
from skipless.experiments.experiment import Configs, experiment
from skipless.experiments.outcome import Plot
from skipless.experiments.papers.simplifying.bounds import (
    MATCH,
    MOST,
    NEARLY_ALL,
    NUMBER,
    SHARE,
    SMALL_RATIO,
    beats,
    clearly_behind,
    decoders,
    losses,
    matches,
)
from skipless.experiments.report.series import loss_plot, ratio_plot, swept_plot
from skipless.experiments.scale import Scale
from skipless.recipes.variants import BETAS


@experiment(
    "fig2",
    "Attention without its skip trains slower",
    "Without the attention skip, V-SkipInit and Shaped Attention train clearly slower per step than Pre-LN; "
    "training and evaluation loss are nearly equal.",
    decoders("pre-ln", "v-skipinit", "sas-dense-orthogonal"),
    losses("fig2", "Loss of training speed without the attention skip"),
)
def _fig2(scale: Scale) -> list[Claim]:
    blocks = ("pre-ln", "v-skipinit", "sas-dense-orthogonal")

    def largest_gap(seed: Mapping[str, History]) -> float:
        return max(abs(seed[block].valid_loss / seed[block].train_loss - 1) for block in blocks)

    return [
        clearly_behind(
            "v-skipinit", "pre-ln", "“a significant loss of training speed per step compared to the Pre-LN block”"
        ),
        clearly_behind(
            "sas-dense-orthogonal",
            "pre-ln",
            "“loss of training speed in transformers without attention sub-block skip, even with Shaped Attention”",
        ),
        Claim(
            "training and held-out loss are nearly equal (the largest gap of the three)",
            "“sufficiently large that we are in a single epoch regime with minimal generalisation gap”",
            blocks,
            largest_gap,
            below=MATCH,
        ),
    ]


# -------------------------------------------------------------------------------- figure 3


def swept_betas(scale: Scale) -> tuple[float, ...]:
    """β_V = β_P that are trained at a scale; the laptop's few are enough for the claims."""
    return BETAS if scale.is_paper else (0.0, 0.2, 1.0)


def fig3_configs(scale: Scale) -> Configs:
    """Skipless attention with V and P of equation 6, over β and W_init; and Pre-LN."""
    names = [f"sas-{init}-{beta:g}" for init in ("identity", "orthogonal") for beta in swept_betas(scale)]
    return decoders("pre-ln", *names)(scale)


def beta_plots(
    key: str, inits: Sequence[str], betas: Callable[[Scale], tuple[float, ...]]
) -> Callable[[Scale, Evidence], list[Plot]]:
    """Final loss over β, a line for each W_init."""

    def plots(scale: Scale, evidence: Evidence) -> list[Plot]:
        values = betas(scale)
        lines = {init: {beta: f"sas-{init}-{beta:g}" for beta in values} for init in inits}
        lines["pre-ln"] = dict.fromkeys((values[0], values[-1]), "pre-ln")
        title = "Final loss over the weight of ΔW in W^V and W^P"
        return [
            swept_plot(evidence, key, title, "β_V = β_P", lines, log_x=False),
            loss_plot(evidence, f"{key}-curves", "Held-out loss"),
        ]

    return plots


def recovered(slow: str, mended: str, reference: str) -> Callable[[Mapping[str, History]], float]:
    """How much of the gap between a block and the reference another one closes; no number where there is no gap."""

    def quantity(seed: Mapping[str, History]) -> float:
        gap = seed[slow].valid_loss - seed[reference].valid_loss
        return (seed[slow].valid_loss - seed[mended].valid_loss) / gap if gap > 0 else float("nan")

    return quantity


@experiment(
    "fig3",
    "Small updates of W^V and W^P recover the speed",
    "Smaller β_V = β_P recover the speed that skipless attention lost; identity beats orthogonal W_init; identity with "
    "β = 0, no V and P at all, matches Pre-LN.",
    fig3_configs,
    beta_plots("fig3", ("identity", "orthogonal"), swept_betas),
)
def _fig3(scale: Scale) -> list[Claim]:
    pairs = [(f"sas-identity-{beta:g}", f"sas-orthogonal-{beta:g}") for beta in swept_betas(scale)]

    def worst_pair(seed: Mapping[str, History]) -> float:
        return max(seed[first].valid_loss / seed[second].valid_loss - 1 for first, second in pairs)

    return [
        Claim(
            "orthogonal W_init: β = 0.2 closes most of the gap between β = 1 and pre-ln",
            "smaller β “already restores much of the training speed loss in skipless attention-blocks, using "
            "orthogonally initialised” W_init",
            ("sas-orthogonal-1", "sas-orthogonal-0.2", "pre-ln"),
            recovered("sas-orthogonal-1", "sas-orthogonal-0.2", "pre-ln"),
            above=MOST,
            one_seed=0.2,
            form=SHARE,
        ),
        beats("sas-identity-0", "sas-identity-1", "the same with identity W_init, down to β = 0 (figure 3)"),
        Claim(
            "identity W_init ends lower than orthogonal at every β (the worst of them)",
            "“we see a consistent improvement over orthogonal initialisation”",
            tuple(label for pair in pairs for label in pair),
            worst_pair,
            below=0,
        ),
        matches("sas-identity-0", "pre-ln", "“we essentially match the Pre-LN block performance”"),
    ]


# -------------------------------------------------------------------------------- figure 4


def small_share(label: str) -> Callable[[Mapping[str, History]], float]:
    """The share of value and projection maps whose |β/α| ends below the paper's threshold."""

    def quantity(seed: Mapping[str, History]) -> float:
        ratios = final_ratios(seed[label])
        return sum(ratio < SMALL_RATIO for ratio in ratios.values()) / len(ratios)

    return quantity


def shrinks(label: str, paper: str, least: float = NEARLY_ALL) -> Claim:
    """The claim that β/α goes to 0 in most maps."""
    text = f"{label}: β/α of V and P ends below {SMALL_RATIO} in at least {least:.0%} of the maps"
    return Claim(text, paper, (label,), small_share(label), above=least - 1e-9, one_seed=0.05, form=SHARE)


def only_the_first_value(label: str, paper: str) -> list[Claim]:
    """The claims that the first layer's value keeps its β/α above the threshold, and that nothing else does."""

    def first(seed: Mapping[str, History]) -> float:
        return final_ratios(seed[label])["value 1"]

    def others(seed: Mapping[str, History]) -> float:
        ratios = final_ratios(seed[label])
        return float(sum(ratio >= SMALL_RATIO for name, ratio in ratios.items() if name != "value 1"))

    return [
        Claim(
            f"{label}: β/α of the first layer's value ends above {SMALL_RATIO}",
            paper,
            (label,),
            first,
            above=SMALL_RATIO,
            one_seed=0.01,
            form=NUMBER,
        ),
        Claim(
            f"{label}: no other ratio ends above {SMALL_RATIO} (how many do)",
            paper,
            (label,),
            others,
            below=0.5,
            one_seed=1.0,
            form=NUMBER,
        ),
    ]


@experiment(
    "fig4",
    "Trained gains on W^V and W^P go to zero",
    "With α and β of V and P trained from 1 and 0.2, β/α goes to 0 in nearly all layers; only the first layer's value "
    "stays above 0.05; evaluation loss 1.194 against 1.178 with identity V and P.",
    decoders("sas-gains", "sas-identity-0"),
    lambda scale, evidence: [
        ratio_plot(evidence, "sas-gains", "fig4", "Residual-skip gain ratios of V and P in sas-gains"),
        loss_plot(evidence, "fig4-loss", "Held-out loss"),
    ],
)
def _fig4(scale: Scale) -> list[Claim]:
    return [
        shrinks("sas-gains", "the ratios “converge to 0 for the vast majority of layers”"),
        *only_the_first_value("sas-gains", "the first value “is the only ratio above 0.05”"),
        compare(
            "trained V and P end higher than identity V and P",
            "“achieved worse final evaluation loss … (1.194 vs. 1.178)” (+1.4%)",
            "sas-gains",
            "sas-identity-0",
            above=0,
        ),
    ]
