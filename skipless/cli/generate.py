"""`skipless generate`: text, token by token."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skipless.cli.app import app
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
        str | None, typer.Option("--prompt", "-p", help="Text to go on from; else standard input.")
    ] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from a file.")] = None,
    max_new_tokens: MaxNewTokensOption = 100,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k likeliest.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from the fewest that have this probability.")] = None,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: less of what was there before.")] = 1.0,
    num_samples: NumSamplesOption = 1,
    seed: SeedOption = 0,
    cache: Annotated[str, CACHE_MODE] = "auto",
    checkpoint: CheckpointOption = "last",
    runs: RunsOption = Path("runs"),
    device: DeviceOption = "auto",
    plugin: PluginOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write text with a trained causal model, token by token as it comes; also with an export, by ONNX Runtime where
    that is one to ONNX.

    Examples:

    - `skipless generate runs/baseline --prompt 'def ' --max-new-tokens 50`

    - `echo 'import os' | skipless generate baseline --num-samples 3 --top-p 0.9`
    """
    import time
    from dataclasses import replace

    from skipless.nn.sampling import Sampling, stream_text

    how = Sampling(temperature, top_k, top_p, repetition_penalty)
    text = _read_text(prompt_file) if prompt is None else os.fsencode(prompt).decode("utf-8")
    model = _open(run, runs, checkpoint, device)
    texts, count, start = [], 0, time.perf_counter()
    for number in range(num_samples):
        pieces = stream_text(model, text, max_new_tokens, replace(how, seed=seed + number), mode=cache)
        written = list(_shown(text, pieces, quiet=as_json))
        count += len(written) - 1
        texts.append("".join(written))
        _show("\n" if number == num_samples - 1 else "\n---\n", quiet=as_json)
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
        return model.to("cpu" if device == "auto" else device)
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
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
        raise UserError("there is no prompt: give --prompt, --prompt-file, or a text on standard input")
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError:
        raise UserError("standard input is not text in UTF-8") from None


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
