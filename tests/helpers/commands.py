"""What the commands of the command line take, by their own declarations."""

import shlex

import typer

from skipless.cli import app


def commands(group=None, path=()):
    """Name → command, `data build` for one of a group."""
    found = {}
    for name, command in (group or typer.main.get_command(app)).commands.items():
        here = (*path, name)
        found |= commands(command, here) if hasattr(command, "commands") else {" ".join(here): command}
    return found


def options(command):
    """Those that `--help` shows, by each of their spellings."""
    shown = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
    return {name: option for option in shown for name in (*option.opts, *option.secondary_opts)}


def unknown_options(line):
    """The options of a command line that its command does not show in its help; None if there is no such command."""
    words = shlex.split(line.partition("|")[2] if line.startswith("echo") else line, comments=True)
    words = words[words.index("skipless") + 1 :]
    known = commands()
    name = " ".join(words[:2]) if " ".join(words[:2]) in known else words[0] if words else ""
    if name not in known:
        return None
    shown = {*options(known[name]), "--help", "-h"}
    given = {word.partition("=")[0] for word in words if word.startswith("--") and len(word) > 2}
    return sorted(given - shown)
