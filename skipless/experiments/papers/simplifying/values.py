"""The appendix on W^V and W^P: a rate of their own, tied orthogonals, identity in Pre-LN, the first layer's W^V."""

import math
import statistics
from collections.abc import Iterable, Mapping

from skipless.experiments.claims import Claim, compare, valid_loss
from skipless.experiments.evidence import Evidence, History
from skipless.experiments.experiment import Configs, experiment
from skipless.experiments.outcome import Plot
from skipless.experiments.papers.simplifying.attention import beta_plots
from skipless.experiments.papers.simplifying.bounds import (
    MATCH,
    SLIGHT,
    VERY_SMALL,
    beats,
    decoders,
    losses,
    slightly_beats,
    slightly_behind,
)
from skipless.experiments.report.series import loss_plot, swept_plot
from skipless.experiments.scale import Scale
from skipless.recipes.variants import BETAS

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


# --------------------------------------------------------------------------- preln-identity


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


# ------------------------------------------------------------------------------ first-value

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
