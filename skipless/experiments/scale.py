"""The two scales at which experiments are run: a laptop's minutes, and the paper's own settings."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from skipless.config.run import RunConfig
from skipless.errors import unknown
from skipless.recipes import recipe
from skipless.recipes.rates import Rates, packaged_rates, tuned_exactly

SCALES: dict[str, dict[str, str]] = {
    "laptop": {
        "decoder": "study",
        "long": "study-long",
        "shallow": "study-shallow",
        "deep": "study-deep",
        "encoder": "crammed-bert-laptop",
        "books": "study-books",
    },
    "paper": {
        "decoder": "codeparrot",
        "long": "codeparrot-long",
        "shallow": "codeparrot-shallow",
        "deep": "codeparrot-deep",
        "encoder": "crammed-bert",
        "books": "languini",
    },
}
"""The recipe of each kind of run that the experiments need."""

BUDGETS = ("train.steps", "train.tokens", "train.minutes")
"""Keys of which a run has exactly one."""


@dataclass(frozen=True)
class Protocol:
    """How encoders are fine-tuned on GLUE."""

    tasks: str = "all"
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Keys of `FinetuneConfig` that are not as in the paper."""
    seeds: int = 3
    baselines: tuple[str, ...] = ()
    """Blocks of which a randomly initialised encoder is fine-tuned as well."""
    once: tuple[str, ...] = ()
    """Blocks that are fine-tuned with one seed, as no claim is about their scores."""
    more: tuple[tuple[str, int], ...] = ()
    """Tasks in which the baselines and what they are for have more seeds: those that claims are about."""


PROTOCOLS = {
    "laptop": Protocol(
        tasks="cola,sst2,mrpc,stsb,rte",
        changes={"rows": {"sst2": 1000}, "lr": 1e-3},
        baselines=("pre-ln", "sas", "sas-p"),
        once=("parallel", "v-skipinit", "sas-p-nonorm"),
        more=(("stsb", 3), ("sst2", 16)),
    ),
    "paper": Protocol(),
}
"""The protocol of each scale."""


@dataclass(frozen=True)
class Scale:
    """Makes the runs of an experiment."""

    name: str
    rates: Rates | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Dotted keys that are set in every run, whatever the recipe says."""

    def __post_init__(self) -> None:
        if self.name not in SCALES:
            raise unknown("scale", self.name, SCALES)

    @property
    def is_paper(self) -> bool:
        """Whether this is the paper's own scale."""
        return self.name == "paper"

    def run(self, kind: str, block: str, changes: Mapping[str, Any] | None = None) -> RunConfig:
        """A run of a kind with a block, and with keys changed by their dotted names."""
        cfg = recipe(SCALES[self.name][kind], block, self.rates)
        for changed in (changes or {}, self.changes):
            has_budget = any(budget in changed for budget in BUDGETS)
            cleared = dict.fromkeys(BUDGETS) if has_budget else {}  # an earlier budget, whichever that is
            cfg = cfg.override({**cleared, **changed})
        return cfg

    def rate_of(self, kind: str, block: str) -> str | None:
        """Where the learning rate of a block comes from, if it was tuned for just this block."""
        recipe_name = SCALES[self.name][kind]
        for rates, origin in ((self.rates or {}, "as given by --rates"), (packaged_rates(), "tuned for it")):
            if "train.lr" in tuned_exactly(rates, recipe_name, block):
                return origin
        return None

    def run_like(self, kind: str, block: str, reference: str, changes: Mapping[str, Any] | None = None) -> RunConfig:
        """A run of a block with the learning rate that was tuned for it, or else with that of a reference."""
        if block == reference or self.rate_of(kind, block):
            return self.run(kind, block, changes)
        rate = self.run(kind, reference, changes).train.lr
        return self.run(kind, block, {"train.lr": rate, **(changes or {})})

    def decoder(self, block: str, changes: Mapping[str, Any] | None = None) -> RunConfig:
        """The decoder that most experiments train."""
        return self.run("decoder", block, changes)
