"""The file of GLUE results: what is finished, with which settings; means and deviations over the seeds."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, FiniteFloat, StringConstraints, ValidationError

from skipless.config.base import differences
from skipless.config.explain import explain
from skipless.config.reading import read_json
from skipless.config.run import FinetuneConfig
from skipless.data.glue import COLUMNS
from skipless.data.labelled import Task
from skipless.errors import UserError
from skipless.storage.atomic_files import write_json
from skipless.storage.provenance import versions
from skipless.tasks.classifier_fit import ClassifierFit
from skipless.tasks.task_rows import TaskRows
from skipless.training.stopping import NonFinite

AVERAGE = "GLUE"
"""Column of the average, as the paper's table calls it."""


def variant(cfg: FinetuneConfig) -> str:
    """Name of the results: `glue`, with `-from-scratch` and `-head-only` where they apply."""
    return "glue" + "-from-scratch" * cfg.from_scratch + "-head-only" * cfg.head_only


def has_outcome(content: Mapping[str, Any], task: Task, seed: int) -> bool:
    """Whether results tell how a task with a seed ended, well or badly."""
    return any(str(seed) in content[kind].get(task.name, {}) for kind in ("fits", "failures"))


Seed = Annotated[str, StringConstraints(pattern=r"^\d{1,9}$")]


class _Column(BaseModel):
    seeds: dict[Seed, Annotated[dict[str, FiniteFloat], Field(min_length=1)]]
    score_mean: FiniteFloat | None = None
    score_sd: FiniteFloat | None = None


class _Rows(BaseModel):
    rows: int
    of: int
    sha256: str


class _Failure(BaseModel):
    message: str


class _Content(BaseModel):
    """What is read of a file of results; more may stand in it."""

    tasks: dict[str, _Column]
    data: dict[str, _Rows]
    fits: dict[str, dict[Seed, dict[str, Any]]]
    failures: dict[str, dict[Seed, _Failure]]
    mean: FiniteFloat | None
    sd: FiniteFloat | None


def read_results(path: Path) -> dict[str, Any]:
    """The content of a file of results; a UserError where it is none."""
    content = read_json(path)
    try:
        _Content.model_validate(content, strict=True)
    except ValidationError as error:
        raise UserError(f"{str(path)!r} does not hold results of a fine-tuning: {explain(error)}") from None
    return content


@dataclass
class Results:
    """The file of results: what is finished, with which settings."""

    path: Path
    content: dict[str, Any]

    @classmethod
    def open(cls, path: Path, cfg: FinetuneConfig, encoder: str, *, fresh: bool) -> "Results":
        """The results so far; a UserError where they were made with other settings."""
        new = {
            "settings": {"finetune": cfg.model_dump(mode="json"), "encoder": encoder},
            "versions": versions(),
        }
        results = cls(path, {"tasks": {}, "data": {}, "fits": {}, "failures": {}, **new})
        if not path.exists() or fresh:
            return results
        try:
            old = read_results(path)
            changed = differences(FinetuneConfig.model_validate(old["settings"]["finetune"]), cfg)
            trained = old["settings"]["encoder"]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path} does not hold results of a fine-tuning; begin again with --fresh") from None
        listed = [f"{key}: {before} → {after}" for key, (before, after) in changed.items()]
        if trained != encoder:
            listed.append("the encoder was trained further")
        if listed:
            raise UserError(
                f"{path} has results of another fine-tuning ({', '.join(listed)}); continue with that one, "
                "or add --fresh"
            )
        results.content |= {key: old[key] for key in ("tasks", "data", "fits", "failures")}
        return results

    def check_data(self, task: Task, train: TaskRows) -> None:
        """Note what a task is trained on with seed 0; a UserError where it was something else before."""
        data = {"rows": len(train.ids), "of": len(train.examples), "sha256": train.fingerprint}
        if self.content["data"].setdefault(task.name, data) != data:
            raise UserError(f"{self.path} has results of {task.name} on other rows or tokens; begin again with --fresh")

    def finished(self, task: Task, seed: int) -> bool:
        """Whether there is an outcome, good or bad."""
        return has_outcome(self.content, task, seed)

    def add(self, fit: ClassifierFit, scores: dict[str, dict[str, float]]) -> None:
        """Note the metrics of each column."""
        for column, metrics in scores.items():
            self.content["tasks"].setdefault(column, {"seeds": {}})["seeds"][str(fit.seed)] = metrics
        done = {"train_loss": fit.state.last_loss, "steps": fit.steps, "seconds": round(fit.state.seconds, 2)}
        self.content["fits"].setdefault(fit.task.name, {})[str(fit.seed)] = done
        self.write()

    def fail(self, fit: ClassifierFit, report: dict[str, Any]) -> None:
        """Note what went wrong."""
        self.content["failures"].setdefault(fit.task.name, {})[str(fit.seed)] = report
        self.write()

    def write(self) -> None:
        """Put the file in place, with means and deviations over the seeds."""
        write_json(self.path, summarise(self.content))


def summarise(content: dict[str, Any]) -> dict[str, Any]:
    """The results with mean and deviation of each column's score, and of the average, as the paper's table has them."""
    found = scores(content)
    averages = found.pop(AVERAGE)
    filled = {
        column: {"seeds": content["tasks"][column]["seeds"], **_spread("score_", list(of_seeds.values()))}
        for column, of_seeds in found.items()
    }
    return {**content, "tasks": filled, **_spread("", list(averages.values()))}


def scores(content: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Seed → score of each column, and of their average where nothing has failed.

    The average is over columns, so MNLI counts twice, as in the paper: its 78.9 for Pre-LN comes out only so. Seeds
    that lack a column are left out of it.
    """
    tasks = {column: content["tasks"][column]["seeds"] for column in COLUMNS if column in content["tasks"]}
    columns = {column: {seed: score(metrics) for seed, metrics in seeds.items()} for column, seeds in tasks.items()}
    complete = set.intersection(*map(set, columns.values())) if columns else set()
    if any(content["failures"].values()):
        complete = set()
    averages = {seed: statistics.fmean(of[seed] for of in columns.values()) for seed in sorted(complete, key=int)}
    return {AVERAGE: averages, **columns}


def raise_failures(content: Mapping[str, Any]) -> None:
    """Raise NonFinite if some tasks and seeds have failed."""
    failed = [report["message"] for of_seeds in content["failures"].values() for report in of_seeds.values()]
    if failed:
        what = f"{len(failed)} of the fine-tunings failed; the first: {failed[0]}"
        raise NonFinite(f"{what}; a smaller lr may help (--fresh --set lr=…, docs/notes/bert.md)")


def score(metrics: dict[str, float]) -> float:
    """100 times the mean of a task's metrics."""
    return 100 * statistics.fmean(metrics.values())


def _spread(prefix: str, values: list[float]) -> dict[str, float | None]:
    mean = statistics.fmean(values) if values else None
    return {f"{prefix}mean": mean, f"{prefix}sd": statistics.stdev(values) if len(values) > 1 else None}
