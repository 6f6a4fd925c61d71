"""How a model is written as an ONNX file."""

from typing import Literal, Self

from pydantic import Field, model_validator

from skipless.config.base import Config

BLOCKS = {4: 32, 8: 64}
"""Weights that share a scale, by their bits: the most with which the error is not above that of llama.cpp's formats.
Larger blocks are faster."""


class OnnxOptions(Config):
    """The choices of `skipless export --to onnx`."""

    cache: Literal["auto", "kv", "kx", "x", "none"] = Field(
        "auto", description="What decoding remembers, as in `new_cache`; `none` is a graph of whole sequences."
    )
    bits: Literal[4, 8, 32] = Field(32, description="Bits of a weight in every matrix.")
    block_size: Literal[16, 32, 64, 128, 256] | None = Field(
        None, description="Weights that share a scale; by default 64 at 8 bits and 32 at 4."
    )
    symmetric: bool = Field(False, description="Whether blocks have a scale alone, or a zero point too.")
    cache_bits: Literal[8, 32] = Field(
        32,
        description="Bits of what the cache remembers: at 8, inputs alone (`x`) have a scale for each token, keys and "
        "values a fixed one for each channel.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.cache_bits == 8 and self.cache == "none":
            raise ValueError("cache_bits 8 goes with a cache")
        if self.cache == "none" and self.bits != 32:
            raise ValueError("low bits go with a cache: a graph of whole sequences has 32")
        if self.bits == 32 and (self.block_size is not None or self.symmetric):
            raise ValueError("block_size and symmetric go with bits 4 or 8")
        return self

    @property
    def block(self) -> int:
        """Weights that share a scale."""
        return self.block_size or BLOCKS.get(self.bits, 0)
