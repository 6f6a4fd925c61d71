"""`skipless report`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skipless.cli.app import app
from skipless.cli.options import JsonOption, PlotOption, PluginOption, RunsOption, ScaleOption
from skipless.errors import UserError

if TYPE_CHECKING:
    from skipless.experiments.outcome import Finding
    from skipless.runs import Run


def _find_all(names: list[str], scale: str, runs: Path) -> tuple[list["Finding"], list["Run"]]:
    """What was asked for: an experiment's id, or a run by name or path."""
    from skipless.experiments.catalogue import EXPERIMENTS
    from skipless.experiments.experiment import find
    from skipless.runs import find_run

    findings = [find(name, scale, runs) for name in names if name in EXPERIMENTS]
    return findings, [find_run(name, runs) for name in names if name not in EXPERIMENTS]


@app.command()
def report(
    names: Annotated[
        list[str], typer.Argument(metavar="RUN|EXPERIMENT", help="Runs to set side by side, or experiments.")
    ],
    page: Annotated[Path | None, typer.Option(help="Write all of it into this HTML file, which works offline.")] = None,
    files: Annotated[
        bool, typer.Option("--files", help="With --page: also each plot as PNG, SVG and CSV, in folders beside it.")
    ] = False,
    plot: PlotOption = None,
    samples: Annotated[bool, typer.Option("--samples", help="Show the last sample of each run.")] = False,
    attention: Annotated[
        str | None,
        typer.Option("--attention", metavar="TEXT", help="Of a run: its mixing matrices for this text."),
    ] = None,
    scale: ScaleOption = "laptop",
    runs: RunsOption = Path("runs"),
    plugin: PluginOption = None,
    as_json: JsonOption = False,
) -> None:
    """Set runs side by side, or show what experiments found: tables, plots, samples, and all of it as a page.

    `--plot` draws the losses.

    Examples, the first two with the runs of `skipless demo`:

    - `skipless report demo-pre-ln demo-sas-p --plot losses.png --samples`

    - `skipless report demo-sas-p --page page.html --attention 'def f(x):'`

    - `skipless report fig2 fig5 --page report.html --files`
    """
    from skipless.analysis import plotting
    from skipless.experiments.report.draw import save_plots
    from skipless.experiments.report.inside import pictures
    from skipless.experiments.report.page import check_page, files_folder, with_others, write_page
    from skipless.experiments.report.run_plots import draw_losses
    from skipless.experiments.report.summary import as_dict, different_data, finding_dict, summarise
    from skipless.terminal.experiments import show_findings, show_warnings
    from skipless.terminal.runs import show_samples, show_summaries

    if plot:
        plotting.check_plot(plot)
    if page:
        check_page(page)
    elif files:
        raise UserError("--files lays the plots beside a page: give --page as well")
    if attention is not None and not page:
        raise UserError("--attention is shown in a page: give --page as well")
    findings, named = _find_all(names, scale, runs)
    behind = [run for finding in findings for run in finding.runs if run.exists]
    everything = list({run.folder: run for run in [*behind, *named]}.values())
    if plot:
        draw_losses(everything, plot)
    if page:
        for finding in with_others(findings, named) if files else ():
            save_plots(finding, files_folder(page, finding))
        shown = [] if attention is None else pictures(named, attention)
        write_page(findings, named, page, pictures=shown)
    summaries, warnings = [summarise(run) for run in everything], different_data(named)
    if as_json:
        found = {"findings": list(map(finding_dict, findings))} if findings else {}
        print(json.dumps({"runs": list(map(as_dict, summaries)), "warnings": warnings, **found}))
        return
    if findings:
        show_findings(findings)
    show_warnings(warnings)
    show_summaries(summaries)
    if samples:
        show_samples(everything)
    for what, path in {"plot": plot, "page": page}.items():
        if path:
            print(f"{what}: {path}")
