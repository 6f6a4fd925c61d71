"""Experiments of our own: how strong the baseline is, what the rates were chosen by, how the gap goes with scale.

The paper compares its blocks with Pre-LN at 18 layers of width 768. It says nothing about a laptop's models, so
`baseline` and `rates` find the settings of these and check that Pre-LN is as well tuned as the others. `trend` asks how
much of what comes out belongs to the small scale.
"""

import statistics
from collections.abc import Mapping
from typing import Any

from skipless.experiments.claims import Claim
from skipless.experiments.evidence import Evidence
from skipless.experiments.experiment import Configs, experiment
from skipless.experiments.outcome import Plot, Series
from skipless.experiments.report.series import swept_plot
from skipless.experiments.scale import Scale


def rate(position: float) -> float:
    """A rate of the grid: 1e-3 · 2^position, to three digits."""
    return float(f"{1e-3 * 2**position:.3g}")


# ------------------------------------------------------------------------------ baseline

PAPERS_WARMUP: dict[str, Any] = {"train.warmup": None}
"""5% of the steps: 2,000 in the paper, 100 in so short a training."""

PLAIN: dict[str, Any] = {**PAPERS_WARMUP, "model.embedding_norm": None}
SETTINGS: dict[str, dict[str, Any]] = {
    "as in the paper": PLAIN,
    "query-key norm": {**PLAIN, "model.block.qk_norm": True},
    "normalised embedding": PAPERS_WARMUP,
    "both norms": {**PAPERS_WARMUP, "model.block.qk_norm": True},
    "longer warm-up": {},
    "half the batch": {"train.batch_size": 8},
    "twice the batch": {"train.batch_size": 32},
}
"""What is changed for both blocks. `longer warm-up`, with the normalised embedding, was chosen for this scale."""

GRID: dict[str, dict[str, tuple[float, ...]]] = {
    "pre-ln": {
        "as in the paper": (0, 1, 2),
        "query-key norm": (1, 2, 2.5),
        "normalised embedding": (0, 0.5, 1, 1.5, 2, 2.5),
        "both norms": (1, 2, 2.5),
        "longer warm-up": (1, 1.5, 2, 2.5),
        "half the batch": (1, 2),
        "twice the batch": (1, 2, 2.5),
    },
    "sas-p": {
        "as in the paper": (2,),
        "query-key norm": (2,),
        "normalised embedding": (1, 1.5, 2, 2.5),
        "both norms": (2, 2.5),
        "longer warm-up": (2, 2.5, 3),
        "half the batch": (2,),
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


# --------------------------------------------------------------------------------- rates

RATES: dict[str, dict[str, tuple[float, ...]]] = {
    "decoder": {
        "pre-ln": (1.5, 2, 2.5),
        "parallel": (1.5, 2, 2.5, 3),
        "v-skipinit": (0, 0.5, 1),
        "sas": (2, 2.5, 3),
        "sas-p": (2, 2.5, 3),
        "sas-p-nonorm": (1, 1.5, 2, 2.5, 3),
        "sas-dense-orthogonal": (0, 0.5, 1),
        "sas-orthogonal-1": (0, 0.5, 1),
        "sas-identity-1": (-0.5, 0, 0.5, 1, 1.5),
        "sas-no-mlp-skip": (-2.5, -2, -1.5, -1),
        "sas-no-mlp-skip-0.2": (-2, -1.5, -1, -0.5, 0),
        "sas-no-mlp-skip-0.8": (-2, -1.5, -1),
    },
    "deep": {
        "pre-ln": (0, 1, 2),
        "v-skipinit": (-2, -1, 0),
        "sas": (0, 1, 2),
        "sas-p": (0, 1, 2),
    },
    "books": {
        "pre-ln": (1, 1.5, 2),
        "parallel": (1, 1.5, 2),
        "sas": (1, 1.5, 2),
        "sas-p": (1, 1.5, 2),
    },
    "encoder": {
        "pre-ln": (1, 1.5, 2),
        "parallel": (1, 1.5, 2),
        "v-skipinit": (0, 1, 2),
        "sas": (2, 2.5, 3),
        "sas-p": (2, 2.5, 3),
        "sas-p-nonorm": (1, 1.5, 2),
    },
}
"""Kind of run → block → positions on the grid of rates; of the decoder in steps of √2 around the best of `COARSE`."""

COARSE: dict[str, tuple[float, ...]] = {
    "pre-ln": (1, 1.5, 2),
    "parallel": (1, 1.5, 2, 2.5),
    "v-skipinit": (-1, -0.5, 0, 0.5, 1),
    "sas": (1, 1.5, 2, 2.5, 3),
    "sas-p": (1, 1.5, 2, 2.5),
    "sas-p-nonorm": (1, 1.5),  # at 2 its loss is not finite after some steps
    "sas-dense-orthogonal": (-1, -0.5, 0, 0.5, 1),
    "sas-orthogonal-1": (-1, -0.5, 0, 0.5, 1),
    "sas-identity-1": (-1, -0.5, 0, 0.5, 1),
    "sas-no-mlp-skip": (-3, -2.5, -2, -1.5, -1, 0),
    "sas-no-mlp-skip-0.2": (-3, -2.5, -2, -1.5, -1),
    "sas-no-mlp-skip-0.8": (-3, -2, -1),
}
"""The grid that came first, with the paper's warm-up: steps of 2 (whole numbers), and mostly of √2 between them."""

SHORTER: dict[str, dict[str, Any]] = {"books": {"train.steps": 500}, "encoder": {"train.tokens": 2_000_000}}
"""A quarter of the training: what costs most is tuned on that."""

SHORT = "decoder, the paper's warm-up"


def _rate_configs(scale: Scale) -> Configs:
    if scale.is_paper:  # there the rates are the paper's
        return {}
    tuned = {
        label(block, kind, position): scale.run(kind, block, {**SHORTER.get(kind, {}), "train.lr": rate(position)})
        for kind, blocks in RATES.items()
        for block, positions in blocks.items()
        for position in positions
    }
    coarse = {
        label(block, SHORT, position): scale.decoder(block, {**PAPERS_WARMUP, "train.lr": rate(position)})
        for block, positions in COARSE.items()
        for position in positions
    }
    return {**tuned, **coarse}


def _rate_plots(scale: Scale, evidence: Evidence) -> list[Plot]:
    grids = {f"rates-{kind}": (kind, blocks) for kind, blocks in RATES.items()}
    grids["rates-decoder-short-warm-up"] = (SHORT, COARSE)
    return [
        swept_plot(
            evidence,
            key,
            f"Loss over the learning rate: {kind}" + (", a quarter of the training" if kind in SHORTER else ""),
            "peak learning rate",
            {block: {rate(p): label(block, kind, p) for p in positions} for block, positions in blocks.items()},
            log_x=True,
            measure=lambda history: history.tuning_loss,
            label="final loss on the rows for tuning (nats per token)",
        )
        for key, (kind, blocks) in grids.items()
    ]


ALIKE = 0.003
"""Losses that differ by less than this share are alike: two seeds of one block differ by as much."""


def best_rates(scale: Scale, evidence: Evidence) -> dict[str, dict[str, float]]:
    """Kind → block → its rate, where all of a block's have finished.

    It is the smallest whose loss on the rows for tuning is like the lowest: on the edge, where a variant of the block
    or another seed may fail to train, there is nothing to gain.
    """
    found: dict[str, dict[str, float]] = {}
    for kind, blocks in RATES.items():
        for block, positions in blocks.items():
            losses = {
                rate(position): one.tuning_loss
                for position in positions
                for one in evidence.finished(label(block, kind, position)).values()
            }
            if len(losses) == len(positions):
                lowest = min(losses.values())
                found.setdefault(kind, {})[block] = min(
                    lr for lr, loss in losses.items() if loss <= (1 + ALIKE) * lowest
                )
    return found


@experiment(
    "rates",
    "What the learning rates were chosen by",
    "(Not in the paper, which tunes on a logarithmic grid.) The loss of each block over its rate, seed 0, on held-out "
    "rows that nothing else is judged by.",
    _rate_configs,
    _rate_plots,
    own=True,
    most_seeds=lambda scale, label: 1,
)
def _rates(scale: Scale) -> list[Claim]:
    return []


# --------------------------------------------------------------------------------- trend

WIDTHS = (64, 128, 256)
"""At as many tokens as everywhere."""

LENGTHS = (1, 4, 10)
"""Times as many tokens, at width 64."""

TREND_RATES: dict[str, dict[str, tuple[float, ...]]] = {
    "pre-ln": {
        "tokens × 1": (2,),
        "tokens × 4": (1, 1.5),
        "tokens × 10": (1,),
        "width 128": (1, 1.5),
        "width 256": (0.5, 1),
    },
    "sas-p": {
        "tokens × 1": (2.5,),
        "tokens × 4": (1.5, 2),
        "tokens × 10": (1.5,),
        "width 128": (1, 1.5),
        "width 256": (0.5, 1),
    },
}
"""Block → point → positions on the grid of rates; the best by the rows for tuning counts.

The first point has the rates of the finer grid above, and so the runs of everything else.
"""


def _point(scale: Scale, name: str) -> dict[str, Any]:
    """What is changed at a point; a longer training is measured as often as a short one."""
    kind, _, text = name.rpartition(" ")
    if kind == "width":
        times = int(text) // WIDTHS[0]
        return {"model.d_model": int(text), "model.n_head": scale.decoder("pre-ln").model.n_head * times}
    train = scale.decoder("pre-ln").train
    often = ("steps", "eval_every", "log_every", "gains_every", "health_every")
    return {f"train.{key}": int(text) * getattr(train, key) for key in often}


def _trend_configs(scale: Scale) -> Configs:
    if scale.is_paper:
        return {}
    return {
        label(block, name, position): scale.decoder(block, {**_point(scale, name), "train.lr": rate(position)})
        for block, points in TREND_RATES.items()
        for name, positions in points.items()
        for position in positions
    }


def best_losses(evidence: Evidence, block: str, name: str) -> dict[int, float]:
    """Seed → held-out loss of a block at a point, at the rate that is best on the rows for tuning."""
    found = [evidence.finished(label(block, name, position)) for position in TREND_RATES[block][name]]
    seeds = {seed for histories in found for seed in histories}
    best = {seed: min((of[seed] for of in found if seed in of), key=lambda one: one.tuning_loss) for seed in seeds}
    return {seed: one.valid_loss for seed, one in sorted(best.items())}


def _gap_plot(evidence: Evidence, key: str, axis: str, points: Mapping[int, str]) -> Plot:
    gaps: dict[int, list[float]] = {}
    for value, name in points.items():
        ours, theirs = best_losses(evidence, "sas-p", name), best_losses(evidence, "pre-ln", name)
        both = [100 * (ours[seed] / theirs[seed] - 1) for seed in ours if seed in theirs]
        if both:
            gaps[value] = both
    y = tuple(statistics.fmean(values) for values in gaps.values())
    sd = tuple(statistics.stdev(values) if len(values) > 1 else 0.0 for values in gaps.values())
    several = any(len(values) > 1 for values in gaps.values())
    series = (Series("sas-p against pre-ln", {"value": tuple(gaps)}, y, sd if several else None, "sas-p"),) if y else ()
    title = f"How far the best sas-p is above the best pre-ln over {axis}"
    return Plot(key, title, "held-out loss against pre-ln's (%)", {"value": axis}, series, "marks", log_x=True)


def _trend_plots(scale: Scale, evidence: Evidence) -> list[Plot]:
    if scale.is_paper:
        return []
    train, cfg = scale.decoder("pre-ln").train, scale.decoder("pre-ln")
    tokens = {n * (train.steps or 0) * train.batch_size * cfg.data.seq_len: f"tokens × {n}" for n in LENGTHS}
    widths = {WIDTHS[0]: "tokens × 1", **{width: f"width {width}" for width in WIDTHS[1:]}}
    return [
        _gap_plot(evidence, "trend-tokens", "training tokens (width 64)", tokens),
        _gap_plot(evidence, "trend-width", "width", widths),
    ]


@experiment(
    "trend",
    "How the comparison goes with scale",
    "(Not in the paper.) The gap between the best Pre-LN and the best SAS-P over training tokens and over width.",
    _trend_configs,
    _trend_plots,
    own=True,
    most_seeds=lambda scale, label: 1 if "× 10" in label or "width 256" in label else 3,
)
def _trend(scale: Scale) -> list[Claim]:
    return []
