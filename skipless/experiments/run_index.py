"""Runs found by their configuration, and how far they are."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skipless.config.reading import check_regular
from skipless.config.run import RunConfig
from skipless.errors import UserError
from skipless.experiments.report.summary import is_finished
from skipless.experiments.timings import NO_TIMINGS, Timings
from skipless.recipes.variants import block_name
from skipless.runs import Run, is_measurement
from skipless.storage.atomic_files import STAGING_PREFIX
from skipless.storage.json_files import parse_line
from skipless.storage.lock import FolderLock, InUse

TAIL_BYTES = 2**18
"""Enough of the end of metrics.jsonl to hold its last lines."""


def with_seed(cfg: RunConfig, seed: int) -> RunConfig:
    """The configuration with a seed."""
    return cfg.override({"train.seed": seed})


def run_key(cfg: RunConfig) -> str:
    """The hash by which a run is found. The model's vocabulary is left out of it: the tokeniser decides on that."""
    return cfg.override({"model.vocab_size": cfg.data.vocab_size}).digest


def run_name(cfg: RunConfig) -> str:
    """The name of the folder in which a configuration is trained."""
    return f"{block_name(cfg.model.block)}-s{cfg.train.seed}-{run_key(cfg)}"


class RunIndex:
    """The runs in a folder by their configuration; where it has none that is finished, those of another folder.

    New runs go into the first.
    """

    def __init__(self, folder: Path, other: Path | None = None) -> None:
        self.folder = folder
        places = [place for place in (folder, other) if place]
        self.timings = next((found for found in map(Timings.read, places) if found.seconds), NO_TIMINGS)
        self.known: dict[str, Run] = {}
        for path in [path for place in places for path in sorted(place.glob("*/config.json"))]:
            run = Run(path.parent)
            if run.name.startswith(STAGING_PREFIX):
                continue  # what a killed process had not finished writing
            try:
                key = run_key(run.config())
            except UserError:
                if run.archived_metrics_file.exists():  # a published run must stay readable
                    raise
                continue  # of another version, or not ours
            if key not in self.known or not completion(self.known[key]).finished:
                self.known[key] = run

    def find(self, cfg: RunConfig) -> Run:
        """The run with this configuration, or the one that it would be."""
        return self.known.get(run_key(cfg)) or Run(self.folder / run_name(cfg))


@dataclass(frozen=True)
class Completion:
    """How far a run is."""

    finished: bool
    share: float
    """Of the budget."""


def completion(run: Run) -> Completion:
    """How far a run is, from the end of its metrics.

    It is finished if the last held-out loss is there and, unless it is archived, the last checkpoint.
    """
    if not run.exists:
        return Completion(finished=False, share=0.0)
    train, last, evaluated = run.config().train, {}, {}
    for record in _last_records(run.metrics_file) or run.metrics():
        last = record
        if record.get("valid_loss") is not None:
            evaluated = record
    if not last:
        return Completion(finished=False, share=0.0)
    checkpoints = run.checkpoints()
    steps = [int(path.name.split("-")[-1]) for path in checkpoints.all()]
    saved = not checkpoints.folder.exists() or last["step"] in steps
    if train.minutes is not None:
        share = last["seconds"] / (60 * train.minutes)
    else:
        share = last["tokens"] / train.tokens if train.tokens else last["step"] / (train.steps or 1)
    return Completion(bool(evaluated) and is_finished(train, evaluated) and saved, min(share, 1.0))


def tidy(run: Run) -> None:
    """Remove what a process that was killed left in a run that is finished, and so is not opened again.

    A process that is at work there does so itself; a folder that can only be read stays as it is.
    """
    if run.leftovers():
        with suppress(InUse, OSError), FolderLock(run.folder):
            run.sweep()


def _last_records(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    check_regular(path)
    with path.open("rb") as file:
        start = max(file.seek(0, os.SEEK_END) - TAIL_BYTES, 0)
        file.seek(start)
        lines = file.read().split(b"\n")
    records = [parse_line(line) for line in lines[1 if start else 0 : -1]]
    good = [record for record in records if record is not None and is_measurement(record)]
    return good if len(good) == len(records) else []  # else the whole file is read, which names the bad row
