"""Fine-tune a pre-trained encoder on GLUE: every task with one protocol, several seeds, resumable at any instant.

    runs/<name>/glue.json                      the results so far; written anew when a task and seed is finished
    runs/<name>/glue/predictions/seed-0/       answers to the test sets, as the leaderboard wants them
    runs/<name>/glue/cola-seed-0/              checkpoints of the one at work; gone when it is finished

The baselines have names of their own: `glue-head-only`, `glue-from-scratch`. What a step does follows from the seed,
the task and the step alone, with dropout drawn from a generator whose state is in the checkpoint; so one that was
killed ends as if it had not been.
"""

import hashlib
import json
import math
import statistics
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skipless import machine
from skipless.atomic import RunLock, make_folder, remove_folder, sweep, write_json, write_text
from skipless.checkpoint import Checkpoints, load_optimizer, optimizer_tensors, rng_state, set_rng_state
from skipless.config import FinetuneConfig, RunConfig, differences
from skipless.data.glue import COLUMNS, Examples, Task, TaskData, encode, predictions, read_task
from skipless.data.tokenizer import Tokenizer
from skipless.errors import UserError
from skipless.health import first_nonfinite
from skipless.metrics import METRICS
from skipless.nn.model import MaskedLM, SequenceClassifier
from skipless.optim import clip_gradients, learning_rate, make_optimizers, set_lr
from skipless.runs import Run, find_run, load
from skipless.train import Interrupted, Signals

POOL = 32
"""Batches whose rows are sorted by length together, so that little of a batch is padding."""

AVERAGE = "GLUE"
"""Column of the average, as the paper's table calls it."""

SHOWN_ROWS = 20
"""Rows that a report of non-finite activations names."""


class Observer:
    """Whoever wants to see what happens. This one looks away."""

    def message(self, text: str) -> None:
        """Something that a person should know."""

    def progress(self, what: str, share: float, seconds_left: float) -> None:
        """How far all tasks and seeds together are."""

    def end(self) -> None:
        """It is over, for whatever reason."""


# ------------------------------------------------------------------------------ rows, batches


@dataclass(frozen=True)
class Rows:
    """Rows of a file as tokens."""

    examples: Examples
    ids: list[list[int]]
    chosen: np.ndarray
    """Which rows of the file these are."""

    @classmethod
    def make(
        cls, examples: Examples, tokenizer: Tokenizer, length: int, limit: int | None = None, seed: int = 0
    ) -> "Rows":
        """All rows, or `limit` of them drawn with a seed: the same ones for every block and for its random encoder."""
        chosen = np.arange(len(examples))
        if limit is not None and limit < len(examples):
            chosen = np.sort(np.random.default_rng(seed).permutation(len(examples))[:limit])
        return cls(examples, encode(tokenizer, [examples.texts[row] for row in chosen], length), chosen)

    @cached_property
    def labels(self) -> np.ndarray:
        """The answers."""
        assert self.examples.labels is not None
        return self.examples.labels[self.chosen]

    @cached_property
    def tokens(self) -> int:
        """Tokens without padding."""
        return sum(map(len, self.ids))

    def lines(self, rows: Iterable[int]) -> list[int]:
        """Where rows stand in the file."""
        return [self.examples.lines[self.chosen[row]] for row in rows]

    def batch(self, rows: np.ndarray, pad_id: int) -> tuple[Tensor, Tensor | None]:
        """(B, T) ids, padded to the longest, and the mask of the real ones where there is padding."""
        picked = [self.ids[row] for row in rows]
        longest = max(map(len, picked))
        ids = torch.tensor([row + [pad_id] * (longest - len(row)) for row in picked])
        lengths = torch.tensor([len(row) for row in picked])
        ragged = int(lengths.min()) < longest
        return ids, torch.arange(longest) < lengths[:, None] if ragged else None

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the inputs and the answers."""
        labels = self.labels.tolist()
        return hashlib.sha256(json.dumps([self.ids, labels]).encode()).hexdigest()[:16]


def epoch_batches(lengths: np.ndarray, size: int, key: Sequence[int]) -> list[np.ndarray]:
    """Every row once, in batches of rows of about one length, in an order that follows from the key."""
    rng = np.random.default_rng(key)
    order = rng.permutation(len(lengths))
    pools = [order[start : start + size * POOL] for start in range(0, len(order), size * POOL)]
    order = np.concatenate([pool[np.argsort(lengths[pool], kind="stable")] for pool in pools])
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    return [batches[number] for number in rng.permutation(len(batches))]


# --------------------------------------------------------------------------- one task and seed


class Unstable(Exception):
    """Something was not finite. `report` says what, where, and for which inputs."""

    def __init__(self, report: dict[str, Any]) -> None:
        super().__init__(report["message"])
        self.report = report


@dataclass
class State:
    """What a checkpoint holds besides tensors and random generators."""

    step: int = 0
    loss_sum: float = 0.0
    """Over the steps of this epoch."""
    last_loss: float | None = None
    """Mean of the last whole epoch."""
    seconds: float = 0.0


@dataclass
class Fit:
    """The training of one task with one seed."""

    run: RunConfig
    cfg: FinetuneConfig
    tokenizer: Tokenizer
    encoder: MaskedLM | None
    """None for a random one."""
    task: Task
    train: Rows
    seed: int
    device: torch.device = field(default_factory=lambda: machine.pick_device("auto"))

    def __post_init__(self) -> None:
        torch.manual_seed(zlib.crc32(f"{self.task.name} {self.seed}".encode()))
        self.model = make_classifier(self.run, self.cfg, self.encoder, self.task.outputs).to(self.device)
        self.names = {p: name for name, p in self.model.named_parameters() if p.requires_grad}
        self.lengths = np.array([len(row) for row in self.train.ids])
        self.steps_per_epoch = math.ceil(len(self.lengths) / self.cfg.batch_size)
        self.steps = self.cfg.epochs * self.steps_per_epoch
        self.training = self.cfg.training(self.steps, self.seed)
        (self.optimizer,) = make_optimizers(self.model, self.training)
        self.dtype = machine.pick_dtype(self.run.train.precision, self.device)
        if self.dtype == torch.float16:  # fine-tuning has no loss scale
            self.dtype = torch.float32
        # a regression learns the answers in units of their spread: a small head would spend its steps on their mean
        numbers = self.train.labels if self.task.is_regression else np.array([-1.0, 1.0])
        self.centre, self.spread = float(numbers.mean()), float(numbers.std()) or 1.0
        self.state = State()
        self.batches: list[np.ndarray] = []

    # -------------------------------------------------------------------------- steps

    def step(self) -> int:
        """One update; returns how many tokens it saw."""
        start, state = time.perf_counter(), self.state
        epoch, number = divmod(state.step, self.steps_per_epoch)
        if number == 0 or not self.batches:
            self.batches = epoch_batches(self.lengths, self.cfg.batch_size, [self.seed, epoch])
        rows = self.batches[number]
        set_lr([self.optimizer], learning_rate(self.training, (state.step + 1) / (self.steps + 1)))
        loss = self._loss(rows)
        loss.backward()
        gradients = [parameter.grad for parameter in self.names if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        self._check(loss.item(), norm.item(), rows)
        if self.cfg.clip is not None:
            clip_gradients(gradients, self.cfg.clip, norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        state.step += 1
        state.loss_sum += loss.item()
        if state.step % self.steps_per_epoch == 0:
            state.last_loss, state.loss_sum = state.loss_sum / self.steps_per_epoch, 0.0
        state.seconds += time.perf_counter() - start
        return int(self.lengths[rows].sum())

    def _loss(self, rows: np.ndarray, *, training: bool = True) -> Tensor:
        labels = torch.from_numpy(self.train.labels[rows])
        if self.task.is_regression:
            labels = (labels - self.centre) / self.spread
        self.model.train(training and not self.cfg.head_only)  # an encoder that stays as it is has no dropout
        with self.autocast():
            return self.model.loss(*self._inputs(self.train, rows, labels))

    def _inputs(self, rows: Rows, chosen: np.ndarray, *labels: Tensor) -> tuple[Any, ...]:
        ids, mask = rows.batch(chosen, self.tokenizer.pad_id)
        moved = [part.to(self.device) for part in (ids, *labels)]
        return (*moved, None if mask is None else mask.to(self.device))

    def autocast(self) -> torch.autocast:
        """Matrix products in the type that was picked."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    # ------------------------------------------------------------------------ answers

    @torch.no_grad()
    def answers(self, rows: Rows) -> np.ndarray:
        """The number of the likeliest answer for each row, or for a regression the answer."""
        self.model.eval()
        found = np.zeros((len(rows.ids), self.task.outputs), dtype=np.float32)
        for chosen in _by_length(rows, 2 * self.cfg.batch_size):
            with self.autocast():
                found[chosen] = self.model(*self._inputs(rows, chosen)).float().cpu().numpy()
        if not np.isfinite(found).all():
            raise Unstable(self._report("an answer is not finite", rows))
        return found[:, 0] * self.spread + self.centre if self.task.is_regression else found.argmax(-1)

    # ----------------------------------------------------------------------- stability

    def _check(self, loss: float, norm: float, rows: np.ndarray) -> None:
        if not math.isfinite(loss):
            raise Unstable(self._report(f"the loss is {loss}", self.train, rows))
        if not math.isfinite(norm):
            where = self._steepest_parameter()
            raise Unstable(self._report(f"the gradient's norm is {norm}, first in {where}", self.train, rows))

    def _steepest_parameter(self) -> str:
        """Where a gradient stopped being finite: the last in the model, as they come from its end; else the largest."""
        sizes = {name: p.grad.abs().max().item() for p, name in self.names.items() if p.grad is not None}
        broken = [name for name, size in sizes.items() if not math.isfinite(size)]
        return broken[-1] if broken else max(sizes, key=sizes.__getitem__)

    def _steepest_rows(self, rows: np.ndarray) -> np.ndarray:
        """The rows of a batch, those with the largest gradients without dropout first."""
        sizes = []
        for row in rows:
            self.optimizer.zero_grad(set_to_none=True)
            self._loss(np.array([row]), training=False).backward()
            size = torch.nn.utils.get_total_norm([p.grad for p in self.names if p.grad is not None]).item()
            sizes.append(size if math.isfinite(size) else math.inf)
        return rows[np.argsort(sizes, kind="stable")[::-1]]

    def _report(self, what: str, rows: Rows, batch: np.ndarray | None = None) -> dict[str, Any]:
        """What was not finite, in which layer first, and for which rows of the file."""
        found = self._scan(rows)
        where, batch = rows.examples.source, np.arange(0) if batch is None else batch
        report: dict[str, Any] = {"step": self.state.step + 1, "what": what, "file": where, "of": len(rows.ids)}
        if found:
            first = min(found.values(), key=lambda part: (part == "the last norm", _depth(part)))
            lines = rows.lines(found)
            detail = f"{len(found)} of {len(rows.ids)} rows of {where} are not finite without dropout, first in {first}"
            report |= {"first_in": first, "count": len(found), "rows": lines[:SHOWN_ROWS]}
        else:
            lines = rows.lines(self._steepest_rows(batch))
            detail = f"without dropout every row of {where} is finite; the batch, largest gradients first"
            report |= {"first_in": None, "count": 0, "rows": lines[:SHOWN_ROWS]}
        shown = ", ".join(map(str, lines[:SHOWN_ROWS])) + (", …" if len(lines) > SHOWN_ROWS else "")
        message = f"{self.task.name}, seed {self.seed}, step {self.state.step + 1}: {what}; {detail} (rows {shown})"
        return {**report, "message": message}

    @torch.no_grad()
    def _scan(self, rows: Rows) -> dict[int, str]:
        """The rows whose activations are not finite, each with the part where they first are not."""
        self.model.eval()
        found: dict[int, str] = {}
        for chosen in _by_length(rows, 2 * self.cfg.batch_size):
            with self.autocast():
                bad = first_nonfinite(self.model, *self._inputs(rows, chosen))
            found |= {int(chosen[row]): part for row, part in bad.items()}
        return dict(sorted(found.items()))

    # ----------------------------------------------------------------- save and restore

    def save(self, checkpoints: Checkpoints) -> None:
        """Keep everything that the next step depends on."""
        tensors, remembered = optimizer_tensors(self.optimizer, self.names)
        remembered = {"state": asdict(self.state), "optimizer": remembered, "rng": rng_state()}
        description = {**remembered, "data": self.train.fingerprint}
        checkpoints.save(self.state.step, {"model": self.model.state_dict(), "optimizer": tensors}, description)

    def restore(self, checkpoints: Checkpoints) -> None:
        """Become what the newest checkpoint was, if there is one."""
        checkpoint, _ = checkpoints.latest_valid()
        if checkpoint is None:
            return
        if checkpoint.state["data"] != self.train.fingerprint:
            raise UserError(f"{checkpoint.path} was made with other rows of {self.task.name}; begin again with --fresh")
        self.model.load_state_dict(checkpoint.tensors("model"))
        load_optimizer(self.optimizer, self.names, checkpoint.tensors("optimizer"), checkpoint.state["optimizer"])
        self.state = State(**checkpoint.state["state"])
        set_rng_state(checkpoint.state["rng"])


def make_classifier(
    run: RunConfig, cfg: FinetuneConfig, encoder: MaskedLM | None, num_labels: int
) -> SequenceClassifier:
    """A classifier on the encoder of a run, or on a random one like it."""
    model = SequenceClassifier(run.model.replace(dropout=cfg.dropout), num_labels)
    if encoder is not None:
        weights = {name: value for name, value in encoder.state_dict().items() if not name.startswith("head.")}
        left = model.load_state_dict(weights, strict=False)
        assert not left.unexpected_keys
        assert {name.split(".")[0] for name in left.missing_keys} == {"pooler", "classifier"}
    if cfg.head_only:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith(("pooler.", "classifier.")))
    return model


def _by_length(rows: Rows, size: int) -> Iterator[np.ndarray]:
    order = np.argsort([len(row) for row in rows.ids], kind="stable")
    return (order[start : start + size] for start in range(0, len(order), size))


def _depth(part: str) -> int:
    return int(part.split()[1]) if part.startswith("layer ") else 0


# ------------------------------------------------------------------------------------ results


def variant(cfg: FinetuneConfig) -> str:
    """Name of the results: `glue`, and what was not as in the paper."""
    return "glue" + "-from-scratch" * cfg.from_scratch + "-head-only" * cfg.head_only


def has_outcome(content: Mapping[str, Any], task: Task, seed: int) -> bool:
    """Whether results tell how a task with a seed ended, well or badly."""
    return any(str(seed) in content[kind].get(task.name, {}) for kind in ("fits", "failures"))


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
            "versions": machine.versions(),
        }
        results = cls(path, {"tasks": {}, "data": {}, "fits": {}, "failures": {}, **new})
        if not path.exists() or fresh:
            return results
        try:
            old = json.loads(path.read_text(encoding="utf-8"))
            changed = differences(FinetuneConfig.model_validate(old["settings"]["finetune"]), cfg)
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path} does not hold results of a fine-tuning; begin again with --fresh") from None
        listed = [f"{key}: {before} → {after}" for key, (before, after) in changed.items()]
        if old["settings"]["encoder"] != encoder:
            listed.append("the encoder was trained further")
        if listed:
            raise UserError(
                f"{path} has results of another fine-tuning ({', '.join(listed)}); go on with that one, or add --fresh"
            )
        results.content |= {key: old[key] for key in ("tasks", "data", "fits", "failures")}
        return results

    def check_data(self, task: Task, train: Rows) -> None:
        """Note what a task is trained on with seed 0; a UserError where it was something else before."""
        data = {"rows": len(train.ids), "of": len(train.examples), "sha256": train.fingerprint}
        if self.content["data"].setdefault(task.name, data) != data:
            raise UserError(f"{self.path} has results of {task.name} on other rows or tokens; begin again with --fresh")

    def finished(self, task: Task, seed: int) -> bool:
        """Whether there is an outcome, good or bad."""
        return has_outcome(self.content, task, seed)

    def add(self, fit: Fit, scores: dict[str, dict[str, float]]) -> None:
        """Note the metrics of each column."""
        for column, metrics in scores.items():
            self.content["tasks"].setdefault(column, {"seeds": {}})["seeds"][str(fit.seed)] = metrics
        done = {"train_loss": fit.state.last_loss, "steps": fit.steps, "seconds": round(fit.state.seconds, 2)}
        self.content["fits"].setdefault(fit.task.name, {})[str(fit.seed)] = done
        self.write()

    def fail(self, fit: Fit, report: dict[str, Any]) -> None:
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


def score(metrics: dict[str, float]) -> float:
    """100 times the mean of a task's metrics."""
    return 100 * statistics.fmean(metrics.values())


def _spread(prefix: str, values: list[float]) -> dict[str, float | None]:
    mean = statistics.fmean(values) if values else None
    return {f"{prefix}mean": mean, f"{prefix}sd": statistics.stdev(values) if len(values) > 1 else None}


# ---------------------------------------------------------------------------------- all of them


@dataclass
class Session:
    """One process's turn at all tasks and seeds."""

    run: Run
    cfg: FinetuneConfig
    results: Results
    encoder: MaskedLM | None
    observer: Observer
    signals: Signals
    save_seconds: float

    def __post_init__(self) -> None:
        self.config, self.tokenizer = self.run.config(), self.run.tokenizer()
        self.length = min(self.cfg.seq_len, self.config.model.max_seq_len)
        self.folder = self.run.folder / variant(self.cfg)
        self.rows: dict[tuple[str, int], Rows] = {}
        self.work = self.done = 0
        self.spent = 0.0

    def all(self, tasks: Sequence[TaskData], seeds: int) -> None:
        """Train and measure what is not finished yet."""
        for data in tasks:
            self.results.check_data(data.task, self._drawn(data, 0))
        self.results.write()
        jobs = [(data, seed) for seed in range(seeds) for data in tasks]
        for data, seed in jobs:
            if self.results.finished(data.task, seed):
                self._forget(data.task, seed)
        jobs = [(data, seed) for data, seed in jobs if not self.results.finished(data.task, seed)]
        self.work = sum(self.cfg.epochs * self._drawn(data, seed).tokens for data, seed in jobs)
        for data, seed in jobs:
            self._one(data, self._drawn(data, seed), seed)

    def _drawn(self, data: TaskData, seed: int) -> Rows:
        """What a seed is trained on: all rows of the task, or as many as are wanted, which each seed draws anew."""
        limit = self.cfg.rows_of(data.task.name)
        key = (data.task.name, seed if limit is not None and limit < len(data.train) else 0)
        if key not in self.rows:
            self.rows[key] = Rows.make(data.train, self.tokenizer, self.length, limit, seed)
        return self.rows[key]

    def _one(self, data: TaskData, train: Rows, seed: int) -> None:
        fit = Fit(self.config, self.cfg, self.tokenizer, self.encoder, data.task, train, seed)
        checkpoints = self._checkpoints(data.task, seed)
        if checkpoints.folder.exists():
            sweep(checkpoints.folder)
        fit.restore(checkpoints)
        self.work -= fit.state.step * train.tokens // fit.steps_per_epoch
        try:
            self._train(fit, checkpoints)
            self._measure(fit, data)
        except Unstable as failure:
            self.observer.message(str(failure))
            self.results.fail(fit, failure.report)
        self._forget(data.task, seed)

    def _train(self, fit: Fit, checkpoints: Checkpoints) -> None:
        saved = time.perf_counter()
        while fit.state.step < fit.steps:
            before = fit.state.seconds
            self.done += fit.step()
            self.spent += fit.state.seconds - before
            name = f"{fit.task.name}, seed {fit.seed}: step {fit.state.step} of {fit.steps}"
            self.observer.progress(name, self.done / self.work, self.spent * (self.work / self.done - 1))
            asked = self.signals.received
            if asked or time.perf_counter() - saved >= self.save_seconds:
                fit.save(checkpoints)
                saved = time.perf_counter()
            if asked:
                raise Interrupted(asked, fit.state.step, again="the same command")

    def _measure(self, fit: Fit, data: TaskData) -> None:
        scores = {}
        for column, examples in data.dev.items():
            rows = Rows.make(examples, self.tokenizer, self.length)
            found = fit.answers(rows)
            scores[column] = {name: METRICS[name](found, rows.labels) for name in data.task.metrics}
        for board, examples in data.test.items():
            answers = fit.answers(Rows.make(examples, self.tokenizer, self.length))
            text = predictions(data.task, examples.index, answers)
            path = self.folder / "predictions" / f"seed-{fit.seed}" / f"{board}.tsv"
            make_folder(path.parent)
            write_text(path, text)
        self.results.add(fit, scores)
        shown = "; ".join(f"{column} {score(metrics):.1f}" for column, metrics in scores.items())
        self.observer.message(f"seed {fit.seed}: {shown}")

    def _checkpoints(self, task: Task, seed: int) -> Checkpoints:
        return Checkpoints(self.folder / f"{task.name}-seed-{seed}", keep_last=1, keep_best=False)

    def _forget(self, task: Task, seed: int) -> None:
        folder = self._checkpoints(task, seed).folder
        if folder.exists():
            remove_folder(folder)


def finetune(
    run: Run | Path | str,
    glue: Path | str,
    tasks: Sequence[Task],
    *,
    seeds: int = 3,
    cfg: FinetuneConfig | None = None,
    fresh: bool = False,
    observer: Observer | None = None,
    save_seconds: float = 60.0,
) -> dict[str, Any]:
    """Fine-tune the encoder of a run on tasks of GLUE with seeds 0 … seeds − 1, and return the results so far.

    What is finished already is not done again, and what was interrupted goes on. `glue` is the folder of the official
    files or `hf:DATASET`. A checkpoint of the one at work is made every `save_seconds`.
    """
    run, cfg, observer = run if isinstance(run, Run) else find_run(run), cfg or FinetuneConfig(), observer or Observer()
    if run.config().task != "masked":
        raise UserError(f"run {run.name!r} holds a causal model; GLUE needs an encoder: train with --set task=masked")
    read = [read_task(glue, task) for task in tasks]
    for data in read:
        if data.train.skipped:
            observer.message(f"{data.train.source}: {data.train.skipped} short rows left out")
    encoder = None if cfg.from_scratch else load(run.folder)
    assert encoder is None or isinstance(encoder, MaskedLM)
    folder = run.folder / variant(cfg)
    with RunLock(folder), Signals() as signals:
        sweep(folder)
        if fresh:
            _clear(folder)
        results = Results.open(run.folder / f"{folder.name}.json", cfg, _identity(encoder), fresh=fresh)
        try:
            Session(run, cfg, results, encoder, observer, signals, save_seconds).all(read, seeds)
        finally:
            observer.end()
    return summarise(results.content)


def _clear(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir():
            remove_folder(entry)


def _identity(encoder: MaskedLM | None) -> str:
    """A hash of the weights."""
    if encoder is None:
        return "random"
    digest = hashlib.sha256()
    for name, value in sorted(encoder.state_dict().items()):
        digest.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
