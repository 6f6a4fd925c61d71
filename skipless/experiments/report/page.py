"""Findings and runs as one HTML file that needs nothing else: no network, no other file, no package; and as Markdown.

Every text goes through Jinja's escaping, the numbers of the plots travel as JSON, and the page's own policy lets no
script run but the one it was written with: a run's name or a sample cannot become part of the page. Both files follow
from the findings alone: written again, they are the same byte for byte.
"""

import base64
import hashlib
from collections.abc import Sequence
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from skipless.errors import UserError
from skipless.experiments.outcome import Finding, Picture
from skipless.experiments.report.page_plots import short
from skipless.experiments.report.run_plots import run_plots
from skipless.experiments.report.sections import RUN_COLUMNS, count, files_folder, make_section
from skipless.experiments.report.summary import different_data
from skipless.experiments.report.verdicts import LOOKS, tally
from skipless.runs import Run
from skipless.storage.atomic_files import write_bytes

__all__ = ["check_page", "files_folder", "side_by_side", "with_others", "write_page", "write_summary"]

TITLE = "The paper’s claims, run again"

OPEN_PLOTS = 4
"""Plots of a section that are seen at once; the others are folded away."""


def check_page(path: Path) -> None:
    """Raise before anything is computed where the page could not be written."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"a page's name ends in .html, got {str(path)!r}")
    if not path.absolute().parent.is_dir():
        raise UserError(f"cannot write {str(path)!r}: there is no folder {str(path.absolute().parent)!r}")


def side_by_side(runs: Sequence[Run], pictures: Sequence[Picture] = ()) -> Finding:
    """Runs without a claim, as a finding."""
    seeds = tuple(sorted({run.config().train.seed for run in runs}))
    return Finding(
        id="side-by-side",
        title="Runs side by side",
        paper="",
        scale="",
        seeds=seeds,
        command="",
        verdicts=(),
        plots=run_plots(runs),
        runs=tuple(runs),
        warnings=different_data(runs),
        pictures=tuple(pictures),
    )


def with_others(findings: Sequence[Finding], runs: Sequence[Run], pictures: Sequence[Picture] = ()) -> list[Finding]:
    """The findings, and the runs that are behind none of them side by side."""
    behind = {run.folder for finding in findings for run in finding.runs}
    others = list({run.folder: run for run in runs if run.folder not in behind}.values())
    return [*findings, *([side_by_side(others, pictures)] if others else [])]


def write_page(
    findings: Sequence[Finding],
    runs: Sequence[Run],
    path: Path,
    title: str = TITLE,
    open_plots: int = OPEN_PLOTS,
    pictures: Sequence[Picture] = (),
) -> Path:
    """Write the page of findings and of the runs that are behind none of them, and return its path."""
    check_page(path)
    everything = with_others(findings, runs, pictures)
    drawn: list[dict[str, Any]] = []
    style, script = _asset("page.css"), _asset("page.js")
    text = (
        _environment()
        .get_template("page.html.j2")
        .render(
            title=title if findings else "Runs side by side",
            subtitle=_subtitle(findings, everything),
            version=version("skipless"),
            tally=tally(findings),
            looks=LOOKS,
            run_columns=RUN_COLUMNS,
            sections=[make_section(finding, path, drawn) for finding in everything],
            open_plots=open_plots,
            plots=drawn,
            style=Markup(style),
            script=Markup(script),
            style_hash=_hash(style),
            script_hash=_hash(script),
        )
    )
    write_bytes(path, text.encode(errors="replace"))  # half a character, as a folder's name may hold, becomes `?`
    return path


def write_summary(findings: Sequence[Finding], page: Path) -> Path:
    """The verdicts, the figures and where they come from, as Markdown beside the page, for who reads a repository."""
    text = (
        _environment(escape=False)
        .get_template("summary.md.j2")
        .render(
            title=TITLE,
            subtitle=_subtitle(findings, findings),
            tally=tally(findings),
            looks=LOOKS,
            page=quote(page.name),
            sections=[make_section(finding, page, []) for finding in findings],
        )
    )
    write_bytes(page.with_suffix(".md"), text.encode(errors="replace"))
    return page.with_suffix(".md")


def _environment(escape: bool = True) -> Environment:
    loader = PackageLoader("skipless.experiments.report", "templates")
    environment = Environment(loader=loader, autoescape=escape, undefined=StrictUndefined)
    environment.filters |= {"short": short, "cell": _cell, "zip": zip}
    return environment


def _asset(name: str) -> str:
    return (files("skipless.experiments.report") / "templates" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """How a content security policy names a script or a style sheet."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _cell(text: str) -> str:
    """A text in a table of Markdown, which has one line."""
    return " ".join(text.replace("|", "\\|").split())


def _subtitle(findings: Sequence[Finding], everything: Sequence[Finding]) -> str:
    runs = {run.folder for finding in everything for run in finding.runs}
    scales = ", ".join(dict.fromkeys(finding.scale for finding in findings))
    parts = [count(len(findings), "experiment") + f" at {scales} scale" if findings else "", count(len(runs), "run")]
    return ", ".join(part for part in parts if part)
