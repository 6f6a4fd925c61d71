"""Recipes: functions that return a `RunConfig`, derived from one another."""

from collections.abc import Callable

from skipless.config import DataConfig, ModelConfig, RunConfig, TrainConfig, parse_block
from skipless.errors import unknown


def laptop(block: str = "sas-p") -> RunConfig:
    """Real Python code on two cores in minutes: 12 layers of width 128 on the standard library's source."""
    return RunConfig(
        model=ModelConfig(
            block=parse_block(block), n_layer=12, d_model=128, n_head=4, vocab_size=4096, max_seq_len=128
        ),
        data=DataConfig(source="python-stdlib", vocab_size=4096, seq_len=128),
        train=TrainConfig(steps=2000, batch_size=8, lr=2e-3),
    )


def demo(block: str = "sas-p") -> RunConfig:
    """A shorter and shallower `laptop`, for two runs within about five minutes."""
    changes = {"model.n_layer": 6, "train.steps": 1000, "train.sample_every": 500, "train.eval_every": 100}
    return laptop(block).override(changes)


def smoke(block: str = "sas-p") -> RunConfig:
    """Seconds: shows that everything runs, learns next to nothing."""
    changes = {"model.n_layer": 2, "model.d_model": 32, "train.steps": 20, "train.eval_every": 10, "train.eval_rows": 8}
    return laptop(block).override({**changes, "data.max_bytes": 2_000_000, "data.vocab_size": 512})


def codeparrot(block: str = "sas-p") -> RunConfig:
    """The paper's decoder on CodeParrot: 18 layers of width 768, 43,000 steps of 128 sequences of 128 tokens."""
    return RunConfig(
        model=ModelConfig(
            block=parse_block(block), n_layer=18, d_model=768, n_head=12, d_ff=3072, vocab_size=50_000, max_seq_len=128
        ),
        data=DataConfig(
            source="hf:huggingface-course/codeparrot-ds-train#content",
            valid_source="hf:huggingface-course/codeparrot-ds-valid#content",
            tokenizer="huggingface-course/code-search-net-tokenizer",
            vocab_size=50_000,
            packing="chunks",
            seq_len=128,
        ),
        train=TrainConfig(
            steps=43_000,
            batch_size=128,
            micro_batch=32,
            lr=3e-4 if block.startswith("v-skipinit") else 1e-3,
            betas=(0.9, 0.999),
            eps=1e-8,
            weight_decay=0.1,
            clip=1.0,
            schedule="linear",
            warmup=0.05,
            eval_every=1000,
            eval_rows=4096,
            sample_every=5000,
            save_every=1000,
            log_every=50,
        ),
    )


def codeparrot_long(block: str = "sas-p") -> RunConfig:
    """`codeparrot` for 120,000 steps, 2B tokens (figure 8)."""
    return codeparrot(block).override({"train.steps": 120_000})


RECIPES: dict[str, Callable[[str], RunConfig]] = {
    "laptop": laptop,
    "demo": demo,
    "smoke": smoke,
    "codeparrot": codeparrot,
    "codeparrot-long": codeparrot_long,
}


def recipe(name: str, block: str) -> RunConfig:
    """The recipe of a name, for a block."""
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES)
    return RECIPES[name](block)
