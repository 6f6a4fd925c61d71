"""Plots of what `skipless bench` measured."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skipless.analysis.plotting import COLOURS, pyplot, save_figure

if TYPE_CHECKING:
    from skipless.tasks.bench import Row


def plot_growth(found: dict[str, Any], path: Path) -> None:
    """Time and memory over the sequence length and the depth, in log-log axes."""
    plt = pyplot()
    figure, axes = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
    for row, axis in zip(axes, ("length", "depth"), strict=True):
        for place, (key, label, unit) in zip(
            row, (("seconds", "milliseconds", 1e3), ("peak_bytes", "peak memory (MB)", 1e-6)), strict=True
        ):
            fit = found[axis]["time_slope" if key == "seconds" else "memory_slope"]
            name = f"{found['block']}, slope {'–' if fit is None else f'{fit:.2f}'}"
            place.plot(found[axis]["x"], [unit * y for y in found[axis][key]], marker="o", color=COLOURS[0], label=name)
            for scale, ticks in ((place.set_xscale, place.xaxis), (place.set_yscale, place.yaxis)):
                scale("log", base=2)
                ticks.set_major_formatter("{x:,g}")
            place.set(xlabel={"length": "tokens in the sequence", "depth": "layers"}[axis], ylabel=label)
            place.grid(alpha=0.3)
            place.legend()
    save_figure(figure, path)


def plot_bench(what: str, rows: Sequence["Row"], path: Path) -> None:
    """Speed against the first reference, as bars with quartiles."""
    plt = pyplot()
    reference = next(iter(rows[0].speedup))
    ratios = [row.speedup[reference] for row in rows]
    figure, axis = plt.subplots(figsize=(7, 0.5 * len(rows) + 1.5), layout="constrained")
    names = [row.name for row in rows]
    spread = [[max(0.0, r[0] - r[1]) for r in ratios], [max(0.0, r[2] - r[0]) for r in ratios]]
    axis.barh(names, [r[0] for r in ratios], xerr=spread, color=COLOURS[0], ecolor="grey")
    axis.axvline(1, color="black", linewidth=1)
    axis.set(xlabel=f"times as fast as {reference}", title=what)
    axis.invert_yaxis()
    save_figure(figure, path)
