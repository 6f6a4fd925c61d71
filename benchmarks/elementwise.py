"""The element-wise parts of a block, forward and backward: as one reads them, compiled, and with gradients by hand.

    python benchmarks/elementwise.py

On a stream of 8×128 tokens of width 768. A table, then one JSON line.
"""

import json
import statistics
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from skipless.distributed.devices import compiler_problem
from skipless.nn import Mask
from skipless.nn.kernels import ops
from skipless.tasks.bench import interleave
from skipless.terminal.tables import show_table

BATCH, LENGTH, HEADS, WIDTH, ROUNDS = 8, 128, 12, 64, 101
CAUSAL = Mask(causal=True)


def read_norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm as PyTorch has it."""
    return F.rms_norm(x, weight.shape, weight, 1e-6)


def read_tail(v: Tensor, attended: Tensor, other: Tensor, *gains: Tensor) -> Tensor:
    """β_SA·(α·V + β·A V − γ·C V) + β_FF·MLP, the end of a `sas-p` block."""
    alpha, beta, gamma, beta_sa, beta_ff = gains
    return beta_sa * (alpha * v + beta * attended - gamma * CAUSAL.mean(v)) + beta_ff * other


def hand_tail(v: Tensor, attended: Tensor, other: Tensor, *gains: Tensor) -> Tensor:
    """The same, as the kernel of a parallel block does it."""
    alpha, beta, gamma, beta_sa, beta_ff = gains
    return ops.shaped_causal_sum(v, attended, alpha, beta, gamma, beta_sa.view(1), other, beta_ff.view(1))


def stream(count: int) -> list[Tensor]:
    """Arrays of heads, laid out as the model's stream is."""
    shape = (BATCH, LENGTH, HEADS, WIDTH)
    return [torch.randn(shape).transpose(1, 2).requires_grad_() for _ in range(count)]


def both_ways(function: Callable[..., Tensor], inputs: list[Tensor]) -> Callable[[], None]:
    """Forward and backward."""
    grad = torch.randn_like(inputs[0])
    return lambda: torch.autograd.backward(function(*inputs), grad, inputs=inputs)


def main() -> None:
    """Measure and show."""
    if problem := compiler_problem():
        sys.exit(f"nothing to compile with: {problem}")
    gains = [torch.ones(1, 1, 1, requires_grad=True) for _ in range(5)]
    norm = [
        torch.randn(BATCH, LENGTH, HEADS * WIDTH, requires_grad=True),
        torch.ones(HEADS * WIDTH, requires_grad=True),
    ]
    parts = {
        "RMSNorm": (read_norm, lambda x, weight: ops.rms_norm(x, weight, 1e-6), norm),
        "tail of sas-p": (read_tail, hand_tail, [*stream(3), *gains]),
    }
    cases = {}
    for name, (read, hand, inputs) in parts.items():
        forms = {"as one reads it": read, "compiled": torch.compile(read), "by hand": hand}
        cases |= {f"{name}, {form}": both_ways(function, inputs) for form, function in forms.items()}
    times = interleave(cases, ROUNDS, torch.device("cpu"))
    rows = [(name, 1e3 * statistics.median(own), 1e3 * min(own)) for name, own in times.items()]
    lines = [[name, f"{median:.2f}", f"{least:.2f}"] for name, median, least in rows]
    show_table("Forward and backward", ["part", "median ms", "least ms"], lines)
    print(json.dumps({name: {"median_ms": median, "least_ms": least} for name, median, least in rows}))


if __name__ == "__main__":
    main()
