"""FSDP2: every process has a shard of each tensor."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from skipless.config.run import ParallelConfig
from skipless.distributed.channel import Channel
from skipless.distributed.group import MultiProcessGroup, NamedTensors, Root
from skipless.errors import UserError

if TYPE_CHECKING:
    from torch.distributed import Store

    from skipless.nn.model import CausalLM, MaskedLM
    from skipless.storage.checkpoint_format import Checkpoint

    Model = CausalLM | MaskedLM


class FSDPGroup(MultiProcessGroup):
    """FSDP2: every process has a share of each tensor, by rows; a block is gathered when it is needed."""

    def __init__(self, cfg: ParallelConfig, store: "Store", rank: int, size: int) -> None:
        super().__init__(cfg, store, rank, size)
        if size % cfg.replicas:
            raise UserError(f"parallel.replicas {cfg.replicas} does not divide the {size} processes")
        self.shards = size // cfg.replicas
        self.shard = rank % self.shards
        self._save_group: Channel | None = None
        self._initial: nn.Module | None = None

    @property
    def save_group(self) -> Channel:
        """A channel of its own, for a checkpoint is written by a thread while the training talks on."""
        return self._save_group or Channel()

    # -------------------------------------------------------------------- the model

    def build(self, make: Callable[[], "Model"], device: torch.device) -> "Model":
        """Without memory: no process but the first, which draws the initial weights, ever has the whole model."""
        self._initial = make() if self.is_main_process else None
        with torch.device("meta"):
            return make()

    def wrap(self, model: "Model", device: torch.device, dtype: torch.dtype, *, accumulates: bool) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        if self.cfg.checkpoint == "sharded":
            self._save_group = Channel(self.rank, self.size, new_group(range(self.size), self.cfg.timeout))
        mesh = self._mesh(device)
        self._shard_group = mesh.get_group("shard")
        reduce = torch.bfloat16 if self.cfg.reduce == "bf16" else torch.float32
        # Blocks are gathered in the type of their products. The embedding and the head stay as they are: the loss is
        # made from them.
        inside = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=reduce)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=inside, reshard_after_forward=self.cfg.reshard)
        self.root = Root(model)
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
                [(row, new_group(row, self.cfg.timeout)) for row in table.tolist()] for table in (ranks.T, ranks)
            )
        ]
        return DeviceMesh.from_group(both, device.type, mesh=ranks, mesh_dim_names=("replicate", "shard"))

    @torch.no_grad()
    def _fill(self, model: "Model", device: torch.device) -> None:
        """Give every process its share of the weights that the first one drew, a tensor at a time."""
        import torch.distributed as dist

        drawn = {} if self._initial is None else self._initial.state_dict()
        for name, target in model.state_dict().items():
            whole = drawn[name] if self.is_main_process else torch.empty(target.shape, dtype=target.dtype)
            whole = whole.to(device).contiguous()
            dist.broadcast(whole, 0)
            self.local(target).copy_(whole[self.rows(target)] if self.is_sharded(target) else whole)
        self._initial = None

    def first_pass(self, run: Callable[[], Tensor]) -> None:
        # FSDP keeps the memory into which it first gathers. Should a sample come first, in inference mode, that memory
        # could not be trained with.
        self.forward_no_grad(run)

    def forward(self, function: Callable[..., Tensor], *args: Any) -> Tensor:
        return self.root(function, *args)

    def forward_no_grad(self, function: Callable[..., Any], *args: Any) -> Any:
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
    def is_sharded(tensor: Tensor) -> bool:
        """Whether each process has a share of it."""
        from torch.distributed.tensor import DTensor

        return isinstance(tensor, DTensor)

    def rows(self, tensor: Tensor) -> slice:
        """Which rows of a tensor are this process's: equal parts, rounded up, so that the last ones may be empty."""
        count = -(-tensor.shape[0] // self.shards)
        return slice(min(self.shard * count, tensor.shape[0]), min((self.shard + 1) * count, tensor.shape[0]))

    def local(self, tensor: Tensor) -> Tensor:
        return tensor.to_local() if self.is_sharded(tensor) else tensor  # pyrefly: ignore

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if self.is_sharded(tensor) else tensor  # pyrefly: ignore

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        import torch.distributed as dist

        own = [part for part in map(self.local, gradients) if part.numel()]
        square = torch.nn.utils.get_total_norm(own).double().square()
        dist.all_reduce(square, group=self._shard_group)
        return square.sqrt().float()

    @property
    def saves(self) -> bool:
        return self.is_main_process or self.cfg.checkpoint == "sharded"

    def to_save(self, parts: Mapping[str, NamedTensors]) -> Mapping[str, NamedTensors]:
        if self.cfg.checkpoint == "whole":
            return {stem: _Viewed(named, self.whole) for stem, named in parts.items()}
        if self.rank >= self.shards:  # another copy of what the first ranks write
            return {}
        mine = {stem: {name: t for name, t in named.items() if self._writes(t)} for stem, named in parts.items()}
        own = f"{self.shard + 1:05d}-of-{self.shards:05d}"
        return {f"{stem}-{own}": _Viewed(named, self.local) for stem, named in mine.items()}

    def _writes(self, tensor: Tensor) -> bool:
        return self.local(tensor).numel() > 0 if self.is_sharded(tensor) else self.is_main_process

    def loaded(self, checkpoint: "Checkpoint", stem: str, targets: NamedTensors) -> dict[str, Tensor]:
        shares: set[str] = set()

        def wanted(name: str, shape: tuple[int, ...]) -> slice | None:
            target = targets.get(name)
            if target is None or not self.is_sharded(target) or tuple(target.shape) != shape:
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


def new_group(ranks: Sequence[int], timeout: float) -> Any:
    """Collective: a process group of some of the ranks."""
    import torch.distributed as dist

    return dist.new_group(list(ranks), timeout=timedelta(seconds=timeout))
