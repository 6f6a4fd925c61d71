"""Two versions of the code against each other: training steps in turns, one process each, as ratios of medians.

    git worktree add ../before COMMIT
    python benchmarks/two_versions.py ../before . --rounds 40

`study`: a whole step of the experiments' decoder. `blocks`: forward and backward of two blocks of width 768.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

WORKER = r"""
import sys, time, torch
try:
    from skipless.training.allocator import keep_freed_memory
    from skipless.tasks.bench import Shape, own_stack, own_step
except ModuleNotFoundError:  # version 0.1.0
    from skipless.allocator import keep_freed_memory
    from skipless.bench import Shape, own_stack, own_step
keep_freed_memory()
torch.manual_seed(0)
case, block = sys.argv[1:]
device = torch.device("cpu")
shapes = {"study": Shape(64, 1024, 12, 64, 4), "blocks": Shape(128, 1024, 2, 768, 12)}
step = own_step(shapes[case], block, device, 2048) if case == "study" else own_stack(shapes[case], block, device)
for _ in range(3):
    step()
print("ready", flush=True)
for line in sys.stdin:
    start = time.perf_counter()
    for _ in range(int(line)):
        step()
    print(time.perf_counter() - start, flush=True)
"""


class Worker:
    """A process with one version of the code."""

    def __init__(self, tree: Path, case: str, block: str) -> None:
        env = {**os.environ, "PYTHONPATH": str(tree.resolve())}
        command = [sys.executable, "-c", WORKER, case, block]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=tree
        )
        assert self.process.stdout is not None
        if self.process.stdout.readline() != "ready\n":
            raise SystemExit(f"{tree} cannot run {case} of {block}")

    def steps(self, count: int) -> float:
        """Seconds of so many steps."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def end(self) -> None:
        """Let it go."""
        self.process.communicate()


def main() -> None:
    """Print the ratio new / old of each case and block."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--blocks", default="pre-ln,sas-p")
    arguments = parser.parse_args()
    found = {}
    for case, count in (("study", 3), ("blocks", 1)):
        for block in arguments.blocks.split(","):
            workers = [Worker(tree, case, block) for tree in (arguments.old, arguments.new)]
            times: list[list[float]] = [[], []]
            for number in range(arguments.rounds):
                for which in (0, 1) if number % 2 else (1, 0):
                    times[which].append(workers[which].steps(count) / count)
            for worker in workers:
                worker.end()
            old, new = (statistics.median(one) for one in times)
            ratios = [b / a for a, b in zip(*times, strict=True)]
            low, _, high = statistics.quantiles(ratios, n=4)
            print(f"{case:8s} {block:8s} old {1e3 * old:8.2f} ms  new {1e3 * new:8.2f} ms  new / old {new / old:.3f} "
                  f"[{low:.3f}, {high:.3f}]")  # fmt: skip
            found[f"{case}, {block}"] = {"old": old, "new": new, "ratio": new / old}
    print(json.dumps({"benchmark": "two_versions", "cases": found}))


if __name__ == "__main__":
    main()
