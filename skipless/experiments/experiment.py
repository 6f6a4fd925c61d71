"""An experiment: which runs, which claims, which plots. `EXPERIMENTS` has them by id, once `catalogue` is imported."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skipless.config.run import RunConfig
from skipless.experiments.claims import Claim
from skipless.experiments.evidence import Evidence, History
from skipless.experiments.outcome import Finding, Plot
from skipless.experiments.report.summary import different_data
from skipless.experiments.run_index import RunIndex, with_seed
from skipless.experiments.scale import Scale

MANY = 16
"""More seeds than anybody trains."""

Configs = dict[str, RunConfig]


@dataclass(frozen=True)
class Experiment:
    """A figure or table of the paper, or a check of our own."""

    id: str
    title: str
    paper: str
    """What the paper found; for a check of our own, what is asked."""
    configs: Callable[[Scale], Configs]
    """The labelled runs at a scale; a seed is added to each by whoever runs them."""
    claims: Callable[[Scale], Sequence[Claim]]
    plots: Callable[[Scale, Evidence], Sequence[Plot]]
    on_glue: bool = False
    """Whether its models are fine-tuned as well."""
    most_seeds: Callable[[Scale, str], int] = lambda scale, label: MANY
    """How many seeds of a label are trained at most: a grid of rates needs one."""
    own: bool = False
    """Whether it is a check of ours rather than the paper's."""
    low_bits: bool = False
    """Whether its models are rounded to low bits and measured again."""

    def runs(self, scale: Scale, seeds: int) -> Iterator[tuple[str, int, RunConfig]]:
        """Label, seed and configuration of every run, the first seed of all labels before the second."""
        configs = self.configs(scale)
        for seed in range(seeds):
            for label, cfg in configs.items():
                if seed < self.most_seeds(scale, label):
                    yield label, seed, with_seed(cfg, seed)


EXPERIMENTS: dict[str, Experiment] = {}
"""By id, as they register; `catalogue.EXPERIMENTS` has them in the paper's order."""


def experiment(
    id: str,
    title: str,
    paper: str,
    configs: Callable[[Scale], Configs],
    plots: Callable[[Scale, Evidence], list[Plot]],
    **more: Any,
) -> Callable[[Callable[[Scale], list[Claim]]], Callable[[Scale], list[Claim]]]:
    """Register the function that states the claims of an experiment."""

    def register(claims: Callable[[Scale], list[Claim]]) -> Callable[[Scale], list[Claim]]:
        EXPERIMENTS[id] = Experiment(id, title, paper, configs, claims, plots, **more)
        return claims

    return register


def find(name: str, scale: str, folder: Path) -> Finding:
    """What the runs in a folder say of an experiment, with as many seeds as there are."""
    where, index = Scale(scale), RunIndex(folder)
    found = [seed for _, seed, cfg in EXPERIMENTS[name].runs(where, MANY) if index.find(cfg).exists]
    seeds = max(found, default=-1) + 1
    again = f"skipless reproduce {name} --scale {scale} --seeds {max(seeds, 1)}"
    return judge(EXPERIMENTS[name], where, seeds, index, again)


def judge(experiment: Experiment, scale: Scale, seeds: int, index: RunIndex, command: str) -> Finding:
    """What the runs of some seeds say of an experiment."""
    histories: dict[str, dict[int, History]] = {}
    for label, seed, cfg in experiment.runs(scale, seeds):
        run = index.find(cfg)
        if run.exists:
            histories.setdefault(label, {})[seed] = History.read(run)
    evidence = Evidence.timed(histories, index.timings)
    return Finding(
        id=experiment.id,
        title=experiment.title,
        paper=experiment.paper,
        scale=scale.name,
        seeds=tuple(sorted({seed for label in histories for seed in evidence.finished(label)})),
        command=command,
        verdicts=tuple(claim.judge(evidence) for claim in experiment.claims(scale)),
        plots=tuple(plot for plot in experiment.plots(scale, evidence) if plot.series),
        runs=evidence.runs(),
        own=experiment.own,
        warnings=different_data(evidence.runs()),
    )
