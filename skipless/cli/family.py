"""`skipless family`: a matched family of models, exported with cards."""

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from skipless.cli.app import app
from skipless.cli.options import (
    TO,
    CacheOption,
    CorpusOption,
    JobsOption,
    JsonOption,
    MinutesOption,
    OutputOption,
    PluginOption,
    RecipeOption,
    RunsOption,
    SeedsOption,
    SetOption,
    set_corpora,
)


@app.command()
def family(
    blocks: Annotated[
        list[str] | None, typer.Argument(metavar="BLOCK", help="Presets or variants.  [default: pre-ln sas-p]")
    ] = None,
    recipe: RecipeOption = "laptop",
    seeds: SeedsOption = 3,
    checkpoints: Annotated[
        int, typer.Option(help="How many of each run are exported, evenly spaced.", min=1, max=1000)
    ] = 4,
    to: Annotated[str, TO] = "hf",
    minutes: MinutesOption = None,
    jobs: JobsOption = 1,
    runs: RunsOption = Path("runs"),
    output: OutputOption = Path("family"),
    corpus: CorpusOption = None,
    settings: SetOption = None,
    cache_dir: CacheOption = None,
    plugin: PluginOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train blocks with several seeds, otherwise identical, and export every checkpoint with a card and an index.

    With the same seed all blocks read the same text in the same order. Runs are found by their configuration and
    resumed, and models that are in `--output` are not exported again, so the same command continues where it was
    stopped. When `--minutes` are over, the models of finished runs are exported.

    Examples:

    - `skipless family pre-ln sas-p --seeds 3 --jobs 2`

    - `skipless family --recipe smoke --seeds 1 --to safetensors --output tiny`
    """
    from skipless.cli.reproduce import Folders, report_failed, train_missing
    from skipless.config.overrides import parse_overrides
    from skipless.experiments.family import Family, check_output, export_family
    from skipless.experiments.run_index import RunIndex
    from skipless.experiments.scale import Scale
    from skipless.interop.export import check_format
    from skipless.storage.atomic_files import check_folder
    from skipless.terminal.experiments import show_left

    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    set_corpora(corpus)
    chosen = tuple(dict.fromkeys(blocks or ["pre-ln", "sas-p"]))
    asked = Family(chosen, seeds, recipe, checkpoints, to, parse_overrides(settings or []))
    check_format(to)
    asked.check()
    for folder in (output, runs):
        check_folder(folder)
    check_output(asked, output)
    folders = Folders(runs, None, output, cache_dir, None)
    experiments = [asked.experiment()]
    left, failed = train_missing(experiments, Scale("laptop"), seeds, jobs, folders, deadline, as_json=as_json)
    members = export_family(asked, RunIndex(runs), output)
    if as_json:
        models = [member.path for member in members]
        print(json.dumps({"family": str(output), "models": models, "failed": failed, "left": left}))
    else:
        show_left(left, failed)
        print(f"family: {output}, {len(members)} models\nindex: {output / 'README.md'}")
    report_failed(failed)
