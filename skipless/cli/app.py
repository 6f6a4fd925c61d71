"""The command line: one `app`, and the exit statuses of all commands."""

import errno
import io
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Annotated, Any

import typer

from skipless.cli.help import App
from skipless.errors import UserError, bounded, first_line

EXIT_STATUS = """
Exit status of every command:

- 0: done, or the `--minutes` of `reproduce` are used up; finished work is saved

- 2: bad input; one line explains it

- 3: stopped by itself: a loss that is not finite, a full disk, no memory, a run of an experiment that failed

- 4: another process is using it

- 129, 130, 143: stopped by a closed terminal (SIGHUP), Ctrl-C or SIGTERM; what was being trained is saved

- 141: the output pipe was closed; what was being trained is saved
"""

START = """\
skipless {version}: transformer blocks with the unneeded parts taken out.

Start with one of these:

  skipless demo                  trains the standard and the simplified block
  skipless inspect pre-ln sas-p  draws both, counts their cost, measures signal
  skipless train --name mine     trains the simplified one, on Python's library
  skipless generate mine         writes with what was trained, as you type
  skipless compare pre-ln sas-p  trains a block beside another, with a verdict
  skipless reproduce --list      the paper's experiments, and what they cost

skipless --help lists all commands; skipless COMMAND --help has examples.
"""
"""What a command line without a command shows."""

app = App(
    name="skipless",
    help="Transformer blocks with the unneeded parts taken out: build them, train them, run them faster.",
    epilog=EXIT_STATUS,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

CLICK_ERROR = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""The base class of what typer raises for a wrong command line; typer carries its own copy of click."""

BAD_INPUT = 2

STOPPED = 3

INTERRUPTED = 130

NO_READER = 141

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

NOT_OF_THE_INPUT = (*NO_ROOM, errno.EIO, errno.EROFS)
"""Errors of the system that no other input would mend: a disk that is full, broken or cannot be written to."""

LEAST_MEMORY = 1 << 30
"""Bytes of address space that a command is given to work in. With less, the libraries below end it as they like."""

LET_SPEAK = 2.0
"""Seconds that a process which says nothing gives the one that does: torchrun ends all when the first one ends."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; the process ends with one of the statuses of `EXIT_STATUS`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that cannot show a sign gets its number
            stream.reconfigure(errors="backslashreplace")
    sys.exit(run(list(sys.argv[1:] if arguments is None else arguments)))


def run(arguments: list[str]) -> int:
    """Run a command and return its exit status."""
    with warnings.catch_warnings():
        warnings.showwarning = _warnings_in_a_line()
        status = _run(arguments)
    unwritten = _flush()
    if status == 0 and unwritten is not None:
        if isinstance(unwritten, BrokenPipeError):
            return NO_READER
        _fail(f"the output cannot be written: {unwritten.strerror}")
        return STOPPED
    return status


def _warnings_in_a_line() -> Callable[..., None]:
    """Shows our own warnings, such as of a row that was passed over, in a line and once; others as Python does."""
    shown: set[str] = set()

    def show(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any, **__: Any) -> None:
        if not category.__module__.startswith("skipless."):
            sys.stderr.write(warnings.formatwarning(message, category, filename, lineno))
        elif str(message) not in shown:
            shown.add(str(message))
            _fail(str(message))

    return show


def _flush() -> OSError | None:
    """Write out what was printed; what cannot be written is dropped, or Python would end with a status of its own."""
    problem = None
    for name in ("stdout", "stderr"):
        try:
            getattr(sys, name).flush()
        except OSError as error:
            problem = problem or error
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, PTH123  as long as the process
    return problem


def _run(arguments: list[str]) -> int:
    try:
        check_text(arguments)
        check_memory()
        status = app(arguments, standalone_mode=False)
    except UserError as error:
        return _fail(str(error), loud=_speaks(error), status=error.status)
    except BrokenPipeError:  # whoever read what is printed has seen enough
        return NO_READER
    except OSError as error:  # a path that cannot be, a folder without permission, a full disk
        if error.errno == errno.ENOMEM:
            return _out_of_memory(error)
        _fail(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")
        return STOPPED if error.errno in NOT_OF_THE_INPUT else BAD_INPUT
    except (typer.Abort, KeyboardInterrupt):
        _fail("stopped")
        return INTERRUPTED
    except Exception as error:
        if hasattr(error, "status"):  # training that stopped by itself or was asked to
            return _fail(str(error), loud=_speaks(error), status=error.status)  # pyrefly: ignore
        if isinstance(error, CLICK_ERROR):
            return _fail(_usage_message(error), loud=_speaks(error))
        if type(error).__name__ == "ValidationError" and type(error).__module__.startswith("pydantic"):
            from skipless.config.explain import explain

            return _fail(explain(error), loud=_speaks(error))  # pyrefly: ignore
        if any(map(_is_out_of_memory, _chain(error))):
            return _out_of_memory(error)
        raise
    return status if isinstance(status, int) else 0


def check_text(arguments: Sequence[str]) -> None:
    """A UserError where an argument is not text: no path and no name can hold a NUL or bytes that are not UTF-8."""
    for argument in arguments:
        if "\0" in argument:
            raise UserError(f"{argument!r} holds a NUL character, which no argument can")
        try:
            os.fsencode(argument).decode("utf-8")
        except UnicodeError:
            raise UserError(f"{argument!r} is not text in UTF-8") from None


def check_memory() -> None:
    """A MemoryError where the process is allowed less than can be worked in (`ulimit -v`)."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_AS)
    if allowed != resource.RLIM_INFINITY and allowed < LEAST_MEMORY:
        raise MemoryError(f"`ulimit -v` allows {allowed >> 20} MiB, and {LEAST_MEMORY >> 20} are needed")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those that led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_out_of_memory(error: BaseException) -> bool:
    """PyTorch's allocator on the CPU, and the loader of shared libraries, say so in words alone."""
    said = ("DefaultCPUAllocator", "failed to map segment", "annot allocate memory", "std::bad_alloc")
    kinds = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return kinds or (isinstance(error, RuntimeError | ImportError | OSError) and any(s in str(error) for s in said))


def _out_of_memory(error: Exception) -> int:
    _fail(f"out of memory ({first_line(error)})", loud=_speaks(error))
    return STOPPED


def _usage_message(error: Any) -> str:
    """One line for a wrong command line, with the command whose help to read."""
    if type(error).__name__ == "NoArgsIsHelpError":  # the help was asked for by giving nothing
        return error.format_message()
    command = getattr(getattr(error, "ctx", None), "command_path", "skipless")
    return f"{error.format_message().rstrip('.')} (see `{command} --help`)"


def _speaks(error: Exception) -> bool:
    """Whether this process says what happened to all: of those that torchrun started on a machine, the first one."""
    return getattr(error, "loud", os.environ.get("LOCAL_RANK", "0") == "0")


def _fail(message: str, *, loud: bool = True, status: int = BAD_INPUT) -> int:
    """Say what went wrong, or leave it to the process that speaks; returns the status."""
    if not loud:
        if status == BAD_INPUT:
            from skipless.distributed.launch import report_failure

            report_failure(" ".join(message.split()), status)
        time.sleep(LET_SPEAK)
    elif message:  # it is empty where typer has shown the help instead
        with suppress(OSError):  # the terminal may be gone; the status still says it
            print(f"skipless: {bounded(' '.join(message.split()))}", file=sys.stderr)
    return status


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    from importlib.metadata import version as version_of

    if version:
        print(f"skipless {version_of('skipless')}")
        raise typer.Exit(0)
    if context.invoked_subcommand is None:
        print(START.format(version=version_of("skipless")))
