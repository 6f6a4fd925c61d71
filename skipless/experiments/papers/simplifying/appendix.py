"""The appendix's ablations: rates of V and P, schedules, matrices, gains, tied orthogonals, what can be left out."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping

from skipless.experiments.claims import Claim, compare, differences, throughout, valid_loss
from skipless.experiments.evidence import Evidence, History, final_ratios
from skipless.experiments.experiment import Configs, experiment
from skipless.experiments.outcome import Plot
from skipless.experiments.papers.simplifying.attention import beta_plots, only_the_first_value, shrinks
from skipless.experiments.papers.simplifying.bounds import (
    MANY_MAPS,
    MATCH,
    MOST,
    NEARLY_ALL,
    SHARE,
    SLIGHT,
    VERY_SMALL,
    beats,
    clearly_behind,
    decoders,
    losses,
    slightly_beats,
    slightly_behind,
)
from skipless.experiments.report.series import gain_plot, loss_plot, ratio_plot, swept_plot
from skipless.experiments.scale import Scale
from skipless.recipes.variants import BETAS, MLP_GAINS

INITS = ("identity", "orthogonal")

# ------------------------------------------------------------------------------------ vp-lr


def factors(scale: Scale) -> tuple[float, ...]:
    """Factors on the rate of V and P, and β; a factor of 0 is β = 0, which figure 3 has."""
    return BETAS[1:] if scale.is_paper else (0.2, 1.0)


def _by_rate(init: str, factor: float) -> str:
    return f"{init}, V/P rate × {factor:g}"


def _by_beta(init: str, factor: float) -> str:
    return f"{init}, β = {factor:g}"


def _vp_lr_configs(scale: Scale) -> Configs:
    """All at one learning rate: that at which the whole update (a factor of 1, β = 1) trains best."""
    runs = {}
    for init in INITS:
        lr = scale.decoder(f"sas-{init}-1").train.lr
        for factor in factors(scale):
            changes = {"train.lr": lr}
            runs[_by_beta(init, factor)] = scale.decoder(f"sas-{init}-{factor:g}", changes)
            runs[_by_rate(init, factor)] = scale.decoder(f"sas-dense-{init}", {**changes, "train.vp_lr_factor": factor})
    return runs


def _vp_lr_plots(scale: Scale, evidence: Evidence) -> list[Plot]:
    names = {"rate": _by_rate, "β": _by_beta}
    lines = {
        f"{how}, {init}": {f: name(init, f) for f in factors(scale)} for how, name in names.items() for init in INITS
    }
    title = "Final loss over the factor on the rate of V and P, or over β"
    return [
        swept_plot(evidence, "vp-lr", title, "factor, or β_V = β_P", lines, log_x=False),
        loss_plot(evidence, "vp-lr-curves", "Held-out loss"),
    ]


@experiment(
    "vp-lr",
    "A smaller learning rate of W^V and W^P instead of β",
    "Scaling the learning rate of V and P down has the effect of a smaller β (SGD: factor β²; AdamW: factor β).",
    _vp_lr_configs,
    _vp_lr_plots,
)
def _vp_lr(scale: Scale) -> list[Claim]:
    paper = "“reducing the ratio of learning rate for value/projection parameters … improves the training speed”"
    same = "“just like the downweighted residual reparameterisation”"
    return [
        *(beats(_by_rate(init, 0.2), _by_rate(init, 1), paper) for init in INITS),
        *(
            compare(
                f"{init}: a factor of 0.2 on the rate ends where β = 0.2 does",
                same,
                _by_rate(init, 0.2),
                _by_beta(init, 0.2),
                above=-MATCH,
                below=MATCH,
            )
            for init in INITS
        ),
    ]


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
    """The share of the evaluations before the end at which the first is higher."""

    def quantity(seed: Mapping[str, History]) -> float:
        mine, other = seed[first].curve(), seed[second].curve()
        steps = [step for step in mine if step in other and step <= LATE * max(mine)]
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
                f"{linear} is above {cosine} at most evaluations before the last tenth",
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


# ------------------------------------------------------------------------------------- tied

TIED = ("identity", "orthogonal", "ll-tied", "all-tied")


def tied_betas(scale: Scale) -> tuple[float, ...]:
    """β_V = β_P of `tied`: those of figure 3, at laptop scale the small ones."""
    return BETAS if scale.is_paper else (0.0, 0.2)


def lower_on_average(text: str, paper: str, pairs: Iterable[tuple[str, str]], most: float | None = None) -> Claim:
    """The claim that, on the mean over pairs, the first one's loss is below the second's, by at most `most`."""
    pairs = list(pairs)

    def quantity(seed: Mapping[str, History]) -> float:
        return statistics.fmean(seed[first].valid_loss / seed[second].valid_loss - 1 for first, second in pairs)

    labels = tuple(dict.fromkeys(label for pair in pairs for label in pair))
    above = -math.inf if most is None else -most
    return Claim(text, paper, labels, quantity, above=above, below=0.0, show=valid_loss)


@experiment(
    "tied",
    "Orthogonal W_init tied over layers",
    "Tying the last layer, and more so all layers, closes part of the gap between orthogonal and identity W_init; "
    "orthogonal V and P gain from a small, non-zero β.",
    lambda scale: decoders(*(f"sas-{init}-{beta:g}" for init in TIED for beta in tied_betas(scale)))(scale),
    beta_plots("tied", TIED, tied_betas),
)
def _tied(scale: Scale) -> list[Claim]:
    def lower(first: str, second: str, paper: str, most: float | None = None) -> Claim:
        pairs = [(f"sas-{first}-{beta:g}", f"sas-{second}-{beta:g}") for beta in tied_betas(scale)]
        slightly = "" if most is None else f", by less than {most:.0%}"
        return lower_on_average(f"{first} ends lower than {second}, mean over β{slightly}", paper, pairs, most)

    return [
        lower("ll-tied", "orthogonal", "“provides a slight improvement to close the gap”", SLIGHT),
        lower("all-tied", "ll-tied", "“further improves performance”"),
        lower("identity", "all-tied", "“but does not fully close the gap to identity initialisation”"),
        beats(
            "sas-orthogonal-0.2",
            "sas-orthogonal-0",
            "“orthogonally initialised values and projections do benefit from being trainable (i.e. small but non-zero "
            "β)”",
        ),
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


# -------------------------------------------------------------------------- what can be left out


@experiment(
    "preln-identity",
    "Pre-LN with identity W^V and W^P",
    "Identity V and P slightly hurt Pre-LN, also with β_SA below 1, unlike the skipless block.",
    decoders("pre-ln", "pre-ln-identity", "pre-ln-identity-half", "sas-identity-0", "sas-dense-orthogonal"),
    losses("preln-identity", "Identity values and projections"),
)
def _preln_identity(scale: Scale) -> list[Claim]:
    return [
        slightly_behind("pre-ln-identity", "pre-ln", "“identity values and projections actually slightly hurt”"),
        slightly_behind(
            "pre-ln-identity-half", "pre-ln", "β_SA < 1 “did not change the findings”: they still slightly hurt"
        ),
        beats(
            "sas-identity-0",
            "sas-dense-orthogonal",
            "identity “improves the convergence speed per parameter update of transformer blocks with skipless "
            "attention sub-blocks”",
        ),
    ]


FIRST_VALUE = {"sas": "sas-identity-0", "sas-p": "sas-p-identity-first"}


@experiment(
    "first-value",
    "The first layer's W^V",
    "A trainable W^V in the first layer gives SAS and SAS-P a very small gain.",
    decoders(*FIRST_VALUE, *FIRST_VALUE.values()),
    losses("first-value", "Trainable or identity W^V in the first layer"),
)
def _first_value(scale: Scale) -> list[Claim]:
    paper = "“trainable first layer values provides a (very small) boost in performance”"
    return [slightly_beats(block, without, paper, VERY_SMALL) for block, without in FIRST_VALUE.items()]


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
    return [*slower, *(compare(f"{v} ends higher than ReLU", hurts, v, variants[0], above=0) for v in variants[1:])]
