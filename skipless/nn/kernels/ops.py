"""Operations with gradients written by hand, for they pass over memory fewer times than PyTorch's own on a CPU.

Each is tested against the form that one reads: `rms_norm` against `torch.nn.functional.rms_norm`, `fan_out` and
`wide_product` against `F.linear`, `relu_linear` against the plain MLP, `two_terms` against a sum, `shaped_causal`
against the plain mixing, `cross_entropy` against `F.cross_entropy`. When they may run is said in `predicate`.

Shapes: B batch, T tokens, H heads, D width of a head, d = H·D.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 16
"""Tokens of a running sum that are summed by one small product. Not tuned: best of 16, 32 and 64 on a busy CPU."""

PIECE = 1024
"""Columns that `wide_product` makes at a time, and the rows above which it need not (`benchmarks/wide.py`)."""


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
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, Tensor, None]:  # pyrefly: ignore
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
    triangle = torch.ones(CHUNK, CHUNK, dtype=x.dtype, device=x.device).tril_()
    chunks = x[:, :whole].reshape(-1, CHUNK, width)
    sums = (triangle @ chunks).view(batch, whole // CHUNK, CHUNK, width)
    sums[:, 1:] += sums[:, :-1, -1:].cumsum(1)
    sums = sums.view(batch, whole, width)
    if whole == length:
        return sums
    rest = x[:, whole:].cumsum(1) + sums[:, -1:]
    return torch.cat([sums, rest], dim=1)


def shaped_causal(
    v: Tensor,
    attended: Tensor,
    alpha: Tensor,
    beta: Tensor,
    gamma: Tensor,
    other: Tensor | None = None,
    gain: Tensor | None = None,
) -> Tensor:
    """α·V + β·(A V) − γ·(C V) under a causal mask, and gain·other if there is another branch, of one gain.

    For (B, H, T, D) values and gains of one or H heads.
    """
    return _ShapedCausal.apply(v, attended, alpha, beta, gamma, other, gain)


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
        other: Tensor | None,
        gain: Tensor | None,
    ) -> Tensor:
        v, attended = v.transpose(1, 2), attended.transpose(1, 2)  # (B, T, H, D), as the model's stream lies
        other = None if other is None else other.transpose(1, 2)
        ctx.save_for_backward(v, attended, alpha, beta, gamma, other, gain)
        out = running_sum(v.flatten(2)).view(v.shape)
        out.mul_(gamma.view(-1, 1) / _counts(v).neg_())
        out.addcmul_(v, alpha.view(-1, 1)).addcmul_(attended, beta.view(-1, 1))
        if other is not None and gain is not None:
            out.addcmul_(other, gain)
        return out.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:  # pyrefly: ignore
        v, attended, alpha, beta, gamma, other, gain = ctx.saved_tensors
        grad = grad_outputs[0].transpose(1, 2)  # (B, T, H, D)
        grad_other = None if other is None else grad.mul(gain).transpose(1, 2)
        grad_gain = None if other is None else _inner(grad, other).view(gain.shape)
        later = suffix_sum(grad.flatten(2)).view(v.shape)
        product = torch.empty_like(later)
        grad_alpha, grad_beta = _per_head(grad, v, alpha, product), _per_head(grad, attended, beta, product)
        grad_gamma = _per_head(later, v, gamma, product).neg_()
        grad_v = torch.mul(grad, alpha.view(-1, 1), out=product).addcmul_(later, gamma.view(-1, 1), value=-1)
        grad_attended = torch.mul(grad, beta.view(-1, 1), out=later)
        grad_v, grad_attended = grad_v.transpose(1, 2), grad_attended.transpose(1, 2)
        return grad_v, grad_attended, grad_alpha, grad_beta, grad_gamma, grad_other, grad_gain


def _inner(a: Tensor, b: Tensor) -> Tensor:
    """Σ a·b over everything."""
    return torch.dot(a.reshape(-1), b.reshape(-1))


def suffix_sum(x: Tensor) -> Tensor:
    """Σ_(i ≥ j) x_i / (i + 1) over the tokens of (B, T, d): chunks by small products, then what later chunks add."""
    batch, length, width = x.shape
    shares = 1 / torch.arange(1, length + 1, dtype=x.dtype, device=x.device)
    chunk = CHUNK if length % CHUNK == 0 else length if length < 4 * CHUNK else 1
    if chunk == 1:  # no whole number of chunks
        shared = x * shares[:, None]
        return (shared.sum(1, keepdim=True) - running_sum(shared)).add_(shared)
    triangles = torch.ones(chunk, chunk, dtype=x.dtype, device=x.device).triu_() * shares.view(-1, 1, chunk)
    sums = triangles @ x.reshape(batch, -1, chunk, width)  # (T / chunk, chunk, chunk) · (B, T / chunk, chunk, d)
    later = sums[:, 1:, :1].flip(1).cumsum(1).flip(1)
    sums[:, :-1] += later
    return sums.view(batch, length, width)


def _counts(v: Tensor) -> Tensor:
    """(T, 1, 1): tokens that each token sees."""
    return torch.arange(1, v.shape[1] + 1, dtype=v.dtype, device=v.device).view(-1, 1, 1)


def _per_head(a: Tensor, b: Tensor, gain: Tensor, product: Tensor) -> Tensor:
    """Σ a·b over batch, tokens and the width of a head, in the shape of a gain; `product` is overwritten."""
    torch.mul(a, b, out=product)
    tokens = product.shape[0] * product.shape[1]
    columns = product.new_ones(1, tokens) @ product.view(tokens, -1)  # (1, H·D)
    heads = columns.view(product.shape[2], -1).sum(-1)
    return (heads if gain.numel() > 1 else heads.sum()).view(gain.shape)


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a b, (…, K) and (K, N). Where it has few rows and many columns, PyTorch's is slower whole than in pieces."""
    rows, columns = a.shape[:-1].numel(), b.shape[1]
    if rows > PIECE or columns <= 2 * PIECE:
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
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:  # pyrefly: ignore
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
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, Tensor]:  # pyrefly: ignore
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
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, ...]:  # pyrefly: ignore
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
    def backward(ctx: Any, *grad_outputs: Any) -> Tensor | None:  # pyrefly: ignore
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
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:  # pyrefly: ignore
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
