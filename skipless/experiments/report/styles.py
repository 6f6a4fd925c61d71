"""How each series of a plot is drawn: colour, dash, mark."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from skipless.analysis.plotting import BLOCK_COLOURS, COLOURS, MARKS, block_in, group_colours
from skipless.experiments.outcome import Plot, Series

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
