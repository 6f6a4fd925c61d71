"""What experiments and sweeps found."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from skipless.analysis.units import clock
from skipless.terminal.tables import figure, show_table
from skipless.terminal.text import say

if TYPE_CHECKING:
    from skipless.experiments.outcome import Finding
    from skipless.experiments.sweep import Point

OUTCOME_STYLES = {"holds": "green", "differs (better)": "cyan", "does not hold": "red", "not decidable": "yellow"}


def show_findings(findings: Sequence["Finding"]) -> None:
    """What came out of each, and every claim with its verdict, and why."""
    for finding in findings:
        seeds = ", ".join(map(str, finding.seeds)) or "none finished"
        say("\n", (finding.id, "bold"), f"  {finding.title}  ({finding.scale} scale, seeds: {seeds})")
        show_warnings(finding.warnings)
        if finding.answer:
            say(finding.answer, style="bold")
        say("" if finding.own else "The paper: ", finding.paper)
        for verdict in finding.verdicts:
            say("  ", (f"{verdict.outcome:>16}", OUTCOME_STYLES[verdict.outcome]), f"  {verdict.claim}")
            say(verdict.reason, style="dim", indent=20)
    pairs = [(finding.own or verdict.own, verdict) for finding in findings for verdict in finding.verdicts]
    for whose, of in (("claims of the paper", False), ("checks of our own", True)):
        counted = Counter[str](verdict.outcome for own, verdict in pairs if own == of)
        if counted:
            counts = ", ".join(f"{counted[outcome]} {outcome}" for outcome in OUTCOME_STYLES)
            say(f"\n{counted.total()} {whose}: {counts}")


def show_warnings(warnings: Sequence[str]) -> None:
    """What should be known before anything is compared."""
    for warning in warnings:
        say(("warning:", "bold yellow"), f" {warning}")


def show_left(left: Sequence[str], failed: Mapping[str, str]) -> None:
    """How many runs wait for another time."""
    waiting = [name for name in left if name not in failed]
    if waiting:
        print(f"not finished: {len(waiting)} runs; the same command continues them")


def show_experiments(rows: Sequence[Mapping[str, Any]]) -> None:
    """Of each experiment its cost at each scale, what the paper found, and what came out here."""
    say(
        "Runs, and hours:minutes:seconds for one seed if nothing is there yet: laptop on this machine, paper on a GPU "
        "that sustains 30 TFLOP/s. Experiments share runs."
    )
    for row in rows:
        costs = [f"{name} {at['runs']} runs {clock(at['seconds'])}" for name, at in row["scales"].items() if at["runs"]]
        say("\n", (row["id"], "bold"), f"  {row['title']}  ", (f"({'; '.join(costs)})", "dim"))
        say(f"{'asks' if row['own'] else 'paper'}: {row['paper']}", indent=2)
        found = row["came_out"]
        here = ". ".join(filter(None, (found["answer"].rstrip("."), found["status"]))) if found else "not run yet"
        say(f"here: {here}", indent=2)


def show_sweep(points: Sequence["Point"]) -> None:
    """Every point of a sweep, the best of each block marked."""
    keys = list(dict.fromkeys(key for point in points for key in point.values))
    losses: dict[str, float] = {}
    for point in points:
        if point.state == "complete" and point.loss is not None:
            losses[point.block] = min(point.loss, losses.get(point.block, point.loss))
    rows = []
    for point in sorted(points, key=lambda point: point.block):
        best = " ←" if point.state == "complete" and point.loss == losses.get(point.block) else ""
        outcome = figure(point.loss, 4) + best if point.state == "complete" else point.state
        values = (point.values.get(key) for key in keys)
        rows.append([point.block, *(f"{v:.4g}" if isinstance(v, float) else str(v) for v in values), outcome])
    show_table("Sweep", ["block", *keys, "held-out loss"], rows)
