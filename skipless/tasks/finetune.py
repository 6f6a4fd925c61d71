"""Fine-tune a pre-trained encoder on GLUE: every task with one protocol, several seeds, resumable at any instant.

    runs/<name>/glue.json                      the results so far; written anew when a task and seed is finished
    runs/<name>/glue/predictions/seed-0/       answers to the test sets, as the leaderboard wants them
    runs/<name>/glue/cola-seed-0/              checkpoints of the one in training; removed when it is finished

The baselines have names of their own: `glue-head-only`, `glue-from-scratch`. What a step does follows from the seed,
the task and the step alone, with dropout drawn from a generator whose state is in the checkpoint; so a
fine-tuning that was interrupted ends like one that was not.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from skipless.config.run import FinetuneConfig
from skipless.data.glue import GlueTask, predictions, read_task
from skipless.data.labelled import Task, TaskData
from skipless.distributed.devices import pick_device
from skipless.errors import UserError
from skipless.nn.model import CausalLM, MaskedLM
from skipless.runs import Run, find_run, load
from skipless.storage.atomic_files import check_there, folder_lost, make_folder, remove_folder, sweep, write_text
from skipless.storage.checkpoints import Checkpoints
from skipless.storage.lock import FolderLock
from skipless.tasks.classifier_fit import ClassifierFit, Unstable
from skipless.tasks.glue_results import Results, score, summarise, variant
from skipless.tasks.metrics import METRICS
from skipless.tasks.task_rows import TaskRows
from skipless.training.observer import Observer, StopOnClosedPipe
from skipless.training.stopping import Interrupted, Signals


@dataclass
class GlueRunner:
    """Fine-tunes an encoder on all tasks with all seeds, one after another, and notes their results."""

    run: Run
    cfg: FinetuneConfig
    results: Results
    encoder: MaskedLM | None
    observer: Observer
    signals: Signals
    save_seconds: float
    device: torch.device

    def __post_init__(self) -> None:
        self.config, self.tokenizer = self.run.config(), self.run.tokenizer()
        self.length = min(self.cfg.seq_len, self.config.model.max_seq_len)
        self.folder = self.run.folder / variant(self.cfg)
        self.encoded: dict[tuple[str, int], TaskRows] = {}
        self.tokens = self.tokens_done = 0
        """Of all that this process trains, to tell how far it is."""
        self.seconds = 0.0

    def train(self, tasks: Sequence[TaskData], seeds: int) -> None:
        """Train and measure what is not finished yet."""
        for data in tasks:
            self.results.check_data(data.task, self._training_rows(data, 0))
        self.results.write()
        every = [(data, seed) for seed in range(seeds) for data in tasks]
        for data, seed in every:
            if self.results.finished(data.task, seed):
                self._remove_checkpoints(data.task, seed)
        missing = [(data, seed) for data, seed in every if not self.results.finished(data.task, seed)]
        self.tokens = sum(self.cfg.epochs * self._training_rows(data, seed).tokens for data, seed in missing)
        for data, seed in missing:
            self._fine_tune(data, self._training_rows(data, seed), seed)

    def _training_rows(self, data: TaskData, seed: int) -> TaskRows:
        """What a seed is trained on: all rows of the task, or as many as are wanted, which each seed draws anew."""
        limit = self.cfg.rows_of(data.task.name)
        key = (data.task.name, seed if limit is not None and limit < len(data.train) else 0)
        if key not in self.encoded:
            self.encoded[key] = TaskRows.make(data.train, self.tokenizer, self.length, limit, seed)
        return self.encoded[key]

    def _fine_tune(self, data: TaskData, train: TaskRows, seed: int) -> None:
        """One task with one seed, resumed where it was left, if it was."""
        fit = ClassifierFit(self.config, self.cfg, self.tokenizer, self.encoder, data.task, train, seed, self.device)
        checkpoints = self._checkpoints(data.task, seed)
        checkpoints.sweep()
        checkpoint, damaged = checkpoints.latest_valid()
        for path, reason in damaged:
            self.observer.message(f"skipped the damaged checkpoint {path.name} of {path.parent.name}: {reason}")
        if checkpoint is not None:
            fit.restore(checkpoint)
        self.tokens -= fit.state.step * train.tokens // fit.steps_per_epoch
        try:
            self._train(fit, checkpoints)
            self._measure(fit, data)
        except Unstable as failure:
            self.observer.message(str(failure))
            self.results.fail(fit, failure.report)
        self._remove_checkpoints(data.task, seed)

    def _train(self, fit: ClassifierFit, checkpoints: Checkpoints) -> None:
        saved = time.perf_counter()
        while fit.state.step < fit.steps:
            before = fit.state.seconds
            self.tokens_done += fit.step()
            self.seconds += fit.state.seconds - before
            name = f"{fit.task.name}, seed {fit.seed}: step {fit.state.step} of {fit.steps}"
            left = self.seconds * (self.tokens / self.tokens_done - 1)
            self.observer.progress(name, self.tokens_done / self.tokens, left)
            signal = self.signals.received
            if signal or time.perf_counter() - saved >= self.save_seconds:
                check_there(self.run.config_file, fit.state.step)
                checkpoints.save(fit.state.step, fit.tensors(), fit.description())
                saved = time.perf_counter()
            if signal:
                raise Interrupted(signal, fit.state.step, again="the same command")

    def _measure(self, fit: ClassifierFit, data: TaskData) -> None:
        scores = {}
        for column, examples in data.dev.items():
            rows = TaskRows.make(examples, self.tokenizer, self.length)
            found = fit.answers(rows)
            scores[column] = {name: METRICS[name](found, rows.labels) for name in data.task.metrics}
        for board, examples in data.test.items():
            answers = fit.answers(TaskRows.make(examples, self.tokenizer, self.length))
            text = predictions(data.task, examples.index, answers)
            path = self.folder / "predictions" / f"seed-{fit.seed}" / f"{board}.tsv"
            make_folder(path.parent)
            write_text(path, text)
        self.results.add(fit, scores)
        shown = "; ".join(f"{column} {score(metrics):.1f}" for column, metrics in scores.items())
        self.observer.message(f"seed {fit.seed}: {shown}")

    def _checkpoints(self, task: Task, seed: int) -> Checkpoints:
        return Checkpoints(self.folder / f"{task.name}-seed-{seed}", keep_last=1, keep_best=False)

    def _remove_checkpoints(self, task: Task, seed: int) -> None:
        folder = self._checkpoints(task, seed).folder
        if folder.exists():
            remove_folder(folder)


def finetune(
    run: Run | Path | str,
    glue: Path | str,
    tasks: Sequence[GlueTask],
    *,
    seeds: int = 3,
    cfg: FinetuneConfig | None = None,
    checkpoint: int | str = "last",
    device: str = "auto",
    fresh: bool = False,
    observer: Observer | None = None,
    save_seconds: float = 60.0,
) -> dict[str, Any]:
    """Fine-tune the encoder of a run on tasks of GLUE with seeds 0 … seeds − 1, and return the results so far.

    What is finished already is not done again, and what was interrupted is resumed. `glue` is the folder of the
    official files or `hf:DATASET`. A checkpoint of the one in training is made every `save_seconds`.
    """
    run, cfg, observer = run if isinstance(run, Run) else find_run(run), cfg or FinetuneConfig(), observer or Observer()
    if run.config().task != "masked":
        raise UserError(f"run {run.name!r} holds a causal model; GLUE needs an encoder: train with --set task=masked")
    place = pick_device(device)
    read = [read_task(glue, task) for task in tasks]
    for data in read:
        if data.train.skipped:
            observer.message(f"{data.train.source}: {data.train.skipped} short rows left out")
    encoder = None if cfg.from_scratch else load(run.folder, checkpoint=checkpoint)
    assert encoder is None or isinstance(encoder, MaskedLM)
    folder = run.folder / variant(cfg)
    with FolderLock(folder), Signals() as signals, folder_lost(folder):
        observer = StopOnClosedPipe(observer, signals.group.ask_to_stop)
        sweep(folder)
        sweep(run.folder, f"{folder.name}.json")
        path = run.folder / f"{folder.name}.json"
        if fresh:
            _clear(folder)
        elif not path.exists():
            _remove_unknown(folder, path, observer)
        results = Results.open(path, cfg, weights_identity(encoder), fresh=fresh)
        try:
            GlueRunner(run, cfg, results, encoder, observer, signals, save_seconds, place).train(read, seeds)
        finally:
            observer.end()
    return summarise(results.content)


def _clear(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir():
            remove_folder(entry)


def _remove_unknown(folder: Path, results: Path, observer: Observer) -> None:
    """Remove checkpoints of which nobody knows the settings any more."""
    for begun in sorted(folder.glob("*-seed-*")):
        remove_folder(begun)
        observer.message(f"{begun.name} begins anew: {results} is gone, which said with what settings it was begun")


def weights_identity(encoder: MaskedLM | CausalLM | None) -> str:
    """A hash of the weights that are begun with."""
    if encoder is None:
        return "random"
    digest = hashlib.sha256()
    for name, value in sorted(encoder.state_dict().items()):
        digest.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
