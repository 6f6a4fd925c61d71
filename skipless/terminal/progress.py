"""What a person sees while work is done: a moving line on a terminal, plain lines now and then elsewhere.

Errors of the display never stop the work: a full disk behind the output, or a terminal that is gone, is reported once
on stderr, and nothing more is shown. Only a closed pipe raises BrokenPipeError, once, because then the reader has asked
to stop.
"""

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn

from skipless.terminal.console import Console

PLAIN_SECONDS = 5.0
"""Between two lines of progress where there is no terminal."""

REFRESH_SECONDS = 0.1
"""Between two states of the moving line."""


class ProgressLine:
    """One line that moves on a terminal; elsewhere a new line every few seconds."""

    def __init__(self, console: Console, seconds: float = PLAIN_SECONDS) -> None:
        self.console = console
        self.seconds = seconds
        self.shown = float("-inf")
        self.bar: Progress | None = None
        self.lost = False

    def message(self, text: str) -> None:
        """A line that stays."""
        self._show(self.console.print, text, markup=False, highlight=False, soft_wrap=True)

    def _show(self, show: Callable[..., object], *args: Any, **how: Any) -> None:
        """Show something, unless an earlier attempt has failed."""
        if self.lost:
            return
        try:
            show(*args, **how)
        except BrokenPipeError:
            self.lost = True
            raise
        except OSError as error:
            self.lost = True
            with suppress(OSError):  # stderr may be the same file
                print(f"skipless: nothing more is shown ({error.strerror}); the work continues", file=sys.stderr)

    def begin(self) -> None:
        """Show the moving line, if there is a terminal."""
        if self.console.is_terminal and self.bar is None:
            description = TextColumn("{task.description}", markup=False)
            # no thread that refreshes it: an error in there would reach nobody
            self.bar = Progress(
                description,
                BarColumn(),
                TextColumn("{task.percentage:.0f}%"),
                console=self.console,
                transient=True,
                auto_refresh=False,
            )
            self.task = self.bar.add_task("", total=1.0)
            self._show(self.bar.start)

    def update(self, text: str, share: float) -> None:
        """How far it is."""
        now = time.perf_counter()
        if now - self.shown <= (REFRESH_SECONDS if self.bar is not None else self.seconds):
            return
        self.shown = now
        if self.bar is not None:
            self._show(self.bar.update, self.task, description=text, completed=min(share, 1.0), refresh=True)
        else:
            self.message(text)

    def end(self) -> None:
        """Take the moving line away."""
        if self.bar is not None:
            self._show(self.bar.stop)
            self.bar = None
