"""Blocks for inference: gains multiplied into matrices, products of one input as one, matrices laid out for few rows.

A folded block computes what its block computes, by fewer and longer products. Decoding a token reads every weight once
and little else, so what counts is how fast they stream from memory. On a CPU a product with few rows runs faster along
the longer side of a matrix than across it, so that side is the contiguous one; and faster again where each core reads
a stretch of memory of its own, so the matrix goes in as a batch of slabs (`benchmarks/one_row.py` has the figures).

Shapes: B batch, T tokens, d width.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skipless.nn.attention import Attention, as_linear
from skipless.nn.blocks import Block, ParallelBlock, SequentialBlock
from skipless.nn.cache import InputPast, Past
from skipless.nn.layers import GLU, MLP, Rotation, Scale, scale_linear, weighted_sum
from skipless.nn.mask import Mask


def fold_block(block: Block) -> Block:
    """The block for inference. The one that is given is used up: its parts live on in the one that is returned."""
    if isinstance(block.mlp, MLP | GLU):
        scale_linear(block.mlp.down, block.beta_ff)
        block.set_gain("beta_ff", 1.0)
    attention = block.attention
    if isinstance(attention, Attention):
        attention.value, attention.projection = as_linear(attention.value), as_linear(attention.projection)
        if attention.scale_output(block.beta_sa):
            block.set_gain("beta_sa", 1.0)
    for parent in list(block.modules()):
        for name, part in parent.named_children():
            if type(part) is nn.Linear:
                setattr(parent, name, SlabLinear.of(part))
    if not isinstance(attention, Attention):
        return block
    return (FoldedParallelBlock if isinstance(block, ParallelBlock) else FoldedSequentialBlock)(block)


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
    rows, by_outputs = x.shape[:-1].numel(), weight.stride(1) == 1
    slabs = math.gcd(weight.shape[0 if by_outputs else 1], max(8, torch.get_num_threads()))
    if not (0 < rows <= FEW_ROWS and weight.numel() >= LARGE_MATRIX and slabs > 1 and _is_eager_on_cpu(x, weight)):
        return F.linear(x, weight, bias)
    flat = x.reshape(rows, -1)
    if by_outputs:
        parts = flat.expand(slabs, -1, -1) @ weight.unflatten(0, (slabs, -1)).mT  # (slabs, rows, out / slabs)
        y = parts.transpose(0, 1).reshape(*x.shape[:-1], -1)
    else:
        parts = flat.unflatten(1, (slabs, -1)).transpose(0, 1) @ weight.mT.unflatten(0, (slabs, -1))
        y = parts.sum(0).view(*x.shape[:-1], -1)
    return y if bias is None else y + bias


def _is_eager_on_cpu(x: Tensor, weight: Tensor) -> bool:
    of_type = x.dtype == weight.dtype in (torch.float32, torch.float64)
    return of_type and x.device.type == "cpu" and not torch.compiler.is_compiling()


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


class JointLinear(nn.Module):
    """Several linear maps of one input as one product. The maps become views of its rows: nothing is stored twice."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, maps: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.widths = [part.out_features for part in maps]
        self.register_buffer("weight", along_longer_side(torch.cat([part.weight for part in maps])), persistent=False)
        biases: list[Tensor] = [
            part.weight.new_zeros(part.out_features) if part.bias is None else part.bias for part in maps
        ]
        some = any(part.bias is not None for part in maps)
        self.register_buffer("bias", torch.cat(biases) if some else None, persistent=False)
        for part, rows in zip(maps, self.weight.split(self.widths), strict=True):
            part.weight = nn.Parameter(rows)

    def forward(self, x: Tensor, count: int) -> tuple[Tensor, ...]:  # (B, T, d) → a tensor for each map
        """The first `count` of the maps."""
        widths = self.widths[:count]
        weight, bias = self.weight[: sum(widths)], None if self.bias is None else self.bias[: sum(widths)]
        return slab_product(x, weight, bias).split(widths, dim=-1)


class _Folded(nn.Module):
    """What both blocks share: the parts of the block they were made of, and the joint product."""

    def __init__(self, block: Block) -> None:
        nn.Module.__init__(self)
        vars(self).update(vars(block))  # its modules, gains and numbers
        attention, up = block.attention, getattr(block.mlp, "up", None) if isinstance(block, ParallelBlock) else None
        assert isinstance(attention, Attention)
        # the keys last, for a cache of inputs does without them
        maps = {"query": attention.query, "value": attention.value, "up": up, "key": attention.key}
        self.names = tuple(name for name, part in maps.items() if isinstance(part, nn.Linear))
        self.joint = JointLinear([part for part in maps.values() if isinstance(part, nn.Linear)])

    def mixed(self, h: Tensor, mask: Mask | Past, turn: Rotation | None) -> tuple[Tensor, Tensor | None]:
        """The attention of h, and h W_up where the MLP has the same input."""
        attention = self.attention
        assert isinstance(attention, Attention)
        names = self.names[:-1] if isinstance(mask, InputPast) else self.names
        parts = dict(zip(names, self.joint(h, len(names)), strict=True))
        q, v, up = parts["query"], parts.get("value", h), parts.get("up")
        if isinstance(mask, InputPast):
            return attention.from_inputs(h, q, v, mask), up
        return attention.mix(q, parts["key"], v, mask, turn), up


class FoldedSequentialBlock(_Folded, SequentialBlock):
    """`SequentialBlock` with queries, keys and values as one product."""

    def forward(self, x: Tensor, mask: Mask | Past, turn: Rotation | None = None) -> Tensor:
        mha, _ = self.mixed(self.norm_sa(x), mask, turn)
        x_hat = self.post_norm_sa(weighted_sum((self.alpha_sa, x), (self.beta_sa, mha)))
        mlp = self.mlp(self.norm_ff(x_hat))
        return self.post_norm_ff(weighted_sum((self.alpha_ff, x_hat), (self.beta_ff, mlp)))


class FoldedParallelBlock(_Folded, ParallelBlock):
    """`ParallelBlock` with queries, keys, values and the first product of the MLP as one."""

    def branches(self, h: Tensor, mask: Mask | Past, turn: Rotation | None) -> list[tuple[Scale, Tensor | None]]:
        mha, up = self.mixed(h, mask, turn)
        mlp = self.mlp.contract(up) if isinstance(self.mlp, MLP | GLU) and up is not None else None
        return [(self.beta_ff, mlp), (self.beta_sa, mha)]
