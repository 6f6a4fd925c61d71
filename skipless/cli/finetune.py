"""`skipless finetune`: a pre-trained model on labelled text, GLUE's or one's own."""

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skipless.cli.app import app
from skipless.cli.options import (
    GLUE_DIR,
    SEEDS,
    CheckpointOption,
    DeviceOption,
    JsonOption,
    NameOption,
    PluginOption,
    RunArgument,
    RunsOption,
    SetOption,
    TextOption,
    TextPairOption,
)
from skipless.errors import UserError

if TYPE_CHECKING:
    from skipless.config.run import FinetuneConfig
    from skipless.data.glue import GlueTask
    from skipless.runs import Run


@app.command()
def finetune(
    run: RunArgument,
    glue_dir: Annotated[str | None, GLUE_DIR] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="GLUE: all (without wnli), or mnli, sst2, stsb, rte, qnli, qqp, mrpc, cola, wnli with commas."
        ),
    ] = None,
    train: Annotated[
        str | None, typer.Option(help="Labelled rows to train on: a .tsv, .csv or .jsonl file, or hf:DATASET@split.")
    ] = None,
    valid: Annotated[str | None, typer.Option(help="Labelled rows to validate on after each epoch.")] = None,
    test: Annotated[
        str | None, typer.Option(help="Rows that the best checkpoint answers; labels may be missing.")
    ] = None,
    text: TextOption = None,
    text_pair: TextPairOption = None,
    label: Annotated[str | None, typer.Option(help="Column of the answer.  [default: label]")] = None,
    labels: Annotated[
        str | None, typer.Option(help="The classes in their order, with commas.  [default: those of the rows, sorted]")
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(
            help="classification or regression.  [default: regression if labels are numbers, not all whole, or more "
            "than 20 different whole ones]"
        ),
    ] = None,
    name: NameOption = None,
    seeds: Annotated[int | None, SEEDS] = None,
    rows: Annotated[
        str | None, typer.Option(help="Train on at most this many rows of each task, or of some: sst2=1000,qqp=5000.")
    ] = None,
    head_only: Annotated[
        bool, typer.Option("--head-only", help="Baseline: the model stays as it is, and only the head learns.")
    ] = False,
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Baseline: random weights, to see what pre-training gave.")
    ] = False,
    settings: SetOption = None,
    checkpoint: CheckpointOption = "last",
    runs: RunsOption = Path("runs"),
    device: DeviceOption = "auto",
    fresh: Annotated[bool, typer.Option("--fresh", help="Throw away earlier results and begin again.")] = False,
    plugin: PluginOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fine-tune a pre-trained model on labelled text of your own, or an encoder on GLUE with the paper's protocol.

    With `--train` and `--valid`, the classifier is kept in a folder of its own (`RUN-LABEL` without `--name`; one for
    each seed, by default one), for `skipless predict`, `skipless export` and `skipless.load`. With `--glue-dir` it is
    the scores that count: there are three seeds, results are in `RUN/glue.json` (the baselines' in
    `RUN/glue-from-scratch.json` and so on), answers to the test sets in `RUN/glue/predictions/`; with `--name` and one
    task the classifier is kept as well as any. Interrupted or killed, the same command continues.

    Examples:

    - `skipless finetune encoder --train a.tsv --valid b.tsv --name mood`

    - `skipless finetune encoder --train a.csv --valid b.csv --text-pair reply`

    - `skipless finetune runs/encoder --glue-dir glue`

    - `skipless finetune encoder --glue-dir glue --tasks cola --set lr=3e-4`

    - `skipless finetune encoder --glue-dir glue --tasks sst2 --name mood`

    - `skipless finetune encoder --glue-dir glue --rows sst2=1000 --from-scratch`
    """
    from skipless.config.overrides import parse_overrides
    from skipless.config.run import FinetuneConfig
    from skipless.data.glue import parse_rows

    given = {"rows": None if rows is None else parse_rows(rows), "head_only": head_only, "from_scratch": from_scratch}
    cfg = FinetuneConfig().override({**given, **parse_overrides(settings or [])})
    own = {"--train": train, "--valid": valid, "--test": test, "--text": text, "--text-pair": text_pair}
    own |= {"--label": label, "--labels": labels, "--kind": kind}
    how = {"checkpoint": checkpoint, "device": device, "fresh": fresh}
    if glue_dir is not None:
        if stray := [option for option, value in own.items() if value is not None]:
            raise UserError(f"{stray[0]} is for labelled rows of your own, and --glue-dir for GLUE: give one of them")
        from skipless.data.glue import parse_tasks, read_one_task
        from skipless.runs import find_run

        chosen = parse_tasks(tasks or "all")
        if name is None:
            _glue(find_run(run, runs), glue_dir, chosen, seeds or 3, cfg, how, as_json=as_json)
            return
        if len(chosen) != 1:
            raise UserError("--name keeps the classifier of one task: name that task, as in --tasks sst2")
        data = read_one_task(glue_dir, chosen[0])
        _own(find_run(run, runs), data, _folders(runs, name, seeds), cfg, how, as_json=as_json)
        return
    if train is None or valid is None:
        raise UserError("give labelled rows as --train FILE --valid FILE, or GLUE as --glue-dir DIR")
    if tasks is not None:
        raise UserError("--tasks goes with --glue-dir")
    from skipless.data.own_task import read_own_task
    from skipless.runs import find_run

    found = find_run(run, runs)
    column = label or "label"
    called = f"{found.name}-{column}" if name is None else name
    folders = _folders(runs, called, seeds)
    data = read_own_task(
        called,
        train,
        valid,
        test,
        texts=[part for part in (text or "text", text_pair) if part is not None],
        label=column,
        kind=kind,  # pyrefly: ignore
        labels=None if labels is None else labels.split(","),
    )
    _own(found, data, folders, cfg, how, as_json=as_json)


def _folders(runs: Path, name: str, seeds: int | None) -> list[Path]:
    """Where the classifier of each seed is kept."""
    if not name or Path(name).name != name or name.startswith("."):
        raise UserError(f"--name is the name of a folder, got {name!r}; --runs says where it lies")
    return [runs / (name if seed == 0 else f"{name}-seed-{seed}") for seed in range(seeds or 1)]


def _own(
    found: "Run", data: Any, folders: list[Path], cfg: "FinetuneConfig", how: dict[str, Any], *, as_json: bool
) -> None:
    """Fine-tune on rows of one's own, with a folder for each seed."""
    from skipless.tasks.own_labels import OwnFinetuning
    from skipless.terminal.console import Console
    from skipless.terminal.finetune_view import FinetuneView
    from skipless.terminal.runs import show_classifiers

    view = FinetuneView(Console(stderr=as_json))
    task, fresh = data.task, how.pop("fresh")
    kind = "a regression" if task.is_regression else f"{len(task.labels)} classes: {', '.join(task.labels[:20])}"
    view.message(f"{len(data.train)} rows, {kind}")
    results = [
        OwnFinetuning(found, data, folder, cfg, seed, observer=view, **how).train(fresh=fresh)
        for seed, folder in enumerate(folders)
    ]
    if as_json:
        print(json.dumps({"run": str(found.folder), "classifiers": results}))
    else:
        show_classifiers(results)
        use = ["predict", str(folders[0]), "--input", "FILE", "--text", task.texts[0]]
        print(f"next: skipless {shlex.join(use)}")


def _glue(
    found: "Run",
    glue_dir: str,
    tasks: list["GlueTask"],
    seeds: int,
    cfg: "FinetuneConfig",
    how: dict[str, Any],
    *,
    as_json: bool,
) -> None:
    """Fine-tune on GLUE, for the scores."""
    from skipless.tasks.finetune import finetune as run_finetuning
    from skipless.tasks.glue_results import raise_failures, variant
    from skipless.terminal.console import Console
    from skipless.terminal.finetune_view import FinetuneView
    from skipless.terminal.runs import show_glue

    view = FinetuneView(Console(stderr=as_json))
    results = run_finetuning(found, glue_dir, tasks, seeds=seeds, cfg=cfg, observer=view, **how)
    path = found.folder / f"{variant(cfg)}.json"
    if as_json:
        print(json.dumps({"run": str(found.folder), "results": str(path), **results}))
    else:
        show_glue(found.name, results)
        print(f"results: {path}")
    raise_failures(results)
