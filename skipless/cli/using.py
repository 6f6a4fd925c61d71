"""What is done with runs: `skipless evaluate`, `generate`, `report`."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from skipless.cli.frame import MAX_SEED, CacheOption, JsonOption, RunArgument, app
from skipless.errors import UserError


@app.command()
def evaluate(
    run: RunArgument,
    source: Annotated[
        str | None, typer.Option(help="Evaluate on this text instead of the run's held-out part.")
    ] = None,
    rows: Annotated[int | None, typer.Option(help="Sequences, spread evenly; all if not given.", min=1)] = None,
    which: Annotated[str, typer.Option(help="Checkpoint: last or best.")] = "last",
    tasks: Annotated[
        str | None, typer.Option(help="Tasks of lm-evaluation-harness, with commas between; python_next_line is here.")
    ] = None,
    task_path: Annotated[Path | None, typer.Option(help="A folder with task files of your own.")] = None,
    limit: Annotated[int | None, typer.Option(help="Items of each task; all if not given.", min=1)] = None,
    cache_dir: CacheOption = None,
    as_json: JsonOption = False,
) -> None:
    """Loss, perplexity and bits per byte of a trained model on held-out text or on any source; or scores on tasks.

    With `--tasks` RUN may also be an exported model.

    Examples:

    - `skipless evaluate runs/baseline`

    - `skipless evaluate runs/baseline --source 'files:src/**/*.py' --json`

    - `skipless evaluate runs/baseline --tasks python_next_line`
    """
    if which not in ("last", "best"):
        raise UserError(f"--which takes last or best, got {which!r}")
    if tasks is not None:
        if source is not None or rows is not None:
            raise UserError("--source and --rows are for text; --tasks has --limit")
        _evaluate_tasks(run, tasks, task_path, limit, which, as_json=as_json)
        return
    if task_path is not None or limit is not None:
        raise UserError("--task-path and --limit go with --tasks")
    from dataclasses import asdict

    from skipless import display
    from skipless.data import prepare
    from skipless.evaluate import evaluate as measure
    from skipless.runs import choose_checkpoint, find_run, is_export, load_checkpoint

    if is_export(Path(run)):
        raise UserError(f"{run!r} is an export, which does not know its held-out text; evaluate it with --tasks")
    found = find_run(run)
    cfg = found.config()
    data = cfg.data
    if source:
        data = data.replace(source=source, valid_source=None, valid_fraction=0.0, tokenizer=str(found.tokenizer_file))
    model = load_checkpoint(found, choose_checkpoint(found, which))
    corpus = prepare(data, cache_dir=cache_dir)
    result = measure(model, cfg, corpus, tokens=corpus.train if source else corpus.valid, max_rows=rows)
    if as_json:
        print(json.dumps({"run": str(found.folder), "source": data.source, **asdict(result)}))
    else:
        display.show_evaluation(found.name, source or "held-out part of " + data.source, result)


def _evaluate_tasks(
    run: str, tasks: str, task_path: Path | None, limit: int | None, which: str, *, as_json: bool
) -> None:
    from skipless import display
    from skipless.harness import evaluate_tasks

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    scores = evaluate_tasks(run, names, task_path=task_path, limit=limit, which=which)
    print(json.dumps({"run": run, "tasks": scores})) if as_json else display.show_scores(run, scores)


def _read_text(path: Path | None) -> str:
    """A prompt from a file, or from a pipe."""
    try:
        if path is not None:
            return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {str(path)!r}: {error}") from None
    if sys.stdin.isatty():
        raise UserError("there is no prompt: give --prompt, --prompt-file, or a text on standard input")
    return sys.stdin.read()


def _show(text: str, *, quiet: bool) -> None:
    if not quiet:
        print(text, end="", flush=True)


@app.command()
def generate(
    run: RunArgument,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="Text to go on from; else standard input.")
    ] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from a file.")] = None,
    tokens: Annotated[int, typer.Option(help="New tokens.", min=1)] = 100,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k likeliest.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from the fewest that have this probability.")] = None,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: less of what was there before.")] = 1.0,
    samples: Annotated[int, typer.Option(help="How many texts.", min=1)] = 1,
    seed: Annotated[int, typer.Option(help="Of the draws.", min=0, max=MAX_SEED)] = 0,
    cache: Annotated[str, typer.Option(help="What is remembered: auto, kv, kx, or x (half the memory).")] = "auto",
    as_json: JsonOption = False,
) -> None:
    """Write text with a trained causal model, token by token as it comes. RUN may also be an exported model.

    Examples:

    - `skipless generate runs/baseline --prompt 'def '`

    - `echo 'import os' | skipless generate runs/baseline --samples 3 --top-p 0.9 --json`
    """
    import time
    from dataclasses import replace

    from skipless.generate import Sampling, stream_text
    from skipless.nn.model import CausalLM
    from skipless.runs import load

    how = Sampling(temperature, top_k, top_p, repetition_penalty)
    text = prompt if prompt is not None else _read_text(prompt_file)
    model = load(run)
    if not isinstance(model, CausalLM):
        raise UserError(f"run {run!r} holds a masked model, which cannot write text")
    model = model.fold()
    texts, count, start = [], 0, time.perf_counter()
    for number in range(samples):
        written = [text]
        _show(text, quiet=as_json)
        for piece in stream_text(model, text, tokens, replace(how, seed=seed + number), mode=cache):
            written.append(piece)
            count += 1
            _show(piece, quiet=as_json)
        texts.append("".join(written))
        _show("\n" if number == samples - 1 else "\n---\n", quiet=as_json)
    speed = count / (time.perf_counter() - start)
    if as_json:
        print(json.dumps({"run": run, "prompt": text, "texts": texts, "tokens_per_second": round(speed, 1)}))
    else:
        print(f"{speed:,.0f} tokens/s", file=sys.stderr)


@app.command()
def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Runs to set side by side.")],
    plot: Annotated[Path | None, typer.Option(help="Draw the losses into this file (PNG, SVG, PDF).")] = None,
    samples: Annotated[bool, typer.Option("--samples", help="Show the last sample of each run.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Set runs side by side: parameters, losses, speed; a plot of the losses; samples.

    Examples:

    - `skipless report runs/baseline runs/simpler --plot losses.png --samples`
    """
    from skipless import display
    from skipless.experiments.report import as_dict, plot_losses, summarise
    from skipless.runs import find_run

    found = [find_run(run) for run in runs]
    if plot:
        display.check_plot(plot)
        plot_losses(found, plot)
    if as_json:
        print(json.dumps({"runs": [as_dict(summarise(run)) for run in found]}))
        return
    display.show_summaries([summarise(run) for run in found])
    if samples:
        display.show_samples(found)
    if plot:
        print(f"plot: {plot}")
