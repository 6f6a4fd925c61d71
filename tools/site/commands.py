"""The reference of the command line, from the commands' own help."""

from typing import Any

import typer

from skipless.cli import app
from skipless.cli.app import EXIT_STATUS
from tools.site.markdown import cell, plain

HEAD = """# Commands

Written from `skipless COMMAND --help`. An option means the same in every command, and `--json` prints figures for
programs.
"""


def page() -> str:
    """Every command with its options, and what their exit statuses mean."""
    parts = [_command(name, command) for name, command in _all(typer.main.get_command(app))]
    return HEAD + "\n".join(parts) + f"\n## Exit status\n{EXIT_STATUS}"


def _all(group: Any, prefix: str = "skipless") -> list[tuple[str, Any]]:
    """Name and command, those of a group one by one. (typer has a click of its own, so types say nothing here.)"""
    found: list[tuple[str, Any]] = []
    for name, command in group.commands.items():
        here = f"{prefix} {name}"
        found += _all(command, here) if hasattr(command, "commands") else [(here, command)]
    return found


def _command(name: str, command: Any) -> str:
    options = [one for one in command.params if one.param_type_name == "option" and not one.hidden]
    given = [one for one in command.params if one.param_type_name == "argument"]
    usage = " ".join([name, *(_argument(one) for one in given), "[OPTIONS]"])
    head = [f"\n## {name}\n", f"```text\n{usage}\n```\n", _text(command.help or "")]
    rows = [f"| `{_argument(one)}` | {_line(one.help)} |" for one in given if getattr(one, "help", None)]
    rows += [_row(one) for one in options]
    return "\n".join([*head, "| option | |", "| --- | --- |", *rows]) + "\n"


def _argument(one: Any) -> str:
    name = one.metavar or one.name.upper()
    return (name if one.required else f"[{name}]") + ("..." if one.nargs != 1 else "")


def _text(text: str) -> str:
    """A command's help in paragraphs."""
    return "\n\n".join(filter(None, (plain(" ".join(part.split())) for part in text.split("\n\n")))) + "\n"


def _line(text: str | None) -> str:
    return plain(cell(text or ""))


def _row(option: Any) -> str:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    default = option.default
    silent = default is None or default is False or default == () or callable(default) or option.is_flag
    silent = silent or option.show_default is False  # the text has it
    return f"| {names} | {_line(option.help)}{'' if silent else f' (default: {default})'} |"
