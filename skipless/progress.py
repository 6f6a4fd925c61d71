"""What a person sees while a model trains: a moving line on a terminal, plain lines elsewhere."""

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from skipless import machine
from skipless.display import clock
from skipless.experiments.reproduce import Progress as AllRuns
from skipless.experiments.reproduce import Task, Watcher
from skipless.finetune import Observer as FinetuneObserver
from skipless.train import Observer, Trainer

PLAIN_SECONDS = 5.0
"""Between two lines of training loss where there is no terminal."""


class TrainView(Observer):
    """An observer of `train` that shows loss, learning rate, speed, share of the machine, and time left."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.live = console.is_terminal
        self.bar: Progress | None = None
        self.stage, self.told = "", 0.0
        self.speed = self.share = 0.0
        self.shown = float("-inf")
        self.before: tuple[int, float] = (0, 0.0)

    def message(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, highlight=False, soft_wrap=True)

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

    def begin(self, trainer: Trainer) -> None:
        """Training starts."""
        self.trainer = trainer
        state, cfg = trainer.state, trainer.cfg
        self.before = (state.tokens, state.seconds)
        self.peak = machine.matmul_speed(trainer.device, trainer.dtype)
        parameters, group = trainer.model.num_parameters(), trainer.group
        shared = f", {group.cfg.kind} over {group.size} processes" if group.size > 1 else ""
        self.message(
            f"{parameters / 1e6:.1f}M parameters on {trainer.device}, {str(trainer.dtype).split('.')[-1]}{shared}; "
            f"matrix products here run at {self.peak / 1e9:.0f} GFLOP/s; "
            f"{trainer.corpus.train.n_tokens / 1e6:.1f}M training tokens"
        )
        if self.live:
            columns = [TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f}%")]
            self.bar = Progress(*columns, console=self.console, transient=True)
            self.task = self.bar.add_task(f"step {state.step}", total=1.0)
            self.bar.start()
        elif cfg.train.steps is not None and state.step:
            self.message(f"at step {state.step} of {cfg.train.steps}")

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
        if self.bar is not None:
            self.bar.update(self.task, description=line, completed=min(self.trainer.progress(), 1.0))
        elif time.perf_counter() - self.shown > PLAIN_SECONDS:
            self.shown = time.perf_counter()
            self.message(line)

    def end(self) -> None:
        """Training is over, for whatever reason."""
        if self.bar is not None:
            self.bar.stop()


class ReproduceView(Watcher):
    """A watcher of all runs of some experiments: a line for each that begins or ends, and how far all are together."""

    SECONDS = 30.0
    """Between two lines of progress where there is no terminal."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bar: Progress | None = None
        self.shown = time.monotonic()
        if console.is_terminal:
            columns = [TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f}%")]
            self.bar = Progress(*columns, console=console, transient=True)
            self.task = self.bar.add_task("", total=1.0)
            self.bar.start()

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)

    def _line(self, progress: AllRuns) -> str:
        failed = f", {len(progress.failed)} failed" if progress.failed else ""
        return f"{len(progress.finished)} of {len(progress.tasks)} runs{failed}, {clock(progress.seconds_left)} left"

    def started(self, task: Task, progress: AllRuns) -> None:
        """A run begins or goes on."""
        share = progress.running.get(task.name, 0.0)
        self._say(f"{task.name}: {f'goes on from {share:.0%}' if share else 'begins'}")

    def finished(self, task: Task, progress: AllRuns) -> None:
        """A run is finished."""
        self._say(f"{task.name}: finished ({self._line(progress)})")

    def failed(self, task: Task, reason: str, progress: AllRuns) -> None:
        """A run has stopped by itself."""
        self._say(f"{task.name}: FAILED: {reason}")

    def waiting(self, task: Task, progress: AllRuns) -> None:
        """A run is being trained by another process."""
        self._say(f"{task.name}: another process is at it")

    def tick(self, progress: AllRuns) -> None:
        """Time has passed."""
        if self.bar is not None:
            share = progress.done / progress.total if progress.total else 1.0
            self.bar.update(self.task, description=self._line(progress), completed=share)
        elif time.monotonic() - self.shown > self.SECONDS:
            self.shown = time.monotonic()
            self._say(self._line(progress))

    def close(self) -> None:
        """Take the bar away."""
        if self.bar is not None:
            self.bar.stop()


class FinetuneView(FinetuneObserver):
    """An observer of `finetune` that shows how far all tasks and seeds together are, and the time left."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bar: Progress | None = None
        self.shown = float("-inf")

    def message(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, highlight=False, soft_wrap=True)

    def progress(self, what: str, share: float, seconds_left: float) -> None:
        """How far it is."""
        line = f"{what}  {clock(seconds_left)} left for all"
        if self.console.is_terminal:
            if self.bar is None:
                columns = [TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f}%")]
                self.bar = Progress(*columns, console=self.console, transient=True)
                self.task = self.bar.add_task(line, total=1.0)
                self.bar.start()
            self.bar.update(self.task, description=line, completed=min(share, 1.0))
        elif time.perf_counter() - self.shown > PLAIN_SECONDS:
            self.shown = time.perf_counter()
            self.message(f"{share:.0%}  {line}")

    def end(self) -> None:
        """It is over, for whatever reason."""
        if self.bar is not None:
            self.bar.stop()
