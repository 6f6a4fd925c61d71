"""`skipless bench`: what a block costs, by the clock."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skipless.cli.app import app
from skipless.cli.options import (
    D_MODEL,
    N_HEAD,
    N_LAYER,
    RUNS,
    SEQ_LEN,
    BatchSizeOption,
    DeviceOption,
    JsonOption,
    MaxNewTokensOption,
    PlotOption,
    PluginOption,
)
from skipless.cli.renamed import renamed, tell
from skipless.errors import UserError, unknown

if TYPE_CHECKING:
    from skipless.tasks.bench import Shape

BATCH_TOKENS = 1024
"""Tokens of a batch, for `train` and `step`, where nothing else is given."""

SPELLINGS = {
    "--length": "--seq-len",
    "--depth": "--n-layer",
    "--batch": "--batch-size",
    "--new": "--max-new-tokens",
}


@app.command(cls=renamed(SPELLINGS))
def bench(
    what: Annotated[
        str, typer.Argument(metavar="WHAT", help="train, step, decode, caches, memory or token-time.")
    ] = "train",
    models: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL", help="For decode: runs and exports to measure.")
    ] = None,
    n_layer: Annotated[int, N_LAYER] = 2,
    d_model: Annotated[int, D_MODEL] = 768,
    n_head: Annotated[int, N_HEAD] = 12,
    seq_len: Annotated[int, SEQ_LEN] = 128,
    batch_size: BatchSizeOption = None,
    tokens: Annotated[int | None, typer.Option("--tokens", hidden=True, min=1)] = None,
    vocab_size: Annotated[int, typer.Option(help="For step, decode and caches.", min=2)] = 50_000,
    max_new_tokens: MaxNewTokensOption = 128,
    explicit: Annotated[
        bool, typer.Option("--explicit", help="For train: also the form that builds the matrix.")
    ] = False,
    rounds: Annotated[int, typer.Option(help="Turns of each case.", min=1)] = 7,
    device: DeviceOption = "auto",
    plot: PlotOption = None,
    size: Annotated[
        list[str] | None, typer.Option(help="For token-time: `decoder`, `encoder, width 768`, …; several times.")
    ] = None,
    runs: Annotated[Path | None, RUNS] = None,
    plugin: PluginOption = None,
    as_json: JsonOption = False,
) -> None:
    """Speed and memory against `pre-ln` and, if transformers is installed, Hugging Face's GPT-2: cases take turns.

    `train`: forward and backward of a stack of blocks. `step`: a whole training step and its peak memory; both by
    default with as many sequences as make 1,024 tokens. `decode`: greedy decoding of `--max-new-tokens` after a prompt
    of `--seq-len`, in PyTorch and in ONNX Runtime at 32, 8 and 4 bits, beside llama.cpp and CTranslate2 where they are
    installed; or of the models that are given. `caches`: one more token by what the cache remembers; both by default
    for one sequence. `memory`: time and peak memory of `sas-p` blocks over the sequence length (128, 256, … up to
    `--seq-len`) and over the depth. `token-time`: whole training steps of the six blocks at the sizes of the
    experiments and at the paper's width, by which `reproduce` judges claims about run time; on a machine that does
    nothing else, and kept beside `--runs`.
    The last line is JSON.

    Examples:

    - `skipless bench train --seq-len 1024 --explicit`

    - `skipless bench step --n-layer 18 --rounds 3`

    - `skipless bench decode --n-layer 18 --seq-len 512 --max-new-tokens 128`

    - `skipless bench decode runs/demo-pre-ln runs/demo-sas-p --seq-len 64`

    - `skipless bench caches -L 18 --seq-len 1024 --batch-size 16 --device cpu`

    - `skipless bench memory --seq-len 8192 --n-layer 16 --plot growth.png`

    - `skipless bench token-time --size decoder --runs runs`
    """
    from skipless.analysis import plotting
    from skipless.tasks import bench, bench_plots
    from skipless.terminal.bench import show_bench, show_growth

    if what == "token-time":
        _token_time(size, rounds, runs, device, as_json=as_json)
        return
    if tokens is not None:
        tell("--tokens", f"--batch-size, in sequences: {max(1, tokens // seq_len)}")
    together = tokens or (BATCH_TOKENS if batch_size is None else batch_size * seq_len)
    shape = bench.Shape(seq_len, together, n_layer, d_model, n_head)
    new, batch = max_new_tokens, batch_size or 1
    kinds = {
        "train": lambda: bench.bench_train(shape, rounds, device, explicit=explicit),
        "step": lambda: bench.bench_step(shape, rounds, device, vocab_size),
        "caches": lambda: bench.bench_caches(shape, rounds, device, batch=batch, vocab_size=vocab_size),
        "memory": lambda: bench.bench_memory(shape, rounds, device),
    }
    if what not in kinds and what != "decode":
        raise unknown("benchmark", what, ["train", "step", "decode", "caches", "memory", "token-time"])
    if models and what != "decode":
        raise UserError(f"models are measured by `bench decode`, not by `bench {what}`")
    if plot:
        plotting.check_plot(plot)
    if what == "decode":
        _decode(models or [], shape, rounds, device, new, batch, vocab_size, plot, as_json=as_json)
        return
    found: Any = kinds[what]()
    if what == "memory":
        show_growth(found, quiet=as_json, plot=plot)
        print(json.dumps({"benchmark": what, **found}))
        return
    if not as_json:
        show_bench(what, found)
    if plot:
        bench_plots.plot_bench(what, found, plot)
    print(json.dumps({"benchmark": what, "rows": bench.as_dict(found)}))


def _decode(
    models: list[str],
    shape: "Shape",
    rounds: int,
    device: str,
    new: int,
    batch: int,
    vocab_size: int,
    plot: Path | None,
    *,
    as_json: bool,
) -> None:
    from skipless.runs import find_model
    from skipless.tasks import bench_plots
    from skipless.tasks.bench import as_dict
    from skipless.tasks.bench_decoding import bench_decoding, bench_models
    from skipless.tasks.decode_cases import versions
    from skipless.terminal.bench import show_decoding

    if models:
        places = [find_model(model) for model in models]
        found = bench_models(places, shape, rounds, device, new=new, batch=batch)
    else:
        found = bench_decoding(shape, rounds, device, new=new, batch=batch, vocab_size=vocab_size)
    if not as_json:
        show_decoding(found)
    if plot:
        bench_plots.plot_bench("decode", found["whole"], plot)
    times = {"rows" if kind == "whole" else kind: as_dict(rows) for kind, rows in found.items()}
    print(json.dumps({"benchmark": "decode", **times, "versions": versions()}))


def _token_time(size: list[str] | None, rounds: int, runs: Path | None, device: str, *, as_json: bool) -> None:
    from skipless.experiments.timings import FILE, SIZES, Timings, joined, measure
    from skipless.storage.atomic_files import check_folder, make_folder, write_json
    from skipless.terminal.bench import show_timings
    from skipless.training.allocator import keep_freed_memory

    names = list(dict.fromkeys(size or SIZES))
    for name in names:
        if name not in SIZES:
            raise unknown("size", name, SIZES)
    if runs is not None:
        check_folder(runs)
    keep_freed_memory()  # as in training
    content: dict[str, Any] = {}
    for name in names:
        print(f"{name} …", file=sys.stderr)
        content = joined(content, measure(name, rounds, device))
        if runs is not None:
            make_folder(runs)
            kept = Timings.read(runs)
            write_json(runs / FILE, joined({**kept.origin, "seconds": kept.seconds}, content))
    if not as_json:
        show_timings(content["seconds"])
    print(json.dumps({"benchmark": "token-time", **content}))
