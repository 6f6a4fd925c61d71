"""Verdicts as a reader meets them: counted, in a sentence, and as rows with the interval drawn against its bounds."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from skipless.experiments.outcome import BETTER, FAILS, HOLDS, OPEN, OUTCOMES, Finding, Verdict

LOOKS = {
    HOLDS: {"style": "holds", "sign": "✓", "plural": "hold"},
    BETTER: {"style": "better", "sign": "↑", "plural": "differ (better)"},
    FAILS: {"style": "fails", "sign": "✕", "plural": "do not hold"},
    OPEN: {"style": "open", "sign": "≈", "plural": "not decidable"},
}

# ------------------------------------------------------------------------------- counted


@dataclass(frozen=True)
class Tally:
    """How many of some claims have which outcome."""

    own: bool
    """Whether they are checks of our own: those and the paper's claims are never added up."""
    counts: Mapping[str, int]
    """By outcome, without those that none has."""

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.counts.values())

    @property
    def whose(self) -> str:
        """`3 claims of the paper`."""
        word, of = ("check", "of our own") if self.own else ("claim", "of the paper")
        return f"{self.total} {word}{'s' * (self.total != 1)} {of}"

    @property
    def parts(self) -> dict[str, str]:
        """`2 hold`, `1 not decidable`, by outcome."""
        return {
            outcome: f"{count} {LOOKS[outcome]['plural'] if count != 1 else outcome}"
            for outcome, count in self.counts.items()
        }

    @property
    def line(self) -> str:
        """`3 claims of the paper: 2 hold, 1 not decidable`."""
        return f"{self.whose}: {', '.join(self.parts.values())}"


def is_own(finding: Finding, verdict: Verdict) -> bool:
    """Whether a verdict is on a check of ours: all of an experiment of ours are."""
    return finding.own or verdict.own


def tally(findings: Iterable[Finding]) -> list[Tally]:
    """The claims of the paper, and apart from them the checks of our own; without those of which there are none."""
    pairs = [(is_own(finding, one), one.outcome) for finding in findings for one in finding.verdicts]
    found = []
    for own in (False, True):
        counts = Counter(outcome for whose, outcome in pairs if whose == own)
        if counts:
            found.append(Tally(own, {outcome: counts[outcome] for outcome in OUTCOMES if counts[outcome]}))
    return found


# ------------------------------------------------------------------------------ a sentence

WORDS = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")

SAID = {
    HOLDS: ("holds", "hold"),
    BETTER: ("differs in favour of the simpler block", "differ in favour of the simpler block"),
    FAILS: ("does not hold", "do not hold"),
    OPEN: ("is not decidable", "are not decidable"),
}
"""What one and what several do."""


def answer(finding: Finding) -> str:
    """What came out, as its author has put it, or else as the counts say it; empty where nothing is claimed."""
    return finding.answer or " ".join(map(_sentence, tally([finding])))


def _sentence(found: Tally) -> str:
    """`3 of 4 claims hold; one is not decidable.`"""
    one, several = ("Our own check", "checks of our own") if found.own else ("The claim", "claims")
    (first, count), *others = found.counts.items()
    if found.total == 1:
        return f"{one} {SAID[first][0]}."
    if not others:
        return _unanimous(first, count, several)
    rest = [f"{_word(n)} {SAID[outcome][n != 1]}" for outcome, n in others]
    return f"{count} of {found.total} {several} {SAID[first][count != 1]}; {_joined(rest)}."


def _unanimous(outcome: str, total: int, names: str) -> str:
    if outcome in (HOLDS, BETTER):
        return f"{'Both' if total == 2 else f'All {total}'} {names} {SAID[outcome][1]}."
    what = {FAILS: "holds", OPEN: "is decidable"}[outcome]
    return f"{'Neither' if total == 2 else 'None'} of the {_word(total)} {names} {what}."


def _word(count: int) -> str:
    return WORDS[count] if count < len(WORDS) else str(count)


def _joined(parts: Sequence[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


# ----------------------------------------------------------------------------------- rows

JUDGED = ("mean", "low", "high", "above", "below", "least_effect", "seeds")
"""The numbers of a verdict that it was judged by; the others are shown by their labels."""


@dataclass(frozen=True)
class Drawing:
    """An interval against its bounds, as places in a picture."""

    low: float
    mean: float
    high: float
    bounds: tuple[float, ...]
    allowed: tuple[float, float] | None
    """From where to where the claim holds."""
    zero: float | None
    """Where zero lies, if that is in the picture."""
    near: float | None
    """The end of the interval that is within rounding of a bound."""
    width: float
    height: float

    @property
    def middle(self) -> float:
        """The height at which the interval lies."""
        return self.height / 2


@dataclass(frozen=True)
class Row:
    """A verdict in a table: its numbers as they are written, empty where there are none."""

    verdict: Verdict
    own: bool

    @property
    def measured(self) -> str:
        """The mean."""
        return self._figure(_measured(self.verdict).get("mean"))

    @property
    def interval(self) -> str:
        """`[+0.1%, +0.5%]`, `[+0.1, +0.5] points`."""
        found = _measured(self.verdict)
        low, high = (self._plain(found[name]) for name in ("low", "high")) if found else ("", "")
        return f"[{low}, {high}]{self.verdict.unit}" if found else ""

    @property
    def assumed(self) -> bool:
        """Whether the interval is one that is assumed, as there is only one seed."""
        return self.verdict.numbers.get("seeds") == 1

    @property
    def bound(self) -> str:
        """Where the claim holds: `between −2.0% and +2.0%`."""
        ends = {name: self._plain(bound) for name, bound in _bounds(self.verdict).items()}
        if len(ends) == 2:
            return f"between {ends['above']} and {ends['below']}{self.verdict.unit}"
        return "".join(f"{name} {end}{self.verdict.unit}" for name, end in ends.items())

    @property
    def least(self) -> str:
        """The least effect that would be seen."""
        least = self.verdict.numbers.get("least_effect")
        return "" if least is None or self.assumed else self._figure(abs(least)).lstrip("+")

    @property
    def seeds(self) -> str:
        """How many there are; with their name where they are not the seeds of trainings."""
        count, name = self.verdict.numbers.get("seeds"), self.verdict.seed
        if not count:
            return ""
        return f"{count:.0f}" if name == "seed" else f"{count:.0f} {name}{'s' * (count != 1)}"

    @property
    def shown(self) -> dict[str, float]:
        """Other numbers, by label."""
        return {name: value for name, value in self.verdict.numbers.items() if name not in JUDGED}

    @property
    def drawing(self) -> Drawing | None:
        """The interval against its bounds; None where nothing was measured."""
        return draw_interval(self.verdict)

    @property
    def words(self) -> str:
        """What the drawing shows."""
        interval = self.interval.replace("[", "").replace("]", "").replace(", ", " to ")
        parts = [f"{self.measured}, {'assumed' if self.assumed else '90%'} interval {interval}"]
        parts += [f"holds {self.bound}"] if self.bound else []
        parts += [self.verdict.outcome, *(["within rounding of the bound"] if self.verdict.close else [])]
        return "; ".join(parts)

    def _figure(self, value: float | None) -> str:
        """A number with its unit."""
        return "" if value is None else f"{self._plain(value)}{self.verdict.unit}"

    def _plain(self, value: float) -> str:
        """A number as the verdict writes it, with a real minus, and no sign for what is exactly zero."""
        text = f"{value:{self.verdict.form}}".replace("-", "−")
        return text.lstrip("+−") if value == 0 else text


def _measured(verdict: Verdict) -> dict[str, float]:
    """The mean and the ends of the interval, if all of them are there."""
    found = {name: verdict.numbers.get(name, math.nan) for name in ("mean", "low", "high")}
    return found if all(map(math.isfinite, found.values())) else {}


def _bounds(verdict: Verdict) -> dict[str, float]:
    """Those that there are."""
    found = {name: verdict.numbers.get(name, math.nan) for name in ("above", "below")}
    return {name: bound for name, bound in found.items() if math.isfinite(bound)}


# -------------------------------------------------------------------------------- drawing

WIDTH, HEIGHT, INSET = 200.0, 30.0, 6.0
"""Of the picture, and what is left free at its ends for the marks."""


def draw_interval(verdict: Verdict) -> Drawing | None:
    """The interval on a scale of its own that has room for it and its bounds; None where nothing was measured."""
    found, bounds = _measured(verdict), _bounds(verdict)
    if not found:
        return None
    values = [*found.values(), *bounds.values()]
    room = 0.12 * (max(values) - min(values)) or 0.1 * abs(values[0]) or 1.0
    start, end = min(values) - room, max(values) + room

    def at(value: float) -> float:
        return round(INSET + (value - start) / (end - start) * (WIDTH - 2 * INSET), 2)

    allowed = at(bounds["above"]) if "above" in bounds else 0.0, at(bounds["below"]) if "below" in bounds else WIDTH
    gaps = [(abs(found[name] - bound), at(found[name])) for name in ("low", "high") for bound in bounds.values()]
    return Drawing(
        low=at(found["low"]),
        mean=at(found["mean"]),
        high=at(found["high"]),
        bounds=tuple(map(at, bounds.values())),
        allowed=allowed if bounds else None,
        zero=at(0.0) if start <= 0 <= end else None,
        near=min(gaps)[1] if verdict.close and gaps else None,
        width=WIDTH,
        height=HEIGHT,
    )
