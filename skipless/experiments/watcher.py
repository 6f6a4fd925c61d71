"""How far a pool of jobs is, and callbacks for those who want to follow it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from skipless.experiments.jobs import Job


@dataclass
class Progress:
    """How far all runs are together."""

    jobs: Sequence[Job]
    finished: set[str] = field(default_factory=set)
    """Names of runs."""
    failed: dict[str, str] = field(default_factory=dict)
    """Name of a run → reason."""
    running: dict[str, float] = field(default_factory=dict)
    """Name of a run → share of its budget that is spent."""
    started: float = field(default_factory=time.monotonic)
    done_before: float = 0.0

    @property
    def total(self) -> float:
        """Estimated seconds of all runs that have not failed."""
        return sum(job.seconds for job in self.jobs if job.name not in self.failed)

    @property
    def done(self) -> float:
        """Estimated seconds of what is done."""
        share = {**self.running, **dict.fromkeys(self.finished, 1.0)}
        return sum(job.seconds * share.get(job.name, 0.0) for job in self.jobs)

    @property
    def seconds_left(self) -> float:
        """From the speed since the start; not a number before there is one."""
        gained = self.done - self.done_before
        return (self.total - self.done) * (time.monotonic() - self.started) / gained if gained > 0 else float("nan")


class Watcher:
    """Callbacks of a pool; the base class ignores them all."""

    def started(self, job: Job, progress: Progress) -> None:
        """A run begins or goes on."""

    def finished(self, job: Job, progress: Progress) -> None:
        """A run is finished."""

    def failed(self, job: Job, reason: str, progress: Progress) -> None:
        """A run has stopped by itself."""

    def waiting(self, job: Job, progress: Progress) -> None:
        """A run is being trained by another process."""

    def tick(self, progress: Progress) -> None:
        """Time has passed."""
