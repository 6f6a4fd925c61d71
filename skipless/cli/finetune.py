"""`skipless finetune`: a pre-trained encoder on GLUE."""

import json
from pathlib import Path
from typing import Annotated

import typer

from skipless.cli.app import app
from skipless.cli.options import (
    GLUE_DIR,
    CheckpointOption,
    DeviceOption,
    JsonOption,
    PluginOption,
    RunArgument,
    RunsOption,
    SeedsOption,
    SetOption,
)


@app.command()
def finetune(
    run: RunArgument,
    glue_dir: Annotated[str, GLUE_DIR],
    tasks: Annotated[
        str, typer.Option(help="all (without wnli), or mnli, sst2, stsb, rte, qnli, qqp, mrpc, cola, wnli with commas.")
    ] = "all",
    seeds: SeedsOption = 3,
    rows: Annotated[
        str | None, typer.Option(help="Train on at most this many rows of each task, or of some: sst2=1000,qqp=5000.")
    ] = None,
    head_only: Annotated[
        bool, typer.Option("--head-only", help="Baseline: the encoder stays as it is, and only the head learns.")
    ] = False,
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Baseline: a random encoder, to see what pre-training gave.")
    ] = False,
    settings: SetOption = None,
    checkpoint: CheckpointOption = "last",
    runs: RunsOption = Path("runs"),
    device: DeviceOption = "auto",
    fresh: Annotated[bool, typer.Option("--fresh", help="Throw away earlier results and begin again.")] = False,
    plugin: PluginOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fine-tune a pre-trained encoder on GLUE with the paper's protocol, the same for every task.

    Interrupted or killed, the same command goes on. Results are in `RUN/glue.json` (the baselines' in
    `RUN/glue-from-scratch.json` and so on), answers to the test sets in `RUN/glue/predictions/`.

    Examples:

    - `skipless finetune runs/encoder --glue-dir glue`

    - `skipless finetune encoder --glue-dir glue --tasks cola --set lr=3e-4`

    - `skipless finetune encoder --glue-dir glue --rows sst2=1000 --from-scratch`
    """
    from skipless.config.overrides import parse_overrides
    from skipless.config.run import FinetuneConfig
    from skipless.data.glue import parse_rows, parse_tasks

    given = {"rows": None if rows is None else parse_rows(rows), "head_only": head_only, "from_scratch": from_scratch}
    cfg = FinetuneConfig().override({**given, **parse_overrides(settings or [])})
    chosen = parse_tasks(tasks)

    from skipless.runs import find_run
    from skipless.tasks.finetune import finetune as run_finetuning
    from skipless.tasks.glue_results import raise_failures, variant
    from skipless.terminal.console import Console
    from skipless.terminal.finetune_view import FinetuneView
    from skipless.terminal.runs import show_glue

    found = find_run(run, runs)
    results = run_finetuning(
        found,
        glue_dir,
        chosen,
        seeds=seeds,
        cfg=cfg,
        checkpoint=checkpoint,
        device=device,
        fresh=fresh,
        observer=FinetuneView(Console(stderr=as_json)),
    )
    path = found.folder / f"{variant(cfg)}.json"
    if as_json:
        print(json.dumps({"run": str(found.folder), "results": str(path), **results}))
    else:
        show_glue(found.name, results)
        print(f"results: {path}")
    raise_failures(results)
