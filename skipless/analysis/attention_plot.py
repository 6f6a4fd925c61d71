"""Pictures of what is inside a trained model: mixing matrices, gains over depth, outliers over training."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from skipless.analysis.attention_maps import LayerMaps, Maps
from skipless.analysis.plotting import COLOURS, MARKS, pyplot, save_figure
from skipless.errors import UserError

NEGATIVE, POSITIVE = COLOURS[0], COLOURS[1]
"""Blue and vermilion: the two ends of the scale, with white for nothing."""

INK = "#7a7a7a"
"""Of letters and axes: it is read on a light page and on a dark one."""

DPI = 110

LONGEST_SIDE, MOST_PIXELS = 2**16 - 1, 4 * 10**8
"""That a picture may have: beyond the first nothing can be drawn, and beyond the second nothing can be seen."""

SYMBOLS = {"alpha": "α", "beta": "β", "gamma": "γ"}

Outliers = Mapping[int, Sequence[float]]
"""Step → kurtosis of each layer."""


def plot_maps(maps: Maps, outliers: Outliers, path: Path | IO[bytes]) -> None:
    """Draw the matrix of every layer and head with its terms beside it, the gains over depth, and the outliers."""
    plt = pyplot()
    layers, heads = maps.layers, len(maps.layers[0].matrix)
    panels = 1 + max(len(_terms(layer)) for layer in layers)
    width, side = max(8.0, 1.05 * panels * heads + 1.2), 1.05
    below = 3.2
    height = side * len(layers) + below + 1.0
    if max(width, height) * DPI > LONGEST_SIDE or width * height * DPI**2 > MOST_PIXELS:
        raise UserError(
            f"{len(layers)} layers of {heads} heads are too many to draw; `skipless inspect RUN --attention TEXT "
            "--json` has every number"
        )
    figure = plt.figure(figsize=(width, height), facecolor="none", layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=[height - below, below])
    for part in (top, bottom):
        part.set_facecolor("none")
    _draw_matrices(top, maps, heads, panels)
    left, right = bottom.subplots(1, 2)
    _draw_gains(left, layers)
    _draw_outliers(right, outliers)
    if isinstance(path, Path):
        save_figure(figure, path, dpi=DPI)
    else:
        figure.savefig(path, format="png", dpi=DPI)
        plt.close(figure)


def _draw_matrices(figure: Any, maps: Maps, heads: int, panels: int) -> None:
    from matplotlib.colors import FuncNorm, LinearSegmentedColormap

    # weights of a long text are small: by their square roots, and with their signs, they are still seen
    scale = FuncNorm((_signed_root, _signed_square), vmin=-1, vmax=1)
    colours = LinearSegmentedColormap.from_list("skipless", [NEGATIVE, "#ffffff", POSITIVE])
    colours.set_bad("none")
    axes = figure.subplots(len(maps.layers), heads, squeeze=False)
    image = None
    for row, layer in zip(axes, maps.layers, strict=True):
        terms = _terms(layer)
        names = ["the matrix", *terms]
        for head, axis in enumerate(row):
            shown = [layer.matrix[head], *(term[head] for term in terms.values())]
            image = axis.imshow(_side_by_side(shown, panels), cmap=colours, norm=scale, interpolation="nearest")
            axis.set(xticks=[], yticks=[])
            for spine in axis.spines.values():
                spine.set_visible(False)
            if layer.layer == 1:
                axis.set_title(f"head {head + 1}\n{'  |  '.join(names)}", fontsize=8, color=INK)
            if head == 0:
                axis.set_ylabel(f"layer {layer.layer}", fontsize=8, color=INK)
    bar = figure.colorbar(image, ax=axes, shrink=min(1.0, 3 / len(maps.layers)), aspect=12)
    bar.set_ticks([-1, -0.25, -0.05, 0, 0.05, 0.25, 1])
    bar.ax.tick_params(colors=INK, labelsize=7)
    bar.outline.set_visible(False)
    figure.suptitle("What each token (row) takes from which (column)", fontsize=10, color=INK)


def _terms(layer: LayerMaps) -> Mapping[str, Tensor]:
    """The terms of a layer's matrix that are shown: one alone is the matrix."""
    return layer.terms if len(layer.terms) > 1 else {}


def _signed_root(x: Any) -> Any:
    return np.sign(x) * np.sqrt(np.abs(x))


def _signed_square(x: Any) -> Any:
    return np.sign(x) * np.square(x)


def _side_by_side(shown: Sequence[Tensor], panels: int) -> Tensor:
    """Matrices with a gap between them, (T, …)."""
    length = shown[0].shape[-1]
    gap = torch.full((length, max(1, length // 12)), math.nan)
    filled = [*shown, *[torch.full((length, length), math.nan)] * (panels - len(shown))]
    return torch.cat([part for one in filled for part in (one.float(), gap)][:-1], dim=1)


def _draw_gains(axis: Any, layers: Sequence[LayerMaps]) -> None:
    names = list(dict.fromkeys(name for layer in layers for name in layer.gains))
    for position, name in enumerate(names):
        there = [layer for layer in layers if name in layer.gains]
        where, colour = [layer.layer for layer in there], COLOURS[position % len(COLOURS) if position < 6 else 0]
        mean = [statistics.fmean(layer.gains[name]) for layer in there]
        low, high = ([pick(layer.gains[name]) for layer in there] for pick in (min, max))
        axis.plot(where, mean, color=colour, marker=MARKS[position % len(MARKS)], label=SYMBOLS.get(name, name))
        axis.fill_between(where, low, high, color=colour, alpha=0.2, linewidth=0)
    title = "gains over depth: mean and range of the heads" if names else "this mixing has no gains"
    _finish(axis, title, "layer", legend=bool(names))
    axis.set_axis_on() if names else axis.set_axis_off()


def _draw_outliers(axis: Any, outliers: Outliers) -> None:
    count = max((len(values) for values in outliers.values()), default=0)
    for layer in range(count):
        share = 0.15 + 0.85 * (layer / max(1, count - 1))
        named = layer in (0, count - 1)
        label = f"layer {layer + 1}" if named else None
        values = [found[layer] for found in outliers.values()]
        axis.plot(list(outliers), values, color=COLOURS[0], alpha=share, linewidth=1.2, label=label)
    title = "outliers over training: kurtosis of each layer" if outliers else "outliers: train.health_every was 0"
    _finish(axis, title, "steps", legend=count > 0)
    axis.set_axis_on() if outliers else axis.set_axis_off()


def _finish(axis: Any, title: str, below: str, *, legend: bool) -> None:
    axis.set_facecolor("none")
    axis.set_title(title, fontsize=9, color=INK)
    axis.set_xlabel(below, fontsize=8, color=INK)
    axis.tick_params(colors=INK, labelsize=8)
    axis.grid(alpha=0.3)
    axis.xaxis.get_major_locator().set_params(integer=True)
    for spine in axis.spines.values():
        spine.set_color(INK)
    if legend:
        axis.legend(fontsize=8, labelcolor=INK, framealpha=0)
