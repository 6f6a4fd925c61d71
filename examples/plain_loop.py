"""A plain PyTorch loop: the model is a module, its loss a method, and nothing else of this package is needed.

python examples/plain_loop.py saved
"""

import sys
from pathlib import Path

import torch

import skipless


def main(out: str | Path, steps: int = 200) -> list[float]:
    """Train a small model on the bytes of a file, write a little, save it, and return the losses."""
    torch.manual_seed(0)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    model = skipless.CausalLM(
        skipless.ModelConfig(block="sas-p", n_layer=2, d_model=64, n_head=2, vocab_size=256, max_seq_len=64)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(text) - 65, (8, 1))
        rows = text[starts + torch.arange(65)]  # (8, 65): inputs and, one further, targets
        loss = model.loss(rows[:, :-1], rows[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    prompt = torch.tensor([list(b"import ")])
    print(bytes(model.generate(prompt, 60, temperature=0.5)[0].tolist()).decode(errors="replace"))
    model.save(out)  # `skipless.load(out)` opens it
    return losses


if __name__ == "__main__":
    found = main(sys.argv[1] if len(sys.argv) > 1 else "saved")
    print(f"loss {found[0]:.2f} → {found[-1]:.2f}")
