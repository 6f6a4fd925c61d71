"""Experiments of our own: how strong the baseline is, and what the rates were chosen by.

The paper compares its blocks with Pre-LN at 18 layers of width 768. Of a laptop's models it says nothing, so what they
are trained with, and whether Pre-LN is given its best, has to be found out: `baseline` and `rates`.
"""

from collections.abc import Mapping
from typing import Any

from skipless.experiments.claims import Claim
from skipless.experiments.evidence import Evidence
from skipless.experiments.experiment import Configs, experiment
from skipless.experiments.outcome import Plot
from skipless.experiments.recipes import Scale
from skipless.experiments.series import swept_plot


def rate(position: float) -> float:
    """A rate of the grid: 1e-3 · 2^position, to three digits."""
    return float(f"{1e-3 * 2**position:.3g}")


# ------------------------------------------------------------------------------ baseline

PLAIN: dict[str, Any] = {"model.embedding_norm": None}
SETTINGS: dict[str, dict[str, Any]] = {
    "normalised embedding": {},
    "as in the paper": PLAIN,
    "query-key norm": {**PLAIN, "model.block.qk_norm": True},
    "both norms": {"model.block.qk_norm": True},
    "longer warm-up": {"train.warmup": 0.2},
    "half the batch": {"train.batch_size": 8},
    "half the batch, as in the paper": {**PLAIN, "train.batch_size": 8},
    "twice the batch": {"train.batch_size": 32},
    "twice the batch, as in the paper": {**PLAIN, "train.batch_size": 32},
}
"""What is changed for both blocks; without a change they are trained as everywhere at this scale."""

GRID: dict[str, dict[str, tuple[float, ...]]] = {
    "pre-ln": {
        "normalised embedding": (0, 0.5, 1, 1.5, 2, 2.5),
        "as in the paper": (0, 1, 2),
        "query-key norm": (1, 2, 2.5),
        "both norms": (1, 2, 2.5),
        "longer warm-up": (1, 2),
        "half the batch": (1, 2),
        "half the batch, as in the paper": (1, 2),
        "twice the batch": (1, 2),
        "twice the batch, as in the paper": (2,),
    },
    "sas-p": {
        "normalised embedding": (1, 1.5, 2, 2.5),
        "as in the paper": (2,),
        "query-key norm": (2,),
        "both norms": (2, 2.5),
        "longer warm-up": (2, 2.5),
        "half the batch": (2,),
        "half the batch, as in the paper": (2,),
        "twice the batch": (2, 2.5),
    },
}
"""Positions on the grid of rates for each block and setting."""


def label(block: str, setting: str, position: float) -> str:
    """The name of a run."""
    return f"{block}, {setting}, {rate(position):g}"


def _baseline_configs(scale: Scale) -> Configs:
    if scale.is_paper:  # there the settings are the paper's
        return {}
    return {
        label(block, setting, position): scale.decoder(block, {**SETTINGS[setting], "train.lr": rate(position)})
        for setting in SETTINGS
        for block, settings in GRID.items()
        for position in settings.get(setting, ())
    }


def _rate_lines(grid: Mapping[str, Mapping[str, tuple[float, ...]]]) -> dict[str, dict[float, str]]:
    return {
        f"{block}, {setting}": {rate(position): label(block, setting, position) for position in positions}
        for block, settings in grid.items()
        for setting, positions in settings.items()
    }


def _baseline_plots(scale: Scale, evidence: Evidence) -> list[Plot]:
    title = "Final loss over the learning rate, in each setting"
    return [swept_plot(evidence, "baseline", title, "peak learning rate", _rate_lines(GRID), log_x=True)]


@experiment(
    "baseline",
    "How strong the baseline is",
    "(Not in the paper.) Which settings and rates make Pre-LN strongest at laptop scale, and SAS-P in the same ones.",
    _baseline_configs,
    _baseline_plots,
    own=True,
    most_seeds=lambda scale, label: 1,
)
def _baseline(scale: Scale) -> list[Claim]:
    return []
