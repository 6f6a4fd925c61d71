"""What a part of somebody's own costs: its products, traced without arithmetic."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from skipless.config.model import ModelConfig
from skipless.nn.own_parts import trial


class _CountingMask:
    """Stands in a mask's place and counts how often attention is asked for."""

    of_inputs: ClassVar[bool] = False
    explicit: ClassVar[bool] = False

    def __init__(self) -> None:
        self.asked = 0

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.asked += 1
        return v

    def mean(self, v: Tensor) -> Tensor:
        return v


def own_flops(module: Any, cfg: ModelConfig, length: int) -> float:
    """Floating-point operations of the matrix products of a part for a token in a sequence of `length`.

    Attention counts as 4·T·d each time that the part asks its mask for it, as everywhere.
    """
    told: Callable[[int], float] | None = getattr(module, "flops_per_token", None)
    if told is not None:
        return float(told(length))
    kind, mask = module.own_part.split(" ")[0], _CountingMask()
    with torch.device("meta"), torch.no_grad():
        inputs: tuple[Any, ...] = trial(kind, module.made_of, batch=1, length=length)[0]
        if kind == "mixing":
            inputs = (*inputs[:3], mask)
        counter = FlopCounterMode(display=False)
        try:
            with counter:
                module(*inputs)
        except (RuntimeError, NotImplementedError, AttributeError):  # it looks at values, or at the mask's own matrices
            weights = sum(one.weight.numel() for one in module.modules() if isinstance(one, nn.Linear))
            return 2.0 * weights + (4.0 * length * cfg.d_model if kind == "mixing" else 0.0)
    return counter.get_total_flops() / length + 4.0 * length * cfg.d_model * mask.asked
