"""`skipless compare`: blocks of one's choice beside a reference."""

import json
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skipless.cli.app import app
from skipless.cli.options import (
    CacheOption,
    CorpusOption,
    JobsOption,
    JsonOption,
    MinutesOption,
    OutputOption,
    PluginOption,
    RunsOption,
    ScaleOption,
    SeedsOption,
    SetOption,
    set_corpora,
)

if TYPE_CHECKING:
    from skipless.experiments.comparison import Comparison
    from skipless.experiments.timings import Timings

TIMES = "token-time.json"
"""The measured times of a token, beside the page."""


@app.command()
def compare(
    blocks: Annotated[
        list[str],
        typer.Argument(metavar="BLOCK", help="The reference, then the others: presets, variants, or your own."),
    ],
    scale: ScaleOption = "laptop",
    seeds: SeedsOption = 1,
    encoder: Annotated[
        bool, typer.Option("--encoder", help="Every token sees all (BERT) instead of the past (GPT).")
    ] = False,
    rates: Annotated[Path | None, typer.Option(help="Tuned values, as `skipless sweep` writes them.")] = None,
    minutes: MinutesOption = None,
    jobs: JobsOption = 1,
    runs: RunsOption = Path("runs"),
    archive: Annotated[
        Path | None,
        typer.Option(
            help="An archive of finished runs: what is in it is not trained again, and what is finished goes into it."
        ),
    ] = None,
    output: OutputOption = Path("comparison"),
    rounds: Annotated[int, typer.Option(help="Turns of each case.", min=0)] = 7,
    corpus: CorpusOption = None,
    settings: SetOption = None,
    cache_dir: CacheOption = None,
    plugin: PluginOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train blocks beside a reference, only what is missing, and write a page with a verdict on each.

    Runs are those of `reproduce`: found by their configuration, shared, resumed. A block whose learning rate was tuned,
    by a sweep (`--rates`) or for the recipes, has that; the others have the reference's, and the page says which. It
    has the losses over steps, tokens and time, parameters, memory, the cache of decoding, the signal at initialisation
    and outliers, with intervals over the seeds. The time of a token is measured in `--rounds`; 0 leaves it out. When
    `--minutes` are over, what is done is saved and judged.

    Examples:

    - `skipless compare pre-ln sas-p sas --seeds 3 --jobs 2`

    - `skipless compare pre-ln pre-ln-dyt --plugin examples/dynamic_tanh.py`

    - `skipless compare pre-ln sas-p --corpus 'code=files:src/**/*.py'`
    """
    from skipless.cli.reproduce import Folders, report_failed, train_missing
    from skipless.config.overrides import parse_overrides
    from skipless.experiments.comparison import Comparison
    from skipless.experiments.report.draw import save_plots
    from skipless.experiments.report.page import files_folder, write_page
    from skipless.experiments.report.summary import finding_dict
    from skipless.experiments.run_index import RunIndex
    from skipless.experiments.scale import Scale
    from skipless.recipes import load_rates
    from skipless.storage.atomic_files import check_folder, write_json
    from skipless.terminal.experiments import show_findings, show_left

    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    set_corpora(corpus)
    where = Scale(scale, load_rates(rates) if rates else None, parse_overrides(settings or []))
    asked = Comparison(tuple(blocks), where, "encoder" if encoder else "decoder")
    asked.configs()  # a block that cannot be made should be reported now rather than in an hour
    _check_models(asked)
    for folder in (output, runs):
        check_folder(folder)
    folders = Folders(runs, archive, output, cache_dir, None)
    left, failed = train_missing([asked.experiment()], where, seeds, jobs, folders, deadline, as_json=as_json)
    timings = _times(asked, output, rounds)
    finding = asked.judge(RunIndex(runs, archive), seeds, timings, shlex.join(["skipless", *sys.argv[1:]]))
    output.mkdir(parents=True, exist_ok=True)
    page = output / "comparison.html"
    save_plots(finding, files_folder(page, finding))
    write_page([finding], [], page, f"{asked.reference} and {', '.join(asked.others)}", open_plots=len(finding.plots))
    content = {"finding": finding_dict(finding), "rates": asked.rates(), "failed": failed, "left": left}
    write_json(output / "comparison.json", content)
    if as_json:
        print(json.dumps({**content, "page": str(page)}, allow_nan=False))
    else:
        show_findings([finding])
        show_left(left, failed)
        print(f"page: {page}")
    report_failed(failed)


def _check_models(asked: "Comparison") -> None:
    """Make every model once without memory: what does not fit together is reported before anything is trained."""
    from skipless.analysis.costs import on_meta

    for cfg in asked.configs().values():
        on_meta(cfg.model)


def _times(asked: "Comparison", output: Path, rounds: int) -> "Timings":
    """The time of a token of each block: as measured before, if that is beside the page, or measured now."""
    from skipless.config.reading import read_json
    from skipless.experiments.comparison import keys, time_tokens
    from skipless.experiments.timings import NO_TIMINGS, Timings
    from skipless.storage.atomic_files import make_folder, write_json

    path = output / TIMES
    known: dict[str, Any] = read_json(path) if path.exists() else {}
    if known.get("keys") != keys(asked.configs()):
        if not rounds:
            return NO_TIMINGS
        make_folder(output)
        known = time_tokens(asked, rounds)
        write_json(path, known)
    return Timings.of_content(known, path)
