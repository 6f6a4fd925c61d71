"""A mixing matrix of one's own: (1 + λ)·A − λ·C, attention pushed away from the mean of what it may see.

C is attention with every score zero, so at λ = 0 this is softmax attention, and with larger λ a token gets more of what
its query singles out and less of what all tokens share. Rows add up to 1. λ is trained, one for each head.

    skipless train --plugin examples/contrast_mixing.py --block pre-ln-contrast
    skipless inspect pre-ln-contrast --plugin examples/contrast_mixing.py
"""

from torch import Tensor

from skipless.parts import (
    BLOCKS,
    Field,
    Gain,
    GainConfig,
    Mask,
    MaskLike,
    ModelConfig,
    Settings,
    Softmax,
    attention_matrix,
    block,
    gain_shape,
    part,
)


class ContrastSettings(Settings):
    """What can be set of it."""

    contrast: Gain = Field(GainConfig(init=0.0, trainable=True), description="λ; a bare number fixes it.")


@part("mixing", "contrast", ContrastSettings, drawn="(1+λ)A − λC")
class Contrast(Softmax):
    """A + λ·(A − C): the fast form from A·V and C·V, the explicit form as a matrix."""

    def __init__(self, cfg: ModelConfig, settings: ContrastSettings) -> None:
        super().__init__(cfg)
        self.add_gains(cfg.n_layer, gain_shape(cfg), contrast=settings.contrast)

    def combine(self, v: Tensor, attended: Tensor, mask: MaskLike) -> Tensor:
        """What the matrix gives, from V and A·V: (B, H, T, D)."""
        return attended if self.contrast is None else attended + self.contrast * (attended - mask.mean(v))

    def matrix(self, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
        """The matrix, (B, H, T, T)."""
        attention = attention_matrix(q, k, mask)
        if self.contrast is None:
            return attention
        return attention + self.contrast * (attention - mask.centring(q, q.shape[-2], k.shape[-2]))


block("pre-ln-contrast", BLOCKS["pre-ln"].replace(mixing="contrast"))
