"""Worker processes that do jobs: the engine of `skipless reproduce`.

A run is found by its configuration, so experiments share runs, and what is finished is never done again. Each job is
done by a worker (`worker.py`), which takes the lock of the run's folder: several of these pools, on one machine or on
several with a common file system, share the work.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from skipless.config.plugins import known_plugins
from skipless.experiments.jobs import Job
from skipless.experiments.messages import JobFile, Result, Work
from skipless.experiments.watcher import Progress, Watcher
from skipless.storage.lock import is_locked
from skipless.training.stopping import Signals, TrainingStopped

LOOK_EVERY = 0.2
"""Seconds between two looks at the workers."""

READ_EVERY = 2.0
"""Seconds between two looks at how far their runs are."""


class Stopped(TrainingStopped):
    """A signal asked for an end; every run is saved."""

    def __init__(self, number: int) -> None:
        super().__init__(f"{signal.Signals(number).name}: every run is saved; the same command continues from here")
        self.status = 128 + number


@dataclass
class Worker:
    """A process that does a job, and the folder in which the two leave messages for each other."""

    job: Job
    slot: int
    """Its number among those that run at a time."""
    messages: tempfile.TemporaryDirectory[str] = field(
        default_factory=lambda: tempfile.TemporaryDirectory(prefix="skipless-")
    )

    @property
    def folder(self) -> Path:
        """The folder of the messages to and from it."""
        return Path(self.messages.name)

    def start(self, work: Work, environment: Mapping[str, str]) -> None:
        """Tell it what to do.

        In a session of its own, so that Ctrl-C reaches this process alone, which passes it on once: a second signal
        would end a training before it has saved.
        """
        file, result = self.folder / "job.json", self.folder / "result.json"
        JobFile(work=work, result=result, parent=os.getpid(), command=tuple(sys.argv), plugins=known_plugins()).write(
            file
        )
        with (self.folder / "stderr").open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "skipless.experiments.worker", str(file)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=environment,
                start_new_session=True,
            )

    def result(self) -> Result:
        """What came of its job, once it has ended."""
        found = Result.find(self.folder / "result.json")
        return found or Result(status="failed", message=self._how_it_died())

    def _how_it_died(self) -> str:
        status = self.process.returncode
        if status >= 0:
            said = (self.folder / "stderr").read_text(encoding="utf-8", errors="replace").strip().splitlines()
            last = said[-1] if said else "none"
            return f"the worker exited with status {status} and left no result; its last line: {last}"
        name = next((one.name for one in signal.Signals if one == -status), f"signal {-status}")
        memory = "; the system may have run out of memory" if status == -signal.SIGKILL else ""
        return f"{name} ended it before it could leave a result{memory}"


def visible_devices() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return listed.split(",") if listed else [str(number) for number in range(torch.cuda.device_count())]


@dataclass
class Pool:
    """Does jobs in worker processes."""

    size: int = 1
    """Workers at a time."""
    cache_dir: Path | None = None
    deadline: float | None = None
    """On the monotonic clock."""
    watcher: Watcher = field(default_factory=Watcher)

    done: Callable[[Job], object] = lambda job: None
    """Called with each job that is finished: here, or before by a process that may have been killed right after it."""

    def run(self, jobs: Sequence[Job]) -> Progress:
        """Do what is not finished; ends when all is done, or has failed, or the deadline has come."""
        self.progress = Progress(jobs)
        self.workers: list[Worker] = []
        self.elsewhere: list[Job] = []
        self.queue: deque[Job] = deque()
        self.read = 0.0
        for job in jobs:
            found = job.completion()
            if found.finished:
                self._note_finished(job)
            else:
                self.progress.running[job.name] = found.share
                self.queue.append(job)
        self.progress.done_before = self.progress.done
        with Signals() as signals:
            try:
                self._loop(signals)
            finally:
                self._stop()
        if signals.received:
            raise Stopped(signals.received)
        return self.progress

    def _loop(self, signals: Signals) -> None:
        while self.queue or self.workers or self.elsewhere:
            late = self.deadline is not None and time.monotonic() >= self.deadline
            if signals.received or late:
                return
            self._look_elsewhere()
            self._read_shares()
            while self.queue and len(self.workers) < self.size:
                self._start(self.queue.popleft())
            for worker in list(self.workers):
                if worker.process.poll() is not None:
                    self._ended(worker)
            self.watcher.tick(self.progress)
            time.sleep(LOOK_EVERY)

    def _read_shares(self) -> None:
        if time.monotonic() - self.read > READ_EVERY:
            self.read = time.monotonic()
            for worker in self.workers:
                self.progress.running[worker.job.name] = worker.job.completion().share

    def _look_elsewhere(self) -> None:
        """Jobs that another process had: done, or left behind."""
        for job in list(self.elsewhere):
            if is_locked(job.folder):
                continue
            self.elsewhere.remove(job)
            if job.completion().finished:
                self._finish(job)
            else:
                self.queue.append(job)

    def _start(self, job: Job) -> None:
        if is_locked(job.folder):
            self._leave(job)
            return
        worker = Worker(job, next(slot for slot in range(self.size) if slot not in {one.slot for one in self.workers}))
        worker.start(job.work(self.cache_dir), self._environment(worker.slot))
        self.workers.append(worker)
        self.watcher.started(job, self.progress)

    def _environment(self, slot: int) -> dict[str, str]:
        """A worker has its share of the cores, unless that was decided outside, and one GPU where there are several."""
        threads = str(max(1, (os.cpu_count() or 1) // self.size))
        given = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        devices = visible_devices()
        if len(devices) > 1:
            given["CUDA_VISIBLE_DEVICES"] = devices[slot % len(devices)]
        return {**os.environ, **given}

    def _ended(self, worker: Worker) -> None:
        self.workers.remove(worker)
        job, result = worker.job, worker.result()
        worker.messages.cleanup()
        if result.status == "finished":
            self._finish(job)
        elif result.status == "in-use":
            self._leave(job)
        else:
            self.progress.failed[job.name] = result.message
            self.progress.running.pop(job.name, None)
            self.watcher.failed(job, result.message, self.progress)

    def _finish(self, job: Job) -> None:
        self.progress.running.pop(job.name, None)
        self._note_finished(job)
        self.watcher.finished(job, self.progress)

    def _note_finished(self, job: Job) -> None:
        self.progress.finished.add(job.name)
        job.tidy()
        self.done(job)

    def _leave(self, job: Job) -> None:
        self.elsewhere.append(job)
        self.watcher.waiting(job, self.progress)

    def _stop(self) -> None:
        """Ask the workers to save and end, and wait until they have."""
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.process.terminate()
        for worker in self.workers:
            worker.process.wait()
            if worker.result().status == "finished":
                self._finish(worker.job)
            worker.messages.cleanup()
        self.workers.clear()
