"""Operations with gradients written by hand, because they pass over memory fewer times than PyTorch's own on a CPU.

Each is tested against its readable counterpart: `rms_norm` against `torch.nn.functional.rms_norm`, `fan_out` and
`wide_product` against `F.linear`, `relu_linear` against the plain MLP, `two_terms` against a sum, `shaped_causal`
and `shaped_causal_sum` against the plain mixing, `cross_entropy` against `F.cross_entropy`. `predicate` decides
when they may run.

Shapes: B batch, T tokens, H heads, D width of a head, d = H·D.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from skipless.nn.kernels.predicate import once_differentiable

CHUNK = 16
"""Tokens of a running sum that are summed by one small product. Not tuned: best of 16, 32 and 64 on a busy CPU."""

PIECE = 1024
"""Columns that `wide_product` makes at a time, and the rows above which it need not (`benchmarks/wide.py`)."""


Constant = Callable[[int, torch.dtype], Tensor]


def constant(make: Constant, size: int, like: Tensor) -> Tensor:
    """What follows from a size and a type alone: made once, for a narrow model spends more time on it than it looks."""
    return make(size, like.dtype) if isinstance(like, FakeTensor) else _made_once(make, size, like.dtype)


@lru_cache(maxsize=64)
def _made_once(make: Constant, size: int, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(mode=False):
        return make(size, dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / √(mean(x²) + eps) · weight."""
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
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, Tensor, None]:
        (grad,), (x, weight, scale) = grad_outputs, ctx.saved_tensors
        width = x.shape[-1]
        product = (grad * x).contiguous()
        flat = product.view(-1, width)
        grad_weight = scale.reshape(1, -1) @ flat  # Σ over tokens of grad·x·scale
        along = (flat @ weight).view(scale.shape)  # Σ over the width of grad·weight·x
        grad_x = torch.mul(grad, weight, out=product).mul_(scale)
        grad_x.addcmul_(x, along.mul_(scale.pow(3)), value=-1 / width)
        return grad_x, grad_weight.view(-1), None


def running_sum(x: Tensor) -> Tensor:
    """Sum over the tokens so far, (B, T, d): chunks by a triangular product, then what the chunks before add up to."""
    batch, length, width = x.shape
    whole = length // CHUNK * CHUNK
    if not whole:
        return x.cumsum(1)
    triangle = constant(_triangle, CHUNK, x)
    chunks = x[:, :whole].reshape(-1, CHUNK, width)
    sums = (triangle @ chunks).view(batch, whole // CHUNK, CHUNK, width)
    sums[:, 1:] += sums[:, :-1, -1:].cumsum(1)
    sums = sums.view(batch, whole, width)
    if whole == length:
        return sums
    rest = x[:, whole:].cumsum(1) + sums[:, -1:]
    return torch.cat([sums, rest], dim=1)


def _triangle(size: int, dtype: torch.dtype) -> Tensor:
    """Sums over the tokens so far, as a matrix."""
    return torch.ones(size, size, dtype=dtype).tril_()


def shaped_causal(v: Tensor, attended: Tensor, alpha: Tensor, beta: Tensor, gamma: Tensor) -> Tensor:
    """α·V + β·(A V) − γ·(C V) under a causal mask, for (B, H, T, D) values and gains of one or H heads."""
    return _ShapedCausal.apply(v, attended, alpha, beta, gamma, None, None, None)


def shaped_causal_sum(
    v: Tensor,
    attended: Tensor,
    alpha: Tensor,
    beta: Tensor,
    gamma: Tensor,
    scale: Tensor,
    other: Tensor,
    gain: Tensor,
) -> Tensor:
    """The same times `scale`, a gain of one element, plus another branch times another such gain."""
    return _ShapedCausal.apply(v, attended, alpha, beta, gamma, scale, other, gain)


class _ShapedCausal(torch.autograd.Function):
    """C V is the running sum over the count. The gradient of V through it is the running sum from behind:

    Σ_(i ≥ j) g_i / (i + 1), and that of γ is its product with V, so the running sum itself need not be kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        v: Tensor,
        attended: Tensor,
        alpha: Tensor,
        beta: Tensor,
        gamma: Tensor,
        scale: Tensor | None,
        other: Tensor | None,
        gain: Tensor | None,
    ) -> Tensor:
        v, attended = v.transpose(1, 2), attended.transpose(1, 2)  # (B, T, H, D), as the model's stream lies
        other = None if other is None else other.transpose(1, 2)
        gains = torch.stack([alpha, beta, gamma])  # (3, 1 or H, 1, 1)
        ctx.save_for_backward(v, attended, gains, scale, other, gain)
        a, b, c = _scaled_gains(gains, scale)
        out = running_sum(v.flatten(2)).view(v.shape)
        out.mul_(constant(_minus_shares, v.shape[1], v) * c)
        out.addcmul_(v, a).addcmul_(attended, b)
        if other is not None and gain is not None:
            out.addcmul_(other, gain)
        return out.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        v, attended, gains, scale, other, gain = ctx.saved_tensors
        a, b, c = _scaled_gains(gains, scale)
        grad = grad_outputs[0].transpose(1, 2)  # (B, T, H, D)
        grad_other = None if other is None else grad.mul(gain).transpose(1, 2)
        grad_gain = None if other is None else _inner(grad, other).view(gain.shape)
        later = suffix_sum(grad.flatten(2)).view(v.shape)
        product = torch.empty_like(later)
        sums = [_per_column(x, y, product) for x, y in ((grad, v), (grad, attended), (later, v))]
        grad_gains, grad_scale = _gain_gradients(torch.cat(sums), gains, scale, v.shape[2])
        grad_v = torch.mul(grad, a, out=product).addcmul_(later, c, value=-1)
        grad_attended = torch.mul(grad, b, out=later)
        grad_v, grad_attended = grad_v.transpose(1, 2), grad_attended.transpose(1, 2)
        return grad_v, grad_attended, *grad_gains, grad_scale, grad_other, grad_gain


def _scaled_gains(gains: Tensor, scale: Tensor | None) -> tuple[Tensor, ...]:
    """α, β and γ, (1 or H, 1) each, as they weigh (B, T, H, D)."""
    return (gains if scale is None else gains * scale).flatten(1).unsqueeze(-1).unbind()


def _gain_gradients(
    columns: Tensor, gains: Tensor, scale: Tensor | None, n_head: int
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """The gradients of α, β, γ and of what scales them, from Σ over the tokens of the three products, (3, d)."""
    heads = columns.view(3, n_head, -1).sum(-1)
    heads[2].neg_()
    found = (heads if gains.shape[1] > 1 else heads.sum(1)).view(gains.shape)
    if scale is None:
        return found.unbind(), None
    return (found * scale).unbind(), _inner(found, gains).view(scale.shape)


def _inner(a: Tensor, b: Tensor) -> Tensor:
    """Σ a·b over everything."""
    return torch.dot(a.reshape(-1), b.reshape(-1))


def suffix_sum(x: Tensor) -> Tensor:
    """Σ_(i ≥ j) x_i / (i + 1) over the tokens of (B, T, d): chunks by small products, then what later chunks add."""
    batch, length, width = x.shape
    chunk = chunk_of(length)
    if chunk == 1:  # no whole number of chunks
        shared = x * constant(_minus_shares, length, x).view(-1, 1).neg()
        return (shared.sum(1, keepdim=True) - running_sum(shared)).add_(shared)
    triangles = constant(_sharing_triangles, length, x)
    sums = triangles @ x.reshape(batch, -1, chunk, width)  # (T / chunk, chunk, chunk) · (B, T / chunk, chunk, d)
    later = sums[:, 1:, :1].flip(1).cumsum(1).flip(1)
    sums[:, :-1] += later
    return sums.view(batch, length, width)


def chunk_of(length: int) -> int:
    """How many tokens `suffix_sum` adds up by one product."""
    return CHUNK if length % CHUNK == 0 else length if length < 4 * CHUNK else 1


def _sharing_triangles(length: int, dtype: torch.dtype) -> Tensor:
    """(T / chunk, chunk, chunk): sums from behind, each token as its share 1 / (i + 1)."""
    chunk = chunk_of(length)
    return torch.ones(chunk, chunk, dtype=dtype).triu_() / torch.arange(1, length + 1, dtype=dtype).view(-1, 1, chunk)


def _minus_shares(length: int, dtype: torch.dtype) -> Tensor:
    """(T, 1, 1): −1 over the number of tokens that each token sees."""
    return -1 / torch.arange(1, length + 1, dtype=dtype).view(-1, 1, 1)


def _ones(size: int, dtype: torch.dtype) -> Tensor:
    return torch.ones(1, size, dtype=dtype)


def _per_column(a: Tensor, b: Tensor, product: Tensor) -> Tensor:
    """Σ a·b over batch and tokens, (1, H·D); `product` is overwritten."""
    torch.mul(a, b, out=product)
    tokens = product.shape[0] * product.shape[1]
    return constant(_ones, tokens, product) @ product.view(tokens, -1)


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a b, (…, K) and (K, N). Where it has few rows and many columns, PyTorch's is slower whole than in pieces."""
    rows, columns = a.shape[:-1].numel(), b.shape[1]
    if rows > PIECE or columns <= 2 * PIECE or isinstance(a, FakeTensor):  # of which only the shape is asked
        return a @ b
    out, flat = a.new_empty(*a.shape[:-1], columns), a.reshape(rows, -1)
    for here in (slice(start, start + PIECE) for start in range(0, columns, PIECE)):
        torch.mm(flat, b[:, here], out=out.view(rows, -1)[:, here])
    return out


def fan_out(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """x Wᵀ for each weight, and x: (…, d) → (…, F) each."""
    return _FanOut.apply(x, *weights)


class _FanOut(torch.autograd.Function):
    """The gradients of x are added up by the products that make them, not in passes of their own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # what is not used has no gradient, rather than an array of zeros
        ctx.save_for_backward(x, *weights)
        return *(wide_product(x, weight.mT) for weight in weights), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        *grads, total = (None if grad is None else grad.flatten(0, -2) for grad in grad_outputs)
        x, *weights = ctx.saved_tensors
        flat, own = x.flatten(0, -2), None
        for grad, weight in zip(grads, weights, strict=True):
            if grad is None:
                continue
            if own is not None:
                own.addmm_(grad, weight)
            else:
                own = grad @ weight if total is None else torch.addmm(total, grad, weight)
        grad_x = total if own is None else own
        return None if grad_x is None else grad_x.view(x.shape), *(g if g is None else g.mT @ flat for g in grads)


def relu_linear(hidden: Tensor, weight: Tensor) -> Tensor:
    """ReLU(hidden) Wᵀ, (…, F) → (…, d); `hidden` is overwritten."""
    return _ReluLinear.apply(hidden, weight)


class _ReluLinear(torch.autograd.Function):
    """Both ways the wide array is made once and changed in place."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        hidden.relu_()
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight.mT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, Tensor]:
        (grad,), (hidden, weight) = grad_outputs, ctx.saved_tensors
        grad_weight = wide_product(grad.flatten(0, -2).mT, hidden.flatten(0, -2))
        grad_hidden = wide_product(grad, weight)
        torch.ops.aten.threshold_backward.grad_input(grad_hidden, hidden, 0, grad_input=grad_hidden)
        return grad_hidden, grad_weight


def two_terms(a: Tensor, x: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """a·x + b·y for gains of one element."""
    return _TwoTerms.apply(a, x, b, y)


class _TwoTerms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, x: Tensor, b: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(a, x, b, y)
        return (x * a).addcmul_(y, b)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, ...]:
        (grad,), (a, x, b, y) = grad_outputs, ctx.saved_tensors
        return _inner(grad, x).view(a.shape), grad * a, _inner(grad, y).view(b.shape), grad * b


def tie(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix for a sparse embedding and for a head: the rows of the one are added to the gradient of the other."""
    return _Tie.apply(weight)


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return weight.view_as(weight), weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Tensor | None:
        rows, head = grad_outputs
        if rows is None or head is None:
            return rows.to_dense() if head is None and rows is not None else head
        return head.add_(rows) if head.is_contiguous() else head + rows


def cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, ignored: int, rows: int) -> Tensor:
    """Mean cross-entropy of the logits hidden Wᵀ, (N, d) and (V, d), against (N,) labels, `rows` rows at a time.

    What `torch.nn.functional.linear_cross_entropy` does in chunks, without the second array of W's shape that its
    backward makes at the moment at which most memory is held.
    """
    return _CrossEntropy.apply(hidden, weight, labels, ignored, rows)


class _CrossEntropy(torch.autograd.Function):
    """The gradients are made with the loss, while the logits are there. They are handed over, not copied.

    A second backward over the same graph makes them anew.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, ignored: int, rows: int) -> Tensor:
        ctx.save_for_backward(hidden, weight, labels)
        ctx.options = (ignored, rows, ctx.needs_input_grad[:2])
        loss, *ctx.grads = _cross_entropy(hidden, weight, labels, *ctx.options)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        grads = ctx.grads or _cross_entropy(*ctx.saved_tensors, *ctx.options)[1:]
        ctx.grads = None
        if grad_outputs[0] != 1:
            for grad in grads:
                if grad is not None:
                    grad.mul_(grad_outputs[0])
        return *grads, None, None, None


def _cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, ignored: int, rows: int, needed: tuple[bool, bool]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The loss, and its gradients with respect to `hidden` and `weight` where they are needed."""
    loss, counted = hidden.new_zeros(()), labels != ignored
    share = 1 / counted.sum().to(hidden.dtype)
    grad_hidden = torch.empty_like(hidden) if needed[0] else None
    grad_weight = torch.zeros_like(weight) if needed[1] else None
    space = hidden.new_empty(min(rows, len(hidden)), len(weight))
    for start in range(0, len(hidden), rows):
        here = slice(start, start + rows)
        x, counts, label = hidden[here], counted[here], labels[here].where(counted[here], 0)[:, None]
        logits = torch.mm(x, weight.mT, out=space[: len(x)])
        logits -= logits.amax(1, keepdim=True)
        target = logits.gather(1, label).squeeze(1)
        total = logits.exp_().sum(1)
        loss += (total.log() - target).where(counts, 0).sum()
        factor = share.where(counts, 0)
        logits *= (factor / total)[:, None]  # softmax, as its share of the mean
        logits.scatter_add_(1, label, -factor[:, None])
        if grad_hidden is not None:
            torch.mm(logits, weight, out=grad_hidden[here])
        if grad_weight is not None:
            grad_weight.addmm_(logits.mT, x)
    return loss * share, grad_hidden, grad_weight
