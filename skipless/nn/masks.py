"""The mask M of equation 2 and the centring matrix C that follows from it.

C is the attention matrix A with every query-key product set to zero: C = softmax(M). So it depends on the mask, and
everything that depends on the mask lives here, twice:

- explicit: `bias` is M, `centring` is C, both as matrices. The readable statement; used by tests and plots.
- fast: `attend` is A·V through PyTorch's fused attention and `mean` is C·V in O(T·d). Neither makes a (T, T) matrix;
  where fused attention has to be given the mask itself, at most 256 rows of it are made at a time.

A mixing needs only what `MaskLike` names, `attend` and `mean` above all, so a cache can be passed instead of a mask.

Shapes: B batch, H heads, T tokens, D width of a head; t queries over S keys where only the last rows of M are wanted. A
leading 1 stands for "the same for all".
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from skipless.errors import UserError

QUERY_BLOCK = 256
"""Rows of the mask that are made at a time where fused attention cannot be told the mask in closed form."""


class MaskLike(Protocol):
    """What a block asks of a mask, and of whatever remembers earlier tokens in its place."""

    of_inputs: ClassVar[bool]
    """Whether it remembers a layer's inputs instead of keys and values: an attention has to ask it otherwise."""
    explicit: ClassVar[bool]
    """Whether the mixing matrix itself is wanted: a mixing then hands it to `mix`, and asks for nothing else."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A·V for (B, H, t, D) queries, keys and values of the tokens at hand."""
        ...

    def mean(self, v: Tensor) -> Tensor:
        """C·V for their values; asked after `attend`."""
        ...


@dataclass(frozen=True)
class Mask:
    """Which tokens see which, and how much farther ones are discounted.

    A query row that sees no token at all (a padded position under a causal mask) gets rows of zeros in A and in C.
    """

    of_inputs: ClassVar[bool] = False
    explicit: ClassVar[bool] = False

    causal: bool
    padding: Tensor | None = None
    """(B, S) bool, true where the token is real."""
    documents: Tensor | None = None
    """(B, S) int: tokens see only tokens with their own number; a document is contiguous."""
    alibi: Tensor | None = None
    """(H,) slopes m: M also holds −m·|i − j|."""
    queries: Tensor | None = None
    """(t,) places of the queries among the keys, where these are not the last t of them."""
    places: Tensor | None = None
    """(B, S) places between which ALiBi counts distances, where these are not the keys' own."""
    rows: Tensor | None = None
    """(1 or B, 1 or H, t, S): M itself but for ALiBi, where somebody gave it and it follows no rule; −∞ is not seen."""

    # ---------------------------------------------------------------- explicit form

    def visible(self, n_query: int, n_key: int, start: int = 0, device: torch.device | None = None) -> Tensor:
        """(1 or B, 1, n_query, n_key) bool: whether query start + i sees key j."""
        if self.rows is not None:
            return self.rows > float("-inf")
        query, key = self._query(n_query, start, device), torch.arange(n_key, device=device)
        seen = query[:, None] >= key if self.causal else torch.ones(n_query, n_key, dtype=torch.bool, device=device)
        seen = seen[None, None]
        if self.padding is not None:
            seen = seen & F.pad(self.padding, (0, max(0, n_key - self.padding.shape[1])))[:, None, None, :n_key]
        if self.documents is not None:
            own = self.documents[:, start : start + n_query]
            seen = seen & (own[:, None, :, None] == self.documents[:, None, None, :n_key])
        return seen

    def _query(self, n_query: int, start: int, device: torch.device | None) -> Tensor:
        return torch.arange(start, start + n_query, device=device) if self.queries is None else self.queries

    def bias(self, like: Tensor, n_query: int, n_key: int, start: int = 0) -> Tensor:
        """M: (1 or B, 1 or H, n_query, n_key), 0 or −m·|i − j| where the key is seen and −∞ where it is not."""
        seen = self.visible(n_query, n_key, start, like.device)
        bias = torch.zeros((), dtype=like.dtype, device=like.device) if self.rows is None else self.rows.to(like.dtype)
        if self.alibi is not None:
            bias = bias - self.alibi.to(like.dtype)[:, None, None] * self._distance(n_query, n_key, start, like.device)
        return torch.where(seen, bias, float("-inf"))

    def _distance(self, n_query: int, n_key: int, start: int, device: torch.device) -> Tensor:
        """|i − j|: (n_query, n_key), or (B, 1, n_query, n_key) between the places that were given."""
        query, key = self._query(n_query, start, device), torch.arange(n_key, device=device)
        if self.places is None:
            return (query[:, None] - key).abs()
        places = F.pad(self.places, (0, max(0, n_key - self.places.shape[1])))[:, :n_key]
        return (places[:, query, None] - places[:, None, :]).abs()[:, None]

    def centring(self, like: Tensor, length: int, n_key: int | None = None, start: int = 0) -> Tensor:
        """C: (1 or B, 1 or H, T, T), or its rows from `start` on."""
        return safe_softmax(self.bias(like, length, length if n_key is None else n_key, start))

    def identity(self, like: Tensor, n_query: int, n_key: int) -> Tensor:
        """I: (n_query, n_key), or the rows of it that are the queries'."""
        query = self._query(n_query, 0, like.device)
        return (query[:, None] == torch.arange(n_key, device=like.device)).to(like.dtype)

    # -------------------------------------------------------------------- fast form

    @property
    def only_causal(self) -> bool:
        """Whether each token sees all before it, alike."""
        special = (self.padding, self.documents, self.alibi, self.queries, self.rows)
        return self.causal and all(part is None for part in special)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A·V for (B, H, t, D) queries, which are the last of the keys unless `queries` says otherwise."""
        n_query, n_key = q.shape[-2], k.shape[-2]
        first = n_key - n_query
        if self.only_causal and first == 0:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.only_causal and n_query == 1:  # the last token sees everything
            return F.scaled_dot_product_attention(q, k, v)
        if self.rows is not None:
            return self._attend_rows(q, k, v, first)
        if not self.causal and self.documents is None and self.alibi is None:
            keys = None if self.padding is None else self.padding[:, None, None, :]
            return F.scaled_dot_product_attention(q, k, v, attn_mask=keys)
        if n_query <= QUERY_BLOCK or self.queries is not None:
            return self._attend_rows(q, k, v, first)
        # M has no closed form that fused attention knows: make a few rows of it at a time, and again for the backward
        blocks = []
        for start in range(0, n_query, QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, n_query)
            last = first + stop if self.causal else n_key
            rows = (q[:, :, start:stop], k[:, :, :last], v[:, :, :last], first + start)
            blocks.append(checkpoint(self._attend_rows, *rows, use_reentrant=False, preserve_rng_state=False))
        return torch.cat(blocks, dim=-2)

    def _attend_rows(self, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        n_query, n_key = q.shape[-2], k.shape[-2]
        if self.alibi is None and self.rows is None:
            rows = self.visible(n_query, n_key, start, q.device)
        else:
            rows = self.bias(q, n_query, n_key, start)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=rows)

    def mean(self, v: Tensor) -> Tensor:
        """C·V for (B, H, T, D) values, or something that broadcasts to it; summed in float32 at least."""
        wide = v.to(torch.promote_types(v.dtype, torch.float32))
        if self.rows is not None or self.queries is not None:
            n_query = self.rows.shape[-2] if self.queries is None else len(self.queries)  # pyrefly: ignore
            return (self.centring(wide, n_query, wide.shape[-2]) @ wide).to(v.dtype)
        real = torch.ones(1, 1, v.shape[-2], 1, dtype=wide.dtype, device=v.device)
        if self.padding is not None:
            real = self.padding[:, None, :, None].to(wide.dtype)
            wide = wide * real
        weight = self._sum(real).clamp(min=torch.finfo(torch.float32).tiny)
        return (self._sum(wide) / weight).to(v.dtype)

    def _sum(self, x: Tensor) -> Tensor:
        """Sum over the tokens that each token sees, discounted by e^(−m·distance) under ALiBi."""
        if self.documents is None and self.alibi is None:
            return x.cumsum(-2) if self.causal else x.sum(-2, keepdim=True)
        past = self._running_sum(x, self.documents)
        if self.causal:
            return past
        documents = None if self.documents is None else self.documents.flip(-1)
        return past + self._running_sum(x.flip(-2), documents).flip(-2) - x

    def _running_sum(self, x: Tensor, documents: Tensor | None) -> Tensor:
        """s_i = x_i + e^(−m)·s_(i−1), restarting with each document, by doubling: after n rounds s covers 2ⁿ tokens."""
        length, shift = x.shape[-2], 1
        while shift < length:
            earlier = x[..., :-shift, :]
            if self.alibi is not None:
                earlier = earlier * torch.exp(-self.alibi.to(x.dtype) * shift)[:, None, None]
            if documents is not None:
                earlier = earlier * (documents[:, shift:] == documents[:, :-shift])[:, None, :, None]
            x = F.pad(earlier, (0, 0, shift, 0)) + x
            shift *= 2
        return x

    # -------------------------------------------------------------------- positions

    def positions(self, length: int, device: torch.device) -> Tensor:
        """(1 or B, T): the rank of each key among the real tokens of its document."""
        if self.padding is None and self.documents is None:
            return torch.arange(length, device=device)[None]
        real = torch.ones(1, length, device=device) if self.padding is None else self.padding
        real = real.long()
        rank = real.cumsum(-1)
        if self.documents is not None:
            starts = F.pad(self.documents[:, 1:] != self.documents[:, :-1], (1, 0), value=True)
            rank = rank - torch.where(starts, rank - real, 0).cummax(-1).values
        return (rank - 1).clamp(min=0)

    def to(self, device: torch.device | str | int) -> "Mask":
        """The same on another device, where a model's layers lie on several."""
        tensors = {name: part for name, part in vars(self).items() if isinstance(part, Tensor)}
        return replace(self, **{name: part.to(device) for name, part in tensors.items()})

    def check(self, batch: int, length: int) -> None:
        """Raise where the padding or the documents do not fit (B, T) token ids."""
        for name, part in (("attention_mask", self.padding), ("documents", self.documents)):
            if part is not None and tuple(part.shape) != (batch, length):
                raise UserError(f"{name} must have the shape of the ids, {(batch, length)}, got {tuple(part.shape)}")


def safe_softmax(scores: Tensor) -> Tensor:
    """Softmax over the last axis, with a row of zeros where every score is −∞."""
    seen = (scores > float("-inf")).any(-1, keepdim=True)
    return torch.softmax(torch.where(seen, scores, 0.0), dim=-1) * seen


def alibi_slopes(n_head: int, device: torch.device | None = None) -> Tensor:
    """ALiBi's slopes: 2^(−8h/H) for a power of two; else those of the next lower one and every other of the next."""
    power = 1 << (n_head.bit_length() - 1)
    slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    slopes += [2 ** (-8 * (h + 1) / (2 * power)) for h in range(0, 2 * (n_head - power), 2)]
    return torch.tensor(slopes, device=device)
