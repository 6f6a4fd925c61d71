"""Signs of trouble inside a model: heavy-tailed activations, attention that looks at one token, tokens that agree."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from skipless.batches import held_out_batch
from skipless.config import RunConfig
from skipless.data import Corpus
from skipless.inspect import mean_cosine
from skipless.nn.attention import Attention, attention_matrix
from skipless.nn.model import Transformer

SEQUENCES = 2


@torch.no_grad()
def health(model: Transformer, cfg: RunConfig, corpus: Corpus) -> dict[str, list[float]]:
    """For each layer, on a few held-out sequences: kurtosis, attention entropy, similarity of tokens."""
    found: dict[str, list[float]] = {"kurtosis": [], "attention_entropy": [], "token_similarity": []}

    def block_hook(_module: nn.Module, _args: object, output: Tensor) -> None:
        found["kurtosis"].append(kurtosis(output))
        found["token_similarity"].append(mean_cosine(output))

    def attention_hook(module: nn.Module, args: tuple) -> None:
        assert isinstance(module, Attention)
        x, mask, turn = (*args, None)[:3]
        found["attention_entropy"].append(entropy(attention_matrix(*module.queries_keys(x, turn), mask)))

    hooks = [block.register_forward_hook(block_hook) for block in model.blocks]
    hooks += [m.register_forward_pre_hook(attention_hook) for m in model.modules() if isinstance(m, Attention)]
    rows = np.arange(min(SEQUENCES, len(corpus.valid)))
    ids, _ = held_out_batch(cfg, corpus, corpus.valid, rows, 0)
    was_training = model.training
    model.eval()
    try:
        model.hidden(ids.to(model.embedding.weight.device))
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    return found


@torch.no_grad()
def first_nonfinite(model: Transformer, ids: Tensor, attention_mask: Tensor | None = None) -> dict[int, str]:
    """The sequences of a batch whose activations are not finite, each with the part where they first are not.

    Those that fail in an earlier part come first.
    """
    found: dict[int, str] = {}

    def look(name: str) -> Callable[..., None]:
        def hook(_module: object, _args: object, output: Tensor) -> None:
            bad = ~output.flatten(1).isfinite().all(1)
            for row in bad.nonzero().flatten().tolist():
                found.setdefault(row, name)

        return hook

    parts = {"the embedding": model.embedding}
    parts |= {f"layer {number + 1}": block for number, block in enumerate(model.blocks)}
    hooks = [part.register_forward_hook(look(name)) for name, part in {**parts, "the last norm": model.norm}.items()]
    try:
        model.hidden(ids, attention_mask)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def kurtosis(x: Tensor) -> float:
    """E[x⁴]/E[x²]² of a token's activations, averaged over tokens: 3 for a Gaussian, d if one dimension has all."""
    x = x.double()
    return (x.pow(4).mean(-1) / x.square().mean(-1).square().clamp(min=1e-30)).mean().item()


def entropy(attention: Tensor) -> float:
    """Mean entropy of the rows of an attention matrix, in nats: 0 where one token has all the attention."""
    return torch.special.entr(attention.double()).sum(-1).mean().item()
