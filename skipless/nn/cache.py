"""The cache of decoding. A layer's is passed instead of its mask, and computes A·V and C·V over all tokens so far.

    cache = model.new_cache(batch_size=2, max_len=512)
    logits = model(prompt, cache=cache)          # (2, T, V)
    logits = model(next_tokens, cache=cache)     # (2, 1, V), equal to the last row of a pass over everything

| mode | remembers | floats a token and layer |
| --- | --- | --- |
| `kv` | keys and values | 2·d |
| `kx` | keys and inputs: where W^V is the identity, the values are the inputs | 2·d |
| `x` | inputs only: W^K is absorbed into the query, W^V applied after the mixing | d |

and, for shaped attention, the sum of the values so far (one vector a layer), from which C·V follows.

Rows of a batch end together: prompts of different lengths are padded on the left, and `start` says where each begins.

Shapes: B batch, H heads, D width of a head, t new tokens, S tokens so far (the new ones included).
"""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from skipless.config.model import ModelConfig
from skipless.config.parts import find_part
from skipless.errors import UserError
from skipless.nn.masks import Mask
from skipless.nn.mixing import MIXINGS, Softmax
from skipless.nn.positions import rotates

MODES = ("auto", "kv", "kx", "x")


def pick_mode(cfg: ModelConfig, mode: str) -> str:
    """The mode that `auto` stands for; a UserError with the reason where the block does not support a mode."""
    if mode not in MODES:
        raise UserError(f"unknown cache mode {mode!r}; known: {', '.join(MODES)}")
    inputs_are_values = cfg.block.value.kind == "identity"
    if mode == "auto":
        return "kx" if inputs_are_values else "kv"
    if mode in ("kx", "x") and not inputs_are_values:
        raise UserError(f"cache mode {mode!r} needs identity value maps; this block has W^V in every layer: use 'kv'")
    if mode == "kv" and inputs_are_values:
        return "kx"  # the same thing: the values are the inputs
    reason = absorbing_problem(cfg)
    if mode == "x" and reason:
        raise UserError(f"cache mode 'x' absorbs W^K into the query, which is not exact here: {reason}; use 'kx'")
    return mode


def absorbing_problem(cfg: ModelConfig) -> str | None:
    """What stands between W^K and the score, so that W^K cannot be absorbed into the query."""
    if rotates(cfg):
        return "rotary positions turn the keys"
    if cfg.block.qk_norm:
        return "the keys are normalised"
    mixing, first = find_part("mixing", cfg.block.mixing), cfg.block.first_value
    if mixing.plugin and getattr(mixing.make, "forward", None) is not Softmax.forward:
        return f"{mixing.title} has a forward of its own, so its V and A·V are not known apart"
    if first is not None and find_part("map", first.kind).plugin:
        return f"{find_part('map', first.kind).title} of layer 1 is not known to be a matrix"
    return None


@dataclass(frozen=True)
class NewTokens:
    """The tokens of one pass, as all layers see them: where they lie, and the rows of the mask that are theirs."""

    first: int
    count: int
    mask: Mask
    """Over all S tokens; its padding is that on the left."""
    start: Tensor | None = None
    """(B,) where each row begins, if some are padded."""

    @property
    def end(self) -> int:
        """S."""
        return self.first + self.count

    def mean(self, v: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        """C·V of the new tokens (B, H, t, D): (discounted) sums over (discounted) counts; and the sum after them."""
        alibi, device = self.mask.alibi, v.device
        if self.count == 1 and self.start is None and alibi is None:
            total = total + v
            return (total / self.end).to(v.dtype), total
        index = torch.arange(self.first, self.end, device=device)
        wide = v.to(total.dtype)
        count = index[None, :] + 1 if self.start is None else (index - self.start[:, None] + 1).clamp(min=0)
        count = count[:, None, :, None].to(wide.dtype)  # (1 or B, 1, t, 1) real tokens so far
        if self.start is not None and self.first < int(self.start.max()):
            wide = wide * (index >= self.start[:, None])[:, None, :, None]
        if alibi is None:
            sums = wide.cumsum(-2) + total
        else:
            decay = torch.exp(-alibi.to(wide.dtype))[:, None, None]
            sums = _discounted(wide, total, decay)
            count = (1 - decay**count) / (1 - decay)  # 1 + e^(−m) + … over the real tokens so far
        mean = (sums / count.clamp(min=torch.finfo(torch.float32).tiny)).to(v.dtype)
        return mean, sums[:, :, -1:].clone()


def _discounted(wide: Tensor, total: Tensor, decay: Tensor) -> Tensor:
    sums = []
    for new in wide.unbind(-2):
        total = total * decay + new[..., None, :]
        sums.append(total)
    return torch.cat(sums, dim=-2)


class LayerCache:
    """Keys and values of one layer, and their sum."""

    of_inputs: ClassVar[bool] = False
    explicit: ClassVar[bool] = False
    new: NewTokens
    """Those of the pass that is under way."""
    total_after: Tensor | None = None
    """The sum with them."""

    def __init__(self, shape: tuple[int, int, int, int], total: Tensor | None, like: Tensor) -> None:
        self.keys, self.values = like.new_empty(shape), like.new_empty(shape)
        self.total = total

    def tensors(self) -> list[Tensor]:
        """Everything that is remembered."""
        return [self.keys, self.values, *([] if self.total is None else [self.total])]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Remember the new keys and values, and mix all values so far: (B, H, t, D)."""
        new = self.new
        self.keys[:, :, new.first : new.end] = k
        self.values[:, :, new.first : new.end] = v
        return new.mask.attend(q, self.keys[:, :, : new.end], self.values[:, :, : new.end])

    def mean(self, v: Tensor) -> Tensor:
        """C·V of the new tokens, from the sum so far."""
        assert self.total is not None
        mean, self.total_after = self.new.mean(v, self.total)
        return mean

    def begin(self, new: NewTokens) -> None:
        """A pass begins. Until it has gone through every layer, the sum stays as it is: it may be tried again."""
        self.new, self.total_after = new, None

    def advance(self) -> None:
        """The pass has gone through every layer."""
        if self.total_after is not None:
            self.total, self.total_after = self.total_after, None


class InputCache(LayerCache):
    """Inputs of one layer alone: with W^K absorbed into the query, x serves as key and as value.

    It has no keys, so only an attention that absorbs W^K can use it: `kernels.modules.Attention` does.
    """

    of_inputs: ClassVar[bool] = True

    def __init__(self, shape: tuple[int, int, int, int], total: Tensor | None, like: Tensor) -> None:
        batch, heads, length, width = shape
        self.inputs = like.new_empty(batch, length, heads * width)
        self.total = total

    def tensors(self) -> list[Tensor]:
        return [self.inputs, *([] if self.total is None else [self.total])]

    def append(self, x: Tensor) -> Tensor:
        """Remember the new inputs (B, t, d), and return all of them, (B, S, d)."""
        self.inputs[:, self.new.first : self.new.end] = x
        return self.inputs[:, : self.new.end]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise UserError("cache mode 'x' keeps no keys and works only with skipless's own attention; use 'kx'")


@dataclass(eq=False)
class Cache:
    """The memory of all layers."""

    config: ModelConfig
    batch_size: int
    max_len: int
    mode: str
    dtype: torch.dtype
    device: torch.device
    alibi: Tensor | None = None
    length: int = field(default=0, init=False)
    start: Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        cfg, like = self.config, torch.empty(0, dtype=self.dtype, device=self.device)
        kind = InputCache if self.mode == "x" else LayerCache
        shape = (self.batch_size, cfg.n_head, self.max_len, cfg.d_head)
        self.layers = [kind(shape, self._empty_total(), like) for _ in range(cfg.n_layer)]

    def _empty_total(self) -> Tensor | None:
        """The sum of no values yet, (B, H, 1, D) in float32 at least, where the mixing has a centring matrix."""
        mixing = self.config.block.mixing
        ours = isinstance(mixing, str) and mixing in MIXINGS  # another's may ask for a mean: a vector is soon there
        if ours and (mixing != "shaped" or self.config.block.gamma is None):
            return None
        shape = (self.batch_size, self.config.n_head, 1, self.config.d_head)
        return torch.zeros(shape, dtype=torch.promote_types(self.dtype, torch.float32), device=self.device)

    @property
    def nbytes(self) -> int:
        """Bytes of everything that is remembered."""
        return sum(tensor.nbytes for layer in self.layers for tensor in layer.tensors())

    @property
    def bytes_per_token(self) -> int:
        """Bytes that grow with the context, for one token of one sequence."""
        per_layer = (1 if self.mode == "x" else 2) * self.config.d_model
        return per_layer * self.config.n_layer * self.dtype.itemsize

    def begin(self, ids: Tensor, padding: Tensor | None) -> Tensor:
        """Make room for new tokens, the first of which may be padded on the left; their positions (1 or B, t)."""
        count = ids.shape[1]
        if ids.shape[0] != self.batch_size:
            raise UserError(f"the cache is for {self.batch_size} sequences, got {ids.shape[0]}")
        if count == 0:
            raise UserError("there is no new token")
        if self.length + count > self.max_len:
            raise UserError(
                f"the cache holds {self.max_len} tokens: {self.length} are there and {count} more do not fit"
            )
        if padding is not None and self.length:
            raise UserError("an attention_mask is for the first tokens of a cache; later ones are all real")
        start = self.start if padding is None else count - padding.sum(-1)
        end = self.length + count
        real = None if start is None else torch.arange(end, device=self.device) >= start[:, None]
        new = NewTokens(self.length, count, Mask(True, real, alibi=self.alibi), start)
        for layer in self.layers:
            layer.begin(new)
        return new.mask.positions(end, self.device)[:, self.length :]

    def advance(self, count: int) -> None:
        """The new tokens have gone through every layer: only now are they remembered."""
        for layer in self.layers:
            layer.advance()
        self.start = self.layers[0].new.start
        self.length += count

    def reset(self) -> None:
        """Forget everything and keep the memory."""
        self.length, self.start = 0, None
        for layer in self.layers:
            if layer.total is not None:
                layer.total = torch.zeros_like(layer.total)
