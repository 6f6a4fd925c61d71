"""`skipless data build` and `skipless data show`: text as models read it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skipless.cli.app import app
from skipless.cli.help import App
from skipless.cli.options import (
    CacheOption,
    ConfigOption,
    CorpusOption,
    JsonOption,
    NumSamplesOption,
    RecipeOption,
    SeqLenOption,
    SetOption,
    SourcesOption,
    resolve,
    set_corpora,
    sources,
)
from skipless.cli.renamed import renamed

if TYPE_CHECKING:
    from skipless.config.run import DataConfig

data_app = App(help="Prepare text for training and look at it.", no_args_is_help=True, rich_markup_mode="markdown")
app.add_typer(data_app, name="data")


@data_app.command("build")
def data_build(
    recipe: RecipeOption = "laptop",
    config: ConfigOption = None,
    source: SourcesOption = None,
    seq_len: SeqLenOption = None,
    corpus: CorpusOption = None,
    settings: SetOption = None,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Build again what is there already.")] = False,
    cache_dir: CacheOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read, drop duplicates, split, train a tokeniser, tokenise, and keep the result in the cache.

    Examples:

    - `skipless data build`

    - `skipless data build --source 'jsonl:books.jsonl.zst#text' --seq-len 256`
    """
    from skipless.data import prepare
    from skipless.terminal.console import Console
    from skipless.terminal.runs import show_corpus
    from skipless.terminal.train_view import TrainView

    cfg = _data(recipe, config, source, seq_len, corpus, settings)
    view = TrainView(Console(stderr=as_json))
    built = prepare(cfg, cache_dir=cache_dir, progress=view.data, rebuild=rebuild)
    print(json.dumps({"path": str(built.path), **built.info})) if as_json else show_corpus(built)


@data_app.command("show", cls=renamed({"--rows": "--num-samples"}))
def data_show(
    recipe: RecipeOption = "laptop",
    config: ConfigOption = None,
    source: SourcesOption = None,
    seq_len: SeqLenOption = None,
    corpus: CorpusOption = None,
    settings: SetOption = None,
    num_samples: NumSamplesOption = 2,
    cache_dir: CacheOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a prepared corpus holds: counts, and a few sequences as the model sees them.

    Examples:

    - `skipless data show --num-samples 3`
    """
    from skipless.data import prepare
    from skipless.terminal.runs import corpus_samples, show_corpus

    built = prepare(_data(recipe, config, source, seq_len, corpus, settings), cache_dir=cache_dir)
    if as_json:
        print(json.dumps({"path": str(built.path), **built.info, "samples": corpus_samples(built, num_samples)}))
    else:
        show_corpus(built, num_samples)


def _data(
    recipe: str,
    config: Path | None,
    source: list[str] | None,
    seq_len: int | None,
    corpus: list[str] | None,
    settings: list[str] | None,
) -> "DataConfig":
    set_corpora(corpus)
    return resolve(recipe, config, None, {"data.source": sources(source), "data.seq_len": seq_len}, settings).data
