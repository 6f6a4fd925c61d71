"""User-defined blocks in the paper's experiments: each is trained wherever the reference is."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from skipless.config.run import RunConfig
from skipless.errors import UserError
from skipless.experiments.claims import Claim, compare
from skipless.experiments.experiment import Configs, Experiment
from skipless.experiments.papers.simplifying.bounds import MATCH
from skipless.experiments.scale import Scale

REFERENCE = "pre-ln"


@dataclass(frozen=True)
class Standing(Scale):
    """A scale that makes the runs of one block where those of the reference are asked for."""

    block: str = REFERENCE

    def run(self, kind: str, block: str, changes: Mapping[str, Any] | None = None) -> RunConfig:
        """A run of a kind; the reference's with another block in it."""
        if block != REFERENCE:
            return super().run(kind, block, changes)
        return Scale(self.name, self.rates, self.changes).run_like(kind, self.block, REFERENCE, changes)


def with_blocks(experiment: Experiment, blocks: list[str]) -> Experiment:
    """An experiment with more blocks, each wherever the reference is, and a check of each against it.

    A UserError where the reference is not in it.
    """

    def added(scale: Scale) -> dict[str, tuple[str, RunConfig]]:
        """Label → the reference's own label, and the run."""
        plain, found = experiment.configs(scale), {}
        for block in blocks:
            standing = experiment.configs(Standing(scale.name, scale.rates, scale.changes, block))
            for label, cfg in standing.items():
                if label in plain and cfg != plain[label] and REFERENCE in label:
                    found[label.replace(REFERENCE, block, 1)] = label, cfg
        return {label: pair for label, pair in found.items() if label not in plain}

    def configs(scale: Scale) -> Configs:
        return {**experiment.configs(scale), **{label: cfg for label, (_, cfg) in added(scale).items()}}

    def claims(scale: Scale) -> list[Claim]:
        checks = [
            compare(
                f"{label} matches {other} per step",
                f"at most {MATCH:.0%} apart",
                label,
                other,
                above=-MATCH,
                below=MATCH,
                better="low",
                own=True,
            )
            for label, (other, _) in added(scale).items()
        ]
        return [*experiment.claims(scale), *checks]

    return replace(experiment, configs=configs, claims=claims)


def beside(experiments: list[Experiment], blocks: list[str], scale: Scale) -> list[Experiment]:
    """Experiments with more blocks; a UserError where one has no place for them, or a block is not known."""
    if not blocks:
        return experiments
    for block in blocks:
        scale.run("decoder", block)
    more = [with_blocks(one, blocks) for one in experiments]
    for old, new in zip(experiments, more, strict=True):
        if len(new.configs(scale)) == len(old.configs(scale)):
            raise UserError(f"{old.id} does not train {REFERENCE}, so there is no place for a block beside it")
    return more
