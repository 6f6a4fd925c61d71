"""A block of the paper in a model of your own: any (batch, tokens, width) tensor goes in, and one comes out.

python examples/block_in_your_model.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skipless import Mask, ModelConfig
from skipless.nn import init_weights, make_block


class Sorter(nn.Module):
    """Told ten digits, says them in order: an encoder with a head of its own, and blocks from here."""

    def __init__(self, block: str = "sas-p") -> None:
        super().__init__()
        cfg = ModelConfig(block=block, n_layer=3, d_model=64, n_head=4)
        self.digits = nn.Embedding(10, cfg.d_model)
        self.places = nn.Parameter(0.1 * torch.randn(10, cfg.d_model))
        self.blocks = nn.ModuleList(make_block(cfg, layer) for layer in range(cfg.n_layer))
        init_weights(self.blocks, cfg)
        self.head = nn.Linear(cfg.d_model, 10)

    def forward(self, digits: Tensor) -> Tensor:
        """(B, 10) digits → (B, 10, 10) logits of the digit at each place."""
        x = self.digits(digits) + self.places
        for block in self.blocks:
            x = block(x, Mask(causal=False))
        return self.head(x)


def main(steps: int = 300) -> float:
    """Train it, and return the share of places it gets right."""
    torch.manual_seed(0)
    model = Sorter()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        digits = torch.randint(10, (64, 10))
        loss = F.cross_entropy(model(digits).flatten(0, 1), digits.sort().values.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    digits = torch.randint(10, (256, 10))
    return (model(digits).argmax(-1) == digits.sort().values).float().mean().item()


if __name__ == "__main__":
    print(f"{main():.0%} of the places are right")
