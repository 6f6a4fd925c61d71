"""Two operations with gradients written by hand, for they pass over memory fewer times than PyTorch's own on a CPU.

Each stands beside the form that one reads, and is tested against it: `rms_norm` beside `torch.nn.functional.rms_norm`,
`shaped_causal` beside `Shaped.combine`. `torch.compile` and accelerators fuse such things themselves, so there, and for
types other than float32 and float64, the readable form runs.

Shapes: B batch, T tokens, H heads, D width of a head, d = H·D.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 16
"""Tokens of a running sum that are summed by one small product. Not tuned: best of 16, 32 and 64 on a busy CPU."""


def by_hand(*tensors: Tensor) -> bool:
    """Whether the forms of this file are the faster ones here."""
    plain = all(x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64) for x in tensors)
    return plain and len({x.dtype for x in tensors}) == 1 and not torch.compiler.is_compiling()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / √(mean(x²) + eps) · weight."""
    if not by_hand(x, weight):
        return F.rms_norm(x, weight.shape, weight, eps)
    if torch.is_grad_enabled():
        return _RMSNorm.apply(x, weight, eps)
    return (x * _rms_scale(x, eps)).mul_(weight)


def _rms_scale(x: Tensor, eps: float) -> Tensor:
    """1 / √(mean(x²) + eps)."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = _rms_scale(x, eps)
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, Tensor, None]:  # pyrefly: ignore
        (grad,), (x, weight, scale) = grad_outputs, ctx.saved_tensors
        width = x.shape[-1]
        product = (grad * x).reshape(-1, width)
        grad_weight = scale.reshape(1, -1) @ product  # Σ over tokens of grad·x·scale
        along = (product @ weight).view(scale.shape)  # Σ over the width of grad·weight·x
        grad_x = (grad * weight).mul_(scale)
        grad_x.addcmul_(x, along.mul_(scale.pow(3)), value=-1 / width)
        return grad_x, grad_weight.view(-1), None


def running_sum(x: Tensor) -> Tensor:
    """Sum over the tokens so far, (B, T, d): chunks by a triangular product, then what the chunks before add up to."""
    batch, length, width = x.shape
    whole = length // CHUNK * CHUNK
    if not whole:
        return x.cumsum(1)
    triangle = torch.ones(CHUNK, CHUNK, dtype=x.dtype, device=x.device).tril_()
    chunks = x[:, :whole].reshape(-1, CHUNK, width)
    sums = (triangle @ chunks).view(batch, whole // CHUNK, CHUNK, width)
    sums[:, 1:] += sums[:, :-1, -1:].cumsum(1)
    sums = sums.view(batch, whole, width)
    if whole == length:
        return sums
    rest = x[:, whole:].cumsum(1) + sums[:, -1:]
    return torch.cat([sums, rest], dim=1)


def shaped_causal(v: Tensor, attended: Tensor, alpha: Tensor, beta: Tensor, gamma: Tensor) -> Tensor:
    """α·V + β·(A V) − γ·(C V) under a causal mask, for (B, H, T, D) values and gains of one or H heads."""
    return _ShapedCausal.apply(v, attended, alpha, beta, gamma)


class _ShapedCausal(torch.autograd.Function):
    """C V is the running sum over the count. The gradient of V through it is the running sum from behind:

    Σ_(i ≥ j) g_i / (i + 1), and that of γ is its product with V, so the running sum itself need not be kept.
    """

    @staticmethod
    def forward(ctx: Any, v: Tensor, attended: Tensor, alpha: Tensor, beta: Tensor, gamma: Tensor) -> Tensor:
        v, attended = v.transpose(1, 2), attended.transpose(1, 2)  # (B, T, H, D), as the model's stream lies
        ctx.save_for_backward(v, attended, alpha, beta, gamma)
        sums = running_sum(v.flatten(2)).view(v.shape)
        out = v * alpha.view(-1, 1)
        out.addcmul_(attended, beta.view(-1, 1))
        out.addcmul_(sums, gamma.view(-1, 1) / _counts(v), value=-1)
        return out.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, ...]:  # pyrefly: ignore
        v, attended, alpha, beta, gamma = ctx.saved_tensors
        grad = grad_outputs[0].transpose(1, 2)  # (B, T, H, D)
        shares = grad / _counts(v)
        flat = shares.flatten(2)
        behind = (flat.sum(1, keepdim=True) - running_sum(flat)).view(v.shape).add_(shares)
        grad_v = (grad * alpha.view(-1, 1)).addcmul_(behind, gamma.view(-1, 1), value=-1)
        grad_attended = grad * beta.view(-1, 1)
        gains = (_per_head(grad, v, alpha), _per_head(grad, attended, beta), _per_head(behind, v, gamma).neg_())
        return grad_v.transpose(1, 2), grad_attended.transpose(1, 2), *gains


def _counts(v: Tensor) -> Tensor:
    """(T, 1, 1): tokens that each token sees."""
    return torch.arange(1, v.shape[1] + 1, dtype=v.dtype, device=v.device).view(-1, 1, 1)


def _per_head(a: Tensor, b: Tensor, gain: Tensor) -> Tensor:
    """Σ a·b over batch, tokens and the width of a head, in the shape of a gain."""
    heads = torch.linalg.vecdot(a, b).sum((0, 1))
    return (heads if gain.numel() > 1 else heads.sum()).view(gain.shape)
