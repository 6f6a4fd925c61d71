"""How a claim is judged. The claims themselves stand with their figures: `papers/simplifying/`.

A claim is a pair of bounds on a quantity that each seed gives, such as the final loss of one block divided by
another's, less one. Over seeds the quantity has a mean and a 90% interval. The claim

- `holds` where the whole interval lies within the bounds, and an effect as large as the tolerance would have been seen;
- `differs (better)` where it says that two blocks match, and the whole interval lies beyond the bound on the good side;
- `does not hold` where the whole interval lies outside otherwise;
- is `not decidable` where the interval contains a bound, or where the seeds could not have shown the difference.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from skipless.experiments.evidence import Evidence, History
from skipless.experiments.outcome import BETTER, FAILS, HOLDS, OPEN, Outcome, Verdict

ONE_SEED = 0.02
"""Half the interval that is assumed for a relative difference where there is one seed, whose spread nobody knows."""

POWER = 0.8
"""The probability with which the least effect that is named would have been seen."""

# ------------------------------------------------------------------------------ intervals


def t_quantile(share: float, freedom: int) -> float:
    """A quantile of Student's t, by bisection of its distribution."""
    if share < 0.5:
        return -t_quantile(1 - share, freedom)
    low, high = 0.0, 1.0
    while _t_distribution(high, freedom) < share:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_distribution(middle, freedom) < share else (low, middle)
    return (low + high) / 2


def _t_distribution(t: float, freedom: int) -> float:
    """P(T ≤ t) for t ≥ 0 by the finite series of whole degrees of freedom (Abramowitz & Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine = math.cos(angle)
    if freedom % 2:
        term, total = cosine, cosine if freedom > 1 else 0.0
        for k in range(3, freedom - 1, 2):
            term *= cosine**2 * (k - 1) / k
            total += term
        inside = 2 / math.pi * (angle + math.sin(angle) * total)
    else:
        term, total = 1.0, 1.0
        for k in range(2, freedom - 1, 2):
            term *= cosine**2 * (k - 1) / k
            total += term
        inside = math.sin(angle) * total
    return (1 + inside) / 2


def standard_error(values: Sequence[float]) -> float:
    """Of the mean, by the sample's own deviation."""
    return statistics.stdev(values) / math.sqrt(len(values))


def interval(values: Sequence[float], one_seed: float) -> tuple[float, float, float]:
    """Mean, and the ends of its 90% interval: 5% on either side, so that a bound is passed with 95% confidence."""
    mean, half = statistics.fmean(values), one_seed
    if len(values) > 1:
        half = t_quantile(0.95, len(values) - 1) * standard_error(values)
    return mean, mean - half, mean + half


def least_effect(values: Sequence[float], one_seed: float) -> float:
    """The distance from a bound that would be seen with a probability of `POWER`: (t₀.₉₅ + t₀.₈) · sd / √n."""
    if len(values) < 2:
        return one_seed
    freedom = len(values) - 1
    return (t_quantile(0.95, freedom) + t_quantile(POWER, freedom)) * standard_error(values)


def outcome(low: float, high: float, above: float, below: float) -> Literal["holds", "does not hold", "not decidable"]:
    """Where an interval lies: within the bounds, outside of them, or across."""
    if above < low and high < below:
        return HOLDS
    return FAILS if high < above or low > below else OPEN


# --------------------------------------------------------------------------------- claims

Quantity = Callable[[Mapping[str, History]], float]
"""A number of one seed, from the histories of the labels."""


@dataclass(frozen=True)
class Claim:
    """A claim of the paper as bounds on a quantity: it holds if above < quantity < below."""

    text: str
    paper: str
    """The paper's own words."""
    labels: tuple[str, ...]
    quantity: Quantity
    above: float = -math.inf
    below: float = math.inf
    one_seed: float = ONE_SEED
    form: str = "+z.1%"
    """How the quantity is written."""
    unit: str = ""
    show: Callable[[History], float] | None = None
    """What is shown of each label beside the quantity."""
    seed: str = "seed"
    """What the seeds are called."""
    better: Literal["low", "high"] | None = None
    """For a match: which side of the tolerance is in favour of the first block."""
    own: bool = False
    """Whether it is a check of ours rather than a claim of the paper."""
    control: Quantity | None = None
    """What would be seen of a model that has learnt nothing: where that is within the tolerance, nothing is shown.

    Not a number for a seed in which no such model was measured.
    """
    needs_time: bool = False
    """Whether the quantity asks for run times."""

    @property
    def tolerance(self) -> float | None:
        """The difference that still counts as none; None where any difference counts."""
        return min(abs(bound) for bound in (self.above, self.below)) if self.above < 0 < self.below else None

    def judge(self, evidence: Evidence) -> Verdict:
        """The verdict on the seeds for which every label has finished."""
        seeds = evidence.by_seed(self.labels)
        if not seeds:
            missing = [label for label in self.labels if not evidence.finished(label)]
            what = f"no finished run of {', '.join(missing)}" if missing else "no seed has finished for all of them"
            return self.undecided(what)
        if any(one.token_time is None for row in seeds.values() for one in row.values()) and self.needs_time:
            return self.undecided("the time of a token was not measured here: `skipless bench token-time`")
        values = {seed: self.quantity(row) for seed, row in seeds.items()}
        if without := [seed for seed, value in values.items() if not math.isfinite(value)]:
            return self.undecided(f"it cannot be computed for {self.seed} {_listed(without)}")
        controls = [self.control(row) for row in seeds.values()] if self.control else None
        return self.verdict(list(values.values()), list(seeds), self._shown(seeds.values()), controls)

    def undecided(self, why: str) -> Verdict:
        """The verdict where there is nothing to judge."""
        return Verdict(self.text, self.paper, OPEN, why, self._bounds(), self.form, self.own, unit=self.unit)

    def verdict(
        self,
        values: Sequence[float],
        seeds: Sequence[int],
        shown: Mapping[str, float],
        controls: Sequence[float] | None = None,
    ) -> Verdict:
        """The verdict on values, one for each seed."""
        mean, low, high = interval(values, self.one_seed)
        least = least_effect(values, self.one_seed)
        result: Outcome = outcome(low, high, self.above, self.below)
        why = ""
        if result == FAILS and self.better and (high < self.above if self.better == "low" else low > self.below):
            result = BETTER
        if result == HOLDS and self.tolerance is not None:
            why = self._blind(least, controls, len(values))
            result = OPEN if why else HOLDS
        numbers = {"mean": mean, "low": low, "high": high, "seeds": float(len(values)), "least_effect": least}
        reason = self._reason(shown, (mean, low, high), seeds, least) + (f"; {why}" if why else "")
        close = any(
            self._figure(end) == self._figure(bound) for end in (low, high) for bound in self._bounds().values()
        )
        return Verdict(
            self.text,
            self.paper,
            result,
            reason,
            {**shown, **numbers, **self._bounds()},
            self.form,
            self.own,
            close=close and result != OPEN,
            why=why,
            unit=self.unit,
            seed=self.seed,
        )

    def _blind(self, least: float, controls: Sequence[float] | None, count: int) -> str:
        """Why a difference as large as the tolerance could not have been seen, if that is so."""
        assert self.tolerance is not None
        if count > 1 and least > self.tolerance:
            return f"with this spread a difference of {self._size(self.tolerance)} would often not have been seen"
        if controls is not None:
            known = [control for control in controls if math.isfinite(control)]
            if not known:
                return "no model that has learnt nothing was measured beside it"
            _, low, high = interval(known, self.one_seed)
            if low <= 0 <= high or min(abs(low), abs(high)) <= self.tolerance:
                return (
                    f"a model that has learnt nothing is only {self._size(abs(statistics.fmean(known)))} away, "
                    f"too close for a tolerance of {self._size(self.tolerance)} to tell apart"
                )
        return ""

    def _bounds(self) -> dict[str, float]:
        bounds = {"above": self.above, "below": self.below}
        return {name: bound for name, bound in bounds.items() if math.isfinite(bound)}

    def _shown(self, seeds: Iterable[Mapping[str, History]]) -> dict[str, float]:
        if self.show is None:
            return {}
        rows = list(seeds)
        return {label: statistics.fmean(self.show(row[label]) for row in rows) for label in self.labels}

    def _reason(
        self, shown: Mapping[str, float], found: tuple[float, float, float], seeds: Sequence[int], least: float
    ) -> str:
        mean, low, high = (self._figure(value) for value in found)
        numbers = {label: f"{value:,.0f}" if value >= 1e4 else f"{value:.4g}" for label, value in shown.items()}
        parts = ", ".join(f"{label} {text}" for label, text in numbers.items())
        bounds = [f"{name} {self._figure(bound)}" for name, bound in self._bounds().items()]
        over = f"90% interval over {self.seed}s {_listed(seeds)}; least detectable effect {self._size(least)}"
        if len(seeds) == 1 and not self.one_seed:
            over = "the same for every seed"
        elif len(seeds) == 1:
            over = f"one {self.seed}, so its spread is unknown and ±{self._size(self.one_seed)} is assumed"
        return f"{parts + ': ' if parts else ''}{mean} [{low}, {high}] ({over}); holds {' and '.join(bounds)}"

    def _figure(self, value: float) -> str:
        return f"{value:{self.form}}{self.unit}"

    def _size(self, value: float) -> str:
        return self._figure(abs(value)).lstrip("+")


def _listed(seeds: Sequence[int]) -> str:
    consecutive = len(seeds) > 3 and list(seeds) == list(range(seeds[0], seeds[0] + len(seeds)))
    return f"{seeds[0]} to {seeds[-1]}" if consecutive else ", ".join(map(str, seeds))


# ------------------------------------------------------------------------- usual quantities


def valid_loss(history: History) -> float:
    """The last held-out loss."""
    return history.valid_loss


def relative(first: str, second: str, measure: Callable[[History], float] = valid_loss) -> Quantity:
    """How much more of something the first has than the second, as a share."""
    return lambda seed: measure(seed[first]) / measure(seed[second]) - 1


def compare(
    text: str,
    paper: str,
    first: str,
    second: str,
    *,
    above: float = -math.inf,
    below: float = math.inf,
    better: Literal["low", "high"] | None = None,
    own: bool = False,
    measure: Callable[[History], float] = valid_loss,
) -> Claim:
    """A claim on how one label's measure differs from another's, as a share of the other's."""
    quantity = relative(first, second, measure)
    claim = Claim(text, paper, (first, second), quantity, above=above, below=below, show=measure)
    return replace(claim, better=better, own=own)


def at_equal_time(
    text: str,
    paper: str,
    first: str,
    second: str,
    *,
    above: float = -math.inf,
    below: float = math.inf,
    better: Literal["low", "high"] | None = None,
    of: Callable[[float], float] = lambda loss: loss,
) -> Claim:
    """A claim on the held-out losses at the run time at which the faster of two has finished, as the figures show.

    `of` makes something else of a loss, such as a perplexity.
    """

    def quantity(seed: Mapping[str, History]) -> float:
        moment = min(seed[first].run_time, seed[second].run_time)
        return of(seed[first].loss_at(moment)) / of(seed[second].loss_at(moment)) - 1

    claim = Claim(text, paper, (first, second), quantity, above=above, below=below)
    return replace(claim, better=better, needs_time=True)


def differences(seed: Mapping[str, History], first: str, second: str) -> list[float]:
    """How far one curve is above another, as a share, at each evaluation that both have."""
    mine, other = seed[first].curve(), seed[second].curve()
    return [mine[step] / other[step] - 1 for step in mine if step in other]


def throughout(first: str, second: str) -> Quantity:
    """How far one curve is above another, as a share, on average over the training."""
    return lambda seed: statistics.fmean(differences(seed, first, second))


def apart(first: str, second: str) -> Quantity:
    """How far two curves are apart, as a share, on average over the training: below 0 where the first is mostly lower.

    Curves that cross are not alike because one is above as much as it is below, so sizes are averaged.
    """

    def quantity(seed: Mapping[str, History]) -> float:
        found = differences(seed, first, second)
        size = statistics.fmean(abs(difference) for difference in found)
        return -size if statistics.fmean(found) < -size / 2 else size

    return quantity


@dataclass(frozen=True)
class CountedClaim(Claim):
    """A claim on what follows from the paper's configurations, such as a number of parameters: it needs no run."""

    value: float = math.nan

    def judge(self, evidence: Evidence) -> Verdict:
        """The verdict on the value."""
        return self.verdict([self.value], [0], {})


def counted(
    text: str, paper: str, blocks: tuple[str, str], measure: Callable[[str], float], above: float, below: float
) -> CountedClaim:
    """A claim on how much more of something one block's configuration has than another's, as a share."""
    value = measure(blocks[0]) / measure(blocks[1]) - 1
    claim = Claim(text, paper, blocks, lambda seed: value, above=above, below=below, one_seed=0.0, seed="count")
    return CountedClaim(**vars(claim), value=value)


LEARNING_RATE_STEP = math.sqrt(10)
"""A step of the paper's grid of learning rates: 1e-4, 3e-4, 1e-3."""


def learning_rates(text: str, paper: str, first: str, second: str, above: float, below: float) -> Claim:
    """A claim on the learning rate that was tuned for one block divided by another's."""

    def quantity(seed: Mapping[str, History]) -> float:
        return seed[first].config.train.lr / seed[second].config.train.lr

    claim = Claim(text, paper, (first, second), quantity, above=above, below=below, one_seed=0.0, form="z.2g")
    return replace(claim, show=lambda history: history.config.train.lr)


@dataclass(frozen=True)
class TimeClaim(Claim):
    """A claim on the time of a token in two blocks, at one of the sizes that were timed; its seeds are the rounds."""

    size: str = ""

    def judge(self, evidence: Evidence) -> Verdict:
        """The verdict on the rounds of the measurement."""
        first, second = self.labels
        values = evidence.timings.ratios(self.size, first, second)
        if not values:
            return self.undecided(f"the time of a token was not measured at {self.size}: `skipless bench token-time`")
        seconds = evidence.timings.seconds[self.size]
        shown = {f"{label}, µs a token": 1e6 * statistics.median(seconds[label]) for label in self.labels}
        return self.verdict(values, range(len(values)), shown)


def faster(first: str, second: str, paper: str, size: str) -> TimeClaim:
    """The claim that a block takes less time for a token than another."""
    text = f"{first} takes less time for a training token than {second} ({size})"
    return TimeClaim(text, paper, (first, second), lambda seed: math.nan, below=0, seed="round", size=size)
