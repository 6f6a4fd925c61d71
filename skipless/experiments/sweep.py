"""Sweeps: any key of the configuration over a grid or a range, for several blocks, by any number of workers.

<folder>/
    journal.log          Optuna's storage: a study for each block, a trial for each point
    claims/              a lock for each trial that is being worked on
    best.json            the best values: recipe → block → key → value, which recipes read
    sweep.png

A trial is an ordinary run, found by its configuration, so a sweep and the experiments share runs. Optuna's journal
knows which trials are running, but not whether their workers live. So a worker holds a lock for its trial, which the
system frees when it dies, and trials are handed out under one lock for the whole folder: a trial that is running and
whose lock is free has been left behind, and whoever asks next takes it over.
"""

import itertools
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skipless.analysis.plotting import MARKS, group_colours, pyplot, save_figure
from skipless.config.reading import read_bytes
from skipless.config.run import RunConfig
from skipless.errors import MissingExtra, UserError, first_line
from skipless.experiments.evidence import History
from skipless.experiments.run_index import RunIndex, completion, run_key, tidy
from skipless.experiments.sweep_axes import Axis
from skipless.recipes import recipe
from skipless.storage.atomic_files import make_folder, write_json
from skipless.storage.hashing import hash_text
from skipless.storage.lock import FolderLock, InUse, is_locked
from skipless.training.observer import Observer
from skipless.training.stopping import NonFinite
from skipless.training.train import train
from skipless.training.trainer import Trainer

WAIT = 0.5
"""Seconds between two looks at what other workers are doing."""

PRUNE_AFTER = 0.25
"""Share of the budget before which no trial is given up."""


class Pruned(Exception):
    """A trial was given up."""


@dataclass(frozen=True)
class Point:
    """A trial and what came of it."""

    block: str
    values: Mapping[str, Any]
    state: str
    """complete, pruned, fail, running."""
    loss: float | None
    run: str | None
    reason: str | None = None


@dataclass
class Sweep:
    """A worker of a sweep. Several on one folder share its points."""

    folder: Path
    runs: Path
    recipe: str
    blocks: Sequence[str]
    axes: Sequence[Axis]
    trials: int | None = None
    """Trials of each block, where an axis is a range."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    prune: bool = False
    cache_dir: Path | None = None
    observer: Observer = field(default_factory=Observer)
    message: Callable[[str], None] = lambda text: None

    def __post_init__(self) -> None:
        if self.grid == (self.trials is not None):
            what = "a grid has as many trials as points" if self.grid else "a range needs a number of trials"
            raise UserError(f"{what}: give --trials if, and only if, some --over is a range")
        keys = [axis.key for axis in self.axes]
        if len(set(keys)) < len(keys):
            raise UserError("each key can be swept once")
        for block, point in itertools.product(self.blocks, self.points()):  # a mistake should show before anything runs
            self.config(block, point)
        self.studies = self._open()

    @property
    def grid(self) -> bool:
        """Whether every axis is a list of values."""
        return all(axis.kind == "grid" for axis in self.axes)

    def points(self) -> list[dict[str, Any]]:
        """The points of a grid; of ranges, their lowest corner."""
        values = [axis.values or (axis.low,) for axis in self.axes]
        return [dict(zip((axis.key for axis in self.axes), row, strict=True)) for row in itertools.product(*values)]

    def config(self, block: str, values: Mapping[str, Any]) -> RunConfig:
        """What is trained at a point."""
        return recipe(self.recipe, block).override({**self.changes, **values})

    # ------------------------------------------------------------------------- storage

    def _open(self) -> dict[str, Any]:
        make_folder(self.folder)
        path = self.folder / "journal.log"
        with self._waiting_lock("hand-out"), _damage_reported(path):
            return self._open_studies(path)

    def _open_studies(self, path: Path) -> dict[str, Any]:
        optuna = import_optuna()
        backend = optuna.storages.journal.JournalFileBackend(str(path), lock_obj=self._waiting_lock(path.name))
        storage, pruner = optuna.storages.JournalStorage(backend), optuna.pruners.MedianPruner(n_startup_trials=2)
        studies = {}
        for block in self.blocks:
            name = f"{self.recipe} {block}"
            study = optuna.create_study(storage=storage, study_name=name, load_if_exists=True, pruner=pruner)
            self._check_same(study, block)
            studies[block] = study
        return studies

    def _check_same(self, study: Any, block: str) -> None:
        """Losses of different settings cannot be compared, so a study has one."""
        swept = {axis.key for axis in self.axes}
        fixed = self.config(block, self.points()[0]).override(self._defaults(block, swept))
        base = " ".join([run_key(fixed), *sorted(swept)])
        known = study.user_attrs.setdefault("base", base)
        study.set_user_attr("base", known)
        if known != base:
            raise UserError(f"{self.folder} holds a sweep with other settings or other keys; choose another --output")

    def _defaults(self, block: str, keys: set[str]) -> dict[str, Any]:
        tree: Any = recipe(self.recipe, block).model_dump()

        def value_at(path: str) -> Any:
            value = tree
            for part in path.split("."):
                value = value[part]
            return value

        return {key: value_at(key) for key in keys}

    def _waiting_lock(self, what: str) -> FolderLock:
        """A lock of something in this folder, for which a worker waits.

        Optuna's own locks are files that a killed worker leaves behind, to be taken for dead after half a minute.
        """
        return FolderLock(self.folder, file=self.folder / f".{what}.lock", on_wait=lambda: None)

    # ------------------------------------------------------------------------ handing out

    def _claim(self) -> "tuple[str, Any, FolderLock] | None":
        """A trial that nobody is working on: one that was left behind, or a new one."""
        with self._waiting_lock("hand-out"):
            for block, study in self.studies.items():
                trial = self._abandoned(block, study) or self._new(study)
                if trial is not None:
                    lock = FolderLock(self._claim_folder(block, trial.number))
                    lock.acquire()
                    for axis in self.axes:
                        axis.suggest(trial)
                    return block, trial, lock
        return None

    def _claim_folder(self, block: str, number: int) -> Path:
        name = hash_text(block)[:8]
        return self.folder / "claims" / f"{name}-{number}"

    def _abandoned(self, block: str, study: Any) -> Any:
        optuna = import_optuna()
        for trial in study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,)):
            if not is_locked(self._claim_folder(block, trial.number)):
                self.message(f"{block}: takes over trial {trial.number}, which was left behind")
                return optuna.trial.Trial(study, trial._trial_id)
        return None

    def _new(self, study: Any) -> Any:
        optuna = import_optuna()
        trials = study.get_trials(deepcopy=False)
        waiting = any(trial.state == optuna.trial.TrialState.WAITING for trial in trials)
        if self.grid:
            known = [_values(trial) for trial in trials]
            missing = [point for point in self.points() if point not in known]
            if missing and not waiting:
                study.enqueue_trial(missing[0])
            return study.ask() if missing or waiting else None
        if len(trials) >= (self.trials or 0) and not waiting:
            return None
        # a sampler of its own for each trial: what it draws follows from what is known, whoever asks
        study.sampler = _sampler(len(trials))
        return study.ask()

    def _busy(self) -> bool:
        running = import_optuna().trial.TrialState.RUNNING
        return any(study.get_trials(deepcopy=False, states=(running,)) for study in self.studies.values())

    # ----------------------------------------------------------------------------- working

    def work(self) -> None:
        """Do points until none is left; wait for those that other workers have, for they may be left behind."""
        told = False
        while True:
            claimed = self._claim()
            if claimed is not None:
                block, trial, lock = claimed
                try:
                    self._do(block, trial)
                finally:
                    lock.release()
            elif self._busy():
                if not told:
                    self.message("the other points are with other workers; waiting for them")
                told = True
                time.sleep(WAIT)
            else:
                return

    def _do(self, block: str, trial: Any) -> None:
        optuna, study = import_optuna(), self.studies[block]
        cfg = self.config(block, self._restored(trial.params))
        run = RunIndex(self.runs).find(cfg)
        trial.set_user_attr("run", run.name)
        told = ", ".join(
            f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
            for key, value in trial.params.items()
        )
        self.message(f"{block}: trial {trial.number}: {told}: {run.name}")
        try:
            self._train(cfg, run.folder, trial)
        except NonFinite as error:
            trial.set_user_attr("reason", str(error))
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            self.message(f"{block}: trial {trial.number} failed: {error}")
        except Pruned:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            self.message(f"{block}: trial {trial.number} is given up")
        else:
            loss = History.read(run).tuning_loss
            study.tell(trial, loss)
            self.message(f"{block}: trial {trial.number}: tuning loss {loss:.4f}")

    def _train(self, cfg: RunConfig, folder: Path, trial: Any) -> None:
        """Train the run of a trial, unless it is finished; if an experiment is at it, wait."""
        watcher = Reporter(self.observer, trial, self.prune)
        while True:
            run = RunIndex(self.runs).find(cfg)
            if completion(run).finished:
                tidy(run)
                return
            try:
                train(cfg, folder, resume=True, trackers=[], observer=watcher, cache_dir=self.cache_dir)
            except InUse:
                time.sleep(WAIT)

    def _restored(self, params: Mapping[str, Any]) -> dict[str, Any]:
        axes = {axis.key: axis for axis in self.axes}
        return {key: axes[key].restore(value) if key in axes else value for key, value in params.items()}

    # ----------------------------------------------------------------------------- results

    def results(self) -> list[Point]:
        """Every trial so far."""
        return [
            Point(
                block,
                self._restored(_values(trial)),
                trial.state.name.lower(),
                trial.value,
                trial.user_attrs.get("run"),
                trial.user_attrs.get("reason"),
            )
            for block, study in self.studies.items()
            for trial in study.get_trials(deepcopy=False)
        ]

    def best(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Recipe → block → key → value, as recipes read it; of each block's finished trial with the lowest loss."""
        done = [point for point in self.results() if point.state == "complete"]
        falling = sorted(done, key=lambda point: -(point.loss or 0.0))  # a block's last entry, the lowest, stays
        return {self.recipe: {point.block: dict(point.values) for point in falling}}

    def write_best(self) -> Path:
        """Write `best.json`."""
        path = self.folder / "best.json"
        write_json(path, self.best())
        return path


class Reporter(Observer):
    """Passes on what happens, reports losses to a trial, and stops it where pruning was asked for."""

    def __init__(self, view: Observer, trial: Any, prune: bool) -> None:
        self.view, self.trial, self.prune = view, trial, prune
        self.reported = set(trial.study.get_trials(deepcopy=False)[trial.number].intermediate_values)

    def message(self, text: str) -> None:
        """Something that a person should know."""
        self.view.message(text)

    def data(self, stage: str, done: int, total: int | None) -> None:
        """A stage of preparing the data."""
        self.view.data(stage, done, total)

    def begin(self, trainer: Trainer) -> None:
        """Training starts, or goes on."""
        self.trainer = trainer
        self.view.begin(trainer)

    def log(self, record: dict[str, Any]) -> None:
        """A line of metrics."""
        self.view.log(record)
        if record.get("valid_loss") is None:
            return
        if record["step"] not in self.reported:
            self.reported.add(record["step"])
            self.trial.report(record.get("tuning_loss", record["valid_loss"]), record["step"])
        if self.prune and PRUNE_AFTER <= self.trainer.progress() < 1 and self.trial.should_prune():
            raise Pruned

    def end(self) -> None:
        """Training is over, for whatever reason."""
        self.view.end()


@contextmanager
def _damage_reported(path: Path) -> Iterator[None]:
    """A UserError where a journal does not tell of trials: Optuna replays it, and fails at whatever does not fit."""
    try:
        if path.exists():
            read_bytes(path)  # Optuna would wait for a pipe
        yield
    except (UserError, OSError):
        raise
    except Exception as error:
        raise UserError(
            f"{str(path)!r} is damaged ({type(error).__name__}: {first_line(error)}); give another --output"
        ) from error


def _values(trial: Any) -> dict[str, Any]:
    """The values of a trial, also of one whose worker died before it had taken them."""
    return {**trial.system_attrs.get("fixed_params", {}), **trial.params}


def plot_sweep(points: Sequence[Point], key: str, path: Path) -> Path:
    """Final tuning loss over the values of a key, a line for each block through the best of each value."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(7, 4.5), layout="constrained")
    done = [point for point in points if point.state == "complete" and point.loss is not None]
    blocks = list(dict.fromkeys(point.block for point in points))
    values = [point.values[key] for point in done]
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    for position, (block, colour) in enumerate(group_colours(blocks).items()):
        mark = MARKS[position % len(MARKS)]
        own = [(p.values[key] if numeric else str(p.values[key]), p.loss or 0.0) for p in done if p.block == block]
        lowest = dict(sorted(sorted(own, key=lambda pair: pair[1], reverse=True), key=lambda pair: pair[0]))
        axis.plot([value for value, _ in own], [loss for _, loss in own], mark, color=colour, alpha=0.5)
        axis.plot(list(lowest), list(lowest.values()), color=colour, marker=mark, label=block)
    if numeric and values and min(values) > 0 and max(values) >= 4 * min(values):
        axis.set_xscale("log")
    axis.set(xlabel=key, ylabel="final loss on the tuning rows (nats per token)")
    axis.grid(alpha=0.3)
    if blocks:
        axis.legend()
    save_figure(figure, path)
    return path


def import_optuna() -> Any:
    """Optuna, with its own messages reduced to warnings."""
    try:
        import optuna
    except ImportError:
        raise MissingExtra("optuna", "sweep", "a sweep") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _sampler(seed: int) -> Any:
    optuna = import_optuna()
    with warnings.catch_warnings():  # that constant_liar, which keeps workers apart, may change some day
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.TPESampler(seed=seed, constant_liar=True)
