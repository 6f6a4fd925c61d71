"""What a configuration costs: parameters, FLOPs, memory.

Parameters are counted on the meta device. Memory of activations is what autograd really saves, traced with fake tensors
(no arithmetic, no memory).
"""

from collections.abc import Callable, Iterable
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from skipless.analysis.own_costs import own_flops
from skipless.config.model import ModelConfig
from skipless.config.parts import parts_in
from skipless.errors import UserError
from skipless.nn.attention import Attention
from skipless.nn.layers import ReparamLinear, RMSNorm
from skipless.nn.model import LOSS_ROWS, CausalLM, MaskedLM
from skipless.nn.own_parts import is_own

FLOAT = 4
"""Bytes of a float32."""


def count_parameters(cfg: ModelConfig) -> dict[str, int]:
    """Trainable parameters by part, from the model itself."""
    own = any(parts_in(cfg))  # a part of a plugin may be registered anew under its name
    return dict((_count_parameters.__wrapped__ if own else _count_parameters)(cfg))


@lru_cache(maxsize=1024)
def _count_parameters(cfg: ModelConfig) -> dict[str, int]:
    model = on_meta(cfg)
    counts = dict.fromkeys(["embedding", "positions", "query, key", "value, projection", "MLP", "norms", "gains"], 0)
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            part = _part(path, module, name)
            counts[part] = counts.get(part, 0) + parameter.numel()
    return counts


def on_meta(cfg: ModelConfig) -> CausalLM:
    """The model without its memory."""
    with torch.device("meta"):
        return CausalLM(cfg)


def _part(path: str, module: nn.Module, name: str) -> str:
    if isinstance(module, RMSNorm | nn.LayerNorm):
        return "norms"
    if name in getattr(module, "initial_gains", {}):
        return "gains"
    return next((PLACES[step] for step in path.split(".") if step in PLACES), path.split(".")[0])


PLACES = {
    "query": "query, key",
    "key": "query, key",
    "value": "value, projection",
    "projection": "value, projection",
    "mixing": "mixing matrix",
    "mlp": "MLP",
    **dict.fromkeys(("norm", "norm_sa", "post_norm_sa", "norm_ff", "post_norm_ff", "embedding_norm"), "norms"),
    **dict.fromkeys(("query_norm", "key_norm"), "norms"),
}
"""Where in a model a parameter lies, and what it is counted as."""


def flops_per_token(cfg: ModelConfig, length: int | None = None, *, head_share: float = 1.0) -> dict[str, float]:
    """Floating-point operations of the matrix products for one token in a sequence of `length`, or `max_seq_len`.

    The head is computed at a share of the tokens: in masked training at the masked ones.

    Two for each weight of a matrix, and 4·T·d a layer for scores and mixing, over all T keys as a fused kernel without
    causal skipping counts them. Training is three times the forward pass: the backward makes two products of each one.
    Of a part of one's own the products are traced, unless it has a method `flops_per_token(length)`.
    """
    model, length = on_meta(cfg.replace(tie_embeddings=True)), length or cfg.max_seq_len
    own = [module for module in model.modules() if is_own(module)]
    inside = {part for module in own for part in module.modules()}
    ours = [module for module in model.modules() if module not in inside]
    matrices = sum(module.weight.numel() for module in ours if isinstance(module, nn.Linear))
    reparameterised = [module for module in ours if isinstance(module, ReparamLinear)]
    matrices += sum(m.width**2 for m in reparameterised if m.w_init is not None or m.delta is not None)
    head = cfg.vocab_size * cfg.d_model
    mixing = 4 * length * cfg.d_model
    attentions = [module for module in ours if isinstance(module, Attention) and not is_own(module.mixing)]
    forward = 2 * (matrices + head_share * head) + mixing * len(attentions)
    forward += sum(own_flops(module, cfg, length) for module in own)
    return {"forward": float(forward), "training": 3.0 * forward}


def check_addressable(cfg: ModelConfig, batch_size: int, length: int) -> None:
    """A UserError where activations would have more bytes than any machine can number."""
    widest = max(cfg.ff_width, cfg.vocab_size, cfg.n_head * length)
    if batch_size * length * widest * FLOAT >= 2**62:
        sizes = f"{batch_size:.3g} sequences of {length:.3g} tokens"
        raise UserError(f"{sizes} at width {cfg.d_model:,} are more than any machine can hold")


def training_memory(
    cfg: ModelConfig,
    batch_size: int,
    *,
    causal: bool = True,
    length: int | None = None,
    recompute: bool = False,
    average: bool = False,
) -> dict[str, int]:
    """Bytes for a float32 step with AdamW: weights, gradients, both moments, activations, a chunk of logits.

    Sequences have `length` tokens, or `max_seq_len`. With `recompute` the activations are each block's input and, while
    it runs again, all of one block's. With `average` the average of the weights is counted too.
    """
    length = length or cfg.max_seq_len
    check_addressable(cfg, batch_size, length)
    parameters = sum(count_parameters(cfg).values())
    fixed = sum(buffer.numel() for buffer in on_meta(cfg).buffers())
    # the first layer may differ from the others, so the slope is taken between two and three layers,
    # which is traced once for a shape, unless a part is somebody's own: its code may be another the next time
    traced = _saved_bytes.__wrapped__ if parts_in(cfg) else _saved_bytes
    two, three = (traced(cfg.replace(n_layer=n), (batch_size, length), causal=causal) for n in (2, 3))
    activations = max(two + (cfg.n_layer - 2) * (three - two), 0)
    if recompute:
        inputs = cfg.n_layer * batch_size * length * cfg.d_model * FLOAT
        activations = min(max(two - 2 * (three - two), 0) + (three - two) + inputs, activations)
    rows = min(LOSS_ROWS, batch_size * length)
    parts = {
        "weights": FLOAT * (parameters + fixed),
        "gradients": FLOAT * parameters,
        "optimiser": 2 * FLOAT * parameters,
        "activations": activations,
        "logits": 2 * FLOAT * rows * cfg.vocab_size,
    }
    if average:
        parts["average"] = FLOAT * parameters
    return {**parts, "total": sum(parts.values())}


@lru_cache(maxsize=256)
def _saved_bytes(cfg: ModelConfig, shape: tuple[int, int], *, causal: bool) -> int:
    """Bytes that autograd keeps between the forward and the backward pass, weights not counted."""
    # a training has gradients and counts in float32, whatever is so where this is asked for
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False), FakeTensorMode():
        model = (CausalLM if causal else MaskedLM)(cfg)
        ids = torch.zeros(shape, dtype=torch.long)
        return saved_bytes(lambda: model.hidden(ids), model.parameters())


def saved_bytes(run: Callable[[], Tensor], weights: Iterable[Tensor]) -> int:
    """Bytes of the storages that autograd saves while `run` runs, each once, those of the weights left out."""
    own = {weight.untyped_storage()._cdata for weight in weights}
    saved: dict[int, int] = {}

    def remember(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        kept = run()  # the graph, and with it every saved storage, lives until the count is done
    total = sum(saved.values())
    del kept
    return total


def decoding_memory(cfg: ModelConfig, context: int) -> dict[str, int]:
    """Bytes for float32 decoding of one sequence: weights, and a cache of keys and values for `context` tokens."""
    weights = FLOAT * sum(tensor.numel() for tensor in on_meta(cfg).state_dict().values())
    cache = FLOAT * 2 * cfg.d_model * cfg.n_layer * context if cfg.block.beta_sa else 0
    return {"weights": weights, "cache": cache, "total": weights + cache}
