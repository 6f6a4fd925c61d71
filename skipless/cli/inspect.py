"""`skipless inspect`: what a block costs, by arithmetic."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skipless.cli.app import app
from skipless.cli.options import (
    BATCH_SIZE,
    CheckpointOption,
    ConfigOption,
    HeadsOption,
    JsonOption,
    LayersOption,
    PlotOption,
    PluginOption,
    RunsOption,
    SeedOption,
    SeqLenOption,
    SetOption,
    WidthOption,
)
from skipless.errors import UserError

if TYPE_CHECKING:
    from skipless.config.model import ModelConfig

SIZE = re.compile(r"(\d{1,18}(?:\.\d*)?)\s*([kMGT]?)(i?)B?", re.IGNORECASE | re.ASCII)


def _bytes(text: str) -> int:
    """`24G` → 24·10⁹, `24Gi` → 24·2³⁰."""
    found = SIZE.fullmatch(text.strip())
    if not found or (found[3] and not found[2]) or not float(found[1]):
        raise UserError(f"--device-memory takes a size such as 24G or 80Gi, got {text!r}")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** " kmgt".index(found[2].lower() or " "))


@app.command()
def inspect(
    blocks: Annotated[
        list[str] | None,
        typer.Argument(metavar="BLOCK|RUN", help="Presets, variants such as `pre-ln:alpha_sa=0`, or runs."),
    ] = None,
    config: ConfigOption = None,
    n_layer: LayersOption = None,
    d_model: WidthOption = None,
    n_head: HeadsOption = None,
    seq_len: SeqLenOption = None,
    batch_size: Annotated[int, BATCH_SIZE] = 8,
    settings: SetOption = None,
    context: Annotated[int, typer.Option(help="Tokens in the cache, for the memory of decoding.", min=1)] = 1024,
    encoder: Annotated[
        bool, typer.Option("--encoder", help="Every token sees all (BERT) instead of the past (GPT).")
    ] = False,
    signal: Annotated[bool, typer.Option("--signal/--no-signal", help="Measure the signal at initialisation.")] = True,
    seed: SeedOption = 0,
    devices: Annotated[
        int,
        typer.Option(help="Plan training on this many devices: memory and communication under DDP and FSDP.", min=1),
    ] = 1,
    device_memory: Annotated[
        str | None, typer.Option(help="Of each device, as `24G` (10⁹ bytes) or `24Gi`: says whether the plan fits.")
    ] = None,
    micro_batch: Annotated[
        int | None, typer.Option(help="Sequences that a device has in memory at a time, for the plan.", min=1)
    ] = None,
    attention: Annotated[
        str | None, typer.Option("--attention", metavar="TEXT", help="Of a run: its mixing matrices for this text.")
    ] = None,
    checkpoint: CheckpointOption = "last",
    runs: RunsOption = Path("runs"),
    plot: PlotOption = None,
    plugin: PluginOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what blocks cost and whether their signal is healthy: parameters, FLOPs, memory, layer by layer.

    The size is that of the paper's CodeParrot model (18 layers, width 768, 12 heads) unless told otherwise. A file of
    `--config` is that of a model, and its block is inspected too; `--plot` draws the signal over the layers. A run, by
    its path or by a name that is no block's, is inspected as it was trained. With `--attention` it is opened instead:
    the mixing matrix of each layer and head for a text, its terms αI, βA and −γC apart, the gains over depth, and the
    outliers over training; `--plot` draws them, `--json` has every number.

    Examples:

    - `skipless inspect pre-ln sas sas-p`

    - `skipless inspect pre-ln:alpha_sa=0 sas-p -L 72 -d 128 -H 4 --plot out.png`

    - `skipless inspect sas --encoder --seq-len 128 --set block.mlp=glu --json`

    - `skipless inspect sas-p --no-signal --devices 8 --device-memory 24G`

    - `skipless inspect runs/demo-sas-p --attention 'def f(x):' --plot inside.png`
    """
    if attention is not None:
        _look_inside(blocks or [], attention, checkpoint, runs, plot, as_json=as_json)
        return
    capacity = None if device_memory is None else _bytes(device_memory)
    if devices == 1 and (device_memory or micro_batch):
        raise UserError("--device-memory and --micro-batch belong to a plan for many devices: give --devices")
    if plot and not signal:
        raise UserError("--plot draws the signal, and --no-signal leaves it out: give one of them")

    from skipless.analysis import inspection, plotting
    from skipless.terminal.inspection import show_inspections, show_plans

    if plot:
        plotting.check_plot(plot)
    sizes = {"n_layer": n_layer, "d_model": d_model, "n_head": n_head, "max_seq_len": seq_len}
    found = [
        inspection.inspect(
            cfg,
            name,
            causal=not encoder,
            batch_size=batch_size,
            context=context,
            signal=signal,
            seed=seed,
            devices=devices,
            micro_batch=micro_batch,
        )
        for name, cfg in _models(blocks or [], config, sizes, settings or [], runs)
    ]
    if plot:
        plotting.plot_signal(found, plot)
    if as_json:
        print(json.dumps({"blocks": [one.as_dict(capacity) for one in found]}, allow_nan=False))
    else:
        show_inspections(found, batch_size=batch_size, context=context, plot=plot)
        show_plans(found, batch_size=batch_size, device_memory=capacity)


def _is_run(name: str, runs: Path) -> bool:
    """Whether a name is no block's, and a run's."""
    from skipless.config.block import BLOCKS

    known = name.partition(":")[0] in BLOCKS
    return not known and any((folder / "config.json").exists() for folder in (Path(name), runs / name))


def _look_inside(names: list[str], text: str, checkpoint: str, runs: Path, plot: Path | None, *, as_json: bool) -> None:
    """Open a run, and show what its attention does with a text."""
    from skipless.analysis import plotting
    from skipless.analysis.attention_maps import attention_maps
    from skipless.analysis.attention_plot import plot_maps
    from skipless.experiments.report.inside import outliers_of
    from skipless.runs import find_model, find_run, is_export, load
    from skipless.terminal.inspection import show_maps

    if len(names) != 1:
        raise UserError("--attention looks into one trained model: give the path or the name of a run")
    if plot:
        plotting.check_plot(plot)
    place = find_model(names[0], runs)
    model = load(place, checkpoint=checkpoint)
    maps = attention_maps(model, text)
    outliers = {} if is_export(place) or (place / "manifest.json").exists() else outliers_of(find_run(place))
    if plot:
        plot_maps(maps, outliers, plot)
    if as_json:
        found = {"run": str(place), **maps.as_dict(), "kurtosis": {str(step): one for step, one in outliers.items()}}
        print(json.dumps(found, allow_nan=False))
        return
    show_maps(maps)
    if plot:
        print(f"plot: {plot}")


def _models(
    blocks: list[str], config: Path | None, sizes: dict[str, int | None], settings: list[str], runs: Path
) -> Iterator[tuple[str, "ModelConfig"]]:
    """The model of each block or run that was named, and of the file's, with its name."""
    from skipless.config.model import ModelConfig
    from skipless.config.overrides import load_yaml, parse_overrides
    from skipless.runs import find_run

    base: dict[str, Any] = {"n_layer": 18, "d_model": 768, "n_head": 12, "vocab_size": 50_000}
    base |= load_yaml(config) if config else {}
    base |= {key: value for key, value in sizes.items() if value is not None}
    specs: list[Any] = [*blocks, *([base["block"]] if "block" in base else [])]
    for spec in specs or ["pre-ln", "sas-p"]:
        if isinstance(spec, str) and _is_run(spec, runs):
            changed = {key: value for key, value in sizes.items() if value is not None}
            yield spec, find_run(spec, runs).config().model.override({**changed, **parse_overrides(settings)})
            continue
        cfg = ModelConfig.model_validate({**base, "block": spec}).override(parse_overrides(settings))
        yield spec if isinstance(spec, str) else str(config), cfg
