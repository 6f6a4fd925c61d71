"""An MLP of one's own: the bilinear layer (Shazeer, GLU Variants Improve Transformer, 2020), (x W_a ⊙ x W_b) W_down.

It has no non-linearity but the product. With 8/3 of the width it has as many weights as an MLP of four times the width.

    skipless train --plugin examples/bilinear_mlp.py --block pre-ln-bilinear
    skipless sweep --plugin examples/bilinear_mlp.py --block pre-ln-bilinear --over train.lr=1e-3,2e-3
"""

from torch import Tensor, nn

from skipless.parts import BLOCKS, Field, ModelConfig, Settings, block, part


class BilinearSettings(Settings):
    """What can be set of it."""

    expansion: float = Field(8 / 3, gt=0, description="Hidden width as a multiple of the model's.")


@part("mlp", "bilinear", BilinearSettings, drawn="Bilinear")
class Bilinear(nn.Module):
    """(x W_a ⊙ x W_b) W_down. Its linear layers are initialised as all are: Gaussian, std `init_std`."""

    def __init__(self, cfg: ModelConfig, settings: BilinearSettings) -> None:
        super().__init__()
        hidden = max(1, round(settings.expansion * cfg.d_model))
        self.first, self.second = (nn.Linear(cfg.d_model, hidden, bias=cfg.block.bias) for _ in range(2))
        self.down = nn.Linear(hidden, cfg.d_model, bias=cfg.block.bias)
        self.dropout = nn.Dropout(cfg.dropout)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, d) → (B, T, d)
        """The equation."""
        return self.dropout(self.down(self.first(x) * self.second(x)))


block("pre-ln-bilinear", BLOCKS["pre-ln"].replace(mlp="bilinear"))
