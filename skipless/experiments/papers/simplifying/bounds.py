"""Numbers for the paper's words: how near is a match, how little is slight, how many are most.

Losses are compared as shares of the other block's; see docs/experiments.md.
"""

from collections.abc import Callable

from skipless.analysis.costs import count_parameters
from skipless.experiments.claims import Claim, at_equal_time, compare
from skipless.experiments.evidence import Evidence
from skipless.experiments.experiment import Configs
from skipless.experiments.outcome import Plot
from skipless.experiments.report.series import loss_plot
from skipless.experiments.scale import Scale
from skipless.recipes import recipe

MATCH = 0.02
"""`matches`: at most 2% apart. `clearly`, `significantly` slower: more than 2% above."""

SLIGHT = 0.05
"""`slightly`, `small`: a difference, but less than 5%. `much`: more than that."""

VERY_SMALL = 0.02
"""`very small`."""

NEARLY_ALL = 0.9
"""The share of layers that the `vast majority` is taken for."""

MOST = 0.5
"""`much of`, `most`: more than half."""

MANY_MAPS = 0.25
"""`many`: at least a quarter."""

SMALL_RATIO = 0.05
"""The paper's own threshold on β/α."""

SHARE, NUMBER = "z.0%", "z.3g"
"""How a quantity is written that is not the difference between two blocks."""

SIX = ("pre-ln", "parallel", "v-skipinit", "sas", "sas-p", "sas-p-nonorm")


def paper_parameters(name: str, block: str) -> int:
    """Trainable parameters with a block in a recipe of the paper."""
    return sum(count_parameters(recipe(name, block).model).values())


def decoders(*blocks: str) -> Callable[[Scale], Configs]:
    """Runs of the decoder with each block."""
    return lambda scale: {block: scale.decoder(block) for block in blocks}


def losses(key: str, title: str, first_axis: str = "steps") -> Callable[[Scale, Evidence], list[Plot]]:
    """The plot of held-out losses, and that of the training losses."""

    def plots(scale: Scale, evidence: Evidence) -> list[Plot]:
        label = "training loss (nats per token)"
        train = loss_plot(evidence, f"{key}-train", title, first_axis, measure="loss", label=label)
        return [loss_plot(evidence, key, title, first_axis), train]

    return plots


def matches(first: str, second: str, paper: str, how: str = "per step") -> Claim:
    """The claim that two losses are at most `MATCH` apart, on either side."""
    text = f"{first} matches {second} {how}"
    return compare(text, paper, first, second, above=-MATCH, below=MATCH, better="low")


def matches_or_beats(first: str, second: str, paper: str, how: str = "per step") -> Claim:
    """The claim that one block's loss is at most `MATCH` above another's."""
    return compare(f"{first} matches or beats {second} {how}", paper, first, second, below=MATCH)


def matches_in_time(first: str, second: str, paper: str) -> Claim:
    """The claim that at equal run time two losses are at most `MATCH` apart, on either side."""
    text = f"{first} matches {second} in run time"
    return at_equal_time(text, paper, first, second, above=-MATCH, below=MATCH, better="low")


def beats(first: str, second: str, paper: str) -> Claim:
    """The claim that one loss is below another."""
    return compare(f"{first} ends lower than {second}", paper, first, second, below=0)


def slightly_beats(first: str, second: str, paper: str, most: float = SLIGHT) -> Claim:
    """The claim that one loss is below another, but not by much."""
    text = f"{first} ends lower than {second}, by less than {most:.0%}"
    return compare(text, paper, first, second, above=-most, below=0, better="low")


def slightly_behind(first: str, second: str, paper: str) -> Claim:
    """The claim that one loss is above another, but not by much."""
    text = f"{first} is slightly behind {second}"
    return compare(text, paper, first, second, above=0, below=SLIGHT, better="low")


def clearly_behind(first: str, second: str, paper: str, by: float = MATCH) -> Claim:
    """The claim that one loss is above another by more than a match."""
    return compare(f"{first} is clearly behind {second}", paper, first, second, above=by)
