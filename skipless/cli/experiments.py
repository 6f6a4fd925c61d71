"""The paper's experiments and what they are tuned with: `skipless reproduce`, `skipless sweep`."""

import json
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from skipless.cli.frame import STOPPED, CacheOption, CorpusOption, JsonOption, SetOption, app, set_corpora
from skipless.errors import UserError

NOTES = "notes.yaml"
SUMMARY = "summary.json"


@app.command()
def reproduce(
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="[ID]...", help="Experiments as --list names them, or all.")
    ] = None,
    scale: Annotated[str, typer.Option(help="laptop or paper.")] = "laptop",
    seeds: Annotated[int, typer.Option(help="Seeds of each run: 0, 1, …", min=1)] = 1,
    budget: Annotated[
        float | None, typer.Option(metavar="MINUTES", help="Stop after this time; what is done is saved.", min=0)
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", help="Runs at a time; they share the cores.", min=1)] = 1,
    runs: Annotated[Path, typer.Option("--runs", help="Folder of the runs; those that are there are reused.")] = Path(
        "runs"
    ),
    out: Annotated[
        Path,
        typer.Option(
            help="Folder of the page, the plots and their CSV; what its notes.yaml says of an id is shown with it."
        ),
    ] = Path("results"),
    rates: Annotated[Path | None, typer.Option(help="Tuned values, as `skipless sweep` writes them.")] = None,
    corpus: CorpusOption = None,
    archive: Annotated[
        Path | None,
        typer.Option(
            help="An archive of finished runs: what is in it is not trained again, and what is finished goes into it."
        ),
    ] = None,
    glue_dir: Annotated[
        str | None,
        typer.Option(help="Fine-tune the encoders of tab1 and tab2 on GLUE as well, as `skipless finetune` does."),
    ] = None,
    settings: SetOption = None,
    cache_dir: CacheOption = None,
    list_only: Annotated[
        bool, typer.Option("--list", help="Show the experiments, what they cost, and what the paper found.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Run the paper's experiments, or what is missing of them, and judge its claims.

    A run is found by its configuration: experiments share runs, finished ones are reused, interrupted ones go on.
    Several of these commands on one folder share the work. Exit status: 0 done, or the budget is spent; 3 a run has
    failed; 130 and 143 saved and stopped by Ctrl-C or SIGTERM.

    Examples:

    - `skipless reproduce --list`

    - `skipless reproduce fig5 --seeds 3 --jobs 2`

    - `skipless reproduce languini --corpus 'books=jsonl:books.jsonl.zst#text' --budget 60`

    - `skipless reproduce fig7 tab1 tab2 --corpus 'wiki=jsonl:wiki.jsonl.zst#text' --glue-dir glue --jobs 2`

    - `skipless reproduce all --runs docs/results/runs --budget 0 --seeds 3`

    - `skipless reproduce all --scale paper --seeds 3`
    """
    from skipless.config import parse_overrides
    from skipless.experiments.recipes import Scale, load_rates

    if not list_only and not ids:
        raise UserError("give the ids of experiments, or all; `skipless reproduce --list` shows them")
    set_corpora(corpus)
    where = Scale(scale, load_rates(rates) if rates else None, parse_overrides(settings or []))
    if list_only:
        _list(ids or ["all"], where, as_json=as_json)
        return
    given = [*(("--rates", str(rates)) if rates else ())]
    given += [word for setting in settings or [] for word in ("--set", setting)]
    again = shlex.join(["--scale", scale, "--seeds", str(seeds), *given])
    _reproduce(ids or [], where, seeds, budget, jobs, (runs, archive, out, cache_dir, glue_dir), again, as_json=as_json)


def _list(ids: list[str], scale: Any, *, as_json: bool) -> None:
    from skipless import display
    from skipless.experiments.recipes import SCALES, Scale
    from skipless.experiments.reproduce import choose, costs

    scales = [Scale(name, scale.rates, scale.changes) for name in SCALES]
    rows = [costs(one, scales) for one in choose(ids)]
    print(json.dumps({"experiments": rows})) if as_json else display.show_experiments(rows)


def _reproduce(
    ids: list[str],
    scale: Any,
    seeds: int,
    budget: float | None,
    jobs: int,
    folders: tuple[Path, Path | None, Path, Path | None, str | None],
    again: str,
    *,
    as_json: bool,
) -> None:
    from rich.console import Console

    from skipless import display
    from skipless.experiments.archive import archive as archive_run
    from skipless.experiments.experiment import judge
    from skipless.experiments.reproduce import (
        Pool,
        as_dict,
        check_glue,
        choose,
        plan,
        plan_fine_tunings,
        speed_of,
    )
    from skipless.experiments.shelf import Shelf
    from skipless.progress import ReproduceView

    begun = time.monotonic()
    runs, archive, out, cache_dir, glue_dir = folders
    experiments, notes = choose(ids), read_notes(out)
    display.pyplot()  # what draws the plots should be missing now rather than in an hour
    if glue_dir:
        check_glue(glue_dir, experiments, scale)  # the same for a file of GLUE
    tasks = plan(experiments, scale, seeds, Shelf(runs, archive), speed_of(scale))
    view = ReproduceView(Console(stderr=as_json))
    deadline = None if budget is None else begun + 60 * budget
    pool = Pool(jobs, cache_dir, deadline, view)
    if archive is not None:
        pool.done = lambda task: archive_run(task.run, archive)
    try:
        done = [pool.run(tasks)]
        if glue_dir:
            tuning = plan_fine_tunings(experiments, scale, seeds, Shelf(runs, archive), glue_dir)
            done.append(pool.run(tuning))
            tasks += tuning
    finally:
        view.close()
    shelf = Shelf(archive, runs) if archive else Shelf(runs)  # what is published is what is judged
    findings = [judge(one, scale, seeds, shelf, f"skipless reproduce {one.id} {again}") for one in experiments]
    findings = [with_note(one, notes.get(one.id)) for one in findings]
    finished = {name for progress in done for name in progress.finished}
    failed = {name: reason for progress in done for name, reason in progress.failed.items()}
    left = [task.name for task in tasks if task.name not in finished]
    if as_json:
        content = {"findings": [as_dict(one) for one in findings], "failed": failed, "left": left}
        print(json.dumps(content, allow_nan=False))
    else:
        display.show_findings(findings)
        display.show_left(left, failed)
    page = write_results(findings, out)
    print(f"page: {page}", file=sys.stderr if as_json else sys.stdout)
    if failed:
        raise typer.Exit(STOPPED)


def read_notes(out: Path) -> dict[str, Any]:
    """What somebody has written beside the results: `notes.yaml`, experiment → text, or its `answer` and `note`."""
    from skipless.config import load_yaml

    path = out / NOTES
    return load_yaml(path) if path.exists() else {}


def with_note(finding: Any, note: Any) -> Any:
    """The finding with what was written of it: what came out in a sentence, and an analysis."""
    parts = note if isinstance(note, dict) else {"note": note}
    text = {name: " ".join(str(parts.get(name) or "").split()) for name in ("answer", "note")}
    return replace(finding, **text)


def write_results(findings: Any, out: Path) -> Path:
    """The page of all findings, the same as Markdown, the plots of each in a folder, and how many claims hold."""
    from skipless.atomic import write_json
    from skipless.experiments.outcome import published
    from skipless.experiments.page import write_page, write_summary
    from skipless.experiments.plots import save_plots

    out.mkdir(parents=True, exist_ok=True)
    for finding in findings:
        save_plots(finding, out / finding.id)
    every = {run.folder: run for finding in findings for run in finding.runs}
    page = write_page(findings, list(every.values()), out / "report.html")
    write_summary(findings, page)
    write_json(out / SUMMARY, published(findings))
    return page


@app.command()
def sweep(
    over: Annotated[
        list[str],
        typer.Option(
            "--over",
            "-o",
            metavar="KEY=VALUES",
            help="`train.lr=1e-3,3e-3`, or a range: `train.lr=log:1e-4:1e-2`, also lin and int. Several make a grid.",
        ),
    ],
    block: Annotated[
        list[str] | None, typer.Option("--block", "-b", help="A block; several times for several.  [default: sas-p]")
    ] = None,
    recipe: Annotated[str, typer.Option("--recipe", "-r", help="What is trained.")] = "study",
    folder: Annotated[Path, typer.Option(help="Of the sweep; workers on the same one share its points.")] = Path(
        "sweep"
    ),
    trials: Annotated[int | None, typer.Option(help="Trials of each block, where there is a range.", min=1)] = None,
    prune: Annotated[bool, typer.Option("--prune", help="Give up what is behind the median of others.")] = False,
    runs: Annotated[Path, typer.Option("--runs", help="Folder of the runs; those that are there are reused.")] = Path(
        "runs"
    ),
    settings: SetOption = None,
    cache_dir: CacheOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train over values of any key of the configuration, and find the best for each block.

    Started several times with the same arguments, on one machine or on several with a common folder, the workers share
    the points; what a killed one leaves behind, another takes over. Each point is an ordinary run. The best values are
    in `best.json` of the folder, which `skipless reproduce --rates` reads.

    Examples:

    - `skipless sweep --over train.lr=1e-3,2e-3,4e-3 --block pre-ln --block sas-p`

    - `skipless sweep --over train.lr=log:1e-4:1e-2 --trials 12 --prune --folder lr`

    - `skipless sweep --over train.lr=1e-3,3e-3 --over model.block.beta_ff=0.05,0.2 --block sas --recipe smoke`
    """
    from dataclasses import asdict

    from rich.console import Console

    from skipless import display
    from skipless.config import parse_overrides
    from skipless.experiments.sweep import Sweep, parse_axis, plot_sweep
    from skipless.progress import TrainView

    view = TrainView(Console(stderr=as_json))
    axes = [parse_axis(text) for text in over]
    blocks = list(dict.fromkeys(block or ["sas-p"]))
    changes = parse_overrides(settings or [])
    display.pyplot()
    work = Sweep(folder, runs, recipe, blocks, axes, trials, changes, prune, cache_dir, view, view.message)
    work.work()
    best, points = work.write_best(), work.results()
    plot = plot_sweep(points, axes[0].key, folder / "sweep.png")
    if as_json:
        print(json.dumps({"points": [asdict(point) for point in points], "best": work.best()}))
        return
    display.show_sweep(points)
    print(f"best values: {best}\nplot: {plot}\nnext: skipless reproduce fig5 --rates {best}")
