"""A decay that branches off a run: a checkpoint's weights and place in the data, then a linear decay to zero.

So one long run at the peak rate can give any number of finished models, each for the cost of its decay.
"""

from dataclasses import dataclass
from pathlib import Path

from skipless.config.run import RunConfig, TrainConfig
from skipless.errors import UserError
from skipless.runs import Run, choose_checkpoint, find_run
from skipless.storage.checkpoint_format import Checkpoint
from skipless.training.schedule import learning_rate


@dataclass(frozen=True)
class Branch:
    """Where a training goes on from."""

    run: Run
    checkpoint: Checkpoint

    @classmethod
    def find(cls, text: str, runs: Path | str = "runs") -> "Branch":
        """`RUN`, from its last checkpoint, or `RUN@STEP`."""
        name, at, step = text.rpartition("@")
        run = find_run(name if at else text, runs)
        return cls(run, choose_checkpoint(run, step if at else "last"))

    @property
    def origin(self) -> str:
        """The run, by what it is and not by where it lies, and the step."""
        return f"{self.run.config().digest}@{self.checkpoint.step}"

    def config(self, decay: int) -> RunConfig:
        """The run's configuration with `decay` more steps, over which the learning rate goes to zero.

        A UserError where the run was not at its peak rate there: the rate would jump.
        """
        cfg, step = self.run.config(), self.checkpoint.step
        train = cfg.train
        here = learning_rate(train, self._progress(train))
        if here < train.lr:
            raise UserError(
                f"run {self.run.name!r} was at {here / train.lr:.0%} of its peak rate at step {step}, so a decay "
                "cannot begin there: branch off the stable part of schedule 'wsd', or off 'constant'"
            )
        warmup = train.warmup if train.warmup is not None and 1 <= train.warmup <= step else 0.0
        return cfg.override(
            {
                "train.steps": step + decay,
                "train.tokens": None,
                "train.minutes": None,
                "train.schedule": "wsd",
                "train.warmup": warmup,
                "train.decay": max(decay, 1),
                "train.branch": self.origin,
            }
        )

    def _progress(self, train: TrainConfig) -> float:
        """How much of the run's budget was spent, as its checkpoint counts it."""
        counted = self.checkpoint.state["state"]
        if train.steps is not None:
            return (self.checkpoint.step + 1) / (train.steps + 1)
        if train.tokens is not None:
            return counted["tokens"] / train.tokens
        return counted["seconds"] / (60 * (train.minutes or 1))


def is_branch_of(cfg: RunConfig, text: str, decay: int) -> bool:
    """Whether a configuration is that of a decay off `RUN@STEP`, as far as that can be told without the run."""
    step = text.rpartition("@")[2] if "@" in text else ""
    origin = cfg.train.branch or ""
    return bool(origin) and cfg.train.decay == decay and origin.endswith(f"@{step}" if step else "")
