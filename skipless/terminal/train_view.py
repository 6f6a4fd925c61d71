"""What a person sees while data is prepared and a model trains."""

import time
from typing import TYPE_CHECKING, Any

from skipless.analysis.units import clock
from skipless.terminal.console import Console
from skipless.terminal.progress import PLAIN_SECONDS, ProgressLine
from skipless.training.observer import Observer

if TYPE_CHECKING:
    from skipless.training.trainer import Trainer


class TrainView(Observer):
    """An observer of `train` that shows loss, learning rate, speed, share of the machine, and time left."""

    def __init__(self, console: Console) -> None:
        self.line = ProgressLine(console)
        self.stage, self.told = "", 0.0
        self.speed = self.share = 0.0
        self.before: tuple[int, float] = (0, 0.0)

    def message(self, text: str) -> None:
        """A line that stays."""
        self.line.message(text)

    def data(self, stage: str, done: int, total: int | None) -> None:
        """A stage of preparing the data."""
        now = time.perf_counter()
        if stage != self.stage:
            self.stage, self.told = stage, now
            self.message(f"data: {stage}")
        elif now - self.told > PLAIN_SECONDS:
            self.told = now
            of = f" of {total / 1e6:,.0f}" if total else ""
            self.message(f"data: {stage}, {done / 1e6:,.0f}{of} MB")

    def begin(self, trainer: "Trainer") -> None:
        """Training starts."""
        from skipless.analysis.speed import matmul_speed

        self.trainer = trainer
        state, cfg = trainer.state, trainer.cfg
        self.before = (state.tokens, state.seconds)
        self.peak = matmul_speed(trainer.device, trainer.dtype)
        parameters, group = trainer.model.num_parameters(), trainer.group
        shared = f", {group.cfg.kind} over {group.size} processes" if group.size > 1 else ""
        self.message(
            f"{parameters / 1e6:.1f}M parameters on {trainer.device}, {str(trainer.dtype).split('.')[-1]}{shared}; "
            f"matrix products here run at {self.peak / 1e9:.0f} GFLOP/s; "
            f"{trainer.corpus.train.n_tokens / 1e6:.1f}M training tokens"
        )
        if cfg.train.steps is not None and state.step:
            self.message(f"at step {state.step} of {cfg.train.steps}")
        self.line.begin()

    def log(self, record: dict[str, Any]) -> None:
        """A line of metrics."""
        if "valid_loss" in record:
            bits = record.get("valid_bits_per_byte")
            extra = f", {bits:.3f} bits per byte" if bits is not None else ""
            self.message(f"step {record['step']}: held-out loss {record['valid_loss']:.4f}{extra}")
            return
        if "loss" not in record:
            return
        tokens, seconds = self.before
        if record["seconds"] > seconds:
            self.speed = (record["tokens"] - tokens) / (record["seconds"] - seconds)
            self.share = self.speed * self.trainer.flops_per_token / (self.peak * self.trainer.group.size)
        self.before = (record["tokens"], record["seconds"])
        line = (
            f"step {record['step']}  loss {record['loss']:.4f}  lr {record['lr']:.2e}  "
            f"{self.speed:,.0f} tokens/s  {self.share:.0%} of peak  {clock(self.trainer.seconds_left())} left"
        )
        self.line.update(line, self.trainer.progress())

    def end(self) -> None:
        """Training is over, for whatever reason."""
        self.line.end()
