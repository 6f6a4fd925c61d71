"""The blocks and their parts against the equations, written out by hand on plain tensors."""

import math

import pytest
import torch
import torch.nn.functional as F

from skipless import BLOCKS, CausalLM, GainConfig, ModelConfig
from skipless.nn import Mask
from skipless.nn.positions import apply_rope, make_rope, sinusoids
from tests.helpers.variants import VARIANTS
from tests.helpers.weights import disturbed

D, H, T = 12, 3, 7


def first_block(block, **changes):
    cfg = ModelConfig(block=block, n_layer=2, d_model=D, n_head=H, d_ff=20, vocab_size=16, **changes)
    return disturbed(CausalLM(cfg)).double().blocks[1]


def rms_norm(x, weight, eps=1e-8):
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def attention(part, x, matrix):
    """Head by head: the mixing matrix times the values, then W^P. `matrix(A, C, h)` gives the mixing matrix."""
    q, k = x @ part.query.weight.T, x @ part.key.weight.T
    v = x @ part.value.weight.T if hasattr(part.value, "weight") else x
    size, heads = D // H, []
    for h in range(H):
        cols = slice(h * size, (h + 1) * size)
        scores = q[:, cols] @ k[:, cols].T / math.sqrt(size)
        hidden = torch.triu(torch.ones(T, T, dtype=torch.bool), 1)
        a = torch.softmax(scores.masked_fill(hidden, -math.inf), -1)
        c = torch.tril(torch.ones(T, T, dtype=x.dtype)) / torch.arange(1, T + 1, dtype=x.dtype)[:, None]
        heads.append(matrix(a, c, h) @ v[:, cols])
    out = torch.cat(heads, -1)
    return out @ part.projection.weight.T if hasattr(part.projection, "weight") else out


def softmax_matrix(part):
    return lambda a, c, h: a


def shaped_matrix(part):
    alpha, beta, gamma = (getattr(part.mixing, name).flatten() for name in ("alpha", "beta", "gamma"))
    return lambda a, c, h: alpha[h] * torch.eye(T, dtype=a.dtype) + beta[h] * a - gamma[h] * c


def v_skipinit_matrix(part):
    return lambda a, c, h: part.mixing.alpha.squeeze() * torch.eye(T, dtype=a.dtype) + part.mixing.beta.squeeze() * a


def mlp(part, x):
    return torch.clamp(x @ part.up.weight.T, min=0) @ part.down.weight.T


@pytest.fixture
def x():
    return torch.randn(T, D, dtype=torch.float64)


def check(block, x, expected):
    torch.testing.assert_close(block(x[None], Mask(True))[0], expected, rtol=1e-10, atol=1e-10)


def test_equation_1_pre_ln(x):
    block = first_block("pre-ln")
    x_hat = x + attention(block.attention, rms_norm(x, block.norm_sa.weight), softmax_matrix(block.attention))
    check(block, x, x_hat + mlp(block.mlp, rms_norm(x_hat, block.norm_ff.weight)))


def test_equation_1_post_ln(x):
    block = first_block("post-ln")
    x_hat = rms_norm(x + attention(block.attention, x, softmax_matrix(block.attention)), block.post_norm_sa.weight)
    check(block, x, rms_norm(x_hat + mlp(block.mlp, x_hat), block.post_norm_ff.weight))


def test_equation_1_with_all_gains(x):
    gains = {name: GainConfig(init=1.0, trainable=True) for name in ("alpha_sa", "beta_sa", "alpha_ff", "beta_ff")}
    block = first_block(BLOCKS["pre-ln"].replace(**gains))
    mha = attention(block.attention, rms_norm(x, block.norm_sa.weight), softmax_matrix(block.attention))
    x_hat = block.alpha_sa * x + block.beta_sa * mha
    out = block.alpha_ff * x_hat + block.beta_ff * mlp(block.mlp, rms_norm(x_hat, block.norm_ff.weight))
    check(block, x, out)


def test_equation_7_parallel(x):
    block = first_block("parallel")
    h = rms_norm(x, block.norm.weight)
    check(block, x, x + mlp(block.mlp, h) + attention(block.attention, h, softmax_matrix(block.attention)))


def test_equation_4_v_skipinit(x):
    block = first_block("v-skipinit")
    mha = attention(block.attention, rms_norm(x, block.norm_sa.weight), v_skipinit_matrix(block.attention))
    x_hat = block.beta_sa * mha
    check(block, x, x_hat + block.beta_ff * mlp(block.mlp, rms_norm(x_hat, block.norm_ff.weight)))


def test_equations_5_and_12_sas(x):
    block = first_block("sas")
    mha = attention(block.attention, rms_norm(x, block.norm_sa.weight), shaped_matrix(block.attention))
    x_hat = block.beta_sa * mha
    check(block, x, x_hat + block.beta_ff * mlp(block.mlp, rms_norm(x_hat, block.norm_ff.weight)))


@pytest.mark.parametrize("name", ["sas-p", "sas-p-nonorm"])
def test_sas_p(name, x):
    block = first_block(name)
    h = rms_norm(x, block.norm.weight) if name == "sas-p" else x
    mha = attention(block.attention, h, shaped_matrix(block.attention))
    check(block, x, block.beta_ff * mlp(block.mlp, h) + block.beta_sa * mha)


ACTIVATIONS = {
    "relu": lambda z: torch.where(z > 0, z, 0.0),
    "leaky-relu": lambda z: torch.maximum(z, 0.3 * z),
    "gelu": lambda z: z * 0.5 * (1 + torch.erf(z / math.sqrt(2))),
    "gelu-tanh": lambda z: z * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
    "silu": lambda z: z / (1 + torch.exp(-z)),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_mlps(activation, bias, x):
    phi = ACTIVATIONS[activation]
    for kind in ("plain", "glu"):
        changes = {"mlp": kind, "activation": activation, "negative_slope": 0.3, "bias": bias}
        part = first_block(BLOCKS["pre-ln"].replace(**changes)).mlp
        up, down = (lambda z, m=m: F.linear(z, m.weight, m.bias) for m in (part.up, part.down))
        hidden = up(x)
        expected = phi(hidden) if kind == "plain" else hidden[:, :10] * phi(hidden[:, 10:])
        torch.testing.assert_close(part(x), down(expected), rtol=1e-10, atol=1e-10)


def test_layer_norm_and_query_key_norm(x):
    block = first_block(VARIANTS["qk-norm-pre-ln"])
    centred = x - x.mean(-1, keepdim=True)
    by_hand = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-8) * block.norm_sa.weight
    torch.testing.assert_close(block.norm_sa(x), by_hand, rtol=1e-10, atol=1e-10)
    q, k = block.attention.queries_keys(block.attention.query(x[None]), block.attention.key(x[None]))
    assert (q / block.attention.query_norm.weight).mean(-1).abs().max() < 1e-6
    assert (k / block.attention.key_norm.weight).square().mean(-1).sub(1).abs().max() < 1e-4


def test_the_authors_norm_adds_epsilon_outside_the_root(x):
    block = first_block(VARIANTS["authors-sas"].replace(norm_eps=0.5))
    by_hand = x / (torch.sqrt(x.square().mean(-1, keepdim=True)) + 0.5) * block.norm_sa.weight
    torch.testing.assert_close(block.norm_sa(x), by_hand, rtol=1e-10, atol=1e-10)


def test_rotary_scores_depend_on_the_distance_alone():
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def score(i, j):
        ropes = [make_rope(torch.tensor([[position]]), 8, torch.float64) for position in (i, j)]
        return (apply_rope(q, ropes[0]) * apply_rope(k, ropes[1])).sum()

    torch.testing.assert_close(score(5, 2), score(105, 102), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(score(3, 3), (q * k).sum(), rtol=1e-5, atol=1e-5)
    assert (score(5, 2) - score(5, 3)).abs() > 1e-4
    turned = apply_rope(q, make_rope(torch.tensor([[7]]), 8, torch.float64))
    torch.testing.assert_close(turned.norm(), q.norm(), rtol=1e-6, atol=0)


def test_positions_are_added_to_the_embedding():
    model = CausalLM(ModelConfig(n_layer=1, d_model=D, n_head=H, vocab_size=16))
    seen = []
    model.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    ids = torch.randint(16, (1, 5))
    model(ids)
    k = torch.arange(0, D, 2) / D
    angle = torch.arange(5.0)[:, None] / 10_000**k
    expected = model.embedding.weight[ids[0]] + 0.02 * math.sqrt(2) * torch.cat([angle.sin(), angle.cos()], -1)
    torch.testing.assert_close(seen[0][0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_far_positions_are_told_apart(dtype):
    """Whatever the type of the model: angles are made in float32, and only sines and cosines are rounded."""
    positions = torch.arange(1000, 1400)
    angle = positions.double()[:, None] / 10_000 ** (torch.arange(0, D, 2).double() / D)
    expected = torch.cat([angle.sin(), angle.cos()], -1)
    torch.testing.assert_close(sinusoids(positions, D, dtype).double(), expected, rtol=0, atol=1e-2)
    cos, _ = make_rope(positions[None], D, dtype)
    torch.testing.assert_close(cos[0, 0].double(), angle.cos(), rtol=0, atol=1e-2)
