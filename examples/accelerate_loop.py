"""The same model in a loop of Hugging Face's accelerate: one process, several, mixed precision, as its launcher says.

pip install -c constraints.txt '.[hf]'
accelerate launch examples/accelerate_loop.py saved
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset

import skipless


class Rows(Dataset[torch.Tensor]):
    """The bytes of a file, cut into rows of inputs and targets."""

    def __init__(self, path: str | Path, length: int = 64) -> None:
        self.bytes, self.length = torch.tensor(list(Path(path).read_bytes())), length

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.bytes[index * self.length : (index + 1) * self.length + 1]


class WithLoss(torch.nn.Module):
    """What is wrapped for several processes has to be called, so the loss is its forward."""

    def __init__(self, model: skipless.CausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """The mean loss of rows of tokens."""
        return self.model.loss(rows[:, :-1], rows[:, 1:])


def main(out: str | Path, epochs: int = 20, cpu: bool = False) -> list[float]:
    """Train a small model, save it by the main process, and return the losses."""
    set_seed(0)
    accelerator = Accelerator(cpu=cpu)
    cfg = skipless.ModelConfig(block="sas-p", n_layer=2, d_model=64, n_head=2, vocab_size=256, max_seq_len=64)
    module = WithLoss(skipless.CausalLM(cfg))
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    rows = DataLoader(Rows(__file__), batch_size=8, shuffle=True)
    module, optimizer, rows = accelerator.prepare(module, optimizer, rows)
    losses = []
    for _ in range(epochs):
        for batch in rows:
            loss = module(batch)
            optimizer.zero_grad()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
    if accelerator.is_main_process:
        accelerator.unwrap_model(module).model.save(out)
    return losses


if __name__ == "__main__":
    found = main(sys.argv[1] if len(sys.argv) > 1 else "saved")
    print(f"loss {found[0]:.2f} → {found[-1]:.2f}")
