"""What is done with runs: `skipless evaluate`, `generate`, `report`."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skipless.cli.frame import MAX_SEED, CacheOption, JsonOption, RunArgument, app
from skipless.errors import UserError

if TYPE_CHECKING:
    from skipless.experiments.outcome import Finding
    from skipless.runs import Run


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
    from skipless.evaluate import spread
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
    tokens = corpus.train if source else corpus.valid
    result = measure(model, cfg, corpus, tokens=tokens, rows=spread(len(tokens), rows) if rows else None)
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


def _find_all(names: list[str], scale: str, folder: Path) -> tuple[list["Finding"], list["Run"]]:
    """What was asked for: an experiment's id, or a run by name or path."""
    from skipless.experiments.catalogue import EXPERIMENTS
    from skipless.experiments.experiment import find
    from skipless.runs import find_run

    findings, runs = [], []
    for name in names:
        if name in EXPERIMENTS:
            findings.append(find(name, scale, folder))
        else:
            runs.append(find_run(name))
    return findings, runs


@app.command()
def report(
    names: Annotated[
        list[str], typer.Argument(metavar="RUN|EXPERIMENT...", help="Runs to set side by side, or experiments.")
    ],
    page: Annotated[Path | None, typer.Option(help="Write all of it into this HTML file, which works offline.")] = None,
    files: Annotated[
        bool, typer.Option("--files", help="With --page: also each plot as PNG, SVG and CSV, in folders beside it.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the losses into this file (PNG, SVG, PDF).")] = None,
    samples: Annotated[bool, typer.Option("--samples", help="Show the last sample of each run.")] = False,
    scale: Annotated[str, typer.Option(help="Of the experiments: laptop or paper.")] = "laptop",
    folder: Annotated[Path, typer.Option("--runs", help="Folder of the experiments' runs.")] = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Set runs side by side, or show what experiments found: tables, plots, samples, and all of it as a page.

    Examples:

    - `skipless report runs/baseline runs/simpler --plot losses.png --samples`

    - `skipless report fig2 fig5 --page report.html --files`
    """
    from skipless import display
    from skipless.experiments.page import check_page, files_folder, with_others, write_page
    from skipless.experiments.plots import draw_losses, save_plots
    from skipless.experiments.report import as_dict, different_data, finding_dict, summarise

    if plot:
        display.check_plot(plot)
    if page:
        check_page(page)
    elif files:
        raise UserError("--files lays the plots beside a page: give --page as well")
    findings, runs = _find_all(names, scale, folder)
    behind = [run for finding in findings for run in finding.runs if run.exists]
    everything = list({run.folder: run for run in [*behind, *runs]}.values())
    if plot:
        draw_losses(everything, plot)
    if page:
        for finding in with_others(findings, runs) if files else ():
            save_plots(finding, files_folder(page, finding))
        write_page(findings, runs, page)
    summaries, warnings = [summarise(run) for run in everything], different_data(runs)
    if as_json:
        found = {"findings": list(map(finding_dict, findings))} if findings else {}
        print(json.dumps({"runs": list(map(as_dict, summaries)), "warnings": warnings, **found}))
        return
    if findings:
        display.show_findings(findings)
    display.show_warnings(warnings)
    display.show_summaries(summaries)
    if samples:
        display.show_samples(everything)
    for what, path in {"plot": plot, "page": page}.items():
        if path:
            print(f"{what}: {path}")
