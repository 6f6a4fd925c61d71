"""The operations with gradients by hand, against the forms that one reads."""

import pytest
import torch
import torch.nn.functional as F

from skipless.nn import Mask, fast

SHAPES = [(1, 1), (2, 15), (3, 16), (2, 17), (1, 64), (2, 100)]


@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(shape):
    x, grad = torch.randn(2, *shape, 24, dtype=torch.float64)
    x.requires_grad_()
    weight = torch.randn(24, dtype=torch.float64, requires_grad=True)
    ours, theirs = fast._RMSNorm.apply(x, weight, 1e-6), F.rms_norm(x, (24,), weight, 1e-6)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    for a, b in zip(*(torch.autograd.grad(y, (x, weight), grad) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_rms_norm_of_zero_and_of_views():
    x = torch.zeros(2, 3, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(fast.rms_norm(x, torch.ones(8), 1e-6).sum(), x)
    assert grad.isfinite().all()
    x = torch.randn(4, 8, 3).transpose(1, 2)  # not contiguous
    torch.testing.assert_close(fast.rms_norm(x, torch.ones(8), 1e-6), F.rms_norm(x, (8,), None, 1e-6))


@pytest.mark.parametrize("shape", SHAPES)
def test_running_sum(shape):
    x = torch.randn(*shape, 6, dtype=torch.float64)
    torch.testing.assert_close(fast.running_sum(x), x.cumsum(1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_shaped_causal(shape, heads):
    batch, length = shape
    v, attended, grad = torch.randn(3, batch, length, 3, 4, dtype=torch.float64).transpose(2, 3)
    gains = torch.randn(3, heads, 1, 1, dtype=torch.float64)
    inputs = [tensor.clone().requires_grad_() for tensor in (v, attended, *gains)]
    v, attended, alpha, beta, gamma = inputs
    ours = fast.shaped_causal(*inputs)
    theirs = alpha * v + beta * attended - gamma * Mask(True).mean(v)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    for a, b in zip(*(torch.autograd.grad(y, inputs, grad) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_gradients_against_finite_differences():
    v, attended = (torch.randn(1, 2, 5, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    gains = [torch.randn(2, 1, 1, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradcheck(fast.shaped_causal, (v, attended, *gains))
    x, weight = torch.randn(4, 6, dtype=torch.float64, requires_grad=True), torch.randn(6, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x, w: fast.rms_norm(x, w, 1e-6), (x, weight.requires_grad_()))


def test_where_they_do_not_run():
    """Half precision, mixed types, and the meta device take the readable form."""
    half = torch.ones(2, 8, dtype=torch.bfloat16)
    assert not fast.by_hand(half)
    assert not fast.by_hand(torch.ones(1), torch.ones(1, dtype=torch.float64))
    assert not fast.by_hand(torch.ones(1, device="meta"))
    assert fast.rms_norm(half, torch.ones(8, dtype=torch.bfloat16), 1e-6).dtype == torch.bfloat16
