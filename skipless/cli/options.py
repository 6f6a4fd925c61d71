"""Options that mean the same in every command: each is declared once, here."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skipless.errors import UserError

if TYPE_CHECKING:
    from skipless.config.run import RunConfig

MAX_SEED = 2**62

# ------------------------------------------------------------------------------------ what is trained

RecipeOption = Annotated[
    str,
    typer.Option(
        "--recipe",
        "-r",
        help="laptop, demo, smoke; the paper's codeparrot, crammed-bert, languini, and at laptop scale study, "
        "crammed-bert-laptop, study-books; a name that is not known shows all.",
    ),
]

BLOCK = typer.Option("--block", "-b", help="A preset, or a variant such as `sas:beta_ff=0.2`.  [default: sas-p]")

BlockOption = Annotated[str | None, BLOCK]

BlocksOption = Annotated[list[str] | None, BLOCK]
"""Several times for several."""

ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", help="A configuration file, YAML or JSON.")]

SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="Any key of the configuration by its dotted name."),
]

N_LAYER = typer.Option("--n-layer", "-L", help="Layers.")

LayersOption = Annotated[int | None, N_LAYER]

D_MODEL = typer.Option("--d-model", "-d", help="Width.")

WidthOption = Annotated[int | None, D_MODEL]

N_HEAD = typer.Option("--n-head", "-H", help="Heads of attention.")

HeadsOption = Annotated[int | None, N_HEAD]

SEQ_LEN = typer.Option("--seq-len", help="Tokens in a sequence.", min=1)

SeqLenOption = Annotated[int | None, SEQ_LEN]

BATCH_SIZE = typer.Option(
    "--batch-size", help="Sequences that are processed together: in training, those of a step.", min=1
)

BatchSizeOption = Annotated[int | None, BATCH_SIZE]

MinutesOption = Annotated[float | None, typer.Option("--minutes", help="Budget in minutes.", min=0)]


def _check_seed(seed: int | None) -> int | None:
    """The range is checked here, because in `--help` it would take half of the page's width."""
    if seed is not None and not 0 <= seed <= MAX_SEED:
        raise typer.BadParameter(f"{seed} is not between 0 and 2^62")
    return seed


SEED = typer.Option("--seed", help="Random seed.", callback=_check_seed)

SeedOption = Annotated[int, SEED]

SEEDS = typer.Option("--seeds", help="How many seeds: 0, 1, …", min=1)

SeedsOption = Annotated[int, SEEDS]

JobsOption = Annotated[int, typer.Option("--jobs", "-j", help="Runs at a time; they share the cores.", min=1)]

NameOption = Annotated[
    str | None, typer.Option("--name", "-n", help="Name of what is trained: its folder below --runs.")
]

DEVICE = typer.Option("--device", help="auto (an accelerator, if there is one), cpu, cuda, cuda:1, …")

DeviceOption = Annotated[str, DEVICE]


def _load_plugins(given: list[str] | None) -> list[str] | None:
    """Before any other option is read: these may name what plugins bring."""
    if given:
        from skipless.config.plugins import load_plugin

        for plugin in given:
            load_plugin(plugin)
    return given


PluginOption = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin",
        metavar="MODULE|FILE",
        help="Parts of your own: a module or a Python file that adds them.",
        callback=_load_plugins,
        is_eager=True,
    ),
]

# ------------------------------------------------------------------------------------ runs and text

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or its name below --runs.")]

ModelArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's folder, or its name below --runs; or an exported model.")
]

RUNS = typer.Option("--runs", help="Folder of the runs.")

RunsOption = Annotated[Path, RUNS]

CheckpointOption = Annotated[
    str, typer.Option("--checkpoint", metavar="last|best|N", help="Checkpoint: the last, the best, or step N.")
]

SourcesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--source",
        help="Text: python-stdlib, files:GLOB, jsonl:PATH#field, hf:DATASET#field, corpus:NAME; several with =WEIGHT "
        "behind each are mixed: 'files:a/*.py=0.7', 'jsonl:b#text=0.3'.",
    ),
]


def sources(given: list[str] | None) -> str | list[str] | None:
    """One source as it is, several as a list."""
    return given[0] if given and len(given) == 1 else given or None


CorpusOption = Annotated[
    list[str] | None,
    typer.Option(
        "--corpus",
        metavar="NAME=SOURCE",
        help="Where to find a corpus that recipes name, as `code=files:src/**/*.py`.",
    ),
]

CACHE_MODE = typer.Option(
    "--cache",
    help="What decoding remembers: auto, kv, kx or x (half the memory); for `export --to onnx` also none, a graph of "
    "whole sequences.  [default: auto]",
    show_default=False,
)

CacheOption = Annotated[
    Path | None, typer.Option("--cache-dir", help="Where prepared data is kept.  [default: ~/.cache/skipless/data]")
]

GLUE_DIR = typer.Option(
    "--glue-dir", help="GLUE: the folder of the official files (CoLA/train.tsv, …), or hf:nyu-mll/glue."
)

TextOption = Annotated[str | None, typer.Option("--text", help="Column of the text.  [default: text]")]

TextPairOption = Annotated[
    str | None, typer.Option("--text-pair", help="Column of a second text, where the question is about two.")
]

ScaleOption = Annotated[str, typer.Option("--scale", help="Size of the experiments: laptop or paper.")]

# ------------------------------------------------------------------------------------ what comes out

MaxNewTokensOption = Annotated[int, typer.Option("--max-new-tokens", help="Write at most this many tokens.", min=1)]

NumSamplesOption = Annotated[
    int, typer.Option("--num-samples", help="How many samples: texts to write, or sequences to show.", min=0)
]

TO = typer.Option("--to", help="hf, onnx or safetensors.")

PlotOption = Annotated[Path | None, typer.Option("--plot", help="Draw it into this file (PNG, SVG, PDF).")]

OUTPUT = typer.Option("--output", help="Where to write: a folder, or for `predict` a file.")

OutputOption = Annotated[Path, OUTPUT]

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def set_corpora(given: list[str] | None) -> None:
    """Say where corpora are, for this process and those that it starts."""
    from skipless.data.sources import corpus_variable, open_source

    for item in given or []:
        name, equals, source = item.partition("=")
        if not equals or not source:
            raise UserError(f"--corpus takes NAME=SOURCE, as code='files:src/**/*.py', got {item!r}")
        variable = corpus_variable(name)
        open_source(source).check()
        os.environ[variable] = source


def resolve(
    recipe: str, config: Path | None, block: str | None, given: Mapping[str, Any], settings: list[str] | None
) -> "RunConfig":
    """Recipe, then file, then options, then `--set`: the later ones win."""
    from skipless.config.overrides import load_yaml, parse_overrides
    from skipless.recipes import recipe as make

    cfg = make(recipe, "sas-p" if block is None else block)
    if given.get("data.source") is not None:  # the recipe's held-out text belongs to the recipe's source
        cfg = cfg.override({"data.valid_source": None})
    if config:
        cfg = cfg.merge(load_yaml(config))
    if config and block is not None:
        cfg = cfg.override({"model.block": block})
    return cfg.override({**changes(given, cfg), **parse_overrides(settings or [])})


def changes(given: Mapping[str, Any], cfg: "RunConfig") -> dict[str, Any]:
    """What options that were given change in a configuration, with what follows from them."""
    found: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    budgets = ("train.steps", "train.tokens", "train.minutes")
    if any(budget in found for budget in budgets):  # it takes the place of the recipe's, whichever that is
        found = {**dict.fromkeys(budgets), **found}
    if "data.seq_len" in found:
        found["model.max_seq_len"] = max(found["data.seq_len"], cfg.model.max_seq_len)
    return found
