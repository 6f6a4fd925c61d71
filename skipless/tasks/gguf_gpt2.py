"""A GPT-2 with random weights as a GGUF file, for llama.cpp to be measured with."""

from pathlib import Path
from typing import Any

import numpy as np

TYPES = {"f32": ("F32", 0), "q8_0": ("Q8_0", 7), "q4_0": ("Q4_0", 2)}
"""Types of the matrices: the name and the file type that GGUF has for each."""


def write_gpt2(
    path: Path, kind: str, *, n_layer: int, d_model: int, n_head: int, vocab_size: int, max_seq_len: int, seed: int = 0
) -> None:
    """A file that llama.cpp opens. Matrices are of the given type, gains and biases in float32."""
    from gguf import GGMLQuantizationType, GGUFWriter, quants  # pyrefly: ignore

    name, file_type = TYPES[kind]
    quantised = getattr(GGMLQuantizationType, name)
    random = np.random.default_rng(seed)
    writer = GGUFWriter(str(path), "gpt2")
    writer.add_block_count(n_layer)
    writer.add_context_length(max_seq_len)
    writer.add_embedding_length(d_model)
    writer.add_feed_forward_length(4 * d_model)
    writer.add_head_count(n_head)
    writer.add_layer_norm_eps(1e-5)
    writer.add_file_type(file_type)
    _add_tokenizer(writer, vocab_size)

    def matrix(tensor: str, rows: int, columns: int) -> None:
        weight = random.standard_normal((rows, columns), dtype=np.float32) * np.float32(0.02)
        if kind == "f32":
            writer.add_tensor(tensor, weight)
        else:
            writer.add_tensor(tensor, quants.quantize(weight, quantised), raw_dtype=quantised)

    def vector(tensor: str, size: int, value: float = 0.0) -> None:
        writer.add_tensor(tensor, np.full(size, value, np.float32))

    matrix("token_embd.weight", vocab_size, d_model)
    matrix("output.weight", vocab_size, d_model)
    writer.add_tensor("position_embd.weight", np.zeros((max_seq_len, d_model), np.float32))
    maps = {
        "attn_qkv": (3 * d_model, d_model),
        "attn_output": (d_model, d_model),
        "ffn_up": (4 * d_model, d_model),
        "ffn_down": (d_model, 4 * d_model),
    }
    for layer in range(n_layer):
        for norm in ("attn_norm", "ffn_norm"):
            vector(f"blk.{layer}.{norm}.weight", d_model, 1.0)
            vector(f"blk.{layer}.{norm}.bias", d_model)
        for part, (rows, columns) in maps.items():
            matrix(f"blk.{layer}.{part}.weight", rows, columns)
            vector(f"blk.{layer}.{part}.bias", rows)
    vector("output_norm.weight", d_model, 1.0)
    vector("output_norm.bias", d_model)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: Any, vocab_size: int) -> None:
    """Words that nobody reads: llama.cpp does not open a file without them."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"t{number}" for number in range(vocab_size)])
    writer.add_token_types([1] * vocab_size)
    writer.add_token_merges(["t 1"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
