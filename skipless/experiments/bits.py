"""What low bits cost each block: an experiment of our own.

Recent work says that blocks without skip connections have fewer outliers among their activations, and so should lose
less at low bits (He et al., 2405.19279). Nobody has shown it of the paper's blocks. Trained models are rounded: weights
to 8 and to 4 bits as `skipless export --bits` does, and with them the input of every product to 8 bits with one scale a
token. What is compared is the share by which the held-out loss rises.
"""

import statistics

from skipless.experiments.claims import Claim, Quantity
from skipless.experiments.evidence import Evidence, History
from skipless.experiments.experiment import Configs, experiment
from skipless.experiments.outcome import Plot, Series, Verdict
from skipless.experiments.scale import Scale

FIVE = ("pre-ln", "parallel", "sas", "sas-p", "sas-p-nonorm")
SIMPLER = ("sas", "sas-p", "sas-p-nonorm")

WIDTHS = (64, 128)
"""The first is that of most experiments, whose runs are these."""

WIDE_RATES = {"pre-ln": 2.83e-3, "parallel": 2.83e-3, "sas": 2.83e-3, "sas-p": 2.83e-3, "sas-p-nonorm": 2e-3}
"""At width 128; those of pre-ln and sas-p are among the rates of `trend`, whose runs they share."""

NEARLY_NOTHING = 0.002
"""8 bits cost nearly nothing: the loss rises by less than 0.2%."""

FEWER = "“fewer outlier features” in blocks without skips; so they should lose less at low bits (2405.19279)"


def label(block: str, width: int) -> str:
    """The name of a run."""
    return f"{block}, width {width}"


def _configs(scale: Scale) -> Configs:
    if scale.is_paper:
        return {block: scale.decoder(block) for block in FIVE}
    narrow, wide = WIDTHS
    runs = {label(block, narrow): scale.decoder(block) for block in FIVE}
    heads = scale.decoder("pre-ln").model.n_head * wide // narrow
    changes = {"model.d_model": wide, "model.n_head": heads}
    return runs | {
        label(block, wide): scale.decoder(block, {**changes, "train.lr": WIDE_RATES[block]}) for block in FIVE
    }


def rise(history: History, form: str) -> float:
    """The share by which the held-out loss rises."""
    assert history.bits is not None
    return history.bits["loss"][form] / history.bits["loss"]["32"] - 1


def _more(first: str, second: str, form: str) -> Quantity:
    """How much more the first loses."""
    return lambda seed: rise(seed[first], form) - rise(seed[second], form)


def _kurtosis(history: History) -> float:
    assert history.bits is not None
    return history.bits["kurtosis"]["neuron_kurtosis"]


class BitsClaim(Claim):
    """A claim on the seeds that were measured at low bits."""

    def judge(self, evidence: Evidence) -> Verdict:
        """As of any claim, on those seeds."""
        there = {label: {seed: one for seed, one in of.items() if one.bits} for label, of in evidence.histories.items()}
        measured = Evidence(there, evidence.timings)
        if evidence.by_seed(self.labels) and not measured.by_seed(self.labels):
            return self.undecided("the runs were not measured at low bits: `skipless reproduce bits` does that")
        return super().judge(measured)


def _labels(scale: Scale) -> dict[str, dict[str, str]]:
    """Size → block → label."""
    if scale.is_paper:
        return {"": {block: block for block in FIVE}}
    return {f", width {width}": {block: label(block, width) for block in FIVE} for width in WIDTHS}


def _plots(scale: Scale, evidence: Evidence) -> list[Plot]:
    if scale.is_paper:
        return []
    plots = []
    forms = {"w8": "weights at 8 bits", "w4": "weights at 4 bits", "w8a8": "all at 8 bits", "w4a8": "4 and 8 bits"}
    for form, title in forms.items():
        series = []
        for block in FIVE:
            found = {
                width: [100 * rise(one, form) for one in evidence.finished(label(block, width)).values() if one.bits]
                for width in WIDTHS
            }
            there = {width: values for width, values in found.items() if values}
            if there:
                y = tuple(statistics.fmean(values) for values in there.values())
                spread = tuple(statistics.stdev(values) if len(values) > 1 else 0.0 for values in there.values())
                series.append(Series(block, {"value": tuple(there)}, y, spread, block))
        plots.append(
            Plot(
                f"bits-{form}",
                f"What rounding costs: {title}",
                "rise of the held-out loss (%)",
                {"value": "width"},
                tuple(series),
                "marks",
                log_x=True,
            )
        )
    return plots


@experiment(
    "bits",
    "What low bits cost",
    "(Not in the paper.) Whether the simpler blocks, which have no skips to carry outliers, lose less than Pre-LN when "
    "weights and activations are rounded to 8 and 4 bits.",
    _configs,
    _plots,
    own=True,
    low_bits=True,
    most_seeds=lambda scale, label: 3,
)
def _bits(scale: Scale) -> list[Claim]:
    claims = []
    for size, labels in _labels(scale).items():
        base = labels["pre-ln"]
        for form, name in (("w4", "weights at 4 bits"), ("w4a8", "weights at 4 bits and inputs at 8")):
            claims += [
                BitsClaim(
                    f"{block} loses less than pre-ln with {name}{size}",
                    FEWER,
                    (labels[block], base),
                    _more(labels[block], base, form),
                    below=0,
                    form="+z.2%",
                    own=True,
                )
                for block in SIMPLER
            ]
        claims += [
            BitsClaim(
                f"8 bits cost {block} nearly nothing{size}",
                "(what is known of 8 bits with a scale for 32 weights)",
                (labels[block],),
                lambda seed, key=labels[block]: rise(seed[key], "w8"),
                below=NEARLY_NOTHING,
                form="+z.3%",
                own=True,
            )
            for block in FIVE
        ]
        claims += [
            BitsClaim(
                f"{block} has smaller outliers than pre-ln{size}",
                FEWER,
                (labels[block], base),
                lambda seed, key=labels[block], other=base: _kurtosis(seed[key]) / _kurtosis(seed[other]) - 1,
                below=0,
                one_seed=0.5,  # seeds differ far more in this than in their losses
                own=True,
            )
            for block in SIMPLER
        ]
    return claims
