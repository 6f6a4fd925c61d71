"""The modules of `skipless.nn` in fewer passes over memory: the same mathematics, the same parameters and names.

Each is a subclass of the module it replaces. It asks a predicate, and falls back to its parent's
`forward` where that says no.

Shapes: B batch, T tokens, d width of the model, F width of the MLP, H heads, D = d / H.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skipless.nn.attention import Attention as PlainAttention
from skipless.nn.blocks import ParallelBlock as PlainParallelBlock
from skipless.nn.blocks import SequentialBlock as PlainSequentialBlock
from skipless.nn.cache import InputCache
from skipless.nn.kernels.ops import (
    cross_entropy,
    fan_out,
    relu_linear,
    rms_norm,
    shaped_causal,
    shaped_causal_sum,
    tie,
    two_terms,
)
from skipless.nn.kernels.predicate import are_plain_linear, have_no_hooks, runs_eagerly, trains
from skipless.nn.kernels.slabs import SlabLinear, slab_product
from skipless.nn.layers import GLU, Gain, Term, identity, scaled
from skipless.nn.layers import MLP as PlainMLP
from skipless.nn.layers import ReparamLinear as PlainReparamLinear
from skipless.nn.layers import RMSNorm as PlainRMSNorm
from skipless.nn.masks import Mask, MaskLike, safe_softmax
from skipless.nn.mixing import Shaped as PlainShaped
from skipless.nn.model import IGNORED, LOSS_ROWS, LanguageModel
from skipless.nn.model import CausalLM as PlainCausalLM
from skipless.nn.model import MaskedLM as PlainMaskedLM
from skipless.nn.model import token_loss as plain_token_loss
from skipless.nn.positions import Rope

# ------------------------------------------------------------------------------- sums


def fused_sum(*terms: Term) -> Tensor:
    """Σ gain·x, with a trained gain multiplied and added in one pass."""
    (gain, x), *rest = [(gain, x) for gain, x in terms if gain is not None and x is not None]
    if len(rest) == 1 and _are_two_gains(gain, rest[0][0]) and x.shape == rest[0][1].shape and trains(*_flat(terms)):
        return two_terms(gain, x, *rest[0])  # pyrefly: ignore
    total = scaled(gain, x)
    for gain, x in rest:
        fuses = isinstance(gain, Tensor) and total.dtype == x.dtype
        total = torch.addcmul(total, x, gain.to(x.dtype)) if fuses else total + scaled(gain, x)
    return total


def _are_two_gains(*gains: Gain) -> bool:
    return all(isinstance(gain, Tensor) and gain.numel() == 1 for gain in gains)


def _flat(terms: tuple[Term, ...]) -> list[object]:
    return [part for gain, x in terms if gain is not None and x is not None for part in (gain, x)]


class ReparamLinear(PlainReparamLinear):
    """Its sum of two trained terms in one pass."""

    weighted_sum = staticmethod(fused_sum)


LINEAR = (nn.Linear, SlabLinear)
REPARAMETERISED = (PlainReparamLinear, ReparamLinear)
"""Maps that are a matrix, exactly: a subclass may do more."""


class SequentialBlock(PlainSequentialBlock):
    """Its sums in one pass each."""

    weighted_sum = staticmethod(fused_sum)


# ------------------------------------------------------------------------------- parts


class RMSNorm(PlainRMSNorm):
    """Its gradient by hand."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps) if runs_eagerly(x, self.weight) else super().forward(x)


class MLP(PlainMLP):
    """With ReLU the wide array is made once, both ways, and overwritten."""

    def contract(self, hidden: Tensor) -> Tensor:
        # a linear layer keeps its input, not its output: unless somebody looks at that, it can be overwritten
        if not (runs_eagerly(hidden) and type(self.up) in LINEAR and have_no_hooks(self.up)):
            return super().contract(hidden)
        if self.activation is not F.relu:
            return super().contract(hidden)
        if are_plain_linear(self.down) and trains(hidden, self.down.weight):
            return self.dropout(relu_linear(hidden, self.down.weight))
        return self.dropout(self.down(F.relu_(hidden)))


class Shaped(PlainShaped):
    """Under a causal mask, all three terms and their gradients in one go."""

    def combine(self, v: Tensor, attended: Tensor, mask: MaskLike) -> Tensor:
        if self.fuses(mask, v, attended):
            return shaped_causal(v, attended, self.alpha, self.beta, self.gamma)  # pyrefly: ignore
        return super().combine(v, attended, mask)

    def fuses(self, mask: MaskLike, *more: object) -> bool:
        """Whether `shaped_causal` serves."""
        causal = isinstance(mask, Mask) and mask.only_causal
        return causal and runs_eagerly(self.alpha, self.beta, self.gamma, *more)


# ---------------------------------------------------------------------------- attention


class Attention(PlainAttention):
    """Queries, keys and values of one input together; and attention from a cache of inputs alone."""

    def forward(self, x: Tensor, mask: MaskLike, rope: Rope | None = None) -> Tensor:
        if mask.of_inputs:
            return self.from_inputs(x, self.query(x), self.value(x), mask)
        maps = self.products()
        if not (are_plain_linear(*maps) and trains(x, *(part.weight for part in maps))):
            return super().forward(x, mask, rope)
        q, k, *rest, x = fan_out(x, *(part.weight for part in maps))
        return self.mix(q, k, rest[0] if rest else self.value(x), mask, rope)

    def products(self) -> list[nn.Linear]:
        """The maps of the input that are linear layers: queries, keys, and the values where they are a product."""
        return [self.query, self.key, *([self.value] if are_plain_linear(self.value) else [])]  # pyrefly: ignore

    def from_inputs(self, x: Tensor, q: Tensor, v: Tensor, cache: MaskLike) -> Tensor:
        """The same from a cache of inputs alone, (B, t, d) → (B, t, d).

        Scores: (x_q W^Q_h)(x_k W^K_h)ᵀ = (x_q W^Q_h W^K_hᵀ)·x_k. Values: A_h (X W^V_h) = (A_h X) W^V_h. A bias of the
        keys adds the same to every score of a query, and so nothing to A. That costs t·S·H·d; making the keys of all
        inputs again costs S·d·d, which is less from t = d / H new tokens on.
        """
        assert isinstance(cache, InputCache)
        q, v, inputs, mask = self.heads(q), self.heads(v), cache.append(x), cache.new.mask  # (B, H, t, D), (B, S, d)
        if inputs.shape[1] == x.shape[1]:  # nothing came before
            attended = mask.attend(q, self.heads(self.key(x)), v)
        elif x.shape[1] >= q.shape[-1] or not self._absorbs():
            attended = mask.attend(q, self.heads(self.key(inputs)), self.heads(self.value(inputs)))
        else:
            w_key = self.key.weight.unflatten(0, (self.n_head, -1))  # (H, D, d)
            attended = self._mix_inputs(_weights(by_head(q, w_key), inputs, q.shape[-1], mask), inputs)
        mixed = self.mixing.combine(v, attended, cache).transpose(1, 2).flatten(-2)
        return self.dropout(self.projection(mixed))

    def _absorbs(self) -> bool:
        """Whether W^K and W^V are matrices and nothing else, so that nobody notices where they are not called."""
        maps = [self.key] if self.value is identity else [self.key, self.value]
        exact = type(self.key) in LINEAR and (self.value is identity or type(self.value) in (*LINEAR, *REPARAMETERISED))
        return exact and have_no_hooks(*maps)  # pyrefly: ignore

    def _mix_inputs(self, weights: Tensor, inputs: Tensor) -> Tensor:
        """A_h (X W^V_h) from A (B, H, t, S) and X (B, S, d): (B, H, t, D)."""
        if self.value is identity:  # each head mixes its own columns; row by row, for a batch of them would be copied
            return torch.stack([row @ x for row, x in zip(weights, self.heads(inputs), strict=True)])
        batch, heads, new, length = weights.shape
        whole = (weights.reshape(batch, heads * new, length) @ inputs).view(batch, heads, new, -1)
        value = as_linear(self.value)
        assert isinstance(value, nn.Linear)
        mixed = by_head(whole, value.weight.unflatten(0, (heads, -1)).mT)
        # rows of A add up to 1, so a bias of the values comes through as it is
        return mixed if value.bias is None else mixed + value.bias.view(heads, 1, -1)


def _weights(absorbed: Tensor, inputs: Tensor, d_head: int, mask: Mask) -> Tensor:
    """The new rows of A, (B, H, t, S), for absorbed queries (B, H, t, d)."""
    batch, heads, new, width = absorbed.shape
    length = inputs.shape[1]
    # one product for all heads: the inputs are read once
    absorbed = absorbed.reshape(batch, heads * new, width) / math.sqrt(d_head)
    scores = (absorbed @ inputs.mT).view(batch, heads, new, length)
    if mask.only_causal and new == 1:
        return torch.softmax(scores, dim=-1)
    return safe_softmax(scores + mask.bias(scores, new, length, length - new))


def by_head(x: Tensor, weight: Tensor) -> Tensor:
    """(B, H, t, a) · (H, a, b) → (B, H, t, b), a product for each head; `@` would copy the weight for each row."""
    return (x.transpose(0, 1).flatten(1, 2) @ weight).unflatten(1, (x.shape[0], -1)).transpose(0, 1)


def as_linear(part: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A reparameterised map as one matrix; the others as they are."""
    if not isinstance(part, PlainReparamLinear) or type(part) not in REPARAMETERISED:
        return part
    linear = nn.Linear(part.width, part.width, bias=False, device="meta")
    linear.weight = nn.Parameter(part.matrix())
    return linear


# ------------------------------------------------------------------------- the parallel block


class ParallelBlock(PlainParallelBlock):
    """All products of the norm's output together, and both branches of shaped attention and MLP as one sum."""

    weighted_sum = staticmethod(fused_sum)

    def forward(self, x: Tensor, mask: MaskLike, rope: Rope | None = None) -> Tensor:
        mha, mlp = self.attention, self.mlp
        ours = type(mha) is Attention and type(mlp) in (MLP, GLU)  # somebody's own may do anything with its products
        if not (ours and isinstance(mlp, MLP | GLU) and self._fans_out(mha, mlp, x, mask)):
            return super().forward(x, mask, rope)
        up, q, k, *rest, h = fan_out(self.norm(x), mlp.up.weight, *(part.weight for part in mha.products()))
        v, out = rest[0] if rest else mha.value(h), mlp.contract(up)
        if self._joins(mha, v, mask):
            return self.weighted_sum((self.alpha_comb, x), (1.0, self._joined(mha, q, k, v, out, mask, rope)))
        return self.weighted_sum(
            (self.alpha_comb, x), (self.beta_ff, out), (self.beta_sa, mha.mix(q, k, v, mask, rope))
        )

    def _fans_out(self, mha: Attention, mlp: PlainMLP | GLU, x: Tensor, mask: MaskLike) -> bool:
        """Whether the products of attention and MLP can be made together without calling either."""
        maps = (mha.query, mha.key, mlp.up)
        plain = have_no_hooks(mha, mlp) and are_plain_linear(*maps) and not mask.of_inputs
        return plain and trains(x, *(part.weight for part in maps))

    def _joins(self, mha: Attention, v: Tensor, mask: MaskLike) -> bool:
        """Whether the mixing and the sum of both branches can be one operation."""
        mixing, last = mha.mixing, mha.projection is identity and not (mha.training and mha.dropout.p)
        plain = last and type(mixing) is Shaped and have_no_hooks(mixing, mha.dropout)
        return plain and mixing.fuses(mask, v, self.beta_sa, self.beta_ff)

    def _joined(
        self, mha: Attention, q: Tensor, k: Tensor, v: Tensor, other: Tensor, mask: MaskLike, rope: Rope | None
    ) -> Tensor:
        """β_SA·MHA + β_FF·MLP, (B, T, d)."""
        own, v = mha.mixing, mha.heads(v)
        attended = mask.attend(*mha.queries_keys(q, k, rope), v)
        gains = (own.alpha, own.beta, own.gamma, self.beta_sa)
        joined = shaped_causal_sum(v, attended, *gains, mha.heads(other), self.beta_ff)  # pyrefly: ignore
        return joined.transpose(1, 2).flatten(-2)


# -------------------------------------------------------------------------------- losses


def token_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """`skipless.nn.model.token_loss`, whose gradients are made with it."""
    if hidden.shape[0] <= LOSS_ROWS or not trains(hidden, weight):
        return plain_token_loss(hidden, weight, labels)
    return cross_entropy(hidden, weight, labels.long(), IGNORED, LOSS_ROWS)


class Embedding(nn.Embedding):
    """An embedding whose gradient can be added to that of a head with the same matrix."""

    alias: Tensor | None = None
    """Within a loss: the matrix, as `tie` gave it out."""

    def only_looks_up(self) -> bool:
        """Whether it gives rows of its matrix and does nothing else, so that nobody notices another matrix."""
        more = self.padding_idx is not None or self.max_norm is not None or self.scale_grad_by_freq
        return not more and have_no_hooks(self)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if self.alias is None else F.embedding(input, self.alias, sparse=True)


class _ChunkedLoss(LanguageModel):
    """Losses whose gradients are made with them, a chunk of logits at a time, and one gradient for a tied matrix."""

    _tied_head: Tensor | None = None

    def head_matrix(self) -> Tensor:
        return super().head_matrix() if self._tied_head is None else self._tied_head

    def loss(
        self,
        ids: Tensor,
        labels: Tensor,
        attention_mask: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        embedding = self.embedding
        ties = self.head is None and type(embedding) is Embedding and embedding.only_looks_up()
        if not (ties and trains(embedding.weight)):
            return super().loss(ids, labels, attention_mask, documents)
        embedding.alias, self._tied_head = tie(embedding.weight)
        try:
            return super().loss(ids, labels, attention_mask, documents)
        finally:
            embedding.alias = self._tied_head = None

    def logits(self, hidden: Tensor) -> Tensor:
        return slab_product(hidden, self.head_weight) if self.reads_head() else super().logits(hidden)

    def token_loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        if not self.reads_head():
            return super().token_loss(hidden, labels)
        return token_loss(hidden, self.head_weight, labels)


class CausalLM(_ChunkedLoss, PlainCausalLM):
    """`skipless.CausalLM`."""


class MaskedLM(_ChunkedLoss, PlainMaskedLM):
    """`skipless.MaskedLM`."""
