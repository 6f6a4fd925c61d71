"""What runs did, side by side: a table, a plot of the losses, samples. Reads the folders of runs and nothing else."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from skipless.config import TrainConfig
from skipless.display import COLOURS, MARKS, pyplot
from skipless.errors import UserError
from skipless.inspect import count_parameters
from skipless.runs import Run


@dataclass(frozen=True)
class Summary:
    """A run in a line."""

    name: str
    parameters: int
    steps: int
    tokens: int
    seconds: float
    tokens_per_second: float
    train_loss: float | None
    valid_loss: float | None
    valid_bits_per_byte: float | None
    finished: bool


def summarise(run: Run) -> Summary:
    """The last measurements of a run."""
    cfg = run.config()
    last: dict[str, Any] = {"step": 0, "tokens": 0, "seconds": 0.0}
    losses: list[float] = []
    valid: dict[str, Any] = {}
    for record in run.metrics():
        last = record
        if "valid_loss" in record:
            valid = record
        elif record.get("loss") is not None:
            losses.append(record["loss"])
    tail = losses[-max(1, len(losses) // 20) :]
    return Summary(
        name=run.name,
        parameters=sum(count_parameters(cfg.model).values()),
        steps=last["step"],
        tokens=last["tokens"],
        seconds=last["seconds"],
        tokens_per_second=last["tokens"] / last["seconds"] if last["seconds"] else 0.0,
        train_loss=sum(tail) / len(tail) if tail else None,
        valid_loss=valid.get("valid_loss"),
        valid_bits_per_byte=valid.get("valid_bits_per_byte"),
        finished=is_finished(cfg.train, last),
    )


def is_finished(train: TrainConfig, last: Mapping[str, Any]) -> bool:
    """Whether the budget was spent when this was measured."""
    if train.minutes is not None:
        return last["seconds"] >= 60 * train.minutes
    spent, budget = (last["tokens"], train.tokens) if train.tokens is not None else (last["step"], train.steps)
    return budget is not None and spent >= budget


def as_dict(summary: Summary) -> dict[str, Any]:
    """For JSON."""
    return asdict(summary)


def plot_losses(runs: Sequence[Run], path: Path) -> None:
    """Training and held-out loss over steps and over time."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained", sharey=True)
    lowest, highest = float("inf"), 0.0
    for position, run in enumerate(runs):
        colour, mark = COLOURS[position % len(COLOURS)], MARKS[position % len(MARKS)]
        records = list(run.metrics())
        train = [record for record in records if record.get("loss") is not None]
        valid = [record for record in records if record.get("valid_loss") is not None]
        if not valid:
            raise UserError(f"run {run.name!r} has no held-out loss yet, so there is nothing to draw")
        for axis, key in zip(axes, ("step", "seconds"), strict=True):
            axis.plot([r[key] for r in train], [r["loss"] for r in train], color=colour, alpha=0.25, linewidth=1)
            late = [r for r in valid if r["step"]]
            axis.plot(
                [r[key] for r in late], [r["valid_loss"] for r in late], color=colour, marker=mark, label=run.name
            )
        values = [record["valid_loss"] for record in valid]
        lowest, highest = min(lowest, *values), max(highest, values[min(1, len(values) - 1)])
    axes[0].set(xlabel="step", ylabel="loss (line: training, marks: held-out)", ylim=(lowest * 0.95, highest * 1.05))
    axes[1].set(xlabel="seconds of training")
    for axis in axes:
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)
