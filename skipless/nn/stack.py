"""A stack of blocks between an embedding and a last norm: its parts, and the pass through them.

The library's models are such stacks (`skipless.nn.model`), and so is the bare model of Hugging Face's classes.

Shapes: B batch, T tokens, d width.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skipless.config.model import ModelConfig
from skipless.errors import UserError
from skipless.nn.blocks import make_block
from skipless.nn.layers import make_outer_norm
from skipless.nn.masks import Mask, MaskLike, alibi_slopes
from skipless.nn.positions import Positions, Rope, make_positions

PARTS = ("embedding", "positions", "embedding_norm", "dropout", "blocks", "norm")
"""The parts of a stack, by name, from the tokens to the head."""


class Stack:
    """What a module with these parts does with them."""

    config: Any
    """A `ModelConfig`, or something that has its keys."""
    causal: bool
    embedding: nn.Embedding
    positions: Positions
    embedding_norm: nn.Module
    dropout: nn.Dropout
    blocks: nn.ModuleList
    norm: nn.Module

    def add_parts(self, cfg: ModelConfig) -> None:
        """Make the parts."""
        self.embedding = nn.Embedding(cfg.vocab_size, cfg.d_model)
        self.positions = make_positions(cfg)
        self.embedding_norm = make_outer_norm(cfg) if cfg.normalises_embedding else nn.Identity()
        self.dropout = nn.Dropout(cfg.dropout)
        self.blocks = nn.ModuleList(make_block(cfg, layer) for layer in range(cfg.n_layer))
        ends_in_norm = cfg.block.norm_position == "post" and cfg.block.norm != "none"
        self.norm = nn.Identity() if ends_in_norm else make_outer_norm(cfg)

    def encode(
        self,
        inputs: Tensor,
        padding: Tensor | None = None,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """What the head sees, (B, T, d), of (B, T) token ids or (B, T, d) embeddings.

        `padding` (B, T) is true where a token is real. `documents` (B, T) numbers the documents packed into a row.
        `positions` (1 or B, T) are the tokens' own where they do not follow from these.
        """
        batch, length = inputs.shape[:2]
        if documents is not None:  # each run of one number is a document, also where a number comes again
            documents = F.pad((documents[:, 1:] != documents[:, :-1]).long(), (1, 0)).cumsum(-1)
        alibi = alibi_slopes(self.config.n_head, inputs.device) if self.config.positions == "alibi" else None
        mask = Mask(self.causal, padding, documents, alibi)
        mask.check(batch, length)
        if padding is None or documents is not None or not self.causal:
            return self._run(inputs, mask, positions)
        # Real tokens first: then the causal mask alone keeps them from the padding, and no other mask is needed.
        order = padding.long().argsort(dim=-1, descending=True, stable=True)
        if positions is not None:
            positions = positions.expand(batch, length).gather(1, order)
        hidden = self._run(_take(inputs, order), Mask(self.causal, alibi=alibi), positions)
        return _take(hidden, order.argsort(dim=-1))

    def _run(self, inputs: Tensor, mask: Mask, positions: Tensor | None) -> Tensor:
        if positions is None:
            positions = mask.positions(inputs.shape[1], inputs.device)
        return self.through(inputs, positions, [mask] * len(self.blocks))

    def through(self, inputs: Tensor, positions: Tensor, masks: Sequence[MaskLike]) -> Tensor:
        """Token ids or embeddings through every part, each block with its own mask, or what stands in its place."""
        x = inputs if inputs.is_floating_point() else self.embed(inputs)
        added, rope = self.positions(positions, x.dtype), self.positions.rope(positions, x.dtype)
        x = self.dropout(self.embedding_norm(x if added is None else x + added))
        for layer, mask in enumerate(masks):
            x = self.step(layer, x, mask, rope)
        return self.norm(x)

    def step(self, layer: int, x: Tensor, mask: MaskLike, rope: Rope | None) -> Tensor:
        """Through one block."""
        return self.blocks[layer](x, mask, rope)

    def embed(self, ids: Tensor) -> Tensor:
        """(B, T) → (B, T, d)."""
        try:
            return self.embedding(ids)
        except IndexError:
            low, high = int(ids.min()), int(ids.max())
            raise IndexError(f"token ids must lie in 0…{self.embedding.num_embeddings - 1}, got {low}…{high}") from None


def _take(x: Tensor, order: Tensor) -> Tensor:
    """Tokens (B, T) or (B, T, d) in another order of each row."""
    return x.gather(1, order if x.ndim == 2 else order[..., None].expand_as(x))


def check_ids(ids: Tensor) -> None:
    """Raise unless these are (B, T) integers."""
    if not isinstance(ids, Tensor):
        raise UserError(f"ids must be a tensor of (batch, tokens) integers, got {type(ids).__name__}")
    if ids.ndim != 2 or ids.dtype not in (torch.int64, torch.int32):
        raise UserError(f"ids must be (batch, tokens) integers, got {tuple(ids.shape)} of {ids.dtype}")


def check_length(length: int, longest: int) -> None:
    """Raise where a sequence is longer than the context."""
    if length > longest:
        raise UserError(f"a sequence of {length} tokens is longer than max_seq_len {longest}")


def refuse_folded(blocks: Iterable[nn.Module]) -> None:
    """A UserError where a model is a folded copy: opened again by its configuration, its gains would count twice."""
    if any(getattr(block, "folded", False) for block in blocks):
        raise UserError("a folded model no longer has the parameters of its configuration: save or export the original")
