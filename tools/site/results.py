"""The pages of results: an overview, and one page for each experiment, from the archive of runs."""

from pathlib import Path

from skipless.experiments.outcome import Finding, count, in_words
from skipless.experiments.report.axes import split_bars
from skipless.experiments.report.draw import draw, to_csv
from skipless.experiments.report.page import write_page
from skipless.experiments.report.styles import styles
from skipless.experiments.report.verdicts import LOOKS, Row, answer, is_own
from tools.site.findings import NOT_YET, findings, is_judged, status
from tools.site.markdown import cell, table, themed

HEAD = """# Results

The paper's claims, run again at laptop scale: decoders of 12 layers and width 64, encoders of 4 layers and width 128,
trained on two cores. Every figure here follows from the [archive of runs](../experiments.md#the-archive), without
training. [How a claim is judged](../experiments.md#how-a-claim-is-judged) says what the verdicts mean.
"""

WIDE = "---\nhide: [toc]\n---\n\n"
"""For the table of claims."""

HOLDING = """
What cannot be said from this: how the blocks compare at the paper's size. No model of that size was trained here.
"""


WHOSE = {"claims": "claims of the paper", "checks": "checks of our own, some of them in the paper's experiments"}


def write(folder: Path) -> None:
    """Write the pages and their plots into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    found = findings()
    (folder / "index.md").write_text(overview(found), encoding="utf-8")
    for finding in found.values():
        (folder / f"{finding.id}.md").write_text(experiment_page(finding, folder), encoding="utf-8")
    runs = {run.folder: run for finding in found.values() for run in finding.runs}
    write_page(list(found.values()), list(runs.values()), folder / "report.html")


def overview(found: dict[str, Finding]) -> str:
    """What came out of every experiment, or that it has not been judged."""
    parts = [HEAD]
    for own, title, name in ((False, "The paper's experiments", "claims"), (True, "Our own", "checks")):
        group = [finding for finding in found.values() if finding.own == own]
        verdicts = [one for finding in found.values() for one in finding.verdicts if is_own(finding, one) == own]
        done = [verdict for verdict in verdicts if is_judged(verdict)]
        words = in_words(count(done)) if done else "none"
        left = len(verdicts) - len(done)
        parts.append(f"## {title}\n\nOf {len(verdicts)} {WHOSE[name]}, judged so far: {words}; {NOT_YET}: {left}.\n")
        rows = [[f"[`{one.id}`]({one.id}.md)", cell(one.title), cell(_outcome(one))] for one in group]
        parts.append(table(["experiment", "", "what came out"], rows))
    parts.append("[All runs in one page](report.html), to look into: curves, tables, differences of configurations.\n")
    return "\n".join([*parts, HOLDING])


def _outcome(finding: Finding) -> str:
    said = f"{finding.answer} " if finding.answer else ""
    return f"{said}({status(finding)})" if said else status(finding)


def experiment_page(finding: Finding, folder: Path) -> str:
    """One experiment: the answer, the claims with their intervals, the plots, and how to run it again."""
    done = [verdict for verdict in finding.verdicts if is_judged(verdict)]
    parts = [f"{WIDE}# {finding.id}: {finding.title}\n"]
    parts.append(f"**The paper:** {finding.paper}\n" if not finding.own else f"{finding.paper}\n")
    seeds = ", ".join(map(str, finding.seeds))
    facts = f"laptop scale, seed{'s' * (len(finding.seeds) != 1)} {seeds}, {len(finding.runs)} runs"
    parts.append(
        f"Here: {status(finding)}" + (f" ({facts}).\n" if finding.runs else ": no run of it is in the archive.\n")
    )
    parts += [f"!!! warning\n\n    {cell(text)}\n" for text in finding.warnings]
    if done and len(done) == len(finding.verdicts):
        parts.append(f"**{answer(finding)}**\n")
    if finding.verdicts:
        rows = [_claim(Row(verdict, is_own(finding, verdict))) for verdict in finding.verdicts]
        parts.append(table(["verdict", "claim", "measured", "holds", "seeds", "the paper"], rows))
    parts += [finding.note + "\n"] if finding.note else []
    parts += _plots(finding, folder)
    parts.append(f"```sh\n{finding.command}\n```\n")
    return "\n".join(parts)


def _claim(row: Row) -> list[str]:
    verdict = row.verdict
    if not is_judged(verdict):
        outcome, measured = NOT_YET, verdict.reason
    else:
        outcome = f"{LOOKS[verdict.outcome]['sign']} {verdict.outcome}" + (
            ", close to its bound" if verdict.close else ""
        )
        assumed = " assumed" if row.assumed else ""
        measured = f"{row.measured} {row.interval}{assumed}" + (f"; but {verdict.why}" if verdict.why else "")
    paper = ("our own check " if row.own else "") + verdict.paper
    return [cell(text) for text in (outcome, verdict.claim, measured, row.bound or "–", row.seeds or "–", paper)]


def _plots(finding: Finding, folder: Path) -> list[str]:
    """The plots as files, light and dark, and the lines that show them."""
    plots = [split_bars(plot) for plot in finding.plots]
    lines = []
    for plot, look in zip(plots, styles(plots), strict=True):
        place = folder / finding.id
        place.mkdir(exist_ok=True)
        for dark in (False, True):
            draw(plot, place / f"{plot.key}-{'dark' if dark else 'light'}.svg", list(plot.axes)[:1], look, dark=dark)
        (place / f"{plot.key}.csv").write_text(to_csv(plot), encoding="utf-8")
        picture = themed(plot.title, f"{finding.id}/{plot.key}", "svg")
        lines.append(f"{picture}\n[The numbers]({finding.id}/{plot.key}.csv)\n")
    return lines
