"""One row times a matrix in ONNX Runtime, by bits, block size and zero points: time on one core, and the error.

    python benchmarks/low_bit_rows.py

Times are of the core, not of the clock (`time.thread_time`), so that what else the machine does counts little; the
least of some rounds in which the cases take turns. Matrices are those of a `sas-p` of width 768 and a head of 20,000
words. Errors are of a Gaussian matrix, in units of its size.
"""

import json
import time
from collections.abc import Callable

import numpy as np
import onnxruntime
import torch

from skipless.interop.onnx_bits import pack, relative_error
from skipless.interop.onnx_options import OnnxOptions
from skipless.interop.onnx_parts import Parts
from skipless.terminal.tables import show_table

SHAPES = [(4608, 768), (768, 3072)] * 3 + [(20_000, 768)]
ROUNDS = 15


def products(options: OnnxOptions, *, prepacked: bool = True) -> Callable[[], float]:
    """One row times each matrix; the seconds of a turn."""
    parts = Parts(options)
    random = torch.Generator().manual_seed(0)
    inputs = {f"x{number}": np.ones((1, width), np.float32) for number, (_, width) in enumerate(SHAPES)}
    for number, (rows, width) in enumerate(SHAPES):
        x = parts.graph.input(f"x{number}", "float32", [1, width])
        made = parts.product(x, torch.randn(rows, width, generator=random) * 0.02)
        parts.graph.output(made, "float32", [1, rows])
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = 1
    settings.add_session_config_entry("session.disable_prepacking", "0" if prepacked else "1")
    content = parts.graph.model().SerializeToString()
    session = onnxruntime.InferenceSession(content, settings, providers=["CPUExecutionProvider"])

    def run() -> float:
        start = time.thread_time()
        session.run(None, inputs)
        return time.thread_time() - start

    return run


def main() -> None:
    """Measure and show."""
    cases = {"32": products(OnnxOptions()), "32, not prepacked": products(OnnxOptions(), prepacked=False)}
    errors: dict[str, float] = {}
    weight = torch.randn(2304, 768, generator=torch.Generator().manual_seed(0)) * 0.02
    for bits in (8, 4):
        for block in (32, 64, 128):
            for symmetric in (True, False):
                name = f"{bits}, blocks of {block}, {'scales alone' if symmetric else 'zero points'}"
                options = OnnxOptions(bits=bits, block_size=block, symmetric=symmetric)  # pyrefly: ignore
                cases[name] = products(options)
                errors[name] = relative_error(weight, pack(weight, bits, block, symmetric=symmetric))
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(ROUNDS):
        for name, case in cases.items():
            times[name].append(case())
    least = {name: 1e3 * min(seconds) for name, seconds in times.items()}
    lines = [[name, f"{ms:.2f}", f"{errors[name]:.2%}" if name in errors else ""] for name, ms in least.items()]
    show_table("One row, one core", ["bits", "ms", "error"], lines)
    print(json.dumps({"milliseconds": least, "errors": errors}))


if __name__ == "__main__":
    main()
