"""Plots of plain runs: losses, gains, final losses as bars."""

import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from skipless.errors import UserError
from skipless.experiments.outcome import Plot, Series
from skipless.experiments.report.axes import AXES, GAINS
from skipless.experiments.report.draw import draw
from skipless.experiments.report.inside import inside_plots
from skipless.experiments.report.summary import Pool, pool_seeds, summarise
from skipless.runs import Run


def run_plots(runs: Sequence[Run]) -> tuple[Plot, ...]:
    """Losses, sizes and speeds of runs, and how their gains went; those that differ only in their seed are one."""
    pools = pool_seeds(runs)
    plots = [
        _loss_plot(pools, "loss", "Held-out loss", "valid_loss"),
        _loss_plot(pools, "train-loss", "Training loss", "loss"),
        *_bar_plots(pools),
        *(plot for number, pool in enumerate(pools, 1) for plot in inside_plots(pool.runs[0], number)),
        *(plot for number, pool in enumerate(pools, 1) for plot in _gain_plots(pool, number)),
    ]
    return tuple(plot for plot in plots if plot.series)


def draw_losses(runs: Sequence[Run], path: Path) -> None:
    """The held-out losses of runs over steps and over time, in one picture."""
    plot = _loss_plot(pool_seeds(runs), "loss", "Held-out loss", "valid_loss")
    for run in runs:
        if not curve([run], "valid_loss").y:
            raise UserError(f"run {run.name!r} has no held-out loss yet, so there is nothing to draw")
    draw(plot, path, ["steps", "minutes"])


def _loss_plot(pools: Sequence[Pool], key: str, title: str, metric: str) -> Plot:
    curves = [curve(pool.runs, metric) for pool in pools]
    named = zip(pools, curves, strict=True)
    series = tuple(replace(one, name=pool.name, group=pool.group) for pool, one in named if one.y)
    return Plot(key, title, "loss (nats per token)", AXES, series)


def curve(runs: Sequence[Run], metric: str) -> Series:
    """A metric over the steps that all of the runs have reached: mean and standard deviation over them.

    The first measurement, before any step, says nothing but the size of the vocabulary and is left out.
    """
    tables = [{r["step"]: r for r in run.metrics() if r.get(metric) is not None and r["step"]} for run in runs]
    tables = [table for table in tables if table]
    steps = [step for step in tables[0] if all(step in table for table in tables)] if tables else []
    rows = [[table[step] for table in tables] for step in steps]
    values = [[row[metric] for row in together] for together in rows]
    return Series(
        name=metric,
        x={
            "steps": tuple(steps),
            "tokens": tuple(statistics.fmean(row["tokens"] for row in together) for together in rows),
            "minutes": tuple(statistics.fmean(row["seconds"] for row in together) / 60 for together in rows),
        },
        y=tuple(map(statistics.fmean, values)),
        sd=tuple(map(statistics.stdev, values)) if len(tables) > 1 else None,
    )


def _bar_plots(pools: Sequence[Pool]) -> Iterator[Plot]:
    found = [[summarise(run) for run in pool.runs] for pool in pools]
    for key, title, label, name in (
        ("parameters", "Parameters", "parameters", "parameters"),
        ("speed", "Speed of training", "tokens per second", "tokens_per_second"),
    ):
        series = []
        for pool, summaries in zip(pools, found, strict=True):
            values = [getattr(one, name) for one in summaries if getattr(one, name)]
            if values:
                sd = (statistics.stdev(values),) if len(values) > 1 and key == "speed" else None
                series.append(Series(pool.name, {"run": (pool.name,)}, (statistics.fmean(values),), sd, pool.group))
        yield Plot(key, title, label, {"run": ""}, tuple(series), kind="bars")


def _gain_plots(pool: Pool, number: int) -> Iterator[Plot]:
    """How each gain went in each layer of the first run that recorded them: mean and deviation over its heads."""
    for run in pool.runs:
        records = [record for record in run.metrics() if record.get("gains")]
        if records:
            break
    else:
        return
    paths = [path for path in records[0]["gains"] if re.fullmatch(r"blocks\.\d+\..+", path)]
    for gain in dict.fromkeys(path.split(".", 2)[2] for path in paths):
        layers = [path for path in paths if path.split(".", 2)[2] == gain]
        symbol = GAINS.get(gain, gain)
        title = f"{symbol} of each layer, {run.name}"
        series = tuple(_gain_series(records, path) for path in layers)
        yield Plot(f"gains-{number}-{gain}", title, symbol, {"steps": AXES["steps"]}, series)


def _gain_series(records: Sequence[Mapping[str, Any]], path: str) -> Series:
    values = [record["gains"].get(path) for record in records]
    heads = [value if isinstance(value, list) else [value] for value in values]
    return Series(
        name=f"layer {int(path.split('.')[1]) + 1}",
        x={"steps": tuple(record["step"] for record in records)},
        y=tuple(math.nan if None in one else statistics.fmean(one) for one in heads),
        sd=tuple(math.nan if None in one else statistics.pstdev(one) for one in heads) if len(heads[0]) > 1 else None,
    )
