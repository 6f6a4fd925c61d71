"""The signal at initialisation: one forward and one backward pass, layer by layer."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from skipless.analysis.costs import FLOAT, count_parameters
from skipless.config.model import ModelConfig
from skipless.distributed.devices import check_memory
from skipless.nn.model import CausalLM, MaskedLM

SIGNAL_VOCABULARY = 4096
"""The signal inside the blocks does not depend on the vocabulary, so a large one is not built for it."""


@dataclass(frozen=True)
class Layer:
    """The signal behind one block, at initialisation."""

    layer: int
    activation: float
    """Root mean square of the block's output."""
    cosine: float
    """Mean cosine similarity between two tokens of a sequence; 1 is rank collapse."""
    gradient: float
    """Root mean square of the loss's gradient at the block's output, relative to the last block's."""
    weight_gradient: float
    """Norm of the loss's gradient over all weights of the block."""


def measure_signal(cfg: ModelConfig, *, causal: bool = True, batch_size: int = 2, seed: int = 0) -> list[Layer]:
    """One forward and one backward pass on random tokens and labels, at initialisation, layer by layer."""
    generator = torch.Generator().manual_seed(seed)
    cfg = cfg.replace(vocab_size=min(cfg.vocab_size, SIGNAL_VOCABULARY), dropout=0.0)
    weights = 2 * FLOAT * sum(count_parameters(cfg).values())
    check_memory(weights, torch.device("cpu"), "measuring the signal (leave it out with --no-signal)")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = (CausalLM if causal else MaskedLM)(cfg)
    ids, labels = torch.randint(cfg.vocab_size, (2, batch_size, min(cfg.max_seq_len, 128)), generator=generator)
    outputs: list[Tensor] = []

    def keep(_module: nn.Module, _args: tuple[Any, ...], output: Tensor) -> None:
        output.retain_grad()
        outputs.append(output)

    for block in model.blocks:
        block.register_forward_hook(keep)
    model.loss(ids, labels).backward()
    last = _rms(outputs[-1].grad)
    return [
        Layer(
            layer=number + 1,
            activation=_rms(output),
            cosine=mean_cosine(output.detach()),
            gradient=_rms(output.grad) / last if last else 0.0,
            weight_gradient=_norm(parameter.grad for parameter in block.parameters()),
        )
        for number, (block, output) in enumerate(zip(model.blocks, outputs, strict=True))
    ]


def mean_cosine(x: Tensor) -> float:
    """Mean cosine similarity over all pairs of different tokens of a sequence, (B, T, d)."""
    unit = torch.nn.functional.normalize(x.double(), dim=-1)
    length = x.shape[1]
    if length < 2:
        return math.nan
    pairs = unit.sum(1).square().sum(-1) - unit.square().sum((1, 2))  # (B,)
    return (pairs / (length * (length - 1))).mean().item()


def _rms(x: Tensor | None) -> float:
    return 0.0 if x is None else x.detach().double().square().mean().sqrt().item()


def _norm(grads: Iterable[Tensor | None]) -> float:
    return sum(float(grad.double().square().sum()) for grad in grads if grad is not None) ** 0.5
