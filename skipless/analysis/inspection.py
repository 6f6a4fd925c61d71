"""Everything that `skipless inspect` shows of a configuration, before anything is trained."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from skipless.analysis.costs import count_parameters, decoding_memory, flops_per_token, training_memory
from skipless.analysis.device_plan import Plan, plan
from skipless.analysis.drawing import draw, removed
from skipless.analysis.signal_propagation import Layer, measure_signal
from skipless.config.model import ModelConfig
from skipless.config.run import ParallelConfig


@dataclass(frozen=True)
class Inspection:
    """Everything `skipless inspect` shows of one configuration."""

    name: str
    drawing: str
    removed: list[str]
    parameters: dict[str, int]
    flops_per_token: dict[str, float]
    training_memory: dict[str, int]
    decoding_memory: dict[str, int]
    signal: list[Layer] = field(default_factory=list)
    plans: list["Plan"] = field(default_factory=list)
    """For many devices: with whole models, and with shares of one."""

    @property
    def total_parameters(self) -> int:
        """All trainable parameters, tied ones once."""
        return sum(self.parameters.values())

    def as_dict(self, device_memory: int | None = None) -> dict[str, Any]:
        """For JSON, with null for what is not a finite number; with the memory of a device, whether plans fit."""
        signal = [{k: v if math.isfinite(v) else None for k, v in asdict(layer).items()} for layer in self.signal]
        plans = [one.as_dict(device_memory) for one in self.plans]
        return {**asdict(self), "total_parameters": self.total_parameters, "signal": signal, "plans": plans}


def inspect(
    cfg: ModelConfig,
    name: str = "block",
    *,
    causal: bool = True,
    batch_size: int = 8,
    context: int = 1024,
    signal: bool = True,
    seed: int = 0,
    devices: int = 1,
    micro_batch: int | None = None,
) -> Inspection:
    """Inspect a configuration; memory for training at `batch_size` sequences and for decoding at `context` tokens.

    With `devices`, also what each of them needs, `micro_batch` sequences at a time, and sends.
    """
    kinds = [ParallelConfig(kind="ddp"), ParallelConfig(kind="fsdp")] if devices > 1 else []
    sizes = {"batch_size": batch_size, "micro_batch": micro_batch}
    return Inspection(
        name=name,
        drawing=draw(cfg.block),
        removed=removed(cfg.block),
        parameters=count_parameters(cfg),
        flops_per_token=flops_per_token(cfg),
        training_memory=training_memory(cfg, batch_size, causal=causal),
        decoding_memory=decoding_memory(cfg, context),
        signal=measure_signal(cfg, causal=causal, seed=seed) if signal else [],
        plans=[plan(cfg, kind, devices, causal=causal, **sizes) for kind in kinds],
    )
