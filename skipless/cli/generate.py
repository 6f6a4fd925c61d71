"""`skipless generate`: text, token by token."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count as count_from
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skipless.cli.app import INTERRUPTED, app
from skipless.cli.options import (
    CACHE_MODE,
    CheckpointOption,
    DeviceOption,
    JsonOption,
    MaxNewTokensOption,
    ModelArgument,
    NumSamplesOption,
    PluginOption,
    RunsOption,
    SeedOption,
)
from skipless.cli.renamed import renamed
from skipless.errors import UserError

if TYPE_CHECKING:
    from skipless.nn.sampling import Decodes


@app.command(cls=renamed({"--tokens": "--max-new-tokens", "--samples": "--num-samples"}))
def generate(
    run: ModelArgument,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="Text to continue; otherwise standard input, or as you type.")
    ] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from a file.")] = None,
    max_new_tokens: MaxNewTokensOption = 100,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k likeliest tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the smallest set of tokens with this total probability.")
    ] = None,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 discourages repetition.")] = 1.0,
    num_samples: NumSamplesOption = 1,
    seed: SeedOption = 0,
    cache: Annotated[str, CACHE_MODE] = "auto",
    checkpoint: CheckpointOption = "last",
    runs: RunsOption = Path("runs"),
    device: DeviceOption = "auto",
    plugin: PluginOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write text with a trained causal model or an export of one, token by token. ONNX exports run in ONNX Runtime.

    In a terminal and without a prompt it asks for one, continues it, and asks again: Ctrl-C ends an answer, Ctrl-D
    the command. Every answer has a seed of its own, counted from `--seed`.

    Examples, with a run of `skipless demo`:

    - `skipless generate demo-sas-p`

    - `skipless generate runs/demo-sas-p --prompt 'def ' --max-new-tokens 50`

    - `echo 'import os' | skipless generate demo-sas-p --num-samples 3 --top-p 0.9`
    """
    import time
    from dataclasses import replace

    from skipless.nn.sampling import Sampling, stream_text

    how = Sampling(temperature, top_k, top_p, repetition_penalty)
    asks = prompt is None and prompt_file is None and not as_json and _is_terminal()
    text = "" if asks else _read_text(prompt_file) if prompt is None else os.fsencode(prompt).decode("utf-8")
    model = _open(run, runs, checkpoint, device)
    seeds = count_from(seed)

    def write(text: str, number: int) -> list[str]:
        pieces = stream_text(model, text, max_new_tokens, replace(how, seed=next(seeds)), mode=cache)
        written = list(_shown(text, pieces, quiet=as_json))
        _show("\n" if number == num_samples - 1 else "\n---\n", quiet=as_json)
        return written

    if asks:
        _converse(lambda text: [write(text, number) for number in range(num_samples)])
        return
    start = time.perf_counter()
    written = [write(text, number) for number in range(num_samples)]
    texts, count = ["".join(pieces) for pieces in written], sum(len(pieces) - 1 for pieces in written)
    speed = count / (time.perf_counter() - start)
    if as_json:
        print(json.dumps({"run": run, "prompt": text, "texts": texts, "tokens_per_second": round(speed, 1)}))
    else:
        print(f"{speed:,.0f} tokens/s", file=sys.stderr)


def _open(run: str, runs: Path, checkpoint: str, device: str) -> "Decodes":
    """The model, ready to write."""
    from skipless.distributed.devices import pick_device
    from skipless.nn.model import CausalLM, MaskedLM
    from skipless.runs import find_model, load
    from skipless.runtime.model import OnnxCausalLM

    found = find_model(run, runs)
    model = load(found, checkpoint=checkpoint)
    if isinstance(model, OnnxCausalLM):
        return model.to("cpu" if device == "auto" else pick_device(device))
    place = pick_device(device)
    if not isinstance(model, CausalLM):
        kind = "masked model" if isinstance(model, MaskedLM) else "classifier"
        raise UserError(f"run {run!r} holds a {kind}, which cannot write text")
    return model.to(place).fold()


def _read_text(path: Path | None) -> str:
    """A prompt from a file, or from a pipe."""
    from skipless.config.reading import read_text

    if path is not None:
        return read_text(path)
    if sys.stdin is None or sys.stdin.closed or _is_terminal():
        raise UserError("there is no prompt: give --prompt, --prompt-file, or a text on standard input")
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError:
        raise UserError("standard input is not text in UTF-8") from None


def _is_terminal() -> bool:
    return sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()


def _converse(answer: Callable[[str], object]) -> None:
    """Ask for a prompt and answer it, again and again, until there is no more input."""
    with suppress(ImportError):
        import readline  # noqa: F401  (the keys that edit a line, and earlier ones)

    print("Give the model a beginning. Ctrl-C ends an answer, Ctrl-D all of it.", file=sys.stderr)
    while True:
        try:
            text = input("> ")
            text.encode()
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print(file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None
        except UnicodeError:
            print("skipless: that is not text in UTF-8", file=sys.stderr)
            continue
        try:
            answer(text)
        except KeyboardInterrupt:
            print()


def _shown(prompt: str, pieces: Iterator[str], *, quiet: bool) -> Iterator[str]:
    """The prompt and the pieces that follow it, each shown as it comes."""
    _show(prompt, quiet=quiet)
    yield prompt
    for piece in pieces:
        _show(piece, quiet=quiet)
        yield piece


def _show(text: str, *, quiet: bool) -> None:
    if not quiet:
        print(text, end="", flush=True)
