"""One job in a process of its own, which reports in data.

    python -m skipless.experiments.worker JOB.json

`JobFile` says what is to be done, and where the `Result` is to be put. The exit status says the same in short:

| result | exit status | |
| --- | --- | --- |
| finished | 0 | |
| bad-input | 2 | it cannot be done as it was asked for |
| failed | 3 | it stopped by itself: something was not finite, or the disk is full |
| failed | 1 | an error that nobody expected |
| in-use | 4 | another process has the folder |
| stopped | 128 and the signal's number | a signal asked for an end, and what was done is saved |

A worker that leaves no result was killed, or never began.
"""

import ctypes
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from skipless.config.explain import explain
from skipless.errors import UserError
from skipless.experiments.messages import FinetuneWork, JobFile, Result, Status, TrainWork
from skipless.storage.atomic_files import NO_ROOM
from skipless.storage.lock import InUse
from skipless.training.allocator import keep_freed_memory
from skipless.training.observer import Observer

if TYPE_CHECKING:
    from skipless.training.trainer import Trainer

FINISHED, UNEXPECTED, BAD_INPUT, STOPPED_ITSELF = 0, 1, 2, 3

PR_SET_PDEATHSIG = 1


class StepObserver(Observer):
    """Knows how far a training is."""

    trainer: "Trainer | None" = None

    def begin(self, trainer: "Trainer") -> None:
        """Training starts, or goes on."""
        self.trainer = trainer

    @property
    def step(self) -> int | None:
        """The last step; None if training has not begun."""
        return None if self.trainer is None else self.trainer.state.step


def main(path: Path) -> int:
    """Do the job of a file, leave its result, and return the exit status."""
    job = JobFile.read(path)
    end_with(job.parent)
    keep_freed_memory()
    sys.argv = list(job.command or sys.argv)
    observer = StepObserver()
    try:
        do(job.work, observer)
    except BaseException as error:
        status, code = judge(error)
        if code == UNEXPECTED:
            traceback.print_exception(error)
        message = describe_unexpected(error) if code == UNEXPECTED else describe(error)
        result = Result(status=status, message=message, step=observer.step)
    else:
        result, code = Result(status="finished", step=observer.step), FINISHED
    result.write(job.result)
    return code


def end_with(parent: int) -> None:
    """Have the system send SIGTERM, on which a training saves, when the parent dies. On Linux; elsewhere nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it has died before it could be watched
            sys.exit(128 + signal.SIGTERM)


def do(work: TrainWork | FinetuneWork, observer: StepObserver) -> None:
    """Begin a job, or go on with it; what is slow to import comes when the parent is watched."""
    if isinstance(work, TrainWork):
        from skipless.training.train import train

        train(work.config, work.folder, resume=True, trackers=[], observer=observer, cache_dir=work.cache_dir)
        if work.low_bits:
            from skipless.runs import Run
            from skipless.tasks.low_bits import measure_run

            measure_run(Run(work.folder), work.cache_dir)
    else:
        from skipless.data.glue import parse_tasks
        from skipless.runs import Run
        from skipless.tasks.finetune import finetune
        from skipless.tasks.glue_results import raise_failures

        tasks = parse_tasks(",".join(work.tasks))
        raise_failures(finetune(Run(work.run), work.glue, tasks, seeds=work.seeds, cfg=work.config))


def judge(error: BaseException) -> tuple[Status, int]:
    """What an error makes of a job, and the exit status."""
    from skipless.distributed.group import LostRank
    from skipless.training.stopping import Interrupted, TrainingStopped

    match error:
        case InUse():
            return "in-use", error.status
        case Interrupted():
            return "stopped", error.status
        case KeyboardInterrupt():
            return "stopped", 128 + signal.SIGINT
        case TrainingStopped() | LostRank():
            return "failed", error.status
        case UserError() if error.status == STOPPED_ITSELF:  # a full disk, checkpoints of which none is valid
            return "failed", error.status
        case OSError() if error.errno in NO_ROOM:
            return "failed", STOPPED_ITSELF
        case UserError() | ValidationError() | OSError():
            return "bad-input", BAD_INPUT
    return "failed", UNEXPECTED


def describe(error: BaseException) -> str:
    """An error in a line."""
    match error:
        case ValidationError():
            return explain(error)
        case OSError() if error.filename:
            return f"{error.strerror}: {error.filename}"
    return " ".join(str(error).split())


def describe_unexpected(error: BaseException) -> str:
    """An error in a line, with its kind and its place."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {describe(error)} ({Path(place.filename).name}, line {place.lineno})"


if __name__ == "__main__":
    try:
        sys.exit(main(Path(sys.argv[1])))
    except UserError as error:  # there is no job, and so no place for a result
        print(f"skipless: {error}", file=sys.stderr)
        sys.exit(error.status)
