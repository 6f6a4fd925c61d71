"""The one exception the command line turns into a single line and exit status 2."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """The input was wrong, and the message says what was wrong, what is allowed and what is near."""


class MissingExtra(UserError, ImportError):
    """An optional package is not installed; the message has the command that installs it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {package}, which is not installed: pip install 'skipless[{extra}]'")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the nearest known name, or nothing."""
    near = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def unknown(kind: str, name: str, known: Iterable[str]) -> UserError:
    """The error for a name that is not in a registry: it lists the known names and the nearest one."""
    known = list(known)
    return UserError(f"unknown {kind} {name!r}; known: {', '.join(known)}{did_you_mean(name, known)}")
