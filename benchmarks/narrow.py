"""Training steps of narrow models, where passes over elements cost as much as products: `sas-p` against our `pre-ln`.

    python benchmarks/narrow.py               # some minutes on two cores that have nothing else to do
    python benchmarks/narrow.py --rounds 10

Whole steps (forward, loss, backward, AdamW) of the recipes `study` and `laptop`, with one thread and with two,
interleaved. Prints a table and one JSON line; exit status 1 if `sas-p` is slower than `pre-ln` anywhere.
"""

import argparse
import json
import sys

import torch

from skipless.distributed.devices import pick_device
from skipless.storage.provenance import machine, versions
from skipless.tasks.bench import Shape, compare, interleave, own_step
from skipless.terminal.tables import show_table
from skipless.training.allocator import keep_freed_memory

SHAPES = {
    "study": (Shape(length=64, tokens=1024, depth=12, d_model=64, n_head=4), 2048),
    "laptop": (Shape(length=128, tokens=1024, depth=12, d_model=128, n_head=4), 4096),
}
"""Recipe → shape, vocabulary."""

FLOOR = 1.0
"""How many times as fast `sas-p` has to be."""


def main() -> None:
    """Measure, show, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    given = parser.parse_args()
    keep_freed_memory()
    torch.manual_seed(0)
    device, found = pick_device("cpu"), {}
    for recipe, (shape, vocabulary) in SHAPES.items():
        cases = {block: own_step(shape, block, device, vocabulary) for block in ("pre-ln", "sas-p")}
        for threads in (1, 2):
            torch.set_num_threads(threads)
            pre_ln, sas_p = compare(interleave(cases, given.rounds, device), ("pre-ln",), {}, 1.0)
            found[f"{recipe}, {threads} thread{'s' * (threads > 1)}"] = {
                "pre-ln": pre_ln.milliseconds,
                "sas-p": sas_p.milliseconds,
                "times as fast": sas_p.speedup["pre-ln"],
            }
    rows = [
        [name, f"{of['pre-ln']:.1f}", f"{of['sas-p']:.1f}", "{:.3f} [{:.3f}, {:.3f}]".format(*of["times as fast"])]
        for name, of in found.items()
    ]
    show_table("Training steps of narrow models.", ["case", "pre-ln (ms)", "sas-p (ms)", "times as fast"], rows)
    print(json.dumps({"benchmark": "narrow", "cases": found, "machine": machine(), "versions": versions()}))
    sys.exit(any(of["times as fast"][0] < FLOOR for of in found.values()))


if __name__ == "__main__":
    main()
