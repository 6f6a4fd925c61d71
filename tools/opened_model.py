"""A causal model with its gains as inputs and its attention as an output, as an ONNX graph for the playground.

Inputs, for T tokens, L layers, H heads:

    ids       (1, T) int64
    mixing    (L, 3, H)      α, β, γ of αI + βA − γC; for a plain softmax 0, 1, 0
    branches  (L, 4)         α_SA, β_SA, α_FF, β_FF of equation 1; for equation 7 α_comb, β_SA, 0, β_FF
    at        (n,) int64     the tokens behind which logits are wanted

Outputs: `logits` (n, V); `attention`, A of every layer and head, (L, H, T, T); `similarity` (L + 1,), the mean cosine
of two tokens before the first block and behind each.
"""

import warnings
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skipless.errors import UserError
from skipless.interop.onnx import ONNX_TOLERANCE
from skipless.interop.quiet import quiet
from skipless.nn.attention import Attention
from skipless.nn.blocks import ParallelBlock, SequentialBlock
from skipless.nn.kernels import plain_type
from skipless.nn.layers import Gain, no_branch
from skipless.nn.masks import Mask
from skipless.nn.mixing import MIXINGS, attention_matrix
from skipless.nn.model import CausalLM
from skipless.nn.positions import Rope

MASK = Mask(causal=True)


class Opened(nn.Module):
    """A model whose gains are given with the text."""

    def __init__(self, model: CausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, mixing: Tensor, branches: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, attention and similarity, as the module's docstring has them."""
        model = self.model
        positions = MASK.positions(ids.shape[1], ids.device)
        x = model.embed(ids)
        added, rope = model.positions(positions, x.dtype), model.positions.rope(positions, x.dtype)
        x = model.embedding_norm(x if added is None else x + added)
        seen, similar = [], [mean_cosine(x)]
        for layer, block in enumerate(model.blocks):
            x, attention = STEPS[plain_type(block)](block, x, rope, mixing[layer], branches[layer])
            seen.append(attention)
            similar.append(mean_cosine(x))
        return model.logits(model.norm(x)[0, at]), torch.stack(seen), torch.stack(similar)


def attend(attention: Attention, x: Tensor, rope: Rope | None, gains: Tensor) -> tuple[Tensor, Tensor]:
    """Equation 5 with given gains (3, H), and A itself, (H, T, T)."""
    q, k = attention.queries_keys(attention.query(x), attention.key(x), rope)
    length = x.shape[1]
    alpha, beta, gamma = gains[:, :, None, None].unbind()  # (H, 1, 1)
    a = attention_matrix(q, k, MASK)
    matrix = alpha * MASK.identity(q, length, length) + beta * a - gamma * MASK.centring(q, length)
    mixed = matrix @ attention.heads(attention.value(x))  # (1, H, T, D)
    return attention.projection(mixed.transpose(1, 2).flatten(-2)), a[0]


def sequential(block: Any, x: Tensor, rope: Rope | None, mixing: Tensor, branches: Tensor) -> tuple[Tensor, Tensor]:
    """Equation 1 with given gains."""
    alpha_sa, beta_sa, alpha_ff, beta_ff = branches.unbind()
    mha, attention = attend(block.attention, block.norm_sa(x), rope, mixing)
    x_hat = block.post_norm_sa(alpha_sa * x + beta_sa * mha)
    mlp = block.mlp(block.norm_ff(x_hat))
    return block.post_norm_ff(alpha_ff * x_hat + beta_ff * mlp), attention


def parallel(block: Any, x: Tensor, rope: Rope | None, mixing: Tensor, branches: Tensor) -> tuple[Tensor, Tensor]:
    """Equation 7 with given gains."""
    alpha_comb, beta_sa, _, beta_ff = branches.unbind()
    h = block.norm(x)
    mha, attention = attend(block.attention, h, rope, mixing)
    return alpha_comb * x + beta_ff * block.mlp(h) + beta_sa * mha, attention


STEPS: dict[type, Any] = {SequentialBlock: sequential, ParallelBlock: parallel}


def mean_cosine(x: Tensor) -> Tensor:
    """Mean cosine similarity over all pairs of different tokens, (1, T, d); 0 for a single token."""
    unit, length = F.normalize(x[0], dim=-1), x.shape[1]
    pairs = unit.sum(0).square().sum() - unit.square().sum()
    return pairs / max(length * (length - 1), 1)


# ------------------------------------------------------------------------------------------- gains as they were trained


def trained_gains(model: CausalLM) -> tuple[Tensor, Tensor]:
    """The `mixing` and the `branches` with which an opened model is the model itself."""
    rows, branches = [], []
    for block in model.blocks:
        assert isinstance(block, SequentialBlock | ParallelBlock)
        attention = block.attention
        if plain_type(attention) is not Attention or block.mlp is no_branch or model.config.positions == "alibi":
            raise UserError("the playground opens blocks with attention and an MLP, and no ALiBi")
        mixing = attention.mixing  # pyrefly: ignore
        if plain_type(mixing) not in MIXINGS.values():
            raise UserError(f"the playground does not know the mixing matrix {type(mixing).__name__}")
        gains = [getattr(mixing, name, default) for name, default in (("alpha", 0.0), ("beta", 1.0), ("gamma", 0.0))]
        rows.append(torch.stack([_row(gain, model.config.n_head) for gain in gains]))
        names = ("alpha_sa", "beta_sa", "alpha_ff", "beta_ff")
        names = names if isinstance(block, SequentialBlock) else ("alpha_comb", "beta_sa", "", "beta_ff")
        branches.append(torch.cat([_row(getattr(block, name, None), 1) for name in names]))
    return torch.stack(rows), torch.stack(branches)


def _row(gain: Gain, size: int) -> Tensor:
    """A gain as so many numbers; one that is not there is 0."""
    if isinstance(gain, Tensor):
        return gain.detach().flatten().float().expand(size)
    return torch.full((size,), float(gain or 0.0))


# -------------------------------------------------------------------------------------------------------- the graph


@torch.no_grad()
def to_graph(model: CausalLM) -> bytes:
    """The opened model in ONNX's own form, held against PyTorch in ONNX Runtime."""
    mixing, branches = trained_gains(model)
    length = torch.export.Dim("length", min=2, max=model.config.max_seq_len)
    wanted = torch.export.Dim("wanted", min=1, max=model.config.max_seq_len)
    example = (torch.zeros(1, 7, dtype=torch.long), mixing, branches, torch.tensor([3, 6]))
    with quiet("torch.onnx"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            Opened(model.eval()),
            example,
            dynamo=True,
            verbose=False,
            input_names=["ids", "mixing", "branches", "at"],
            output_names=["logits", "attention", "similarity"],
            dynamic_shapes=({1: length}, None, None, {0: wanted}),
        )
    assert program is not None
    data = program.model_proto.SerializeToString()
    apart = difference(model, data)
    if not apart <= ONNX_TOLERANCE:
        raise UserError(f"ONNX Runtime computes other logits than PyTorch, {apart:.1g} apart: nothing was written")
    return data


@torch.no_grad()
def difference(model: CausalLM, graph: bytes, seed: int = 0) -> float:
    """How far the logits of a graph are from the model's, in units of the largest logit or of 1."""
    import onnxruntime

    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    mixing, branches = (part.numpy() for part in trained_gains(model))
    random, worst = torch.Generator().manual_seed(seed), 0.0
    for length in (2, 7, model.config.max_seq_len):
        ids = torch.randint(model.config.vocab_size, (1, length), generator=random)
        given = {"ids": ids.numpy(), "mixing": mixing, "branches": branches, "at": np.arange(length)}
        expected = model(ids)[0]
        (found,) = session.run(["logits"], given)
        worst = max(worst, float((torch.from_numpy(found) - expected).abs().max() / expected.abs().max().clamp(min=1)))
    return worst
