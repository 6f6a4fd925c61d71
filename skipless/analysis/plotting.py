"""What all plots share: matplotlib without a screen, and one colour for each block."""

import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skipless.config.block import BLOCKS
from skipless.errors import MissingExtra, UserError
from skipless.storage.atomic_files import write_bytes

if TYPE_CHECKING:
    from skipless.analysis.inspection import Inspection

PLOT_FORMATS = (".png", ".svg", ".pdf")

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#BF8400", "#2F97D6", "#000000")
"""Okabe and Ito's, which people with any colour vision can tell apart; two of them darker, to be seen on white."""

BLOCK_COLOURS = {
    "pre-ln": "#000000",
    "sas": "#0072B2",
    "sas-p": "#D55E00",
    "sas-p-nonorm": "#009E73",
    "v-skipinit": "#CC79A7",
    "parallel": "#2F97D6",
    "post-ln": "#BF8400",
}
"""A block has the same colour wherever it is drawn."""

MARKS = ("o", "s", "^", "D", "v", "P", "X", "<")
"""Eight for seven colours: no pair of the two comes again before the 57th."""


def block_in(name: str) -> str | None:
    """The block that a name begins with, up to a comma: `sas-p, 3 seeds` is of `sas-p`."""
    first = name.split(",", 1)[0].strip().lower()
    return first if first in BLOCKS else None


def group_colours(groups: Iterable[str]) -> dict[str, str]:
    """A colour for each: a block's own, and for what is no block one that none of these blocks has."""
    names = {group: block_in(group) or group for group in groups}
    taken = {BLOCK_COLOURS[name] for name in names.values() if name in BLOCK_COLOURS}
    free = [colour for colour in COLOURS if colour not in taken] or COLOURS
    others = dict.fromkeys(name for name in names.values() if name not in BLOCK_COLOURS)
    colours = {**BLOCK_COLOURS, **{name: free[position % len(free)] for position, name in enumerate(others)}}
    return {group: colours[name] for group, name in names.items()}


def check_plot(path: Path) -> None:
    """Raise before anything is computed where the plot could not be written."""
    if path.suffix.lower() not in PLOT_FORMATS:
        raise UserError(f"cannot draw into {str(path)!r}: the ending must be one of {', '.join(PLOT_FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise UserError(f"cannot draw into {str(path)!r}: there is no folder {str(path.absolute().parent)!r}")
    pyplot()


def pyplot() -> Any:
    """matplotlib.pyplot without a screen."""
    try:
        import matplotlib
    except ImportError:
        raise MissingExtra("matplotlib", "plots", "drawing a plot") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def save_figure(figure: Any, path: Path, dpi: int = 150, **how: Any) -> None:
    """Write a figure as a file that appears in one piece, and close it; the ending of the path says which kind."""
    out = io.BytesIO()
    figure.savefig(out, format=path.suffix.lower().removeprefix("."), dpi=dpi, **how)
    pyplot().close(figure)
    write_bytes(path, out.getvalue())


def plot_signal(found: Sequence["Inspection"], path: Path) -> None:
    """Size of the activations, similarity of the tokens and size of the gradients over the layers."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    titles = {
        "activation": "size of activations (RMS)",
        "cosine": "cosine similarity of tokens",
        "gradient": "size of gradients, against the last layer",
    }
    colours = group_colours(one.name for one in found)
    for axis, (key, title) in zip(axes, titles.items(), strict=True):
        for position, one in enumerate(found):
            axis.plot(
                [layer.layer for layer in one.signal],
                [getattr(layer, key) for layer in one.signal],
                color=colours[one.name],
                marker=MARKS[position % len(MARKS)],
                markevery=max(1, len(one.signal) // 9),
                label=one.name,
            )
        axis.set(title=title, xlabel="layer", yscale="linear" if key == "cosine" else "log")
        axis.grid(alpha=0.3)
    axes[1].set_ylim(None, 1.05)
    axes[1].axhline(1, color="grey", linestyle=":", label="rank collapse")
    axes[1].legend(fontsize="small")
    save_figure(figure, path)
