"""Saving in a thread, so that training goes on while the disk is busy."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from skipless.storage.checkpoint_format import render_state
from skipless.storage.checkpoints import Checkpoints
from skipless.storage.tensors import NamedTensors


class GatherOnlySaver:
    """In the place of a `BackgroundSaver` on a rank that writes nothing, but takes part in gathering tensors."""

    def submit(
        self, step: int, tensors: Mapping[str, NamedTensors], state: Mapping[str, Any], score: Any = None
    ) -> None:
        """Take part in gathering."""
        for named in tensors.values():
            for _ in named.values():
                pass

    def wait(self) -> None:
        """There is nothing to wait for."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class BackgroundSaver:
    """Saves in a thread, so that training goes on while the disk is busy. At most one save is in flight.

    `submit` copies the tensors, into memory that is used again each time, and returns; the caller may then change them.
    What went wrong in the thread is raised by the next `submit`, `wait` or `close`, once.

        with BackgroundSaver(checkpoints) as saver:
            saver.submit(step, {"model": model.state_dict()}, {"step": step}, score=loss)
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        self.checkpoints = checkpoints
        self._buffers: dict[str, dict[str, Tensor]] = {}
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._in_flight: Future[Path] | None = None

    def submit(
        self, step: int, tensors: Mapping[str, NamedTensors], state: Mapping[str, Any], score: float | None = None
    ) -> None:
        """As `Checkpoints.save`, but returns as soon as the previous save is done and the tensors are copied."""
        self.wait()
        self._buffers = {stem: _copies(named, self._buffers.get(stem, {})) for stem, named in tensors.items()}
        self._in_flight = self._pool.submit(self.checkpoints._save, step, self._buffers, render_state(state), score)

    def wait(self) -> None:
        """Wait for the save in flight, and raise what went wrong in it."""
        if self._in_flight is None:
            return
        try:
            self._in_flight.result()
        finally:
            # An interrupt can end the waiting before the save ends, and the thread then still reads the buffers.
            if self._in_flight.done():
                self._in_flight = None

    def close(self) -> None:
        """Wait as `wait` does, and end the thread."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"the checkpoint in flight failed too: {failure}")  # and must not hide the first error


@torch.no_grad()
def _copies(named: NamedTensors, buffers: NamedTensors) -> dict[str, Tensor]:
    copies = {}
    for name, tensor in named.items():
        buffer = buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        copies[name] = buffer.copy_(tensor)
    return copies
