"""Speed and memory against the alternatives: interleaved in one process, as ratios of medians with their spread.

Cases take turns, in one order and then in the other, so that whatever else the machine does falls on all of them. Peak
memory is taken in processes of their own, a case each (`python -m skipless.tasks.bench` is such a process).
"""

import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from skipless.analysis.costs import check_addressable, flops_per_token
from skipless.analysis.speed import matmul_speed, peak_bytes, wait
from skipless.config.model import ModelConfig
from skipless.distributed.devices import pick_device
from skipless.errors import MissingExtra
from skipless.nn import CausalLM, Mask, explicit_form, make_block

BLOCKS = ("pre-ln", "parallel", "sas", "sas-p", "sas-p-nonorm")

HF = "HF GPT-2"

EXPLICIT = " (explicit)"


@dataclass(frozen=True)
class Row:
    """One case of a benchmark."""

    name: str
    milliseconds: float
    """Median."""
    speedup: dict[str, tuple[float, float, float]]
    """Against each reference: ratio of the medians, first and third quartile of the ratio within a round."""
    peak_share: float | None = None
    """Of the machine's speed of matrix products."""
    peak_bytes: int | None = None
    """Memory above what the process held before."""


def interleave(cases: Mapping[str, Callable[[], Any]], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of each case in each round; the first round warms up and does not count."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, case in list(cases.items())[:: 1 if number % 2 else -1]:
            wait(device)
            start = time.perf_counter()
            case()
            wait(device)
            if number:
                times[name].append(time.perf_counter() - start)
    return times


def compare(
    times: Mapping[str, list[float]], references: tuple[str, ...], flops: Mapping[str, float], peak: float
) -> list[Row]:
    """Rows with the speed-up over each reference that is there."""
    rows = []
    for name, own in times.items():
        speedup = {}
        for reference in references:
            if reference in times:
                ratios = [theirs / mine for theirs, mine in zip(times[reference], own, strict=True)]
                quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
                ratio = statistics.median(times[reference]) / statistics.median(own)
                speedup[reference] = (ratio, quartiles[0], quartiles[2])
        median = statistics.median(own)
        share = flops[name] / median / peak if name in flops else None
        rows.append(Row(name, 1e3 * median, speedup, share))
    return rows


@dataclass(frozen=True)
class Shape:
    """What is measured."""

    length: int = 128
    tokens: int = 1024
    depth: int = 2
    d_model: int = 768
    n_head: int = 12

    @property
    def batch(self) -> int:
        """Sequences, so that there are `tokens` tokens."""
        return max(1, self.tokens // self.length)

    def config(self, block: str) -> ModelConfig:
        """The model whose blocks are measured."""
        cfg = ModelConfig(
            block=block.removesuffix(EXPLICIT),  # pyrefly: ignore
            n_layer=self.depth,
            d_model=self.d_model,
            n_head=self.n_head,
            max_seq_len=self.length,
        )
        check_addressable(cfg, self.batch, self.length)
        return cfg


def own_stack(shape: Shape, name: str, device: torch.device) -> Callable[[], None]:
    """Forward and backward of a stack of our blocks; layer 1's W^V is left out, as in all layers but one."""
    cfg = shape.config(name)
    blocks = nn.ModuleList(make_block(cfg, layer=1) for _ in range(shape.depth)).to(device)
    mask = Mask(causal=True)
    x, grad = _inputs(shape, device)

    def run() -> None:
        out = x
        with explicit_form(blocks) if name.endswith(EXPLICIT) else nullcontext():
            for block in blocks:
                out = block(out, mask)
        _backward(out, grad, blocks)

    return run


def hf_stack(shape: Shape, device: torch.device) -> Callable[[], None]:
    """The same of Hugging Face's GPT-2 blocks, with ReLU and no dropout."""
    gpt2 = _transformers().models.gpt2.modeling_gpt2
    blocks = nn.ModuleList(gpt2.GPT2Block(_hf_config(shape, 100), layer_idx=i) for i in range(shape.depth)).to(device)
    x, grad = _inputs(shape, device)

    def run() -> None:
        out = x
        for block in blocks:
            out = block(out)
            out = out[0] if isinstance(out, tuple) else out
        _backward(out, grad, blocks)

    return run


def _inputs(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    x, grad = torch.randn(2, shape.batch, shape.length, shape.d_model, device=device)
    return x.requires_grad_(), grad


def _backward(out: Tensor, grad: Tensor, blocks: nn.Module) -> None:
    out.backward(grad)
    for parameter in blocks.parameters():
        parameter.grad = None


def _transformers() -> Any:
    if find_spec("transformers") is None:
        raise MissingExtra("transformers", "hf", "comparing with Hugging Face's GPT-2")
    import transformers  # pyrefly: ignore

    return transformers


def _hf_config(shape: Shape, vocab_size: int) -> Any:
    return _transformers().GPT2Config(
        n_embd=shape.d_model,
        n_head=shape.n_head,
        n_layer=shape.depth,
        n_positions=max(shape.length, 1),
        vocab_size=vocab_size,
        activation_function="relu",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=None,
        attn_implementation="sdpa",
    )


def bench_train(
    shape: Shape, rounds: int, device: str = "auto", *, explicit: bool = False, blocks: Sequence[str] = BLOCKS
) -> list[Row]:
    """Forward and backward of a stack of blocks: ours, and Hugging Face's GPT-2 if it is installed."""
    place = pick_device(device)
    names = [*blocks, *(["sas-p" + EXPLICIT] if explicit else [])]
    cases = {name: own_stack(shape, name, place) for name in names}
    if find_spec("transformers"):
        cases[HF] = hf_stack(shape, place)
    flops = {name: _stack_flops(shape, name) for name in blocks}
    references = (HF, "pre-ln", *(["sas-p" + EXPLICIT] if explicit else []))
    return compare(interleave(cases, rounds, place), references, flops, matmul_speed(place, torch.float32))


def _stack_flops(shape: Shape, name: str) -> float:
    cfg = shape.config(name)
    head = 6 * cfg.vocab_size * cfg.d_model
    return (flops_per_token(cfg)["training"] - head) * shape.batch * shape.length


def bench_step(shape: Shape, rounds: int, device: str = "auto", vocab_size: int = 50_000) -> list[Row]:
    """A whole training step, embedding to AdamW, of our models and of `GPT2LMHeadModel`, with its peak memory."""
    place = pick_device(device)
    names = ["pre-ln", "sas-p", *([HF] if find_spec("transformers") else [])]
    peaks = {
        name: in_child(case="step", name=name, device=str(place), vocab_size=vocab_size, **asdict(shape))
        for name in names
    }
    cases = {name: make_step(shape, name, place, vocab_size) for name in names}
    flops = {
        name: flops_per_token(shape.config(name).replace(vocab_size=vocab_size))["training"]
        * shape.batch
        * shape.length
        for name in names
        if name != HF
    }
    rows = compare(interleave(cases, rounds, place), (HF, "pre-ln"), flops, matmul_speed(place, torch.float32))
    return [replace(row, peak_bytes=peaks[row.name]) for row in rows]


def make_step(shape: Shape, name: str, device: torch.device, vocab_size: int) -> Callable[[], None]:
    """A training step of one of our models, or of Hugging Face's."""
    return hf_step(shape, device, vocab_size) if name == HF else own_step(shape, name, device, vocab_size)


def own_step(shape: Shape, name: str, device: torch.device, vocab_size: int) -> Callable[[], None]:
    """A step of one of our models."""
    from skipless.config.run import TrainConfig
    from skipless.training.optimizers import make_optimizers

    model = CausalLM(shape.config(name).replace(vocab_size=vocab_size)).to(device)
    optimizers = make_optimizers(model, TrainConfig())
    ids = torch.randint(vocab_size, (shape.batch, shape.length + 1), device=device)

    def run() -> None:
        model.loss(ids[:, :-1], ids[:, 1:]).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return run


def hf_step(shape: Shape, device: torch.device, vocab_size: int) -> Callable[[], None]:
    """A step of Hugging Face's GPT-2."""
    model = _transformers().GPT2LMHeadModel(_hf_config(shape, vocab_size)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    ids = torch.randint(vocab_size, (shape.batch, shape.length), device=device)

    def run() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run


def bench_caches(
    shape: Shape, rounds: int, device: str = "auto", *, batch: int = 16, vocab_size: int = 50_000
) -> list[Row]:
    """One more token for `batch` sequences that are `shape.length` tokens long already, by what the cache remembers."""
    place = pick_device(device)
    ids = torch.randint(vocab_size, (batch, 1), device=place)
    cases: dict[str, Callable[[], Any]] = {}
    for name, modes in (("pre-ln", ["kv"]), ("sas-p", ["kx", "x"])):
        cfg = shape.config(name).replace(vocab_size=vocab_size, max_seq_len=shape.length + 1)
        model = CausalLM(cfg).to(place).fold()
        for mode in modes:
            cases[f"{name} ({mode})"] = next_token(model, ids, mode, shape.length)
    references = ("pre-ln (kv)", "sas-p (kx)")
    return compare(interleave(cases, rounds, place), references, {}, matmul_speed(place, torch.float32))


def next_token(model: CausalLM, ids: Tensor, mode: str, length: int) -> Callable[[], None]:
    """One step of decoding behind `length` tokens; what those are does not matter for the time."""
    cache = model.new_cache(ids.shape[0], mode=mode)
    for layer in cache.layers:
        for tensor in layer.tensors():
            tensor.normal_()

    def run() -> None:
        cache.length = length
        model(ids, cache=cache)

    return run


def bench_memory(shape: Shape, rounds: int, device: str = "auto", block: str = "sas-p") -> dict[str, Any]:
    """Time and peak memory of a training step of blocks, over the sequence length for one layer, and over the depth.

    Lengths are 128, 256, … up to the shape's, depths 1, 2, … up to the shape's. The slopes are of lines through the
    logarithms; that over the length is also taken from 1,024 tokens on, where what does not grow no longer counts.
    """
    place = pick_device(device)
    lengths = [128 * 2**n for n in range(20) if 128 * 2**n <= shape.length] or [shape.length]
    depths = [2**n for n in range(12) if 2**n <= shape.depth]
    batch = replace(shape, length=min(128, shape.length))
    shapes = {
        "length": [replace(shape, length=length, tokens=length, depth=1) for length in lengths],
        "depth": [replace(batch, depth=depth) for depth in depths],
    }
    found: dict[str, Any] = {"block": block}
    for axis, points in shapes.items():
        x = [getattr(point, axis) for point in points]
        times = [interleave({block: own_stack(point, block, place)}, rounds, place)[block] for point in points]
        seconds = [statistics.median(one) for one in times]
        memory = [
            in_child(case="stack", name=block, device=str(place), vocab_size=0, **asdict(point)) for point in points
        ]
        slopes = {"time_slope": slope(x, seconds), "memory_slope": slope(x, memory)}
        found[axis] = {"x": x, "seconds": seconds, "peak_bytes": memory, **slopes}
    long = [n for n, length in enumerate(lengths) if length >= 1024]
    found["memory_slope_from_1024"] = slope(
        [lengths[n] for n in long], [found["length"]["peak_bytes"][n] for n in long]
    )
    return found


def in_child(**case: Any) -> int:
    """Peak memory of a case in a process of its own, above what that held before."""
    command = [sys.executable, "-m", "skipless.tasks.bench", json.dumps(case)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"measuring memory failed: {done.stderr.strip().splitlines()[-1:]}")
    return int(done.stdout.split()[-1])


def _child(case: str, name: str, device: str, vocab_size: int, **shape: int) -> int:
    place, size = torch.device(device), Shape(**shape)

    def steps() -> None:  # the first makes Hugging Face's optimiser state; ours has it from the start
        step = make_step(size, name, place, vocab_size)
        step(), step()

    return peak_bytes(steps if case == "step" else own_stack(size, name, place), place)


def slope(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Of the line through log y over log x; None for fewer than two points."""
    if len(x) < 2:
        return None
    return statistics.linear_regression([math.log(v) for v in x], [math.log(v) for v in y]).slope


def as_dict(rows: list[Row]) -> list[dict[str, Any]]:
    """For JSON."""
    return [asdict(row) for row in rows]


if __name__ == "__main__":
    print(_child(**json.loads(sys.argv[1])))
