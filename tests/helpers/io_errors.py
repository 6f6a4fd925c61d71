"""A disk that fails: the Nth system call of a block ends with an error, alone or with all that follow."""

import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

CALLS = (
    *("open", "close", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir"),
    *("stat", "lstat", "scandir", "listdir", "statvfs", "truncate", "ftruncate"),
)


NEED_ROOM = ("create", "fsync", "rename", "replace", "mkdir", "write")


class FailingDisk:
    """Counts calls while it is entered, and fails number `at`; if it is `broken`, those after it as well.

    A disk that is full fails only those that may need room. A write that fails has written half of its bytes, and a
    file whose closing fails is closed.
    """

    def __init__(self, at: int, number: int, *, broken: bool = False) -> None:
        self.at, self.number, self.broken = at, number, broken
        self.calls: list[str] = []
        self._real: dict[str, Callable[..., Any]] = {}
        self._open = io.open

    @property
    def hit(self) -> bool:
        """Whether any call has failed."""
        return len(self.calls) >= self.at

    def fails(self, name: str) -> bool:
        """Count a call, and say whether it fails."""
        if self.number == errno.ENOSPC and name not in NEED_ROOM:
            return False
        self.calls.append(name)
        return len(self.calls) == self.at or (self.broken and self.hit)

    def error(self, path: Any) -> OSError:
        return OSError(self.number, os.strerror(self.number), path if isinstance(path, str | Path) else None)

    def __enter__(self) -> "FailingDisk":
        for name in CALLS:
            self._real[name] = getattr(os, name)
            setattr(os, name, self._failing(name))
        io.open = self._open_file
        return self

    def __exit__(self, *_: object) -> None:
        io.open = self._open
        for name, real in self._real.items():
            setattr(os, name, real)

    def _failing(self, name: str) -> Callable[..., Any]:
        real = self._real[name]

        def call(*arguments: Any, **options: Any) -> Any:
            creates = name == "open" and arguments[1] & os.O_CREAT
            failed = self.fails("create" if creates else name)
            if failed and name == "close":
                real(*arguments)
            if failed:
                raise self.error(arguments[0] if arguments else None)
            return real(*arguments, **options)

        return call

    def _open_file(self, path: Any, mode: str = "r", buffering: int = -1, *more: Any, **options: Any) -> Any:
        reads = mode in ("r", "rb")
        if self.fails("open" if reads else "create"):
            raise self.error(path)
        if reads or "b" not in mode:
            return self._open(path, mode, buffering, *more, **options)
        raw = _FailingFile(path, mode.replace("b", ""), self)
        return raw if buffering == 0 else io.BufferedWriter(raw)


class _FailingFile(io.FileIO):
    def __init__(self, path: Any, mode: str, disk: FailingDisk) -> None:
        super().__init__(path, mode)
        self.disk = disk

    def write(self, data: Any) -> int:
        if self.disk.fails("write"):
            super().write(bytes(data)[: len(data) // 2])
            raise self.disk.error(self.name)
        return super().write(data)
