"""The fine-tuning of one task with one seed: a classifier, its batches and its answers. `Update` trains it."""

import math
import time
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skipless.analysis.health import first_nonfinite
from skipless.config.run import FinetuneConfig, RunConfig
from skipless.data.labelled import Task
from skipless.data.tokenizer import Tokenizer
from skipless.distributed import devices
from skipless.errors import UserError
from skipless.nn.model import CausalLM, MaskedLM, SequenceClassifier
from skipless.storage.checkpoint_format import Checkpoint
from skipless.tasks.task_rows import TaskRows, by_length, epoch_batches
from skipless.training.state import foreign_state_said, restored_counters
from skipless.training.stopping import NonFinite
from skipless.training.update import MicroBatch, Update

SHOWN_ROWS = 20
"""Rows that a report of non-finite numbers names."""


class Unstable(NonFinite):
    """A loss, a gradient or an answer was not finite. `report` says what, where, and for which rows of the file."""

    def __init__(self, report: Mapping[str, Any]) -> None:
        super().__init__(report["message"], report["what"], report["first_in"])
        self.report = dict(report)


@dataclass
class FitState:
    """The counters of a fine-tuning, which a checkpoint holds besides what the next update needs."""

    step: int = 0
    loss_sum: float = 0.0
    """Over the steps of this epoch."""
    last_loss: float | None = None
    """Mean of the last whole epoch."""
    seconds: float = 0.0


@dataclass
class ClassifierFit:
    """The fine-tuning of one task with one seed."""

    run: RunConfig
    cfg: FinetuneConfig
    tokenizer: Tokenizer
    encoder: MaskedLM | CausalLM | None
    """None for a random one."""
    task: Task
    train: TaskRows
    seed: int
    device: torch.device = field(default_factory=lambda: devices.pick_device("auto"))

    def __post_init__(self) -> None:
        torch.manual_seed(zlib.crc32(f"{self.task.name} {self.seed}".encode()))
        self.model = make_classifier(self.run, self.cfg, self.encoder, self.task.outputs).to(self.device)
        self.lengths = np.array([len(row) for row in self.train.ids])
        self.steps_per_epoch = math.ceil(len(self.lengths) / self.cfg.batch_size)
        self.steps = self.cfg.epochs * self.steps_per_epoch
        dtype = devices.pick_dtype(self.run.train.precision, self.device)
        if dtype == torch.float16:  # a few hundred steps are too few to lose some while the loss scale is found
            dtype = torch.float32
        self.update = Update(self.model, self.cfg.training(self.steps, self.seed), self.device, dtype)
        # a regression learns the answers in units of their spread: a small head would spend its steps on their mean
        numbers = self.train.labels if self.task.is_regression else np.array([-1.0, 1.0])
        self.centre, self.spread = float(numbers.mean()), float(numbers.std()) or 1.0
        self.state = FitState()
        self.batches: list[np.ndarray] = []

    @property
    def name(self) -> str:
        """The task, the seed and the next step, for messages."""
        return f"{self.task.name}, seed {self.seed}, step {self.state.step + 1}"

    # -------------------------------------------------------------------------- steps

    def step(self) -> int:
        """One update by the next batch of the epoch; returns how many tokens it had."""
        start, state = time.perf_counter(), self.state
        epoch, number = divmod(state.step, self.steps_per_epoch)
        if number == 0 or not self.batches:
            self.batches = epoch_batches(self.lengths, self.cfg.batch_size, [self.seed, epoch])
        rows = self.batches[number]
        self.model.train(not self.cfg.head_only)  # an encoder that stays as it is has no dropout
        try:
            made = self.update.make([self._micro_batch(rows)], (state.step + 1) / (self.steps + 1), self.name)
        except NonFinite as found:
            report = self._report(f"{found.what}, first in {found.where}", self.train, rows)
            raise Unstable(report) from found
        state.step += 1
        state.loss_sum += made.loss
        if state.step % self.steps_per_epoch == 0:
            state.last_loss, state.loss_sum = state.loss_sum / self.steps_per_epoch, 0.0
        state.seconds += time.perf_counter() - start
        return int(self.lengths[rows].sum())

    def _micro_batch(self, rows: np.ndarray) -> MicroBatch:
        labels = torch.from_numpy(self.train.labels[rows])
        if self.task.is_regression:
            labels = (labels - self.centre) / self.spread
        ids, mask = self.train.batch(rows, self.tokenizer.pad_id)
        return MicroBatch(ids, labels, len(rows), mask)

    # ------------------------------------------------------------------------ answers

    @torch.no_grad()
    def answers(self, rows: TaskRows) -> np.ndarray:
        """The number of the likeliest answer for each row, or for a regression the answer."""
        self.model.eval()
        found = np.zeros((len(rows.ids), self.task.outputs), dtype=np.float32)
        for chosen in by_length(rows, 2 * self.cfg.batch_size):
            with self.update.autocast():
                found[chosen] = self.model(*self._inputs(rows, chosen)).float().cpu().numpy()
        if not np.isfinite(found).all():
            raise Unstable(self._report("an answer is not finite", rows))
        return found[:, 0] * self.spread + self.centre if self.task.is_regression else found.argmax(-1)

    def _inputs(self, rows: TaskRows, chosen: np.ndarray) -> tuple[Tensor, Tensor | None]:
        ids, mask = rows.batch(chosen, self.tokenizer.pad_id)
        return ids.to(self.device), None if mask is None else mask.to(self.device)

    # ----------------------------------------------------------------------- stability

    def _report(self, what: str, rows: TaskRows, batch: np.ndarray | None = None) -> dict[str, Any]:
        """What was not finite, in which layer first, and for which rows of the file."""
        found = self._nonfinite_rows(rows)
        where, batch = rows.examples.source, np.arange(0) if batch is None else batch
        report: dict[str, Any] = {"step": self.state.step + 1, "what": what, "file": where, "of": len(rows.ids)}
        if found:
            first = min(found.values(), key=lambda part: (part == "the last norm", _depth(part)))
            lines = rows.lines(found)
            detail = f"{len(found)} of {len(rows.ids)} rows of {where} are not finite without dropout, first in {first}"
            report |= {"first_in": first, "count": len(found), "rows": lines[:SHOWN_ROWS]}
        else:
            lines = rows.lines(self._by_gradient_norm(batch))
            detail = f"without dropout every row of {where} is finite; the batch, largest gradients first"
            report |= {"first_in": None, "count": 0, "rows": lines[:SHOWN_ROWS]}
        shown = ", ".join(map(str, lines[:SHOWN_ROWS])) + (", …" if len(lines) > SHOWN_ROWS else "")
        return {**report, "message": f"{self.name}: {what}; {detail} (rows {shown})"}

    @torch.no_grad()
    def _nonfinite_rows(self, rows: TaskRows) -> dict[int, str]:
        """The rows whose activations are not finite, each with the part where they first are not."""
        self.model.eval()
        found: dict[int, str] = {}
        for chosen in by_length(rows, 2 * self.cfg.batch_size):
            with self.update.autocast():
                bad = first_nonfinite(self.model, *self._inputs(rows, chosen))
            found |= {int(chosen[row]): part for row, part in bad.items()}
        return dict(sorted(found.items()))

    def _by_gradient_norm(self, rows: np.ndarray) -> np.ndarray:
        """The rows of a batch, those with the largest gradients without dropout first."""
        self.model.eval()
        norms = []
        for row in rows:
            self.model.zero_grad(set_to_none=True)
            with self.update.autocast():
                loss = self.model.loss(*self._micro_batch(np.array([row])).on(self.device))
            loss.backward()
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients).item()
            norms.append(norm if math.isfinite(norm) else math.inf)
        return rows[np.argsort(norms, kind="stable")[::-1]]

    # ----------------------------------------------------------------- save and restore

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint stores as tensors."""
        return self.update.tensors()

    def description(self) -> dict[str, Any]:
        """What it stores as JSON."""
        return {"state": asdict(self.state), **self.update.state(), "data": self.train.fingerprint}

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint."""
        with foreign_state_said(checkpoint):
            if checkpoint.state["data"] != self.train.fingerprint:
                raise UserError(
                    f"{checkpoint.path} was made with other rows of {self.task.name}; begin again with --fresh"
                )
            self.state = restored_counters(FitState, checkpoint)
            self.update.restore(checkpoint)


def make_classifier(
    run: RunConfig, cfg: FinetuneConfig, encoder: MaskedLM | CausalLM | None, num_labels: int
) -> SequenceClassifier:
    """A classifier on the encoder or decoder of a run, or on a random one like it."""
    model = SequenceClassifier(run.model.replace(dropout=cfg.dropout), num_labels, causal=run.task == "causal")
    if encoder is not None:
        weights = {name: value for name, value in encoder.state_dict().items() if not name.startswith("head.")}
        left = model.load_state_dict(weights, strict=False)
        assert not left.unexpected_keys
        assert {name.split(".")[0] for name in left.missing_keys} == {"pooler", "classifier"}
    if cfg.head_only:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith(("pooler.", "classifier.")))
    return model


def _depth(part: str) -> int:
    return int(part.split()[1]) if part.startswith("layer ") else 0
