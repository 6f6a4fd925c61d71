"""Figure 7 and tables 1 and 2: crammed BERT, its speed, and GLUE."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from skipless.analysis.costs import count_parameters
from skipless.experiments.claims import Claim, compare, counted, faster
from skipless.experiments.evidence import Evidence, History
from skipless.experiments.experiment import MANY, Configs, experiment
from skipless.experiments.outcome import Plot, Verdict
from skipless.experiments.papers.simplifying.bounds import (
    MATCH,
    NUMBER,
    SIX,
    SLIGHT,
    clearly_behind,
    losses,
    matches,
    paper_parameters,
)
from skipless.experiments.report.series import bar_plot, bar_series
from skipless.experiments.scale import PROTOCOLS, Scale
from skipless.experiments.timings import PAPER_ENCODER
from skipless.tasks.glue_results import AVERAGE, scores, summarise

GLUE_MATCH = 1.5
"""Points of the average that still count as a match; in a single task 4."""


TWICE = ("pre-ln", "sas-p")
"""Blocks of which a laptop trains a second encoder; of the others one, however many seeds are asked for."""


def _encoders(*blocks: str) -> Callable[[Scale], Configs]:
    return lambda scale: {block: scale.run("encoder", block) for block in blocks}


def _most_encoders(scale: Scale, label: str) -> int:
    return MANY if scale.is_paper else 2 if label in TWICE else 1


@experiment(
    "fig7",
    "BERT: masked-language loss over run time and over steps",
    "The simplified blocks match Pre-LN within 24 hours on one GPU; V-SkipInit is clearly behind.",
    _encoders(*SIX),
    losses("fig7", "Masked language modelling", "minutes"),
    most_seeds=_most_encoders,
)
def _fig7(scale: Scale) -> list[Claim]:
    paper = (
        "“our simplified blocks (especially with normalisation) match the pre-training speed … within the 24 hour "
        "runtime”"
    )
    return [
        *(matches(block, "pre-ln", paper, "at the end of the training") for block in ("sas", "sas-p")),
        compare(
            "sas-p-nonorm is at most slightly behind pre-ln",
            paper,
            "sas-p-nonorm",
            "pre-ln",
            below=SLIGHT,
        ),
        clearly_behind("v-skipinit", "pre-ln", "“once again leads to a significant loss of training speed”"),
        *(() if scale.is_paper else (_no_longer(block) for block in ("sas", "sas-p"))),
    ]


def _no_longer(block: str) -> Claim:
    """The paper's encoders end after 24 hours, a laptop's after as many tokens: so these may not take more time."""
    claim = faster(block, "pre-ln", "(at equal numbers of tokens, a match in run time needs this)", "encoder")
    text = f"{block} takes no more time for a training token than pre-ln (encoder, to {MATCH:.0%})"
    return replace(claim, text=text, below=MATCH, own=True)


# ------------------------------------------------------------------------------------ GLUE


def parameters(history: History) -> float:
    """Trainable parameters."""
    return float(sum(count_parameters(history.config.model).values()))


def glue_scores(histories: Iterable[History]) -> dict[str, list[float]]:
    """Column, the average first → the score of every fine-tuning of every pre-training."""
    found: dict[str, list[float]] = {}
    for one in histories:
        for column, of_seeds in (scores(one.glue) if one.glue else {}).items():
            found.setdefault(column, []).extend(of_seeds.values())
    return {column: values for column, values in found.items() if values}


def _glue_plots(evidence: Evidence) -> list[Plot]:
    found = {block: evidence.finished(block).values() for block in evidence.histories}
    averages = {block: glue_scores(histories).get(AVERAGE, []) for block, histories in found.items()}
    sizes = {block: [parameters(one) for one in list(histories)[:1]] for block, histories in found.items()}
    timed = evidence.timings.seconds.get(PAPER_ENCODER, {})
    speeds = {
        block: [base / own for base, own in zip(timed["pre-ln"], values, strict=True)]
        for block, values in timed.items()
    }
    return [
        bar_plot("tab1-glue", "GLUE", "mean score (points)", averages),
        bar_plot("tab1-parameters", "Parameters", "trainable parameters", sizes),
        bar_plot("tab1-speed", f"Speed ({PAPER_ENCODER})", "training tokens in equal time, pre-ln = 1", speeds),
    ]


def _task_plots(scale: Scale, evidence: Evidence) -> list[Plot]:
    series = []
    for block in evidence.histories:
        found = list(evidence.finished(block).values())
        random = [replace(one, glue=one.scratch) for one in found]
        series += [
            replace(bar_series(name, "column", glue_scores(histories)), group=block)
            for name, histories in ((block, found), (f"{block}, from scratch", random))
        ]
    drawn = tuple(one for one in series if one.y)
    return [Plot("tab2", "GLUE by task", "score (points)", {"column": ""}, drawn, kind="bars")]


def was_fine_tuned(history: History) -> bool:
    """Whether there is an average over tasks."""
    return history.glue is not None and history.glue["mean"] is not None


@dataclass(frozen=True)
class GlueClaim(Claim):
    """A claim on scores of fine-tuned models: runs that were not fine-tuned are as good as missing."""

    counts: Callable[[History], bool] = was_fine_tuned
    """Whether a run has what the claim is about."""
    by_fine_tuning: bool = True
    """Whether the seeds are those of the fine-tuning where one pre-training is all that the blocks have in common."""
    column: str = AVERAGE
    """Whose seeds of fine-tuning those are: a task of its own may have more of them."""

    def judge(self, evidence: Evidence) -> Verdict:
        """The verdict on the seeds for which every label counts."""
        tuned = {
            label: {seed: one for seed, one in evidence.finished(label).items() if self.counts(one)}
            for label in self.labels
        }
        missing = [label for label, histories in tuned.items() if evidence.finished(label) and not histories]
        if missing:
            what = f"not all of the fine-tunings of {', '.join(missing)} are there; --glue-dir DIR makes them"
            return self.undecided(what)
        columns = {label: {key for one in of.values() for key in _columns(one)} for label, of in tuned.items()}
        every = set[str]().union(*columns.values())
        partial = [label for label, its in columns.items() if its != every]
        if self.column == AVERAGE and partial:  # an average over fewer tasks is another average
            what = f"{', '.join(partial)} is not fine-tuned on all of {', '.join(sorted(every))} yet"
            return self.undecided(what)
        common = set.intersection(*(set(histories) for histories in tuned.values()))
        if not self.by_fine_tuning or len(common) != 1:
            return super().judge(Evidence(tuned))
        (seed,) = common
        fine = {label: self._fine_tunings(histories[seed]) for label, histories in tuned.items()}
        return Claim.judge(replace(self, seed="fine-tuning seed"), Evidence(fine))

    def _fine_tunings(self, history: History) -> dict[int, History]:
        """The history with the scores of each seed of its fine-tuning alone, and with its random encoder's of that."""
        assert history.glue is not None
        seeds = {
            int(seed): replace(history, glue=_of_seed(history.glue, seed), scratch=_of_seed(history.scratch, seed))
            for seed in scores(history.glue)[self.column]
        }
        return {seed: one for seed, one in seeds.items() if self.counts(one)}


def _columns(history: History) -> Iterable[str]:
    """The columns of GLUE that a fine-tuning has so far."""
    return history.glue["tasks"] if history.glue else ()


def _of_seed(glue: Mapping[str, Any] | None, seed: str) -> Mapping[str, Any] | None:
    """The scores of one seed, in the tasks that have it."""
    if glue is None:
        return None
    having = {column: one["seeds"] for column, one in glue["tasks"].items() if seed in one["seeds"]}
    return summarise({**glue, "tasks": {column: {"seeds": {seed: seeds[seed]}} for column, seeds in having.items()}})


def glue_mean(history: History) -> float:
    """The mean over tasks, in points."""
    assert history.glue is not None
    return history.glue["mean"]


def task_differences(own: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> dict[str, float]:
    """Column → how many points one fine-tuning is above another, where both have it."""
    mine, others = (glue["tasks"] if glue else {} for glue in (own, other))
    return {column: mine[column]["score_mean"] - others[column]["score_mean"] for column in mine if column in others}


def worst_task(first: str, second: str) -> Callable[[Mapping[str, History]], float]:
    """How many points the first model is above the second in the task where it is worst."""
    return lambda seed: min(task_differences(seed[first].glue, seed[second].glue).values())


HELPED = {"sst2": "SST-2", "stsb": "STS-B"}
"""Tasks that a small encoder learns from pre-training."""


def helps(block: str, column: str) -> GlueClaim:
    """That a pre-trained encoder is above a random one in a task."""

    def help_of(history: History) -> float | None:
        return task_differences(history.glue, history.scratch).get(column)

    return GlueClaim(
        f"pre-training helps {block} in {HELPED[column]} (points above a random encoder)",
        "(a check of the recipe)",
        (block,),
        lambda seed: help_of(seed[block]),  # pyrefly: ignore  (`counts` leaves out those that have none)
        above=0,
        one_seed=2.0,
        form=NUMBER,
        unit=" points",
        own=True,
        counts=lambda history: help_of(history) is not None,
        column=column,
    )


def _points(
    text: str, paper: str, block: str, measure: Callable[[Mapping[str, Any]], float], **bounds: Any
) -> GlueClaim:
    """A claim on how many points of GLUE a block is above Pre-LN."""

    def difference(seed: Mapping[str, History]) -> float:
        return measure(seed[block].glue or {}) - measure(seed["pre-ln"].glue or {})

    return GlueClaim(text, paper, (block, "pre-ln"), difference, form=NUMBER, unit=" points", **bounds)


def _average(glue: Mapping[str, Any]) -> float:
    return glue["mean"]


def _learnt(seed: Mapping[str, History]) -> float:
    """How many points a random encoder's average is below the pre-trained Pre-LN's; no number where it lacks a task."""
    glue, scratch = seed["pre-ln"].glue, seed["pre-ln"].scratch
    differences = task_differences(scratch, glue)
    return statistics.fmean(differences.values()) if glue and set(differences) == set(glue["tasks"]) else math.nan


@experiment(
    "tab1",
    "BERT: GLUE, parameters, speed",
    "GLUE mean, parameters, speed: Pre-LN 78.9±.7, 120M, 1.00; Parallel 78.5±.6, 120M, 1.05; V-SkipInit 78.0±.3, 120M, "
    "0.95; SAS 78.4±.8, 101M, 1.09; SAS-P 78.3±.4, 101M, 1.16; SAS-P without norms —, 101M, 1.20.",
    _encoders(*SIX),
    lambda scale, evidence: _glue_plots(evidence),
    on_glue=True,
    most_seeds=_most_encoders,
)
def _tab1(scale: Scale) -> list[Claim]:
    match = "“match the downstream performance of the Pre-LN baseline up to statistical significance over 3 seeds”"
    found = {
        "sas": f"{match} (78.4±.8 against 78.9±.7)",
        "sas-p": f"{match} (78.3±.4 against 78.9±.7)",
        "v-skipinit": "“largely able to recover from its poor pre-training in the fine-tuning phase” (78.0±.3)",
    }
    order = [*zip(("pre-ln", "parallel", "sas", "sas-p", "sas-p-nonorm"), SPEED_ORDER, strict=True)]
    return [
        *(
            _points(
                f"{block} matches pre-ln on GLUE",
                paper,
                block,
                _average,
                above=-GLUE_MATCH,
                below=GLUE_MATCH,
                better="high",
                one_seed=1.0,
                control=_learnt if PROTOCOLS[scale.name].baselines else None,
                show=glue_mean,
            )
            for block, paper in found.items()
        ),
        *(
            counted(
                f"{block} has at least 15% fewer parameters than pre-ln, in the paper's encoder",
                "“our models have around 15% fewer parameters” (101M against 120M)",
                (block, "pre-ln"),
                partial(paper_parameters, "crammed-bert"),
                above=-1,
                below=-0.15,
            )
            for block in ("sas", "sas-p")
        ),
        *(
            faster(first, second, f"speeds of {SPEEDS[first]} and {SPEEDS[second]}", PAPER_ENCODER)
            for first, second in order
        ),
    ]


SPEEDS = {"v-skipinit": 0.95, "pre-ln": 1.00, "parallel": 1.05, "sas": 1.09, "sas-p": 1.16, "sas-p-nonorm": 1.20}
"""Table 1."""

SPEED_ORDER = ("v-skipinit", "pre-ln", "parallel", "sas", "sas-p")
"""From the slowest on; each block is followed by the next faster one."""


@experiment(
    "tab2",
    "BERT: GLUE per task",
    "The simplified blocks are within 3 points of Pre-LN in every task (STS-B is their worst: 84.7 and 85.2 against "
    "87.6) and above it in SST-2, RTE and CoLA.",
    _encoders(*SIX),
    _task_plots,
    on_glue=True,
    most_seeds=_most_encoders,
)
def _tab2(scale: Scale) -> list[Claim]:
    papers = {"sas": "−2.9, in STS-B", "sas-p": "−2.4, in STS-B"}
    better = {
        "sst2": ("SST-2", "90.3 and 90.8 against 89.9"),
        "rte": ("RTE", "58.4 and 59.1 against 56.3"),
        "cola": ("CoLA", "50.6 and 50.5 against 49.4"),
    }
    worst = [
        GlueClaim(
            f"{block} is at most 4 points below pre-ln in its worst task",
            paper,
            (block, "pre-ln"),
            worst_task(block, "pre-ln"),
            above=-4,
            one_seed=2.0,
            form=NUMBER,
            unit=" points",
            by_fine_tuning=False,  # the worst of one seed alone would mostly be its worst luck
        )
        for block, paper in papers.items()
    ]
    above = [
        replace(
            _points(
                f"{block} is above pre-ln in {name}",
                f"{figures} (table of GLUE per task)",
                block,
                lambda glue, column=column: glue["tasks"][column]["score_mean"],
                above=0,
                one_seed=2.0,
            ),
            counts=lambda history, column=column: history.glue is not None and column in history.glue["tasks"],
            column=column,
        )
        for column, (name, figures) in better.items()
        for block in papers
    ]
    checks = [helps(block, column) for block in PROTOCOLS[scale.name].baselines for column in HELPED]
    return [*worst, *above, *checks]
