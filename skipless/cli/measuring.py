"""What a block costs: `skipless inspect` by arithmetic, `skipless bench` by the clock."""

import json
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from skipless.cli.frame import MAX_SEED, JsonOption, app
from skipless.errors import UserError, unknown

SIZE = re.compile(r"(\d+(?:\.\d*)?)\s*([kMGT]?)(i?)B?", re.IGNORECASE)


def _bytes(text: str) -> int:
    """`24G` → 24·10⁹, `24Gi` → 24·2³⁰."""
    found = SIZE.fullmatch(text.strip())
    if not found or (found[3] and not found[2]) or not float(found[1]):
        raise UserError(f"--device-memory takes a size such as 24G or 80Gi, got {text!r}")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** " kmgt".index(found[2].lower() or " "))


@app.command()
def inspect(
    blocks: Annotated[
        list[str] | None, typer.Argument(metavar="[BLOCK]...", help="Presets, or variants such as `pre-ln:alpha_sa=0`.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", help="A model configuration, YAML or JSON; its block is inspected too."),
    ] = None,
    n_layer: Annotated[int | None, typer.Option("--n-layer", "-L", help="Depth.  [default: 18]")] = None,
    d_model: Annotated[int | None, typer.Option("--d-model", "-d", help="Width.  [default: 768]")] = None,
    n_head: Annotated[int | None, typer.Option("--n-head", "-H", help="Heads.  [default: 12]")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", metavar="KEY=VALUE", help="Any other key of the model configuration."),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences in a training step, for its memory.", min=1)] = 8,
    context: Annotated[int, typer.Option(help="Tokens in the cache, for the memory of decoding.", min=1)] = 1024,
    encoder: Annotated[
        bool, typer.Option("--encoder", help="Every token sees all (BERT) instead of the past (GPT).")
    ] = False,
    signal: Annotated[bool, typer.Option("--signal/--no-signal", help="Measure the signal at initialisation.")] = True,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights and the tokens.", min=0, max=MAX_SEED)] = 0,
    devices: Annotated[
        int, typer.Option(help="Plan a training on so many: memory and communication under DDP and FSDP.", min=1)
    ] = 1,
    device_memory: Annotated[
        str | None, typer.Option(help="Of each device, as `24G` (10⁹ bytes) or `24Gi`: says whether the plan fits.")
    ] = None,
    micro_batch: Annotated[
        int | None, typer.Option(help="Sequences that a device has in memory at a time, for the plan.", min=1)
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the signal over the layers into this file (PNG, SVG, PDF).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what blocks cost and whether their signal is healthy: parameters, FLOPs, memory, layer by layer.

    The size is the paper's CodeParrot model unless told otherwise.

    Examples:

    - `skipless inspect pre-ln sas sas-p`

    - `skipless inspect pre-ln pre-ln:alpha_sa=0 sas-p -L 72 -d 128 -H 4 --plot signal.png`

    - `skipless inspect sas --encoder --set block.mlp=glu --set vocab_size=32768 --json`

    - `skipless inspect sas-p -L 24 -d 2048 -H 16 --no-signal --batch-size 64 --devices 8 --device-memory 24G`
    """
    from skipless import display
    from skipless import inspect as inspection
    from skipless.config import ModelConfig, load_yaml, parse_overrides

    base: dict[str, Any] = {"n_layer": 18, "d_model": 768, "n_head": 12, "vocab_size": 50_000}
    given = {"n_layer": n_layer, "d_model": d_model, "n_head": n_head}
    base |= load_yaml(config) if config else {}
    base |= {key: value for key, value in given.items() if value is not None}
    specs: list[Any] = list(blocks or []) + ([base["block"]] if "block" in base else [])
    found = []
    capacity = None if device_memory is None else _bytes(device_memory)
    if devices == 1 and (device_memory or micro_batch):
        raise UserError("--device-memory and --micro-batch belong to a plan for many devices: give --devices")
    if plot and not signal:
        raise UserError("--plot draws the signal, and --no-signal leaves it out: give one of them")
    if plot:
        display.check_plot(plot)
    for spec in specs or ["pre-ln", "sas-p"]:
        cfg = ModelConfig.model_validate({**base, "block": spec}).override(parse_overrides(settings or []))
        name = spec if isinstance(spec, str) else str(config)
        found.append(
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
        )
    if plot:
        display.plot_signal(found, plot)
    if as_json:
        print(json.dumps({"blocks": [one.as_dict(capacity) for one in found]}, allow_nan=False))
    else:
        display.show_inspections(found, batch_size=batch_size, context=context, plot=plot)
        display.show_plans(found, batch_size=batch_size, device_memory=capacity)


@app.command()
def bench(
    what: Annotated[str, typer.Argument(help="train, step, decode, caches, memory or token-time.")] = "train",
    length: Annotated[
        int, typer.Option(help="Tokens in a sequence; in the prompt; in the longest sequence.", min=1)
    ] = 128,
    tokens: Annotated[int, typer.Option(help="Tokens in a batch.", min=1)] = 1024,
    depth: Annotated[int, typer.Option(help="Layers; for memory, the most.", min=1)] = 2,
    d_model: Annotated[int, typer.Option("--d-model", "-d", help="Width.", min=1)] = 768,
    n_head: Annotated[int, typer.Option("--n-head", "-H", help="Heads.", min=1)] = 12,
    vocab_size: Annotated[int, typer.Option(help="For step, decode and caches.", min=2)] = 50_000,
    new: Annotated[int, typer.Option(help="For decode: new tokens.", min=1)] = 128,
    batch: Annotated[int, typer.Option(help="For decode and caches: sequences at once.", min=1)] = 1,
    explicit: Annotated[
        bool, typer.Option("--explicit", help="For train: also the form that builds the matrix.")
    ] = False,
    rounds: Annotated[int, typer.Option(help="Turns of each case.", min=1)] = 7,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, …")] = "auto",
    plot: Annotated[Path | None, typer.Option(help="Draw it into this file (PNG, SVG, PDF).")] = None,
    size: Annotated[
        list[str] | None, typer.Option(help="For token-time: `decoder`, `encoder, width 768`, …; several times.")
    ] = None,
    runs: Annotated[
        Path | None, typer.Option("--runs", help="For token-time: the runs beside which the figures are kept.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Speed and memory against `pre-ln` and, if transformers is installed, Hugging Face's GPT-2: cases take turns.

    `train`: forward and backward of a stack of blocks. `step`: a whole training step and its peak memory. `decode`:
    greedy decoding after a prompt. `caches`: one more token by what the cache remembers. `memory`: time and peak memory
    of `sas-p` blocks over the sequence length (128, 256, … up to `--length`) and over the depth. `token-time`: whole
    training steps of the six blocks at the sizes of the experiments and at the paper's width, by which `reproduce`
    judges what is said of run time; on a machine that does nothing else. The last line is JSON.

    Examples:

    - `skipless bench train --length 1024 --explicit`

    - `skipless bench step --depth 18 --rounds 3`

    - `skipless bench decode --depth 18 --length 512 --new 128`

    - `skipless bench caches --depth 18 --length 1024 --batch 16`

    - `skipless bench memory --length 8192 --depth 16 --plot growth.png`

    - `skipless bench token-time --size decoder --runs runs`
    """
    from skipless import bench as benches
    from skipless import display

    if what == "token-time":
        _token_time(size, rounds, runs, as_json=as_json)
        return
    shape = benches.Shape(length, tokens, depth, d_model, n_head)
    kinds = {
        "train": lambda: benches.bench_train(shape, rounds, device, explicit=explicit),
        "step": lambda: benches.bench_step(shape, rounds, device, vocab_size),
        "decode": lambda: benches.bench_decode(shape, rounds, device, new=new, batch=batch, vocab_size=vocab_size),
        "caches": lambda: benches.bench_caches(shape, rounds, device, batch=batch, vocab_size=vocab_size),
        "memory": lambda: benches.bench_memory(shape, rounds, device),
    }
    if what not in kinds:
        raise unknown("benchmark", what, [*kinds, "token-time"])
    if plot:
        display.check_plot(plot)
    found: Any = kinds[what]()
    if what == "memory":
        display.show_growth(found, quiet=as_json, plot=plot)
        print(json.dumps({"benchmark": what, **found}))
        return
    if not as_json:
        display.show_bench(what, found)
    if plot:
        display.plot_bench(what, found, plot)
    print(json.dumps({"benchmark": what, "rows": benches.as_dict(found)}))


def _token_time(size: list[str] | None, rounds: int, runs: Path | None, *, as_json: bool) -> None:
    from skipless import display
    from skipless.allocator import keep_freed_memory
    from skipless.atomic import make_folder, write_json
    from skipless.experiments.timings import FILE, SIZES, measure

    names = list(dict.fromkeys(size or SIZES))
    for name in names:
        if name not in SIZES:
            raise unknown("size", name, SIZES)
    keep_freed_memory()  # as in a training
    content = measure(names, rounds, lambda name: print(f"{name} …", file=sys.stderr))
    if runs is not None:
        make_folder(runs)
        write_json(runs / FILE, content)
    if not as_json:
        display.show_timings(content["seconds"])
    print(json.dumps({"benchmark": "token-time", **content}))
