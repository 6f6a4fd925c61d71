"""Products of few rows with a large matrix, as a batch of products with slabs of it.

On a CPU a product with few rows runs faster along the longer side of a matrix than across it, so that side is the
contiguous one; and faster again where each core reads a stretch of memory of its own, so the matrix goes in as a batch
of slabs (`benchmarks/one_row.py` has the figures).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skipless.nn.kernels.predicate import runs_eagerly


def along_longer_side(weight: Tensor) -> Tensor:
    """The same (out, in) matrix with the elements of its longer side next to each other in memory."""
    rows, columns = weight.shape
    return weight.mT.contiguous().mT if rows > columns else weight.contiguous()


FEW_ROWS = 16
"""A product with at most so many rows is bound by reading the matrix."""

LARGE_MATRIX = 1 << 18
"""Elements from which on slabs pay: a smaller matrix stays in the core's own cache."""


def slab_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, where x has few rows as a batch of products with slabs of the matrix."""
    if not (runs_eagerly(x, weight) and weight.numel() >= LARGE_MATRIX and 0 < x.shape[:-1].numel() <= FEW_ROWS):
        return F.linear(x, weight, bias)
    rows, by_outputs = x.shape[:-1].numel(), weight.stride(1) == 1
    slabs = math.gcd(weight.shape[0 if by_outputs else 1], max(8, torch.get_num_threads()))
    if slabs == 1:
        return F.linear(x, weight, bias)
    flat = x.reshape(rows, -1)
    if by_outputs:
        parts = flat.expand(slabs, -1, -1) @ weight.unflatten(0, (slabs, -1)).mT  # (slabs, rows, out / slabs)
        y = parts.transpose(0, 1).reshape(*x.shape[:-1], -1)
    else:
        parts = flat.unflatten(1, (slabs, -1)).transpose(0, 1) @ weight.mT.unflatten(0, (slabs, -1))
        y = parts.sum(0).view(*x.shape[:-1], -1)
    return y if bias is None else y + bias


class SlabLinear(nn.Linear):
    """A linear map by slabs, its matrix contiguous along the longer side."""

    @classmethod
    def of(cls, layer: nn.Linear) -> "SlabLinear":
        """The same map."""
        made = cls(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        made.weight, made.bias = nn.Parameter(along_longer_side(layer.weight)), layer.bias
        return made

    def forward(self, input: Tensor) -> Tensor:
        return slab_product(input, self.weight, self.bias)
