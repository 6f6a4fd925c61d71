"""Signs of trouble inside a model: heavy-tailed activations, attention that looks at one token, tokens that agree."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from skipless.analysis.signal_propagation import mean_cosine
from skipless.config.run import RunConfig
from skipless.data import Corpus
from skipless.data.batches import held_out_batch
from skipless.nn.attention import Attention
from skipless.nn.mixing import attention_matrix
from skipless.nn.model import Transformer

SEQUENCES = 8
"""Held-out sequences that are looked at."""


@torch.no_grad()
def health(model: Transformer, cfg: RunConfig, corpus: Corpus) -> dict[str, list[float]]:
    """For each layer, on a few held-out sequences: size, outliers, attention entropy, similarity of tokens."""
    measures: dict[str, Callable[[Tensor], float]] = {
        "rms": lambda x: x.double().square().mean().sqrt().item(),
        "kurtosis": kurtosis,
        "neuron_kurtosis": neuron_kurtosis,
        "max_median_ratio": max_median_ratio,
        "token_similarity": mean_cosine,
    }
    found: dict[str, list[float]] = {name: [] for name in [*measures, "attention_entropy"]}

    def block_hook(_module: nn.Module, _args: object, output: Tensor) -> None:
        for name, measure in measures.items():
            found[name].append(measure(output))

    def attention_hook(module: nn.Module, args: tuple) -> None:
        assert isinstance(module, Attention)
        x, mask, rope = (*args, None)[:3]
        q, k = module.queries_keys(module.query(x), module.key(x), rope)
        found["attention_entropy"].append(entropy(attention_matrix(q, k, mask)))

    hooks = [block.register_forward_hook(block_hook) for block in model.blocks]
    hooks += [m.register_forward_pre_hook(attention_hook) for m in model.modules() if isinstance(m, Attention)]
    rows = np.arange(min(SEQUENCES, len(corpus.valid)))
    ids, _ = held_out_batch(cfg, corpus, corpus.valid, rows, 0)
    was_training = model.training
    model.eval()
    try:
        model.hidden(torch.from_numpy(ids).to(model.embedding.weight.device))
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    return found


def parts_of(model: Transformer) -> dict[str, nn.Module]:
    """What a model is made of, by a name for people, in the order in which a token passes through it."""
    layers = {f"layer {number + 1}": block for number, block in enumerate(model.blocks)}
    return {"the embedding": model.embedding, **layers, "the last norm": model.norm}


@torch.no_grad()
def first_nonfinite(model: Transformer, ids: Tensor, attention_mask: Tensor | None = None) -> dict[int, str]:
    """The sequences of a batch whose activations are not finite, each with the part where they first are not.

    Those that fail in an earlier part come first.
    """
    found: dict[int, str] = {}

    def record_first(name: str) -> Callable[..., None]:
        def hook(_module: object, _args: object, output: Tensor) -> None:
            bad = ~output.flatten(1).isfinite().all(1)
            for row in bad.nonzero().flatten().tolist():
                found.setdefault(row, name)

        return hook

    hooks = [part.register_forward_hook(record_first(name)) for name, part in parts_of(model).items()]
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


def neuron_kurtosis(x: Tensor) -> float:
    """E_j[s_j²]/E_j[s_j]² with s_j the mean square of dimension j over tokens: 1 if all are alike, d if one has all.

    It is high where the same dimensions are large for every token: the outlier features that low-bit numbers mind
    (He et al., Understanding and Minimising Outlier Features, 2024).
    """
    squares = x.double().square().flatten(0, -2).mean(0)
    return (squares.square().mean() / squares.mean().square().clamp(min=1e-30)).item()


def max_median_ratio(x: Tensor) -> float:
    """The largest over the median size of a token's activations, averaged over tokens."""
    size = x.double().abs()
    return (size.amax(-1) / size.median(-1).values.clamp(min=1e-30)).mean().item()


def entropy(attention: Tensor) -> float:
    """Mean entropy of the rows of an attention matrix, in nats: 0 where one token has all the attention."""
    return torch.special.entr(attention.double()).sum(-1).mean().item()
