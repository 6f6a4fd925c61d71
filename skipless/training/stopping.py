"""Why a training stops before its budget is spent: signals, and numbers that are not finite."""

import os
import signal
from types import FrameType

from skipless.distributed.group import Group


class TrainingStopped(Exception):
    """Training ended before its budget; the last checkpoint is intact. `status` is the command's exit status."""

    status = 3


class NonFinite(TrainingStopped):
    """A loss, a gradient or a weight was not finite.

    `what` says what was found, such as "the loss is nan", and `where` it was found first: a layer or a parameter.
    """

    def __init__(self, message: str, what: str | None = None, where: str | None = None) -> None:
        super().__init__(message)
        self.what, self.where = what, where


class Interrupted(TrainingStopped):
    """A signal asked for an end. Everything up to the last finished step is saved, unless nothing is kept at all."""

    def __init__(self, number: int, step: int, again: str | None = "--resume") -> None:
        """What continues it is said with `again`; None where nothing was kept."""
        what = "stopped" if again is None else "saved"
        then = "nothing is kept without a folder" if again is None else f"continue with {again}"
        super().__init__(f"{signal.Signals(number).name}: {what} at step {step}; {then}")
        self.number, self.step = number, step
        self.status = 128 + number


IMPATIENT = (signal.SIGINT, signal.SIGTERM)
"""Signals of which a second one ends a process at once."""


class Signals:
    """Remembers a SIGINT, SIGTERM or SIGHUP for a group instead of ending the process, until the block is left.

    A training asks between steps, saves and stops. A second SIGINT or SIGTERM ends a process that trains alone at once.
    A second SIGHUP does not, for a terminal that is closed sends one and its shell another. Where SIGHUP is ignored, as
    under nohup, it stays ignored.
    """

    def __init__(self, group: Group | None = None) -> None:
        self.group = group or Group()

    @property
    def received(self) -> int:
        """The signal that this process was sent; 0 if there was none."""
        return self.group.received

    def __enter__(self) -> "Signals":
        self.before = {}
        for number in (*IMPATIENT, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            try:
                self.before[number] = signal.signal(number, self._remember)
            except ValueError:  # not in the main thread: then someone else handles signals
                break
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        impatient = number in IMPATIENT and self.group.received in IMPATIENT
        if impatient and not self.group.tolerates_second_signal:
            os._exit(128 + number)  # every file is written in one step, so there is nothing to tidy
        if number in IMPATIENT or not self.group.received:
            self.group.received = number
