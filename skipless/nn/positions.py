"""Positions: added to the embedding (sinusoids, learned), or acting inside the attention (rope here, ALiBi in masks).

Shapes: B batch, T tokens, d width of the model, H heads, D = d / H.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skipless.config.block import GainConfig
from skipless.config.model import ModelConfig
from skipless.config.parts import find_part
from skipless.nn.layers import WithGains, scaled
from skipless.nn.own_parts import own_part


class Positions(nn.Module):
    """Where tokens stand: what is added to the embedding, the rotation of queries and keys, or neither of them."""

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Tensor | None:  # (1 or B, T) → (1 or B, T, d)
        """What is added to the embedding, if anything."""
        return None

    def rope(self, positions: Tensor, dtype: torch.dtype) -> "Rope | None":
        """By which angles queries and keys are rotated, if they are: cosines and sines, (1 or B, 1, T, D / 2)."""
        return None


def sinusoids(positions: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """(…, width) sines and cosines of the positions at wavelengths from 2π to 20,000π; mean square 1/2."""
    angle = _angles(positions, width)
    return torch.cat([angle.sin(), angle.cos()], dim=-1).to(dtype)


def _angles(positions: Tensor, width: int) -> Tensor:
    """(…, width / 2): position · 10,000^(−2i / width)."""
    half = torch.arange(0, width, 2, device=positions.device, dtype=torch.float32)
    return positions[..., None].float() * torch.exp(half * (-math.log(10_000.0) / width))


class SinusoidalPositions(WithGains, Positions):
    """Sinusoids added to the embedding, at a fixed or a trainable scale."""

    scale: nn.Parameter | float

    def __init__(self, width: int, scale: GainConfig) -> None:
        super().__init__()
        self.width = width
        self.add_gains(1, scale=scale)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Tensor:  # (1 or B, T) → (1 or B, T, d)
        return scaled(self.scale, sinusoids(positions, self.width, dtype))


class LearnedPositions(Positions):
    """A trainable vector for each position, added to the embedding."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(length, width))

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Tensor:  # (1 or B, T) → (1 or B, T, d)
        return F.embedding(positions, self.weight).to(dtype)


class RotaryPositions(Positions):
    """Each pair of a head's dimensions turned by an angle that grows with the position."""

    def __init__(self, d_head: int) -> None:
        super().__init__()
        self.d_head = d_head

    def rope(self, positions: Tensor, dtype: torch.dtype) -> "Rope | None":
        return make_rope(positions, self.d_head, dtype)


POSITIONS: dict[str, Callable[[ModelConfig], Positions]] = {
    # a sinusoid has mean square 1/2, so this makes it as large as the embedding it is added to
    "sinusoidal": lambda cfg: SinusoidalPositions(cfg.d_model, GainConfig(init=math.sqrt(2) * cfg.init_std)),
    "scaled-sinusoidal": lambda cfg: SinusoidalPositions(
        cfg.d_model, GainConfig(init=cfg.d_model**-0.5, trainable=True)
    ),
    "learned": lambda cfg: LearnedPositions(cfg.max_seq_len, cfg.d_model),
    "alibi": lambda cfg: Positions(),  # a bias of the scores: the mask has it
    "rotary": lambda cfg: RotaryPositions(cfg.d_head),
}


def make_positions(cfg: ModelConfig) -> Positions:
    """What tells a model where its tokens stand."""
    name = cfg.positions
    return POSITIONS[name](cfg) if isinstance(name, str) and name in POSITIONS else own_part("positions", name, cfg)


def rotates(cfg: ModelConfig) -> bool:
    """Whether queries and keys are rotated; of a part of one's own, whether it may do that."""
    if isinstance(cfg.positions, str) and cfg.positions in POSITIONS:
        return cfg.positions == "rotary"
    made: Any = find_part("positions", cfg.positions).make
    return getattr(made, "rope", None) is not Positions.rope


# ------------------------------------------------------------------------------- rope

Rope = tuple[Tensor, Tensor]
"""Cosines and sines, (1 or B, 1, T, D / 2) each."""


def make_rope(positions: Tensor, d_head: int, dtype: torch.dtype) -> Rope:
    """The angles by which each pair of a head's dimensions is rotated."""
    angle = _angles(positions[:, None], d_head)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def apply_rope(x: Tensor, rope: Rope) -> Tensor:
    """Rotate (B, H, T, D) queries or keys: dimension i goes with dimension i + D / 2."""
    cos, sin = rope
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
