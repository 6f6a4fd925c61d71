"""LoRA on a skipless model: low-rank updates of W^Q, W^K and the MLP; everything else stays as it was.

pip install -c constraints.txt '.[hf]' peft
python examples/lora.py exported adapted
"""

import inspect
import sys
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from skipless import hf  # noqa: F401  (makes the Auto classes know its models)


def main(exported: str | Path, out: str | Path, steps: int = 20) -> list[float]:
    """Adapt an exported model to a source file, save the adapter, and return the losses."""
    model = AutoModelForCausalLM.from_pretrained(exported)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=["query", "key", "up", "down"], task_type="CAUSAL_LM")
    adapted: PeftModel = get_peft_model(model, lora)
    length = min(64, model.config.max_seq_len)
    ids = torch.tensor(tokenizer(inspect.getsource(inspect))["input_ids"])
    rows = ids[: len(ids) // length * length].view(-1, length)
    optimizer = torch.optim.AdamW((p for p in adapted.parameters() if p.requires_grad), lr=1e-2)
    losses = []
    for step in range(steps):
        batch = rows[step * 8 % (len(rows) - 8) :][:8]
        loss = adapted(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    adapted.save_pretrained(out)
    return losses


if __name__ == "__main__":
    found = main(*(sys.argv[1:3] if len(sys.argv) > 2 else ("exported", "adapted")))
    print(f"loss {found[0]:.2f} → {found[-1]:.2f}")
