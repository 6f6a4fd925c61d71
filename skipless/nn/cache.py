"""What decoding remembers. A cache is a mask that remembers: it gives A·V and C·V over everything seen so far.

    cache = model.new_cache(batch_size=2, max_len=512)
    logits = model(prompt, cache=cache)          # (2, T, V)
    logits = model(next_tokens, cache=cache)     # (2, 1, V), equal to the last row of a pass over everything

| mode | remembers | floats a token and layer |
| --- | --- | --- |
| `kv` | keys and values | 2·d |
| `kx` | keys and inputs: where W^V is the identity, the values are the inputs | 2·d |
| `x` | inputs alone: W^K is absorbed into the query, W^V applied after the mixing | d |

and, for shaped attention, the sum of the values so far (one vector a layer), from which C·V follows.

Rows of a batch end together: prompts of different lengths are padded on the left, and `start` says where each begins.

Shapes: B batch, H heads, D width of a head, t new tokens, S tokens so far (the new ones included).
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from skipless.config import ModelConfig
from skipless.errors import UserError
from skipless.nn.mask import safe_softmax

MODES = ("auto", "kv", "kx", "x")


def pick_mode(cfg: ModelConfig, mode: str) -> str:
    """The mode that `auto` stands for, or the reason why a mode cannot serve."""
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
    if cfg.positions == "rotary":
        return "rotary positions turn the keys"
    if cfg.block.qk_norm:
        return "the keys are normalised"
    return None


class Past:
    """One layer's memory, in the place of its mask."""

    def __init__(self, cache: "Cache") -> None:
        cfg = cache.config
        self.cache = cache
        shape = (cache.batch_size, cfg.n_head, cache.max_len, cfg.d_head)
        self.keys = torch.empty(shape, dtype=cache.dtype, device=cache.device)
        self.values = torch.empty(shape, dtype=cache.dtype, device=cache.device)
        self.total = cache.empty_total()

    def tensors(self) -> list[Tensor]:
        """Everything that is remembered."""
        return [self.keys, self.values, *([] if self.total is None else [self.total])]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Remember the new keys and values, and mix all values so far: (B, H, t, D)."""
        first, end = self.cache.span(q.shape[-2])
        self.keys[:, :, first:end] = k
        self.values[:, :, first:end] = v
        return self.cache.attend(q, self.keys[:, :, :end], self.values[:, :, :end])

    def mean(self, v: Tensor) -> Tensor:
        """C·V of the new tokens, from the sum so far."""
        return self.cache.mean(v, self)


class InputPast(Past):
    """Inputs alone: with W^K absorbed into the query, x serves as key and as value."""

    def __init__(self, cache: "Cache") -> None:
        self.cache = cache
        shape = (cache.batch_size, cache.max_len, cache.config.d_model)
        self.inputs = torch.empty(shape, dtype=cache.dtype, device=cache.device)
        self.total = cache.empty_total()

    def tensors(self) -> list[Tensor]:
        return [self.inputs, *([] if self.total is None else [self.total])]

    def append(self, x: Tensor) -> Tensor:
        """Remember the new inputs (B, t, d), and return all of them, (B, S, d)."""
        first, end = self.cache.span(x.shape[1])
        self.inputs[:, first:end] = x
        return self.inputs[:, :end]

    def weights(self, absorbed: Tensor, inputs: Tensor) -> Tensor:
        """The new rows of A, (B, H, t, S), for absorbed queries (B, H, t, d)."""
        batch, heads, new, width = absorbed.shape
        # one product for all heads: the inputs are read once
        absorbed = absorbed.reshape(batch, heads * new, width) / math.sqrt(self.cache.config.d_head)
        scores = (absorbed @ inputs.mT).view(batch, heads, new, -1)
        rows = self.cache.bias(scores, new)
        if rows is None:
            return torch.softmax(scores, dim=-1)
        return safe_softmax(scores + (torch.where(rows, 0.0, float("-inf")) if rows.dtype == torch.bool else rows))


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

    def __post_init__(self) -> None:
        self.length = 0
        self.start: Tensor | None = None
        kind = InputPast if self.mode == "x" else Past
        self.layers = [kind(self) for _ in range(self.config.n_layer)]

    @property
    def nbytes(self) -> int:
        """Bytes of everything that is remembered."""
        return sum(tensor.nbytes for layer in self.layers for tensor in layer.tensors())

    @property
    def bytes_per_token(self) -> int:
        """Bytes that grow with the context, for one token of one sequence."""
        per_layer = (1 if self.mode == "x" else 2) * self.config.d_model
        return per_layer * self.config.n_layer * self.dtype.itemsize

    def begin(self, ids: Tensor, padding: Tensor | None) -> None:
        """Make room for new tokens; the first ones may be padded on the left."""
        if ids.shape[0] != self.batch_size:
            raise UserError(f"the cache is for {self.batch_size} sequences, got {ids.shape[0]}")
        if ids.shape[1] == 0:
            raise UserError("there is no new token")
        if self.length + ids.shape[1] > self.max_len:
            raise UserError(
                f"the cache holds {self.max_len} tokens: {self.length} are there and {ids.shape[1]} more do not fit"
            )
        if padding is not None:
            if self.length:
                raise UserError("an attention_mask is for the first tokens of a cache; later ones are all real")
            self.start = ids.shape[1] - padding.sum(-1)

    def advance(self, count: int) -> None:
        """The new tokens have gone through every layer."""
        self.length += count

    def reset(self) -> None:
        """Forget everything and keep the memory."""
        self.length, self.start = 0, None
        for layer in self.layers:
            if layer.total is not None:
                layer.total.zero_()

    def span(self, count: int) -> tuple[int, int]:
        """Where `count` new tokens lie."""
        return self.length, self.length + count

    def positions(self, count: int) -> Tensor:
        """(1 or B, t): the rank of each new token among the real tokens of its row."""
        index = torch.arange(self.length, self.length + count, device=self.device)[None]
        return index if self.start is None else (index - self.start[:, None]).clamp(min=0)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A·V of the new queries (B, H, t, D) over all keys and values (B, H, S, D)."""
        if self.length == 0 and self.start is None and self.alibi is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias(q, q.shape[-2]))

    def bias(self, like: Tensor, count: int) -> Tensor | None:
        """The new rows of the mask M, (1 or B, 1 or H, t, S), or None where every new token sees everything."""
        first, end = self.span(count)
        if count == 1 and self.start is None and self.alibi is None:
            return None
        query = torch.arange(first, end, device=self.device)[:, None]
        key = torch.arange(end, device=self.device)
        seen = (query >= key)[None, None]
        if self.start is not None:
            seen = seen & (key >= self.start[:, None])[:, None, None, :]
        if self.alibi is None:
            return seen
        distance = -self.alibi.to(like.dtype)[:, None, None] * (query - key).abs()
        return torch.where(seen, distance, float("-inf"))

    # ------------------------------------------------------------------------- C·V

    def empty_total(self) -> Tensor | None:
        """The sum of no values yet, (B, H, 1, D) in float32 at least, where the mixing has a centring matrix."""
        if self.config.block.mixing != "shaped" or self.config.block.gamma is None:
            return None
        shape = (self.batch_size, self.config.n_head, 1, self.config.d_head)
        return torch.zeros(shape, dtype=torch.promote_types(self.dtype, torch.float32), device=self.device)

    def mean(self, v: Tensor, layer: Past) -> Tensor:
        """C·V of the new tokens (B, H, t, D): (discounted) sums so far over (discounted) counts so far."""
        assert layer.total is not None
        first, end = self.span(v.shape[-2])
        if end - first == 1 and self.start is None and self.alibi is None:
            layer.total += v
            return (layer.total / end).to(v.dtype)
        index = torch.arange(first, end, device=self.device)
        wide = v.to(layer.total.dtype)
        count = index[None, :] + 1 if self.start is None else (index - self.start[:, None] + 1).clamp(min=0)
        count = count[:, None, :, None].to(wide.dtype)  # (1 or B, 1, t, 1) real tokens so far
        if self.start is not None and first < int(self.start.max()):
            wide = wide * (index >= self.start[:, None])[:, None, :, None]
        if self.alibi is None:
            sums = wide.cumsum(-2) + layer.total
        else:
            decay = torch.exp(-self.alibi.to(wide.dtype))[:, None, None]
            sums = self._discounted(wide, layer.total, decay)
            count = (1 - decay**count) / (1 - decay)  # 1 + e^(−m) + … over the real tokens so far
        layer.total.copy_(sums[:, :, -1:])
        return (sums / count.clamp(min=torch.finfo(torch.float32).tiny)).to(v.dtype)

    @staticmethod
    def _discounted(wide: Tensor, total: Tensor, decay: Tensor) -> Tensor:
        sums = []
        for new in wide.unbind(-2):
            total = total * decay + new[..., None, :]
            sums.append(total)
        return torch.cat(sums, dim=-2)
