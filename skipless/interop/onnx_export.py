"""A causal model as an ONNX file with a cache: written, run, held against PyTorch, and only then handed over."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

import skipless.runtime
from skipless.config.run import RunConfig
from skipless.errors import UserError
from skipless.interop.export_folder import SOURCE_MARK, write_config, write_tokenizer
from skipless.interop.onnx import ONNX_TOLERANCE
from skipless.interop.onnx_decoder import decoder_graph
from skipless.interop.onnx_options import OnnxOptions
from skipless.nn.cache import pick_mode
from skipless.nn.model import CausalLM
from skipless.runtime.model import OnnxCausalLM

INSIDE = 1 << 24
"""Bytes of weights up to which they lie inside the ONNX file. Beside it they are mapped into memory, not read."""

TOLERANCES = {32: ONNX_TOLERANCE, 8: 0.1, 4: 0.6}
"""Largest mean difference from PyTorch's logits by bits (of the weights or of the cache), in units of their own spread:
a graph that is wrong is 1 away. At 32 bits it is the largest of all differences, in units of the largest logit or 1."""


def to_onnx_decoder(
    model: CausalLM, folder: Path, options: OnnxOptions, run: RunConfig | None = None
) -> dict[str, float]:
    """Write the model and what runs it; how far its logits are from PyTorch's."""
    import onnx

    about = options.model_dump(mode="json") | {"cache": pick_mode(model.config, options.cache)}
    if options.bits != 32:
        about["block_size"] = options.block
    write_config(model, folder, {"onnx": about} | ({} if run is None else {"run": run.model_dump(mode="json")}))
    write_tokenizer(model.tokenizer, folder)
    graph = decoder_graph(model, options)
    outside: dict[str, Any] = {"save_as_external_data": True, "location": "model.onnx.data"}
    onnx.save(graph, folder / "model.onnx", **(outside if graph.ByteSize() > INSIDE else {}))
    source = Path(skipless.runtime.__path__[0]) / "decoder.py"
    text = SOURCE_MARK + "runtime/decoder.py\n" + source.read_text(encoding="utf-8")
    (folder / "decoder.py").write_text(text, encoding="utf-8")
    return check(model, OnnxCausalLM(folder, model.config), min(options.bits, options.cache_bits))


def check(model: CausalLM, found: OnnxCausalLM, bits: int) -> dict[str, float]:
    """Hold a graph against its model: a batch of ragged prompts, then token by token."""
    worst = max(difference(model, found, bits, seed) for seed in range(2))
    if not worst <= TOLERANCES[bits]:
        raise UserError(f"ONNX Runtime computes other logits than PyTorch, {worst:.2g} apart: nothing was exported")
    return {"apart": worst}


@torch.no_grad()
def difference(model: CausalLM, found: OnnxCausalLM, bits: int, seed: int = 0) -> float:
    """How far the logits of ragged prompts and of tokens after them are from PyTorch's; see `TOLERANCES`."""
    cfg, random = model.config, torch.Generator().manual_seed(seed)
    length = min(24, cfg.max_seq_len)
    ids = torch.randint(cfg.vocab_size, (3, length), generator=random)
    expected = model(ids)  # (3, T, V)
    lengths = torch.tensor([max(1, length // 2), max(1, length // 3), max(1, length // 2 - 1)])
    first = int(lengths.max())
    mask = torch.arange(first) < lengths[:, None]
    cache, rows = found.new_cache(3, max_len=length), torch.arange(3)
    pairs = [(found.next_logits(ids[:, :first] * mask, cache, mask), expected[rows, lengths - 1])]
    for _ in range(min(6, length - first)):
        logits = found.next_logits(ids[rows, lengths][:, None], cache)
        pairs.append((logits, expected[rows, lengths]))
        lengths = lengths + 1
    pairs.append((found(ids[:1]), expected[:1]))
    if bits == 32:
        return max(float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in pairs)
    a, b = (torch.cat([pair[n].flatten(0, -2) for pair in pairs]) for n in range(2))
    spread = (b - b.mean(-1, keepdim=True)).square().mean().sqrt()
    return float((a - b).square().mean().sqrt() / spread.clamp(min=float(np.finfo(np.float32).tiny)))
