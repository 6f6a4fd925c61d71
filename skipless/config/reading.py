"""One way to read a file that somebody else may have written: text, JSON. What cannot be read is a UserError."""

import json
import math
import os
import stat
from pathlib import Path
from typing import Any

from skipless.errors import UserError


class Unreadable(UserError):
    """A file cannot be read."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"cannot read {str(path)!r}: {reason}")
        self.reason = reason


def read_bytes(path: Path) -> bytes:
    """The content of a file or of a pipe; raises Unreadable.

    Opening a pipe that nobody writes to would wait for ever, and reading a device may never end, so neither is done: a
    pipe without a writer is empty, and a device is refused.
    """
    if "\0" in str(path):
        raise Unreadable(path, "a path cannot hold a NUL character")
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
                raise Unreadable(path, "Is a directory" if stat.S_ISDIR(mode) else "it is a device, not a file")
            os.set_blocking(file.fileno(), True)
            return file.read()
    except OSError as error:
        raise Unreadable(path, error.strerror or str(error)) from None


def check_regular(path: Path) -> None:
    """A UserError where something else than a file lies at a path: what a program wrote for itself is no pipe."""
    if path.exists() and not path.is_file():
        raise UserError(f"{str(path)!r} is not a file")


def read_text(path: Path) -> str:
    """The text of a file in UTF-8; raises Unreadable."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError:
        raise Unreadable(path, "it is not text in UTF-8") from None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; a UserError where there is none."""
    check_regular(path)
    try:
        return parse_object(read_bytes(path))
    except NotJson as error:
        raise UserError(f"{str(path)!r} {error}") from None


class NotJson(ValueError):
    """A text is no JSON object; the message is the rest of a sentence that begins with its name."""


def parse_object(text: bytes | str) -> dict[str, Any]:
    """A JSON object, with finite numbers and text that can be written as UTF-8; raises NotJson."""
    try:
        content = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
        json.dumps(content, ensure_ascii=False).encode()  # half of a surrogate pair cannot be written, or printed
    except (ValueError, RecursionError) as error:
        raise NotJson(f"is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise NotJson("is not a JSON object")
    return content


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):  # a flipped bit can make 1e905 of 1e-05, which no JSON was written from
        raise ValueError(f"{text} is too large a number")
    return number
