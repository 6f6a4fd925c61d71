"""Losses of a head over the vocabulary that never hold all logits, and outputs that make these only when asked.

Shapes: B batch, T tokens, d width, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast, MaskedLMOutput

from skipless.nn.kernels.modules import token_loss
from skipless.nn.kernels.predicate import EXACT, are_plain_linear
from skipless.nn.model import IGNORED


def serves(head: nn.Module, hidden: Tensor) -> bool:
    """Whether the loss may read the head's matrix instead of calling it: it is nothing but that, and nobody would see.

    An adapter, a hook, a quantised or an offloaded head is called. With weights in half precision the loss is left to
    `transformers`, which computes it in float32; and a compiler cannot trace the chunks.
    """
    if not are_plain_linear(head) or torch.compiler.is_compiling():
        return False
    weight = head.weight
    return type(weight) is nn.Parameter and weight.dtype in EXACT and weight.device == hidden.device


def chunked_loss(hidden: Tensor, weight: Tensor, labels: Tensor, n_items: Tensor | float | None) -> Tensor:
    """Mean cross-entropy of (B, T, d) hidden states over the (B, T) labels that count; or its sum over `n_items`."""
    hidden, labels = hidden.flatten(0, 1), labels.flatten().to(hidden.device)
    kept = (labels != IGNORED).nonzero().squeeze(-1)
    if 2 * len(kept) < len(labels):  # else the loss passes over a few sooner than they are copied
        hidden, labels = hidden[kept], labels[kept]
    if not len(kept):  # as in PyTorch: a sum of nothing is 0, its mean is not a number
        nothing = F.linear(hidden, weight).sum().float()
        return nothing / n_items if n_items is not None else nothing * float("nan")
    loss = token_loss(hidden, weight, labels).float()
    if n_items is None:
        return loss
    return loss * len(kept) / (n_items.to(loss.device) if isinstance(n_items, Tensor) else n_items)


class _Late:
    """An output whose logits are made when they are first asked for.

    How is kept with the loss, for libraries copy an output's tensors into a new one.
    """

    def __getattribute__(self, name: str) -> Any:
        if name == "logits":
            found = object.__getattribute__(self, "__dict__")
            make = getattr(found.get("loss"), "_make_logits", None)
            if found.get("logits") is None and make is not None:
                self.logits = make()
        return object.__getattribute__(self, name)

    def __getitem__(self, key: Any) -> Any:
        return self.logits if key == "logits" else super().__getitem__(key)  # pyrefly: ignore


@dataclass
class LateCausalLMOutput(_Late, CausalLMOutputWithPast):
    """`CausalLMOutputWithPast`, of a training step."""


@dataclass
class LateMaskedLMOutput(_Late, MaskedLMOutput):
    """`MaskedLMOutput`, of a training step."""


def with_late_logits(loss: Tensor, make: Callable[[], Tensor]) -> Tensor:
    """The loss, which knows how the logits behind it are made."""
    loss._make_logits = make  # pyrefly: ignore
    return loss
