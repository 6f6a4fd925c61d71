"""One loop for causal and masked models, which can be killed at any instant and goes on bit for bit.

What makes that so: the batch of a step is a pure function of the seed and a counter; everything else that the next step
depends on (weights, optimiser, counters, random generators, what was measured since the last line) is in a checkpoint;
a checkpoint appears in one piece or not at all; and lines that were written after it are cut off before going on.
"""

import json
import math
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skipless import machine
from skipless.atomic import RunLock, make_folder, sweep, write_json
from skipless.batches import training_batch
from skipless.checkpoint import (
    NO_ROOM,
    BackgroundSaver,
    Bystander,
    Checkpoint,
    Checkpoints,
    DiskFull,
    load_optimizer,
    optimizer_tensors,
    rng_state,
    set_rng_state,
)
from skipless.config import RunConfig, differences
from skipless.data import Corpus, prepare
from skipless.data.draws import mix
from skipless.errors import UserError
from skipless.evaluate import Evaluation, evaluate, judged_and_tuning_rows
from skipless.generate import Sampling, sample_text
from skipless.health import first_nonfinite, health, parts_of
from skipless.inspect import flops_per_token, plan
from skipless.nn.layers import WithGains
from skipless.nn.model import IGNORED, CausalLM
from skipless.optim import batch_rows, clip_gradients, learning_rate, make_optimizers, set_lr
from skipless.parallel import Group, join
from skipless.runs import MODELS, Run
from skipless.trackers import Trackers, check_trackers

SAMPLE_TOKENS = 64


# --------------------------------------------------------------------- why training stops


class TrainingStopped(Exception):
    """Training ended before its budget; the last checkpoint is intact. `status` is the command's exit status."""

    status = 3


class NonFinite(TrainingStopped):
    """The loss or a gradient was not finite. The update was not made."""


class Interrupted(TrainingStopped):
    """A signal asked for an end. Everything up to the last finished step is saved."""

    def __init__(self, number: int, step: int, again: str = "--resume auto") -> None:
        super().__init__(f"{signal.Signals(number).name}: saved at step {step}; go on with {again}")
        self.status = 128 + number


class Observer:
    """Whoever wants to see what happens. This one looks away."""

    def message(self, text: str) -> None:
        """Something that a person should know."""

    def data(self, stage: str, done: int, total: int | None) -> None:
        """A stage of preparing the data."""

    def begin(self, trainer: "Trainer") -> None:
        """Training starts, or goes on."""

    def log(self, record: dict[str, Any]) -> None:
        """A line of metrics."""

    def end(self) -> None:
        """Training is over, for whatever reason."""


# ------------------------------------------------------------------------- state, files


@dataclass
class State:
    """What a checkpoint holds besides tensors and random generators."""

    step: int = 0
    sequences: int = 0
    tokens: int = 0
    seconds: float = 0.0
    """Spent in steps, over all sessions."""
    loss_sum: float = 0.0
    loss_count: int = 0
    """Since the last line of metrics."""
    evaluated: int = -1
    sampled: int = -1
    """The step of the last one."""
    valid_loss: float | None = None


class Journal:
    """A file of JSON lines that can be cut back to where it was at a checkpoint."""

    def __init__(self, path: Path) -> None:
        # unbuffered: what does not fit on the disk is known at once, and closing has nothing left to write
        self.file = path.open("ab", buffering=0)

    def append(self, record: dict[str, Any]) -> None:
        """Write one line; what is not finite becomes null."""
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        line = json.dumps(clean).encode() + b"\n"
        try:
            while line:
                line = line[self.file.write(line) :]
        except OSError as error:
            if error.errno in NO_ROOM:
                raise DiskFull(f"no room for {self.file.name}: {error.strerror}") from error
            raise

    def position(self) -> int:
        """Bytes written, forced to the disk."""
        os.fsync(self.file.fileno())
        return self.file.tell()

    def cut(self, position: int) -> None:
        """Drop what was written after `position`."""
        size = self.file.seek(0, os.SEEK_END)
        if size < position:
            raise UserError(f"{self.file.name} has {size} bytes, and its checkpoint was made at {position}")
        self.file.truncate(position)
        self.file.seek(position)

    def close(self) -> None:
        """Close the file."""
        self.file.close()


class NoJournal(Journal):
    """The journal of a process that writes none."""

    def __init__(self) -> None:
        pass

    def append(self, record: dict[str, Any]) -> None:
        """The first process writes it."""

    def position(self) -> int:
        """Nowhere."""
        return 0

    def cut(self, position: int) -> None:
        """There is nothing to cut."""

    def close(self) -> None:
        """There is nothing to close."""


class Signals:
    """Notes SIGINT and SIGTERM while it is entered, for a group; for one process a second one ends it at once."""

    def __init__(self, group: Group | None = None) -> None:
        self.group = group or Group()

    @property
    def received(self) -> int:
        """The signal that this process was sent; 0 if there was none."""
        return self.group.received

    def __enter__(self) -> "Signals":
        self.before = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self.before[number] = signal.signal(number, self._note)
            except ValueError:  # not in the main thread: then someone else handles signals
                break
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.group.received and not self.group.patient:
            os._exit(128 + number)  # every file is written in one step, so there is nothing to tidy
        self.group.received = number


# --------------------------------------------------------------------------- the trainer


@dataclass
class Trainer:
    """A model, its optimisers and its data, and the steps that bring them on."""

    cfg: RunConfig
    corpus: Corpus
    observer: Observer = field(default_factory=Observer)
    group: Group = field(default_factory=Group)

    def __post_init__(self) -> None:
        train, group = self.cfg.train, self.group
        with group.together():
            self._check()
        for seed in (torch.manual_seed, random.seed, np.random.seed):  # all that a checkpoint holds
            seed(train.seed % 2**32)
        self.model = group.build(lambda: MODELS[self.cfg.task](self.cfg.model), self.device)
        self.model.tokenizer = self.corpus.tokenizer
        self.state, self.begun = State(), State()
        self.rng = rng_state() if group.leads else self._own_rng()
        self._compile()
        most = group.share(train.batch_size)[2]
        group.wrap(self.model, self.device, self.dtype, accumulates=most > train.micro_rows)
        self.names = {parameter: name for name, parameter in self.model.named_parameters()}
        self.optimizers = make_optimizers(self.model, train, group)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)
        self.tokens_per_row = self.cfg.data.seq_len - (self.cfg.data.packing == "chunks")
        flops = flops_per_token(self.cfg.model, self.cfg.data.seq_len, head_share=self.cfg.predicted_share)
        self.flops_per_token = flops["training"]
        with self.autocast():
            group.settle(lambda: self.model.loss(*self._on_device(*training_batch(self.cfg, self.corpus, 0, 1))))

    def _check(self) -> None:
        """Raise where this process cannot do its part."""
        cfg, group = self.cfg, self.group
        self.device = group.device(cfg.train.device)
        self.dtype = machine.pick_dtype(cfg.train.precision, self.device)
        kind = cfg.parallel.kind if group.size > 1 else None
        if self.dtype == torch.float16 and kind == "fsdp":
            raise UserError("precision fp16 cannot go with parallel fsdp: use bf16")
        if cfg.parallel.reduce == "bf16" and kind == "ddp" and self.device.type == "cpu":
            raise UserError("parallel.reduce bf16 with ddp needs a GPU; on a CPU use fp32, or fsdp")
        check_data(cfg, self.corpus)
        self.planned = plan(
            cfg.model,
            cfg.parallel,
            group.size,
            batch_size=cfg.train.batch_size,
            micro_batch=cfg.train.micro_batch,
            causal=cfg.task == "causal",
            length=cfg.data.seq_len,
            block_bytes=self.dtype.itemsize,
        )
        needed = self.planned.memory["total"] * group.processes_on(self.device)
        machine.check_memory(needed, self.device, "this training")

    def _own_rng(self) -> dict[str, Any]:
        """The random generators of a process other than the first: dropout must differ between them."""
        torch.manual_seed(int(mix(self.cfg.train.seed, self.group.rank, self.state.step) % np.uint64(2**32)))
        return rng_state()

    def _on_device(self, *tensors: Tensor) -> list[Tensor]:
        return [tensor.to(self.device) for tensor in tensors]

    def _compile(self) -> None:
        what = self.cfg.train.compile
        problem = None if what == "off" else machine.compiler_problem()
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
        """Share of the budget that is spent at the end of the next step, or for a budget in time at its start."""
        train, state = self.cfg.train, self.state
        if train.steps is not None:
            return (state.step + 1) / (train.steps + 1)
        if train.tokens is not None:
            ahead = train.batch_size * self.tokens_per_row
            return (state.tokens + ahead) / (train.tokens + ahead)
        assert train.minutes is not None
        return min(state.seconds / (60 * train.minutes), 1.0)

    def done(self) -> bool:
        """Whether the budget is spent."""
        train, state = self.cfg.train, self.state
        if train.steps is not None:
            return state.step >= train.steps
        if train.tokens is not None:
            return state.tokens >= train.tokens
        return self.progress() >= 1

    def seconds_left(self) -> float:
        """An estimate from the time of this session's steps: the machine may have been busier before."""
        train, state, begun = self.cfg.train, self.state, self.begun
        if train.minutes is not None:
            return max(60 * train.minutes - state.seconds, 0.0)
        if train.steps:
            done, left = state.step - begun.step, train.steps - state.step
        else:
            done, left = state.tokens - begun.tokens, (train.tokens or 0) - state.tokens
        return (state.seconds - begun.seconds) * left / done if done else float("nan")

    # -------------------------------------------------------------------------- step

    def step(self) -> dict[str, float]:
        """One update: forward and backward over the micro-batches, clipping, optimiser."""
        train, state = self.cfg.train, self.state
        start = time.perf_counter()
        progress = self.progress()
        lr, rows = learning_rate(train, progress), batch_rows(train, progress)
        set_lr(self.optimizers, lr)
        loss = self._accumulate(rows)
        norm = self._measure_gradient()
        self._check_finite(loss, norm.item())
        if train.clip is not None:
            clip_gradients([self.group.local(gradient) for gradient in self._gradients()], train.clip, norm)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
            optimizer.zero_grad(set_to_none=self.group.drops_gradients)
        self.scaler.update()
        state.step += 1
        state.sequences += rows
        state.tokens += rows * self.tokens_per_row
        state.loss_sum += loss
        state.loss_count += 1
        spent = time.perf_counter() - start
        # a budget in time has to end for all at once, by the first one's clock
        state.seconds += spent if train.minutes is None else self.group.gather([spent])[0][0]
        return {"lr": lr, "grad_norm": norm.item(), "batch_size": rows}

    def _accumulate(self, rows: int) -> float:
        """Add up the gradients of `rows` sequences, a micro-batch at a time, and return the mean loss of a token.

        It is the mean over all processes: each one's loss is weighted by its part of the tokens that are predicted, and
        then by the number of processes, for the gradients are averaged over these.
        """
        batches, group = self._micro_batches(rows), self.group
        (predicted,) = group.sum(sum(count for _, _, count in batches))
        total = torch.zeros((), device=self.device)
        for number, (ids, labels, count) in enumerate(batches):
            with group.accumulating(last=number == len(batches) - 1):
                with self.autocast():
                    loss = group.forward(self.model.loss, *self._on_device(ids, labels)) * (count / predicted)
                self.scaler.scale(loss * group.size).backward()
            total += loss.detach()
        return group.sum(total.item())[0]

    def _micro_batches(self, rows: int) -> list[tuple[Tensor, Tensor, int]]:
        """Inputs, labels and how many labels count, of this process's part of the next `rows` sequences.

        All processes have as many: one whose part is shorter goes along with a sequence that does not count.
        """
        start, end, most = self.group.share(rows)
        batches = []
        for first in range(start, start + most, self.cfg.train.micro_rows):
            count = min(self.cfg.train.micro_rows, end - first)
            number = self.state.sequences + (first if count > 0 else 0)
            ids, labels = training_batch(self.cfg, self.corpus, number, max(count, 1))
            batches.append((ids, labels, int((labels != IGNORED).sum()) if count > 0 else 0))
        return batches

    def autocast(self) -> torch.autocast:
        """Matrix products in the type that was picked."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def _measure_gradient(self) -> Tensor:
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        return self.group.norm(self._gradients())

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.names if parameter.grad is not None]

    def _check_finite(self, loss: float, norm: float) -> None:
        scaled = self.scaler.is_enabled()  # then a gradient that overflows is skipped, and the scale goes down
        if math.isfinite(loss) and (scaled or math.isfinite(norm)):
            return
        where = self._first_bad_activation() if not math.isfinite(loss) else self._bad_gradient()
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient's norm is {norm}"
        raise NonFinite(f"step {self.state.step + 1}: {what}, first in {where}; the update was not made")

    @torch.no_grad()
    def _first_bad_activation(self) -> str:
        """Run the batch again and say where it first is not finite."""
        found: set[str] = set()
        with self.autocast():
            for ids, _, _ in self._micro_batches(batch_rows(self.cfg.train, self.progress())):
                found |= set(self.group.look(first_nonfinite, self.model, ids.to(self.device)).values())
        anywhere = {name for names in self.group.exchange(sorted(found)) for name in names}
        return next((name for name in parts_of(self.model) if name in anywhere), "the head")

    def _bad_gradient(self) -> str:
        """The parameter nearest to the loss whose gradient is not finite."""
        bad = self._not_finite({name: p.grad for p, name in self.names.items() if p.grad is not None})
        inside = [name for name in bad if name.startswith("blocks.")]
        if not inside:
            return bad[0] if bad else "the sum of all gradients"
        last = max(inside, key=lambda name: int(name.split(".")[1]))
        return f"layer {int(last.split('.')[1]) + 1} ({last})"

    def _not_finite(self, named: dict[str, Tensor]) -> list[str]:
        """The names of tensors that are not finite in some process."""
        here = [name for name, tensor in named.items() if not self.group.local(tensor).isfinite().all()]
        anywhere = {name for names in self.group.exchange(here) for name in names}
        return [name for name in named if name in anywhere]

    def bad_parameters(self) -> list[str]:
        """The names of parameters that are not finite."""
        return self._not_finite({name: parameter.detach() for parameter, name in self.names.items()})

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

    def _held_out(self) -> tuple[np.ndarray, np.ndarray]:
        train = self.cfg.train
        return judged_and_tuning_rows(len(self.corpus.valid), train.eval_rows, train.tuning_rows)

    def _evaluate(self, rows: np.ndarray, between: Callable[[], None]) -> Evaluation:
        with self.autocast():
            return evaluate(self.model, self.cfg, self.corpus, rows=rows, between=between, group=self.group)

    # ------------------------------------------------------------------- save and restore

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Everything that has to be stored as tensors: of the model, and of each optimiser."""
        parts = {"model": dict(self.model.state_dict())}
        for number, optimizer in enumerate(self.optimizers):
            parts[f"optimizer{number}"] = optimizer_tensors(optimizer, self._names_in(optimizer))[0]
        return parts

    def description(self) -> dict[str, Any]:
        """Everything else."""
        remembered = [optimizer_tensors(optimizer, self._names_in(optimizer))[1] for optimizer in self.optimizers]
        rng, *others = self.group.exchange(rng_state())
        return {
            "state": asdict(self.state),
            "optimizers": remembered,
            "scaler": self.scaler.state_dict(),
            "rng": rng,
            "rng_of_others": others,
            "data": self.corpus.fingerprint,
        }

    def _names_in(self, optimizer: torch.optim.Optimizer) -> dict[torch.nn.Parameter, str]:
        return {p: self.names[p] for group in optimizer.param_groups for p in group["params"]}

    def restore(self, checkpoint: Checkpoint) -> None:
        """Become what the checkpoint was."""
        if checkpoint.state["data"] != self.corpus.fingerprint:
            raise UserError(
                f"{checkpoint.path} was trained on other data than {self.cfg.data.source!r} gives now; "
                "restore the source, or begin a new run"
            )
        if len(checkpoint.state["optimizers"]) != len(self.optimizers):
            raise UserError(f"{checkpoint.path} was made with another optimiser than {self.cfg.train.optimizer!r}")
        try:
            self.model.load_state_dict(self.group.loaded(checkpoint, "model", self.model.state_dict()))
        except RuntimeError as error:
            first = str(error).splitlines()[1].strip()
            raise UserError(f"{checkpoint.path} holds another model than the configuration: {first}") from None
        for number, optimizer in enumerate(self.optimizers):
            remembered, names = checkpoint.state["optimizers"][number], self._names_in(optimizer)
            described = remembered["parameters"]
            targets = {f"{n}/{key}": p for p, n in names.items() for key in described.get(n, {}).get("tensors", ())}
            tensors = self.group.loaded(checkpoint, f"optimizer{number}", targets)
            load_optimizer(optimizer, names, tensors, remembered)
        if checkpoint.state["scaler"]:
            self.scaler.load_state_dict(checkpoint.state["scaler"])
        self.state = State(**checkpoint.state["state"])
        self.begun = replace(self.state)
        known = [checkpoint.state["rng"], *checkpoint.state.get("rng_of_others", ())]
        self.rng = known[self.group.rank] if self.group.rank < len(known) else self._own_rng()


# ------------------------------------------------------------------------------ the run


@dataclass
class Session:
    """One process's turn at a run: the loop, and its files."""

    trainer: Trainer
    run: Run
    trackers: Trackers
    saver: BackgroundSaver | Bystander

    def __post_init__(self) -> None:
        self.group = self.trainer.group
        self.group.where = lambda: f"step {self.trainer.state.step + 1}"
        files = (self.run.metrics_file, self.run.samples_file)
        self.metrics, self.samples = (Journal(path) if self.group.leads else NoJournal() for path in files)
        self.started = self.trainer.state.step
        self.saved: int | None = None

    def loop(self) -> None:
        """Train until the budget is spent or something stops it."""
        trainer = self.trainer
        trainer.model.train()
        set_rng_state(trainer.rng)  # whatever an observer or a tracker has drawn since
        while True:
            self._between_steps()
            if trainer.done():
                break
            measured = trainer.step()
            self._log(measured)
        self._save()
        self.saver.wait()

    def _between_steps(self) -> None:
        """What is due at this step: evaluation, samples, a checkpoint; and a look at the signals."""
        train, state, over = self.trainer.cfg.train, self.trainer.state, self.trainer.done()
        self._heed_signals()
        if state.evaluated != state.step and (over or _due(state.step, train.eval_every)):
            self._evaluate()
        if state.sampled != state.step and state.step and (over or _due(state.step, train.sample_every)):
            self._sample()
        if state.step != self.started and _due(state.step, train.save_every):
            self._save()
        self._heed_signals()

    def _heed_signals(self) -> None:
        if self.group.signal:
            with self.group.together():  # who has nothing to write waits, for torchrun ends all when the first one ends
                self._save()
                self.saver.wait()
            raise Interrupted(self.group.signal, self.trainer.state.step)

    def _ask_for_signals(self) -> None:
        """As `_heed_signals`, where the processes have not talked for a while."""
        self.group.gather()
        self._heed_signals()

    def _log(self, measured: dict[str, float]) -> None:
        train, state = self.trainer.cfg.train, self.trainer.state
        values: dict[str, Any] = {}
        if _due(state.step, train.log_every) or self.trainer.done():
            values = {"loss": state.loss_sum / state.loss_count, **measured}
            state.loss_sum, state.loss_count = 0.0, 0
        if _due(state.step, train.gains_every):
            values["gains"] = self.trainer.gains()
        if _due(state.step, train.health_every):
            values["health"] = self.group.look(health, self.trainer.model, self.trainer.cfg, self.trainer.corpus)
        if values:
            self._write(self._record(**values))

    def _evaluate(self) -> None:
        result = self.trainer.evaluate(between=self._ask_for_signals)
        state = self.trainer.state
        if not math.isfinite(result.loss):
            raise NonFinite(f"step {state.step}: the held-out loss is {result.loss}; the last checkpoint is as it was")
        state.evaluated, state.valid_loss = state.step, result.loss
        values = {"valid_loss": result.loss, "valid_perplexity": result.perplexity}
        if result.bits_per_byte is not None:
            values["valid_bits_per_byte"] = result.bits_per_byte
        tuning = self.trainer.evaluate_for_tuning(between=self._ask_for_signals)
        if tuning is not None:
            values["tuning_loss"] = tuning.loss
        self._write(self._record(**values))

    def _sample(self) -> None:
        state, cfg = self.trainer.state, self.trainer.cfg
        state.sampled = state.step
        if not isinstance(self.trainer.model, CausalLM) or not cfg.train.sample_every:
            return
        sampling = Sampling(temperature=0.8, seed=cfg.train.seed + state.step)
        text = self.group.look(sample_text, self.trainer.model, cfg.train.sample_prompt, SAMPLE_TOKENS, sampling)
        self.samples.append({"step": state.step, "prompt": cfg.train.sample_prompt, "text": text})
        self.trackers.text(state.step, "sample", text)

    def _record(self, **values: Any) -> dict[str, Any]:
        state = self.trainer.state
        return {"step": state.step, "tokens": state.tokens, "seconds": round(state.seconds, 3), **values}

    def _write(self, record: dict[str, Any]) -> None:
        self.metrics.append(record)
        flat = {key: value for key, value in record.items() if isinstance(value, int | float) and key != "step"}
        self.trackers.log(record["step"], flat)
        self.trainer.observer.log(record)

    def _save(self) -> None:
        state = self.trainer.state
        if self.saved == state.step:
            return
        bad = self.trainer.bad_parameters()
        if bad:  # an update can be too large by one step before a loss shows it
            raise NonFinite(f"step {state.step}: {bad[0]} is not finite, so it is not saved; earlier checkpoints are")
        journals = {"metrics": self.metrics.position(), "samples": self.samples.position()}
        score = state.valid_loss if state.evaluated == state.step else None
        description = {**self.trainer.description(), "journals": journals}
        self.saver.submit(state.step, self.group.to_save(self.trainer.tensors()), description, score)
        self.saved = state.step

    def close(self) -> None:
        """Close the files."""
        self.metrics.close()
        self.samples.close()
        self.trackers.close()


def _due(step: int, every: int) -> bool:
    return bool(every) and step % every == 0


def train(
    cfg: RunConfig,
    folder: Path | str,
    *,
    resume: bool = False,
    accept_changes: bool = False,
    trackers: Sequence[str] = ("tensorboard",),
    observer: Observer | None = None,
    cache_dir: Path | None = None,
) -> Run:
    """Train `cfg` in the folder of a run, from the beginning or, with `resume`, from its newest valid checkpoint."""
    observer = observer or Observer()
    run = Run(Path(folder))
    with join(cfg.parallel, cfg.train.device) as group, ExitStack() as stack:
        resume = any(group.exchange(resume or group.goes_on(str(run.folder))))

        def check() -> None:
            check_trackers(trackers)
            if run.exists and not resume:
                raise UserError(
                    f"run {str(run.folder)!r} exists already: go on with --resume auto, or give another --name"
                )

        cfg, corpus = agree(cfg, group, observer, cache_dir, check)
        trainer = Trainer(cfg, corpus, observer, group)
        with group.together():
            if group.leads:
                _take(run, cfg, stack, accept_changes=accept_changes)
                group.begun(str(run.folder))
        checkpoint = _find(run, group, observer) if resume else None
        if checkpoint is not None:
            with group.together():
                trainer.restore(checkpoint)
        if group.leads:
            _describe(run, cfg, corpus)
        _train(trainer, run, checkpoint, trackers if group.leads else [])
    return run


def agree(
    cfg: RunConfig, group: Group, observer: Observer, cache_dir: Path | None, check: Callable[[], None] = lambda: None
) -> tuple[RunConfig, Corpus]:
    """All: the data of a configuration, which is the same for all, and the configuration with its vocabulary."""
    group.check_same("configuration", cfg.model_dump(mode="json"))
    with group.together():
        check()
        machine.pick_dtype(cfg.train.precision, machine.pick_device(cfg.train.device))
        corpus = prepare(cfg.data, cache_dir=cache_dir, progress=observer.data)
    group.check_same("corpus", corpus.fingerprint)
    return fit_vocabulary(cfg, corpus), corpus


def _take(run: Run, cfg: RunConfig, stack: ExitStack, *, accept_changes: bool) -> None:
    """Make a run's folder this process's own for as long as the stack is open."""
    make_folder(run.folder)
    stack.enter_context(RunLock(run.folder))
    checkpoints = run.checkpoints(cfg.train.keep_last)
    if checkpoints.folder.exists():
        sweep(checkpoints.folder)
    _check_same(run, cfg, accept_changes=accept_changes)


def _train(trainer: Trainer, run: Run, checkpoint: Checkpoint | None, trackers: Sequence[str]) -> None:
    """One session, from the beginning or from a checkpoint that was restored."""
    cfg, group, observer = trainer.cfg, trainer.group, trainer.observer
    checkpoints = run.checkpoints(cfg.train.keep_last, crew=group.crew)
    log = Trackers(trackers, run.folder, cfg.model_dump(mode="json"), trainer.state.step, observer.message)
    with Signals(group), BackgroundSaver(checkpoints) if group.saves else Bystander() as saver:
        session = Session(trainer, run, log, saver)
        with _closing(session, observer):
            session.metrics.cut(checkpoint.state["journals"]["metrics"] if checkpoint else 0)
            session.samples.cut(checkpoint.state["journals"]["samples"] if checkpoint else 0)
            observer.begin(trainer)
            with group.guarded():  # at once, before a save in flight is waited for: the others ask who is left
                session.loop()


@contextmanager
def _closing(session: Session, observer: Observer) -> Iterator[None]:
    try:
        yield
    finally:
        observer.end()
        session.close()


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


def _check_same(run: Run, cfg: RunConfig, *, accept_changes: bool) -> None:
    """Raise where a run that exists was started with another configuration."""
    # how processes share a run changes nothing in it
    changed = differences(run.config(), cfg.replace(parallel=run.config().parallel)) if run.exists else {}
    if changed and not accept_changes:
        listed = ", ".join(f"{key}: {old} → {new}" for key, (old, new) in changed.items())
        raise UserError(
            f"run {str(run.folder)!r} was started with another configuration ({listed}); "
            "go on with the old one, or add --accept-changes"
        )


def _describe(run: Run, cfg: RunConfig, corpus: Corpus) -> None:
    """Write what the run is."""
    corpus.tokenizer.save(run.tokenizer_file)
    write_json(
        run.config_file,
        {
            "config": cfg.model_dump(mode="json"),
            "command": sys.argv,
            "versions": machine.versions(),
            "machine": machine.machine(),
            "data": {"fingerprint": corpus.fingerprint, "train_tokens": corpus.train.n_tokens},
        },
    )


def _find(run: Run, group: Group, observer: Observer) -> Checkpoint | None:
    """The newest valid checkpoint: the first process finds and verifies it, the others open the same."""
    checkpoint: Checkpoint | None = None
    with group.together():
        if group.leads:
            checkpoint, damaged = run.checkpoints().latest_valid()
            for path, reason in damaged:
                observer.message(f"skipped the damaged checkpoint {path.name}: {reason}")
    name = group.exchange(checkpoint.path.name if checkpoint else None)[0]
    if name is None:
        return None
    with group.together():
        checkpoint = checkpoint or Checkpoints.load(run.checkpoints().folder / name, verified=True)
    assert checkpoint is not None
    observer.message(f"going on from step {checkpoint.step}")
    return checkpoint
