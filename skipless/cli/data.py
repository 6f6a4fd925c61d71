"""`skipless data build` and `skipless data show`."""

import json
from typing import Annotated

import typer

from skipless.cli.frame import CacheOption, ConfigOption, CorpusOption, JsonOption, SetOption, app, resolve, set_corpora

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
    corpus: CorpusOption = None,
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

    set_corpora(corpus)
    cfg = resolve(recipe, config, None, {"data.source": source}, settings)
    view = TrainView(Console(stderr=as_json))
    built = prepare(cfg.data, cache_dir=cache_dir, progress=view.data, rebuild=rebuild)
    print(json.dumps({"path": str(built.path), **built.info})) if as_json else display.show_corpus(built)


@data_app.command("show")
def data_show(
    recipe: Annotated[str, typer.Option("--recipe", "-r", help="Whose data.")] = "laptop",
    config: ConfigOption = None,
    source: Annotated[
        str | None, typer.Option(help="python-stdlib, files:GLOB, jsonl:PATH#field, hf:DATASET#field.")
    ] = None,
    corpus: CorpusOption = None,
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

    set_corpora(corpus)
    cfg = resolve(recipe, config, None, {"data.source": source}, settings)
    display.show_corpus(prepare(cfg.data, cache_dir=cache_dir), rows)
