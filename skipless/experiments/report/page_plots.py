"""A plot in the page: what the page's script draws, the same values as a table, and the files beside it."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from skipless.experiments.outcome import Plot, Series
from skipless.experiments.report.axes import (
    bar_places,
    categories,
    is_number,
    label,
    mark_every,
    named_below,
    places,
    x_limits,
    y_limits,
)
from skipless.experiments.report.styles import Style

MAX_POINTS = 400
"""Points of a line in the page; the CSV has all."""


class Cell(NamedTuple):
    """A cell of a table."""

    value: Any
    """What it is sorted by."""
    text: str


@dataclass(frozen=True)
class Figure:
    """What the template says of a plot: its files, and its values as a table."""

    number: int
    plot: Plot
    files: dict[str, str]
    rows_title: str
    head: str
    """Of the column of names."""
    columns: list[str]
    rows: list[tuple[str, list[Cell]]]
    """Name, and what stands in each column."""


def make_figure(plot: Plot, position: int, page: Path, folder: Path) -> Figure:
    """A plot as the template shows it; its files lie in a folder beside the page."""
    axis = next(iter(plot.axes), "")
    saved = {kind: folder / f"{plot.key}.{kind.lower()}" for kind in ("PNG", "SVG", "CSV")}
    crossed = _crossed(plot, axis)
    columns, rows = crossed or _listed_values(plot, axis)
    return Figure(
        number=position,
        plot=plot,
        files={kind: quote(file.relative_to(page.parent).as_posix()) for kind, file in saved.items() if file.exists()},
        rows_title="values" if plot.kind != "line" else "last values",
        head=plot.y_label if crossed else "series",
        columns=columns,
        rows=rows,
    )


# -------------------------------------------------------------------------------- tables

Table = tuple[list[str], list[tuple[str, list[Cell]]]]
"""Columns and rows."""


def short(value: Any) -> str:
    """A value in five digits, a word as it is, and a dash for nothing."""
    if isinstance(value, str):
        return value
    if not is_number(value):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:,.5g}"


def fixed(value: float | None, digits: int) -> str:
    """A value with so many decimals."""
    return f"{value:.{digits}f}" if is_number(value) else "–"


def with_sd(mean: float | None, sd: float | None, digits: int) -> str:
    """A mean, and the standard deviation over seeds where there is one."""
    return fixed(mean, digits) + (f" ± {sd:.{digits}f}" if is_number(sd) else "")


def _listed_values(plot: Plot, axis: str) -> Table:
    """A row for each point, or for the last one of each line; without its place where that is its name."""
    rows, skipped = [], int(named_below(plot))
    for series in plot.series:
        spread = series.sd or (None,) * len(series.y)
        points = [point for point in zip(places(series, axis), series.y, spread, strict=True) if is_number(point[1])]
        shown = (points if plot.kind != "line" else points[-1:]) or [(None, None, None)]
        rows += [(series.name, [Cell(part, short(part)) for part in point[skipped:]]) for point in shown]
    return [plot.axes.get(axis, "") or "at", plot.y_label, "± sd"][skipped:], rows


def _crossed(plot: Plot, axis: str) -> Table | None:
    """Bars that stand side by side as a table of series and places; None for others."""
    names = categories(plot, axis) or []
    if plot.kind != "bars" or not any(len(series.y) > 1 for series in plot.series) or len(plot.series) == 1:
        return None
    top = max((abs(y) for series in plot.series for y in series.y if is_number(y)), default=0.0)
    digits = max(0, 2 - math.floor(math.log10(top))) if top else 1
    rows = []
    for series in plot.series:
        spread = series.sd or (None,) * len(series.y)
        found = {label(x): (y, sd) for x, y, sd in zip(places(series, axis), series.y, spread, strict=True) if x}
        pairs = [found.get(name, (None, None)) for name in names]
        rows.append((series.name, [Cell(mean, with_sd(mean, sd, digits)) for mean, sd in pairs]))
    return names, rows


# ------------------------------------------------------------------------ for the script


def plot_data(plot: Plot, look: Sequence[Style], position: int) -> dict[str, Any]:
    """A plot as the page's script reads it. Positions that series share are stored once."""
    axes = list(plot.axes)
    kept = [_kept(len(series.y)) for series in plot.series]
    shared: dict[tuple[float | None, ...], int] = {}
    bars = {axis: bar_places(plot, axis) for axis in axes} if plot.kind == "bars" else {}
    series = []
    for n, (one, style) in enumerate(zip(plot.series, look, strict=True)):
        rows = [_positions(plot, one, axis, bars[axis][n] if bars else None) for axis in axes]
        thin = [tuple(_clean(row[i]) for i in kept[n]) for row in rows]
        series.append(
            {
                "name": one.name,
                "x": [shared.setdefault(row, len(shared)) for row in thin],
                "y": [_clean(one.y[i]) for i in kept[n]],
                "sd": [_clean(one.sd[i]) for i in kept[n]] if one.sd else None,
                "widths": [bars[axis][n][0][1] if bars[axis][n] else 0 for axis in axes] if bars else None,
                "marks": mark_every(len(kept[n]), n, len(plot.series)),
                **asdict(style),
            }
        )
    return {
        "id": position,
        "title": plot.title,
        "yLabel": plot.y_label,
        "kind": plot.kind,
        "logX": plot.log_x,
        "logY": plot.log_y,
        "legend": not named_below(plot),
        "axes": [
            {"name": axis, "label": text, "categories": categories(plot, axis), "limits": x_limits(plot, axis)}
            for axis, text in plot.axes.items()
        ],
        "y": y_limits(plot),
        "whole": y_limits(plot, whole=True),
        "xs": list(shared),
        "series": series,
    }


def _kept(count: int) -> list[int]:
    """Which points of a line are shown: all, or evenly spread ones with both ends."""
    if count <= MAX_POINTS:
        return list(range(count))
    return [round(i * (count - 1) / (MAX_POINTS - 1)) for i in range(MAX_POINTS)]


def _positions(plot: Plot, series: Series, axis: str, bars: Sequence[tuple[float, float]] | None) -> list[Any]:
    if bars is not None:
        return [centre for centre, _ in bars]
    names = categories(plot, axis)
    return [names.index(label(x)) if names and x is not None else x for x in places(series, axis)]


def _clean(value: Any) -> float | None:
    """Six digits, and null for what is no number: JSON has no other way to say it."""
    return float(f"{value:.6g}") if is_number(value) and math.isfinite(value) else None
