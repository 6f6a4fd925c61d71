"""Where things are shown."""

from typing import NoReturn

from rich import console


class Console(console.Console):
    """A console of rich that leaves it to others what a closed pipe means: rich would end the process."""

    def on_broken_pipe(self) -> NoReturn:
        """Raise the BrokenPipeError that is being handled."""
        raise
