"""Where things stand in a plot: limits, categories, bars, marks. The page and the files share it."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

from skipless.analysis.plotting import block_in
from skipless.experiments.outcome import Plot, Series

AXES = {"steps": "training steps", "tokens": "training tokens", "minutes": "minutes of training"}

GAINS = {
    "attention.mixing.alpha": "α",
    "attention.mixing.beta": "β",
    "attention.mixing.gamma": "γ",
    "attention.value.alpha": "α_V",
    "attention.value.beta": "β_V",
    "attention.projection.alpha": "α_P",
    "attention.projection.beta": "β_P",
    "alpha_sa": "α_SA",
    "beta_sa": "β_SA",
    "alpha_ff": "α_FF",
    "beta_ff": "β_FF",
    "alpha_comb": "α_comb",
}
"""The paper's symbols for the gains of a layer."""


def is_number(value: Any, *, log: bool = False) -> TypeGuard[float]:
    """Whether a value has a place on an axis."""
    return isinstance(value, int | float) and math.isfinite(value) and (value > 0 or not log)


def places(series: Series, axis: str) -> tuple[float | str | None, ...]:
    """Where the points of a series lie along an axis; nowhere, if it has no such axis."""
    return series.x.get(axis) or (None,) * len(series.y)


def label(place: float | str) -> str:
    """A place along an axis of words."""
    return place if isinstance(place, str) else f"{place:g}"


def categories(plot: Plot, axis: str) -> list[str] | None:
    """The places along an axis of words, in order, as bars always have it; None along one of numbers."""
    values = [value for series in plot.series for value in places(series, axis) if value is not None]
    if any(isinstance(value, str) for value in values):
        return list(dict.fromkeys(map(label, values)))
    return list(dict.fromkeys(map(label, sorted(values)))) if plot.kind == "bars" else None  # pyrefly: ignore


def x_limits(plot: Plot, axis: str) -> tuple[float, float]:
    """The ends of an axis of numbers."""
    values = [x for series in plot.series for x, _, _ in _points(series, axis, plot)]
    return _padded(values, plot.log_x, 0.02)


def y_limits(plot: Plot, *, whole: bool = False) -> tuple[float, float]:
    """The ends of the axis of values.

    The steep beginning of a training would leave no room for what comes after it. So where the first fifth of it
    reaches over more than three times the range of the rest, it leaves the plot at the top, as in the paper's figures.
    """
    points = [point for axis in plot.axes for point in _along(plot, axis)]
    ends = [end for _, *pair in points for end in pair]
    if plot.kind == "bars":
        return (min([0.0, *ends]), 1.06 * max([0.0, *ends]) or 1.0)
    if plot.kind == "line" and plot.axes.keys() <= AXES.keys() and not (whole or plot.log_x or plot.log_y):
        rest = [end for share, *pair in points if share > 0.2 for end in pair]
        if rest and max(ends) - min(rest) > 3 * (max(rest) - min(rest)) > 0:
            ends = [min(ends), max(rest) + 0.25 * (max(rest) - min(rest))]
    return _padded(ends, plot.log_y, 0.05)


def _along(plot: Plot, axis: str) -> Iterator[tuple[float, float, float]]:
    """The points of the series that have this axis first, by the share of it that lies before them.

    So each series counts once, and the same part of the values is shown over every axis.
    """
    own = [one for one in plot.series if axis == next((name for name in plot.axes if one.x.get(name)), None)]
    points = [point for series in own for point in _points(series, axis, plot)]
    low, high = _padded([x for x, *_ in points], False, 0.02)
    for x, bottom, top in points:
        yield (x - low) / (high - low), bottom, top


def _points(series: Series, axis: str, plot: Plot) -> Iterator[tuple[float, float, float]]:
    """Place, and value less and plus a standard deviation, of what can be drawn."""
    spread = series.sd or (0.0,) * len(series.y)
    for x, y, sd in zip(places(series, axis), series.y, spread, strict=True):
        place = 0.0 if isinstance(x, str) else x
        if is_number(y, log=plot.log_y) and is_number(place, log=plot.log_x and place is x):
            sd = sd if is_number(sd) else 0.0
            yield place, y - sd if is_number(y - sd, log=plot.log_y) else y, y + sd


def _padded(values: Sequence[float], log: bool, share: float) -> tuple[float, float]:
    if not values:
        return (1.0, 10.0) if log else (0.0, 1.0)
    low, high = min(values), max(values)
    if log:
        room = high**share / low**share if high > low else 2.0  # high / low itself may be too large for a float
        return (low / room or math.ulp(0.0), high * room)
    room = share * (high - low) or 0.1 * abs(low) or 1.0
    return (low - room, high + room)


def mark_every(count: int, position: int, of: int) -> tuple[int, int]:
    """Which points of a line get a mark, the first and then every which: about eight, not above its neighbours'."""
    every = max(1, count // 8)
    return (every * position // max(1, of), every)


def bar_places(plot: Plot, axis: str) -> list[list[tuple[float, float]]]:
    """Centre and width of each bar of each series, in steps of a category: those of a category stand side by side."""
    rows = [[None if x is None else label(x) for x in places(series, axis)] for series in plot.series]
    names = categories(plot, axis) or []
    beside = {name: [number for number, row in enumerate(rows) if name in row] for name in names}
    width = 0.8 / max(map(len, beside.values()), default=1)

    def bar(series: int, name: str | None) -> tuple[float, float]:
        if name is None:
            return math.nan, width
        offset = beside[name].index(series) - (len(beside[name]) - 1) / 2
        return names.index(name) + offset * width, 0.92 * width

    return [[bar(number, name) for name in row] for number, row in enumerate(rows)]


def split_bars(plot: Plot) -> Plot:
    """Bars of one series that stand for blocks as a series each, for a block to have its own colour."""
    if plot.kind != "bars" or len(plot.series) != 1 or len(plot.axes) != 1:
        return plot
    (series,), (axis,) = plot.series, plot.axes
    names = [label(x) for x in places(series, axis) if x is not None]
    if len(names) != len(series.y) or len(set(names)) != len(names) or not any(map(block_in, names)):
        return plot
    spread = series.sd or (None,) * len(names)
    bars = zip(names, series.y, spread, strict=True)
    return replace(
        plot, series=tuple(Series(name, {axis: (name,)}, (y,), None if sd is None else (sd,)) for name, y, sd in bars)
    )


def named_below(plot: Plot) -> bool:
    """Whether the bars carry the names of their series already, so that a legend would say it again."""
    return plot.kind == "bars" and all(
        places(series, axis) == (series.name,) for series in plot.series for axis in plot.axes
    )


def finite_float(value: Any) -> float:
    """A value as a number, and what is none as not-a-number, which is not drawn."""
    return float(value) if is_number(value) else math.nan


def plain_text(text: str, length: int = 90) -> str:
    """A text that matplotlib shows as it is: dollars are no formula, and a name may begin with an underscore."""
    text = shorten(" ".join(text.split()), length).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def shorten(text: str, length: int) -> str:
    """A long text without its middle: names tend to differ at their ends."""
    if len(text) <= length:
        return text
    tail = length // 2
    return f"{text[: length - 1 - tail]}…{text[-tail:]}"
