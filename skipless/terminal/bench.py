"""What `skipless bench` measured."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skipless.analysis.units import number
from skipless.tasks.bench_plots import plot_growth
from skipless.terminal.tables import show_table

if TYPE_CHECKING:
    from skipless.tasks.bench import Row


def show_bench(what: str, rows: Sequence["Row"]) -> None:
    """Times, and how many times faster than each reference."""
    references = list(dict.fromkeys(reference for row in rows for reference in row.speedup))
    lines = []
    for row in rows:
        ratios = [row.speedup.get(reference) for reference in references]
        cells = ["" if r is None else f"{r[0]:.2f} ({r[1]:.2f}–{r[2]:.2f})" for r in ratios]
        share = "" if row.peak_share is None else f"{row.peak_share:.0%}"
        memory = "" if row.peak_bytes is None else number(row.peak_bytes, "B")
        lines.append([row.name, f"{row.milliseconds:,.1f}", share, memory, *cells])
    head = [what, "ms", "of peak", "memory", *(f"× {reference}" for reference in references)]
    kept = [i for i in range(len(head)) if i < 2 or any(line[i] for line in lines)]
    lines = [[line[i] for i in kept] for line in lines]
    title = "Medians; how many times as fast as each reference, with quartiles"
    show_table(title, [head[i] for i in kept], lines)


DECODING = {"prefill": "the prompt and the first token", "token": "a token after that", "whole": "the whole call"}


def show_decoding(found: Mapping[str, Sequence["Row"]]) -> None:
    """Times of the prompt, of a token and of both, and how many times as fast as `pre-ln` and as each other's model."""
    for kind, title in DECODING.items():
        lines = []
        references = list(found[kind][0].speedup) if found.get(kind) else []
        for row in found.get(kind, []):
            ratios = [f"{row.speedup[reference][0]:.2f}" for reference in references]
            lines.append([row.name, f"{row.milliseconds:,.2f}", *ratios])
        if lines:
            show_table(f"Decoding: {title}", ["decode", "ms", *(f"× {name}" for name in references)], lines)


def show_growth(found: dict[str, Any], *, quiet: bool, plot: Path | None) -> None:
    """Time and memory over the sequence length and the depth."""
    for axis, title in (("length", "one layer"), ("depth", "blocks at 128 tokens")):
        points = zip(found[axis]["x"], found[axis]["seconds"], found[axis]["peak_bytes"], strict=True)
        lines = [[f"{x:,}", f"{1e3 * seconds:,.1f}", number(size, "B")] for x, seconds, size in points]
        if not quiet:
            show_table(f"{found['block']}, {title}, forward and backward", [axis, "ms", "memory"], lines)
            slopes = [found[axis][f"{what}_slope"] for what in ("time", "memory")]
            print(
                "slopes in log-log: " + ", ".join("–" if s is None else f"{s:.2f}" for s in slopes) + " (time, memory)"
            )
    if plot:
        plot_growth(found, plot)


def show_timings(seconds: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """The time of a training token of each block at each size: pre-ln's, and the others' against it."""
    blocks = list(next(iter(seconds.values())))
    rows = []
    for size, times in seconds.items():
        medians = {block: statistics.median(times[block]) for block in blocks}
        base = medians[blocks[0]]
        rows.append([size, f"{1e6 * base:.4g}", *(f"{medians[block] / base:.3f}" for block in blocks[1:])])
    title = "Time of a training token, whole steps in turn: µs, and against pre-ln"
    show_table(title, ["size", f"{blocks[0]}, µs", *blocks[1:]], rows)
