"""`skipless.fit` with a Dataset, a loss and callbacks of one's own; stopped at any time, the same command goes on.

python examples/fit_own_data.py runs/sums
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

import skipless

SIGNS = "0123456789+="


class Sums(Dataset[Tensor]):
    """`27+58=580`: each item is a sum as a row of tokens, its answer with the last digit first."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Tensor:
        a, b = divmod(self.numbers[index], 100)
        answer = f"{a + b:03}"[::-1]
        return torch.tensor([SIGNS.index(sign) for sign in f"{a:02}+{b:02}={answer}"])


def answer_loss(model: skipless.CausalLM, rows: Tensor) -> Tensor:
    """Only what stands behind the equals sign has to be learnt."""
    logits = model(rows[:, :-1])[:, -3:]
    return F.cross_entropy(logits.flatten(0, 1), rows[:, -3:].flatten())


def main(folder: str | Path, steps: int = 3000, **settings: Any) -> float:
    """Train on most sums of two numbers below 100, and return the share of the others that it gets right."""
    model = skipless.ModelConfig(block="sas-p", n_layer=2, d_model=64, n_head=4, vocab_size=12, max_seq_len=16)
    order = torch.randperm(10_000, generator=torch.Generator().manual_seed(0)).tolist()
    held_out = Sums(order[9_500:])
    fitted = skipless.fit(
        model,
        Sums(order[:9_500]),
        valid=held_out,
        loss=answer_loss,
        folder=folder,
        resume=True,
        **{"steps": steps, "batch_size": 128, "lr": 5e-3, "eval_every": 500, "save_every": 500, **settings},
        on_evaluate=lambda line: print(f"step {line['step']}: held-out loss {line['valid_loss']:.3f}"),
        on_save=lambda step, place: print(f"step {step} is kept in {place}"),
    )
    asked = torch.stack([held_out[index] for index in range(len(held_out))])
    written = fitted.model.generate(asked[:, :6], 3, temperature=0)
    return (written == asked).all(dim=1).float().mean().item()


if __name__ == "__main__":
    right = main(sys.argv[1] if len(sys.argv) > 1 else "runs/sums")
    print(f"{right:.0%} of the sums that it has not seen are right")
