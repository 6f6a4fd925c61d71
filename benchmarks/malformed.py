"""Malformed input for every command, drawn from a seed: no traceback, no hang, no message that is too long to read.

    python benchmarks/malformed.py --seed 0 --count 1000 --real 200

Half of the cases of each command have odd arguments. The other half have a crafted file or folder: a run, a checkpoint,
an export, a classifier, a text, labelled rows, a sweep, a comparison, a plugin, a folder of results, with one or two
things in it that should not be so. A case runs in a folder of its own, in this process; with `--real`, so many of them
also as a command with an odd environment. Prints every failure, then how many cases each command had and how they
ended; exit status 1 if there is any. `malformed_cases.py` has the command lines, and `malformed_damage.py` the damage.
"""

import argparse
import io
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.malformed_cases import LINES, Case, make_case, make_kit, quiet  # noqa: E402
from skipless.cli import run  # noqa: E402
from tests.helpers.plugins import no_plugins  # noqa: E402

SECONDS = 60
"""A case that takes longer hangs."""

LONGEST = 2000
"""Bytes of a line on standard error."""

STATUSES = (0, 2, 3, 4)
"""How a command may end that nobody interrupts."""


class Hang(BaseException):
    """A case took too long."""


def in_process(case: Case) -> tuple[int | str, str]:
    """How a case ended, and what it said on standard error."""

    def stop(_signal: int, _frame: Any) -> None:
        raise Hang

    before, stdin, handler = dict(os.environ), sys.stdin, signal.signal(signal.SIGALRM, stop)
    sys.stdin = io.TextIOWrapper(io.BytesIO(case.stdin), encoding="utf-8")
    with quiet() as (_, err), no_plugins():
        signal.alarm(SECONDS)
        try:
            status: int | str = run(list(case.arguments))
        except Hang:
            status = f"hangs\n{traceback.format_exc(limit=-4)}"
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        except BaseException:
            status = traceback.format_exc(limit=-6)
        finally:
            signal.alarm(0)
    signal.signal(signal.SIGALRM, handler)
    sys.stdin = stdin
    os.environ.clear()
    os.environ.update(before)
    return status, err.getvalue()


ENVIRONMENTS: list[dict[str, str]] = [
    {},
    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    {"PYTHONIOENCODING": "ascii"},
    {"LC_ALL": "POSIX"},
    {"COLUMNS": "1"},
    {"HOME": "/nowhere"},
]


def as_command(case: Case, folder: Path, rng: random.Random) -> tuple[int | str, str]:
    """The same by the command itself: another locale, closed standard input, or little memory."""
    words = [os.fsencode(word) for word in case.arguments if "\0" not in word]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **rng.choice(ENVIRONMENTS)}
    closed, short = rng.random() < 0.2, rng.random() < 0.1

    def prepare() -> None:
        if closed:
            os.close(0)
        if short:
            resource.setrlimit(resource.RLIMIT_AS, (900 << 20, 900 << 20))

    started = [sys.executable, "-m", "skipless", *words]
    try:
        done = subprocess.run(
            started,
            cwd=folder,
            env=environment,
            input=case.stdin,
            capture_output=True,
            timeout=SECONDS,
            preexec_fn=prepare,
        )
    except subprocess.TimeoutExpired:
        return "hangs", ""
    return done.returncode, done.stderr.decode(errors="replace")


def problem(status: int | str, said: str) -> str | None:
    """What is wrong with how a case ended."""
    if isinstance(status, str):
        return status
    if "Traceback (most recent call last)" in said:
        return said[-3000:]
    if status not in STATUSES:
        return f"exit status {status}: {said[-500:]}"
    longest = max((len(line.encode(errors="replace")) for line in said.splitlines()), default=0)
    if longest > LONGEST:
        return f"a line of {longest} bytes: {max(said.splitlines(), key=len)[:300]}"
    if status in (2, 3) and not any(line.strip() for line in said.splitlines()):
        return f"exit status {status} without a word"
    return None


def run_cases(
    seed: int, count: int, real: int, scratch: Path, *, jobs: int = 2, only: str | None = None, verbose: bool = False
) -> tuple[dict[str, Counter[str]], list[str]]:
    """How the cases of each command ended, and those that failed."""
    kit = scratch / "kit"
    if not kit.exists():
        make_kit(kit)
    ended: dict[str, Counter[str]] = {command: Counter() for command in LINES}
    failures: list[str] = []
    names = [name for name in LINES if only in (None, name)]
    plan = [(names[n % len(names)], n // len(names)) for n in range(count)]

    def judge(case: Case, status: int | str, said: str, way: str) -> None:
        why = problem(status, said)
        ended[case.name][str(status) if isinstance(status, int) else "failed"] += 1
        if why is not None:
            failures.append(f"seed {seed}, {way}, {case}\n{why}")
            print(f"{failures[-1]}\n", flush=True)
        if verbose:
            print(f"{case}\n    {status if isinstance(status, int) else 'FAILED'} {said.strip()[-300:]}", flush=True)

    for command, number in plan:
        with tempfile.TemporaryDirectory(dir=scratch) as place, chdir(place):
            case = make_case(command, number, seed, kit, Path(place))
            judge(case, *in_process(case), "in this process")

    def again(position: int) -> None:
        command, number = plan[position]
        with tempfile.TemporaryDirectory(dir=scratch) as place:
            case = make_case(command, number, seed, kit, Path(place))
            judge(case, *as_command(case, Path(place), random.Random(f"{seed} {position}")), "as a command")

    chosen = random.Random(seed).sample(range(count), min(real, count))
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(again, chosen))
    return ended, failures


def main() -> int:
    """Run the cases of a seed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--real", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=2, help="commands at a time")
    parser.add_argument("--only", choices=LINES)
    parser.add_argument("--verbose", action="store_true")
    given = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        ended, failures = run_cases(
            given.seed,
            given.count,
            given.real,
            Path(scratch),
            jobs=given.jobs,
            only=given.only,
            verbose=given.verbose,
        )
    for command, counts in ended.items():
        shown = ", ".join(f"{count} × {status}" for status, count in sorted(counts.items()))
        print(f"{command:20} {sum(counts.values()):4} cases; exit status: {shown}")
    print(f"\nseed {given.seed}: {given.count} cases, {len(failures)} failures, {time.monotonic() - start:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
