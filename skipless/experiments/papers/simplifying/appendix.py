"""The appendix's other ablations: schedules, matrices, the MLP's gain, gains over training, an MLP without its skip."""

import statistics
from collections.abc import Callable, Mapping

from skipless.experiments.claims import (
    LEARNING_RATE_STEP,
    Claim,
    compare,
    differences,
    learning_rates,
    throughout,
    valid_loss,
)
from skipless.experiments.evidence import Evidence, History, final_ratios
from skipless.experiments.experiment import Configs, experiment
from skipless.experiments.outcome import Plot
from skipless.experiments.papers.simplifying.attention import only_the_first_value, shrinks
from skipless.experiments.papers.simplifying.bounds import (
    MANY_MAPS,
    MATCH,
    MOST,
    NEARLY_ALL,
    SHARE,
    SLIGHT,
    beats,
    clearly_behind,
    decoders,
    losses,
    slightly_beats,
)
from skipless.experiments.report.series import gain_plot, loss_plot, ratio_plot, swept_plot
from skipless.experiments.scale import Scale
from skipless.recipes.variants import MLP_GAINS

# --------------------------------------------------------------------------------- schedule

SCHEDULED = ("pre-ln", "sas", "sas-p")
LATE = 0.9
"""The share of the training up to which linear decay trails."""


def _schedule_configs(scale: Scale) -> Configs:
    return {
        f"{block}, {schedule}": scale.decoder(block, {"train.schedule": schedule})
        for block in SCHEDULED
        for schedule in ("linear", "cosine")
    }


def _trails(first: str, second: str) -> Callable[[Mapping[str, History]], float]:
    """The share of the evaluations at which the first is higher, from the end of the warm-up to near the end."""

    def quantity(seed: Mapping[str, History]) -> float:
        mine, other = seed[first].curve(), seed[second].curve()
        start, end = seed[first].config.train.warmup_share * max(mine), LATE * max(mine)
        steps = [step for step in mine if step in other and start < step <= end]
        return sum(mine[step] > other[step] for step in steps) / len(steps)

    return quantity


@experiment(
    "schedule",
    "Linear or cosine decay of the learning rate",
    "Linear decay ends lower, for baseline and simplified blocks, after trailing for most of the training.",
    _schedule_configs,
    losses("schedule", "Learning-rate schedules"),
)
def _schedule(scale: Scale) -> list[Claim]:
    pairs = [(f"{block}, linear", f"{block}, cosine") for block in SCHEDULED]
    lower = "“linear decay consistently provides a better final performance than cosine decay”"
    late = "“despite trailing for most of the steps towards the end of training”"
    return [
        *(beats(linear, cosine, lower) for linear, cosine in pairs),
        *(
            Claim(
                f"{linear} is above {cosine} at most evaluations between warm-up and the last tenth",
                late,
                (linear, cosine),
                _trails(linear, cosine),
                above=MOST,
                one_seed=0.1,
                form=SHARE,
            )
            for linear, cosine in pairs
        ),
    ]


# ----------------------------------------------------------------------------------- matrix


def _lower_share(first: str, second: str) -> Callable[[Mapping[str, History]], float]:
    return lambda seed: statistics.fmean(float(one < 0) for one in differences(seed, first, second))


@experiment(
    "matrix",
    "Shaped Attention or V-SkipInit's matrix",
    "Shaped Attention is slightly better than V-SkipInit's matrix, in SAS and in SAS-P.",
    decoders("sas", "sas-v-skipinit-matrix", "sas-p", "sas-p-v-skipinit-matrix"),
    losses("matrix", "Attention matrices"),
)
def _matrix(scale: Scale) -> list[Claim]:
    paper = "“a small but consistent gain throughout training”"
    pairs = [(block, f"{block}-v-skipinit-matrix") for block in ("sas", "sas-p")]
    return [
        *(
            Claim(
                f"{first} is below {second} on average over the training, by less than {SLIGHT:.0%}",
                paper,
                (first, second),
                throughout(first, second),
                above=-SLIGHT,
                below=0,
                better="low",
            )
            for first, second in pairs
        ),
        *(
            Claim(
                f"{first} is below {second} at nearly all evaluations",
                paper,
                (first, second),
                _lower_share(first, second),
                above=NEARLY_ALL - 1e-9,
                one_seed=0.05,
                form=SHARE,
            )
            for first, second in pairs
        ),
    ]


# --------------------------------------------------------------------------------- mlp-gain


def _mlp_gain_lines() -> dict[str, dict[float, str]]:
    return {"sas": {gain: f"sas-beta-ff-{gain:g}" for gain in MLP_GAINS}}


@experiment(
    "mlp-gain",
    "Initial weight of the MLP's branch",
    "The final loss over the initial β_FF is shown; the text says nothing of it, and the figure is not in its source.",
    decoders(*(f"sas-beta-ff-{gain:g}" for gain in MLP_GAINS)),
    lambda scale, evidence: [
        swept_plot(evidence, "mlp-gain", "Final loss over initial β_FF", "β_FF", _mlp_gain_lines(), log_x=True),
        loss_plot(evidence, "mlp-gain-curves", "Held-out loss"),
    ],
)
def _mlp_gain(scale: Scale) -> list[Claim]:
    labels = tuple(f"sas-beta-ff-{gain:g}" for gain in MLP_GAINS)

    def against_best(seed: Mapping[str, History]) -> float:
        return seed["sas-beta-ff-0.1"].valid_loss / min(seed[label].valid_loss for label in labels) - 1

    return [
        Claim(
            f"β_FF = 0.1 is within {MATCH:.0%} of the best",
            "(a check of the preset: the paper uses 0.1 at 18 layers)",
            labels,
            against_best,
            below=MATCH,
            show=valid_loss,
            own=True,
        )
    ]


# ------------------------------------------------------------------------------------ gains

GAINS = {
    "attention.mixing.alpha": "α of I",
    "attention.mixing.beta": "β of A",
    "attention.mixing.gamma": "γ of C",
    "beta_ff": "β_FF of the MLP",
}
START = 0.2
"""β/α of V and P at the start."""


def _gain_plots(scale: Scale, evidence: Evidence) -> list[Plot]:
    trajectories = [
        gain_plot(evidence, "sas-gains", part, f"gains-{part.split('.')[-1]}", title) for part, title in GAINS.items()
    ]
    ratios = {
        "sas-p-gains": "Ratios of V and P in the parallel block, sas-p-gains",
        "sas-gains-orthogonal": "Ratios of V and P with orthogonal W_init, sas-gains-orthogonal",
        "pre-ln-gains": "Ratios of V and P in Pre-LN, pre-ln-gains",
    }
    return [*trajectories, *(ratio_plot(evidence, block, f"gains-{block}", title) for block, title in ratios.items())]


def least_gain(part: str) -> Callable[[Mapping[str, History]], float]:
    """The smallest of a gain's layers at the end against its start: mean over heads of the size."""

    def quantity(seed: Mapping[str, History]) -> float:
        history = seed["sas-gains"]
        block = history.config.model.block
        start = block.beta_ff if part == "beta_ff" else getattr(block, part.split(".")[-1])
        assert start is not None
        layers = history.layers(part).values()
        return min(abs(statistics.fmean(values[-1][1])) for values in layers) / start.at_depth(len(layers))

    return quantity


def grown_share(history: History) -> float:
    """The share of value and projection maps whose β/α ends above its start."""
    ratios = final_ratios(history).values()
    return sum(ratio > START for ratio in ratios) / len(ratios)


@experiment(
    "gains",
    "Trajectories of the gains",
    "α, β, γ of Shaped Attention and β_FF do not go to 0; the ratios of V and P do in the parallel block and with "
    "orthogonal W_init; with the attention skip (Pre-LN) many grow. Gains per head and trained gains help a little.",
    decoders(
        "sas-gains",
        "sas-p-gains",
        "sas-gains-orthogonal",
        "pre-ln-gains",
        "sas",
        "sas-shared-gains",
        "sas-fixed-gains",
    ),
    _gain_plots,
)
def _gains(scale: Scale) -> list[Claim]:
    kept = [
        Claim(
            f"{title} does not go to 0: in every layer it ends above a tenth of its start",
            "“none of these other scalar parameters converge to zero”",
            ("sas-gains",),
            least_gain(part),
            above=0.1,
            one_seed=0.05,
            form=SHARE,
        )
        for part, title in GAINS.items()
    ]
    return [
        *kept,
        shrinks("sas-p-gains", "“the vast majority of β/α ratios converge to 0”"),
        *only_the_first_value(
            "sas-p-gains", "“again … the first value matrix is the only ratio above 0.05 at the end of training”"
        ),
        shrinks("sas-gains-orthogonal", "“the vast majority … albeit with slightly more outliers”", 0.75),
        Claim(
            f"with the attention skip at least {MANY_MAPS:.0%} of the ratios of V and P grow",
            "“encourages many more residual/skip gain ratios in the value/projection weights to increase”",
            ("pre-ln-gains",),
            lambda seed: grown_share(seed["pre-ln-gains"]),
            above=MANY_MAPS - 1e-9,
            one_seed=0.05,
            form=SHARE,
        ),
        Claim(
            "more of them grow than without the attention skip",
            "the same",
            ("pre-ln-gains", "sas-gains"),
            lambda seed: grown_share(seed["pre-ln-gains"]) - grown_share(seed["sas-gains"]),
            above=0,
            one_seed=0.05,
            form=SHARE,
        ),
        slightly_beats(
            "sas", "sas-shared-gains", "gains for each head “provided a small additional performance boost”"
        ),
        slightly_beats("sas", "sas-fixed-gains", "trainable β_SA and β_FF “give a small boost in performance”"),
    ]


# ---------------------------------------------------------------------------- mlp-skipless


@experiment(
    "mlp-skipless",
    "SAS without the MLP's skip",
    "Without the MLP's skip SAS trains much slower and needs a tenth of the learning rate; linearising ReLU (leaky, "
    "slope 0.2 or 0.8) does not help.",
    decoders("sas", "sas-no-mlp-skip", "sas-no-mlp-skip-0.2", "sas-no-mlp-skip-0.8"),
    losses("mlp-skipless", "Without the MLP's skip"),
)
def _mlp_skipless(scale: Scale) -> list[Claim]:
    variants = ("sas-no-mlp-skip", "sas-no-mlp-skip-0.2", "sas-no-mlp-skip-0.8")
    paper = "“all blocks without MLP skip train significantly slower than our SAS block”"
    slower = [clearly_behind(variant, "sas", paper, SLIGHT) for variant in variants]
    hurts = "“linearising ReLU into LReLU seemed to hurt training speed rather than help it”"
    return [
        *slower,
        *(compare(f"{v} ends higher than ReLU", hurts, v, variants[0], above=0) for v in variants[1:]),
        learning_rates(
            f"{variants[0]} was tuned to a learning rate an order of magnitude below that of sas (a sixth or less)",
            "“required an order of magnitude smaller learning rate ($1e-4$ vs $1e-3)$ otherwise training was unstable”",
            variants[0],
            "sas",
            above=0,
            below=LEARNING_RATE_STEP**-1.5,
        ),
    ]
