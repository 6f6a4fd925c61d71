"""The paper's three mixing matrices, each in two forms.

    softmax      A                    (eq. 2)
    v-skipinit   α·I + β·A            (eq. 4)
    shaped       α·I + β·A − γ·C      (eq. 5)

with A = softmax(Q Kᵀ/√D + M), and C = softmax(M) the same without queries and keys. Applied to values V, the last is
α·V + β·(A V) − γ·(C V), and the others lack some of its terms. The fast form is PyTorch's fused attention and a mean
(`forward`), the explicit form builds the (B, H, T, T) matrix (`matrix`, `explicit`). Tests check that the two agree.

Shapes: B batch, H heads, T tokens, D width of a head.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from skipless.config.model import ModelConfig
from skipless.nn.layers import Gain, WithGains, scaled, weighted_sum
from skipless.nn.masks import Mask, MaskLike, safe_softmax
from skipless.nn.own_parts import own_part


def attention_matrix(q: Tensor, k: Tensor, mask: Mask) -> Tensor:
    """A = softmax(Q Kᵀ/√D + M), (B, H, T, T): equation 2."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return safe_softmax(scores + mask.bias(q, q.shape[-2], k.shape[-2]))


class Softmax(WithGains):
    """Equation 2: A. The other matrices add to it."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.add_gains(cfg.n_layer)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: MaskLike) -> Tensor:
        """The matrix times the values; the matrix itself is never built. (B, H, T, D) → (B, H, T, D)."""
        if mask.explicit:  # a mask that records the matrix
            return mask.mix(self.matrix, q, k, v)  # pyrefly: ignore
        return self.combine(v, mask.attend(q, k, v), mask)

    def combine(self, v: Tensor, attended: Tensor, mask: MaskLike) -> Tensor:
        """The mixing matrix times V, from V and A·V."""
        return attended

    def matrix(self, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
        """The matrix, (B, H, T, T); or the rows of it that belong to (B, H, t, D) queries over S keys."""
        return attention_matrix(q, k, mask)

    def terms(self, q: Tensor, k: Tensor, mask: Mask) -> dict[str, Tensor]:
        """What the matrix is the sum of, by name, for plots; broadcasts to (B, H, T, T)."""
        return {"A": attention_matrix(q, k, mask)}

    def explicit(self, q: Tensor, k: Tensor, v: Tensor, mask: MaskLike) -> Tensor:
        """The same as `forward`, with the matrix built."""
        assert isinstance(mask, Mask)  # a cache has no matrix: it knows the newest rows only
        return self.matrix(q, k, mask) @ v


def gain_shape(cfg: ModelConfig) -> tuple[int, int, int]:
    """One gain per head, or one for all; broadcasts over (B, H, T, D)."""
    return (cfg.n_head if cfg.block.per_head_gains else 1, 1, 1)


class VSkipInit(Softmax):
    """Equation 4: α·I + β·A."""

    alpha: Gain
    beta: Gain

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__(cfg)
        self.add_gains(cfg.n_layer, gain_shape(cfg), alpha=cfg.block.alpha, beta=cfg.block.beta)

    def combine(self, v: Tensor, attended: Tensor, mask: MaskLike) -> Tensor:
        return weighted_sum((self.alpha, v), (self.beta, attended))

    def matrix(self, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
        eye = mask.identity(q, q.shape[-2], k.shape[-2])
        return weighted_sum((self.alpha, eye), (self.beta, attention_matrix(q, k, mask)))

    def terms(self, q: Tensor, k: Tensor, mask: Mask) -> dict[str, Tensor]:
        eye = mask.identity(q, q.shape[-2], k.shape[-2])
        found = {"αI": (self.alpha, eye), "βA": (self.beta, attention_matrix(q, k, mask))}
        return {name: scaled(gain, term) for name, (gain, term) in found.items() if gain is not None}


class Shaped(VSkipInit):
    """Equation 5: α·I + β·A − γ·C. With W^Q = 0 as at initialisation, A = C; with β = γ what is left is α·I."""

    gamma: Gain

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__(cfg)
        self.add_gains(cfg.n_layer, gain_shape(cfg), gamma=cfg.block.gamma)

    def combine(self, v: Tensor, attended: Tensor, mask: MaskLike) -> Tensor:
        mixed = super().combine(v, attended, mask)
        return mixed if self.gamma is None else mixed - scaled(self.gamma, mask.mean(v))

    def matrix(self, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
        mixed = super().matrix(q, k, mask)
        return mixed if self.gamma is None else mixed - scaled(self.gamma, mask.centring(q, q.shape[-2], k.shape[-2]))

    def terms(self, q: Tensor, k: Tensor, mask: Mask) -> dict[str, Tensor]:
        found = super().terms(q, k, mask)
        if self.gamma is not None:
            found["−γC"] = -scaled(self.gamma, mask.centring(q, q.shape[-2], k.shape[-2]))
        return found


MIXINGS: dict[str, type[Softmax]] = {"softmax": Softmax, "v-skipinit": VSkipInit, "shaped": Shaped}


def make_mixing(cfg: ModelConfig) -> Any:
    """The module that mixes the values of different tokens in an attention; one of the above, or a plugin's."""
    name = cfg.block.mixing
    return MIXINGS[name](cfg) if isinstance(name, str) and name in MIXINGS else own_part("mixing", name, cfg)


def gains_of(mixing: object) -> tuple[str, ...]:
    """Which of the block's α, β and γ a class of mixing matrices has."""
    if not isinstance(mixing, type):
        return ()
    return ("alpha", "beta", "gamma")[: 3 if issubclass(mixing, Shaped) else 2 if issubclass(mixing, VSkipInit) else 0]


def _has_explicit(module: nn.Module) -> bool:
    return str(getattr(module, "own_part", "")).startswith("mixing ") and hasattr(module, "explicit")


@contextmanager
def explicit_form(model: nn.Module) -> Iterator[None]:
    """Within this context every attention of the model builds its matrix, where its mixing has an explicit form."""
    found: list[Any] = [one for one in model.modules() if isinstance(one, Softmax) or _has_explicit(one)]
    mixings = [mixing for mixing in found if vars(mixing).get("forward") != mixing.explicit]  # not in an outer context
    for mixing in mixings:
        mixing.forward = mixing.explicit
    try:
        yield
    finally:
        for mixing in mixings:
            del mixing.forward
