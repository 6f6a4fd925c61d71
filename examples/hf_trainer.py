"""A skipless model in the Trainer of `transformers`: bytes of a Python file in, a folder for from_pretrained out.

pip install -c constraints.txt '.[hf]'
python examples/hf_trainer.py trained
"""

import inspect
import sys
from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments

from skipless.interop.hf import SkiplessConfig, SkiplessForCausalLM


def windows(length: int = 64) -> list[dict[str, torch.Tensor]]:
    """Pieces of a source file, a byte a token; the model shifts the labels itself."""
    data = torch.frombuffer(bytearray(inspect.getsource(inspect).encode()), dtype=torch.uint8).long()
    rows = data[: len(data) // length * length].view(-1, length)
    return [{"input_ids": row, "labels": row} for row in rows]


def main(out: str | Path, steps: int = 20) -> list[float]:
    """Train, save, and return the losses."""
    config = SkiplessConfig(block="sas-p", n_layer=2, d_model=64, n_head=4, vocab_size=256, max_seq_len=64)
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(SkiplessForCausalLM(config), arguments, train_dataset=windows())
    trainer.train()
    trainer.save_model(str(out))
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


if __name__ == "__main__":
    losses = main(sys.argv[1] if len(sys.argv) > 1 else "trained")
    print(f"loss {losses[0]:.2f} → {losses[-1]:.2f}")
