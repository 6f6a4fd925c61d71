"""A model: a stack of blocks between an embedding and a head."""

from typing import Any, Self

from pydantic import (
    Field,
    field_validator,
    model_validator,
)

from skipless.config.base import Config
from skipless.config.block import BLOCKS, BlockConfig, parse_block
from skipless.config.parts import Norm, Positions


class ModelConfig(Config):
    """A stack of blocks between an embedding and a head."""

    block: BlockConfig = Field(BLOCKS["pre-ln"], description="A preset's name, a variant of one, or a BlockConfig.")
    n_layer: int = Field(12, ge=1, le=10_000, description="L: number of blocks.")
    d_model: int = Field(128, ge=1, le=1_000_000, description="d: width.")
    n_head: int = Field(4, ge=1, description="H: attention heads; divides the width.")
    d_ff: int | None = Field(
        None,
        ge=1,
        le=10_000_000,
        description="Width of the MLP; 4·d_model if not given. A GLU halves it after the gate.",
    )
    vocab_size: int = Field(4096, ge=1, le=10_000_000, description="Words of the vocabulary.")
    max_seq_len: int = Field(128, ge=1, le=10_000_000, description="T: the longest sequence the model takes.")
    positions: Positions = Field(
        "sinusoidal",
        description="sinusoidal: added sinusoids of the embedding's size; scaled-sinusoidal: the same with a trainable "
        "scale from 1/√d; learned: added trainable vectors; alibi: a bias on the scores that grows with distance; "
        "rotary: rotation of queries and keys.",
    )
    embedding_norm: bool | None = Field(
        None, description="Norm after the embedding; by default only where the blocks have none."
    )
    outer_norm: Norm | None = Field(
        None, description="Norm after the embedding and after the last block; by default the blocks', or rmsnorm."
    )
    tie_embeddings: bool = Field(True, description="The head's matrix is the embedding's.")
    dropout: float = Field(0.0, ge=0, lt=1, description="After the embedding, the attention and the MLP.")
    init_std: float = Field(0.02, gt=0, description="Standard deviation of every Gaussian weight.")

    @field_validator("block", mode="before")
    @classmethod
    def _named_block(cls, block: Any) -> Any:
        return parse_block(block) if isinstance(block, str) else block

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.outer_norm == "none":
            raise ValueError("outer_norm 'none': the signal needs a norm before the head, so there is no way without")
        if self.d_model % self.n_head:
            divisors = [h for h in range(1, self.d_model + 1) if self.d_model % h == 0]
            near = ", ".join(map(str, sorted(sorted(divisors, key=lambda h: abs(h - self.n_head))[:3])))
            raise ValueError(f"n_head {self.n_head} does not divide d_model {self.d_model}; near: {near}")
        if self.positions == "rotary" and self.d_head % 2:
            raise ValueError(f"rotary positions need an even width per head; d_model / n_head is {self.d_head}")
        if self.positions in ("sinusoidal", "scaled-sinusoidal") and self.d_model % 2:
            raise ValueError(f"sinusoidal positions need an even d_model, got {self.d_model}")
        if self.block.mlp == "glu" and self.ff_width % 2:
            raise ValueError(f"a GLU halves d_ff after the gate, so d_ff must be even, got {self.ff_width}")
        return self

    @property
    def d_head(self) -> int:
        """d_k = d / H."""
        return self.d_model // self.n_head

    @property
    def ff_width(self) -> int:
        """Width of the MLP's first product."""
        return 4 * self.d_model if self.d_ff is None else self.d_ff

    @property
    def normalises_embedding(self) -> bool:
        """Whether the signal is brought to size 1 before the first block."""
        return self.block.norm == "none" if self.embedding_norm is None else self.embedding_norm
