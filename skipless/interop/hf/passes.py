"""One pass through the layers as Hugging Face's libraries ask for it: caches, masks of any form, positions, matrices.

Shaped attention needs two things of what came before: A·V, from keys and values as everyone, and C·V, the (discounted)
mean of the values. So the caches of `transformers` hold enough, static and dynamic alike, and whatever is done to them
(reordered for beams, cropped, repeated) holds for C·V too: there is no running sum beside them to keep in step.

Shapes: B batch, H heads, D width of a head, t new tokens, S tokens so far (the new ones included).
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from skipless.errors import UserError
from skipless.nn.masks import Mask, MaskLike, alibi_slopes
from skipless.nn.stack import check_length


class Pass:
    """What all layers share of one pass: which of the tokens so far each new token sees, and where these stand."""

    def __init__(
        self,
        config: Any,
        causal: bool,
        inputs: Tensor,
        cache: Cache | None = None,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        explicit: bool = False,
    ) -> None:
        """`mask` is bool (B, S) of padding, or M itself, (B, 1 or H, t, S). `explicit` where matrices will be made."""
        self.cache, self.new = cache, inputs.shape[1]
        self.first = 0 if cache is None else cache.get_seq_length()  # a static cache's is a tensor
        index = self.first + torch.arange(self.new, device=inputs.device)  # (t,)
        padding, rows = (mask, None) if mask is None or mask.ndim == 2 else (None, mask)
        self._check(config, inputs, padding, documents)
        alibi = alibi_slopes(config.n_head, inputs.device) if config.positions == "alibi" else None
        ranks = None if padding is None else Mask(True, padding).positions(padding.shape[1], inputs.device)
        counted = index[None] if ranks is None else ranks[:, index]
        self.positions = counted if positions is None else positions  # (1 or B, t)
        places = ranks
        if alibi is not None and positions is not None and documents is None:
            places = self._places(positions, counted, None if padding is None else padding[:, index], ranks)
        # of a prompt the mask is square, and its fast forms need no (T, T) matrix; but where padding stands between
        # tokens, only an explicit one counts ALiBi's distances without it
        square = rows is None and isinstance(self.first, int) and self.first == 0
        square = square and not (explicit and cache is not None)  # there a matrix has a column for each place
        if square and (alibi is None or places is None or (places is ranks and not causal)):
            self.mask = Mask(causal, None if padding is None else padding[:, : self.new], documents, alibi)
        else:
            self.mask = Mask(causal, padding, alibi=alibi, queries=index, places=places, rows=rows)
        self._centring: Tensor | None = None

    def _check(self, config: Any, inputs: Tensor, padding: Tensor | None, documents: Tensor | None) -> None:
        compiling = torch.compiler.is_compiling()
        for layer in () if self.cache is None else self.cache.layers:
            if getattr(layer, "is_sliding", False) and (
                compiling or int(self.first) + self.new > layer.get_max_length()
            ):
                raise UserError(
                    f"this cache forgets what came more than {layer.get_max_length()} tokens before, "
                    "and these models see everything: leave config.sliding_window unset"
                )
        if compiling:
            return
        if self.cache is not None and config.block["beta_sa"] is None:
            raise UserError("without attention nothing is remembered: this block needs use_cache=False")
        end = int(self.first) + self.new
        if documents is None:  # else it is the documents that have a length
            check_length(end, config.max_seq_len)
        if padding is not None and (padding.shape[0] != inputs.shape[0] or padding.shape[1] < end):
            raise UserError(
                f"with a cache, attention_mask covers all tokens so far: ({inputs.shape[0]}, {end}), "
                f"got {tuple(padding.shape)}"
            )
        if self.cache is None:
            Mask(True, padding, documents).check(*inputs.shape[:2])

    def _places(self, given: Tensor, counted: Tensor, real: Tensor | None, ranks: Tensor | None) -> Tensor | None:
        """Between which ALiBi counts: of a whole sequence those given; a cache does not know those of its keys."""
        differs = (given != counted) if real is None else (given != counted) & real
        if torch.compiler.is_compiling() or not bool(differs.any()):
            return ranks
        if self.cache is not None and int(self.first) > 0:
            raise UserError("with a cache and ALiBi, position_ids must count the real tokens; leave them out")
        return given.expand(differs.shape[0], -1)

    def layers(self, count: int, seen: list[Tensor] | None = None) -> list[MaskLike]:
        """What each layer gets in the place of a mask; with `seen`, the mixing matrices are made, and put there."""
        if seen is not None:
            return [ExplicitLayer(self, layer, seen) for layer in range(count)]
        if self.cache is None:
            return [self.mask] * count
        return [CachedLayer(self, layer) for layer in range(count)]

    def centring(self, values: Tensor) -> Tensor:
        """The new rows of C, (1 or B, 1 or H, t, S), in float32 at least, made once for all layers."""
        if self._centring is None:
            like = torch.empty(0, dtype=torch.promote_types(values.dtype, torch.float32), device=self.positions.device)
            self._centring = self.mask.centring(like, self.new, values.shape[-2])
        return self._centring.to(values.device)


class CachedLayer:
    """One layer of a pass with a cache of `transformers`, in the place of its mask."""

    of_inputs: ClassVar[bool] = False
    explicit: ClassVar[bool] = False

    def __init__(self, shared: Pass, layer: int) -> None:
        self.shared, self.layer, self.mask = shared, layer, shared.mask
        self.values: Tensor | None = None

    def to(self, device: Any) -> "CachedLayer":
        """The same for a layer on another device."""
        self.mask = self.mask.to(device)
        return self

    def remember(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens so far."""
        assert self.shared.cache is not None
        return self.shared.cache.update(k, v, self.layer)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Remember the new keys and values, and mix all values so far: (B, H, t, D)."""
        keys, self.values = self.remember(k, v)
        if self.mask.queries is None:  # a prompt: a static cache holds more than there is yet
            return self.mask.attend(q, k, v)
        return self.mask.attend(q, keys, self.values)

    def mean(self, v: Tensor) -> Tensor:
        """C·V of the new tokens, (B, H, t, D), summed in float32 at least."""
        if self.mask.queries is None:
            return self.mask.mean(v)
        assert self.values is not None
        centring = self.shared.centring(self.values)
        return (centring @ self.values.to(centring.dtype)).to(v.dtype)


class ExplicitLayer(CachedLayer):
    """A layer that makes its mixing matrix, for those who want to see it; with or without a cache."""

    explicit: ClassVar[bool] = True

    def __init__(self, shared: Pass, layer: int, seen: list[Tensor]) -> None:
        super().__init__(shared, layer)
        self.seen = seen

    def mix(self, matrix: Callable[[Tensor, Tensor, Mask], Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The matrix of the new tokens, (B, H, t, S), times the values so far: (B, H, t, D)."""
        keys, values = (k, v) if self.shared.cache is None else self.remember(k, v)
        weights = matrix(q, keys, self.mask)
        self.seen.append(weights)
        return weights @ values


# ---------------------------------------------------------------------------------- what is asked


def read_mask(given: Tensor | None, inputs: Tensor) -> Tensor | None:
    """An attention mask in any form: bool (B, S), true for real tokens, or M itself, (B, 1 or H, t, S).

    Two axes: 1 for a real token, 0 for padding, of any type. Four: bool, true where a query sees a key; or what is
    added to the scores, 0 where it does and the lowest number there is where it does not.
    """
    if given is None:
        return None
    if not isinstance(given, Tensor) or given.ndim not in (2, 4):
        what = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
        raise UserError(f"attention_mask must be (batch, tokens), or (batch, heads or 1, queries, keys), got {what}")
    looks = not torch.compiler.is_compiling()
    if given.ndim == 2:
        if given.is_floating_point() and looks and not bool(((given == 0) | (given == 1)).all()):
            raise UserError("an attention_mask of floats with two axes must hold 1 for real tokens and 0 for padding")
        return given != 0
    if given.shape[-2] != inputs.shape[1]:
        raise UserError(
            f"an attention_mask with four axes has a row for each of {inputs.shape[1]} new tokens, "
            f"got {tuple(given.shape)}"
        )
    if not given.is_floating_point():
        zero = torch.zeros((), dtype=torch.float32, device=given.device)
        return torch.where(given != 0, zero, float("-inf"))
    if looks and bool((given > 0).any()):
        raise UserError("an attention_mask of floats with four axes is added to the scores: nothing in it exceeds 0")
    return given.masked_fill(given <= torch.finfo(given.dtype).min / 2, float("-inf"))


def packed_documents(positions: Tensor | None, batch: int) -> Tensor | None:
    """The documents (B, T) of rows in which several are packed: one begins wherever positions do not go on by one."""
    if positions is None:
        return None
    begins = positions[:, 1:] != positions[:, :-1] + 1
    if not torch.compiler.is_compiling() and not bool(begins.any()):
        return None
    return torch.nn.functional.pad(begins.long(), (1, 0)).cumsum(-1).expand(batch, -1)
