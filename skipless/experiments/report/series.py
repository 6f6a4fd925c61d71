"""Evidence as plots: losses over steps, tokens and run time; sweeps; gains; bars."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from skipless.experiments.evidence import Evidence, History
from skipless.experiments.outcome import Plot, Series

AXES = {"steps": "steps", "tokens": "training tokens", "minutes": "minutes at the measured time of a token"}


def mean_sd(rows: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], tuple[float, ...] | None]:
    """Mean over rows, and standard deviation where there are several."""
    columns = list(zip(*rows, strict=True))
    means = tuple(statistics.fmean(column) for column in columns)
    return means, tuple(statistics.stdev(column) for column in columns) if len(rows) > 1 else None


def loss_series(label: str, histories: Mapping[int, History], key: str = "valid_loss") -> Series | None:
    """Something measured over steps, tokens and run time: mean and standard deviation over seeds."""
    finished = [one for one in histories.values() if one.finished] or list(histories.values())[:1]
    curves = [{record["step"]: record for record in one.having(key)} for one in finished]
    if not curves:
        return None
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    if not steps:
        return None
    y, sd = mean_sd([[curve[step][key] for step in steps] for curve in curves])
    tokens = tuple(float(curves[0][step]["tokens"]) for step in steps)
    time = finished[0].token_time
    minutes = {} if time is None else {"minutes": tuple(count * time / 60 for count in tokens)}
    return Series(label, {"steps": tuple(float(step) for step in steps), "tokens": tokens, **minutes}, y, sd)


def loss_plot(
    evidence: Evidence,
    key: str,
    title: str,
    first_axis: str = "steps",
    *,
    measure: str = "valid_loss",
    label: str = "held-out loss (nats per token)",
    labels: Iterable[str] | None = None,
) -> Plot:
    """Held-out losses of the labels over steps and tokens, and over run time where that was measured for all."""
    chosen = list(evidence.histories) if labels is None else list(labels)
    found = [loss_series(name, evidence.histories.get(name, {}), measure) for name in chosen]
    series = tuple(one for one in found if one is not None)
    there = [axis for axis in AXES if axis != "minutes" or (series and all(axis in one.x for one in series))]
    first = first_axis if first_axis in there else "steps"
    axes = {first: AXES[first], **{name: AXES[name] for name in there if name != first}}
    return Plot(key, title, label, axes, series)


def swept_plot(
    evidence: Evidence,
    key: str,
    title: str,
    axis: str,
    lines: Mapping[str, Mapping[float, str]],
    *,
    log_x: bool,
    measure: Callable[[History], float] = lambda history: history.valid_loss,
    label: str = "final held-out loss (nats per token)",
) -> Plot:
    """Final held-out loss, or another measure, over a value: a line is value → label."""
    series = []
    for name, points in lines.items():
        found = {value: evidence.finished(label) for value, label in points.items()}
        found = {value: histories for value, histories in sorted(found.items()) if histories}
        losses = [[measure(one) for one in histories.values()] for histories in found.values()]
        if not losses:
            continue
        sd = tuple(statistics.stdev(row) if len(row) > 1 else 0.0 for row in losses)
        several = any(len(row) > 1 for row in losses)
        y = tuple(statistics.fmean(row) for row in losses)
        series.append(Series(name, {"value": tuple(found)}, y, sd if several else None))
    return Plot(key, title, label, {"value": axis}, tuple(series), "marks", log_x=log_x)


def gain_plot(evidence: Evidence, label: str, part: str, key: str, title: str) -> Plot:
    """Trajectories of a gain, a line for each layer with the standard deviation over heads; of the first seed."""
    histories = evidence.histories.get(label, {})
    series = []
    for layer, values in next(iter(histories.values())).layers(part).items() if histories else ():
        steps = tuple(float(step) for step, _ in values)
        y = tuple(statistics.fmean(heads) for _, heads in values)
        several = len(values[0][1]) > 1
        sd = tuple(statistics.stdev(heads) for _, heads in values) if several else None
        series.append(Series(f"layer {layer}", {"steps": steps}, y, sd))
    return Plot(key, f"{title} ({label})", title, {"steps": "steps"}, tuple(series))


def ratio_plot(evidence: Evidence, label: str, key: str, title: str) -> Plot:
    """Trajectories of β/α of every value and projection map, of the first seed."""
    histories = evidence.histories.get(label, {})
    parts: tuple[Literal["value", "projection"], ...] = ("value", "projection")
    series = [
        Series(
            f"{part} {layer}",
            {"steps": tuple(float(step) for step, _ in values)},
            tuple(ratio for _, ratio in values),
            group=part,
        )
        for part in parts
        for layer, values in (next(iter(histories.values())).ratios(part).items() if histories else ())
    ]
    return Plot(key, title, "β / α", {"steps": "steps"}, tuple(series))


def bar_series(name: str, axis: str, bars: Mapping[str, Sequence[float]]) -> Series:
    """A bar for each place along an axis of words that has values: their mean, and standard deviation."""
    bars = {place: values for place, values in bars.items() if values}
    y = tuple(statistics.fmean(values) for values in bars.values())
    several = any(len(values) > 1 for values in bars.values())
    sd = tuple(statistics.stdev(values) if len(values) > 1 else math.nan for values in bars.values())
    return Series(name, {axis: tuple(bars)}, y, sd if several else None)


def bar_plot(key: str, title: str, label: str, bars: Mapping[str, Sequence[float]]) -> Plot:
    """A bar for each block: mean, and standard deviation, of its values."""
    series = bar_series(label, "block", bars)
    return Plot(key, title, label, {"block": "block"}, (series,) if series.y else (), kind="bars")
