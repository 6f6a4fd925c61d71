"""The command line. Each command checks its input, calls the library and shows what came back.

Nothing heavy is imported before a command runs, so that `skipless --help` is quick.
"""

import errno
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from skipless.errors import UserError, unknown

app = typer.Typer(
    name="skipless",
    help="Transformer blocks with the unneeded parts taken out: build them, train them, run them faster.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

CLICK_ERROR = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""The base class of what typer raises for a wrong command line; typer carries its own copy of click."""

BAD_INPUT = 2
STOPPED = 3
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
MAX_SEED = 2**62


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command: status 0 if it did what was asked, 2 and one line on standard error for bad input."""
    sys.exit(run(list(sys.argv[1:] if arguments is None else arguments)))


def run(arguments: list[str]) -> int:
    """Run a command and return its exit status."""
    try:
        status = app(arguments, standalone_mode=False)
    except UserError as error:
        _fail(str(error))
        return getattr(error, "status", BAD_INPUT)
    except BrokenPipeError:  # whoever read what is printed has seen enough
        sys.stdout = None
        return 141
    except OSError as error:  # a path that cannot be, a folder without permission, a full disk
        _fail(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")
        return STOPPED if error.errno in NO_ROOM else BAD_INPUT
    except (typer.Abort, KeyboardInterrupt):
        _fail("stopped before training began; nothing was lost")
        return 130
    except Exception as error:
        if hasattr(error, "status"):  # training that stopped by itself or was asked to
            _fail(str(error))
            return error.status  # pyrefly: ignore
        if isinstance(error, CLICK_ERROR):
            return _fail(_usage_message(error))
        if type(error).__name__ == "ValidationError" and type(error).__module__.startswith("pydantic"):
            from skipless.config import explain

            return _fail(explain(error))  # pyrefly: ignore
        raise
    return status if isinstance(status, int) else 0


def _usage_message(error: Any) -> str:
    """One line for a wrong command line, with the command whose help to read."""
    if type(error).__name__ == "NoArgsIsHelpError":  # the help was asked for by giving nothing
        return error.format_message()
    command = getattr(getattr(error, "ctx", None), "command_path", "skipless")
    return f"{error.format_message().rstrip('.')} (see `{command} --help`)"


def _fail(message: str) -> int:
    if message:  # it is empty where typer has shown the help instead
        print(f"skipless: {' '.join(message.split())}", file=sys.stderr)
    return BAD_INPUT


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    if version:
        from skipless import __version__

        print(f"skipless {__version__}")
        raise typer.Exit(0)


BlockOption = Annotated[
    str | None,
    typer.Option("--block", "-b", help="A preset, or a variant such as `sas:beta_ff=0.2`.  [default: sas-p]"),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="Any key by its dotted name, as `train.clip=0.5`."),
]
ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", help="A YAML or JSON file laid over the recipe.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or its name below runs/.")]
CacheOption = Annotated[
    Path | None, typer.Option("--cache-dir", help="Where prepared data lies.  [default: ~/.cache/skipless/data]")
]


def _resolve(
    recipe: str, config: Path | None, block: str | None, given: dict[str, Any], settings: list[str] | None
) -> Any:
    """Recipe, then file, then options, then `--set`: the later ones win."""
    from skipless.config import load_yaml, parse_overrides
    from skipless.experiments.recipes import recipe as make

    cfg = make(recipe, "sas-p" if block is None else block)
    if config:
        cfg = cfg.merge(load_yaml(config))
    if config and block is not None:
        cfg = cfg.override({"model.block": block})
    changes: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if "train.tokens" in changes or "train.minutes" in changes:
        changes = {"train.steps": None, **changes}
    if "data.seq_len" in changes:
        changes["model.max_seq_len"] = max(changes["data.seq_len"], cfg.model.max_seq_len)
    return cfg.override({**changes, **parse_overrides(settings or [])})


@app.command()
def train(
    recipe: Annotated[
        str, typer.Option("--recipe", "-r", help="laptop, demo, smoke, codeparrot, codeparrot-long.")
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
    }
    cfg = _resolve(recipe, config, block, given, settings)
    trackers = [] if track == "none" else [one.strip() for one in track.split(",")]
    name = f"{(block or 'sas-p').split(':')[0]}-{cfg.digest}" if name is None else name
    if not name or Path(name).name != name or name.startswith("."):
        raise UserError(f"a run's name is the name of a folder, got {name!r}; --runs says where it lies")

    from rich.console import Console

    from skipless import display
    from skipless.experiments.report import as_dict, summarise
    from skipless.progress import TrainView
    from skipless.train import train as run_training
    from skipless.trials import dry_run as rehearse

    view = TrainView(Console(stderr=as_json))
    if dry_run:
        outcome = rehearse(cfg, observer=view, cache_dir=cache_dir)
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
    if as_json:
        print(json.dumps({"run": str(run.folder), **as_dict(summarise(run))}))
    else:
        display.show_summaries([summarise(run)])
        print(f"run: {run.folder}\nnext: skipless generate {run.folder} --prompt '{cfg.train.sample_prompt}'")


@app.command()
def evaluate(
    run: RunArgument,
    source: Annotated[
        str | None, typer.Option(help="Evaluate on this text instead of the run's held-out part.")
    ] = None,
    rows: Annotated[int | None, typer.Option(help="Sequences, spread evenly; all if not given.", min=1)] = None,
    which: Annotated[str, typer.Option(help="Checkpoint: last or best.")] = "last",
    cache_dir: CacheOption = None,
    as_json: JsonOption = False,
) -> None:
    """Loss, perplexity and bits per byte of a trained model on held-out text or on any source.

    Examples:

    - `skipless evaluate runs/baseline`

    - `skipless evaluate runs/baseline --source 'files:src/**/*.py' --json`
    """
    if which not in ("last", "best"):
        raise UserError(f"--which takes last or best, got {which!r}")
    from dataclasses import asdict

    from skipless import display
    from skipless.data import prepare
    from skipless.evaluate import evaluate as measure
    from skipless.runs import find_run, load

    found = find_run(run)
    cfg = found.config()
    data = cfg.data
    if source:
        data = data.replace(source=source, valid_source=None, valid_fraction=0.0, tokenizer=str(found.tokenizer_file))
    model = load(found.folder, which=which)
    corpus = prepare(data, cache_dir=cache_dir)
    result = measure(model, cfg, corpus, tokens=corpus.train if source else corpus.valid, max_rows=rows)
    if as_json:
        print(json.dumps({"run": str(found.folder), "source": data.source, **asdict(result)}))
    else:
        display.show_evaluation(found.name, source or "held-out part of " + data.source, result)


def _read_text(path: Path | None) -> str:
    """A prompt from a file, or from a pipe."""
    try:
        if path is not None:
            return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {str(path)!r}: {error}") from None
    if sys.stdin.isatty():
        raise UserError("there is no prompt: give --prompt, --prompt-file, or a text on standard input")
    return sys.stdin.read()


def _show(text: str, *, quiet: bool) -> None:
    if not quiet:
        print(text, end="", flush=True)


@app.command()
def generate(
    run: RunArgument,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="Text to go on from; else standard input.")
    ] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from a file.")] = None,
    tokens: Annotated[int, typer.Option(help="New tokens.", min=1)] = 100,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k likeliest.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from the fewest that have this probability.")] = None,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: less of what was there before.")] = 1.0,
    samples: Annotated[int, typer.Option(help="How many texts.", min=1)] = 1,
    seed: Annotated[int, typer.Option(help="Of the draws.", min=0, max=MAX_SEED)] = 0,
    cache: Annotated[str, typer.Option(help="What is remembered: auto, kv, kx, or x (half the memory).")] = "auto",
    as_json: JsonOption = False,
) -> None:
    """Write text with a trained causal model, token by token as it comes.

    Examples:

    - `skipless generate runs/baseline --prompt 'def '`

    - `echo 'import os' | skipless generate runs/baseline --samples 3 --top-p 0.9 --json`
    """
    import time
    from dataclasses import replace

    from skipless.generate import Sampling, stream_text
    from skipless.nn.model import CausalLM
    from skipless.runs import load

    how = Sampling(temperature, top_k, top_p, repetition_penalty)
    text = prompt if prompt is not None else _read_text(prompt_file)
    model = load(run)
    if not isinstance(model, CausalLM):
        raise UserError(f"run {run!r} holds a masked model, which cannot write text")
    model = model.fold()
    texts, count, start = [], 0, time.perf_counter()
    for number in range(samples):
        written = [text]
        _show(text, quiet=as_json)
        for piece in stream_text(model, text, tokens, replace(how, seed=seed + number), mode=cache):
            written.append(piece)
            count += 1
            _show(piece, quiet=as_json)
        texts.append("".join(written))
        _show("\n" if number == samples - 1 else "\n---\n", quiet=as_json)
    speed = count / (time.perf_counter() - start)
    if as_json:
        print(json.dumps({"run": run, "prompt": text, "texts": texts, "tokens_per_second": round(speed, 1)}))
    else:
        print(f"{speed:,.0f} tokens/s", file=sys.stderr)


@app.command()
def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Runs to set side by side.")],
    plot: Annotated[Path | None, typer.Option(help="Draw the losses into this file (PNG, SVG, PDF).")] = None,
    samples: Annotated[bool, typer.Option("--samples", help="Show the last sample of each run.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Set runs side by side: parameters, losses, speed; a plot of the losses; samples.

    Examples:

    - `skipless report runs/baseline runs/simpler --plot losses.png --samples`
    """
    from skipless import display
    from skipless.experiments.report import as_dict, plot_losses, summarise
    from skipless.runs import find_run

    found = [find_run(run) for run in runs]
    if plot:
        display.check_plot(plot)
        plot_losses(found, plot)
    if as_json:
        print(json.dumps({"runs": [as_dict(summarise(run)) for run in found]}))
        return
    display.show_summaries([summarise(run) for run in found])
    if samples:
        display.show_samples(found)
    if plot:
        print(f"plot: {plot}")


data_app = typer.Typer(
    help="Prepare text for training and look at it.", no_args_is_help=True, rich_markup_mode="markdown"
)
app.add_typer(data_app, name="data")


@data_app.command("build")
def data_build(
    recipe: Annotated[str, typer.Option("--recipe", "-r", help="Whose data.")] = "laptop",
    config: ConfigOption = None,
    source: Annotated[
        str | None, typer.Option(help="python-stdlib, files:GLOB, jsonl:PATH#field, hf:DATASET#field.")
    ] = None,
    settings: SetOption = None,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Build again what is there already.")] = False,
    cache_dir: CacheOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read, drop duplicates, split, train a tokeniser, tokenise, and keep the result in the cache.

    Examples:

    - `skipless data build`

    - `skipless data build --source 'jsonl:books.jsonl.zst#text' --set data.vocab_size=8192`
    """
    from rich.console import Console

    from skipless import display
    from skipless.data import prepare
    from skipless.progress import TrainView

    cfg = _resolve(recipe, config, None, {"data.source": source}, settings)
    view = TrainView(Console(stderr=as_json))
    corpus = prepare(cfg.data, cache_dir=cache_dir, progress=view.data, rebuild=rebuild)
    print(json.dumps({"path": str(corpus.path), **corpus.info})) if as_json else display.show_corpus(corpus)


@data_app.command("show")
def data_show(
    recipe: Annotated[str, typer.Option("--recipe", "-r", help="Whose data.")] = "laptop",
    config: ConfigOption = None,
    source: Annotated[
        str | None, typer.Option(help="python-stdlib, files:GLOB, jsonl:PATH#field, hf:DATASET#field.")
    ] = None,
    settings: SetOption = None,
    rows: Annotated[int, typer.Option(help="Training sequences to show.", min=0)] = 2,
    cache_dir: CacheOption = None,
) -> None:
    """Show what a prepared corpus holds: counts, and a few sequences as the model sees them.

    Examples:

    - `skipless data show --rows 3`
    """
    from skipless import display
    from skipless.data import prepare

    cfg = _resolve(recipe, config, None, {"data.source": source}, settings)
    corpus = prepare(cfg.data, cache_dir=cache_dir)
    display.show_corpus(corpus, rows)


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
    if plot and not signal:
        raise UserError("--plot draws the signal, and --no-signal leaves it out: give one of them")
    if plot:
        display.check_plot(plot)
    for spec in specs or ["pre-ln", "sas-p"]:
        cfg = ModelConfig.model_validate({**base, "block": spec}).override(parse_overrides(settings or []))
        name = spec if isinstance(spec, str) else str(config)
        found.append(
            inspection.inspect(
                cfg, name, causal=not encoder, batch_size=batch_size, context=context, signal=signal, seed=seed
            )
        )
    if plot:
        display.plot_signal(found, plot)
    if as_json:
        print(json.dumps({"blocks": [one.as_dict() for one in found]}, allow_nan=False))
    else:
        display.show_inspections(found, batch_size=batch_size, context=context, plot=plot)


@app.command()
def bench(
    what: Annotated[str, typer.Argument(help="blocks, step, decode or growth.")] = "blocks",
    length: Annotated[int, typer.Option(help="Tokens in a sequence; for decode, in the prompt.", min=1)] = 128,
    tokens: Annotated[int, typer.Option(help="Tokens in a batch.", min=1)] = 1024,
    depth: Annotated[int, typer.Option(help="Layers.", min=1)] = 2,
    d_model: Annotated[int, typer.Option("--d-model", "-d", help="Width.", min=1)] = 768,
    n_head: Annotated[int, typer.Option("--n-head", "-H", help="Heads.", min=1)] = 12,
    vocab_size: Annotated[int, typer.Option(help="For step and decode.", min=2)] = 50_000,
    new: Annotated[int, typer.Option(help="For decode: new tokens.", min=1)] = 128,
    batch: Annotated[int, typer.Option(help="For decode: sequences at once.", min=1)] = 1,
    explicit: Annotated[
        bool, typer.Option("--explicit", help="For blocks: also the form that builds the matrix.")
    ] = False,
    rounds: Annotated[int, typer.Option(help="Turns of each case.", min=1)] = 7,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, …")] = "auto",
    as_json: JsonOption = False,
) -> None:
    """Speed against `pre-ln` and, if transformers is installed, Hugging Face's GPT-2: cases take turns in one process.

    `blocks`: forward and backward of a stack of blocks. `step`: a whole training step. `decode`: greedy decoding.
    `growth`: time and memory of one `sas-p` layer over the sequence length, up to `--length`.

    Examples:

    - `skipless bench blocks --length 1024 --explicit`

    - `skipless bench step --depth 18`

    - `skipless bench decode --depth 18 --length 512 --new 128`

    - `skipless bench growth --length 8192`
    """
    from skipless import bench as benches
    from skipless import display

    shape = benches.Shape(length, tokens, depth, d_model, n_head)
    if what == "growth":
        lengths = tuple(128 * 2**i for i in range(20) if 128 * 2**i <= length) or (length,)
        found = benches.bench_growth("sas-p", lengths, rounds, device, d_model, n_head)
        if not as_json:
            display.show_growth(found)
        print(json.dumps(found))
        return
    kinds = {
        "blocks": lambda: benches.bench_blocks(shape, rounds, device, explicit=explicit),
        "step": lambda: benches.bench_step(shape, rounds, device, vocab_size),
        "decode": lambda: benches.bench_decode(shape, rounds, device, new=new, batch=batch, vocab_size=vocab_size),
    }
    if what not in kinds:
        raise unknown("benchmark", what, [*kinds, "growth"])
    rows = kinds[what]()
    if not as_json:
        display.show_bench(what, rows)
    print(json.dumps({"benchmark": what, "rows": benches.as_dict(rows)}))
