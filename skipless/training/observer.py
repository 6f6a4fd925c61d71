"""Callbacks of a training: what it reports while it runs. Imports nothing heavy, so that a command starts quickly."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skipless.training.trainer import Trainer


class Observer:
    """Callbacks of pre-training and fine-tuning, which do nothing here. Override those that you want to see."""

    def message(self, text: str) -> None:
        """Something that a person should know."""

    def data(self, stage: str, done: int, total: int | None) -> None:
        """A stage of preparing the data: bytes done, and of how many if that is known."""

    def begin(self, trainer: "Trainer") -> None:
        """Pre-training starts or resumes."""

    def log(self, record: dict[str, Any]) -> None:
        """Pre-training has written a line of metrics."""

    def stepped(self, record: dict[str, Any]) -> None:
        """Pre-training has made a step: its number, the loss before it, the gradient's norm, the learning rate."""

    def evaluated(self, record: dict[str, Any]) -> None:
        """Pre-training has evaluated, and this is its line of metrics."""

    def saved(self, step: int, folder: Path) -> None:
        """The checkpoint of a step is on the disk, in this folder; told when the next one is due, or at the end."""

    def progress(self, what: str, share: float, seconds_left: float) -> None:
        """Fine-tuning has made a step: of what, and how much of all tasks and seeds together is done."""

    def end(self) -> None:
        """Training is over, for whatever reason."""


class StopOnClosedPipe(Observer):
    """Passes on what a training reports. Where the pipe that it is shown in was closed, asks for an end, as SIGPIPE.

    The training then saves and stops as for any other signal, instead of ending where it happens to be.
    """

    def __init__(self, observer: Observer, stop: Callable[[int], object]) -> None:
        self.observer, self.stop = observer, stop

    def message(self, text: str) -> None:
        """Something that a person should know."""
        self._pass_on(self.observer.message, text)

    def data(self, stage: str, done: int, total: int | None) -> None:
        """A stage of preparing the data."""
        self._pass_on(self.observer.data, stage, done, total)

    def begin(self, trainer: "Trainer") -> None:
        """Pre-training starts or resumes."""
        self._pass_on(self.observer.begin, trainer)

    def log(self, record: dict[str, Any]) -> None:
        """Pre-training has written a line of metrics."""
        self._pass_on(self.observer.log, record)

    def stepped(self, record: dict[str, Any]) -> None:
        """Pre-training has made a step."""
        self._pass_on(self.observer.stepped, record)

    def evaluated(self, record: dict[str, Any]) -> None:
        """Pre-training has evaluated."""
        self._pass_on(self.observer.evaluated, record)

    def saved(self, step: int, folder: Path) -> None:
        """The checkpoint of a step is on the disk."""
        self._pass_on(self.observer.saved, step, folder)

    def progress(self, what: str, share: float, seconds_left: float) -> None:
        """Fine-tuning has made a step."""
        self._pass_on(self.observer.progress, what, share, seconds_left)

    def end(self) -> None:
        """Training is over."""
        self._pass_on(self.observer.end)

    def _pass_on(self, call: Callable[..., object], *args: Any) -> None:
        try:
            call(*args)
        except BrokenPipeError:
            self.stop(signal.SIGPIPE)
