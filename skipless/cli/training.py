"""`skipless train`: recipe, file, options → a run."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skipless.cli.frame import (
    BlockOption,
    CacheOption,
    ConfigOption,
    CorpusOption,
    JsonOption,
    SetOption,
    app,
    resolve,
    set_corpora,
)
from skipless.errors import UserError

if TYPE_CHECKING:
    from skipless.runs import Run


@app.command()
def train(
    recipe: Annotated[
        str,
        typer.Option(
            "--recipe",
            "-r",
            help="laptop, demo, smoke; the paper's codeparrot, crammed-bert, languini, and at laptop scale study, "
            "crammed-bert-laptop, study-books; a name that is not known shows all.",
        ),
    ] = "laptop",
    block: BlockOption = None,
    config: ConfigOption = None,
    name: Annotated[
        str | None, typer.Option("--name", "-n", help="Name of the run.  [default: block and a hash]")
    ] = None,
    runs: Annotated[Path, typer.Option("--runs", help="Folder of the runs.")] = Path("runs"),
    source: Annotated[
        str | None, typer.Option(help="python-stdlib, files:GLOB, jsonl:PATH#field, hf:DATASET#field.")
    ] = None,
    n_layer: Annotated[int | None, typer.Option("--n-layer", "-L", help="Depth.")] = None,
    d_model: Annotated[int | None, typer.Option("--d-model", "-d", help="Width.")] = None,
    n_head: Annotated[int | None, typer.Option("--n-head", "-H", help="Heads.")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens in a sequence.")] = None,
    steps: Annotated[int | None, typer.Option(help="Budget in steps.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Budget in tokens, instead of steps.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Budget in minutes, instead of steps.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Sequences in a step.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of weights, data order and samples.")] = None,
    parallel: Annotated[
        str | None, typer.Option(help="Under torchrun: ddp (whole models) or fsdp (shares of one).  [default: ddp]")
    ] = None,
    corpus: CorpusOption = None,
    settings: SetOption = None,
    resume: Annotated[str | None, typer.Option(help="`auto`: go on from the newest valid checkpoint.")] = None,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Resume with another configuration.")
    ] = False,
    track: Annotated[
        str, typer.Option(help="tensorboard, wandb, trackio, several with commas, or none.")
    ] = "tensorboard",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show sizes, memory and time; train one step; keep nothing.")
    ] = False,
    cache_dir: CacheOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train a model. With no argument: `sas-p` on the Python standard library's source, in minutes.

    Exit status: 0 finished, 2 bad input, 3 stopped by itself (loss not finite, disk full), 130 and 143 saved and
    stopped by Ctrl-C or SIGTERM.

    Examples:

    - `skipless train`

    - `skipless train --block pre-ln --steps 500 --lr 1e-3 --name baseline`

    - `skipless train --name baseline --resume auto --block pre-ln --steps 500 --lr 1e-3`

    - `skipless train --recipe codeparrot --block sas --set train.precision=bf16 --dry-run`

    - `torchrun --nproc-per-node 8 --max-restarts 3 -m skipless train --recipe codeparrot --parallel fsdp`
    """
    if resume not in (None, "auto"):
        raise UserError(f"--resume takes auto, got {resume!r}")
    given = {
        "data.source": source,
        "model.n_layer": n_layer,
        "model.d_model": d_model,
        "model.n_head": n_head,
        "data.seq_len": seq_len,
        "train.steps": steps,
        "train.tokens": tokens,
        "train.minutes": minutes,
        "train.batch_size": batch_size,
        "train.lr": lr,
        "train.seed": seed,
        "parallel.kind": parallel,
    }
    set_corpora(corpus)
    cfg = resolve(recipe, config, block, given, settings)
    trackers = [] if track == "none" else [one.strip() for one in track.split(",")]
    name = f"{(block or 'sas-p').split(':')[0]}-{cfg.digest}" if name is None else name
    if not name or Path(name).name != name or name.startswith("."):
        raise UserError(f"a run's name is the name of a folder, got {name!r}; --runs says where it lies")

    from rich.console import Console

    from skipless import display
    from skipless.allocator import keep_freed_memory
    from skipless.parallel import first_process
    from skipless.progress import TrainView
    from skipless.train import Observer
    from skipless.train import train as run_training
    from skipless.trials import dry_run as rehearse

    keep_freed_memory()
    speaks = first_process()
    view = TrainView(Console(stderr=as_json)) if speaks else Observer()
    if dry_run:
        outcome = rehearse(cfg, observer=view, cache_dir=cache_dir)
        if speaks:
            print(json.dumps(outcome)) if as_json else display.show_rehearsal(outcome)
        return
    run = run_training(
        cfg,
        runs / name,
        resume=resume == "auto",
        accept_changes=accept_changes,
        trackers=trackers,
        observer=view,
        cache_dir=cache_dir,
    )
    if speaks:
        _show(run, as_json=as_json)


def _show(run: "Run", *, as_json: bool) -> None:
    """What came of a training, and what to do with it."""
    from skipless import display
    from skipless.experiments.report import as_dict, summarise

    if as_json:
        print(json.dumps({"run": str(run.folder), **as_dict(summarise(run))}))
        return
    display.show_summaries([summarise(run)])
    cfg = run.config()
    use = f"generate {run.folder} --prompt '{cfg.train.sample_prompt}'"
    use = f"finetune {run.folder} --glue-dir DIR" if cfg.task == "masked" else use
    print(f"run: {run.folder}\nnext: skipless {use}")
