"""Every figure that the README and docs/notes/performance.md give for speed and memory, with the floor it has to reach.

    python benchmarks/speed.py            # about twenty minutes on two cores
    python benchmarks/speed.py train      # one part: train, long, explicit, step, decode, caches, memory

A table, then one JSON line. Exit status 1 if a figure is below its floor.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from skipless.analysis.speed import matmul_speed
from skipless.config.model import ModelConfig
from skipless.distributed.devices import pick_device
from skipless.nn import CausalLM
from skipless.storage.provenance import machine, versions
from skipless.tasks.bench import (
    EXPLICIT,
    HF,
    Row,
    Shape,
    bench_caches,
    bench_memory,
    bench_step,
    bench_train,
)
from skipless.tasks.bench_decoding import bench_decode
from skipless.terminal.tables import show_table


@dataclass(frozen=True)
class Figure:
    """A measured figure against its floor (or ceiling)."""

    case: str
    against: str
    value: float
    spread: tuple[float, float] | None
    bound: float | None
    at_most: bool = False

    @property
    def reached(self) -> bool:
        """Whether it is on the right side of its bound, if it has one."""
        if self.bound is None:
            return True
        return self.value <= self.bound if self.at_most else self.value >= self.bound


def ratio(rows: list[Row], case: str, name: str, reference: str, floor: float | None) -> Figure:
    """How many times as fast `name` is as `reference`."""
    value, low, high = next(row for row in rows if row.name == name).speedup[reference]
    return Figure(f"{case}: {name}", reference, value, (low, high), floor)


def train(device: str) -> list[Figure]:
    """Stacks of blocks at 128 tokens."""
    floors = {"parallel": None, "sas": 1.10, "sas-p": 1.15, "sas-p-nonorm": 1.18}
    rows = bench_train(Shape(), 121, device, blocks=["pre-ln", *floors])
    both = [ratio(rows, "T=128", name, other, floor) for name, floor in floors.items() for other in (HF, "pre-ln")]
    return [ratio(rows, "T=128", "pre-ln", HF, 1.0), *both]


def long(device: str) -> list[Figure]:
    """The same at 1,024 tokens."""
    rows = bench_train(Shape(length=1024), 61, device, blocks=["sas-p"])
    return [ratio(rows, "T=1,024", "sas-p", HF, 1.12)]


def explicit(device: str) -> list[Figure]:
    """Against the explicit form, at 1,024 and at 4,096 tokens."""
    found = []
    for shape, rounds, floor in ((Shape(length=1024), 7, 2.4), (Shape(length=4096, tokens=4096, depth=1), 3, 5.0)):
        rows = bench_train(shape, rounds, device, explicit=True, blocks=["sas-p"])
        found.append(ratio(rows, f"T={shape.length:,}", "sas-p", "sas-p" + EXPLICIT, floor))
    return found


def step(device: str) -> list[Figure]:
    """A whole training step of 18 layers with a vocabulary of 50,000."""
    rows = bench_step(Shape(depth=18), 3, device)
    memory = {row.name: row.peak_bytes or 0 for row in rows}

    def peak(name: str, other: str, ceiling: float | None) -> Figure:
        share = memory[name] / memory[other]
        return Figure(f"training step: {name}, peak memory", other, share, None, ceiling, at_most=True)

    return [
        ratio(rows, "training step", "sas-p", HF, 1.13),
        ratio(rows, "training step", "sas-p", "pre-ln", None),
        ratio(rows, "training step", "pre-ln", HF, None),
        peak("sas-p", HF, 0.75),
        peak("sas-p", "pre-ln", None),
        peak("pre-ln", HF, None),
    ]


def decode(device: str) -> list[Figure]:
    """128 new tokens after 512, 18 layers, one sequence."""
    rows = bench_decode(Shape(length=512, depth=18), 9, device)
    hugging_face = [ratio(rows, "decoding", "sas-p (kx)", f"{HF} ({cache})", 1.3) for cache in ("dynamic", "static")]
    return [*hugging_face, ratio(rows, "decoding", "sas-p (kx)", "pre-ln (kv)", 1.15)]


def caches(device: str) -> list[Figure]:
    """Bytes of the caches, and one more token for 16 sequences of 1,024."""
    found = []
    for mode, bound in (("x", 0.5), ("kx", 1.0)):
        model, plain = (CausalLM(ModelConfig(block=name, n_layer=2, vocab_size=64)) for name in ("sas-p", "pre-ln"))
        share = model.new_cache(mode=mode).bytes_per_token / plain.new_cache(mode="kv").bytes_per_token
        found.append(Figure(f"bytes of a token, mode {mode}", "kv", share, None, bound, at_most=True))
    rows = bench_caches(Shape(length=1024, depth=18), 9, device, batch=16)
    case = "16 sequences of 1,024"
    # `auto` picks the faster mode; that of inputs alone is for those who lack the memory
    return [
        *found,
        ratio(rows, case, "sas-p (kx)", "pre-ln (kv)", 1.0),
        ratio(rows, case, "sas-p (x)", "sas-p (kx)", None),
    ]


def memory(device: str) -> list[Figure]:
    """Growth with the length of the sequence."""
    found = bench_memory(Shape(length=8192), 1, device)
    slope = found["memory_slope_from_1024"]
    return [Figure("memory of a sas-p layer, T 1,024 to 8,192", "log-log slope", slope, None, 1.1, at_most=True)]


PARTS: dict[str, Callable[[str], list[Figure]]] = {
    part.__name__: part for part in (train, long, explicit, step, decode, caches, memory)
}


def main() -> int:
    """Measure, show, and say whether every figure is where it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="what to measure; everything if not given")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    speed = matmul_speed(pick_device(given.device), torch.float32)
    found: list[Figure] = []
    for name in given.parts or PARTS:
        print(f"{name}: {PARTS[name].__doc__}", file=sys.stderr, flush=True)
        part = PARTS[name](given.device)
        print(
            *(f"  {figure.case} / {figure.against}: {figure.value:.3f}" for figure in part), sep="\n", file=sys.stderr
        )
        found += part
    lines = [
        [
            figure.case,
            figure.against,
            f"{figure.value:.3f}" + (f" ({figure.spread[0]:.2f}–{figure.spread[1]:.2f})" if figure.spread else ""),
            "" if figure.bound is None else f"{'≤' if figure.at_most else '≥'} {figure.bound:g}",
            "" if figure.bound is None else "yes" if figure.reached else "NO",
        ]
        for figure in found
    ]
    title = f"Speed and memory, products at {speed / 1e9:.0f} GFLOP/s"
    show_table(title, ["case", "against", "measured", "bound", "reached"], lines)
    about = {"machine": machine(), "versions": versions(), "peak_gflops": round(speed / 1e9, 1)}
    print(json.dumps({**about, "figures": [{**vars(figure), "reached": figure.reached} for figure in found]}))
    return 0 if all(figure.reached for figure in found) else 1


if __name__ == "__main__":
    sys.exit(main())
