"""`skipless reproduce`: the paper's experiments."""

import json
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from skipless.cli.app import STOPPED, app
from skipless.cli.options import (
    GLUE_DIR,
    CacheOption,
    CorpusOption,
    JobsOption,
    JsonOption,
    MinutesOption,
    OutputOption,
    PluginOption,
    RunsOption,
    ScaleOption,
    SeedsOption,
    SetOption,
    set_corpora,
)
from skipless.cli.renamed import renamed
from skipless.errors import UserError


@app.command(cls=renamed({"--budget": "--minutes", "--out": "--output"}))
def reproduce(
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="ID", help="Experiments as --list names them, or all.")
    ] = None,
    scale: ScaleOption = "laptop",
    seeds: SeedsOption = 1,
    minutes: MinutesOption = None,
    jobs: JobsOption = 1,
    runs: RunsOption = Path("runs"),
    output: OutputOption = Path("results"),
    rates: Annotated[Path | None, typer.Option(help="Tuned values, as `skipless sweep` writes them.")] = None,
    corpus: CorpusOption = None,
    archive: Annotated[
        Path | None,
        typer.Option(
            help="An archive of finished runs: what is in it is not trained again, and what is finished goes into it."
        ),
    ] = None,
    glue_dir: Annotated[str | None, GLUE_DIR] = None,
    also: Annotated[
        list[str] | None,
        typer.Option("--beside", metavar="BLOCK", help="Also train this block wherever an experiment trains pre-ln."),
    ] = None,
    settings: SetOption = None,
    cache_dir: CacheOption = None,
    list_only: Annotated[
        bool, typer.Option("--list", help="Show the experiments, what they cost, and what the paper found.")
    ] = False,
    plugin: PluginOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run the paper's experiments, training only what is missing, and judge its claims.

    A run is found by its configuration: experiments share runs, finished ones are reused, interrupted ones continue.
    Several of these commands on one folder share the work. When `--minutes` are over, what is done is saved and judged;
    0 only judges. With `--glue-dir` the encoders of tab1 and tab2 are fine-tuned as well. The page, the plots and their
    CSV go to `--output`, where a file `notes.yaml` may add a note to an id.

    Examples:

    - `skipless reproduce --list`

    - `skipless reproduce fig5 --seeds 3 --jobs 2`

    - `skipless reproduce fig5 --beside my-block --plugin my_parts.py`

    - `skipless reproduce languini --corpus 'books=jsonl:books.jsonl' --minutes 60`

    - `skipless reproduce tab1 --corpus 'wiki=jsonl:wiki.jsonl' --glue-dir glue`

    - `skipless reproduce all --runs docs/results/runs --minutes 0 --seeds 3`

    - `skipless reproduce all --scale paper --seeds 3`
    """
    from skipless.config.overrides import parse_overrides
    from skipless.experiments.scale import Scale
    from skipless.recipes import load_rates

    if not list_only and not ids:
        raise UserError("give the ids of experiments, or all; `skipless reproduce --list` shows them")
    set_corpora(corpus)
    where = Scale(scale, load_rates(rates) if rates else None, parse_overrides(settings or []))
    if list_only:
        _list(ids or ["all"], where, as_json=as_json)
        return
    given = [*(("--rates", str(rates)) if rates else ())]
    given += [word for setting in settings or [] for word in ("--set", setting)]
    given += [word for name in also or [] for word in ("--beside", name)]
    given += [word for name in plugin or [] for word in ("--plugin", name)]
    again = shlex.join(["--scale", scale, "--seeds", str(seeds), *given])
    folders = Folders(runs, archive, output, cache_dir, glue_dir)
    _reproduce(ids or [], where, seeds, minutes, jobs, folders, again, also or [], as_json=as_json)


@dataclass(frozen=True)
class Folders:
    """Where experiments find what they need, and where what comes out goes."""

    runs: Path
    archive: Path | None
    output: Path
    cache_dir: Path | None
    glue_dir: str | None


def _list(ids: list[str], scale: Any, *, as_json: bool) -> None:
    from skipless.experiments.estimates import costs
    from skipless.experiments.jobs import choose
    from skipless.experiments.scale import SCALES, Scale
    from skipless.terminal.experiments import show_experiments

    scales = [Scale(name, scale.rates, scale.changes) for name in SCALES]
    rows = [costs(one, scales) for one in choose(ids)]
    print(json.dumps({"experiments": rows})) if as_json else show_experiments(rows)


def _reproduce(
    ids: list[str],
    scale: Any,
    seeds: int,
    minutes: float | None,
    jobs: int,
    folders: Folders,
    again: str,
    blocks: list[str],
    *,
    as_json: bool,
) -> None:
    """Train what is missing, judge, and write the page."""
    from skipless.analysis import plotting
    from skipless.experiments.beside import beside
    from skipless.experiments.experiment import judge
    from skipless.experiments.jobs import check_glue, choose
    from skipless.experiments.report.findings import as_dict
    from skipless.experiments.report.results import read_notes, with_note, write_results
    from skipless.experiments.run_index import RunIndex
    from skipless.storage.atomic_files import check_folder
    from skipless.terminal.experiments import show_findings, show_left

    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    experiments, notes = beside(choose(ids), blocks, scale), read_notes(folders.output)
    for folder in (folders.output, folders.runs, folders.archive):
        if folder is not None:
            check_folder(folder)
    plotting.pyplot()  # what draws the plots should be missing now rather than in an hour
    if folders.glue_dir:
        check_glue(folders.glue_dir, experiments, scale)  # the same for a file of GLUE
    left, failed = train_missing(experiments, scale, seeds, jobs, folders, deadline, as_json=as_json)
    # what is published is what is judged
    index = RunIndex(folders.archive, folders.runs) if folders.archive else RunIndex(folders.runs)
    findings = [judge(one, scale, seeds, index, f"skipless reproduce {one.id} {again}") for one in experiments]
    findings = [with_note(one, notes.get(one.id)) for one in findings]
    if as_json:
        content = {"findings": [as_dict(one) for one in findings], "failed": failed, "left": left}
        print(json.dumps(content, allow_nan=False))
    else:
        show_findings(findings)
        show_left(left, failed)
    page = write_results(findings, folders.output)
    print(f"page: {page}", file=sys.stderr if as_json else sys.stdout)
    report_failed(failed)


def report_failed(failed: Mapping[str, str]) -> None:
    """Name every run that failed, and why; then end with the status that says so."""
    for name, reason in failed.items():
        print(f"skipless: {name} failed: {reason}", file=sys.stderr)
    if failed:
        raise typer.Exit(STOPPED)


def train_missing(
    experiments: Any, scale: Any, seeds: int, jobs: int, folders: Folders, deadline: float | None, *, as_json: bool
) -> tuple[list[str], dict[str, str]]:
    """Train, and fine-tune, what the experiments need; the names of what is left, and why some of it failed."""
    from skipless.experiments.archive import archive as archive_run
    from skipless.experiments.estimates import speed_of
    from skipless.experiments.jobs import plan, plan_fine_tunings
    from skipless.experiments.pool import Pool
    from skipless.experiments.run_index import RunIndex
    from skipless.terminal.console import Console
    from skipless.terminal.reproduce_view import ReproduceView

    runs, archive = folders.runs, folders.archive
    tasks = plan(experiments, scale, seeds, RunIndex(runs, archive), speed_of(scale))
    view = ReproduceView(Console(stderr=as_json))
    pool = Pool(jobs, folders.cache_dir, deadline, view)
    if archive is not None:
        pool.done = lambda task: task.run.folder.parent == archive or archive_run(task.run, archive)
    try:
        done = [pool.run(tasks)]
        if folders.glue_dir:
            tuning = plan_fine_tunings(experiments, scale, seeds, RunIndex(runs, archive), folders.glue_dir)
            done.append(pool.run(tuning))
            tasks += tuning
    finally:
        view.close()
    finished = {name for progress in done for name in progress.finished}
    failed = {name: reason for progress in done for name, reason in progress.failed.items()}
    return [task.name for task in tasks if task.name not in finished], failed
