"""Plots as data → files for papers: PNG, SVG, and the CSV behind them."""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from skipless.analysis.plotting import COLOURS, pyplot, save_figure
from skipless.experiments.outcome import Finding, Plot, Series
from skipless.experiments.report.axes import (
    bar_places,
    categories,
    finite_float,
    is_number,
    label,
    mark_every,
    named_below,
    places,
    plain_text,
    split_bars,
    x_limits,
    y_limits,
)
from skipless.experiments.report.styles import Style, styles
from skipless.storage.atomic_files import make_folder, write_text


def save_plots(finding: Finding, folder: Path) -> list[Path]:
    """Every plot of a finding as `<key>.png` and `.svg` over its first axis, and all of its axes as `<key>.csv`."""
    make_folder(folder)
    found, plots = [], [split_bars(plot) for plot in finding.plots]
    for plot, look in zip(plots, styles(plots), strict=True):
        axes = list(plot.axes)[:1]
        found += [draw(plot, folder / f"{plot.key}{ending}", axes, look) for ending in (".png", ".svg")]
        found.append(folder / f"{plot.key}.csv")
        write_text(found[-1], to_csv(plot))
    return found


def to_csv(plot: Plot) -> str:
    """The numbers of a plot, a point a row; what is not a number is left empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["series", "group", *plot.axes, "y", "sd"])
    for series in plot.series:
        columns = [places(series, axis) for axis in plot.axes]
        spread = series.sd or (None,) * len(series.y)
        for *row, y, sd in zip(*columns, series.y, spread, strict=True):
            cells = [cell if isinstance(cell, str) or is_number(cell) else "" for cell in (*row, y, sd)]
            writer.writerow([series.name, series.group or "", *cells])
    return out.getvalue()


ON_DARK = "#c9d1d9"

DARK = {
    **{f"{name}.color": ON_DARK for name in ("text", "xtick", "ytick")},
    **{f"axes.{name}": ON_DARK for name in ("edgecolor", "labelcolor", "titlecolor")},
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor", "legend.facecolor"), "none"),
}
"""For a dark page: light text, and the page's own ground."""


def draw(
    plot: Plot, path: Path, axes: Sequence[str], look: Sequence[Style] | None = None, *, dark: bool = False
) -> Path:
    """A plot as a picture, with a panel for each of the axes; the ending of the path says which kind."""
    plt = pyplot()
    look = look or styles([plot])[0]
    if dark:
        look = [replace(style, light=style.dark) for style in look]
    # no dates and no random names: the same plot is the same file
    how = {"svg.hashsalt": "skipless", "font.size": 9, "axes.spines.top": False, **(DARK if dark else {})}
    with plt.rc_context(how):
        size = (5.4 * len(axes), 3.6)
        figure, panels = plt.subplots(1, len(axes), figsize=size, layout="constrained", sharey=True, squeeze=False)
        for panel, axis in zip(panels[0], axes, strict=True):
            _draw_panel(panel, plot, axis, look)
        panels[0][0].set_ylabel(plain_text(plot.y_label))
        figure.suptitle(plain_text(plot.title), fontsize=10)
        _draw_legend(figure, panels[0][-1], plot)
        undated = {".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
        save_figure(figure, path, dpi=140, metadata=undated[path.suffix.lower()])
    return path


def _draw_panel(panel: Any, plot: Plot, axis: str, look: Sequence[Style]) -> None:
    names = categories(plot, axis)
    if plot.kind == "bars":
        _draw_bars(panel, plot, axis, look)
    else:
        for position, (series, style) in enumerate(zip(plot.series, look, strict=True)):
            _draw_line(panel, plot, axis, names, series, style, position)
    panel.set(xlabel=plain_text(plot.axes[axis]), ylim=y_limits(plot))
    if names is None:
        panel.set(xlim=x_limits(plot, axis), xscale="log" if plot.log_x else "linear")
        if plot.log_x:
            _plain_ticks(panel.xaxis, *x_limits(plot, axis))
    else:
        tilted = sum(map(len, names)) > 50
        panel.set(xlim=(-0.5, max(1, len(names)) - 0.5))
        panel.set_xticks(range(len(names)), [plain_text(name, 24) for name in names], fontsize=8)
        panel.tick_params(axis="x", rotation=30 if tilted else 0)
        for label in panel.get_xticklabels():
            label.set_horizontalalignment("right" if tilted else "center")
    if plot.log_y:
        panel.set(yscale="log")
        _plain_ticks(panel.yaxis, *y_limits(plot))
    panel.spines["right"].set_visible(False)
    panel.grid(alpha=0.25, axis="y" if names else "both")
    panel.set_axisbelow(True)


def _plain_ticks(axis: Any, low: float, high: float) -> None:
    """Plain numbers along a logarithmic axis, as the page has them, few enough not to stand above each other."""
    from matplotlib.ticker import LogLocator, NullFormatter

    decades = math.log10(high) - math.log10(low)
    if decades >= 0.6:  # else the ticks are those of a linear axis, which matplotlib finds by itself
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 2.5 else (1,)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())


def _draw_line(
    panel: Any, plot: Plot, axis: str, names: list[str] | None, series: Series, style: Style, position: int
) -> None:
    x = [finite_float(names.index(label(x)) if names and x is not None else x) for x in places(series, axis)]
    y, sd = [finite_float(value) for value in series.y], [finite_float(value) for value in series.sd or ()]
    how = {"color": style.light, "label": plain_text(series.name, 44), "markersize": 4.5, "marker": style.mark or None}
    if plot.kind == "marks":
        how["marker"] = style.mark or "o"
        panel.plot(x, y, linewidth=0.8, linestyle=(0, style.dash) if style.dash else "-", **how)
        if sd:
            panel.errorbar(x, y, yerr=sd, fmt="none", ecolor=style.light, capsize=2.5, linewidth=1)
        return
    every = mark_every(len(x), position, len(plot.series))
    panel.plot(x, y, linewidth=1.4, linestyle=(0, style.dash) if style.dash else "-", markevery=every, **how)
    if sd:
        low, high = ([a + sign * b for a, b in zip(y, sd, strict=True)] for sign in (-1, 1))
        panel.fill_between(x, low, high, color=style.light, alpha=0.05 if len(plot.series) > 8 else 0.15, linewidth=0)


def _draw_bars(panel: Any, plot: Plot, axis: str, look: Sequence[Style]) -> None:
    for series, style, bars in zip(plot.series, look, bar_places(plot, axis), strict=True):
        width = bars[0][1] if bars else 0.8
        sd = [value if is_number(value) else 0.0 for value in series.sd] if series.sd else None
        heights = [finite_float(value) for value in series.y]
        how = {"color": style.light, "label": plain_text(series.name, 44), "capsize": 3, "ecolor": "#666666"}
        panel.bar([place for place, _ in bars], heights, width, yerr=sd, **how)


def _draw_legend(figure: Any, panel: Any, plot: Plot) -> None:
    handles, labels = panel.get_legend_handles_labels()
    if not handles or named_below(plot):
        return
    if plot.kind == "bars" or len(handles) > len(COLOURS):  # it would hide what it explains
        columns = 1 + len(handles) // 20
        figure.legend(handles, labels, loc="outside right center", fontsize=7.5, frameon=False, ncols=columns)
    else:
        panel.legend(handles, labels, fontsize=8, framealpha=0.85, edgecolor="none")
