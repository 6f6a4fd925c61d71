"""Files of JSON lines that can be cut back to where they were at a checkpoint."""

import json
import math
import os
from pathlib import Path
from typing import Any

from skipless.config.reading import check_regular
from skipless.storage.atomic_files import fsync, no_room_said

BLOCK = 1 << 16
"""Bytes that are read at a time."""


class Journal:
    """A file of JSON lines that can be cut back to where it was at a checkpoint."""

    def __init__(self, path: Path) -> None:
        check_regular(path)
        # unbuffered: what does not fit on the disk is known at once, and closing has nothing left to write
        self.file = path.open("ab", buffering=0)
        fsync(path.parent)  # a checkpoint counts on these lines, and so on the file's name as well

    def append(self, record: dict[str, Any]) -> None:
        """Write one line; what is not finite becomes null, at any depth."""
        line = json.dumps(_finite(record), allow_nan=False).encode() + b"\n"
        with no_room_said(self.file.name):
            while line:
                line = line[self.file.write(line) :]

    def position(self) -> int:
        """Bytes written, forced to the disk."""
        os.fsync(self.file.fileno())
        return self.file.tell()

    def cut(self, position: int) -> str | None:
        """Drop what was written after `position`; what was lost, in words, if the file does not go as far as that.

        It then ends with its last whole line, so that the next one begins a line of its own.
        """
        size = self.file.seek(0, os.SEEK_END)
        lost = None
        if size < position:
            lost = f"{self.file.name} has {size} bytes and had {position}: the lines between are lost"
            position = _last_newline(Path(self.file.name), size)
        self.file.truncate(position)
        self.file.seek(position)
        return lost

    def close(self) -> None:
        """Close the file."""
        self.file.close()


class NoJournal(Journal):
    """The journal of a process that writes none."""

    def __init__(self) -> None:
        pass

    def append(self, record: dict[str, Any]) -> None:
        """The first process writes it."""

    def position(self) -> int:
        """Nowhere."""
        return 0

    def cut(self, position: int) -> None:
        """There is nothing to cut, and nothing is lost."""

    def close(self) -> None:
        """There is nothing to close."""


def _finite(value: Any) -> Any:
    """A value of JSON with None for every number that is not finite."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _last_newline(path: Path, size: int) -> int:
    """Where the last whole line ends of a file of so many bytes."""
    with path.open("rb") as file:
        while size:
            start = max(size - BLOCK, 0)
            file.seek(start)
            found = file.read(size - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            size = start
    return 0
