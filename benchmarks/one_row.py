"""What decoding waits for: a product of one row with each matrix of a `sas-p` layer, by how the matrix lies in memory.

    python benchmarks/one_row.py

Contiguous rows (as training has them), contiguous columns, the better of the two as slabs (as `model.fold()` has it),
and 8-bit weights with bfloat16 inputs (PyTorch's own, private, `_weight_int8pack_mm`); beside them a sum over all
elements, which does little else than read. Gigabytes of float32 weights a second, so that all compare; then one JSON
line.
"""

import json
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from skipless.distributed.devices import check_cpu_bf16
from skipless.nn.kernels.slabs import slab_product
from skipless.tasks.bench import interleave
from skipless.terminal.tables import show_table

MATRICES = {"queries, keys, MLP in (4608×768)": (4608, 768), "MLP out (768×3072)": (768, 3072), "head": (50_000, 768)}
COPIES = 64 << 20
"""Parameters of each kind in all: more than any cache holds."""


def cases(rows: int, columns: int) -> dict[str, Callable[[], object]]:
    """The ways."""
    count = max(1, COPIES // (rows * columns))
    x = torch.randn(1, columns)
    plain = [torch.randn(rows, columns) for _ in range(count)]
    turned = [weight.mT.contiguous().mT for weight in plain]
    eight = [torch.randint(-127, 127, (rows, columns), dtype=torch.int8) for _ in range(count)]
    half, scales = x.bfloat16(), torch.rand(rows).bfloat16()

    def product(weights: list[Tensor], by: Callable[[Tensor, Tensor], Tensor] = F.linear) -> Callable[[], object]:
        return lambda: [by(x, weight) for weight in weights]

    return {
        "rows": product(plain),
        "columns": product(turned),
        "slabs": product(turned if rows > columns else plain, slab_product),
        "8 bits": lambda: [torch._weight_int8pack_mm(half, weight, scales) for weight in eight],
        "sum": lambda: [weight.sum() for weight in plain],
    }


@torch.inference_mode()
def main() -> None:
    """Measure and show."""
    check_cpu_bf16()  # on some machines such a product ends the process
    found: dict[str, dict[str, float]] = {}
    for name, (rows, columns) in MATRICES.items():
        times = interleave(cases(rows, columns), 15, torch.device("cpu"))
        size = 4 * rows * columns * max(1, COPIES // (rows * columns))
        found[name] = {way: size / statistics.median(seconds) / 1e9 for way, seconds in times.items()}
    lines = [[name, *(f"{speed:.1f}" for speed in ways.values())] for name, ways in found.items()]
    head = ["GB/s of float32 weights", "contiguous rows", "contiguous columns", "slabs", "8 bits", "sum"]
    show_table("One row times a matrix", head, lines)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
