"""A run is a folder; everything that reports reads it and nothing else.

runs/<name>/
    config.json          the configuration, the versions, the data and the machine
    metrics.jsonl        one object a line: step, tokens, seconds, and what was measured
    samples.jsonl        text sampled on the way
    tokenizer.json
    checkpoints/step-<n>/
    .saved               there once a checkpoint was made, so that their loss is noticed
    tensorboard/

The folder of a fine-tuned classifier is like it, with classifier.json in the place of config.json.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from skipless.config.explain import explain
from skipless.config.plugins import missing_plugins
from skipless.config.reading import read_json
from skipless.config.run import RunConfig
from skipless.data import Tokenizer
from skipless.errors import UserError, did_you_mean
from skipless.storage.atomic_files import leftovers, sweep
from skipless.storage.checkpoint_format import Checkpoint
from skipless.storage.checkpoints import Checkpoints
from skipless.storage.json_files import are_numbers, read_json_lines
from skipless.storage.save_group import SaveGroup

CLASSIFIER = "classifier.json"


def is_classifier(folder: Path) -> bool:
    """Whether a folder holds a classifier that `skipless finetune` made."""
    return (folder / CLASSIFIER).exists()


class _Data(BaseModel):
    fingerprint: str | None = None
    train_tokens: int = 0


class _About(BaseModel):
    """What config.json says beside the configuration, for those who read it without a look; more may stand in it."""

    command: list[str] | None = None
    versions: dict[str, Any] = {}
    machine: dict[str, Any] = {}
    data: _Data = _Data()
    plugins: list[dict[str, Any]] = []


@dataclass(frozen=True)
class Run:
    """The files of a run."""

    folder: Path

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.name

    @property
    def config_file(self) -> Path:
        """What the run is."""
        return self.folder / "config.json"

    @property
    def metrics_file(self) -> Path:
        """What was measured."""
        return self.folder / "metrics.jsonl"

    @property
    def archived_metrics_file(self) -> Path:
        """The same, compressed, in the archive of published runs."""
        return self.folder / "metrics.jsonl.gz"

    @property
    def samples_file(self) -> Path:
        """What it wrote."""
        return self.folder / "samples.jsonl"

    @property
    def tokenizer_file(self) -> Path:
        """How its text becomes tokens."""
        return self.folder / "tokenizer.json"

    @property
    def saved_file(self) -> Path:
        """There once a checkpoint was made."""
        return self.folder / ".saved"

    def checkpoints(self, keep_last: int = 2, save_group: SaveGroup | None = None) -> Checkpoints:
        """Its checkpoints; the ranks of a `save_group` save them together."""
        folder = self.folder / "checkpoints"
        return Checkpoints(folder, keep_last=keep_last, save_group=save_group, note=self.saved_file)

    @property
    def exists(self) -> bool:
        """Whether a training has begun here."""
        return self.config_file.exists()

    @property
    def has_files(self) -> bool:
        """Whether there is anything that another training would write over, be it that config.json was lost."""
        written = (path for path in (self.metrics_file, self.samples_file) if path.exists())
        return self.exists or bool(self.checkpoints().all()) or any(path.stat().st_size for path in written)

    def leftovers(self) -> list[Path]:
        """What a process that was killed left half-written or half-removed, or one is writing at this instant."""
        return [*leftovers(self.folder, *self._replaced), *self.checkpoints().leftovers()]

    def sweep(self) -> None:
        """Remove what was left. Only for the process that has the folder's lock."""
        sweep(self.folder, *self._replaced)
        self.checkpoints().sweep()

    @property
    def _replaced(self) -> list[str]:
        """The names of the files that a training puts there in one step."""
        return [path.name for path in (self.config_file, self.tokenizer_file, self.saved_file)]

    def info(self) -> dict[str, Any]:
        """The content of config.json."""
        if not self.exists:
            raise UserError(f"{str(self.folder)!r} is not a run: there is no {self.config_file.name}")
        info = read_json(self.config_file)
        try:
            _About.model_validate(info)
        except ValidationError as error:
            raise UserError(f"{str(self.config_file)!r}: {explain(error)}") from None
        return info

    def config(self) -> RunConfig:
        """The configuration it runs with."""
        info = self.info()
        try:
            return RunConfig.model_validate(info.get("config"))
        except ValidationError as error:
            raise UserError(f"{str(self.config_file)!r}: {explain(error)}{missing_plugins(info)}") from None

    def metrics(self) -> Iterator[dict[str, Any]]:
        """Its measurements; a last line that is still being written is left out, as is what is no measurement."""
        live = self.metrics_file.exists() or not self.archived_metrics_file.exists()
        return read_json_lines(self.metrics_file if live else self.archived_metrics_file, is_measurement)

    def samples(self) -> Iterator[dict[str, Any]]:
        """Its samples."""
        return read_json_lines(self.samples_file, _is_sample)

    def tokenizer(self) -> Tokenizer:
        """Its tokeniser."""
        return Tokenizer.load(self.tokenizer_file)


def is_measurement(record: dict[str, Any]) -> bool:
    """Whether this can be a line of metrics: numbers, with those that every line has."""
    counted = all(isinstance(record.get(key), int | float) for key in ("step", "tokens", "seconds"))
    return counted and are_numbers(record)


def _is_sample(record: dict[str, Any]) -> bool:
    return isinstance(record.get("step"), int) and isinstance(record.get("text"), str)


def find_run(path: Path | str, runs: Path | str = "runs") -> Run:
    """The run at a path, or by its name below the folder `runs`."""
    given = Path(path)
    for folder in (given, Path(runs) / given):
        if (folder / "config.json").exists():
            return Run(folder)
    known = sorted(folder.parent.name for folder in Path(runs).glob("*/config.json"))
    listed = f"; runs in {str(runs)!r}: {', '.join(known[:8])}{did_you_mean(given.name, known)}" if known else ""
    raise UserError(f"there is no run at {str(path)!r}{listed}")


def choose_checkpoint(run: Run, checkpoint: int | str) -> Checkpoint:
    """A run's `last` or `best` checkpoint, or that of a step."""
    if not is_classifier(run.folder):
        run.info()  # where that is damaged, it is the first thing to say
    checkpoints = run.checkpoints()
    if checkpoint == "best":
        valid = [Checkpoints.load(path) for path in checkpoints.all() if Checkpoints.verify(path) is None]
        scored = [one for one in valid if one.score is not None]
        if scored:
            return min(scored, key=lambda one: (one.score, one.step))
    elif checkpoint != "last":
        return _checkpoint_of_step(run, checkpoint)
    found, damaged = checkpoints.latest_valid()
    if found is None:
        reasons = "; ".join(f"{path.name}: {reason}" for path, reason in damaged) or "it has none yet"
        raise UserError(f"run {run.name!r} has no valid checkpoint ({reasons})")
    return found


def _checkpoint_of_step(run: Run, step: int | str) -> Checkpoint:
    there = {str(int(path.name.rpartition("-")[2])): path for path in run.checkpoints().all()}
    known = f"run {run.name!r} has {', '.join(there) or 'none yet'}"
    if not (str(step).isascii() and str(step).isdigit()):
        raise UserError(f"a checkpoint is last, best or the number of a step, got {step!r}; {known}")
    number = str(step).lstrip("0") or "0"  # as text: a number of thousands of digits is no int
    if number not in there:
        raise UserError(f"there is no checkpoint of step {number}; {known}")
    return Checkpoints.load(there[number])
