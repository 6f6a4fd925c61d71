"""`skipless finetune`: a pre-trained encoder on GLUE."""

import json
from typing import Annotated

import typer

from skipless.cli.frame import JsonOption, RunArgument, SetOption, app


@app.command()
def finetune(
    run: RunArgument,
    glue_dir: Annotated[
        str, typer.Option("--glue-dir", help="Folder of the official files (CoLA/train.tsv, …), or hf:nyu-mll/glue.")
    ],
    tasks: Annotated[
        str, typer.Option(help="all (without wnli), or mnli, sst2, stsb, rte, qnli, qqp, mrpc, cola, wnli with commas.")
    ] = "all",
    seeds: Annotated[int, typer.Option(help="Seeds 0, 1, … of each task.", min=1)] = 3,
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
    fresh: Annotated[bool, typer.Option("--fresh", help="Throw away earlier results and begin again.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Fine-tune a pre-trained encoder on GLUE with the paper's protocol, the same for every task.

    Interrupted or killed, the same command goes on. Results are in `RUN/glue.json` (the baselines' in
    `RUN/glue-from-scratch.json` and so on), answers to the test sets in `RUN/glue/predictions/`.

    Exit status: 0 finished, 2 bad input, 3 something was not finite, 130 and 143 saved and stopped.

    Examples:

    - `skipless finetune runs/encoder --glue-dir glue`

    - `skipless finetune runs/encoder --glue-dir glue --tasks cola,rte --seeds 1 --set lr=3e-4`

    - `skipless finetune runs/encoder --glue-dir glue --tasks cola,sst2 --rows sst2=1000 --from-scratch --json`
    """
    from skipless.config import FinetuneConfig, parse_overrides
    from skipless.data.glue import parse_rows, parse_tasks

    given = {"rows": None if rows is None else parse_rows(rows), "head_only": head_only, "from_scratch": from_scratch}
    cfg = FinetuneConfig().override({**given, **parse_overrides(settings or [])})
    chosen = parse_tasks(tasks)

    from rich.console import Console

    from skipless import display
    from skipless.finetune import finetune as run_finetuning
    from skipless.finetune import variant
    from skipless.progress import FinetuneView
    from skipless.runs import find_run
    from skipless.train import NonFinite

    found = find_run(run)
    view = FinetuneView(Console(stderr=as_json))
    results = run_finetuning(found, glue_dir, chosen, seeds=seeds, cfg=cfg, fresh=fresh, observer=view)
    path = found.folder / f"{variant(cfg)}.json"
    if as_json:
        print(json.dumps({"run": str(found.folder), "results": str(path), **results}))
    else:
        display.show_glue(found.name, results)
        print(f"results: {path}")
    failed = [report["message"] for seeds_of in results["failures"].values() for report in seeds_of.values()]
    if failed:
        what = f"{len(failed)} of the fine-tunings failed; the first: {failed[0]}"
        raise NonFinite(f"{what}; a smaller lr may help (--fresh --set lr=…, docs/bert.md)")
