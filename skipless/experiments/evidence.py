"""Runs as evidence: what was measured in each, by label and seed, and the time that a token takes."""

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from skipless.config.run import RunConfig
from skipless.experiments.report.summary import is_finished
from skipless.experiments.timings import NO_TIMINGS, Timings
from skipless.runs import Run
from skipless.tasks.glue_results import read_results
from skipless.tasks.low_bits import FILE as LOW_BITS_FILE
from skipless.tasks.low_bits import read_figures

TAIL = 0.05
"""The share of the training over whose end a training loss is averaged."""

SETTLED = 0.1
"""The share of a run that is left out where curves are compared: the first losses mostly show word frequencies."""


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
    bits: Mapping[str, Any] | None = None
    """The content of bits.json, where the model was measured at low bits."""
    token_time: float | None = None
    """Seconds for each training token, as `timings` has it; the clock of the training itself says little."""

    @classmethod
    def read(cls, run: Run) -> "History":
        """The history in a run's folder."""
        paths = [run.folder / f"{name}.json" for name in ("glue", "glue-from-scratch")]
        glue, scratch = (read_results(path) if path.exists() else None for path in paths)
        low_bits = run.folder / LOW_BITS_FILE
        bits = read_figures(low_bits) if low_bits.exists() else None
        return cls(run.config(), tuple(run.metrics()), run, glue, scratch, bits)

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
    def tuning_loss(self) -> float:
        """The last loss on the held-out rows that are for tuning, or where there are none the held-out loss."""
        return (self.having("tuning_loss") or [{"tuning_loss": self.valid_loss}])[-1]["tuning_loss"]

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
    def run_time(self) -> float:
        """Seconds of the whole training, at the measured time for a token."""
        assert self.token_time is not None
        return self.records[-1]["tokens"] * self.token_time

    def loss_at(self, seconds: float) -> float:
        """The held-out loss at a run time, on the line between two evaluations."""
        assert self.token_time is not None
        points = [(record["tokens"] * self.token_time, record["valid_loss"]) for record in self.having("valid_loss")]
        for (before, first), (after, second) in itertools.pairwise(points):
            if before <= seconds <= after:
                share = (seconds - before) / (after - before) if after > before else 1.0
                return first + share * (second - first)
        return points[-1][1] if seconds > points[-1][0] else points[0][1]

    def curve(self) -> dict[int, float]:
        """Step → held-out loss, from the point on where curves are compared."""
        records = self.having("valid_loss")
        start = SETTLED * records[-1]["step"]
        return {record["step"]: record["valid_loss"] for record in records if record["step"] >= start}

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
    """Histories by label and seed, and what a token takes."""

    histories: Mapping[str, Mapping[int, History]]
    timings: Timings = NO_TIMINGS

    @classmethod
    def timed(cls, histories: Mapping[str, Mapping[int, History]], timings: Timings) -> "Evidence":
        """The same with the measured time of a token in each history of which there is one."""
        return cls(
            {
                label: {seed: replace(one, token_time=timings.of(one.config)) for seed, one in of.items()}
                for label, of in histories.items()
            },
            timings,
        )

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
