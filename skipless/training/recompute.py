"""Activation checkpointing: of each block only the input is kept, and the block runs again in the backward pass."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from skipless.nn.model import Transformer


def recompute_blocks(model: Transformer) -> None:
    """From now on keep only what enters each block. Dropout is drawn again as it was, so nothing else changes."""
    keep_activations(model)
    for block in model.blocks:
        block.forward = partial(_again, block.forward)


def keep_activations(model: Transformer) -> None:
    """Undo `recompute_blocks`."""
    for block in model.blocks:
        forward = vars(block).get("forward")
        if isinstance(forward, partial) and forward.func is _again:
            del block.forward


def _again(forward: Callable[..., Tensor], *inputs: Any) -> Tensor:
    if not torch.is_grad_enabled():
        return forward(*inputs)
    return checkpoint(forward, *inputs, use_reentrant=False)
