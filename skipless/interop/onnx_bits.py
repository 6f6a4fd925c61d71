"""Matrices at 8 and at 4 bits: blocks of a row share a scale and, where they are not symmetric, a zero point.

A block w of 16 or more weights of one output becomes integers q with w ≈ s·(q − z). The layout is that of ONNX Runtime
in `MatMulNBits` and `GatherBlockQuantized`: q unsigned, two of 4 bits in a byte, the first in the low half. A symmetric
block has z in the middle of the range (8, or 128).

Rounding to the nearest multiple of a scale that just reaches the largest weight is not the best that can be done: at 4
bits a scale that cuts the largest off is often better for all the others. So some scales are tried, and for the best
rounding the scale is fitted once more by least squares.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from skipless.errors import UserError

BITS = (4, 8)
BLOCK_SIZES = (16, 32, 64, 128, 256)

REACHES: dict[int, tuple[float, ...]] = {4: (1.0, 0.95, 0.9, 0.85, 0.8, 0.72), 8: (1.0,)}
"""What share of the largest weight the scales reach that are tried, by bits."""

CHUNK = 1 << 22
"""Weights that are worked on at a time."""


@dataclass(frozen=True)
class Packed:
    """A matrix of (N, K) weights at low bits."""

    weights: np.ndarray
    """(N, K' · bits / 8) uint8, with K' the inputs in whole blocks."""
    scales: np.ndarray
    """(N, blocks) float32."""
    zero_points: np.ndarray | None
    """(N, ⌈blocks · bits / 8⌉) uint8, or None for the middle of the range."""
    bits: int
    block_size: int
    n_inputs: int

    @property
    def nbytes(self) -> int:
        """Bytes of all that is stored."""
        return self.weights.nbytes + self.scales.nbytes + (0 if self.zero_points is None else self.zero_points.nbytes)

    def dense(self) -> np.ndarray:
        """The (N, K) matrix that the integers stand for."""
        rows, blocks = self.scales.shape
        q = unpack(self.weights, self.bits)[:, : blocks * self.block_size].reshape(rows, blocks, self.block_size)
        if self.zero_points is None:
            zero = np.full((rows, blocks), 1 << (self.bits - 1))
        else:
            zero = unpack(self.zero_points, self.bits)[:, :blocks]
        dense = (q.astype(np.float32) - zero[..., None].astype(np.float32)) * self.scales[..., None]
        return dense.reshape(rows, -1)[:, : self.n_inputs]


def pack(matrix: Tensor, bits: int, block_size: int, *, symmetric: bool) -> Packed:
    """An (N, K) matrix at low bits."""
    if bits not in BITS:
        raise UserError(f"weights have 4, 8 or 32 bits, got {bits}")
    if block_size not in BLOCK_SIZES:
        raise UserError(f"a block has {', '.join(map(str, BLOCK_SIZES))} weights, got {block_size}")
    n_inputs = matrix.shape[1]
    blocks = -(-n_inputs // block_size)
    whole = F.pad(matrix.detach().float().cpu(), (0, blocks * block_size - n_inputs)).unflatten(1, (blocks, block_size))
    parts = [
        _symmetric(part, bits) if symmetric else _asymmetric(part, bits)
        for part in whole.split(max(1, CHUNK // max(1, blocks * block_size)))
    ]
    q, scales, zero = (torch.cat([part[n] for part in parts]) for n in range(3))
    packed_zero = None if symmetric else _pack_rows(zero.to(torch.uint8).numpy(), bits)
    weights = _pack_rows(q.to(torch.uint8).flatten(1).numpy(), bits)
    return Packed(weights, scales.numpy(), packed_zero, bits, block_size, n_inputs)


Quantised = tuple[Tensor, Tensor, Tensor]
"""q (N, blocks, size), scales (N, blocks), zero points (N, blocks)."""


def _symmetric(w: Tensor, bits: int) -> Quantised:
    """z in the middle: there is one more integer below it than above, and that one is for the largest weight's side."""
    middle = 1 << (bits - 1)
    largest = w.gather(-1, w.abs().argmax(-1, keepdim=True))  # with its sign
    zero = torch.full(w.shape[:2], float(middle))
    candidates = [(-largest.squeeze(-1) * reach / middle, zero) for reach in REACHES[bits]]
    return _best(w, candidates, bits)


def _asymmetric(w: Tensor, bits: int) -> Quantised:
    """z such that the range covers the block and 0."""
    top = (1 << bits) - 1
    low, high = w.amin(-1).clamp(max=0), w.amax(-1).clamp(min=0)
    candidates = []
    for reach in REACHES[bits]:
        scale = (high - low) * reach / top
        zero = (-low * reach / _nonzero(scale)).round().clamp(0, top)
        candidates.append((scale, zero))
    return _best(w, candidates, bits)


def _best(w: Tensor, candidates: list[tuple[Tensor, Tensor]], bits: int) -> Quantised:
    """Of each block's candidates the one with the smallest error; its scale fitted by least squares."""
    best: tuple[Tensor, ...] | None = None
    for scale, zero in candidates:
        q = _round(w, scale, zero, bits)
        centred = q - zero[..., None]
        fitted = (w * centred).sum(-1) / centred.square().sum(-1).clamp(min=1)
        q = _round(w, fitted, zero, bits)
        error = (w - (q - zero[..., None]) * fitted[..., None]).square().sum(-1)
        if best is None:
            best = (q, fitted, zero, error)
        else:
            better = error < best[3]
            best = (
                torch.where(better[..., None], q, best[0]),
                *(torch.where(better, new, old) for new, old in zip((fitted, zero, error), best[1:], strict=True)),
            )
    assert best is not None
    return best[0], best[1], best[2]


def _round(w: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    return (w / _nonzero(scale)[..., None] + zero[..., None]).round().clamp(0, (1 << bits) - 1)


def _nonzero(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 1.0, scale)


def _pack_rows(q: np.ndarray, bits: int) -> np.ndarray:
    """(N, n) integers as bytes."""
    if bits == 8:
        return q
    even = np.pad(q, ((0, 0), (0, q.shape[1] % 2)))
    return even[:, ::2] | (even[:, 1::2] << 4)


def unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    """Bytes as integers, one for each half where they have 4 bits."""
    if bits == 8:
        return packed
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(packed.shape[0], -1)


def relative_error(matrix: Any, packed: Packed) -> float:
    """The root mean square of what rounding changed, in units of the matrix's own."""
    exact = np.asarray(matrix, dtype=np.float64)
    return float(np.sqrt(np.square(packed.dense() - exact).sum() / np.square(exact).sum()))
