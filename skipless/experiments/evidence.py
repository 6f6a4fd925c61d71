"""Runs as evidence, and how a claim is judged on them.

A claim is a bound on a quantity of one seed, such as the final loss of one block divided by another's, less one. Over
seeds the quantity has a mean and an interval; the claim holds where the whole interval lies within the bound, does not
hold where the whole interval lies outside, and is not decidable where the interval contains the bound.
"""

import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from skipless.config import RunConfig
from skipless.experiments.outcome import FAILS, HOLDS, OPEN, Plot, Series, Verdict
from skipless.experiments.report import is_finished
from skipless.runs import Run

ONE_SEED = 0.02
"""Half the interval that is assumed for a relative difference where there is one seed, whose spread nobody knows."""

TAIL = 0.05
"""The share of the training over whose end a training loss is averaged."""


# ----------------------------------------------------------------------------- histories


@dataclass(frozen=True)
class History:
    """What was measured in a run."""

    config: RunConfig
    records: Sequence[Mapping[str, Any]]
    run: Run | None = None
    glue: Mapping[str, Any] | None = None
    """The content of glue.json, where the model was fine-tuned."""
    scratch: Mapping[str, Any] | None = None
    """That of glue-from-scratch.json, where a random encoder was."""

    @classmethod
    def read(cls, run: Run) -> "History":
        """The history in a run's folder."""
        paths = [run.folder / f"{name}.json" for name in ("glue", "glue-from-scratch")]
        glue, scratch = (json.loads(path.read_text(encoding="utf-8")) if path.exists() else None for path in paths)
        return cls(run.config(), tuple(run.metrics()), run, glue, scratch)

    def having(self, key: str) -> list[Mapping[str, Any]]:
        """The records in which something was measured."""
        return [record for record in self.records if record.get(key) is not None]

    @cached_property
    def finished(self) -> bool:
        """Whether the budget was spent and the result evaluated."""
        evaluated = self.having("valid_loss")
        return bool(evaluated) and is_finished(self.config.train, evaluated[-1])

    @property
    def valid_loss(self) -> float:
        """The last held-out loss."""
        return self.having("valid_loss")[-1]["valid_loss"]

    @property
    def train_loss(self) -> float:
        """The training loss over the end of the training."""
        records = self.having("loss")
        start = (1 - TAIL) * records[-1]["step"]
        return statistics.fmean(record["loss"] for record in records if record["step"] > start)

    @property
    def perplexity(self) -> float:
        """The last held-out perplexity per token."""
        return math.exp(self.valid_loss)

    @property
    def perplexity_per_byte(self) -> float:
        """The last held-out perplexity per byte of text, which does not depend on the tokeniser."""
        return 2 ** self.having("valid_bits_per_byte")[-1]["valid_bits_per_byte"]

    @property
    def seconds(self) -> float:
        """Time spent in training steps."""
        return self.records[-1]["seconds"]

    @property
    def token_time(self) -> float:
        """Seconds for each training token."""
        return self.seconds / self.records[-1]["tokens"]

    def loss_at(self, seconds: float) -> float:
        """The held-out loss at a time, on the line between two evaluations."""
        points = [(record["seconds"], record["valid_loss"]) for record in self.having("valid_loss")]
        for (before, first), (after, second) in itertools.pairwise(points):
            if before <= seconds <= after:
                share = (seconds - before) / (after - before) if after > before else 1.0
                return first + share * (second - first)
        return points[-1][1] if seconds > points[-1][0] else points[0][1]

    def gains(self) -> dict[str, list[tuple[int, list[float]]]]:
        """Name of a gain → (step, values over heads) over the training."""
        found: dict[str, list[tuple[int, list[float]]]] = {}
        for record in self.having("gains"):
            for name, value in record["gains"].items():
                found.setdefault(name, []).append((record["step"], value if isinstance(value, list) else [value]))
        return found

    def layers(self, part: str) -> dict[int, list[tuple[int, list[float]]]]:
        """Layer, from 1 → trajectory of the gain whose name in a block is `part`, such as `attention.mixing.beta`."""
        found = {}
        for name, values in self.gains().items():
            pieces = name.split(".")
            if pieces[0] == "blocks" and ".".join(pieces[2:]) == part:
                found[int(pieces[1]) + 1] = values
        return dict(sorted(found.items()))

    def ratios(self, part: Literal["value", "projection"]) -> dict[int, list[tuple[int, float]]]:
        """Layer, from 1 → trajectory of β/α of its value or projection map (eq. 6)."""
        above, below = (self.layers(f"attention.{part}.{gain}") for gain in ("beta", "alpha"))
        return {
            layer: [(step, b[0] / a[0]) for (step, b), (_, a) in zip(above[layer], below[layer], strict=True)]
            for layer in above
            if layer in below
        }


def final_ratios(history: History) -> dict[str, float]:
    """`value 1`, `projection 1`, … → |β/α| at the end."""
    parts: tuple[Literal["value", "projection"], ...] = ("value", "projection")
    return {f"{part} {layer}": abs(values[-1][1]) for part in parts for layer, values in history.ratios(part).items()}


@dataclass(frozen=True)
class Evidence:
    """Histories by label and seed."""

    histories: Mapping[str, Mapping[int, History]]

    def finished(self, label: str) -> dict[int, History]:
        """The finished ones of a label."""
        return {seed: one for seed, one in self.histories.get(label, {}).items() if one.finished}

    def by_seed(self, labels: Iterable[str]) -> dict[int, dict[str, History]]:
        """Seed → label → history, for the seeds for which every label has finished."""
        found = {label: self.finished(label) for label in labels}
        seeds = set.intersection(*(set(histories) for histories in found.values()))
        return {seed: {label: found[label][seed] for label in found} for seed in sorted(seeds)}

    def runs(self) -> tuple[Run, ...]:
        """Every run behind it, finished or not."""
        every = (one.run for histories in self.histories.values() for one in histories.values())
        return tuple({run.folder: run for run in every if run is not None}.values())


# ------------------------------------------------------------------------------ judging

T_95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833)
"""The 95% quantile of Student's t with 1, 2, … 9 degrees of freedom."""


def t_95(freedom: int) -> float:
    """The 95% quantile of Student's t."""
    if freedom <= len(T_95):
        return T_95[freedom - 1]
    z = statistics.NormalDist().inv_cdf(0.95)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def interval(values: Sequence[float], one_seed: float) -> tuple[float, float, float]:
    """Mean, and the ends of its 90% interval: 5% on either side, so that a bound is passed with 95% confidence."""
    mean = statistics.fmean(values)
    half = one_seed
    if len(values) > 1:
        half = t_95(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def outcome(low: float, high: float, above: float, below: float) -> Literal["holds", "does not hold", "not decidable"]:
    """Where an interval lies: within the bounds, outside of them, or across."""
    if above < low and high < below:
        return HOLDS
    return FAILS if high < above or low > below else OPEN


Quantity = Callable[[Mapping[str, History]], float]
"""A number of one seed, from the histories of the labels."""


@dataclass(frozen=True)
class Claim:
    """A claim of the paper as bounds on a quantity: it holds if above < quantity < below."""

    text: str
    paper: str
    labels: tuple[str, ...]
    quantity: Quantity
    above: float = -math.inf
    below: float = math.inf
    one_seed: float = ONE_SEED
    form: str = "+.1%"
    """How the quantity is written."""
    show: Callable[[History], float] | None = None
    """What is shown of each label beside the quantity."""
    seed: str = "seed"
    """What the seeds are called."""

    def judge(self, evidence: Evidence) -> Verdict:
        """The verdict on the seeds for which every label has finished."""
        seeds = evidence.by_seed(self.labels)
        if not seeds:
            missing = [label for label in self.labels if not evidence.finished(label)]
            what = f"no finished run of {', '.join(missing)}" if missing else "no seed has finished for all of them"
            return Verdict(self.text, self.paper, OPEN, what)
        values = [self.quantity(histories) for histories in seeds.values()]
        mean, low, high = interval(values, self.one_seed)
        shown = self._shown(seeds.values())
        numbers = {**shown, "mean": mean, "low": low, "high": high, "seeds": float(len(seeds))}
        numbers |= {name: bound for name, bound in self._bounds().items() if math.isfinite(bound)}
        result = outcome(low, high, self.above, self.below)
        return Verdict(self.text, self.paper, result, self._reason(shown, (mean, low, high), list(seeds)), numbers)

    def _bounds(self) -> dict[str, float]:
        return {"above": self.above, "below": self.below}

    def _shown(self, seeds: Iterable[Mapping[str, History]]) -> dict[str, float]:
        if self.show is None:
            return {}
        rows = list(seeds)
        return {label: statistics.fmean(self.show(row[label]) for row in rows) for label in self.labels}

    def _reason(self, shown: dict[str, float], found: tuple[float, float, float], seeds: list[int]) -> str:
        mean, low, high = (self._figure(value) for value in found)
        numbers = {label: f"{value:,.0f}" if value >= 1e4 else f"{value:.4g}" for label, value in shown.items()}
        parts = ", ".join(f"{label} {text}" for label, text in numbers.items())
        bounds = [f"{name} {self._figure(bound)}" for name, bound in self._bounds().items() if math.isfinite(bound)]
        over = f"90% interval over {self.seed}s {', '.join(map(str, seeds))}"
        if len(seeds) == 1:
            assumed = self._figure(self.one_seed).lstrip("+")
            over = f"one {self.seed}, so its spread is unknown and ±{assumed} is assumed"
        return f"{parts + ': ' if parts else ''}{mean} [{low}, {high}] ({over}); holds {' and '.join(bounds)}"

    def _figure(self, value: float) -> str:
        return f"{value:{self.form}}"


def valid_loss(history: History) -> float:
    """The last held-out loss."""
    return history.valid_loss


def relative(first: str, second: str, measure: Callable[[History], float] = valid_loss) -> Quantity:
    """How much more of something the first has than the second, as a share."""
    return lambda seed: measure(seed[first]) / measure(seed[second]) - 1


def compare(
    text: str,
    paper: str,
    first: str,
    second: str,
    *,
    above: float = -math.inf,
    below: float = math.inf,
    measure: Callable[[History], float] = valid_loss,
) -> Claim:
    """A claim on how one label's measure differs from another's, as a share of the other's."""
    quantity = relative(first, second, measure)
    return Claim(text, paper, (first, second), quantity, above=above, below=below, show=measure)


def at_equal_time(text: str, paper: str, first: str, second: str, *, below: float) -> Claim:
    """A claim on the held-out losses at the run time at which the faster of two has finished, as the figures show."""

    def quantity(seed: Mapping[str, History]) -> float:
        moment = min(seed[first].seconds, seed[second].seconds)
        return seed[first].loss_at(moment) / seed[second].loss_at(moment) - 1

    return Claim(text, paper, (first, second), quantity, below=below)


# -------------------------------------------------------------------------------- plots

AXES = {"steps": "steps", "tokens": "training tokens", "minutes": "minutes of training"}


def mean_sd(rows: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], tuple[float, ...] | None]:
    """Mean over rows, and standard deviation where there are several."""
    columns = list(zip(*rows, strict=True))
    means = tuple(statistics.fmean(column) for column in columns)
    return means, tuple(statistics.stdev(column) for column in columns) if len(rows) > 1 else None


def loss_series(label: str, histories: Mapping[int, History], key: str = "valid_loss") -> Series | None:
    """Something measured over steps, tokens and minutes: mean and standard deviation over seeds."""
    finished = [one for one in histories.values() if one.finished] or list(histories.values())[:1]
    curves = [{record["step"]: record for record in one.having(key)} for one in finished]
    if not curves:
        return None
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    if len(steps) < 2:  # a budget in minutes ends at another step each time
        curves, steps = curves[:1], sorted(curves[0])
    if not steps:
        return None
    y, sd = mean_sd([[curve[step][key] for step in steps] for curve in curves])
    tokens = tuple(float(curves[0][step]["tokens"]) for step in steps)
    minutes = mean_sd([[curve[step]["seconds"] / 60 for step in steps] for curve in curves])[0]
    return Series(label, {"steps": tuple(float(step) for step in steps), "tokens": tokens, "minutes": minutes}, y, sd)


def loss_plot(
    evidence: Evidence,
    key: str,
    title: str,
    first_axis: str = "steps",
    *,
    measure: str = "valid_loss",
    label: str = "held-out loss",
    labels: Iterable[str] | None = None,
) -> Plot:
    """Held-out losses of the labels over steps, tokens or minutes."""
    chosen = list(evidence.histories) if labels is None else list(labels)
    series = [loss_series(name, evidence.histories.get(name, {}), measure) for name in chosen]
    axes = {first_axis: AXES[first_axis], **{name: text for name, text in AXES.items() if name != first_axis}}
    return Plot(key, title, label, axes, tuple(one for one in series if one is not None))


def swept_plot(
    evidence: Evidence, key: str, title: str, axis: str, lines: Mapping[str, Mapping[float, str]], *, log_x: bool
) -> Plot:
    """Final held-out loss over a value: a line is value → label."""
    series = []
    for name, points in lines.items():
        found = {value: evidence.finished(label) for value, label in points.items()}
        found = {value: histories for value, histories in sorted(found.items()) if histories}
        losses = [[one.valid_loss for one in histories.values()] for histories in found.values()]
        if not losses:
            continue
        sd = tuple(statistics.stdev(row) if len(row) > 1 else 0.0 for row in losses)
        several = any(len(row) > 1 for row in losses)
        y = tuple(statistics.fmean(row) for row in losses)
        series.append(Series(name, {"value": tuple(found)}, y, sd if several else None))
    return Plot(key, title, "final held-out loss", {"value": axis}, tuple(series), log_x=log_x)


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
    return Plot(key, title, title, {"steps": "steps"}, tuple(series))


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
