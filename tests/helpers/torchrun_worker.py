"""What the processes of tests do: torchrun starts this once with a folder in which tasks are asked for.

    torchrun --nproc-per-node 2 -m tests.helpers.torchrun_worker FOLDER PROCESS

Each task is a function of this file with its arguments. A task that raises a UserError or is interrupted has its
message for a result.
"""

import gc
import itertools
import json
import os
import pickle
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from skipless.config.run import RunConfig
from skipless.data import prepare
from skipless.distributed.launch import join
from skipless.errors import UserError
from skipless.nn.sampling import Sampling, sample_text
from skipless.storage.atomic_files import write_json
from skipless.training.observer import Observer
from skipless.training.stopping import Interrupted, NonFinite
from skipless.training.train import train as run_training
from skipless.training.trainer import Trainer, fit_vocabulary

RANK = int(os.environ.get("RANK", "0"))


def trainer_of(cfg, cache_dir, group) -> Trainer:
    cfg = RunConfig.model_validate(cfg)
    corpus = prepare(cfg.data, cache_dir=Path(cache_dir))
    return Trainer(fit_vocabulary(cfg, corpus), corpus, group=group)


def in_group(cfg):
    return join(RunConfig.model_validate(cfg).parallel)


def losses(cfg, cache_dir, steps):
    """The loss and the gradient's norm of each step, a held-out loss, and weights in the end."""
    with in_group(cfg) as group:
        trainer = trainer_of(cfg, cache_dir, group)
        found, norms = [], []
        for _ in range(steps):
            before = trainer.state.loss_sum
            norms.append(trainer.step()["grad_norm"])
            found.append(trainer.state.loss_sum - before)
        weights = {
            name: group.whole(tensor).double().norm().item() for name, tensor in trainer.model.state_dict().items()
        }
        if trainer.update.average is not None:
            tensors = trainer.update.average.tensors
            weights |= {
                f"average {name}": group.whole(tensor).double().norm().item() for name, tensor in tensors.items()
            }
            weights["average's held-out loss"] = trainer.evaluate_average().loss
        compiled = [block._compiled_call_impl is not None for block in trainer.model.blocks]
        valid = trainer.evaluate().loss
        return {"losses": found, "norms": norms, "valid": valid, "weights": weights, "compiled": compiled}


class StopBySignal(Observer):
    """Sends SIGTERM to its own process, one of many, at a step."""

    def __init__(self, rank, step):
        self.rank, self.step = rank, step

    def log(self, record):
        if record["step"] >= self.step and self.rank == RANK:
            os.kill(os.getpid(), signal.SIGTERM)


def train(
    cfg,
    cache_dir,
    folder,
    resume=False,
    stop_rank=None,
    stop_step=10**9,
    other=None,
    other_text=None,
    other_tracker=None,
):
    """A run, which one process may be asked to leave at a step, or in which the second one has something else."""
    cfg, trackers = RunConfig.model_validate(cfg), []
    if RANK == 1:
        cfg = cfg.override(other or {})
        trackers = [other_tracker] if other_tracker else []
    if other_text:  # a path that is the same for both, with something else behind it
        here = Path(other_text).parent / "here" / str(RANK)
        here.mkdir(parents=True)
        shutil.copytree(Path(cfg.data.source.removeprefix("files:")).parent if RANK == 0 else other_text, here / "text")
        os.chdir(here)
        cfg = cfg.override({"data.source": "files:text/*.py"})
    observer = StopBySignal(stop_rank, stop_step)
    run_training(cfg, folder, resume=resume, trackers=trackers, observer=observer, cache_dir=Path(cache_dir))


def poison(cfg, cache_dir, parameter):
    """What is said when one process's share of a weight is not a number."""
    with in_group(cfg) as group:
        trainer = trainer_of(cfg, cache_dir, group)
        named = {name: p for p, name in trainer.update.names.items()}
        with torch.no_grad():
            group.local(named[parameter]).fill_(float("nan"))
        trainer.step()


class OfHalfTheRows:
    """A checkpoint whose only tensor has as many rows as one process's share of it."""

    def __init__(self, name, tensor):
        self.name, self.tensor = name, tensor

    def tensors(self, stem, rows):
        assert rows(self.name, tuple(self.tensor.shape)) is None
        return {self.name: self.tensor}


def mistaken_share(cfg, cache_dir):
    """Whether a tensor of another model's shape is left as it is, for loading it to be refused."""
    with in_group(cfg) as group:
        targets = trainer_of(cfg, cache_dir, group).model.state_dict()
        name = "blocks.0.mlp.up.weight"
        half = torch.zeros(group.local(targets[name]).shape)
        return group.loaded(OfHalfTheRows(name, half), "model", targets)[name] is half


def sample_first(cfg, cache_dir):
    """The gradient's norm in a step before which nothing but a sample went through the model."""
    with in_group(cfg) as group:
        trainer = trainer_of(cfg, cache_dir, group)
        group.forward_no_grad(sample_text, trainer.model, "def", 2, Sampling(temperature=0))
        return trainer.step()["grad_norm"]


def unpickle():
    """Whether the guard holds."""
    try:
        pickle.loads(b"\x80\x04N.")  # noqa: S301
    except AssertionError as error:
        return str(error)


class Counter(TorchDispatchMode):
    """Bytes that this process sends by ring algorithms, by kind of collective; messages of a few bytes apart."""

    def __init__(self):
        super().__init__()
        self.sent, self.calls = {}, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.note(func._opname, args)
        return func(*args, **(kwargs or {}))

    def note(self, name, args):
        group = next(dist.ProcessGroup.unbox(one) for one in args if isinstance(one, torch.ScriptObject))
        first, second = ([x.nbytes for x in tree_leaves(one) if isinstance(x, torch.Tensor)] for one in args[:2])
        size = {"allreduce_": 2 * sum(first), "_allgather_base_": sum(first), "_reduce_scatter_base_": sum(second)}
        key = name if name in size else f"{name} (control)"
        count = size.get(name, sum(first)) * (group.size() - 1) / group.size()
        self.sent[key] = self.sent.get(key, 0) + count
        self.calls[key] = self.calls.get(key, 0) + 1


def communication(cfg, cache_dir):
    """What is sent in the third step, and what the plan says."""
    with in_group(cfg) as group:
        trainer = trainer_of(cfg, cache_dir, group)
        for _ in range(2):
            trainer.step()
        with Counter() as counter:
            trainer.step()
        return {"sent": counter.sent, "calls": counter.calls, "planned": trainer.planned.communication}


def resident(reset=False) -> int:
    """Bytes of memory that the system has given this process: now, or with `reset` before, the most since then."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(status["VmRSS" if reset else "VmHWM"].split()[0])


def memory(cfg, cache_dir):
    """The most memory that a step takes of the system, and what the plan says.

    Small things that PyTorch loads on the way have been loaded by a smaller training before. With
    MALLOC_MMAP_THRESHOLD_ set, large tensors come from the system and go back to it at once.
    """
    small = RunConfig.model_validate(cfg).override({"model.d_model": 32})
    losses(small, cache_dir, 2)
    gc.collect()
    before = resident(reset=True)
    with in_group(cfg) as group:
        trainer = trainer_of(cfg, cache_dir, group)
        for _ in range(2):
            trainer.step()
        tensors = [group.local(tensor) for tensor in trainer.model.state_dict().values()]
        tensors += [group.local(x) for o in trainer.update.optimizers for s in o.state.values() for x in s.values()]
        kept = sum({x.data_ptr(): x.nbytes for x in tensors}.values())
        gc.collect()
        resident(reset=True)
        trainer.step()
        return {"kept": kept, "peak": resident() - before, "planned": trainer.planned.memory}


def do(task):
    """What a task returns, or the message of what it raised."""
    name, arguments = task
    try:
        return globals()[name](**arguments)
    except (UserError, Interrupted, NonFinite) as error:
        error.__traceback__ = None
        gc.collect()  # what the frames of the error held of the group
        if dist.is_initialized():
            dist.destroy_process_group()
        return f"{type(error).__name__}: {error}"


def main(folder, parent):
    """Do what is asked in `tasks-0.json`, `tasks-1.json`, …, until the process that asks has ended."""
    for number in itertools.count():
        asked = Path(folder, f"tasks-{number}.json")
        while not asked.exists():
            if not Path("/proc", parent).exists():
                return
            time.sleep(0.05)
        results = [do(task) for task in json.loads(asked.read_text())]
        write_json(Path(folder, f"found-{number}-{RANK}.json"), results)


if __name__ == "__main__":
    main(*sys.argv[1:])
