"""Several processes that train one model, as torchrun starts them.

`join` gives a process its `Group`: `Group` itself for one process alone, `DDPGroup` (DDP) or `FSDPGroup` (FSDP2) for
many. The rest of the library asks the group and does not know which one it has.

A step does not depend on the number of processes: its sequences, their count and the mean over their tokens are the
same; the processes only divide the work. Nothing is pickled: what processes say to each other besides weights and
gradients are numbers and JSON (PyTorch's own object collectives would pickle).

Methods whose docstrings begin with "Collective" must be called by every process at the same point.
"""

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from skipless.config.run import ParallelConfig
from skipless.distributed import devices
from skipless.distributed.channel import Channel
from skipless.errors import UserError

if TYPE_CHECKING:
    from torch.distributed import Store

    from skipless.nn.model import CausalLM, MaskedLM
    from skipless.storage.checkpoint_format import Checkpoint

    Model = CausalLM | MaskedLM


NamedTensors = Mapping[str, Tensor]

COMMUNICATION = ("gloo", "nccl", "connection closed", "connection reset", "timed out")
"""What stands in the message of an error that another process caused."""

GRACE = 2.0
"""Seconds that are given to the others to say that they are still there."""

POLL = 0.05
"""Seconds between two looks at who is ready."""

BEAT = 1.0
"""Seconds between two signs of life of a process that does something long by itself."""


class LostRank(Exception):
    """Another process ended or does not answer. The last checkpoint is intact. `loud` is true for one of those left."""

    status = 3

    def __init__(self, message: str, *, loud: bool) -> None:
        super().__init__(message)
        self.loud = loud


def first_process() -> bool:
    """Whether this is the process that prints and writes; known before the processes have met."""
    return int(os.environ.get("RANK", "0")) == 0


class Group(Channel):
    """The processes of a training and how they share it: here one process, which does everything itself."""

    def __init__(self, cfg: ParallelConfig | None = None, *args: Any) -> None:
        super().__init__(*args)
        self.cfg = cfg or ParallelConfig()
        self.where: Callable[[], str] = lambda: "before the first step"
        """Says how far the training is, for the message when a process is lost."""
        self.torchrun: Store | None = None
        """What torchrun remembers when it starts processes again, if it is there and does."""

    @property
    def save_group(self) -> Channel:
        """The ranks that write a checkpoint together, apart from the training: this process alone."""
        return Channel()

    @property
    def tolerates_second_signal(self) -> bool:
        """Whether a second signal is borne: torchrun and Slurm both send one, and end who takes too long."""
        return self.size > 1

    def note_started(self, what: str) -> None:
        """Tell the process that torchrun may start in this one's place that it had started something."""
        if self.torchrun is not None:
            self.torchrun.set(f"skipless/begun/{what}", "1")

    def was_restarted(self, what: str) -> bool:
        """Whether torchrun has started this process in the place of one that had started it."""
        restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        return restarted and (self.torchrun is None or self.torchrun.check([f"skipless/begun/{what}"]))

    def guarded(self) -> AbstractContextManager[Any]:
        """A block in which an error that another process caused becomes a `LostRank`."""
        return nullcontext()

    def device(self, name: str) -> torch.device:
        """The device by its name in a configuration."""
        return devices.pick_device(name)

    def processes_on(self, device: torch.device) -> int:
        """How many processes share the memory of a device."""
        return 1

    def check_same(self, what: str, value: Any) -> None:
        """Collective: raise a UserError in every process if this value is not the same in all of them."""

    def share(self, rows: int) -> tuple[int, int, int]:
        """This process's part of `rows`: the first, the end, and the most that any process has."""
        most = -(-rows // self.size)
        return min(self.rank * most, rows), min((self.rank + 1) * most, rows), most

    # -------------------------------------------------------------------- the model

    def build(self, make: Callable[[], "Model"], device: torch.device) -> "Model":
        """A model, by a function that makes it; `wrap` completes it."""
        return make().to(device)

    def wrap(self, model: "Model", device: torch.device, dtype: torch.dtype, *, accumulates: bool) -> None:
        """Collective: share the model. Its parameters are then what the optimiser is to change."""

    def first_pass(self, run: Callable[[], Tensor]) -> None:
        """Collective: make the first pass, which may differ from later ones, before the first step, with a loss."""

    def forward(self, function: Callable[..., Tensor], *args: Any) -> Tensor:
        """Collective: a function of the model with a gradient, such as its loss."""
        return function(*args)

    def forward_no_grad(self, function: Callable[..., Any], *args: Any) -> Any:
        """Collective: a function of the model without a gradient."""
        with torch.no_grad():
            return function(*args)

    def accumulating(self, *, last: bool) -> AbstractContextManager[Any]:
        """For a forward and a backward pass: gradients are added up across processes at the last one."""
        return nullcontext()

    drops_gradients = True
    """Whether gradients are best let go after a step; else they are set to zero where they lie."""

    # ----------------------------------------------------------------------- tensors

    def local(self, tensor: Tensor) -> Tensor:
        """This process's part of a parameter, a gradient, or what an optimiser remembers."""
        return tensor

    def whole(self, tensor: Tensor) -> Tensor:
        """Collective: the whole of it."""
        return tensor

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Collective: the norm of all gradients together."""
        return torch.nn.utils.get_total_norm([self.local(gradient) for gradient in gradients])

    def to_save(self, parts: Mapping[str, NamedTensors]) -> Mapping[str, NamedTensors]:
        """What this process writes of named tensors by file. To iterate over it may talk: all do, in one order."""
        return parts

    @property
    def saves(self) -> bool:
        """Whether this process takes part in writing, and not only in gathering."""
        return self.is_main_process

    def loaded(self, checkpoint: "Checkpoint", stem: str, targets: NamedTensors) -> dict[str, Tensor]:
        """What a checkpoint has in one file, each tensor in the form of the target of its name."""
        return checkpoint.tensors(stem)


class MultiProcessGroup(Group):
    """Many processes. What is common to both ways to share a model."""

    def __init__(self, cfg: ParallelConfig, store: "Store", rank: int, size: int) -> None:
        super().__init__(cfg, rank, size)
        self._store = store
        self._barriers = 0
        self.root: nn.Module = nn.Identity()

    def device(self, name: str) -> torch.device:
        device = super().device(name)
        if device.type == "cpu" or device.index is not None:
            return device
        local, here = int(os.environ.get("LOCAL_RANK", "0")), torch.accelerator.device_count()
        if local >= here:
            raise UserError(f"process {local} of this machine has no {device.type} device: there are {here}")
        torch.accelerator.set_device_index(local)
        return torch.device(device.type, local)

    def processes_on(self, device: torch.device) -> int:
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if device.type == "cpu" else 1

    @contextmanager
    def raise_on_all_ranks(self) -> Iterator[None]:
        """As `Channel.raise_on_all_ranks`, for work that may take one process hours, such as preparing data.

        The others wait as long as it gives signs of life.
        """
        with super().raise_on_all_ranks(), self._giving_signs_of_life():
            try:
                yield
            except UserError:
                self._wait_for_all()
                raise
            except BaseException:
                self._store.set("lost", str(self.rank))
                raise
            self._wait_for_all()

    @contextmanager
    def _giving_signs_of_life(self) -> Iterator[None]:
        over = threading.Event()

        def beat() -> None:
            with suppress(RuntimeError):  # the store went with the process that was lost
                while not over.wait(BEAT):
                    self._store.add(f"alive/{self.rank}", 1)

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _wait_for_all(self) -> None:
        """Each process looks after the next one, and tells the others when that one has gone silent."""
        self._barriers += 1
        ready, after = f"ready/{self._barriers}", (self.rank + 1) % self.size
        self._store.add(ready, 1)
        beats, heard = -1, time.monotonic()
        while self._store.add(ready, 0) < self.size:
            time.sleep(POLL)
            if self._store.check(["lost"]):
                lost = self._store.get("lost").decode()
                here = os.environ.get("LOCAL_RANK", "0") == "0"
                raise LostRank(f"{self.where()}: rank {lost} was lost; the last checkpoint is intact", loud=here)
            now = self._store.add(f"alive/{after}", 0)
            if now != beats:
                beats, heard = now, time.monotonic()
            elif time.monotonic() - heard > self.cfg.timeout:
                self._store.set("lost", str(after))

    def check_same(self, what: str, value: Any) -> None:
        said = self.exchange(value)
        other = next((rank for rank, one in enumerate(said) if one != said[0]), None)
        if other is not None:
            where = _difference(said[0], said[other])
            raise UserError(f"rank {other} has another {what} than rank 0{where}; every process needs the same")

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """A block in which an error that another process caused becomes a `LostRank`."""
        try:
            yield
        except RuntimeError as error:
            text = str(error).lower()
            if not any(mark in text for mark in COMMUNICATION):
                raise
            raise self._lost(timed_out="timed out" in text or "timeout" in text) from error

    def _lost(self, *, timed_out: bool) -> LostRank:
        """Who is left says so in the store; who does not is the one that was lost."""
        silent: list[int] = []
        try:
            self._store.set(f"left/{self.rank}", "1")
            time.sleep(GRACE)
            silent = [rank for rank in range(self.size) if not self._store.check([f"left/{rank}"])]
        except RuntimeError:  # the store went with the process that was lost
            pass
        who = f"rank {', '.join(map(str, silent))}" if silent else "another process"
        what = f"did not answer within {self.cfg.timeout:g} s" if timed_out else "has ended"
        first_left = next(rank for rank in range(self.size) if rank not in silent)
        return LostRank(f"{self.where()}: {who} {what}; the last checkpoint is intact", loud=self.rank == first_left)

    def leave(self) -> None:
        """Let the shared model go while there are still processes to talk to.

        Should DDP's own parts go last, they take PyTorch's threads with them while they hold Python's lock, for which
        one of those threads may be waiting.
        """
        self.root = nn.Identity()
        gc.collect()


def _difference(one: Any, other: Any, path: str = "") -> str:
    """Where two mappings first differ, by dotted key."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return f": {path} is {other} and not {one}" if path else ""
    key = next(key for key in {**one, **other} if one.get(key) != other.get(key))
    return _difference(one.get(key), other.get(key), f"{path}.{key}" if path else key)


class Root(nn.Module):
    """Calls a function of the model inside a forward pass, so that hooks on the whole model see any of them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)
