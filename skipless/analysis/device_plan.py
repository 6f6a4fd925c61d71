"""What each of many devices needs for a training, and what it sends in a step."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from skipless.analysis.costs import FLOAT, on_meta, training_memory
from skipless.config.model import ModelConfig
from skipless.config.run import ParallelConfig


@dataclass(frozen=True)
class Plan:
    """What each of many devices needs for a training, and what it sends in a step."""

    kind: str
    devices: int
    memory: dict[str, int]
    """Bytes by part, with their `total`."""
    communication: dict[str, int]
    """Bytes that each device sends in a step (and receives), with their `total`."""
    arithmetic: dict[str, str]
    """How the parts came about."""

    def as_dict(self, device_memory: int | None = None) -> dict[str, Any]:
        """For JSON; with the memory of a device, whether it is enough."""
        fits = {} if device_memory is None else {"fits": self.memory["total"] <= device_memory}
        return {**asdict(self), **fits}


def plan(
    cfg: ModelConfig,
    parallel: ParallelConfig,
    devices: int,
    *,
    batch_size: int,
    micro_batch: int | None = None,
    causal: bool = True,
    length: int | None = None,
    block_bytes: int = FLOAT,
    recompute: bool = False,
    average: bool = False,
) -> Plan:
    """Memory and communication of a float32 training with AdamW on `devices`, of `batch_size` sequences together.

    A device has `micro_batch` sequences in memory at a time, at most its part of the batch. `block_bytes` is the size
    of a number of a gathered block: 2 under bfloat16. With `recompute` only the blocks' inputs are kept until the
    backward pass, and with `average` there is an average of the weights beside them. The bytes sent are those of ring
    algorithms: (W−1)/W of a tensor that is gathered or scattered, twice that of one that is added up everywhere.
    """
    own = -(-batch_size // devices)
    micro = min(micro_batch or own, own)
    passes = -(-own // micro)
    one = training_memory(cfg, micro, causal=causal, length=length, recompute=recompute, average=average)
    if devices == 1:
        return Plan("one", 1, one, {"total": 0}, {})
    sizes = _Sizes.of(cfg, devices // parallel.replicas)
    how = _plan_ddp if parallel.kind == "ddp" else _plan_fsdp
    memory, communication, arithmetic = how(sizes, parallel, devices, passes, one, block_bytes)
    memory |= {"activations": one["activations"], "logits": one["logits"]}
    kept = "what autograd saves" if not recompute else "the blocks' inputs, and what autograd saves in one,"
    arithmetic["activations"] = f"{kept} of {micro} of {own} sequences"
    if average:
        memory["average"] = FLOAT * (sizes.share if parallel.kind == "fsdp" else sizes.all)
    memory["total"], communication["total"] = sum(memory.values()), sum(communication.values())
    return Plan(parallel.kind, devices, memory, communication, arithmetic)


@dataclass(frozen=True)
class _Sizes:
    """Numbers in the parameters of the root and of the blocks, and in the shares of them that one device has."""

    root: int
    blocks: list[int]
    root_share: int
    block_shares: list[int]
    fixed: int
    shards: int

    @classmethod
    def of(cls, cfg: ModelConfig, shards: int) -> "_Sizes":
        model = on_meta(cfg)
        inside = {id(p) for block in model.blocks for p in block.parameters()}
        root = [p for p in model.parameters() if id(p) not in inside]

        def share(parameters: Iterable[Tensor]) -> int:
            return sum(-(-p.shape[0] // shards) * (p.numel() // p.shape[0]) for p in parameters)

        return cls(
            root=sum(p.numel() for p in root),
            blocks=[sum(p.numel() for p in block.parameters()) for block in model.blocks],
            root_share=share(root),
            block_shares=[share(block.parameters()) for block in model.blocks],
            fixed=sum(buffer.numel() for buffer in model.buffers()),
            shards=shards,
        )

    @property
    def all(self) -> int:
        """Parameters."""
        return self.root + sum(self.blocks)

    @property
    def fixed_text(self) -> str:
        """What is whole on every device and not trained, as a term of the arithmetic."""
        return f" + {FLOAT} B × {self.fixed:,} fixed" if self.fixed else ""

    @property
    def share(self) -> int:
        """Parameters of one device."""
        return self.root_share + sum(self.block_shares)


Parts = tuple[dict[str, int], dict[str, int], dict[str, str]]


def _plan_ddp(
    sizes: _Sizes, parallel: ParallelConfig, devices: int, passes: int, one: dict[str, int], block_bytes: int
) -> Parts:
    width = 2 if parallel.reduce == "bf16" else FLOAT
    memory = {part: one[part] for part in ("weights", "gradients", "optimiser")}
    added = 2 * (devices - 1) * width * sizes.all // devices
    arithmetic = {
        "weights": f"{FLOAT} B × {sizes.all:,} parameters" + sizes.fixed_text,
        "gradients": f"{FLOAT} B × {sizes.all:,}",
        "optimiser": f"2 × {FLOAT} B × {sizes.all:,}",
        "gradients added up": f"2 × {devices - 1}/{devices} × {width} B × {sizes.all:,}, once a step",
    }
    return memory, {"gradients added up": added}, arithmetic


def _plan_fsdp(
    sizes: _Sizes, parallel: ParallelConfig, devices: int, passes: int, one: dict[str, int], block_bytes: int
) -> Parts:
    shards, copies = sizes.shards, parallel.replicas
    width = 2 if parallel.reduce == "bf16" else FLOAT
    kept_whole = passes > 1 and not parallel.shard_accumulated
    largest = max(sizes.blocks)
    # the block at hand and the next; or all, which in the backward pass go one by one as shares of gradients come
    there = 2 * largest
    if not parallel.reshard:
        there = max(there, sum(sizes.blocks) - sum(sizes.block_shares))
    memory = {
        "weights": FLOAT * (sizes.share + sizes.fixed),
        "gradients": FLOAT * sizes.share + (FLOAT * sizes.all if kept_whole else 0),
        "optimiser": 2 * FLOAT * sizes.share,
        "gathered": FLOAT * sizes.root + block_bytes * there,
        "gradients on their way": 0 if kept_whole else FLOAT * (sizes.root + largest),
    }
    turns = passes * (2 if parallel.reshard else 1)
    reductions = passes if parallel.shard_accumulated else 1
    gathered = (shards - 1) * (passes * FLOAT * sizes.root_share + turns * block_bytes * sum(sizes.block_shares))
    communication = {
        "weights gathered": gathered,
        "gradients scattered": reductions * (shards - 1) * width * sizes.share,
        "gradients of copies": reductions * 2 * (copies - 1) * width * sizes.share // copies,
    }
    arithmetic = {
        "weights": f"{FLOAT} B × {sizes.share:,} of {sizes.all:,} parameters" + sizes.fixed_text,
        "gradients": f"{FLOAT} B × {sizes.share:,}" + (f" + {FLOAT} B × {sizes.all:,}, whole" if kept_whole else ""),
        "optimiser": f"2 × {FLOAT} B × {sizes.share:,}",
        "gathered": f"{FLOAT} B × {sizes.root:,} of embedding and head + {block_bytes} B × {there:,} of blocks",
        "gradients on their way": "" if kept_whole else f"{FLOAT} B × ({sizes.root:,} + {largest:,})",
        "weights gathered": f"{shards - 1} × ({passes} × {FLOAT} B × {sizes.root_share:,} of embedding and head + "
        f"{turns} × {block_bytes} B × {sum(sizes.block_shares):,} of blocks)",
        "gradients scattered": f"{reductions} × {shards - 1} × {width} B × {sizes.share:,}",
        "gradients of copies": f"{reductions} × 2 × {copies - 1}/{copies} × {width} B × {sizes.share:,}",
    }
    return memory, communication, arithmetic
