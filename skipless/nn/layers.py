"""The small parts: gains, norms, MLPs, reparameterised linear maps (eq. 6), positions.

Shapes: B batch, T tokens, d width of the model, F width of the MLP, H heads, D = d / H.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skipless.config import BlockConfig, GainConfig, MapConfig, ModelConfig
from skipless.nn import fast
from skipless.nn.fast import rms_norm

Scale = nn.Parameter | float | None
"""A gain at run time: trainable, fixed, or None for a branch that is not there."""


class WithGains(nn.Module):
    """A module with gains. It knows their initial values, so that `init_weights` can set them again."""

    initial_gains: dict[str, float]

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

    def set_gain(self, name: str, value: Tensor | float) -> None:
        """Fix a gain at a number, or change the value of one that is a parameter."""
        if isinstance(value, Tensor):
            self.get_parameter(name).copy_(value)
            return
        if name in self.initial_gains:
            del self.initial_gains[name]
            delattr(self, name)
        setattr(self, name, value)

    def reset_gains(self) -> None:
        """Set the trainable gains to their initial values."""
        for name, value in self.initial_gains.items():
            nn.init.constant_(self.get_parameter(name), value)


def scale_linear(layer: nn.Linear, gain: Scale) -> None:
    """Multiply a gain into a linear map."""
    if gain is not None:
        layer.weight.mul_(gain)
        if layer.bias is not None:
            layer.bias.mul_(gain)


def scaled(gain: nn.Parameter | float, x: Tensor) -> Tensor:
    """gain · x, at no cost where the gain is fixed at 1."""
    if isinstance(gain, Tensor):
        return x * gain.to(x.dtype)
    return x if gain == 1 else x * gain


def add_scaled(total: Tensor, gain: nn.Parameter | float, x: Tensor, sign: int = 1) -> Tensor:
    """total ± gain · x, in one pass over memory where the gain is trainable."""
    if isinstance(gain, Tensor) and total.dtype == x.dtype:
        return torch.addcmul(total, x, gain.to(x.dtype), value=sign)
    return total + scaled(gain, x) if sign > 0 else total - scaled(gain, x)


def weighted_sum(*terms: tuple[Scale, Tensor | None]) -> Tensor:
    """Σ gain·x over the terms that are there; a term whose gain is None is not."""
    (gain, x), *rest = [(gain, x) for gain, x in terms if gain is not None and x is not None]
    if len(rest) == 1 and fast.are_two_terms(gain, x, *rest[0]):
        return fast.two_terms(gain, x, *rest[0])  # pyrefly: ignore  (the same in fewer passes)
    total = scaled(gain, x)
    for gain, x in rest:
        total = add_scaled(total, gain, x)
    return total


def nothing(*_: object) -> None:
    """The branch that was taken out."""


# ------------------------------------------------------------------------------ norms


class RMSNorm(nn.Module):
    """x / √(mean(x²) + eps) · weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

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


def make_norm(block: BlockConfig, width: int) -> nn.Module:
    """The norm inside a block."""
    return NORMS[block.norm](width, block.norm_eps, block.bias or block.norm_bias)


def make_outer_norm(cfg: ModelConfig) -> nn.Module:
    """The norm after the embedding or after the last block, which is there also where the blocks have none."""
    kind = cfg.outer_norm or (cfg.block.norm if cfg.block.norm != "none" else "rmsnorm")
    return NORMS[kind](cfg.d_model, cfg.block.norm_eps, cfg.block.bias or cfg.block.norm_bias)


# ------------------------------------------------------------------------------- MLPs


def make_activation(block: BlockConfig, *, inplace: bool = False) -> Callable[[Tensor], Tensor]:
    """The non-linearity by its name; `inplace` lets it overwrite its input where its gradient needs only the output."""
    return {
        "relu": partial(F.relu, inplace=inplace),
        "leaky-relu": partial(F.leaky_relu, negative_slope=block.negative_slope, inplace=inplace),
        "gelu": F.gelu,
        "gelu-tanh": partial(F.gelu, approximate="tanh"),
        "silu": F.silu,
    }[block.activation]


class MLP(nn.Module):
    """φ(x W_up) W_down."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(cfg.d_model, cfg.ff_width, bias=cfg.block.bias)
        self.down = nn.Linear(cfg.ff_width, cfg.d_model, bias=cfg.block.bias)
        # the product before it keeps its inputs, not its output: overwriting that saves an array of (B, T, F)
        self.activation = make_activation(cfg.block, inplace=True)
        self.is_relu = cfg.block.activation == "relu"
        self.dropout = nn.Dropout(cfg.dropout)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, d) → (B, T, F) → (B, T, d)
        return self.contract(self.up(x))

    def contract(self, hidden: Tensor) -> Tensor:
        """Everything behind the first product."""
        if self.by_hand(hidden):
            return self.dropout(fast.relu_linear(hidden, self.down.weight))  # the same with fewer arrays
        return self.dropout(self.down(self.activation(hidden)))

    def by_hand(self, hidden: Tensor) -> bool:
        """Whether ReLU and the second product are one operation."""
        return self.is_relu and fast.is_plain(self.down) and fast.trains_by_hand(hidden, self.down.weight)


class GLU(nn.Module):
    """(φ(x W_gate) ⊙ x W_up) W_down, with both first products as one of width F and a hidden width of F / 2."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(cfg.d_model, cfg.ff_width, bias=cfg.block.bias)
        self.down = nn.Linear(cfg.ff_width // 2, cfg.d_model, bias=cfg.block.bias)
        self.activation = make_activation(cfg.block)
        self.dropout = nn.Dropout(cfg.dropout)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, d) → 2 × (B, T, F / 2) → (B, T, d)
        return self.contract(self.up(x))

    def contract(self, hidden: Tensor) -> Tensor:
        """Everything behind the first product."""
        hidden, gate = hidden.chunk(2, dim=-1)
        return self.dropout(self.down(hidden * self.activation(gate)))


MLPS: dict[str, type[MLP] | type[GLU]] = {"plain": MLP, "glu": GLU}


# --------------------------------------------------------------- value and projection


class ReparamLinear(WithGains):
    """Equation 6: x W with W = α·W_init + β·ΔW, W_init fixed and ΔW trainable from zero.

    W_init is a buffer, stored like a linear layer's weight (out, in); the identity needs none. With β fixed at 0 there
    is no ΔW, with α fixed at 0 no W_init.
    """

    alpha: Scale
    beta: Scale
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
        """W, as (out, in): the explicit form of equation 6."""
        eye = torch.eye(self.width, dtype=self.like.dtype, device=self.like.device)
        return weighted_sum((self.alpha, eye if self.w_init is None else self.w_init), (self.beta, self.delta))

    def forward(self, x: Tensor) -> Tensor:
        if self.w_init is not None:
            return F.linear(x, self.matrix())
        return weighted_sum((self.alpha, x), (self.beta, None if self.delta is None else F.linear(x, self.delta)))

    def extra_repr(self) -> str:
        fixed = [f"{name}={gain}" for name in ("alpha", "beta") if not isinstance(gain := getattr(self, name), Tensor)]
        return ", ".join([str(self.width), *fixed])


# -------------------------------------------------------------------------- positions


def sinusoids(positions: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """(…, width) sines and cosines of the positions at wavelengths from 2π to 20,000π; mean square 1/2."""
    half = torch.arange(0, width, 2, device=positions.device, dtype=torch.float32)
    angle = positions[..., None].float() * torch.exp(half * (-math.log(10_000.0) / width))
    return torch.cat([angle.sin(), angle.cos()], dim=-1).to(dtype)


class SinusoidalPositions(WithGains):
    """Sinusoids added to the embedding, at a fixed or a trainable scale."""

    scale: nn.Parameter | float

    def __init__(self, width: int, scale: GainConfig) -> None:
        super().__init__()
        self.width = width
        self.add_gains(1, scale=scale)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Tensor:  # (1 or B, T) → (1 or B, T, d)
        return scaled(self.scale, sinusoids(positions, self.width, dtype))


class LearnedPositions(nn.Module):
    """A trainable vector for each position, added to the embedding."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(length, width))

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Tensor:  # (1 or B, T) → (1 or B, T, d)
        return F.embedding(positions, self.weight).to(dtype)


def make_positions(cfg: ModelConfig) -> SinusoidalPositions | LearnedPositions | None:
    """What is added to the embedding, if anything: ALiBi and rotary positions act inside the attention."""
    if cfg.positions == "sinusoidal":
        # a sinusoid has mean square 1/2, so this makes it as large as the embedding it is added to
        return SinusoidalPositions(cfg.d_model, GainConfig(init=math.sqrt(2) * cfg.init_std))
    if cfg.positions == "scaled-sinusoidal":
        return SinusoidalPositions(cfg.d_model, GainConfig(init=cfg.d_model**-0.5, trainable=True))
    if cfg.positions == "learned":
        return LearnedPositions(cfg.max_seq_len, cfg.d_model)
    return None


Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, (1 or B, 1, T, D / 2) each."""


def rotation(positions: Tensor, d_head: int, dtype: torch.dtype) -> Rotation:
    """The angles by which rotary positions turn each pair of a head's dimensions."""
    half = torch.arange(0, d_head, 2, device=positions.device, dtype=torch.float32)
    angle = positions[:, None, :, None].float() * torch.exp(half * (-math.log(10_000.0) / d_head))
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, turn: Rotation) -> Tensor:
    """Turn (B, H, T, D) queries or keys: dimension i goes with dimension i + D / 2."""
    cos, sin = turn
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
