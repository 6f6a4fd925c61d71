"""A norm of one's own: Dynamic Tanh (Zhu et al., Transformers without Normalization, 2025), γ·tanh(α·x) + β.

skipless train --plugin examples/dynamic_tanh.py --block pre-ln-dyt
skipless compare pre-ln pre-ln-dyt sas-p --plugin examples/dynamic_tanh.py
skipless inspect 'sas:norm={name: dyt; alpha: 0.8}' --plugin examples/dynamic_tanh.py
"""

import torch
from torch import Tensor, nn

from skipless.parts import BLOCKS, Field, Settings, block, part


class TanhSettings(Settings):
    """What can be set of it."""

    alpha: float = Field(0.5, gt=0, description="Where the slope of the tanh starts.")


@part("norm", "dyt", TanhSettings, drawn="DyT")
class DynamicTanh(nn.Module):
    """γ·tanh(α·x) + β, with one trained α and a γ and a β for each dimension."""

    def __init__(self, width: int, settings: TanhSettings) -> None:
        super().__init__()
        self.start = settings.alpha
        self.alpha = nn.Parameter(torch.empty(1))
        self.weight, self.bias = nn.Parameter(torch.empty(width)), nn.Parameter(torch.empty(width))

    def reset_parameters(self) -> None:
        """As in the paper: α from the settings, γ = 1, β = 0."""
        nn.init.constant_(self.alpha, self.start)
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:  # (…, width) → (…, width)
        """The equation."""
        return torch.tanh(self.alpha * x) * self.weight + self.bias


block("pre-ln-dyt", BLOCKS["pre-ln"].replace(norm="dyt"))
