"""How `--help` is laid out, where typer's own way is not wanted."""

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


class PlainFlags:
    """A flag takes no value, so no `<bool>` stands behind it."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters as typer has them, `--help` among them."""
        params = super().get_params(ctx)  # pyrefly: ignore
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class Command(PlainFlags, TyperCommand):
    """A command."""


class Group(PlainFlags, TyperGroup):
    """A command that has others below it."""


class App(typer.Typer):
    """An application whose commands are laid out this way unless they say otherwise."""

    def __init__(self, **given: Any) -> None:
        super().__init__(cls=Group, **given)

    def command(self, name: str | None = None, *, cls: type[TyperCommand] | None = Command, **given: Any) -> Any:
        """Declare a command."""
        return super().command(name, cls=cls, **given)
