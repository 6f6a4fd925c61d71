"""Several processes that train one model, as torchrun starts them.

`join` gives a process its `Group`: `Group` itself for one process alone, `Replicated` (DDP) or `Sharded` (FSDP2) for
many. The rest of the library asks the group and does not know which one it has.

Global means global: the sequences of a step, their number and the mean over their tokens do not depend on the number of
processes, which only share them. Nothing is pickled: what processes say to each other besides weights and gradients are
numbers and JSON (PyTorch's own object collectives would pickle).

Every method that talks has to be called by every process at the same point; its docstring says so with "all".
"""

import gc
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from skipless import machine
from skipless.config import ParallelConfig
from skipless.errors import UserError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store

    from skipless.checkpoint import Checkpoint
    from skipless.nn.model import CausalLM, MaskedLM

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


# ----------------------------------------------------------------------------- what is said


class Channel:
    """What processes say to each other: numbers and JSON. Without a process group this one talks to itself."""

    def __init__(self, rank: int = 0, size: int = 1, over: "ProcessGroup | None" = None) -> None:
        self.rank, self.size, self._over = rank, size, over
        self.received = 0
        """The signal that this process was sent, if any."""
        self._known = 0

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    @property
    def signal(self) -> int:
        """The signal that any process was sent, as of the last `gather`: the same for all, 0 if there was none."""
        return self.received if self.size == 1 else self._known

    def gather(self, values: Sequence[float] = ()) -> list[list[float]]:
        """All: everyone's values by rank. A signal that somebody received travels along."""
        if self.size == 1:
            return [list(values)]
        own = torch.tensor([self.received, *values], dtype=torch.float64)
        rows = [row.tolist() for row in self._all_gather(own)]
        self._known = int(max(row[0] for row in rows))
        return [row[1:] for row in rows]

    def sum(self, *values: float) -> list[float]:
        """All: the sums over all processes, added in the order of the ranks, so the same everywhere."""
        return [sum(column) for column in zip(*self.gather(values), strict=True)]

    def exchange(self, value: Any) -> list[Any]:
        """All: everyone's value by rank, as JSON."""
        if self.size == 1:
            return [value]
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [int(size) for size in self._all_gather(torch.tensor([text.numel()]))]
        padded = nn.functional.pad(text, (0, max(sizes) - text.numel()))
        texts = zip(self._all_gather(padded), sizes, strict=True)
        return [json.loads(bytes(other[:size].tolist())) for other, size in texts]

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        import torch.distributed as dist

        found = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(found, tensor, group=self._over)
        return found

    @contextmanager
    def together(self) -> Iterator[None]:
        """All: what is done in this block is done by all, or a UserError of any process is raised in every one."""
        if self.size == 1:
            yield
            return
        problem: UserError | None = None
        try:
            yield
        except UserError as error:
            problem = error
        said = self.exchange(None if problem is None else {"text": str(problem), "status": _status(problem)})
        rank, first = next(((rank, one) for rank, one in enumerate(said) if one), (0, None))
        if first is not None:
            error = UserError(first["text"] if rank == 0 else f"rank {rank}: {first['text']}")
            error.status = first["status"]  # pyrefly: ignore
            raise error from problem


def _status(error: UserError) -> int:
    return getattr(error, "status", 2)


# -------------------------------------------------------------------------------- one process


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
    def crew(self) -> Channel:
        """Those who write a checkpoint together, apart from the training: this process alone."""
        return Channel()

    @property
    def patient(self) -> bool:
        """Whether a second signal is borne: torchrun and Slurm both send one, and end who takes too long."""
        return self.size > 1

    def begun(self, what: str) -> None:
        """Let those that torchrun may start in this process's place know that it has begun something."""
        if self.torchrun is not None:
            self.torchrun.set(f"skipless/begun/{what}", "1")

    def goes_on(self, what: str) -> bool:
        """Whether torchrun has started this process in the place of one that had begun it."""
        restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        return restarted and (self.torchrun is None or self.torchrun.check([f"skipless/begun/{what}"]))

    def guarded(self) -> AbstractContextManager[Any]:
        """A block in which an error that another process caused becomes a `LostRank`."""
        return nullcontext()

    def device(self, name: str) -> torch.device:
        """The device by its name in a configuration."""
        return machine.pick_device(name)

    def processes_on(self, device: torch.device) -> int:
        """How many processes share the memory of a device."""
        return 1

    def check_same(self, what: str, value: Any) -> None:
        """All: raise a UserError in every process if this value is not the same in all of them."""

    def share(self, rows: int) -> tuple[int, int, int]:
        """This process's part of `rows`: the first, the end, and the most that any process has."""
        most = -(-rows // self.size)
        return min(self.rank * most, rows), min((self.rank + 1) * most, rows), most

    # -------------------------------------------------------------------- the model

    def build(self, make: Callable[[], "Model"], device: torch.device) -> "Model":
        """A model, by a function that makes it; `wrap` completes it."""
        return make().to(device)

    def wrap(self, model: "Model", device: torch.device, dtype: torch.dtype, *, accumulates: bool) -> None:
        """All: share the model. Its parameters are then what the optimiser is to change."""

    def settle(self, run: Callable[[], Tensor]) -> None:
        """All: have the first pass, which may differ from the others, behind; `run` makes a loss."""

    def forward(self, function: Callable[..., Tensor], *args: Any) -> Tensor:
        """All: a function of the model with a gradient, such as its loss."""
        return function(*args)

    def look(self, function: Callable[..., Any], *args: Any) -> Any:
        """All: a function of the model without a gradient."""
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
        """All: the whole of it."""
        return tensor

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """All: the norm of all gradients together."""
        return torch.nn.utils.get_total_norm([self.local(gradient) for gradient in gradients])

    def to_save(self, parts: Mapping[str, NamedTensors]) -> Mapping[str, NamedTensors]:
        """What this process writes of named tensors by file. To iterate over it may talk: all do, in one order."""
        return parts

    @property
    def saves(self) -> bool:
        """Whether this process takes part in writing, and not only in gathering."""
        return self.leads

    def loaded(self, checkpoint: "Checkpoint", stem: str, targets: NamedTensors) -> dict[str, Tensor]:
        """What a checkpoint has in one file, each tensor in the form of the target of its name."""
        return checkpoint.tensors(stem)


# ------------------------------------------------------------------------------ many processes


class Ranks(Group):
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
    def together(self) -> Iterator[None]:
        """As `Channel.together`, for work that may take one process hours, such as preparing data.

        The others wait as long as it gives signs of life.
        """
        with super().together(), self._giving_signs_of_life():
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


class _Root(nn.Module):
    """Calls a function of the model inside a forward pass, so that hooks on the whole model see any of them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


class Replicated(Ranks):
    """DDP: every process has the whole model; gradients are added up while the backward pass runs."""

    def wrap(self, model: "Model", device: torch.device, dtype: torch.dtype, *, accumulates: bool) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
        from torch.nn.parallel import DistributedDataParallel

        self.root = DistributedDataParallel(
            _Root(model),
            device_ids=None if device.type == "cpu" else [device.index],
            forward_sync_buffers=False,  # W_init is fixed
            gradient_as_bucket_view=True,
            static_graph=not accumulates,
        )
        # else those of the first micro-batches would lie beside DDP's buckets, and take their memory once more
        self.drops_gradients = not accumulates
        if self.cfg.reduce == "bf16":
            self.root.register_comm_hook(None, bf16_compress_hook)

    def settle(self, run: Callable[[], Tensor]) -> None:
        # After its first backward pass DDP puts gradients into other buckets, in which they may add up in another
        # order. Had by every session before its first step, it is the same in one that resumes and one that goes on.
        (self.forward(run) * 0).backward()
        self.root.zero_grad(set_to_none=True)

    def forward(self, function: Callable[..., Tensor], *args: Any) -> Tensor:
        return self.root(function, *args)

    def accumulating(self, *, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self.root.no_sync()  # pyrefly: ignore


class Sharded(Ranks):
    """FSDP2: every process has a share of each tensor, by rows; a block is gathered when it is needed."""

    def __init__(self, cfg: ParallelConfig, store: "Store", rank: int, size: int) -> None:
        super().__init__(cfg, store, rank, size)
        if size % cfg.replicas:
            raise UserError(f"parallel.replicas {cfg.replicas} does not divide the {size} processes")
        self.shards = size // cfg.replicas
        self.shard = rank % self.shards
        self._crew: Channel | None = None
        self._initial: nn.Module | None = None

    @property
    def crew(self) -> Channel:
        """A channel of its own, for a checkpoint is written by a thread while the training talks on."""
        return self._crew or Channel()

    # -------------------------------------------------------------------- the model

    def build(self, make: Callable[[], "Model"], device: torch.device) -> "Model":
        """Without memory: no process but the first, which draws the initial weights, ever has the whole model."""
        self._initial = make() if self.leads else None
        with torch.device("meta"):
            return make()

    def wrap(self, model: "Model", device: torch.device, dtype: torch.dtype, *, accumulates: bool) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        if self.cfg.checkpoint == "sharded":
            self._crew = Channel(self.rank, self.size, _new_group(range(self.size), self.cfg.timeout))
        mesh = self._mesh(device)
        self._shard_group = mesh.get_group("shard")
        reduce = torch.bfloat16 if self.cfg.reduce == "bf16" else torch.float32
        # Blocks are gathered in the type of their products. The embedding and the head stay as they are: the loss is
        # made from them.
        inside = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=reduce)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=inside, reshard_after_forward=self.cfg.reshard)
        self.root = _Root(model)
        fully_shard(self.root, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce))
        self._units: list[Any] = [*model.blocks, self.root]
        model.to_empty(device=device)
        self._fill(model, device)

    def _mesh(self, device: torch.device) -> Any:
        from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        # PyTorch takes a mesh of the same ranks for the same mesh, and so would use the groups of an earlier training
        _clear_sharding_prop_cache()
        if self.cfg.replicas == 1:
            return init_device_mesh(device.type, (self.size,), mesh_dim_names=("shard",))
        ranks = torch.arange(self.size).view(self.cfg.replicas, self.shards)  # neighbours share a model
        both = [
            next(group for row, group in groups if self.rank in row)
            for groups in (
                [(row, _new_group(row, self.cfg.timeout)) for row in table.tolist()] for table in (ranks.T, ranks)
            )
        ]
        return DeviceMesh.from_group(both, device.type, mesh=ranks, mesh_dim_names=("replicate", "shard"))

    @torch.no_grad()
    def _fill(self, model: "Model", device: torch.device) -> None:
        """Give every process its share of the weights that the first one drew, a tensor at a time."""
        import torch.distributed as dist

        drawn = {} if self._initial is None else self._initial.state_dict()
        for name, target in model.state_dict().items():
            whole = drawn[name] if self.leads else torch.empty(target.shape, dtype=target.dtype)
            whole = whole.to(device).contiguous()
            dist.broadcast(whole, 0)
            self.local(target).copy_(whole[self.rows(target)] if self.is_shared(target) else whole)
        self._initial = None

    def settle(self, run: Callable[[], Tensor]) -> None:
        # FSDP keeps the memory into which it first gathers. Should a sample come first, in inference mode, that memory
        # could not be trained with.
        self.look(run)

    def forward(self, function: Callable[..., Tensor], *args: Any) -> Tensor:
        return self.root(function, *args)

    def look(self, function: Callable[..., Any], *args: Any) -> Any:
        with torch.no_grad():
            found = self.root(function, *args)
        for module in self._units:  # after a forward pass alone they may stay gathered
            module.reshard()
        return found

    def accumulating(self, *, last: bool) -> AbstractContextManager[Any]:
        self.root.set_requires_gradient_sync(last or self.cfg.shard_accumulated)  # pyrefly: ignore
        return nullcontext()

    # ----------------------------------------------------------------------- tensors

    @staticmethod
    def is_shared(tensor: Tensor) -> bool:
        """Whether each process has a share of it."""
        from torch.distributed.tensor import DTensor

        return isinstance(tensor, DTensor)

    def rows(self, tensor: Tensor) -> slice:
        """Which rows of a tensor are this process's: equal parts, rounded up, so that the last ones may be empty."""
        count = -(-tensor.shape[0] // self.shards)
        return slice(min(self.shard * count, tensor.shape[0]), min((self.shard + 1) * count, tensor.shape[0]))

    def local(self, tensor: Tensor) -> Tensor:
        return tensor.to_local() if self.is_shared(tensor) else tensor  # pyrefly: ignore

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if self.is_shared(tensor) else tensor  # pyrefly: ignore

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        import torch.distributed as dist

        own = [part for part in map(self.local, gradients) if part.numel()]
        square = torch.nn.utils.get_total_norm(own).double().square()
        dist.all_reduce(square, group=self._shard_group)
        return square.sqrt().float()

    @property
    def saves(self) -> bool:
        return self.leads or self.cfg.checkpoint == "sharded"

    def to_save(self, parts: Mapping[str, NamedTensors]) -> Mapping[str, NamedTensors]:
        if self.cfg.checkpoint == "whole":
            return {stem: _Viewed(named, self.whole) for stem, named in parts.items()}
        if self.rank >= self.shards:  # another copy of what the first ranks write
            return {}
        mine = {stem: {name: t for name, t in named.items() if self._writes(t)} for stem, named in parts.items()}
        own = f"{self.shard + 1:05d}-of-{self.shards:05d}"
        return {f"{stem}-{own}": _Viewed(named, self.local) for stem, named in mine.items()}

    def _writes(self, tensor: Tensor) -> bool:
        return self.local(tensor).numel() > 0 if self.is_shared(tensor) else self.leads

    def loaded(self, checkpoint: "Checkpoint", stem: str, targets: NamedTensors) -> dict[str, Tensor]:
        shares: set[str] = set()

        def wanted(name: str, shape: tuple[int, ...]) -> slice | None:
            target = targets.get(name)
            if target is None or not self.is_shared(target) or tuple(target.shape) != shape:
                return None  # all of it, so that what does not fit is seen by who takes it
            shares.add(name)
            return self.rows(target)

        found = checkpoint.tensors(stem, wanted)
        return {name: self._share(targets[name], rows) if name in shares else rows for name, rows in found.items()}

    def _share(self, target: Tensor, rows: Tensor) -> Tensor:
        """Rows as this process's share of a tensor like `target`."""
        shared = torch.empty_like(target)
        self.local(shared).copy_(rows)
        return shared


class _Viewed(Mapping[str, Tensor]):
    """Named tensors, each seen through a function when it is asked for: only one is whole at a time."""

    def __init__(self, named: NamedTensors, view: Callable[[Tensor], Tensor]) -> None:
        self.named, self.view = named, view

    def __getitem__(self, name: str) -> Tensor:
        return self.view(self.named[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.named)

    def __len__(self) -> int:
        return len(self.named)


KINDS: dict[str, type[Replicated] | type[Sharded]] = {"ddp": Replicated, "fsdp": Sharded}


# -------------------------------------------------------------------------------- to and from


@contextmanager
def join(cfg: ParallelConfig, device: str = "auto") -> Iterator[Group]:
    """The group that this process belongs to: torchrun's, or itself alone."""
    alone, keeps = int(os.environ.get("WORLD_SIZE", "1")) == 1, os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if alone and not keeps:
        yield Group(cfg)
        return
    import torch.distributed as dist

    torchruns, rank, size = next(dist.rendezvous("env://"))
    if alone:
        group = Group(cfg)
        group.torchrun = torchruns
        yield group
        return
    store = dist.PrefixStore(f"skipless/{_meet(torchruns, rank, size, cfg.timeout)}", torchruns)
    # Numbers and JSON go by gloo, from the CPU, whatever weights go by. A device that is wrong is said later, by all.
    found = None if device == "cpu" else torch.accelerator.current_accelerator(check_available=True)
    others = "" if found is None else f",{found.type}:{dist.get_default_backend_for_device(found.type)}"
    limit = timedelta(seconds=cfg.timeout)
    try:
        dist.init_process_group(f"cpu:gloo{others}", store=store, rank=rank, world_size=size, timeout=limit)
    except RuntimeError as error:
        raise LostRank(f"the {size} processes cannot reach each other: {error}", loud=rank == 0) from error
    group = KINDS[cfg.kind](cfg, store, rank, size)
    group.torchrun = torchruns if keeps else None
    with group.guarded():
        yield group
    group.leave()
    dist.destroy_process_group()  # not after an error: it could wait for those who are no longer there


def _meet(store: "Store", rank: int, size: int, timeout: float) -> str:
    """All: a word that only those who meet now know.

    torchrun keeps its store when it starts processes again, with the addresses of those that are gone in it, and its
    count of restarts may differ between machines. So the first process offers a word, and each of the others has to
    take it up and be seen; what earlier ones left fits no offer of now.
    """
    own, end = secrets.token_hex(8), time.monotonic() + timeout
    missing = set(range(1, size))
    if rank == 0:
        store.set("skipless/offer", own)
    while missing if rank == 0 else not store.check([f"skipless/seen/{own}"]):
        if rank == 0:
            missing -= {other for other in missing if _took(store, other, own)}
        elif store.check(["skipless/offer"]):
            store.set(f"skipless/taken/{rank}", f"{store.get('skipless/offer').decode()} {own}")
        if time.monotonic() > end:
            who = ", ".join(map(str, sorted(missing))) if rank == 0 else "0"
            raise LostRank(f"at the start: rank {who} did not come within {timeout:g} s", loud=rank < 2)
        time.sleep(POLL)
    return own if rank == 0 else store.get(f"skipless/seen/{own}").decode()


def _took(store: "Store", rank: int, offered: str) -> bool:
    """Whether a process has taken up the first one's offer; it is then told that it was seen."""
    key = f"skipless/taken/{rank}"
    word, _, other = store.get(key).decode().partition(" ") if store.check([key]) else ("", "", "")
    if word == offered:
        store.set(f"skipless/seen/{other}", offered)
    return word == offered


def _new_group(ranks: Sequence[int], timeout: float) -> Any:
    import torch.distributed as dist

    return dist.new_group(list(ranks), timeout=timedelta(seconds=timeout))
