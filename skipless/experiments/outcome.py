"""What an experiment found: verdicts on the paper's claims, and plots as data. Whatever shows them reads this."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from skipless.runs import Run

HOLDS, BETTER, FAILS, OPEN = "holds", "differs (better)", "does not hold", "not decidable"
OUTCOMES = (HOLDS, BETTER, FAILS, OPEN)
Outcome = Literal["holds", "differs (better)", "does not hold", "not decidable"]


@dataclass(frozen=True)
class Verdict:
    """One claim of the paper against what was measured."""

    claim: str
    """As a sentence that can be false."""
    paper: str
    """What the paper's own figure or table says."""
    outcome: Outcome
    """`differs (better)`: two blocks that should match do not, in favour of the simpler one; `not decidable`: the
    difference is within the spread over seeds, or would not have been seen, or runs are missing."""
    reason: str
    """The comparison in a line, with its numbers, its tolerance and the seeds behind it."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Among them mean, low and high of the interval, the bounds above and below, least_effect and seeds."""
    form: str = "z.3g"
    """How these are written."""
    own: bool = False
    """Whether it is a check of ours rather than a claim of the paper."""
    close: bool = False
    """Whether an end of the interval is within rounding of a bound."""
    why: str = ""
    """Why it is not decidable, where the interval itself lies within the bounds."""
    unit: str = ""
    """What is written after a number, such as ` points`."""
    seed: str = "seed"
    """What each value behind the interval is of: a seed, a round of a measurement."""


@dataclass(frozen=True)
class Series:
    """A line, a set of marks or of bars."""

    name: str
    x: Mapping[str, tuple[float | str, ...]]
    """Positions along each of the plot's axes."""
    y: tuple[float, ...]
    sd: tuple[float, ...] | None = None
    """Standard deviation over seeds."""
    group: str | None = None
    """Series of one group share a colour."""


@dataclass(frozen=True)
class Plot:
    """A figure as data; drawn interactively in the page, and by matplotlib for papers."""

    key: str
    """Name of its files."""
    title: str
    y_label: str
    axes: Mapping[str, str]
    """Name → label of each axis that may lie below, the paper's own first: steps, tokens, minutes."""
    series: tuple[Series, ...]
    kind: Literal["line", "marks", "bars"] = "line"
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Finding:
    """An experiment's outcome."""

    id: str
    title: str
    paper: str
    """What the paper found, in a sentence."""
    scale: str
    seeds: tuple[int, ...]
    command: str
    """How to run it again."""
    verdicts: tuple[Verdict, ...]
    plots: tuple[Plot, ...]
    runs: tuple[Run, ...]
    """Those behind it; runs may serve several experiments."""
    note: str = ""
    """A sentence of analysis, where the outcome wants one."""
    answer: str = ""
    """What came out, in a sentence."""
    own: bool = False
    """Whether it is an experiment of ours rather than the paper's."""
    warnings: tuple[str, ...] = ()
    """What a reader should know before comparing its runs, such as that they had different data."""
    pictures: tuple["Picture", ...] = ()
    """What is shown beside the plots and is none."""


@dataclass(frozen=True)
class Picture:
    """A picture that the page holds."""

    title: str
    source: str
    """As a `data:` address."""


def count(verdicts: Iterable[Verdict]) -> dict[str, int]:
    """How many verdicts there are of each outcome that occurs."""
    found = Counter(verdict.outcome for verdict in verdicts)
    return {outcome: found[outcome] for outcome in OUTCOMES if found[outcome]}


def published(findings: Iterable[Finding]) -> dict[str, Any]:
    """What came out of experiments, in short: the paper's claims and our own checks counted apart."""
    return {
        finding.id: {
            "answer": finding.answer,
            "scale": finding.scale,
            "paper": count(verdict for verdict in finding.verdicts if not verdict.own),
            "own": count(verdict for verdict in finding.verdicts if verdict.own),
        }
        for finding in findings
    }


def in_words(counts: Mapping[str, int]) -> str:
    """`3 hold, 1 does not hold`."""
    plural = {HOLDS: "hold", BETTER: "differ (better)", FAILS: "do not hold"}
    return ", ".join(f"{n} {plural.get(outcome, outcome) if n != 1 else outcome}" for outcome, n in counts.items())
