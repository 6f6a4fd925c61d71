"""The paper's own settings (appendix D), for a GPU."""

import math
from typing import Any

from skipless.config.block import TRAINED, BlockConfig, parse_block
from skipless.config.model import ModelConfig
from skipless.config.parts import PartValue, find_part
from skipless.config.run import DataConfig, RunConfig, TrainConfig
from skipless.recipes.variants import VARIANTS, find_block


def narrow(cfg: RunConfig) -> RunConfig:
    """Figure 6: an MLP of width 2d and, in skipless blocks, twice the β_FF: 0.2 at 18 layers, 0.1 at 72."""
    changes: dict[str, Any] = {"model.d_ff": 2 * cfg.model.d_model}
    if is_skipless(cfg.model.block):
        changes["model.block.beta_ff"] = round(0.2 * math.sqrt(18 / cfg.model.n_layer), 4)
    return cfg.override(changes)


def is_ours(kind: str, value: PartValue) -> bool:
    """Whether a part is no plugin's, so that a recipe may choose another."""
    return find_part(kind, value).plugin is None


def is_skipless(block: BlockConfig) -> bool:
    """Whether the attention has no skip around it, so that the MLP's branch is weighted down."""
    return block.alpha_sa is None and block.alpha_comb is None


def codeparrot(block: str = "sas-p") -> RunConfig:
    """The paper's decoder on CodeParrot: 18 layers of width 768, 43,000 steps of 128 sequences of 128 tokens."""
    return RunConfig(
        model=ModelConfig(
            block=find_block(block), n_layer=18, d_model=768, n_head=12, d_ff=3072, vocab_size=50_000, max_seq_len=128
        ),
        data=DataConfig(
            source="corpus:codeparrot",
            valid_source="corpus:codeparrot-valid",
            tokenizer="huggingface-course/code-search-net-tokenizer",
            vocab_size=50_000,
            packing="chunks",
            seq_len=128,
        ),
        train=TrainConfig(
            steps=43_000,
            batch_size=128,
            micro_batch=32,
            lr=1e-3,
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


def codeparrot_shallow(block: str = "sas-p") -> RunConfig:
    """`codeparrot` with an MLP of width 2d (figure 6)."""
    return narrow(codeparrot(block))


def codeparrot_deep(block: str = "sas-p") -> RunConfig:
    """`codeparrot_shallow` with 72 layers (figure 6)."""
    return narrow(codeparrot(block).override({"model.n_layer": 72}))


def codeparrot_authors(block: str = "sas-p") -> RunConfig:
    """`codeparrot` as the authors' released code has it, where that differs from the paper's text.

    Learned positions for 1,024 tokens, biases of queries and keys, RMSNorm as x / (rms + 1e-5), a LayerNorm with a
    bias at the end, a trainable α_FF in SAS. What their script calls Value-SkipInit is shaped attention with dense
    orthogonal V and P. Without norms, their first block keeps a LayerNorm on its input: the normalised embedding here.
    """
    name = "sas-dense-orthogonal" if block == "v-skipinit" else block
    own = find_block(name)
    parts: dict[str, Any] = {"qk_bias": True, "norm_eps": 1e-5, "norm_bias": True}
    if own.norm != "none" and is_ours("norm", own.norm):
        parts["norm"] = "rms-plus-eps"
    if own.layout == "sequential" and is_skipless(own) and own.alpha_ff is not None:
        parts["alpha_ff"] = TRAINED
    return codeparrot(name).override(
        {
            "model.block": own.replace(**parts).model_dump(),
            "model.positions": "learned",
            "model.max_seq_len": 1024,
            "model.outer_norm": "layernorm",
        }
    )


BERT_PEAK_LR = {"sas": 3e-3, "sas-p": 3e-3, "sas-p-nonorm": 2e-3}
"""The paper's peak learning rates where it tuned them; crammed BERT's own 1e-3 for the blocks with all their parts."""


def bert_block(spec: str, n_layer: int) -> BlockConfig:
    """A block with crammed BERT's parts: GLU with GELU, LayerNorm with a bias, eps 1e-12; β_FF 0.05 in simplified ones.

    0.05 is the paper's value at 16 layers; at other depths it goes with 1/√L, as the paper's O(1/√L) has it.
    """
    name, own = spec.partition(":")[0], find_block(spec.partition(":")[0])
    parts: dict[str, Any] = {"norm_eps": 1e-12, "norm_bias": True}
    wanted = {"mlp": "glu", "activation": "gelu", "norm": "none" if name.endswith("nonorm") else "layernorm"}
    parts |= {part: value for part, value in wanted.items() if is_ours(part, getattr(own, part))}
    if name.startswith("sas"):
        parts["beta_ff"] = 0.05 * math.sqrt(16 / n_layer)
    return parse_block(spec, parts) if spec not in VARIANTS else VARIANTS[spec].replace(**parts)


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
            source="corpus:pile",
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
            warmup_from=0.25,
            mask_share=0.25,
            eval_every=200,
            eval_rows=4096,
            sample_every=0,
            save_every=200,
        ),
    )


LANGUINI_PARTS = {"model.positions": "alibi", "train.sample_prompt": "The "}


def languini_activation(cfg: RunConfig) -> dict[str, Any]:
    """GELU, unless the block has one of somebody's own."""
    return {"model.block.activation": "gelu"} if is_ours("activation", cfg.model.block.activation) else {}


def languini(block: str = "sas-p") -> RunConfig:
    """The paper's decoder on books: 12 layers of width 768, ALiBi, GELU, 19,000 steps of 128 sequences of 512 tokens.

    Languini's own books can no longer be had: say where others are with `--corpus books=…`.
    """
    base = codeparrot(block)
    return base.override(
        {
            **LANGUINI_PARTS,
            **languini_activation(base),
            "model.n_layer": 12,
            "model.max_seq_len": 512,
            "model.vocab_size": 16_384,
            "data": DataConfig(source="corpus:books", vocab_size=16_384, seq_len=512).model_dump(),
            "train.steps": 19_000,
            "train.warmup": 500,
            "train.micro_batch": 16,
            "train.lr": 3e-3 if block.startswith("sas") else 1e-3,
        }
    )
