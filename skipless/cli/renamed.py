"""Old spellings of options: read in this version with a line that says the new one, and not shown in `--help`."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from skipless.cli.help import Command


def renamed(spellings: Mapping[str, str]) -> type[Command]:
    """The class of a command with old spellings: `{"--which": "--checkpoint"}`.

    An option that has become a flag is written with the value that it had: `{"--resume auto": "--resume"}`.
    """

    class Renaming(Command):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            return super().parse_args(ctx, list(_with_new_names(args, spellings, _taking_a_value(self))))

    return Renaming


def _taking_a_value(command: Command) -> set[str]:
    options = (param for param in command.params if param.param_type_name == "option")
    return {name for option in options if not option.is_flag for name in option.opts}  # pyrefly: ignore


def _with_new_names(words: Sequence[str], spellings: Mapping[str, str], taking: set[str]) -> Iterator[str]:
    """The words of a command line with new spellings; the value of an option is left alone, whatever it looks like."""
    left = iter(enumerate(words))
    for position, word in left:
        if word == "--":
            yield from words[position:]
            return
        name, equals, value = word.partition("=")
        following = words[position + 1] if position + 1 < len(words) else ""
        if flag := spellings.get(f"{name} {value if equals else following}"):
            tell(f"{name} {value or following}", flag)
            yield flag
            if not equals:
                next(left)
            continue
        if name in spellings:
            tell(name, spellings[name])
            word, name = spellings[name] + equals + value, spellings[name]
        yield word
        if name in taking and not equals:
            yield from (value for _, value in [next(left, (0, None))] if value is not None)


def tell(old: str, new: str) -> None:
    """One line on standard error, from one process of those on a machine."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"skipless: {old} is now {new}", file=sys.stderr)
