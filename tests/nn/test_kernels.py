"""The operations with gradients by hand, against the forms that one reads."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from skipless.config.block import BLOCKS
from skipless.config.model import ModelConfig
from skipless.errors import UserError
from skipless.nn import CausalLM, Mask, MaskedLM, explicit_form
from skipless.nn.kernels import disabled, ops
from skipless.nn.kernels.predicate import are_plain_linear, have_no_hooks, runs_eagerly, trains
from tests.helpers.weights import disturbed

SHAPES = [(1, 1), (2, 15), (3, 16), (2, 17), (1, 64), (2, 100)]


@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(shape):
    x, grad = torch.randn(2, *shape, 24, dtype=torch.float64)
    x.requires_grad_()
    weight = torch.randn(24, dtype=torch.float64, requires_grad=True)
    ours, theirs = ops._RMSNorm.apply(x, weight, 1e-6), F.rms_norm(x, (24,), weight, 1e-6)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    for a, b in zip(*(torch.autograd.grad(y, (x, weight), grad) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_rms_norm_of_zero_and_of_views():
    x = torch.zeros(2, 3, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(ops.rms_norm(x, torch.ones(8), 1e-6).sum(), x)
    assert grad.isfinite().all()
    x = torch.randn(4, 8, 3).transpose(1, 2)  # not contiguous
    torch.testing.assert_close(ops.rms_norm(x, torch.ones(8), 1e-6), F.rms_norm(x, (8,), None, 1e-6))


@pytest.mark.parametrize("shape", SHAPES)
def test_running_sum(shape):
    x = torch.randn(*shape, 6, dtype=torch.float64)
    torch.testing.assert_close(ops.running_sum(x), x.cumsum(1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_shaped_causal(shape, heads):
    batch, length = shape
    v, attended, grad = torch.randn(3, batch, length, 3, 4, dtype=torch.float64).transpose(2, 3)
    gains = torch.randn(3, heads, 1, 1, dtype=torch.float64)
    inputs = [tensor.clone().requires_grad_() for tensor in (v, attended, *gains)]
    v, attended, alpha, beta, gamma = inputs
    ours = ops.shaped_causal(*inputs)
    theirs = alpha * v + beta * attended - gamma * Mask(True).mean(v)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    for a, b in zip(*(torch.autograd.grad(y, inputs, grad) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("length", [1, 16, 17, 64])
def test_shaped_causal_beside_another_branch(length, heads):
    """The sum of both branches in one go, and its gradients."""
    v, attended, other, grad = torch.randn(4, 2, length, 3, 4, dtype=torch.float64).transpose(2, 3)
    gains, outer = torch.randn(3, heads, 1, 1, dtype=torch.float64), torch.randn(2, 1, dtype=torch.float64)
    inputs = [tensor.clone().requires_grad_() for tensor in (v, attended, *gains, outer[0], other, outer[1])]
    v, attended, alpha, beta, gamma, scale, other, gain = inputs
    ours = ops.shaped_causal_sum(*inputs)
    theirs = scale * (alpha * v + beta * attended - gamma * Mask(True).mean(v)) + gain * other
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    for a, b in zip(*(torch.autograd.grad(y, inputs, grad) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_constants_are_of_their_size_and_type_and_no_fake_is_kept():
    """What is made once must not be what another size, another type or a trace without memory asked for."""
    for dtype in (torch.float32, torch.float64, torch.float32):
        for length in (32, 48, 32):
            x = torch.randn(2, length, 6, dtype=dtype)
            with FakeTensorMode() as fake:
                ops.running_sum(fake.from_tensor(x))
                ops.suffix_sum(fake.from_tensor(x))
            with torch.inference_mode():
                ops.suffix_sum(x)
            assert type(ops.suffix_sum(x)) is torch.Tensor
            torch.testing.assert_close(ops.running_sum(x), x.cumsum(1))


@pytest.mark.parametrize("shape", SHAPES)
def test_suffix_sum(shape):
    x = torch.randn(*shape, 6, dtype=torch.float64)
    shared = x / torch.arange(1, shape[1] + 1, dtype=torch.float64)[:, None]
    torch.testing.assert_close(ops.suffix_sum(x), shared.flip(1).cumsum(1).flip(1), rtol=1e-12, atol=1e-12)


@pytest.fixture(params=[ops.PIECE, 3], ids=["whole", "pieces"])
def piece(request, monkeypatch):
    """Wide products whole, and three columns at a time where there are at most three rows."""
    monkeypatch.setattr(ops, "PIECE", request.param)


@pytest.mark.parametrize("rows", [(3,), (4,), (1, 3), (2, 2)])
@pytest.mark.parametrize("columns", [6, 7, 9, 11])
def test_wide_product(piece, rows, columns):
    a, b = torch.randn(*rows, 5).double(), torch.randn(columns, 5).double()
    torch.testing.assert_close(ops.wide_product(a, b.mT), F.linear(a, b), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ops.wide_product(a, b.mT.contiguous()), F.linear(a, b), rtol=1e-12, atol=1e-12)


def test_fan_out(piece):
    x, weights = torch.randn(1, 3, 8).double(), [torch.randn(width, 8).double() for width in (3, 8, 4)]
    inputs = [tensor.requires_grad_() for tensor in (x, *weights)]
    ours, theirs = ops.fan_out(*inputs), (*(F.linear(x, weight) for weight in weights), x)
    grads = [torch.randn_like(y) for y in theirs]
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    for a, b in zip(*(torch.autograd.grad(y, inputs, grads) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert are_plain_linear(torch.nn.Linear(8, 3, bias=False))
    assert not are_plain_linear(torch.nn.Linear(8, 3))
    assert not are_plain_linear(torch.nn.Identity())
    assert not are_plain_linear(torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(8, 3, bias=False)))


def test_relu_linear(piece):
    hidden, weight = torch.randn(1, 3, 8, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64)
    hidden[0, 0] = 0.0  # its gradient is taken as 0, as PyTorch does
    hidden, weight, grad = hidden.requires_grad_(), weight.requires_grad_(), torch.randn(1, 3, 3, dtype=torch.float64)
    ours, theirs = ops.relu_linear(hidden * 1.0, weight), F.linear(F.relu(hidden), weight)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    for a, b in zip(*(torch.autograd.grad(y, (hidden, weight), grad) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_two_terms():
    x, y, grad = torch.randn(3, 2, 5, 4, dtype=torch.float64)
    inputs = [t.requires_grad_() for t in (torch.tensor([0.3]).double(), x, torch.tensor([-2.0]).double(), y)]
    a, x, b, y = inputs
    for ours, theirs in zip(
        *(torch.autograd.grad(out, inputs, grad) for out in (ops.two_terms(*inputs), a * x + b * y)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows", [3, 4, 100])
def test_cross_entropy(rows):
    """Against PyTorch's, with labels that are ignored, a factor from outside, and more backwards than one."""
    hidden, weight = torch.randn(8, 5, dtype=torch.float64), 9 * torch.randn(7, 5, dtype=torch.float64)
    inputs, labels = (hidden.requires_grad_(), weight.requires_grad_()), torch.tensor([0, 6, -100, 3, 3, -100, 1, 2])
    ours = ops.cross_entropy(*inputs, labels, -100, rows)
    theirs = F.cross_entropy(hidden @ weight.mT, labels)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    for factor in (0.25, 1.0, 0.5):
        pair = (torch.autograd.grad(loss * factor, inputs, retain_graph=True) for loss in (ours, theirs))
        for a, b in zip(*pair, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_cross_entropy_makes_only_the_gradients_that_are_needed():
    hidden, weight = torch.randn(8, 5, requires_grad=True), torch.randn(7, 5)
    labels = torch.arange(7).repeat(2)[:8]
    (ours,) = torch.autograd.grad(ops.cross_entropy(hidden, weight, labels, -100, 4), hidden)
    (theirs,) = torch.autograd.grad(F.cross_entropy(hidden @ weight.mT, labels), hidden)
    torch.testing.assert_close(ours, theirs)
    loss, _, grad_weight = ops._cross_entropy(hidden.detach(), weight, labels, -100, 4, (True, False))
    assert grad_weight is None
    assert loss.isfinite()


@pytest.mark.parametrize("use", ["both", "embedding", "head"])
def test_tie(use):
    """The gradient is dense, and equal to that of one matrix, whichever of the two is used."""
    weight, ids = torch.randn(7, 5, dtype=torch.float64, requires_grad=True), torch.tensor([[1, 3, 3, 0]])

    def loss(embedding, head):
        x = (
            F.embedding(ids, embedding, sparse=embedding is not weight)
            if use != "head"
            else torch.ones(1, 4, 5).double()
        )
        return ((x @ head.mT) ** 2 if use != "embedding" else x**2).sum()

    (ours,) = torch.autograd.grad(loss(*ops.tie(weight)), weight)
    (theirs,) = torch.autograd.grad(loss(weight, weight), weight)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("model", [CausalLM, MaskedLM])
def test_a_loss_has_the_gradients_of_its_logits(model):
    """With embedding and head tied, in the loss, its accumulation, and where no token is asked for."""
    torch.manual_seed(0)
    lm = model(ModelConfig(block="sas-p", n_layer=1, d_model=8, n_head=2, vocab_size=11, max_seq_len=300)).double()
    ids, labels = torch.randint(11, (2, 2, 300))
    for _ in range(2):
        lm.loss(ids, labels).backward()
    ours = {name: p.grad.clone() for name, p in lm.named_parameters()}
    lm.zero_grad()
    (2 * F.cross_entropy(lm(ids).flatten(0, 1), labels.flatten())).backward()
    for name, p in lm.named_parameters():
        torch.testing.assert_close(ours[name], p.grad, rtol=1e-8, atol=1e-12)
    lm.zero_grad()
    lm.hidden(ids).sum().backward()
    assert not lm.embedding.weight.grad.is_sparse


def test_gradients_against_finite_differences():
    v, attended = (torch.randn(1, 2, 5, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    gains = [torch.randn(2, 1, 1, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradcheck(ops.shaped_causal, (v, attended, *gains))
    x, weight = torch.randn(4, 6, dtype=torch.float64, requires_grad=True), torch.randn(6, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x, w: ops.rms_norm(x, w, 1e-6), (x, weight.requires_grad_()))


def wide(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def one_gain():
    return wide(1, 1, 1)


REFUSING = {
    "rms_norm": lambda: ops.rms_norm(wide(2, 3, 8), wide(8), 1e-6),
    "shaped_causal": lambda: ops.shaped_causal(*(wide(1, 2, 5, 3) for _ in range(2)), *(one_gain() for _ in range(3))),
    "shaped_causal_sum": lambda: ops.shaped_causal_sum(
        *(wide(1, 2, 5, 3) for _ in range(2)), *(one_gain() for _ in range(3)), wide(1), wide(1, 2, 5, 3), wide(1)
    ),
    "fan_out": lambda: ops.fan_out(wide(2, 8), wide(3, 8))[0],
    "relu_linear": lambda: ops.relu_linear(wide(2, 8) * 1.0, wide(3, 8)),
    "two_terms": lambda: ops.two_terms(wide(1), wide(2, 3), wide(1), wide(2, 3)),
    "tie": lambda: ops.tie(wide(3, 4))[1],
    "cross_entropy": lambda: ops.cross_entropy(wide(8, 5), wide(7, 5), torch.arange(7).repeat(2)[:8], -100, 4),
}


@pytest.mark.parametrize("name", REFUSING)
def test_gradients_of_gradients_are_refused(name):
    """By `grad` and by `backward`: what is not recorded has no gradient, and a zero would pass for one."""
    out = REFUSING[name]().square().sum()
    with pytest.raises(UserError, match=r"create_graph=True.*skipless\.nn\.kernels\.disabled\(model\)"):
        out.backward(create_graph=True)
    REFUSING[name]().sum().backward()


def test_no_backward_is_forgotten():
    """Two of the operations are one function."""
    functions = [
        one for one in vars(ops).values() if isinstance(one, type) and issubclass(one, torch.autograd.Function)
    ]
    assert len(functions) == len(REFUSING) - 1


@pytest.mark.parametrize("block", ["pre-ln", "sas", "sas-p"])
def test_gradients_of_gradients_of_the_plain_explicit_form(block):
    """Against finite differences, which a ReLU would spoil; and the fast form says where they are to be had."""
    cfg = ModelConfig(
        block=BLOCKS[block].replace(activation="gelu"), n_layer=2, d_model=8, n_head=2, vocab_size=11, max_seq_len=300
    )
    model = disturbed(CausalLM(cfg)).double()
    weights, (ids, labels) = list(model.parameters()), torch.randint(11, (2, 2, 20))
    along, step = [torch.randn_like(weight) for weight in weights], 1e-5

    def gradients():
        loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
        return torch.autograd.grad(loss, weights, create_graph=True)

    def moved(by):
        with torch.no_grad():
            for weight, direction in zip(weights, along, strict=True):
                weight.add_(direction, alpha=by)
        return [grad.detach() for grad in gradients()]

    for loss in (lambda: model.loss(ids, labels), lambda: model.loss(*torch.randint(11, (2, 2, 200)))):
        with pytest.raises(UserError, match="gradients of gradients"):
            torch.autograd.grad(loss(), weights, create_graph=True)
    with disabled(model), explicit_form(model):
        ours = torch.autograd.grad(gradients(), weights, along)
        above, below = moved(step), moved(-2 * step)
    for one, a, b in zip(ours, above, below, strict=True):
        torch.testing.assert_close(one, (a - b) / (2 * step), rtol=1e-5, atol=1e-7)


def test_where_they_do_not_run():
    """Half precision, mixed types, the meta device, autocast and torch.func take the readable form."""
    one = torch.ones(1)
    assert runs_eagerly(one, torch.nn.Parameter(one))
    assert trains(one)
    assert not runs_eagerly(one.bfloat16())
    assert not runs_eagerly(one, one.double())
    assert not runs_eagerly(one, 1.0)
    assert not runs_eagerly(one.to("meta"))
    with torch.no_grad():
        assert runs_eagerly(one)
        assert not trains(one)
    with torch.autocast("cpu", torch.bfloat16):
        assert not runs_eagerly(one)
    seen = []
    torch.func.grad(lambda x: (seen.append(runs_eagerly(x)), x.sum())[1])(one)
    assert seen == [False]


@pytest.mark.parametrize(
    "register",
    [
        lambda m: m.register_forward_hook(lambda *_: None),
        lambda m: m.register_forward_pre_hook(lambda *_: None),
        lambda m: m.register_full_backward_hook(lambda *_: None),
        lambda m: m.register_full_backward_pre_hook(lambda *_: None),
        lambda m: torch.nn.modules.module.register_module_forward_hook(lambda *_: None),
        lambda m: torch.nn.modules.module.register_module_forward_pre_hook(lambda *_: None),
        lambda m: torch.nn.modules.module.register_module_full_backward_hook(lambda *_: None),
        lambda m: torch.nn.modules.module.register_module_full_backward_pre_hook(lambda *_: None),
    ],
)
def test_a_module_with_a_hook_is_not_untouched(register):
    module = torch.nn.Linear(2, 2)
    assert have_no_hooks(module)
    handle = register(module)
    try:
        assert not have_no_hooks(module)
    finally:
        handle.remove()
    assert have_no_hooks(module)
    module.forward = lambda x: x
    assert not have_no_hooks(module)
