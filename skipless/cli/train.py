"""`skipless train`: recipe, file, options → a run."""

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skipless.cli.app import app
from skipless.cli.options import (
    DEVICE,
    SEED,
    BatchSizeOption,
    BlockOption,
    CacheOption,
    ConfigOption,
    CorpusOption,
    HeadsOption,
    JsonOption,
    LayersOption,
    MinutesOption,
    NameOption,
    PluginOption,
    RecipeOption,
    RunsOption,
    SeqLenOption,
    SetOption,
    SourcesOption,
    WidthOption,
    resolve,
    set_corpora,
    sources,
)
from skipless.cli.renamed import renamed
from skipless.errors import UserError

if TYPE_CHECKING:
    from skipless.config.run import RunConfig
    from skipless.runs import Run
    from skipless.training.branch import Branch
    from skipless.training.observer import Observer


@app.command(cls=renamed({"--resume auto": "--resume"}))
def train(
    recipe: RecipeOption = "laptop",
    block: BlockOption = None,
    config: ConfigOption = None,
    name: NameOption = None,
    runs: RunsOption = Path("runs"),
    source: SourcesOption = None,
    n_layer: LayersOption = None,
    d_model: WidthOption = None,
    n_head: HeadsOption = None,
    seq_len: SeqLenOption = None,
    batch_size: BatchSizeOption = None,
    steps: Annotated[int | None, typer.Option(help="Budget in steps.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Budget in tokens, instead of steps.")] = None,
    minutes: MinutesOption = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    seed: Annotated[int | None, SEED] = None,
    device: Annotated[str | None, DEVICE] = None,
    parallel: Annotated[
        str | None, typer.Option(help="Under torchrun: ddp (replicated) or fsdp (sharded).  [default: ddp]")
    ] = None,
    corpus: CorpusOption = None,
    settings: SetOption = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Resume from the newest valid checkpoint; start from scratch if none was made yet."
        ),
    ] = False,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Allow a changed configuration when resuming.")
    ] = False,
    branch: Annotated[
        str | None,
        typer.Option(
            metavar="RUN[@STEP]", help="Continue from a run's checkpoint, in its configuration; with --decay."
        ),
    ] = None,
    decay: Annotated[
        int | None, typer.Option(help="With --branch: steps over which the learning rate goes to zero.", min=1)
    ] = None,
    track: Annotated[str, typer.Option(help="tensorboard, wandb, trackio (comma-separated), or none.")] = "tensorboard",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show sizes, memory and time; train one step; keep nothing.")
    ] = False,
    cache_dir: CacheOption = None,
    plugin: PluginOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train a model. With no argument: `sas-p` on the Python standard library's source, in minutes.

    Without `--name`, a run is named after its block and a hash of its configuration.

    A file given with `--config` overrides the recipe, options override the file, and `--set` overrides everything. With
    `--source`, the held-out text is taken from that source, not from the recipe's.

    Examples:

    - `skipless train`

    - `skipless train --block pre-ln --steps 500 --name baseline`

    - `skipless train --block pre-ln --steps 500 --name baseline --resume`

    - `skipless train --recipe codeparrot --block sas --device cuda --dry-run`

    - `torchrun --nproc-per-node 8 -m skipless train --parallel fsdp`

    - `skipless train --name stable -s train.schedule=wsd -s train.keep_last=20`

    - `skipless train --name decayed --branch stable@1000 --decay 250`
    """
    given = {
        "data.source": sources(source),
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
        "train.device": device,
        "parallel.kind": parallel,
    }
    from skipless.recipes.variants import block_name

    set_corpora(corpus)
    start = None
    if branch is None:
        if decay is not None:
            raise UserError("--decay goes with --branch; for a run of its own use --set train.decay=…")
        cfg = resolve(recipe, config, block, given, settings)
    else:
        others = [config, block, *(value for key, value in given.items() if key != "train.device")]
        if decay is None or any(value is not None for value in others):
            raise UserError("--branch takes --decay STEPS, and everything else from the run; change that with --set")
        there = runs / name if resume and name else None
        start, cfg = _branch(branch, runs, decay, device, settings, there)
    if name is None:
        name = f"{block.split(':')[0] if block else block_name(cfg.model.block)}-{cfg.digest}"
    if not name or Path(name).name != name or name.startswith("."):
        raise UserError(f"--name must be a plain folder name, got {name!r}; --runs says where the folder is made")
    trackers = [] if track == "none" else [one.strip() for one in track.split(",")]
    how = {"resume": resume, "accept_changes": accept_changes, "trackers": trackers, "branch": start}
    _train(cfg, None if dry_run else runs / name, how, cache_dir, as_json=as_json)


def _branch(
    text: str, runs: Path, decay: int, device: str | None, settings: list[str] | None, there: Path | None
) -> "tuple[Branch | None, RunConfig]":
    """The checkpoint that is continued from, and the configuration of a decay from there.

    A branch that is resumed from a checkpoint of its own needs no other: the run that it came from may have
    continued, and removed it.
    """
    from skipless.config.overrides import parse_overrides
    from skipless.runs import Run
    from skipless.training.branch import Branch, is_branch_of

    where = {} if device is None else {"train.device": device}
    changes = {**where, **parse_overrides(settings or [])}
    if there is not None and Run(there).exists and Run(there).checkpoints().all():
        cfg = Run(there).config()
        if not is_branch_of(cfg, text, decay):
            raise UserError(f"run {str(there)!r} is no decay of {decay} steps off {text!r}: give another --name")
        return None, cfg.override(changes)
    start = Branch.find(text, runs)
    return start, start.config(decay).override(changes)


def _train(
    cfg: "RunConfig", folder: Path | None, how: dict[str, Any], cache_dir: Path | None, *, as_json: bool
) -> None:
    """Train in the folder of a run, or where there is none try one step; the first process shows what came of it."""
    from skipless.distributed.group import first_process
    from skipless.terminal.runs import show_rehearsal
    from skipless.training.allocator import keep_freed_memory
    from skipless.training.dry_run import dry_run

    if folder is None:
        keep_freed_memory()
        outcome = dry_run(cfg, observer=make_view(as_json=as_json), cache_dir=cache_dir)
        if first_process():
            print(json.dumps(outcome)) if as_json else show_rehearsal(outcome)
        return
    run = train_in(cfg, folder, how, cache_dir, as_json=as_json)
    if first_process():
        _show(run, as_json=as_json)


def train_in(cfg: "RunConfig", folder: Path, how: dict[str, Any], cache_dir: Path | None, *, as_json: bool) -> "Run":
    """Train in the folder of a run; the first process shows how far it is, beside the JSON where that is printed."""
    from skipless.training.allocator import keep_freed_memory
    from skipless.training.train import train as run_training

    keep_freed_memory()
    return run_training(cfg, folder, observer=make_view(as_json=as_json), cache_dir=cache_dir, **how)


def make_view(*, as_json: bool) -> "Observer":
    """What this process shows of a training run: the first one everything, the others nothing."""
    from skipless.distributed.group import first_process
    from skipless.terminal.console import Console
    from skipless.terminal.train_view import TrainView
    from skipless.training.observer import Observer

    return TrainView(Console(stderr=as_json)) if first_process() else Observer()


def _show(run: "Run", *, as_json: bool) -> None:
    """What came of a training run, and what to do with it."""
    from skipless.experiments.report.summary import as_dict, summarise
    from skipless.terminal.runs import show_summaries

    if as_json:
        print(json.dumps({"run": str(run.folder), **as_dict(summarise(run))}))
        return
    show_summaries([summarise(run)])
    cfg = run.config()
    folder = str(run.folder)
    use = ["generate", folder, "--prompt", cfg.train.sample_prompt]
    use = ["finetune", folder, "--glue-dir", "DIR"] if cfg.task == "masked" else use
    print(f"run: {folder}\nnext: skipless {shlex.join(use)}")
