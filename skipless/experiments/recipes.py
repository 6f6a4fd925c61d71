"""Recipes: functions that return a `RunConfig`, derived from one another."""

import math
from collections.abc import Callable
from typing import Any

from skipless.config import BlockConfig, DataConfig, ModelConfig, RunConfig, TrainConfig, parse_block
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


BERT_PEAK_LR = {"sas": 3e-3, "sas-p": 3e-3, "sas-p-nonorm": 2e-3}
"""The paper's peak learning rates where it tuned them; crammed BERT's own 1e-3 for the blocks with all their parts."""


def bert_block(spec: str, n_layer: int) -> BlockConfig:
    """A block with the encoder's parts: GLU with GELU, LayerNorm of eps 1e-12; in the simplified ones β_FF is 0.05.

    0.05 is the paper's value at 16 layers; at other depths it goes with 1/√L, as the paper's O(1/√L) has it.
    """
    name = spec.partition(":")[0]
    parts: dict[str, Any] = {"mlp": "glu", "activation": "gelu", "norm_eps": 1e-12}
    if not name.endswith("nonorm"):
        parts["norm"] = "layernorm"
    if name.startswith("sas"):
        parts["beta_ff"] = 0.05 * math.sqrt(16 / n_layer)
    return parse_block(spec, parts)


def crammed_bert(block: str = "sas-p") -> RunConfig:
    """The paper's encoder: 16 layers of width 768, masked language modelling on the Pile for 24 hours of one GPU."""
    return RunConfig(
        task="masked",
        model=ModelConfig(
            block=bert_block(block, 16),
            n_layer=16,
            d_model=768,
            n_head=12,
            d_ff=3072,
            vocab_size=32_768,
            max_seq_len=128,
            positions="scaled-sinusoidal",
            embedding_norm=True,
            outer_norm="layernorm",
        ),
        data=DataConfig(
            source="hf:monology/pile-uncopyrighted#text",
            max_bytes=24_000_000_000,  # 5B tokens, more than 24 hours of the paper's GPU could read
            valid_fraction=0.001,
            tokenizer="wordpiece",
            lowercase=True,
            vocab_size=32_768,
            seq_len=128,
        ),
        train=TrainConfig(
            steps=None,
            minutes=24 * 60,
            batch_size=8192,
            micro_batch=64,
            batch_ramp=0.6,
            lr=BERT_PEAK_LR.get(block.partition(":")[0], 1e-3),
            betas=(0.9, 0.98),
            eps=1e-12,
            weight_decay=0.1,
            clip=0.5,
            schedule="triangle",
            mask_share=0.25,
            eval_every=200,
            eval_rows=4096,
            sample_every=0,
            save_every=200,
        ),
    )


def crammed_bert_laptop(block: str = "sas-p") -> RunConfig:
    """`crammed-bert` for twenty minutes of one core: 4 layers of width 128, 8,192 words, some ten million tokens."""
    changes = {
        "model.block": bert_block(block, 4).model_dump(),
        "model.n_layer": 4,
        "model.d_model": 128,
        "model.n_head": 4,
        "model.d_ff": 512,
        "model.vocab_size": 8192,
        "data.source": "hf:wikimedia/wikipedia:20231101.en#text",
        "data.max_bytes": 80_000_000,
        "data.valid_fraction": 0.02,
        "data.vocab_size": 8192,
        "train.minutes": 20,
        "train.batch_size": 32,
        "train.micro_batch": 16,
        "train.eval_rows": 256,
    }
    return crammed_bert(block).override(changes)


RECIPES: dict[str, Callable[[str], RunConfig]] = {
    "laptop": laptop,
    "demo": demo,
    "smoke": smoke,
    "codeparrot": codeparrot,
    "codeparrot-long": codeparrot_long,
    "crammed-bert": crammed_bert,
    "crammed-bert-laptop": crammed_bert_laptop,
}


def recipe(name: str, block: str) -> RunConfig:
    """The recipe of a name, for a block."""
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES)
    return RECIPES[name](block)
