"""Blocks for inference: gains multiplied into matrices, products of one input as one, matrices laid out for few rows.

A folded block computes what its block computes, by fewer and longer products. Decoding a token reads every weight once
and little else, so what counts is how fast they stream from memory (`slabs`).

Shapes: B batch, T tokens, d width.
"""

import copy
from collections import Counter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from skipless.nn.blocks import Block
from skipless.nn.kernels.install import become, plain_type
from skipless.nn.kernels.modules import MLP, Attention, Embedding, ParallelBlock, SequentialBlock, as_linear
from skipless.nn.kernels.predicate import have_no_hooks
from skipless.nn.kernels.slabs import SlabLinear, along_longer_side, slab_product
from skipless.nn.layers import GLU, Gain, WithGains, identity
from skipless.nn.masks import MaskLike
from skipless.nn.mixing import Shaped, VSkipInit
from skipless.nn.model import Transformer
from skipless.nn.positions import Rope

Model = TypeVar("Model", bound=Transformer)


@torch.no_grad()
def fold(model: Model) -> Model:
    """A copy of a model for inference, with a state of its own.

    What is not exactly ours stays as it is: a subclass, an adapter, what is parametrised, hooked or shared.
    """
    folded = copy.deepcopy(model).eval()
    shared = _in_several_places(folded)
    for block in folded.blocks:
        if type(block) in FOLDED and have_no_hooks(*block.modules()) and shared.isdisjoint(_ids_inside(block)):
            _fold_block(block)  # pyrefly: ignore
    if type(folded.embedding) in (nn.Embedding, Embedding):
        folded.embedding.weight = nn.Parameter(along_longer_side(folded.embedding.weight))
    return folded.requires_grad_(False)


def _in_several_places(model: nn.Module) -> set[int]:
    """The modules and parameters that a model has in more than one place, by their ids."""
    places = (*model.named_modules(remove_duplicate=False), *model.named_parameters(remove_duplicate=False))
    return {one for one, count in Counter(id(thing) for _, thing in places).items() if count > 1}


def _ids_inside(block: nn.Module) -> set[int]:
    return {id(thing) for thing in (*block.modules(), *block.parameters())}


def _fold_block(block: Block) -> None:
    mha, mlp = block.attention, block.mlp
    plain_mlp = type(mlp) in (MLP, GLU) and _are_exact(mlp, "up", "down")
    if plain_mlp:
        _scale_linear(mlp.down, block.beta_ff)  # pyrefly: ignore
        _set_gain(block, "beta_ff", 1.0)
        _use_slabs(mlp)  # pyrefly: ignore
    if type(mha) is Attention and _are_exact(mha, "query", "key"):
        mha.value, mha.projection = as_linear(mha.value), as_linear(mha.projection)
        if _scale_output(mha, block.beta_sa):
            _set_gain(block, "beta_sa", 1.0)
        _use_slabs(mha)
        block.joint = JointLinear.of(block, with_mlp=plain_mlp and isinstance(block, ParallelBlock))
        become(block, FOLDED[type(block)])
    block.folded = True  # pyrefly: ignore


def _are_exact(part: Any, *maps: str) -> bool:
    """Whether these are linear layers and nothing else, and so is the dropout behind them."""
    return all(type(getattr(part, name)) is nn.Linear for name in maps) and type(part.dropout) is nn.Dropout


def _use_slabs(part: nn.Module) -> None:
    for name, layer in list(part.named_children()):
        if type(layer) is nn.Linear:
            setattr(part, name, SlabLinear.of(layer))


def _set_gain(module: WithGains, name: str, value: float) -> None:
    """Fix a gain at a number."""
    if name in module.initial_gains:
        del module.initial_gains[name]
        delattr(module, name)
    setattr(module, name, value)


def _scale_linear(layer: nn.Linear, gain: Gain) -> None:
    """Multiply a gain into a linear map."""
    if gain is not None:
        layer.weight.mul_(gain)
        if layer.bias is not None:
            layer.bias.mul_(gain)


def _scale_output(mha: Attention, gain: Gain) -> bool:
    """Multiply a gain into W^P, or where there is none into the gains of the mixing; false if there are neither."""
    if type(mha.projection) is nn.Linear:
        _scale_linear(mha.projection, gain)
        return True
    if mha.projection is not identity or plain_type(mha.mixing) not in (VSkipInit, Shaped):
        return False
    for name in ("alpha", "beta", "gamma"):
        own = getattr(mha.mixing, name, None)
        if isinstance(own, Tensor) and gain is not None:
            own.mul_(gain)
        elif own is not None and gain is not None:
            setattr(mha.mixing, name, float(own * gain))
    return True


class JointLinear(nn.Module):
    """Several linear maps of one input as one product. The maps become views of its rows: nothing is stored twice."""

    weight: Tensor
    bias: Tensor | None
    places: tuple[tuple[nn.Module, str], ...] = ()
    parts: tuple[nn.Module, ...] = ()
    """What is not called because this is, and where each stands: its parent, and its name there."""

    def __init__(self, maps: dict[str, nn.Linear]) -> None:
        super().__init__()
        self.widths = {name: part.out_features for name, part in maps.items()}
        weight = torch.cat([part.weight for part in maps.values()])
        self.register_buffer("weight", along_longer_side(weight), persistent=False)
        biases: list[Tensor] = [
            part.weight.new_zeros(len(part.weight)) if part.bias is None else part.bias for part in maps.values()
        ]
        some = any(part.bias is not None for part in maps.values())
        self.register_buffer("bias", torch.cat(biases) if some else None, persistent=False)
        for part, rows in zip(maps.values(), self.weight.split(list(self.widths.values())), strict=True):
            part.weight = nn.Parameter(rows)

    @classmethod
    def of(cls, block: Any, *, with_mlp: bool) -> "JointLinear":
        """The maps of a block's input: queries, values, the MLP's first product, and last the keys, which a cache of
        inputs does without.
        """
        mha, mlp = block.attention, block.mlp
        homes = {"query": mha, "value": mha, **({"up": mlp} if with_mlp else {}), "key": mha}
        homes = {name: home for name, home in homes.items() if type(getattr(home, name)) is SlabLinear}
        made = cls({name: getattr(home, name) for name, home in homes.items()})
        inside = [(home, name) for name, home in homes.items()]
        made.places = ((block, "attention"), *([(block, "mlp")] if with_mlp else []), *inside)
        made.parts = tuple(getattr(home, name) for home, name in made.places)
        return made

    def serves(self) -> bool:
        """Whether nobody would notice that the maps are not called: each still has its place, and no hook."""
        for (home, name), part in zip(self.places, self.parts, strict=True):
            if home._modules.get(name) is not part:
                return False
        return have_no_hooks(*self.parts)

    def forward(self, x: Tensor, *, keys: bool = True) -> dict[str, Tensor]:  # (B, T, d) → a tensor for each map
        """All maps, or all but the keys."""
        if keys:
            parts = slab_product(x, self.weight, self.bias)
            return dict(zip(self.widths, parts.split(list(self.widths.values()), dim=-1), strict=True))
        widths = {name: n for name, n in self.widths.items() if name != "key"}
        total = sum(widths.values())
        parts = slab_product(x, self.weight[:total], None if self.bias is None else self.bias[:total])
        return dict(zip(widths, parts.split(list(widths.values()), dim=-1), strict=True))


def mixed(mha: object, h: Tensor, parts: dict[str, Tensor], mask: MaskLike, rope: Rope | None) -> Tensor:
    """The attention of h from the products that were made together."""
    assert isinstance(mha, Attention)
    q, v = parts["query"], parts["value"] if "value" in parts else mha.value(h)
    return mha.from_inputs(h, q, v, mask) if mask.of_inputs else mha.mix(q, parts["key"], v, mask, rope)


class FoldedSequentialBlock(SequentialBlock):
    """`SequentialBlock` with queries, keys and values as one product."""

    joint: JointLinear

    def forward(self, x: Tensor, mask: MaskLike, rope: Rope | None = None) -> Tensor:
        if not self.joint.serves():
            return super().forward(x, mask, rope)
        h = self.norm_sa(x)
        mha = mixed(self.attention, h, self.joint(h, keys=not mask.of_inputs), mask, rope)
        x_hat = self.post_norm_sa(self.weighted_sum((self.alpha_sa, x), (self.beta_sa, mha)))
        mlp = self.mlp(self.norm_ff(x_hat))
        return self.post_norm_ff(self.weighted_sum((self.alpha_ff, x_hat), (self.beta_ff, mlp)))


class FoldedParallelBlock(ParallelBlock):
    """`ParallelBlock` with queries, keys, values and the first product of the MLP as one."""

    joint: JointLinear

    def forward(self, x: Tensor, mask: MaskLike, rope: Rope | None = None) -> Tensor:
        if not self.joint.serves():
            return super().forward(x, mask, rope)
        h = self.norm(x)
        parts = self.joint(h, keys=not mask.of_inputs)
        mlp = self.mlp.contract(parts["up"]) if "up" in parts else self.mlp(h)  # pyrefly: ignore
        mha = mixed(self.attention, h, parts, mask, rope)
        return self.weighted_sum((self.alpha_comb, x), (self.beta_ff, mlp), (self.beta_sa, mha))


FOLDED: dict[type[nn.Module], type[nn.Module]] = {
    SequentialBlock: FoldedSequentialBlock,
    ParallelBlock: FoldedParallelBlock,
}
