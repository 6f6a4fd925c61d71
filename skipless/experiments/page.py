"""Findings and runs as one HTML file that needs nothing else: no network, no other file, no package; and as Markdown.

Every text goes through Jinja's escaping, the numbers of the plots travel as JSON, and the page's own policy lets no
script run but the one it was written with: a run's name or a sample cannot become part of the page.
"""

import base64
import hashlib
import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path, PurePath
from typing import Any, NamedTuple
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from skipless.atomic import write_bytes
from skipless.config import RunConfig, differences
from skipless.display import clock, number
from skipless.errors import UserError
from skipless.experiments.outcome import BETTER, FAILS, HOLDS, OPEN, OUTCOMES, Finding, Plot, Series, Verdict
from skipless.experiments.plots import (
    Style,
    bar_places,
    categories,
    is_number,
    label,
    mark_every,
    named_below,
    places,
    run_plots,
    split_bars,
    styles,
    x_limits,
    y_limits,
)
from skipless.experiments.report import pool_seeds, summarise
from skipless.runs import Run

TITLE = "The paper’s claims, run again"

MAX_POINTS = 400
"""Points of a line in the page; the CSV has all."""

OPEN_PLOTS = 4
"""Plots of a section that are seen at once; the others are folded away."""

MARKS = {
    HOLDS: {"style": "holds", "sign": "✓", "plural": "hold"},
    BETTER: {"style": "better", "sign": "↑", "plural": "differ (better)"},
    FAILS: {"style": "fails", "sign": "✕", "plural": "do not hold"},
    OPEN: {"style": "open", "sign": "≈", "plural": "not decidable"},
}


def check_page(path: Path) -> None:
    """Raise before anything is computed where the page could not be written."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"a page's name ends in .html, got {str(path)!r}")
    if not path.absolute().parent.is_dir():
        raise UserError(f"cannot write {str(path)!r}: there is no folder {str(path.absolute().parent)!r}")


def files_folder(page: Path, finding: Finding) -> Path:
    """Where the plots of a finding lie, beside the page, for it to link to them."""
    return page.parent / finding.id


def side_by_side(runs: Sequence[Run]) -> Finding:
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
    )


def with_others(findings: Sequence[Finding], runs: Sequence[Run]) -> list[Finding]:
    """The findings, and the runs that are behind none of them side by side."""
    behind = {run.folder for finding in findings for run in finding.runs}
    others = list({run.folder: run for run in runs if run.folder not in behind}.values())
    return [*findings, *([side_by_side(others)] if others else [])]


def write_page(findings: Sequence[Finding], runs: Sequence[Run], path: Path) -> Path:
    """Write the page of findings and of the runs that are behind none of them, and return its path."""
    check_page(path)
    everything = with_others(findings, runs)
    drawn: list[dict[str, Any]] = []
    sections = [_section(finding, path, drawn) for finding in everything]
    style, script = _asset("page.css"), _asset("page.js")
    text = (
        _environment()
        .get_template("page.html.j2")
        .render(
            title=TITLE if findings else "Runs side by side",
            subtitle=_subtitle(findings, everything),
            version=version("skipless"),
            tally=_tally(findings),
            marks=MARKS,
            sections=sections,
            open_plots=OPEN_PLOTS,
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
            tally=_tally(findings),
            marks=MARKS,
            page=quote(page.name),
            sections=[_section(finding, page, []) for finding in findings],
        )
    )
    write_bytes(page.with_suffix(".md"), text.encode(errors="replace"))
    return page.with_suffix(".md")


def _environment(escape: bool = True) -> Environment:
    loader = PackageLoader("skipless.experiments", "templates")
    environment = Environment(loader=loader, autoescape=escape, undefined=StrictUndefined)
    environment.filters |= {"short": _short, "size": number, "clock": clock, "fixed": _fixed, "cell": _cell}
    return environment


def _asset(name: str) -> str:
    return (files("skipless.experiments") / "templates" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """How a content security policy names a script or a style sheet."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _short(value: Any) -> str:
    if isinstance(value, str):
        return value
    if not is_number(value):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:,.5g}"


def _cell(text: str) -> str:
    """A text in a table of Markdown."""
    return text.replace("|", "\\|")


def _fixed(value: float | None, digits: int) -> str:
    return f"{value:.{digits}f}" if is_number(value) else "–"


def _tally(findings: Sequence[Finding]) -> dict[str, int]:
    counts = Counter(verdict.outcome for finding in findings for verdict in finding.verdicts)
    return {outcome: counts[outcome] for outcome in OUTCOMES if counts[outcome]}


def _subtitle(findings: Sequence[Finding], everything: Sequence[Finding]) -> str:
    runs = {run.folder for finding in everything for run in finding.runs}
    scales = ", ".join(dict.fromkeys(finding.scale for finding in findings))
    parts = [_count(len(findings), "experiment") + f" at {scales} scale" if findings else "", _count(len(runs), "run")]
    return ", ".join(part for part in parts if part)


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


# ------------------------------------------------------------------------------ sections


class Cell(NamedTuple):
    """A cell of a table."""

    value: Any
    """What it is sorted by."""
    text: str


@dataclass(frozen=True)
class Figure:
    """What the template says of a plot: its files, and its values as a table."""

    number: int
    plot: Plot
    files: dict[str, str]
    rows_title: str
    columns: list[str]
    rows: list[tuple[str, list[Cell]]]
    """Name, and what stands in each column."""


@dataclass(frozen=True)
class Section:
    """What the template shows of a finding."""

    anchor: str
    short: str
    title: str
    facts: str
    paper: str
    note: str
    verdicts: tuple[Verdict, ...]
    figures: list[Figure]
    runs: list[dict[str, Any]] = field(default_factory=list)
    pools: list[str] = field(default_factory=list)
    differences: dict[str, list[str]] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    origin: dict[str, str] = field(default_factory=dict)


def _section(finding: Finding, page: Path, drawn: list[dict[str, Any]]) -> Section:
    """A finding for the template; the numbers of its plots are added to `drawn`."""
    shown, plots = [], [split_bars(plot) for plot in finding.plots]
    for plot, look in zip(plots, styles(plots), strict=True):
        shown.append(_figure(plot, len(drawn), page, files_folder(page, finding)))
        drawn.append(plot_data(plot, look, len(drawn)))
    runs = [run for run in finding.runs if run.exists]
    pools = pool_seeds(runs)
    claims = bool(finding.verdicts)
    seeds = f"seed{'s' * (len(finding.seeds) != 1)} {', '.join(map(str, finding.seeds))}" if finding.seeds else ""
    facts = [f"{finding.scale} scale" if finding.scale else "", seeds, _count(len(runs), "run")]
    return Section(
        anchor="-".join(part for part in (finding.id, finding.scale) if part),
        short=finding.id if claims or finding.scale else finding.title,
        title=f"{finding.id}: {finding.title}" if claims or finding.scale else finding.title,
        facts=" · ".join(fact for fact in facts if fact),
        paper=finding.paper,
        note=finding.note,
        verdicts=finding.verdicts,
        figures=shown,
        runs=[{**asdict(summarise(run)), "seed": run.config().train.seed} for run in runs],
        pools=[pool.name for pool in pools],
        differences=compare([pool.config for pool in pools]),
        samples=[sample for sample in map(_last_sample, runs) if sample],
        commands=[finding.command] if finding.command else _distinct(map(_command, runs)),
        origin=_origin(runs),
    )


def compare(configs: Sequence[RunConfig]) -> dict[str, list[str]]:
    """What differs between configurations, their seeds aside: dotted name → the value in each."""
    if not configs:
        return {}
    from_first = [differences(configs[0], cfg) for cfg in configs]
    first = {key: old for changes in from_first for key, (old, _) in changes.items() if key != "train.seed"}
    return {
        key: [_value(changes[key][1] if key in changes else old) for changes in from_first]
        for key, old in first.items()
    }


def _value(value: Any) -> str:
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _last_sample(run: Run) -> dict[str, Any] | None:
    last = (list(run.samples()) or [None])[-1]
    return {"name": run.name, "step": last["step"], "text": last["text"]} if last else None


def _command(run: Run) -> str:
    """What was typed to make a run, without the place where the program lies."""
    program, *arguments = run.info().get("command") or [""]
    name = PurePath(program).name
    return shlex.join(["skipless" if name == "__main__.py" else name, *arguments]) if name else ""


def _origin(runs: Sequence[Run]) -> dict[str, str]:
    """Versions, machines and seeds behind runs."""
    infos = [run.info() for run in runs]
    found = {
        "versions": _distinct(_listed(info.get("versions", {})) for info in infos),
        "machine": _distinct(_listed(info.get("machine", {})) for info in infos),
        "seeds": [", ".join(map(str, sorted({run.config().train.seed for run in runs})))],
        "data": _distinct(run.config().data.source for run in runs),
    }
    return {name: "; ".join(values) for name, values in found.items() if any(values)}


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)


def _distinct(values: Any) -> list[str]:
    return list(dict.fromkeys(value for value in values if value))


# --------------------------------------------------------------------------------- plots


def _figure(plot: Plot, position: int, page: Path, folder: Path) -> Figure:
    axis = next(iter(plot.axes), "")
    saved = {kind: folder / f"{plot.key}.{kind.lower()}" for kind in ("PNG", "SVG", "CSV")}
    columns, rows = _crossed(plot, axis) or _listed_values(plot, axis)
    return Figure(
        number=position,
        plot=plot,
        files={kind: quote(file.relative_to(page.parent).as_posix()) for kind, file in saved.items() if file.exists()},
        rows_title="values" if plot.kind != "line" else "last values",
        columns=columns,
        rows=rows,
    )


Table = tuple[list[str], list[tuple[str, list[Cell]]]]
"""Columns and rows."""


def _listed_values(plot: Plot, axis: str) -> Table:
    """A row for each point, or for the last one of each line."""
    rows = []
    for series in plot.series:
        spread = series.sd or (None,) * len(series.y)
        points = [point for point in zip(places(series, axis), series.y, spread, strict=True) if is_number(point[1])]
        shown = (points if plot.kind != "line" else points[-1:]) or [(None, None, None)]
        rows += [(series.name, [Cell(part, _short(part)) for part in point]) for point in shown]
    return [plot.axes.get(axis, "") or "at", plot.y_label, "± sd"], rows


def _crossed(plot: Plot, axis: str) -> Table | None:
    """Bars that stand side by side as a table of series and places; None for others."""
    names = categories(plot, axis) or []
    if plot.kind != "bars" or not any(len(series.y) > 1 for series in plot.series) or len(plot.series) == 1:
        return None
    top = max((abs(y) for series in plot.series for y in series.y if is_number(y)), default=0.0)
    digits = max(0, 2 - math.floor(math.log10(top))) if top else 1
    rows = []
    for series in plot.series:
        spread = series.sd or (None,) * len(series.y)
        found = {label(x): (y, sd) for x, y, sd in zip(places(series, axis), series.y, spread, strict=True) if x}
        pairs = [found.get(name, (None, None)) for name in names]
        rows.append((series.name, [Cell(mean, _pair(mean, sd, digits)) for mean, sd in pairs]))
    return names, rows


def _pair(mean: float | None, sd: float | None, digits: int) -> str:
    return _fixed(mean, digits) + (f" ± {sd:.{digits}f}" if is_number(sd) else "")


def plot_data(plot: Plot, look: Sequence[Style], position: int) -> dict[str, Any]:
    """A plot as the page's script reads it. Positions that series share are stored once."""
    axes = list(plot.axes)
    kept = [_kept(len(series.y)) for series in plot.series]
    shared: dict[tuple[float | None, ...], int] = {}
    bars = {axis: bar_places(plot, axis) for axis in axes} if plot.kind == "bars" else {}
    series = []
    for n, (one, style) in enumerate(zip(plot.series, look, strict=True)):
        rows = [_positions(plot, one, axis, bars[axis][n] if bars else None) for axis in axes]
        thin = [tuple(_clean(row[i]) for i in kept[n]) for row in rows]
        series.append(
            {
                "name": one.name,
                "x": [shared.setdefault(row, len(shared)) for row in thin],
                "y": [_clean(one.y[i]) for i in kept[n]],
                "sd": [_clean(one.sd[i]) for i in kept[n]] if one.sd else None,
                "widths": [bars[axis][n][0][1] if bars[axis][n] else 0 for axis in axes] if bars else None,
                "marks": mark_every(len(kept[n]), n, len(plot.series)),
                **asdict(style),
            }
        )
    return {
        "id": position,
        "title": plot.title,
        "yLabel": plot.y_label,
        "kind": plot.kind,
        "logX": plot.log_x,
        "logY": plot.log_y,
        "legend": not named_below(plot),
        "axes": [
            {"name": axis, "label": text, "categories": categories(plot, axis), "limits": x_limits(plot, axis)}
            for axis, text in plot.axes.items()
        ],
        "y": y_limits(plot),
        "whole": y_limits(plot, whole=True),
        "xs": list(shared),
        "series": series,
    }


def _kept(count: int) -> list[int]:
    """Which points of a line are shown: all, or evenly spread ones with both ends."""
    if count <= MAX_POINTS:
        return list(range(count))
    return [round(i * (count - 1) / (MAX_POINTS - 1)) for i in range(MAX_POINTS)]


def _positions(plot: Plot, series: Series, axis: str, bars: Sequence[tuple[float, float]] | None) -> list[Any]:
    if bars is not None:
        return [centre for centre, _ in bars]
    names = categories(plot, axis)
    return [names.index(label(x)) if names and x is not None else x for x in places(series, axis)]


def _clean(value: Any) -> float | None:
    """Six digits, and null for what is no number: JSON has no other way to say it."""
    return float(f"{value:.6g}") if is_number(value) and math.isfinite(value) else None
