"""Plots as data → files for papers: PNG, SVG, and the CSV behind them. The page draws the same data its own way.

What both have to agree on is decided here: colours, marks, dashes, and which part of the values is shown.
"""

import csv
import io
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

from skipless.atomic import make_folder, write_bytes, write_text
from skipless.display import BLOCK_COLOURS, COLOURS, MARKS, block_in, group_colours, pyplot
from skipless.errors import UserError
from skipless.experiments.outcome import Finding, Plot, Series
from skipless.experiments.report import Pool, pool_seeds, summarise
from skipless.runs import Run

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

# ------------------------------------------------------------------------------- styles

INK = ("#000000", "#f2f2f0")
"""Black, and what stands for it on a dark page."""

RAMP = ("#440154", "#3b528b", "#21918c", "#5ec962", "#fde725")
"""Viridis, for what is many and has an order, such as layers: lightness alone tells it."""

DASHES: tuple[tuple[float, ...], ...] = ((), (6, 2.5), (1.5, 2), (7, 2, 1.5, 2))
"""On and off, of the series that share a colour."""


@dataclass(frozen=True)
class Style:
    """How a series looks."""

    light: str
    dark: str
    """Its colour on either background."""
    mark: str
    dash: tuple[float, ...]


def styles(plots: Sequence[Plot]) -> list[tuple[Style, ...]]:
    """A style for each series of each plot; a group looks the same in all of them."""
    many = [len(_other_groups([plot])) > len(COLOURS) for plot in plots]
    drawn = [plot for plot, ramp in zip(plots, many, strict=True) if not ramp]
    colours = group_colours(_group(series) for plot in [*drawn, *plots] for series in plot.series)
    marks = {group: position for position, group in enumerate([*BLOCK_COLOURS, *_other_groups(drawn)])}
    return [
        _ramp_styles(plot) if ramp else _plain_styles(plot, colours, marks)
        for plot, ramp in zip(plots, many, strict=True)
    ]


def _group(series: Series) -> str:
    """What a series shares its colour with: a block is known by its name, also by one that goes on after a comma."""
    name = series.group or series.name
    return block_in(name) or name


def _other_groups(plots: Sequence[Plot]) -> list[str]:
    """The groups that are no blocks, in order."""
    groups = (_group(series) for plot in plots for series in plot.series)
    return list(dict.fromkeys(group for group in groups if group not in BLOCK_COLOURS))


def _plain_styles(plot: Plot, colours: Mapping[str, str], marks: Mapping[str, int]) -> tuple[Style, ...]:
    groups = [_group(series) for series in plot.series]
    found, seen = [], dict.fromkeys(groups, 0)
    for group in groups:
        position, of = seen[group], groups.count(group)
        light, dark = colours[group], INK[1] if colours[group] == INK[0] else colours[group]
        mark = MARKS[(marks[group] + position) % len(MARKS)]
        if of > len(DASHES):  # more than dashes could tell apart: shades of the colour, in order
            share = position / (of - 1)
            shades = (
                _mixed(light, "#ffffff" if light == INK[0] else "#000000", 0.45 * share),
                _mixed(dark, "#808080", share / 2),
            )
            few = plot.kind == "marks"  # on a line of hundreds of points so many marks would hide each other
            found.append(Style(*shades, mark if few else "", DASHES[position % len(DASHES)] if few else ()))
        elif plot.kind == "bars" and position:  # a bar has no dashes: paler
            share = 0.6 * position / (of - 1)
            found.append(Style(_mixed(light, "#ffffff", share), _mixed(dark, "#000000", share), "", ()))
        else:
            found.append(Style(light, dark, mark, DASHES[position]))
        seen[group] += 1
    return tuple(found)


def _ramp_styles(plot: Plot) -> tuple[Style, ...]:
    groups = list(dict.fromkeys(map(_group, plot.series)))
    share = {group: position / (len(groups) - 1) for position, group in enumerate(groups)}
    # without the end that would not stand out from the background: 3 to 1, as lines should
    return tuple(
        Style(_ramp(0.6 * share[group]), _ramp(0.37 + 0.63 * share[group]), "", ())
        for group in map(_group, plot.series)
    )


def _ramp(share: float) -> str:
    position = share * (len(RAMP) - 1)
    left = min(int(position), len(RAMP) - 2)
    return _mixed(RAMP[left], RAMP[left + 1], position - left)


def _mixed(first: str, second: str, share: float) -> str:
    """A colour on the way from one to another."""
    pairs = ((int(first[i : i + 2], 16), int(second[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


# ------------------------------------------------------------------------- what is shown


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


# -------------------------------------------------------------------------------- files


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


def draw(plot: Plot, path: Path, axes: Sequence[str], look: Sequence[Style] | None = None) -> Path:
    """A plot as a picture, with a panel for each of the axes; the ending of the path says which kind."""
    plt = pyplot()
    look = look or styles([plot])[0]
    # no dates and no random names: the same plot is the same file
    with plt.rc_context({"svg.hashsalt": "skipless", "font.size": 9, "axes.spines.top": False}):
        size = (5.4 * len(axes), 3.6)
        figure, panels = plt.subplots(1, len(axes), figsize=size, layout="constrained", sharey=True, squeeze=False)
        for panel, axis in zip(panels[0], axes, strict=True):
            _draw_panel(panel, plot, axis, look)
        panels[0][0].set_ylabel(_plain(plot.y_label))
        figure.suptitle(_plain(plot.title), fontsize=10)
        _draw_legend(figure, panels[0][-1], plot)
        kind, out = path.suffix.lower().removeprefix("."), io.BytesIO()
        metadata = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[kind]
        figure.savefig(out, format=kind, dpi=140, metadata=metadata)
        plt.close(figure)
    write_bytes(path, out.getvalue())
    return path


def _draw_panel(panel: Any, plot: Plot, axis: str, look: Sequence[Style]) -> None:
    names = categories(plot, axis)
    if plot.kind == "bars":
        _draw_bars(panel, plot, axis, look)
    else:
        for position, (series, style) in enumerate(zip(plot.series, look, strict=True)):
            _draw_line(panel, plot, axis, names, series, style, position)
    panel.set(xlabel=_plain(plot.axes[axis]), ylim=y_limits(plot))
    if names is None:
        panel.set(xlim=x_limits(plot, axis), xscale="log" if plot.log_x else "linear")
        if plot.log_x:
            _plain_ticks(panel.xaxis, *x_limits(plot, axis))
    else:
        tilted = sum(map(len, names)) > 50
        panel.set(xlim=(-0.5, max(1, len(names)) - 0.5))
        panel.set_xticks(range(len(names)), [_plain(name, 24) for name in names], fontsize=8)
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
    x = [_float(names.index(label(x)) if names and x is not None else x) for x in places(series, axis)]
    y, sd = [_float(value) for value in series.y], [_float(value) for value in series.sd or ()]
    how = {"color": style.light, "label": _plain(series.name, 44), "markersize": 4.5, "marker": style.mark or None}
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
        heights = [_float(value) for value in series.y]
        how = {"color": style.light, "label": _plain(series.name, 44), "capsize": 3, "ecolor": "#666666"}
        panel.bar([place for place, _ in bars], heights, width, yerr=sd, **how)


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


def _draw_legend(figure: Any, panel: Any, plot: Plot) -> None:
    handles, labels = panel.get_legend_handles_labels()
    if not handles or named_below(plot):
        return
    if plot.kind == "bars" or len(handles) > len(COLOURS):  # it would hide what it explains
        columns = 1 + len(handles) // 20
        figure.legend(handles, labels, loc="outside right center", fontsize=7.5, frameon=False, ncols=columns)
    else:
        panel.legend(handles, labels, fontsize=8, framealpha=0.85, edgecolor="none")


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


def _float(value: Any) -> float:
    return float(value) if is_number(value) else math.nan


def _plain(text: str, length: int = 90) -> str:
    """A text that matplotlib shows as it is: dollars are no formula, and a name may begin with an underscore."""
    text = shorten(" ".join(text.split()), length).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def shorten(text: str, length: int) -> str:
    """A long text without its middle: names tend to differ at their ends."""
    if len(text) <= length:
        return text
    tail = length // 2
    return f"{text[: length - 1 - tail]}…{text[-tail:]}"


# --------------------------------------------------------------------------- plots of runs


def run_plots(runs: Sequence[Run]) -> tuple[Plot, ...]:
    """Losses, sizes and speeds of runs, and how their gains went; those that differ only in their seed are one."""
    pools = pool_seeds(runs)
    plots = [
        _loss_plot(pools, "loss", "Held-out loss", "valid_loss"),
        _loss_plot(pools, "train-loss", "Training loss", "loss"),
        *_bar_plots(pools),
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
