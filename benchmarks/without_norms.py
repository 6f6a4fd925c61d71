"""How far a stack without norms is from overflowing: by how much its input has to grow until an activation does.

    python benchmarks/without_norms.py                      # untrained, at the paper's size
    python benchmarks/without_norms.py runs/A runs/B        # encoders of runs, on held-out text

The input of the first block is multiplied by powers of √2 until the largest activation leaves the range of float16,
and that of float32. A table, then one JSON line.
"""

import argparse
import json
import math
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from skipless.data import prepare
from skipless.data.batches import held_out_batch
from skipless.nn import MaskedLM
from skipless.recipes.laptop import crammed_bert_laptop
from skipless.recipes.paper import crammed_bert
from skipless.runs import find_run, load
from skipless.terminal.tables import show_table

LARGEST = {"float16": torch.finfo(torch.float16).max, "float32": torch.finfo(torch.float32).max}

FACTOR, POWERS = math.sqrt(2), 128
"""Factors up to 2^64 are tried."""

ROWS = 32


@contextmanager
def watched(model: MaskedLM, factor: float) -> Iterator[list[float]]:
    """Multiply what the first block sees; the list receives the largest activation of every module of the blocks."""
    seen: list[float] = []

    def note(_module: nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            seen.append(float(output.abs().max()))

    hooks = [part.register_forward_hook(note) for part in model.blocks.modules()]
    hooks.append(model.blocks[0].register_forward_pre_hook(lambda _, inputs: (inputs[0] * factor, *inputs[1:])))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def largest(model: MaskedLM, ids: Tensor, factor: float) -> float:
    """The largest activation inside the blocks; infinite where one is no number."""
    with watched(model, factor) as seen:
        model.hidden(ids)
    return max((value if math.isfinite(value) else math.inf) for value in seen)


def margins(model: MaskedLM, ids: Tensor) -> dict[str, float]:
    """The largest activation as it is, and the least powers of √2 at which the ranges end."""
    model.eval()
    found = {"largest": largest(model, ids, 1.0)}
    for name, limit in LARGEST.items():
        power = bisect_left(range(POWERS), True, key=lambda n: largest(model, ids, FACTOR**n) > limit)
        found[name] = FACTOR**power if power < POWERS else math.inf
    return found


def untrained() -> Iterator[tuple[str, MaskedLM, Tensor]]:
    """Blocks without norms at the paper's size, and what might help them."""
    gated = crammed_bert("sas-p-nonorm")
    gain = gated.model.block.beta_ff
    assert gain is not None
    beta = gain.at_depth(gated.model.n_layer)
    changes = {
        f"GLU, β_FF {beta:g}": {},
        f"GLU, β_FF {beta / 2:g}": {"model.block.beta_ff": beta / 2},
        f"GLU, β_FF {beta / 4:g}": {"model.block.beta_ff": beta / 4},
        "two matrices, GELU": {"model.block.mlp": "plain"},
        "two matrices, ReLU": {"model.block.mlp": "plain", "model.block.activation": "relu"},
        "with norms": {"model.block.norm": "layernorm"},
    }
    cases = {name: gated.override(change) for name, change in changes.items()}
    cases["GLU, laptop's size"] = crammed_bert_laptop("sas-p-nonorm")
    for name, cfg in cases.items():
        torch.manual_seed(0)
        ids = torch.randint(cfg.model.vocab_size, (2, cfg.data.seq_len))
        yield name, MaskedLM(cfg.model), ids


def trained(folder: Path) -> tuple[str, MaskedLM, Tensor]:
    """The encoder of a run and some of its held-out rows, masked as in training."""
    run = find_run(folder)
    cfg, model = run.config(), load(run.folder)
    assert isinstance(model, MaskedLM)
    corpus = prepare(cfg.data)
    ids, _ = held_out_batch(cfg, corpus, corpus.valid, np.arange(ROWS), 0)
    return run.name, model, torch.from_numpy(ids)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path)
    given = parser.parse_args()
    cases = map(trained, given.runs) if given.runs else untrained()
    found = {name: margins(model, ids) for name, model, ids in cases}
    rows = [[name, *(f"{value:,.3g}" for value in one.values())] for name, one in found.items()]
    heads = ["", "largest activation", "float16 ends at ×", "float32 ends at ×"]
    show_table("How much larger the input of the first block may be", heads, rows)
    print(json.dumps(found).replace("Infinity", "null"))


if __name__ == "__main__":
    main()
