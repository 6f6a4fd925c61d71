"""The small parts: gains, norms, MLPs, and the maps W^V and W^P with equation 6.

Shapes: B batch, T tokens, d width of the model, F width of the MLP, H heads, D = d / H.
"""

from collections.abc import Callable
from functools import partial, reduce
from operator import add

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skipless.config.block import FIXED, BlockConfig, GainConfig, MapConfig
from skipless.config.model import ModelConfig
from skipless.config.parts import PartValue
from skipless.nn.own_parts import own_part

Gain = nn.Parameter | float | None
"""A gain at run time: trainable, fixed, or None for a branch that is not there."""

Term = tuple[Gain, Tensor | None]
"""A gain, and what it weighs."""


def scaled(gain: nn.Parameter | float, x: Tensor) -> Tensor:
    """gain · x; a gain fixed at 1 is no product."""
    if isinstance(gain, Tensor):
        return x * gain.to(x.dtype)
    return x if gain == 1 else x * gain


def weighted_sum(*terms: Term) -> Tensor:
    """Σ gain·x over the terms that are there; a term whose gain is None is not."""
    return reduce(add, (scaled(gain, x) for gain, x in terms if gain is not None and x is not None))


class WithGains(nn.Module):
    """A module with gains. It knows their initial values, so that `init_weights` can set them again."""

    initial_gains: dict[str, float]
    weighted_sum = staticmethod(weighted_sum)

    def add_gains(self, n_layer: int, shape: tuple[int, ...] = (1,), **gains: GainConfig | None) -> None:
        """Each gain as an attribute: a parameter if it is trainable, else a number, or None.

        A parameter has at least one axis, for FSDP cannot shard one that has none.
        """
        self.initial_gains = getattr(self, "initial_gains", {})
        for name, cfg in gains.items():
            value = None if cfg is None else cfg.at_depth(n_layer)
            if cfg is None or value is None or not cfg.trainable:
                setattr(self, name, value)
            else:
                self.initial_gains[name] = value
                self.register_parameter(name, nn.Parameter(torch.full(shape, value)))

    def reset_gains(self) -> None:
        """Set the trainable gains to their initial values."""
        for name, value in self.initial_gains.items():
            nn.init.constant_(self.get_parameter(name), value)


def no_branch(*_: object) -> None:
    """The attention or the MLP of a block that has none."""


# ------------------------------------------------------------------------------ norms


class RMSNorm(nn.Module):
    """x / √(mean(x²) + eps) · weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}"


class RMSPlusEps(RMSNorm):
    """x / (√mean(x²) + eps) · weight: the form of RMSNorm in the authors' code."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.norm(dim=-1, keepdim=True) * x.shape[-1] ** -0.5 + self.eps) * self.weight


NORMS: dict[str, Callable[[int, float, bool], nn.Module]] = {
    "rmsnorm": lambda width, eps, bias: RMSNorm(width, eps),
    "rms-plus-eps": lambda width, eps, bias: RMSPlusEps(width, eps),
    "layernorm": lambda width, eps, bias: nn.LayerNorm(width, eps=eps, bias=bias),
    "none": lambda width, eps, bias: nn.Identity(),
}


def make_norm(block: BlockConfig, width: int, kind: PartValue | None = None) -> nn.Module:
    """A block's norm, or one of another kind with its eps and bias."""
    kind = kind or block.norm
    if isinstance(kind, str) and kind in NORMS:
        return NORMS[kind](width, block.norm_eps, block.bias or block.norm_bias)
    return own_part("norm", kind, width)


def make_outer_norm(cfg: ModelConfig) -> nn.Module:
    """The norm after the embedding or after the last block, which is there also where the blocks have none."""
    return make_norm(cfg.block, cfg.d_model, cfg.outer_norm or _some_norm(cfg.block))


def make_query_key_norm(cfg: ModelConfig) -> nn.Module:
    """The norm of the queries, or of the keys, of each head, if there is one."""
    return make_norm(cfg.block, cfg.d_head, _some_norm(cfg.block)) if cfg.block.qk_norm else nn.Identity()


def _some_norm(block: BlockConfig) -> PartValue:
    return block.norm if block.norm != "none" else "rmsnorm"


# ------------------------------------------------------------------------------- MLPs


ACTIVATIONS: dict[str, Callable[[BlockConfig], Callable[[Tensor], Tensor]]] = {
    "relu": lambda block: F.relu,
    "leaky-relu": lambda block: partial(F.leaky_relu, negative_slope=block.negative_slope),
    "gelu": lambda block: F.gelu,
    "gelu-tanh": lambda block: partial(F.gelu, approximate="tanh"),
    "silu": lambda block: F.silu,
}


def make_activation(block: BlockConfig, width: int) -> Callable[[Tensor], Tensor]:
    """The non-linearity by its name, for a hidden layer of a width."""
    name = block.activation
    if isinstance(name, str) and name in ACTIVATIONS:
        return ACTIVATIONS[name](block)
    return own_part("activation", name, width)


class MLP(nn.Module):
    """φ(x W_up) W_down."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(cfg.d_model, cfg.ff_width, bias=cfg.block.bias)
        self.down = nn.Linear(cfg.ff_width, cfg.d_model, bias=cfg.block.bias)
        self.activation = make_activation(cfg.block, cfg.ff_width)
        self.dropout = nn.Dropout(cfg.dropout)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, d) → (B, T, F) → (B, T, d)
        return self.contract(self.up(x))

    def contract(self, hidden: Tensor) -> Tensor:
        """Everything after the first product."""
        return self.dropout(self.down(self.activation(hidden)))


class GLU(nn.Module):
    """(φ(x W_gate) ⊙ x W_up) W_down, with both first products as one of width F and a hidden width of F / 2."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(cfg.d_model, cfg.ff_width, bias=cfg.block.bias)
        self.down = nn.Linear(cfg.ff_width // 2, cfg.d_model, bias=cfg.block.bias)
        self.activation = make_activation(cfg.block, cfg.ff_width // 2)
        self.dropout = nn.Dropout(cfg.dropout)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, d) → 2 × (B, T, F / 2) → (B, T, d)
        return self.contract(self.up(x))

    def contract(self, hidden: Tensor) -> Tensor:
        """Everything after the first product."""
        hidden, gate = hidden.chunk(2, dim=-1)
        return self.dropout(self.down(hidden * self.activation(gate)))


MLPS: dict[str, type[MLP] | type[GLU]] = {"plain": MLP, "glu": GLU}


def make_mlp(cfg: ModelConfig) -> nn.Module:
    """The MLP of a block."""
    name = cfg.block.mlp
    return MLPS[name](cfg) if isinstance(name, str) and name in MLPS else own_part("mlp", name, cfg)


# --------------------------------------------------------------- value and projection


class ReparamLinear(WithGains):
    """Equation 6: x W with W = α·W_init + β·ΔW, W_init fixed and ΔW trainable from zero.

    W_init is a buffer, stored like a linear layer's weight (out, in); the identity needs none. With β fixed at 0 there
    is no ΔW, with α fixed at 0 no W_init.
    """

    alpha: Gain
    beta: Gain
    w_init: Tensor | None
    like: Tensor

    def __init__(self, cfg: ModelConfig, part: MapConfig) -> None:
        super().__init__()
        self.width = width = cfg.d_model
        self.add_gains(cfg.n_layer, alpha=part.alpha, beta=part.beta)
        needs_init = part.alpha is not None and part.init != "identity"
        self.register_buffer("w_init", torch.empty(width, width) if needs_init else None)
        self.delta = None if part.beta is None else nn.Parameter(torch.zeros(width, width))
        self.register_buffer("like", torch.empty(0), persistent=False)  # knows the type and the device

    def matrix(self) -> Tensor:
        """W, as (out, in)."""
        eye = torch.eye(self.width, dtype=self.like.dtype, device=self.like.device)
        return weighted_sum((self.alpha, eye if self.w_init is None else self.w_init), (self.beta, self.delta))

    def forward(self, x: Tensor) -> Tensor:
        if self.w_init is not None:
            return F.linear(x, self.matrix())
        delta = None if self.delta is None else F.linear(x, self.delta)
        return self.weighted_sum((self.alpha, x), (self.beta, delta))  # the identity needs no product

    def extra_repr(self) -> str:
        fixed = [f"{name}={gain}" for name in ("alpha", "beta") if not isinstance(gain := getattr(self, name), Tensor)]
        return ", ".join([str(self.width), *fixed])


def identity(x: Tensor) -> Tensor:
    """The value or projection map that was taken out: no module, no product."""
    return x


def make_map(cfg: ModelConfig, part: MapConfig) -> Callable[[Tensor], Tensor]:
    """W^V or W^P: a linear layer, equation 6, or nothing."""
    if is_identity(part):
        return identity
    if isinstance(part.kind, str) and part.kind in MAPS:
        return MAPS[part.kind](cfg, part)
    return own_part("map", part.kind, cfg)


MAPS: dict[str, Callable[[ModelConfig, MapConfig], nn.Module]] = {
    "dense": lambda cfg, part: nn.Linear(cfg.d_model, cfg.d_model, bias=cfg.block.bias),
    "reparam": ReparamLinear,
}


def is_identity(part: MapConfig) -> bool:
    """Whether a map does nothing: it was taken out, or is fixed at 1·I + 0·ΔW."""
    fixed = part.kind == "reparam" and part.init == "identity" and part.alpha == FIXED and part.beta is None
    return part.kind == "identity" or fixed
