"""The command line's frame: one `app`, the exit statuses, and the options that commands share."""

import errno
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from skipless.errors import UserError

app = typer.Typer(
    name="skipless",
    help="Transformer blocks with the unneeded parts taken out: build them, train them, run them faster.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

CLICK_ERROR = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""The base class of what typer raises for a wrong command line; typer carries its own copy of click."""

BAD_INPUT = 2
STOPPED = 3
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
MAX_SEED = 2**62
LET_SPEAK = 2.0
"""Seconds that a process which says nothing gives the one that does: torchrun ends all when the first one ends."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command: status 0 if it did what was asked, 2 and one line on standard error for bad input."""
    sys.exit(run(list(sys.argv[1:] if arguments is None else arguments)))


def run(arguments: list[str]) -> int:
    """Run a command and return its exit status."""
    try:
        status = app(arguments, standalone_mode=False)
    except UserError as error:
        _fail(str(error), loud=_speaks(error))
        return getattr(error, "status", BAD_INPUT)
    except BrokenPipeError:  # whoever read what is printed has seen enough
        sys.stdout = None
        return 141
    except OSError as error:  # a path that cannot be, a folder without permission, a full disk
        _fail(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")
        return STOPPED if error.errno in NO_ROOM else BAD_INPUT
    except (typer.Abort, KeyboardInterrupt):
        _fail("stopped before training began; nothing was lost")
        return 130
    except Exception as error:
        if hasattr(error, "status"):  # training that stopped by itself or was asked to
            _fail(str(error), loud=_speaks(error))
            return error.status  # pyrefly: ignore
        if isinstance(error, CLICK_ERROR):
            return _fail(_usage_message(error), loud=_speaks(error))
        if type(error).__name__ == "ValidationError" and type(error).__module__.startswith("pydantic"):
            from skipless.config import explain

            return _fail(explain(error), loud=_speaks(error))  # pyrefly: ignore
        raise
    return status if isinstance(status, int) else 0


def _usage_message(error: Any) -> str:
    """One line for a wrong command line, with the command whose help to read."""
    if type(error).__name__ == "NoArgsIsHelpError":  # the help was asked for by giving nothing
        return error.format_message()
    command = getattr(getattr(error, "ctx", None), "command_path", "skipless")
    return f"{error.format_message().rstrip('.')} (see `{command} --help`)"


def _speaks(error: Exception) -> bool:
    """Whether this process says what happened to all: of those that torchrun started on a machine, the first one."""
    return getattr(error, "loud", os.environ.get("LOCAL_RANK", "0") == "0")


def _fail(message: str, *, loud: bool = True) -> int:
    if not loud:
        time.sleep(LET_SPEAK)
    elif message:  # it is empty where typer has shown the help instead
        print(f"skipless: {' '.join(message.split())}", file=sys.stderr)
    return BAD_INPUT


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    if version:
        from skipless import __version__

        print(f"skipless {__version__}")
        raise typer.Exit(0)


BlockOption = Annotated[
    str | None,
    typer.Option("--block", "-b", help="A preset, or a variant such as `sas:beta_ff=0.2`.  [default: sas-p]"),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="Any key by its dotted name, as `train.clip=0.5`."),
]
ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", help="A YAML or JSON file laid over the recipe.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or its name below runs/.")]
CacheOption = Annotated[
    Path | None, typer.Option("--cache-dir", help="Where prepared data lies.  [default: ~/.cache/skipless/data]")
]


CorpusOption = Annotated[
    list[str] | None,
    typer.Option(
        "--corpus",
        metavar="NAME=SOURCE",
        help="Where a corpus is that recipes name: `code=files:src/**/*.py`, `wiki=jsonl:wiki.jsonl.zst#text`.",
    ),
]


def set_corpora(given: list[str] | None) -> None:
    """Say where corpora are, for this process and those that it starts."""
    from skipless.data.sources import corpus_variable, open_source

    for item in given or []:
        name, equals, source = item.partition("=")
        if not equals or not source:
            raise UserError(f"--corpus takes NAME=SOURCE, as code='files:src/**/*.py', got {item!r}")
        open_source(source)
        os.environ[corpus_variable(name)] = source


def resolve(
    recipe: str, config: Path | None, block: str | None, given: dict[str, Any], settings: list[str] | None
) -> Any:
    """Recipe, then file, then options, then `--set`: the later ones win."""
    from skipless.config import load_yaml, parse_overrides
    from skipless.experiments.recipes import recipe as make

    cfg = make(recipe, "sas-p" if block is None else block)
    if config:
        cfg = cfg.merge(load_yaml(config))
    if config and block is not None:
        cfg = cfg.override({"model.block": block})
    changes: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    budgets = ("train.steps", "train.tokens", "train.minutes")
    if any(budget in changes for budget in budgets):  # it takes the place of the recipe's, whichever that is
        changes = {**dict.fromkeys(budgets), **changes}
    if "data.seq_len" in changes:
        changes["model.max_seq_len"] = max(changes["data.seq_len"], cfg.model.max_seq_len)
    return cfg.override({**changes, **parse_overrides(settings or [])})
