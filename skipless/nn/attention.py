"""Multi-head attention with the paper's three mixing matrices, each in two forms.

    softmax      A                    (eq. 2)
    v-skipinit   α·I + β·A            (eq. 4)
    shaped       α·I + β·A − γ·C      (eq. 5)

with A = softmax(Q Kᵀ/√D + M), and C = softmax(M) the same without queries and keys. Applied to values V, each matrix is
α·V + β·(A V) − γ·(C V): the fast form is PyTorch's fused attention and a mean (`forward`), the explicit form builds the
(B, H, T, T) matrix (`matrix`, `explicit`). They are equal; the tests hold one against the other.

Shapes: B batch, H heads, T tokens, d width of the model, D = d / H width of a head.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from skipless.config import FIXED, MapConfig, ModelConfig
from skipless.nn import fast
from skipless.nn.cache import InputPast, Past
from skipless.nn.layers import (
    NORMS,
    ReparamLinear,
    Rotation,
    Scale,
    WithGains,
    add_scaled,
    rotate,
    scale_linear,
    scaled,
    weighted_sum,
)
from skipless.nn.mask import Mask, safe_softmax


def attention_matrix(q: Tensor, k: Tensor, mask: Mask) -> Tensor:
    """A = softmax(Q Kᵀ/√D + M), (B, H, T, T): equation 2."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return safe_softmax(scores + mask.bias(q, q.shape[-2], k.shape[-2]))


class Mixing(WithGains):
    """How tokens are mixed: softmax attention itself, the other two add to it."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.add_gains(cfg.n_layer)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | Past) -> Tensor:
        """Fast form: the mixing matrix times the values, without the matrix. (B, H, T, D) → (B, H, T, D)."""
        return self.combine(v, mask.attend(q, k, v), mask)

    def combine(self, v: Tensor, attended: Tensor, mask: Mask | Past) -> Tensor:
        """What the matrix gives, from V and A·V."""
        return attended

    def scale_output(self, gain: Scale) -> bool:
        """Multiply a gain into those of the matrix; false if it has none."""
        for name in ("alpha", "beta", "gamma"):
            own = getattr(self, name, None)
            if own is not None and gain is not None:
                self.set_gain(name, own * gain if isinstance(own, Tensor) else float(own * gain))
        return hasattr(self, "alpha")

    def matrix(self, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
        """Explicit form: the mixing matrix, (B, H, T, T)."""
        return attention_matrix(q, k, mask)

    def explicit(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | Past) -> Tensor:
        """The same as `forward`, by the matrix."""
        assert isinstance(mask, Mask)  # a cache has no matrix: it knows the newest rows only
        return self.matrix(q, k, mask) @ v


def gain_shape(cfg: ModelConfig) -> tuple[int, int, int]:
    """One gain per head, or one for all; broadcasts over (B, H, T, D)."""
    return (cfg.n_head if cfg.block.per_head_gains else 1, 1, 1)


class VSkipInit(Mixing):
    """Equation 4: α·I + β·A."""

    alpha: Scale
    beta: Scale

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__(cfg)
        self.add_gains(cfg.n_layer, gain_shape(cfg), alpha=cfg.block.alpha, beta=cfg.block.beta)

    def combine(self, v: Tensor, attended: Tensor, mask: Mask | Past) -> Tensor:
        return weighted_sum((self.alpha, v), (self.beta, attended))

    def matrix(self, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
        eye = torch.eye(q.shape[-2], dtype=q.dtype, device=q.device)
        return weighted_sum((self.alpha, eye), (self.beta, attention_matrix(q, k, mask)))


class Shaped(VSkipInit):
    """Equation 5: α·I + β·A − γ·C. With W^Q = 0, A = C, and with β = γ only the identity is left."""

    gamma: Scale

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__(cfg)
        self.add_gains(cfg.n_layer, gain_shape(cfg), gamma=cfg.block.gamma)

    def combine(self, v: Tensor, attended: Tensor, mask: Mask | Past) -> Tensor:
        if self.is_by_hand(mask, v, attended):
            return fast.shaped_causal(v, attended, self.alpha, self.beta, self.gamma)  # pyrefly: ignore
        mixed = super().combine(v, attended, mask)
        return mixed if self.gamma is None else add_scaled(mixed, self.gamma, mask.mean(v), sign=-1)

    def is_by_hand(self, mask: Mask | Past, *parts: object) -> bool:
        """Whether `fast.shaped_causal` serves, which is the same in fewer passes over memory."""
        causal = isinstance(mask, Mask) and mask.only_causal
        return causal and fast.by_hand(*parts, self.alpha, self.beta, self.gamma)

    def can_join(self, v: Tensor, mask: Mask | Past, gain: Scale, other_gain: Scale) -> bool:
        """Whether `join` serves."""
        return torch.is_grad_enabled() and fast.is_untouched(self) and self.is_by_hand(mask, v, gain, other_gain)

    def join(self, v: Tensor, attended: Tensor, gain: Tensor, other: Tensor, other_gain: Tensor) -> Tensor:
        """gain·(what the matrix gives) + other_gain·other in one go, (B, H, T, D) each."""
        alpha, beta, gamma = (own * gain.view(1, 1, 1) for own in (self.alpha, self.beta, self.gamma))  # pyrefly: ignore
        return fast.shaped_causal(v, attended, alpha, beta, gamma, other, other_gain)

    def matrix(self, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
        mixed = super().matrix(q, k, mask)
        return mixed if self.gamma is None else mixed - scaled(self.gamma, mask.centring(q, q.shape[-2]))


MIXINGS: dict[str, type[Mixing]] = {"softmax": Mixing, "v-skipinit": VSkipInit, "shaped": Shaped}


def identity(x: Tensor) -> Tensor:
    """The value or projection map that was taken out: no module, no product."""
    return x


def make_map(cfg: ModelConfig, part: MapConfig) -> Callable[[Tensor], Tensor]:
    """W^V or W^P: a linear layer, equation 6, or nothing."""
    if is_identity(part):
        return identity
    if part.kind == "dense":
        return nn.Linear(cfg.d_model, cfg.d_model, bias=cfg.block.bias)
    return ReparamLinear(cfg, part)


def is_identity(part: MapConfig) -> bool:
    """Whether a map does nothing: it was taken out, or is fixed at 1·I + 0·ΔW."""
    fixed = part.kind == "reparam" and part.init == "identity" and part.alpha == FIXED and part.beta is None
    return part.kind == "identity" or fixed


def as_linear(part: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A reparameterised map as one matrix; the others as they are."""
    if not isinstance(part, ReparamLinear):
        return part
    linear = nn.Linear(part.width, part.width, bias=False, device="meta")
    linear.weight = nn.Parameter(part.matrix())
    return linear


def by_head(x: Tensor, weight: Tensor) -> Tensor:
    """(B, H, t, a) · (H, a, b) → (B, H, t, b), a product for each head; `@` would copy the weight for each row."""
    return (x.transpose(0, 1).flatten(1, 2) @ weight).unflatten(1, (x.shape[0], -1)).transpose(0, 1)


class Attention(nn.Module):
    """Concat_h(mixing matrix_h · (X W^V)_h) W^P: equations 2 and 3; with W^V = W^P = I equations 12 and 13."""

    def __init__(self, cfg: ModelConfig, layer: int) -> None:
        super().__init__()
        block = cfg.block
        self.n_head = cfg.n_head
        self.query = nn.Linear(cfg.d_model, cfg.d_model, bias=block.bias or block.qk_bias)
        self.key = nn.Linear(cfg.d_model, cfg.d_model, bias=block.bias or block.qk_bias)
        qk_norm = (block.norm if block.norm != "none" else "rmsnorm") if block.qk_norm else "none"
        self.query_norm = NORMS[qk_norm](cfg.d_head, block.norm_eps, block.bias or block.norm_bias)
        self.key_norm = NORMS[qk_norm](cfg.d_head, block.norm_eps, block.bias or block.norm_bias)
        self.value = make_map(cfg, block.first_value if layer == 0 and block.first_value else block.value)
        self.projection = make_map(cfg, block.projection)
        self.mixing = MIXINGS[block.mixing](cfg)
        self.dropout = nn.Dropout(cfg.dropout)

    def heads(self, x: Tensor) -> Tensor:
        """(B, T, d) → (B, H, T, D), as a view."""
        return x.unflatten(-1, (self.n_head, -1)).transpose(1, 2)

    def queries_keys(self, x: Tensor, turn: Rotation | None = None) -> tuple[Tensor, Tensor]:
        """Q and K of each head, (B, H, T, D)."""
        return self.of_heads(self.query(x), self.key(x), turn)

    def of_heads(self, q: Tensor, k: Tensor, turn: Rotation | None = None) -> tuple[Tensor, Tensor]:
        """X W^Q and X W^K (B, T, d) as queries and keys of each head, normalised and turned where they are to be."""
        q, k = self.query_norm(self.heads(q)), self.key_norm(self.heads(k))
        return (q, k) if turn is None else (rotate(q, turn), rotate(k, turn))

    def forward(self, x: Tensor, mask: Mask | Past, turn: Rotation | None = None) -> Tensor:  # (B, T, d) → (B, T, d)
        if isinstance(mask, InputPast):
            return self.from_inputs(x, self.query(x), self.value(x), mask)
        q, k, v = self.fan_out(x)
        return self.mix(q, k, v, mask, turn)

    def fan_out(self, x: Tensor, *others: nn.Linear) -> tuple[Tensor, ...]:
        """X W^Q, X W^K, X W^V, and the products with other maps of the same input."""
        value = [self.value] if fast.is_plain(self.value) else []
        maps = (self.query, self.key, *others, *value)
        if not fast.can_fan_out(x, maps):
            return self.query(x), self.key(x), self.value(x), *(part(x) for part in others)
        # the same, with the gradients of x added up inside the products
        q, k, *rest, x = fast.fan_out(x, *(part.weight for part in maps))  # pyrefly: ignore
        v = rest.pop() if value else self.value(x)
        return q, k, v, *rest

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | Past, turn: Rotation | None = None) -> Tensor:
        """Everything behind X W^Q, X W^K and X W^V, (B, T, d) each: (B, T, d)."""
        mixed = self.mixing(*self.of_heads(q, k, turn), self.heads(v), mask).transpose(1, 2).flatten(-2)  # (B, T, d)
        return self.dropout(self.projection(mixed))

    def mix_beside(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | Past,
        turn: Rotation | None,
        gain: Scale,
        other: tuple[Scale, Tensor],
    ) -> list[tuple[Scale, Tensor | None]]:
        """A gain with what `mix` gives, and another branch with its own: two terms, or their sum if made in one go."""
        mixing, last = self.mixing, self.projection is identity and not (self.training and self.dropout.p)
        if last and isinstance(mixing, Shaped) and mixing.can_join(v, mask, gain, other[0]):
            v = self.heads(v)
            attended = mask.attend(*self.of_heads(q, k, turn), v)
            joined = mixing.join(v, attended, gain, self.heads(other[1]), other[0])  # pyrefly: ignore  (they are tensors)
            return [(1.0, joined.transpose(1, 2).flatten(-2))]
        return [other, (gain, self.mix(q, k, v, mask, turn))]

    def from_inputs(self, x: Tensor, q: Tensor, v: Tensor, past: InputPast) -> Tensor:
        """The same from a cache of inputs alone, (B, t, d) → (B, t, d).

        Scores: (x_q W^Q_h)(x_k W^K_h)ᵀ = (x_q W^Q_h W^K_hᵀ)·x_k. Values: A_h (X W^V_h) = (A_h X) W^V_h. A bias of the
        keys adds the same to every score of a query, and so nothing to A. That costs t·S·H·d; making the keys of all
        inputs again costs S·d·d, which is less from t = d / H new tokens on.
        """
        q, v, inputs = self.heads(q), self.heads(v), past.append(x)  # (B, H, t, D) twice, (B, S, d)
        if inputs.shape[1] == x.shape[1]:  # nothing came before
            attended = past.cache.attend(q, self.heads(self.key(x)), v)
        elif x.shape[1] >= q.shape[-1]:
            attended = past.cache.attend(q, self.heads(self.key(inputs)), self.heads(self.value(inputs)))
        else:
            w_key = self.key.weight.unflatten(0, (self.n_head, -1))  # (H, D, d)
            attended = self._mix_inputs(past.weights(by_head(q, w_key), inputs), inputs)
        mixed = self.mixing.combine(v, attended, past).transpose(1, 2).flatten(-2)
        return self.projection(mixed)

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

    def scale_output(self, gain: Scale) -> bool:
        """Multiply a gain into W^P, or where there is none into the gains of the mixing; false if there are neither."""
        if isinstance(self.projection, nn.Linear):
            scale_linear(self.projection, gain)
            return True
        return self.projection is identity and self.mixing.scale_output(gain)

    def matrix(self, x: Tensor, mask: Mask, turn: Rotation | None = None) -> Tensor:
        """The mixing matrix of each head, (B, H, T, T), for plots and tests."""
        return self.mixing.matrix(*self.queries_keys(x, turn), mask)


@contextmanager
def explicit_form(model: nn.Module) -> Iterator[None]:
    """Within this context every attention of the model builds its matrix: the oracle of the tests."""
    mixings = [module for module in model.modules() if isinstance(module, Mixing)]
    for mixing in mixings:
        mixing.forward = mixing.explicit
    try:
        yield
    finally:
        for mixing in mixings:
            vars(mixing).pop("forward", None)  # an outer context may have done it
