"""`skipless sweep`: hyper-parameters over a grid or a range."""

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from skipless.cli.app import app
from skipless.cli.options import (
    BatchSizeOption,
    BlocksOption,
    CacheOption,
    CorpusOption,
    HeadsOption,
    JsonOption,
    LayersOption,
    OutputOption,
    PluginOption,
    RecipeOption,
    RunsOption,
    SeqLenOption,
    SetOption,
    WidthOption,
    changes,
    set_corpora,
)
from skipless.cli.renamed import renamed


@app.command(cls=renamed({"--folder": "--output"}))
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
    block: BlocksOption = None,
    recipe: RecipeOption = "study",
    output: OutputOption = Path("sweep"),
    trials: Annotated[int | None, typer.Option(help="Trials of each block, where there is a range.", min=1)] = None,
    prune: Annotated[
        bool, typer.Option("--prune", help="Give up a run whose loss is above the median of the others.")
    ] = False,
    runs: RunsOption = Path("runs"),
    n_layer: LayersOption = None,
    d_model: WidthOption = None,
    n_head: HeadsOption = None,
    seq_len: SeqLenOption = None,
    batch_size: BatchSizeOption = None,
    corpus: CorpusOption = None,
    settings: SetOption = None,
    cache_dir: CacheOption = None,
    plugin: PluginOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train over values of any key of the configuration, and find the best for each block.

    Started several times with the same arguments, on one machine or on several with a common folder `--output`, the
    workers share the points; what a killed one leaves behind, another takes over. Each point is an ordinary run, and
    one that is there is reused. The best values are in `best.json` of that folder, for `skipless reproduce --rates`.

    Examples:

    - `skipless sweep --over train.lr=1e-3,2e-3,4e-3 --block pre-ln --block sas-p`

    - `skipless sweep --over train.lr=log:1e-4:1e-2 --trials 12 --output lr`

    - `skipless sweep --over model.block.beta_ff=0.05,0.2 -b sas --recipe smoke`
    """
    from dataclasses import asdict

    from skipless.analysis import plotting
    from skipless.config.overrides import parse_overrides
    from skipless.experiments.sweep import Sweep, plot_sweep
    from skipless.experiments.sweep_axes import parse_axis
    from skipless.recipes import recipe as make
    from skipless.terminal.console import Console
    from skipless.terminal.experiments import show_sweep
    from skipless.terminal.train_view import TrainView

    set_corpora(corpus)
    view = TrainView(Console(stderr=as_json))
    axes = [parse_axis(text) for text in over]
    blocks = list(dict.fromkeys(block or ["sas-p"]))
    sizes = {"model.n_layer": n_layer, "model.d_model": d_model, "model.n_head": n_head}
    sizes |= {"data.seq_len": seq_len, "train.batch_size": batch_size}
    fixed = {**changes(sizes, make(recipe, blocks[0])), **parse_overrides(settings or [])}
    plotting.pyplot()
    work = Sweep(output, runs, recipe, blocks, axes, trials, fixed, prune, cache_dir, view, view.message)
    work.work()
    best, points = work.write_best(), work.results()
    plot = plot_sweep(points, axes[0].key, output / "sweep.png")
    if as_json:
        print(json.dumps({"points": [asdict(point) for point in points], "best": work.best()}))
        return
    show_sweep(points)
    print(f"best values: {best}\nplot: {plot}\nnext: skipless reproduce fig5 --rates {shlex.quote(str(best))}")
