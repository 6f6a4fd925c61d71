"""What a person sees while the runs of experiments are trained."""

import time

from skipless.analysis.units import clock
from skipless.experiments.jobs import Job
from skipless.experiments.watcher import Progress, Watcher
from skipless.terminal.console import Console
from skipless.terminal.progress import ProgressLine


class ReproduceView(Watcher):
    """A watcher of all runs of some experiments: a line for each that begins or ends, and how far all are together."""

    SECONDS = 30.0
    """Between two lines of progress where there is no terminal."""

    def __init__(self, console: Console) -> None:
        self.line = ProgressLine(console, self.SECONDS)
        self.line.shown = time.perf_counter()  # the first one after half a minute
        self.line.begin()

    def _left(self, progress: Progress) -> str:
        failed = f", {len(progress.failed)} failed" if progress.failed else ""
        return f"{len(progress.finished)} of {len(progress.jobs)} runs{failed}, {clock(progress.seconds_left)} left"

    def started(self, job: Job, progress: Progress) -> None:
        """A run begins or goes on."""
        share = progress.running.get(job.name, 0.0)
        self.line.message(f"{job.name}: {f'continues from {share:.0%}' if share else 'begins'}")

    def finished(self, job: Job, progress: Progress) -> None:
        """A run is finished."""
        self.line.message(f"{job.name}: finished ({self._left(progress)})")

    def failed(self, job: Job, reason: str, progress: Progress) -> None:
        """A run has stopped by itself."""
        self.line.message(f"{job.name}: FAILED: {reason}")

    def waiting(self, job: Job, progress: Progress) -> None:
        """A run is being trained by another process."""
        self.line.message(f"{job.name}: another process is working on it")

    def tick(self, progress: Progress) -> None:
        """Time has passed."""
        self.line.update(self._left(progress), progress.done / progress.total if progress.total else 1.0)

    def close(self) -> None:
        """Take the moving line away."""
        self.line.end()
