"""What a user can mend: the exception that the command line turns into a single line and exit status 2."""

import difflib
from collections.abc import Iterable
from pathlib import Path

LONGEST_MESSAGE = 1800
"""Bytes of a message at the most: what a file holds may be quoted in it, and a file can hold anything."""


def bounded(text: str) -> str:
    """A message that is not too long to read: its beginning and its end."""
    data = text.encode(errors="backslashreplace")
    if len(data) <= LONGEST_MESSAGE:
        return text
    kept = (LONGEST_MESSAGE - 40) // 2
    first, last = (part.decode(errors="ignore") for part in (data[:kept], data[-kept:]))
    return f"{first} … ({len(data):,} bytes in all) … {last}"


def first_line(error: Exception) -> str:
    """What an error of another library says, in a line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class UserError(ValueError):
    """The input was wrong, and the message says what was wrong, what is allowed and what is near."""

    status = 2
    """The exit status of a command that ends with it."""

    def __init__(self, message: str = "") -> None:
        super().__init__(bounded(message))


class MissingExtra(UserError, ImportError):
    """An optional package is not installed; the message has the command that installs it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {package}, which is not installed: pip install 'skipless[{extra}]'")


def user_path(text: str) -> Path:
    """A path as a user writes it: `~` is a home folder; a UserError where there is no such user, or no such name."""
    if "\0" in text:
        raise UserError(f"{text!r} cannot be a path: it holds a NUL character")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise UserError(f"{text!r}: there is no home folder of that name") from None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the nearest known name, or nothing."""
    near = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def unknown(kind: str, name: str, known: Iterable[str]) -> UserError:
    """The error for a name that is not in a registry: it lists the known names and the nearest one."""
    known = list(known)
    return UserError(f"unknown {kind} {name!r}; known: {', '.join(known)}{did_you_mean(name, known)}")
