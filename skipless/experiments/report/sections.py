"""What the page and the Markdown show of a finding: its answer, claims, figures and runs, and where they come from."""

import shlex
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from skipless.analysis.units import clock, number
from skipless.config.base import differences
from skipless.config.run import RunConfig
from skipless.experiments.outcome import Finding, Picture
from skipless.experiments.report.axes import split_bars
from skipless.experiments.report.page_plots import Cell, Figure, fixed, make_figure, plot_data, with_sd
from skipless.experiments.report.styles import styles
from skipless.experiments.report.summary import Pool, Summary, pool_seeds, summarise
from skipless.experiments.report.verdicts import Row, Tally, answer, is_own, tally
from skipless.runs import Run


@dataclass(frozen=True)
class RunRow:
    """A run, or the mean of several that differ in their seed alone."""

    block: str
    name: str
    cells: list[Cell]
    """What stands in each of `RUN_COLUMNS`."""
    state: str


@dataclass(frozen=True)
class Section:
    """What the templates show of a finding."""

    anchor: str
    short: str
    title: str
    own: bool
    """Whether the experiment is ours rather than the paper's."""
    facts: str
    answer: str
    warnings: tuple[str, ...]
    tally: list[Tally]
    claims: list[Row]
    paper: str
    note: str
    figures: list[Figure]
    runs: list[RunRow]
    single_runs: list[RunRow]
    """Those behind the means; empty where there is no mean."""
    pools: list[str]
    differences: dict[str, list[str]]
    samples: list[dict[str, Any]]
    commands: list[str]
    origin: dict[str, str]
    pictures: tuple[Picture, ...] = ()


def files_folder(page: Path, finding: Finding) -> Path:
    """Where the plots of a finding lie, beside the page, for it to link to them."""
    return page.parent / finding.id


def make_section(finding: Finding, page: Path, drawn: list[dict[str, Any]]) -> Section:
    """A finding for the templates; the numbers of its plots are added to `drawn`."""
    figures, plots = [], [split_bars(plot) for plot in finding.plots]
    for plot, look in zip(plots, styles(plots), strict=True):
        figures.append(make_figure(plot, len(drawn), page, files_folder(page, finding)))
        drawn.append(plot_data(plot, look, len(drawn)))
    runs = [run for run in finding.runs if run.exists]
    pools = pool_seeds(runs)
    rows = [[(one, summarise(one)) for one in pool.runs] for pool in pools]
    named = finding.verdicts or finding.scale
    return Section(
        anchor="-".join(part for part in (finding.id, finding.scale) if part),
        short=finding.id if named else finding.title,
        title=f"{finding.id}: {finding.title}" if named else finding.title,
        own=finding.own,
        facts=_facts(finding, len(runs)),
        answer=answer(finding),
        warnings=finding.warnings,
        tally=tally([finding]),
        claims=[Row(verdict, is_own(finding, verdict)) for verdict in finding.verdicts],
        paper=finding.paper,
        note=finding.note,
        figures=figures,
        runs=[pool_row(pool, of) for pool, of in zip(pools, rows, strict=True)],
        single_runs=[_run_row(*one) for of in rows for one in of] if len(pools) < len(runs) else [],
        pools=[pool.name for pool in pools],
        differences=_differences(pools),
        samples=[sample for of in rows for one in of if (sample := _last_sample(*one))],
        commands=[finding.command] if finding.command else _distinct(map(_command, runs)),
        origin=_origin(runs),
        pictures=finding.pictures,
    )


def count(number: int, what: str) -> str:
    """`1 run`, `2 runs`."""
    return f"{number} {what}{'s' * (number != 1)}"


def _facts(finding: Finding, runs: int) -> str:
    seeds = f"seed{'s' * (len(finding.seeds) != 1)} {', '.join(map(str, finding.seeds))}" if finding.seeds else ""
    own = "an experiment of our own" if finding.own else ""
    facts = [own, f"{finding.scale} scale" if finding.scale else "", seeds, count(runs, "run")]
    return " · ".join(fact for fact in facts if fact)


# ----------------------------------------------------------------------------------- runs

RUN_COLUMNS = {
    "seed": "",
    "parameters": "",
    "steps": "",
    "tokens": "",
    "speed": "tokens/s",
    "train loss": "nats/token",
    "held-out loss": "nats/token",
    "held-out bits": "per byte",
    "time": "h:min:s",
}
"""Head of each column of a table of runs, and its unit."""


def pool_row(pool: Pool, runs: Sequence[tuple[Run, Summary]]) -> RunRow:
    """A run as it is; of several the mean and standard deviation over those that have finished, or else over all."""
    if len(runs) == 1:
        return _run_row(*runs[0])
    finished = [one for _, one in runs if one.finished]
    counted = finished or [one for _, one in runs]
    seeds = sorted(run.config().train.seed for run, _ in runs)
    cells = [
        Cell(seeds[0], _listed_seeds(seeds)),
        *_amounts(counted[0].parameters, _mean(counted, "steps"), _mean(counted, "tokens")),
        _mean_cell(counted, "tokens_per_second", 0),
        _mean_cell(counted, "train_loss", 4),
        _mean_cell(counted, "valid_loss", 4),
        _mean_cell(counted, "valid_bits_per_byte", 3),
        Cell(_mean(counted, "seconds"), clock(_mean(counted, "seconds") or 0.0)),
    ]
    state = "finished" if len(finished) == len(runs) else f"{len(finished)} of {len(runs)} finished"
    return RunRow(pool.block, pool.name, cells, state)


def _run_row(run: Run, one: Summary) -> RunRow:
    seed = run.config().train.seed
    speed = one.tokens_per_second or None
    cells = [
        Cell(seed, str(seed)),
        *_amounts(one.parameters, one.steps, one.tokens),
        Cell(speed, f"{speed:,.0f}" if speed else "–"),
        Cell(one.train_loss, fixed(one.train_loss, 4)),
        Cell(one.valid_loss, fixed(one.valid_loss, 4)),
        Cell(one.valid_bits_per_byte, fixed(one.valid_bits_per_byte, 3)),
        Cell(one.seconds, clock(one.seconds)),
    ]
    return RunRow(one.block, run.name, cells, "finished" if one.finished else "unfinished")


def _amounts(parameters: int, steps: float | None, tokens: float | None) -> list[Cell]:
    return [
        Cell(parameters, number(parameters)),
        Cell(steps, f"{steps or 0:,.0f}"),
        Cell(tokens, number(tokens or 0)),
    ]


def _values(summaries: Iterable[Summary], name: str) -> list[float]:
    return [value for one in summaries if (value := getattr(one, name)) is not None]


def _mean(summaries: Iterable[Summary], name: str) -> float | None:
    values = _values(summaries, name)
    return statistics.fmean(values) if values else None


def _mean_cell(summaries: Iterable[Summary], name: str, digits: int) -> Cell:
    values = _values(summaries, name)
    if not any(values):
        return Cell(None, "–")
    mean, sd = statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None
    text = with_sd(mean, sd, digits) if digits else f"{mean:,.0f}" + ("" if sd is None else f" ± {sd:,.0f}")
    return Cell(mean, text)


def _listed_seeds(seeds: Sequence[int]) -> str:
    gapless = len(seeds) > 3 and seeds[-1] - seeds[0] == len(seeds) - 1
    return f"{seeds[0]} to {seeds[-1]}" if gapless else ", ".join(map(str, seeds))


# --------------------------------------------------------------------- where it comes from


def _differences(pools: Sequence[Pool]) -> dict[str, list[str]]:
    """What differs between pools, the names of their blocks first."""
    found = compare([pool.config for pool in pools])
    return {"block": [pool.block for pool in pools], **found} if found else {}


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


def _last_sample(run: Run, summary: Summary) -> dict[str, Any] | None:
    last = (list(run.samples()) or [None])[-1]
    return {"name": run.name, "block": summary.block, "step": last["step"], "text": last["text"]} if last else None


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
        "data": _distinct(run.config().data.source_text for run in runs),
    }
    return {name: "; ".join(values) for name, values in found.items() if any(values)}


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)


def _distinct(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(value for value in values if value))
