"""Five steps of each of TRL's trainers on an exported model: SFT (plain, chunked, packed, DFT, with LoRA), DPO, GRPO.

python benchmarks/trl_steps.py [--block NAME] [--untied]

Needs `pip install trl peft`. Prints the losses; the exit status is 0 only if all of them are finite, SFT learns, and
the ways to compute its loss agree that should. (In TRL 1.16 the default loss is the chunked one, by both its names; the
model's own is what `Trainer` takes.)
"""

import argparse
import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer
from trl import (  # pyrefly: ignore
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    SFTConfig,
    SFTTrainer,
)

import skipless
from skipless import hf  # noqa: F401  (makes the Auto classes know its models)
from skipless.data.tokenizer import train
from skipless.interop.export import export_model

TEXTS = ["def f(x): return x", "the quick brown fox", "def g(y): return y and x"] * 20
PAIRS = {"prompt": ["def ", "the "] * 20, "chosen": ["f(x)", "quick"] * 20, "rejected": ["fox", "g(y)"] * 20}

LEARN = ("SFT", "SFT packing")
"""Whose loss is the cross-entropy of text that is seen again and again."""

ALIKE = ("SFT chunked", "SFT checkpointing", "SFT own loss")
"""Whose losses are those of the first."""


def main() -> int:
    """Train, and print a line for each trainer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block", default="sas-p", help="the model's block (default sas-p)")
    parser.add_argument("--untied", action="store_true", help="with a head of its own")
    options = parser.parse_args()
    fine, found = True, {}
    with tempfile.TemporaryDirectory() as place:
        exported = export(Path(place) / "exported", options.block, not options.untied)
        for name, trainer in trainers(exported, place).items():
            found[name] = losses = losses_of(trainer())
            falls = losses[-1] < losses[0] or name not in LEARN
            fine &= len(losses) == 5 and all(map(math.isfinite, losses)) and falls
            if name in ALIKE:
                pairs = zip(losses, found["SFT"], strict=True)
                fine &= all(math.isclose(one, other, rel_tol=1e-3) for one, other in pairs)
            print(f"{name:<20} {' '.join(f'{loss:8.4f}' for loss in losses)}")
    return 0 if fine else 1


def export(folder: Path, block: str, tied: bool) -> Path:
    """A small model that knows nothing yet."""
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "d_model": 32, "n_head": 4, "vocab_size": 300, "max_seq_len": 128}
    model = skipless.CausalLM(skipless.ModelConfig(block=block, tie_embeddings=tied, **sizes))
    model.tokenizer = train("bpe", lambda: iter(TEXTS), vocab_size=300)
    return export_model(model, "hf", folder)


def trainers(exported: Path, place: str) -> dict[str, Callable[[], Any]]:
    """Name → a trainer with a model of its own."""
    common = {"output_dir": place, "max_steps": 5, "per_device_train_batch_size": 4, "logging_steps": 1}
    common |= {"report_to": [], "use_cpu": True, "bf16": False, "save_strategy": "no", "disable_tqdm": True}
    tokenizer = AutoTokenizer.from_pretrained(exported)
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")

    def made(trainer: type, config: type, rows: dict[str, list[str]], keys: dict[str, Any], **more: Any) -> Any:
        settings = config(**{**common, "learning_rate": 1e-2, **keys})
        model = AutoModelForCausalLM.from_pretrained(exported)
        data = Dataset.from_dict(rows)
        return trainer(model=model, args=settings, train_dataset=data, processing_class=tokenizer, **more)

    def sft(peft: Any = None, **keys: Any) -> Callable[[], Any]:
        keys = {"max_length": 64, **keys}
        return lambda: made(SFTTrainer, SFTConfig, {"text": TEXTS}, keys, peft_config=peft)

    def own_loss() -> Any:
        trainer = sft()()
        trainer.compute_loss = lambda *given, **more: Trainer.compute_loss(trainer, *given, **more)
        return trainer

    def dpo(peft: Any = None) -> Callable[[], Any]:
        return lambda: made(DPOTrainer, DPOConfig, PAIRS, {"max_length": 64}, peft_config=peft)

    def grpo() -> Any:
        keys = {"num_generations": 4, "max_completion_length": 8}
        rows = {"prompt": PAIRS["prompt"]}
        return made(GRPOTrainer, GRPOConfig, rows, keys, reward_funcs=lambda completions, **_: [*map(len, completions)])

    return {
        "SFT": sft(),
        "SFT chunked": sft(loss_type="chunked_nll"),
        "SFT own loss": own_loss,
        "SFT checkpointing": sft(gradient_checkpointing=True),
        "SFT dft": sft(loss_type="dft"),
        "SFT packing": sft(packing=True),
        "SFT LoRA": sft(lora),
        "DPO": dpo(),
        "DPO LoRA": dpo(lora),
        "GRPO": grpo,
    }


def losses_of(trainer: Any) -> list[float]:
    """Train it."""
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


if __name__ == "__main__":
    sys.exit(main())
