"""The MLP's products with a wide result, whole and some columns at a time (`skipless.nn.kernels.ops.wide_product`).

    python benchmarks/wide.py

Into the MLP, the gradient of its hidden layer, and that of its second matrix. GFLOP/s, then one JSON line.
"""

import json
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from skipless.tasks.bench import interleave
from skipless.terminal.tables import show_table

PIECES = (768, 1024, 1536)


def product(a: Tensor, b: Tensor, piece: int) -> Callable[[], object]:
    """a b into the same array each time, `piece` columns at a time."""
    out, columns = a.new_empty(len(a), b.shape[1]), b.shape[1]
    heres = [slice(start, start + piece) for start in range(0, columns, piece)]
    return lambda: [torch.mm(a, b[:, here], out=out[:, here]) for here in heres]


@torch.inference_mode()
def main() -> None:
    """Measure and show."""
    found: dict[str, dict[str, float]] = {}
    for tokens in (256, 512, 1024, 2048, 4096):
        for width in (768, 1024):
            wide = 4 * width
            x, hidden = torch.randn(tokens, width), torch.randn(tokens, wide)
            up, down = torch.randn(wide, width), torch.randn(width, wide)
            for name, a, b in (("in", x, up.mT), ("gradient of hidden", x, down), ("of W2", x.mT, hidden)):
                ways = {"whole": product(a, b, wide), **{str(piece): product(a, b, piece) for piece in PIECES}}
                times = interleave(ways, 15, torch.device("cpu"))
                work = 2 * tokens * width * wide / 1e9
                speeds = {way: work / statistics.median(seconds) for way, seconds in times.items()}
                found[f"{tokens} tokens, width {width}: {name}"] = speeds
    lines = [[name, *(f"{speed:.0f}" for speed in ways.values())] for name, ways in found.items()]
    head = ["product", "whole", *(f"{piece} columns at a time" for piece in PIECES)]
    show_table("Wide products, GFLOP/s", head, lines)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
