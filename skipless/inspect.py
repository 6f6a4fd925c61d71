"""What a configuration costs and whether its signal is healthy, before anything is trained.

Parameters are counted on the meta device. Memory of activations is what autograd really saves, traced with fake tensors
(no arithmetic, no memory). The signal is measured: one forward and one backward pass at initialisation.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from skipless.config import BlockConfig, GainConfig, MapConfig, ModelConfig, ParallelConfig
from skipless.machine import check_memory
from skipless.nn.attention import Attention
from skipless.nn.layers import ReparamLinear, RMSNorm, is_identity
from skipless.nn.model import LOSS_ROWS, CausalLM, MaskedLM
from skipless.nn.positions import LearnedPositions

FLOAT = 4
"""Bytes of a float32."""

SIGNAL_VOCABULARY = 4096
"""The signal inside the blocks does not depend on the vocabulary, so a large one is not built for it."""


@dataclass(frozen=True)
class Layer:
    """The signal behind one block, at initialisation."""

    layer: int
    activation: float
    """Root mean square of the block's output."""
    cosine: float
    """Mean cosine similarity between two tokens of a sequence; 1 is rank collapse."""
    gradient: float
    """Root mean square of the loss's gradient at the block's output, relative to the last block's."""
    weight_gradient: float
    """Norm of the loss's gradient over all weights of the block."""


@dataclass(frozen=True)
class Inspection:
    """Everything `skipless inspect` shows of one configuration."""

    name: str
    drawing: str
    removed: list[str]
    parameters: dict[str, int]
    flops_per_token: dict[str, float]
    training_memory: dict[str, int]
    decoding_memory: dict[str, int]
    signal: list[Layer] = field(default_factory=list)
    plans: list["Plan"] = field(default_factory=list)
    """For many devices: with whole models, and with shares of one."""

    @property
    def total_parameters(self) -> int:
        """All trainable parameters, tied ones once."""
        return sum(self.parameters.values())

    def as_dict(self, device_memory: int | None = None) -> dict[str, Any]:
        """For JSON, with null for what is not a finite number; with the memory of a device, whether plans fit."""
        signal = [{k: v if math.isfinite(v) else None for k, v in asdict(layer).items()} for layer in self.signal]
        plans = [one.as_dict(device_memory) for one in self.plans]
        return {**asdict(self), "total_parameters": self.total_parameters, "signal": signal, "plans": plans}


def inspect(
    cfg: ModelConfig,
    name: str = "block",
    *,
    causal: bool = True,
    batch_size: int = 8,
    context: int = 1024,
    signal: bool = True,
    seed: int = 0,
    devices: int = 1,
    micro_batch: int | None = None,
) -> Inspection:
    """Inspect a configuration; memory for training at `batch_size` sequences and for decoding at `context` tokens.

    With `devices`, also what each of them needs, `micro_batch` sequences at a time, and sends.
    """
    kinds = [ParallelConfig(kind="ddp"), ParallelConfig(kind="fsdp")] if devices > 1 else []
    sizes = {"batch_size": batch_size, "micro_batch": micro_batch}
    return Inspection(
        name=name,
        drawing=draw(cfg.block),
        removed=removed(cfg.block),
        parameters=count_parameters(cfg),
        flops_per_token=flops_per_token(cfg),
        training_memory=training_memory(cfg, batch_size, causal=causal),
        decoding_memory=decoding_memory(cfg, context),
        signal=measure_signal(cfg, causal=causal, seed=seed) if signal else [],
        plans=[plan(cfg, kind, devices, causal=causal, **sizes) for kind in kinds],
    )


# ------------------------------------------------------------------------- parameters


def count_parameters(cfg: ModelConfig) -> dict[str, int]:
    """Trainable parameters by part, from the model itself."""
    model = _on_meta(cfg)
    counts = dict.fromkeys(["embedding", "positions", "query, key", "value, projection", "MLP", "norms", "gains"], 0)
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            part = _part(path, module, name)
            counts[part] = counts.get(part, 0) + parameter.numel()
    return counts


def _on_meta(cfg: ModelConfig) -> CausalLM:
    """The model without its memory."""
    with torch.device("meta"):
        return CausalLM(cfg)


def _part(path: str, module: nn.Module, name: str) -> str:
    if isinstance(module, RMSNorm | nn.LayerNorm):
        return "norms"
    if name in getattr(module, "initial_gains", {}):
        return "gains"
    if isinstance(module, LearnedPositions):
        return "positions"
    places = {
        "query": "query, key",
        "key": "query, key",
        "value": "value, projection",
        "projection": "value, projection",
    }
    for step in path.split("."):
        if step in places:
            return places[step]
        if step == "mlp":
            return "MLP"
    return path.split(".")[0]


# ------------------------------------------------------------------------------ FLOPs


def flops_per_token(cfg: ModelConfig, length: int | None = None, *, head_share: float = 1.0) -> dict[str, float]:
    """Floating-point operations of the matrix products for one token in a sequence of `length`, or `max_seq_len`.

    The head is computed at a share of the tokens: in masked training at the masked ones.

    Two for each weight of a matrix, and 4·T·d a layer for scores and mixing, over all T keys as a fused kernel without
    causal skipping counts them. Training is three times the forward pass: the backward makes two products of each one.
    """
    model = _on_meta(cfg.replace(tie_embeddings=True))
    matrices = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    reparameterised = [module for module in model.modules() if isinstance(module, ReparamLinear)]
    matrices += sum(m.width**2 for m in reparameterised if m.w_init is not None or m.delta is not None)
    head = cfg.vocab_size * cfg.d_model
    mixing = (
        4 * (length or cfg.max_seq_len) * cfg.d_model * sum(isinstance(module, Attention) for module in model.modules())
    )
    forward = 2 * (matrices + head_share * head) + mixing
    return {"forward": float(forward), "training": 3.0 * forward}


# ----------------------------------------------------------------------------- memory


def training_memory(
    cfg: ModelConfig, batch_size: int, *, causal: bool = True, length: int | None = None
) -> dict[str, int]:
    """Bytes for a float32 step with AdamW: weights, gradients, both moments, activations, a chunk of logits.

    Sequences have `length` tokens, or `max_seq_len`.
    """
    length = length or cfg.max_seq_len
    parameters = sum(count_parameters(cfg).values())
    fixed = sum(buffer.numel() for buffer in _on_meta(cfg).buffers())
    # the first layer may differ from the others, so the slope is taken between two and three layers
    two, three = (_saved_bytes(cfg.replace(n_layer=n), (batch_size, length), causal=causal) for n in (2, 3))
    activations = max(two + (cfg.n_layer - 2) * (three - two), 0)
    rows = min(LOSS_ROWS, batch_size * length)
    parts = {
        "weights": FLOAT * (parameters + fixed),
        "gradients": FLOAT * parameters,
        "optimiser": 2 * FLOAT * parameters,
        "activations": activations,
        "logits": 2 * FLOAT * rows * cfg.vocab_size,
    }
    return {**parts, "total": sum(parts.values())}


def _saved_bytes(cfg: ModelConfig, shape: tuple[int, int], *, causal: bool) -> int:
    """Bytes that autograd keeps between the forward and the backward pass, weights not counted."""
    with FakeTensorMode():
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


# ------------------------------------------------------------------------ many devices


@dataclass(frozen=True)
class Plan:
    """What each of many devices needs for a training, and what it sends in a step."""

    kind: str
    devices: int
    memory: dict[str, int]
    """Bytes by part, with their `total`."""
    communication: dict[str, int]
    """Bytes that each device sends in a step (and receives), with their `total`."""
    arithmetic: dict[str, str]
    """How the parts came about."""

    def as_dict(self, device_memory: int | None = None) -> dict[str, Any]:
        """For JSON; with the memory of a device, whether it is enough."""
        fits = {} if device_memory is None else {"fits": self.memory["total"] <= device_memory}
        return {**asdict(self), **fits}


def plan(
    cfg: ModelConfig,
    parallel: ParallelConfig,
    devices: int,
    *,
    batch_size: int,
    micro_batch: int | None = None,
    causal: bool = True,
    length: int | None = None,
    block_bytes: int = FLOAT,
) -> Plan:
    """Memory and communication of a float32 training with AdamW on `devices`, of `batch_size` sequences together.

    A device has `micro_batch` sequences in memory at a time, at most its part of the batch. `block_bytes` is the size
    of a number of a gathered block: 2 under bfloat16. The bytes sent are those of ring algorithms: (W−1)/W of a tensor
    that is gathered or scattered, twice that of one that is added up everywhere.
    """
    own = -(-batch_size // devices)
    micro = min(micro_batch or own, own)
    passes = -(-own // micro)
    one = training_memory(cfg, micro, causal=causal, length=length)
    if devices == 1:
        return Plan("one", 1, one, {"total": 0}, {})
    sizes = _Sizes.of(cfg, devices // parallel.replicas)
    how = _plan_ddp if parallel.kind == "ddp" else _plan_fsdp
    memory, communication, arithmetic = how(sizes, parallel, devices, passes, one, block_bytes)
    memory |= {"activations": one["activations"], "logits": one["logits"]}
    arithmetic["activations"] = f"what autograd saves of {micro} of {own} sequences"
    memory["total"], communication["total"] = sum(memory.values()), sum(communication.values())
    return Plan(parallel.kind, devices, memory, communication, arithmetic)


@dataclass(frozen=True)
class _Sizes:
    """Numbers in the parameters of the root and of the blocks, and in the shares of them that one device has."""

    root: int
    blocks: list[int]
    root_share: int
    block_shares: list[int]
    fixed: int
    shards: int

    @classmethod
    def of(cls, cfg: ModelConfig, shards: int) -> "_Sizes":
        model = _on_meta(cfg)
        inside = {id(p) for block in model.blocks for p in block.parameters()}
        root = [p for p in model.parameters() if id(p) not in inside]

        def share(parameters: Iterable[Tensor]) -> int:
            return sum(-(-p.shape[0] // shards) * (p.numel() // p.shape[0]) for p in parameters)

        return cls(
            root=sum(p.numel() for p in root),
            blocks=[sum(p.numel() for p in block.parameters()) for block in model.blocks],
            root_share=share(root),
            block_shares=[share(block.parameters()) for block in model.blocks],
            fixed=sum(buffer.numel() for buffer in model.buffers()),
            shards=shards,
        )

    @property
    def all(self) -> int:
        """Parameters."""
        return self.root + sum(self.blocks)

    @property
    def fixed_text(self) -> str:
        """What is whole on every device and not trained, as a term of the arithmetic."""
        return f" + {FLOAT} B × {self.fixed:,} fixed" if self.fixed else ""

    @property
    def share(self) -> int:
        """Parameters of one device."""
        return self.root_share + sum(self.block_shares)


Parts = tuple[dict[str, int], dict[str, int], dict[str, str]]


def _plan_ddp(
    sizes: _Sizes, parallel: ParallelConfig, devices: int, passes: int, one: dict[str, int], block_bytes: int
) -> Parts:
    width = 2 if parallel.reduce == "bf16" else FLOAT
    memory = {part: one[part] for part in ("weights", "gradients", "optimiser")}
    added = 2 * (devices - 1) * width * sizes.all // devices
    arithmetic = {
        "weights": f"{FLOAT} B × {sizes.all:,} parameters" + sizes.fixed_text,
        "gradients": f"{FLOAT} B × {sizes.all:,}",
        "optimiser": f"2 × {FLOAT} B × {sizes.all:,}",
        "gradients added up": f"2 × {devices - 1}/{devices} × {width} B × {sizes.all:,}, once a step",
    }
    return memory, {"gradients added up": added}, arithmetic


def _plan_fsdp(
    sizes: _Sizes, parallel: ParallelConfig, devices: int, passes: int, one: dict[str, int], block_bytes: int
) -> Parts:
    shards, copies = sizes.shards, parallel.replicas
    width = 2 if parallel.reduce == "bf16" else FLOAT
    kept_whole = passes > 1 and not parallel.shard_accumulated
    largest = max(sizes.blocks)
    # the block at hand and the next; or all, which in the backward pass go one by one as shares of gradients come
    there = 2 * largest
    if not parallel.reshard:
        there = max(there, sum(sizes.blocks) - sum(sizes.block_shares))
    memory = {
        "weights": FLOAT * (sizes.share + sizes.fixed),
        "gradients": FLOAT * sizes.share + (FLOAT * sizes.all if kept_whole else 0),
        "optimiser": 2 * FLOAT * sizes.share,
        "gathered": FLOAT * sizes.root + block_bytes * there,
        "gradients on their way": 0 if kept_whole else FLOAT * (sizes.root + largest),
    }
    turns = passes * (2 if parallel.reshard else 1)
    reductions = passes if parallel.shard_accumulated else 1
    gathered = (shards - 1) * (passes * FLOAT * sizes.root_share + turns * block_bytes * sum(sizes.block_shares))
    communication = {
        "weights gathered": gathered,
        "gradients scattered": reductions * (shards - 1) * width * sizes.share,
        "gradients of copies": reductions * 2 * (copies - 1) * width * sizes.share // copies,
    }
    arithmetic = {
        "weights": f"{FLOAT} B × {sizes.share:,} of {sizes.all:,} parameters" + sizes.fixed_text,
        "gradients": f"{FLOAT} B × {sizes.share:,}" + (f" + {FLOAT} B × {sizes.all:,}, whole" if kept_whole else ""),
        "optimiser": f"2 × {FLOAT} B × {sizes.share:,}",
        "gathered": f"{FLOAT} B × {sizes.root:,} of embedding and head + {block_bytes} B × {there:,} of blocks",
        "gradients on their way": "" if kept_whole else f"{FLOAT} B × ({sizes.root:,} + {largest:,})",
        "weights gathered": f"{shards - 1} × ({passes} × {FLOAT} B × {sizes.root_share:,} of embedding and head + "
        f"{turns} × {block_bytes} B × {sum(sizes.block_shares):,} of blocks)",
        "gradients scattered": f"{reductions} × {shards - 1} × {width} B × {sizes.share:,}",
        "gradients of copies": f"{reductions} × 2 × {copies - 1}/{copies} × {width} B × {sizes.share:,}",
    }
    return memory, communication, arithmetic


def decoding_memory(cfg: ModelConfig, context: int) -> dict[str, int]:
    """Bytes for float32 decoding of one sequence: weights, and a cache of keys and values for `context` tokens."""
    weights = FLOAT * sum(tensor.numel() for tensor in _on_meta(cfg).state_dict().values())
    cache = FLOAT * 2 * cfg.d_model * cfg.n_layer * context if cfg.block.beta_sa else 0
    return {"weights": weights, "cache": cache, "total": weights + cache}


# ----------------------------------------------------------------------------- signal


def measure_signal(cfg: ModelConfig, *, causal: bool = True, batch_size: int = 2, seed: int = 0) -> list[Layer]:
    """One forward and one backward pass on random tokens and labels, at initialisation, layer by layer."""
    generator = torch.Generator().manual_seed(seed)
    cfg = cfg.replace(vocab_size=min(cfg.vocab_size, SIGNAL_VOCABULARY), dropout=0.0)
    weights = 2 * FLOAT * sum(count_parameters(cfg).values())
    check_memory(weights, torch.device("cpu"), "measuring the signal (leave it out with --no-signal)")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = (CausalLM if causal else MaskedLM)(cfg)
    ids, labels = torch.randint(cfg.vocab_size, (2, batch_size, min(cfg.max_seq_len, 128)), generator=generator)
    outputs: list[Tensor] = []

    def keep(_module: nn.Module, _args: tuple[Any, ...], output: Tensor) -> None:
        output.retain_grad()
        outputs.append(output)

    for block in model.blocks:
        block.register_forward_hook(keep)
    model.loss(ids, labels).backward()
    last = _rms(outputs[-1].grad)
    return [
        Layer(
            layer=number + 1,
            activation=_rms(output),
            cosine=mean_cosine(output.detach()),
            gradient=_rms(output.grad) / last if last else 0.0,
            weight_gradient=_norm(parameter.grad for parameter in block.parameters()),
        )
        for number, (block, output) in enumerate(zip(model.blocks, outputs, strict=True))
    ]


def mean_cosine(x: Tensor) -> float:
    """Mean cosine similarity over all pairs of different tokens of a sequence, (B, T, d)."""
    unit = torch.nn.functional.normalize(x.double(), dim=-1)
    length = x.shape[1]
    if length < 2:
        return math.nan
    pairs = unit.sum(1).square().sum(-1) - unit.square().sum((1, 2))  # (B,)
    return (pairs / (length * (length - 1))).mean().item()


def _rms(x: Tensor | None) -> float:
    return 0.0 if x is None else x.detach().double().square().mean().sqrt().item()


def _norm(grads: Iterable[Tensor | None]) -> float:
    return sum(float(grad.double().square().sum()) for grad in grads if grad is not None) ** 0.5


# ---------------------------------------------------------------------------- drawing


def draw(block: BlockConfig) -> str:
    """The block as a flow drawing, equation 1 or 7 with the parts that are there."""
    return _draw_sequential(block) if block.layout == "sequential" else _draw_parallel(block)


def _norm_name(block: BlockConfig) -> list[str]:
    names = {"rmsnorm": "RMSNorm", "rms-plus-eps": "RMSNorm", "layernorm": "LayerNorm"}
    return [names[block.norm]] if block.norm != "none" else []


def _attention_name(block: BlockConfig) -> str:
    matrix = "A"
    if block.mixing != "softmax":
        identity, centring = (
            ("αI + " if block.alpha else ""),
            (" − γC" if block.mixing == "shaped" and block.gamma else ""),
        )
        matrix = f"({identity}βA{centring})"
    return f"MHA[ {matrix} X{_map_name(block.value, 'W^V')}{_map_name(block.projection, 'W^P')} ]"


def _map_name(part: MapConfig, name: str) -> str:
    if is_identity(part):
        return ""
    return f" {name}" if part.kind == "dense" else f" (αW₀+βΔ{name})"


def _mlp_name(block: BlockConfig) -> str:
    name = {"plain": "MLP", "glu": "GLU"}[block.mlp]
    return f"{name}[ {block.activation} ]"


def _gain_name(gain: GainConfig | None, symbol: str) -> list[str]:
    """`·β` for a gain that does something: trainable, or fixed at another value than 1."""
    if gain is None or (gain.init == 1 and not gain.trainable):
        return []
    return [f"·{symbol}" if gain.trainable else f"·{'depth' if gain.init == 'depth' else f'{gain.init:g}'}"]


def _draw_sequential(block: BlockConfig) -> str:
    line, below = " x ─", "    "
    parts = (
        (block.alpha_sa, block.beta_sa, "SA", _attention_name(block)),
        (block.alpha_ff, block.beta_ff, "FF", _mlp_name(block)),
    )
    for alpha, beta, symbol, branch in parts:
        if beta is None:
            continue
        before = _norm_name(block) if block.norm_position == "pre" else []
        after = _norm_name(block) if block.norm_position == "post" else []
        chain = " ─ ".join([*before, branch, *_gain_name(beta, f"β_{symbol}")])
        if alpha is None:
            line, below = f"{line}── {chain} ──", below + " " * (len(chain) + 6)
        else:
            skip = "".join(_gain_name(alpha, f"α_{symbol}")).center(len(chain) + 5, "─")
            line, below = f"{line}┬─ {chain} ─(+)─", f"{below}└{skip}┘  "
        if after:
            line, below = f"{line} {after[0]} ─", below + " " * (len(after[0]) + 3)
    return f"{line} out\n{below}".rstrip()


def _draw_parallel(block: BlockConfig) -> str:
    top = " ─ ".join([_attention_name(block), *_gain_name(block.beta_sa, "β_SA")]) if block.beta_sa else ""
    bottom = " ─ ".join([_mlp_name(block), *_gain_name(block.beta_ff, "β_FF")]) if block.beta_ff else ""
    width = max(len(top), len(bottom))
    norm = "".join(f" {name} ─" for name in _norm_name(block)) or "─"
    start = f" x ─{'┬' if block.alpha_comb else '─'}─{norm}"
    pad = " " * len(start)
    above, beside = (f" {text} ".ljust(width + 2, "─") for text in (top, bottom))
    if top and bottom:
        lines = [f"{pad}┌─{above}─┐", f"{start}┴─{beside}(+)─ out"]
    else:
        lines = [f"{start}──{above if top else beside}(+)─ out"]
    if block.alpha_comb:
        skip = "".join(_gain_name(block.alpha_comb, "α_comb")).center(len(start) + width, "─")
        lines.append(f"    └{skip}┘")
    return "\n".join(lines)


def removed(block: BlockConfig) -> list[str]:
    """What the block does without, of what Pre-LN has."""
    absent = []
    if block.layout == "sequential":
        absent += ["attention skip"] if block.alpha_sa is None else []
        absent += ["MLP skip"] if block.alpha_ff is None else []
    else:
        absent += ["sequential sub-blocks", "second norm"] if block.norm != "none" else ["sequential sub-blocks"]
        absent += ["one skip"] if block.alpha_comb else ["both skips"]
    kept_first = " (but in layer 1)" if block.first_value and not is_identity(block.first_value) else ""
    absent += [f"W^V{kept_first}"] if is_identity(block.value) else []
    absent += ["W^P"] if is_identity(block.projection) else []
    absent += ["norms"] if block.norm == "none" else []
    absent += ["attention"] if block.beta_sa is None else []
    absent += ["MLP"] if block.beta_ff is None else []
    return absent
