"""Weights from elsewhere: a Hugging Face GPT-2 as our `pre-ln`, so that both compute the same.

    model = gpt2(transformers.GPT2LMHeadModel.from_pretrained("gpt2"))

Two implementations that share no line agree on logits and gradients: the tests hold one against the other.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from skipless.config.block import BLOCKS
from skipless.config.model import ModelConfig
from skipless.errors import UserError
from skipless.nn.model import CausalLM

ACTIVATIONS = {
    "gelu_new": "gelu-tanh",
    "gelu_pytorch_tanh": "gelu-tanh",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
"""Names of Hugging Face's non-linearities and ours."""


def gpt2(source: nn.Module) -> CausalLM:
    """A `GPT2LMHeadModel` as a `CausalLM` with copies of its weights, in its type and on its device, in eval mode.

    Dropout is taken over where GPT-2 has one rate for all; its dropout on the attention matrix has no place here.
    """
    cfg = gpt2_config(source.config)
    like = next(source.parameters())
    model = CausalLM(cfg).to(like.device, like.dtype)
    model.load_state_dict(gpt2_tensors(source.state_dict(), cfg))
    return model.eval()


def gpt2_config(config: Any) -> ModelConfig:
    """Our configuration of a `GPT2Config`, or the reason why there is none."""
    if config.activation_function not in ACTIVATIONS:
        raise UserError(f"activation {config.activation_function!r} is not one of {', '.join(ACTIVATIONS)}")
    if config.scale_attn_by_inverse_layer_idx or not config.scale_attn_weights:
        raise UserError("attention scores are scaled by 1/√D here, and by nothing else")
    if config.add_cross_attention:
        raise UserError("a GPT-2 with cross-attention has no counterpart here")
    block = BLOCKS["pre-ln"].replace(
        norm="layernorm",
        norm_eps=config.layer_norm_epsilon,
        bias=True,
        activation=ACTIVATIONS[config.activation_function],
    )
    return ModelConfig(
        block=block,
        n_layer=config.n_layer,
        d_model=config.n_embd,
        n_head=config.n_head,
        d_ff=config.n_inner,
        vocab_size=config.vocab_size,
        max_seq_len=config.n_positions,
        positions="learned",
        tie_embeddings=config.tie_word_embeddings,
        dropout=config.resid_pdrop if config.resid_pdrop == config.embd_pdrop else 0.0,
        init_std=config.initializer_range,
    )


def gpt2_tensors(tensors: Mapping[str, Tensor], cfg: ModelConfig) -> dict[str, Tensor]:
    """GPT-2's tensors by our names; those of a gradient as well as those of a state.

    GPT-2 stores its matrices (in, out), and queries, keys and values as one.
    """
    found = {
        "embedding.weight": tensors["transformer.wte.weight"],
        "positions.weight": tensors["transformer.wpe.weight"],
    }
    for kind in ("weight", "bias"):
        found[f"norm.{kind}"] = tensors[f"transformer.ln_f.{kind}"]
    if not cfg.tie_embeddings:
        found["head.weight"] = tensors["lm_head.weight"]
    for layer in range(cfg.n_layer):
        for name, tensor in _block(tensors, f"transformer.h.{layer}.").items():
            found[f"blocks.{layer}.{name}"] = tensor
    return found


def _block(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    found = {}
    for kind in ("weight", "bias"):
        found[f"norm_sa.{kind}"] = tensors[f"{prefix}ln_1.{kind}"]
        found[f"norm_ff.{kind}"] = tensors[f"{prefix}ln_2.{kind}"]
        both = tensors[f"{prefix}attn.c_attn.{kind}"]  # (d, 3·d) or (3·d,)
        for name, part in zip(("query", "key", "value"), both.chunk(3, dim=-1), strict=True):
            found[f"attention.{name}.{kind}"] = part
        found[f"attention.projection.{kind}"] = tensors[f"{prefix}attn.c_proj.{kind}"]
        found[f"mlp.up.{kind}"] = tensors[f"{prefix}mlp.c_fc.{kind}"]
        found[f"mlp.down.{kind}"] = tensors[f"{prefix}mlp.c_proj.{kind}"]
    return {name: tensor.mT if tensor.ndim == 2 else tensor for name, tensor in found.items()}
