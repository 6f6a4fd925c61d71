"""Losses of a head over the vocabulary that never hold all logits, and outputs that make these only when asked.

Shapes: B batch, T tokens, d width, V vocabulary.
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast, MaskedLMOutput

from skipless.errors import UserError
from skipless.nn.kernels.modules import token_loss
from skipless.nn.kernels.predicate import EXACT, are_plain_linear
from skipless.nn.model import IGNORED


def serves(head: nn.Module, hidden: Tensor) -> bool:
    """Whether the loss may read the head's matrix instead of calling it: it is nothing but that, and nobody would see.

    An adapter, a hook, a quantised or an offloaded head is called. With weights in half precision the loss is left to
    `transformers`, which computes it in float32; a compiler cannot trace the chunks, and without values there are none.
    """
    if not are_plain_linear(head) or torch.compiler.is_compiling():
        return False
    weight: Any = head.weight
    if weight.is_meta or weight.is_inference():
        return False
    return type(weight) is nn.Parameter and weight.dtype in EXACT and weight.device == hidden.device


def foreseeable(labels: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """Labels (B, T) but for those of tokens that come right behind padding, which would have to foresee them.

    Padding is in nobody's sight, and itself may see anything: where it was moved aside, the whole row.
    """
    if labels is None or mask is None or mask.ndim != 2 or labels.ndim != 2:
        return labels
    real = mask[:, -labels.shape[1] :].to(labels.device) != 0
    if real.shape != labels.shape:  # which the model refuses in its own words
        return labels
    begins = F.pad(real[:, 1:] & ~real[:, :-1], (1, 0))
    return labels.masked_fill(begins, IGNORED)


def chunked_loss(hidden: Tensor, weight: Tensor, labels: Tensor, n_items: Tensor | float | None) -> Tensor:
    """Mean cross-entropy of (B, T, d) hidden states over the (B, T) labels that count; or its sum over `n_items`."""
    if labels.numel() != hidden.shape[:-1].numel():
        raise UserError(
            f"labels must have the shape of the tokens, {tuple(hidden.shape[:-1])}, got {tuple(labels.shape)}"
        )
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
            loss, kept = found.get("loss"), found.get("logits")
            make = getattr(loss, "_make_logits", None)
            if kept is None and loss is not None and make is not None:
                logits = make()
                if loss.requires_grad and not logits.requires_grad:
                    return logits  # made without gradients, and so not for those who may ask with them
                self.logits = logits
        return object.__getattribute__(self, name)

    def __getitem__(self, key: Any) -> Any:
        if key in ("logits", 0):  # the loss comes first, and needs no logits
            return self.logits if key else self.loss  # pyrefly: ignore
        return super().__getitem__(key)  # pyrefly: ignore

    def get(self, key: str, default: Any = None) -> Any:
        """What the key stands for, the logits too."""
        return self.logits if key == "logits" else super().get(key, default)  # pyrefly: ignore

    def to_tuple(self) -> tuple[Any, ...]:
        """Everything that is there, in its order; whoever counts places counts the logits."""
        found = (getattr(self, field.name) for field in fields(self))  # pyrefly: ignore
        return tuple(value for value in found if value is not None)

    def __reduce__(self) -> Any:
        """Pickled with the logits: the head does not go with them."""
        return type(self), tuple(getattr(self, field.name) for field in fields(self))  # pyrefly: ignore


@dataclass
class LateCausalLMOutput(_Late, CausalLMOutputWithPast):
    """`CausalLMOutputWithPast`, of a training step."""


@dataclass
class LateMaskedLMOutput(_Late, MaskedLMOutput):
    """`MaskedLMOutput`, of a training step."""


class _Maker:
    """Makes the logits behind a loss, by the head as it was, in the precision of its step."""

    def __init__(self, head: nn.Linear, hidden: Tensor) -> None:
        self.head, self.hidden, self.version = head, hidden, head.weight._version
        device = hidden.device.type
        self.precision = torch.autocast(device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))

    def __call__(self) -> Tensor:
        if self.head.weight._version != self.version:
            raise UserError(
                "training does not keep the logits, and the head has changed since this loss was computed: "
                "read output.logits before the optimiser's step"
            )
        with self.precision:
            return self.head(self.hidden)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Nothing goes with a pickled loss: a pickled output has its logits."""
        return type(None), ()


def with_late_logits(loss: Tensor, head: nn.Linear, hidden: Tensor) -> Tensor:
    """The loss, which knows how the logits behind it are made."""
    loss._make_logits = _Maker(head, hidden)  # pyrefly: ignore
    return loss
