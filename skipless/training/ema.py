"""The average of the weights over steps (EMA), evaluated and saved beside the weights."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Parameter

from skipless.distributed.group import Group
from skipless.errors import UserError
from skipless.storage.checkpoint_format import AVERAGE, Checkpoint


class WeightAverage:
    """An exponential average of a model's parameters: average ← f·average + (1 − f)·weights after each step.

    The factor f grows to `decay` by (1 + n)/(10 + n), or the random weights of the start would stay in it for long.
    It is in float32 at least, for in bfloat16 steps as small as (1 − f) of the way are rounded off. Where the model is
    sharded, each process averages its shards.
    """

    def __init__(self, names: Mapping[Parameter, str], decay: float, group: Group) -> None:
        self.decay, self.group, self.steps = decay, group, 0
        self.parameters = list(names)
        self.tensors: dict[str, Tensor] = {
            name: p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True) for p, name in names.items()
        }

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights after a step."""
        self.steps += 1
        factor = min(self.decay, (1 + self.steps) / (10 + self.steps))
        averages = self._averages()
        weights = [weight.to(average.dtype) for average, weight in zip(averages, self._weights(), strict=True)]
        torch._foreach_lerp_(averages, weights, 1 - factor)

    def _averages(self) -> list[Tensor]:
        return [self.group.local(tensor) for tensor in self.tensors.values()]

    def _weights(self) -> list[Tensor]:
        return [self.group.local(parameter.detach()) for parameter in self.parameters]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context manager: the model has the averaged weights. Nothing may be saved meanwhile."""
        finer = self._finer()
        self._swap()
        try:
            yield
        finally:
            self._swap()
            for average, exact in finer:
                average.copy_(exact)

    def _finer(self) -> list[tuple[Tensor, Tensor]]:
        """The averages that are rounded on their way through the model, each with a copy."""
        both = zip(self._averages(), self._weights(), strict=True)
        return [(average, average.clone()) for average, weight in both if average.dtype != weight.dtype]

    @torch.no_grad()
    def _swap(self) -> None:
        for average, weight in zip(self._averages(), self._weights(), strict=True):
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)

    @torch.no_grad()
    def restore(self, checkpoint: Checkpoint) -> None:
        """Collective: take over what a checkpoint holds."""
        if AVERAGE not in checkpoint.stems:
            raise UserError(f"{str(checkpoint.path)!r} has no average of the weights: continue without train.ema")
        found = self.group.loaded(checkpoint, AVERAGE, self.tensors)
        if found.keys() != self.tensors.keys():
            raise UserError(f"{str(checkpoint.path)!r} has an average of other weights than the model's")
        for name, tensor in self.tensors.items():
            if found[name].shape != tensor.shape:
                raise UserError(f"{str(checkpoint.path)!r} has an average of {name} in another shape")
            self.group.local(tensor).copy_(self.group.local(found[name]))
        self.steps = int(checkpoint.state[AVERAGE])
