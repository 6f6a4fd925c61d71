"""The steps of a cache at 8 bits: how large keys and values get, found on text that the model writes itself.

`GroupQueryAttention` remembers keys and values as int8 with a fixed step for each channel. What is larger than 127
steps is cut off, so the steps come from the model's own keys and values, with some room: of tokens that are drawn at
random, and of tokens that it wrote.
"""

import torch
from torch import Tensor

from skipless.nn.model import CausalLM
from skipless.nn.positions import rotates
from skipless.nn.sampling import generate

ROWS, LENGTH = 8, 64
"""Of the drawn tokens, and of the written ones."""

ROOM = 1.3
"""How much larger than anything seen a key or a value may be before it is cut off."""


@torch.no_grad()
def cache_steps(model: CausalLM) -> list[tuple[Tensor, Tensor]]:
    """For each layer the steps of keys and of values, (H, D)."""
    cfg, random = model.config, torch.Generator().manual_seed(0)
    length = min(LENGTH, cfg.max_seq_len)
    drawn = torch.randint(cfg.vocab_size, (ROWS, length), generator=random)
    written = torch.tensor(list(generate(model, drawn[:, :1].tolist(), length - 1)))  # (length - 1, ROWS)
    ids = torch.cat([drawn, torch.cat([drawn[:, :1], written.reshape(-1, ROWS).T], 1)]).to(
        model.embedding.weight.device
    )
    cache = model.new_cache(2 * ROWS, max_len=length)
    model(ids, cache=cache)
    return [(_step(layer.keys, turned=rotates(cfg)), _step(layer.values)) for layer in cache.layers]


def _step(remembered: Tensor, *, turned: bool = False) -> Tensor:
    """(B, H, S, D) → (H, D). Where positions turn pairs of channels, either may get as large as the pair is."""
    if turned:
        pairs = remembered.unflatten(-1, (2, -1)).norm(dim=-2)
        remembered = torch.cat([pairs, pairs], -1)
    return ROOM * remembered.float().abs().amax((0, 2)).clamp(min=torch.finfo(torch.float32).tiny * 128) / 127
