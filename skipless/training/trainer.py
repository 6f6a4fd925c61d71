"""Pre-training: a model, its corpus and its budget; what a step takes from the corpus, and what is measured."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from skipless.analysis.costs import flops_per_token
from skipless.analysis.device_plan import plan
from skipless.analysis.evaluation import Evaluation, evaluate, judged_and_tuning_rows
from skipless.config.base import differences
from skipless.config.run import RunConfig
from skipless.data import Corpus
from skipless.data.batches import training_batch
from skipless.distributed import devices
from skipless.distributed.group import Group
from skipless.errors import UserError
from skipless.nn.layers import WithGains
from skipless.nn.model import IGNORED, CausalLM, MaskedLM
from skipless.runs import MODELS
from skipless.storage.checkpoint_format import Checkpoint
from skipless.training.observer import Observer
from skipless.training.recompute import recompute_blocks
from skipless.training.schedule import batch_rows
from skipless.training.state import foreign_state_said, restored_counters
from skipless.training.update import MicroBatch, Update


@dataclass
class TrainerState:
    """The counters of a pre-training, which a checkpoint holds besides what the next update needs."""

    step: int = 0
    sequences: int = 0
    tokens: int = 0
    seconds: float = 0.0
    """Spent in steps, by all processes that have worked on the run one after another."""
    loss_sum: float = 0.0
    loss_count: int = 0
    """Since the last line of metrics."""
    evaluated: int = -1
    """The step of the last evaluation."""
    sampled: int = -1
    """The step of the last sample."""
    valid_loss: float | None = None


@dataclass
class Trainer:
    """The pre-training of a model on a corpus: brings batches to `Update`, counts what is spent, and measures."""

    cfg: RunConfig
    corpus: Corpus
    observer: Observer = field(default_factory=Observer)
    group: Group = field(default_factory=Group)
    given_model: CausalLM | MaskedLM | None = None
    """A model to go on from, instead of a new one."""

    evaluates: ClassVar[bool] = True
    loss: ClassVar[Callable[..., Tensor] | None] = None

    def __post_init__(self) -> None:
        train, group = self.cfg.train, self.group
        with group.raise_on_all_ranks():
            self._choose_device()
        for seed in (torch.manual_seed, random.seed, np.random.seed):  # all that a checkpoint holds
            seed(train.seed % 2**32)
        self.model = group.build(self._make_model, self.device)
        self.model.tokenizer = self.corpus.tokenizer
        if train.activation_checkpointing:
            recompute_blocks(self.model)
        self._compile()
        most = group.share(train.batch_size)[2]
        group.wrap(self.model, self.device, self.dtype, accumulates=most > train.micro_rows)
        self.update = Update(self.model, train, self.device, self.dtype, group, self.loss)
        self.last: dict[str, Any] = {}
        """The record of the last step, for callbacks."""
        self.state, self.start = TrainerState(), TrainerState()
        self.tokens_per_row = self.cfg.data.seq_len - (self.cfg.data.packing == "chunks")
        flops = flops_per_token(self.cfg.model, self.cfg.data.seq_len, head_share=self.cfg.predicted_share)
        self.flops_per_token = flops["training"]
        with self.update.autocast():
            group.first_pass(lambda: self.model.loss(*(part.to(self.device) for part in self._sequences(0, 1))))

    def _make_model(self) -> CausalLM | MaskedLM:
        if self.given_model is None:
            return MODELS[self.cfg.task](self.cfg.model)
        if self.given_model.config != self.cfg.model:
            changed = ", ".join(differences(self.cfg.model, self.given_model.config))
            raise UserError(f"the model is not that of the configuration: {changed} differ")
        return self.given_model

    def _choose_device(self) -> None:
        """Choose the device and the precision, plan the memory; a UserError if anything does not fit."""
        cfg, group = self.cfg, self.group
        self.device = group.device(cfg.train.device)
        self.dtype = devices.pick_dtype(cfg.train.precision, self.device)
        kind = cfg.parallel.kind if group.size > 1 else None
        if self.dtype == torch.float16 and kind == "fsdp":
            raise UserError("precision fp16 cannot go with parallel fsdp: use bf16")
        if cfg.parallel.reduce == "bf16" and kind == "ddp" and self.device.type == "cpu":
            raise UserError("parallel.reduce bf16 with ddp needs a GPU; on a CPU use fp32, or fsdp")
        self._check_data()
        self.planned = plan(
            cfg.model,
            cfg.parallel,
            group.size,
            batch_size=cfg.train.batch_size,
            micro_batch=cfg.train.micro_batch,
            causal=cfg.task == "causal",
            length=cfg.data.seq_len,
            block_bytes=self.dtype.itemsize,
            recompute=cfg.train.activation_checkpointing,
            average=cfg.train.ema is not None,
        )
        needed = self.planned.memory["total"] * group.processes_on(self.device)
        devices.check_memory(needed, self.device, "this training")

    def _check_data(self) -> None:
        check_data(self.cfg, self.corpus)

    def _compile(self) -> None:
        what = self.cfg.train.compile
        problem = None if what == "off" else devices.compiler_problem()
        if problem:
            self.observer.message(
                f"compile: {what} was asked for, but there is no compiler: {problem}; going on without"
            )
        elif what == "block":
            for block in self.model.blocks:
                block.compile()
        elif what == "model":
            self.model.hidden = torch.compile(self.model.hidden)

    # ------------------------------------------------------------------------ budget

    def progress(self) -> float:
        """Where the next step stands in the schedule, between 0 and 1: never 0 or 1 for a budget in steps or tokens."""
        train, state = self.cfg.train, self.state
        if train.steps is not None:
            return (state.step + 1) / (train.steps + 1)
        if train.tokens is not None:
            ahead = self._tokens_ahead()
            return (state.tokens + ahead) / (train.tokens + ahead)
        assert train.minutes is not None
        return min(state.seconds / (60 * train.minutes), 1.0)

    def _tokens_ahead(self) -> float:
        """Tokens of the next step, if it is a whole batch."""
        return self.cfg.train.batch_size * self.tokens_per_row

    def done(self) -> bool:
        """Whether the budget is spent."""
        train, state = self.cfg.train, self.state
        if train.steps is not None:
            return state.step >= train.steps
        if train.tokens is not None:
            return state.tokens >= train.tokens
        return self.progress() >= 1

    def seconds_left(self) -> float:
        """An estimate from the steps of this process: the machine may have been busier in earlier ones."""
        train, state, start = self.cfg.train, self.state, self.start
        if train.minutes is not None:
            return max(60 * train.minutes - state.seconds, 0.0)
        if train.steps:
            done, left = state.step - start.step, train.steps - state.step
        else:
            done, left = state.tokens - start.tokens, (train.tokens or 0) - state.tokens
        return (state.seconds - start.seconds) * left / done if done else float("nan")

    # -------------------------------------------------------------------------- step

    def step(self) -> dict[str, float]:
        """One update of the weights by the next sequences of the corpus; returns what a line of metrics says of it."""
        train, state = self.cfg.train, self.state
        start = time.perf_counter()
        progress = self.progress()
        rows = batch_rows(train, progress)
        batches = self._micro_batches(rows)
        made = self.update.make(batches, progress, name=f"step {state.step + 1}")
        state.step += 1
        state.sequences += rows
        state.tokens += self._tokens_in(rows, batches)
        state.loss_sum += made.loss
        state.loss_count += 1
        spent = time.perf_counter() - start
        # a budget in time has to end for all at once, by the first one's clock
        state.seconds += spent if train.minutes is None else self.group.gather([spent])[0][0]
        measured = {"lr": made.lr, "grad_norm": made.grad_norm, "batch_size": rows}
        self.last = {"step": state.step, "loss": made.loss, **measured}
        return measured

    def _tokens_in(self, rows: int, batches: Sequence[MicroBatch]) -> int:
        """Tokens of a step, of all processes."""
        return rows * self.tokens_per_row

    def _micro_batches(self, rows: int) -> list[MicroBatch]:
        """This process's part of the next `rows` sequences.

        All processes have as many micro-batches: one whose part is shorter adds a sequence of weight 0.
        """
        start, end, most = self.group.share(rows)
        batches = []
        for first in range(start, start + most, self.cfg.train.micro_rows):
            count = min(self.cfg.train.micro_rows, end - first)
            ids, labels = self._sequences(self.state.sequences + (first if count > 0 else 0), max(count, 1))
            batches.append(MicroBatch(ids, labels, weight=int((labels != IGNORED).sum()) if count > 0 else 0))
        return batches

    def _sequences(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        ids, labels = training_batch(self.cfg, self.corpus, first, count)
        return torch.from_numpy(ids), torch.from_numpy(labels)

    # ------------------------------------------------------------------ what is measured

    def gains(self) -> dict[str, Any]:
        """Every trainable gain by name: a number, or one for each head."""
        found = {}
        for path, module in self.model.named_modules():
            if isinstance(module, WithGains):
                for name in module.initial_gains:
                    values = self.group.whole(module.get_parameter(name).detach()).flatten().tolist()
                    found[f"{path}.{name}"] = values[0] if len(values) == 1 else values
        return found

    def evaluate(self, between: Callable[[], None] = lambda: None) -> Evaluation:
        """The held-out loss so far, on the rows that runs are judged by."""
        return self._evaluate(self._held_out()[0], between)

    def evaluate_for_tuning(self, between: Callable[[], None] = lambda: None) -> Evaluation | None:
        """The same on the rows that runs are tuned by, if there are any."""
        rows = self._held_out()[1]
        return self._evaluate(rows, between) if len(rows) else None

    def evaluate_average(self, between: Callable[[], None] = lambda: None) -> Evaluation | None:
        """The held-out loss of the averaged weights, if any. `between` must not save: they are in the model's place."""
        if self.update.average is None:
            return None
        with self.update.average.in_place():
            return self.evaluate(between)

    def _held_out(self) -> tuple[np.ndarray, np.ndarray]:
        train = self.cfg.train
        return judged_and_tuning_rows(len(self.corpus.valid), train.eval_rows, train.tuning_rows)

    def _evaluate(self, rows: np.ndarray, between: Callable[[], None]) -> Evaluation:
        with self.update.autocast():
            return evaluate(self.model, self.cfg, self.corpus, rows=rows, between=between, group=self.group)

    # ------------------------------------------------------------------- save and restore

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint stores as tensors."""
        return self.update.tensors()

    def description(self) -> dict[str, Any]:
        """Collective: what a checkpoint stores as JSON."""
        return {"state": asdict(self.state), **self.update.state(), "data": self.corpus.fingerprint}

    def restore(self, checkpoint: Checkpoint) -> None:
        """Collective: continue from a checkpoint."""
        with foreign_state_said(checkpoint):
            if checkpoint.state["data"] != self.corpus.fingerprint:
                raise UserError(
                    f"{checkpoint.path} was trained on other data than {self.cfg.data.source_text!r} gives now; "
                    "restore the source, or begin a new run"
                )
            self.state = restored_counters(TrainerState, checkpoint)
            self.update.restore(checkpoint)
        self.start = replace(self.state)


def check_data(cfg: RunConfig, corpus: Corpus) -> None:
    """Raise where the corpus cannot give what the training will ask for."""
    if not len(corpus.valid):
        raise UserError("there is no held-out text to evaluate on: set data.valid_fraction or data.valid_source")
    if cfg.task == "masked" and corpus.tokenizer.mask_id is None:
        raise UserError(
            f"a masked model needs a tokeniser with a mask token, and {cfg.data.tokenizer!r} has none: "
            "set data.tokenizer=wordpiece"
        )


def fit_vocabulary(cfg: RunConfig, corpus: Corpus) -> RunConfig:
    """The configuration with the vocabulary that the tokeniser really has."""
    return cfg.override({"model.vocab_size": corpus.tokenizer.vocab_size})
