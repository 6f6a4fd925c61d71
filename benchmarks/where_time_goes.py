"""Where the time of a training step goes, and how far its products are from the machine's speed.

    python benchmarks/where_time_goes.py [BLOCK] [--depth 6]

Groups the profiler's own times of every operation. A table, then one JSON line.
"""

import argparse
import json
from collections import defaultdict

import torch
from torch.profiler import ProfilerActivity, profile

from skipless.analysis.costs import flops_per_token
from skipless.analysis.speed import matmul_speed
from skipless.distributed.devices import pick_device
from skipless.tasks.bench import Shape, make_step
from skipless.terminal.tables import show_table

GROUPS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::addmm_"),
    "fused attention": ("aten::_scaled_dot_product_flash_attention",),
    "loss over the vocabulary, but its products": ("aten::_log_softmax", "aten::exp", "aten::logsumexp", "aten::nll"),
    "AdamW": ("aten::_fused_adamw", "aten::_foreach", "Optimizer.step"),
    "ReLU": ("aten::relu", "aten::threshold", "aten::clamp_min"),
    "our own functions, but their operations": ("_RMSNorm", "_ShapedCausal", "_FanOut", "_ReluLinear", "_TwoTerms"),
    "sums, products, copies of elements": (
        "aten::mul",
        "aten::add",
        "aten::div",
        "aten::sub",
        "aten::sum",
        "aten::copy_",
    ),
}


def group(name: str) -> str:
    """The group of an operation."""
    return next((key for key, starts in GROUPS.items() if name.startswith(starts)), "everything else")


def main() -> None:
    """Profile a few steps and show them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("block", nargs="?", default="sas-p")
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--vocab-size", type=int, default=50_000)
    parser.add_argument("--steps", type=int, default=3)
    given = parser.parse_args()
    device, shape = pick_device("cpu"), Shape(depth=given.depth)
    step = make_step(shape, given.block, device, given.vocab_size)
    step()
    speeds = [matmul_speed(device, torch.float32)]
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(given.steps):
            step()
    seconds: dict[str, float] = defaultdict(float)
    for event in profiler.key_averages():
        seconds[group(event.key)] += event.self_cpu_time_total / 1e6 / given.steps
    total = sum(seconds.values())
    cfg = shape.config(given.block).replace(vocab_size=given.vocab_size)
    flops = flops_per_token(cfg)["training"] * shape.batch * shape.length
    share = flops / (seconds["matrix products"] + seconds["fused attention"]) / speeds[0]
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    lines = [[name, f"{1e3 * value:,.1f}", f"{value / total:.1%}"] for name, value in ordered]
    show_table(f"A step of {given.block}, {given.depth} layers, 8×128 tokens", ["", "ms", "share"], lines)
    print(f"products and attention run at {share:.0%} of the machine's {speeds[0] / 1e9:.0f} GFLOP/s")
    print(json.dumps({"block": given.block, "seconds": seconds, "products_of_peak": share, "gflops": speeds[0] / 1e9}))


if __name__ == "__main__":
    main()
