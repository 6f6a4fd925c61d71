"""Whether the tests catch what can plausibly go wrong: one small fault at a time is put into a copy of the code.

    python benchmarks/faults.py
    python benchmarks/faults.py --package nn
    python benchmarks/faults.py --only clip-scales-up

`faults.yaml` lists the faults, each with the tests nearest to it. The checkout is copied to a scratch folder; there
each fault is applied, its tests run, and the file is put back. A line says whether it was caught and by which test, or
that it survived. Before that the tests run on the code as it is, for a test that fails anyway catches nothing.

Exit status 1 where a fault survives that the list does not explain, where tests run into the time limit, or where an
entry is stale: its old text must occur exactly once in its file.

Each run of tests is forked from this process, which has imported the heavy packages and nothing of skipless.
"""

import argparse
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
LIST = Path(__file__).with_name("faults.yaml")

LEFT_OUT = ("runs", "build", "dist", ".*")
"""What is not copied, of the names at the top of a checkout."""

HEAVY = ("torch", "torch._dynamo", "hypothesis", "tokenizers", "rich.progress", "typer", "pydantic", "transformers")

CRASHES = tuple(-number for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE))
"""What ends a process by its own fault, and not because somebody else wanted it to."""

SECONDS = 300.0
"""That the tests of one fault may take; a busy machine needs many times what an idle one does."""


@dataclass(frozen=True)
class Fault:
    """One entry of the list."""

    id: str
    file: str
    old: str
    new: str
    breaks: str
    """What goes wrong, in a sentence."""
    tests: str
    """The nearest tests, as arguments of pytest."""
    survives: str | None = None
    """Why no test catches it, where that is known."""

    @property
    def package(self) -> str:
        """`nn` for skipless/nn/masks.py, `errors` for skipless/errors.py."""
        return Path(self.file).parts[1].removesuffix(".py")

    def problem(self, root: Path) -> str | None:
        """Why the entry no longer fits the code in a folder, or None."""
        path = root / self.file
        count = path.read_text(encoding="utf-8").count(self.old) if path.exists() else 0
        if count != 1:
            return f"its old text occurs {count} times in {self.file}"
        return None

    def applied(self, source: str) -> str:
        """The source with the fault in it."""
        return source.replace(self.old, self.new)


def read_list(path: Path = LIST) -> list[Fault]:
    """The faults of the list, in its order."""
    return [Fault(**entry) for entry in yaml.safe_load(path.read_text(encoding="utf-8"))]


@contextmanager
def fault_in(fault: Fault, root: Path) -> Iterator[None]:
    """Within this context the fault is in the code below `root`."""
    path = root / fault.file
    source = path.read_text(encoding="utf-8")
    compile(fault.applied(source), str(path), "exec")  # what is no Python would be caught by any test
    try:
        _replace(path, fault.applied(source))
        yield
    finally:
        _replace(path, source)


def _replace(path: Path, source: str) -> None:
    path.write_text(source, encoding="utf-8")
    # compiled code is looked up by the source's size and the second it was written in, which may both be the same
    Path(cache_from_source(str(path))).unlink(missing_ok=True)


# ------------------------------------------------------------------------------------- tests


@dataclass(frozen=True)
class Outcome:
    """What came of a run of tests."""

    status: int | None
    """pytest's exit status, or minus the signal that ended it; None where that was the time limit."""
    first: str | None = None
    """The first test that failed."""

    @property
    def caught(self) -> bool:
        """Whether a test failed, could no longer be imported, or ended the process with a signal."""
        failed = self.status in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED)
        return (failed and self.first is not None) or self.status in CRASHES


class FirstFailure:
    """A plugin of pytest that remembers what failed first."""

    def __init__(self) -> None:
        self.name: str | None = None

    def pytest_runtest_logreport(self, report: Any) -> None:
        """After a part of a test."""
        if report.failed and self.name is None:
            self.name = report.nodeid

    pytest_collectreport = pytest_runtest_logreport


def run_tests(root: Path, arguments: Sequence[str], seconds: float) -> Outcome:
    """Run tests of the code below `root` in a forked process, up to the first that fails."""
    result = root / "outcome.json"
    result.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        try:
            _in_child(root, arguments, result)
        finally:
            os._exit(pytest.ExitCode.INTERNAL_ERROR)
    status = _wait(child, seconds)
    with suppress(ProcessLookupError):  # what tests have started and left behind
        os.killpg(child, signal.SIGKILL)
    return Outcome(**json.loads(result.read_text(encoding="utf-8"))) if result.exists() else Outcome(status)


def _wait(child: int, seconds: float) -> int | None:
    """The exit status of a process, negative for a signal; None where it was ended for it took too long."""
    end = time.monotonic() + seconds
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(0.05)
    return os.waitstatus_to_exitcode(ended[1])


def _in_child(root: Path, arguments: Sequence[str], result: Path) -> None:
    os.setsid()
    os.chdir(root)
    os.environ.update(PYTHONPATH=str(root), SKIPLESS_CACHE=str(root / "cache"))
    sys.path[:] = [str(root), *(entry for entry in sys.path if Path(entry or ".").resolve() != LIST.parent)]
    with (root / "output.txt").open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    first = FirstFailure()
    options = ["-x", "-q", "-p", "no:cacheprovider", f"--basetemp={root / 'tmp'}"]
    status = pytest.main([*options, *arguments], plugins=[first])
    if status == pytest.ExitCode.NO_TESTS_COLLECTED:  # all of them are slow ones
        status = pytest.main([*options, "-m", "", *arguments], plugins=[first])
    result.write_text(json.dumps({"status": int(status), "first": first.name}), encoding="utf-8")
    os._exit(0)


def warm_up() -> None:
    """Import what every run of tests would import, but nothing of skipless, which differs from run to run."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in HEAVY:
        with suppress(ImportError):
            importlib.import_module(name)
    assert not any(name.split(".")[0] == "skipless" for name in sys.modules)


# -------------------------------------------------------------------------------------- main


def main() -> int:
    """Apply the faults one at a time and say what came of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="ID", help="this fault (several times for several)")
    parser.add_argument("--package", metavar="NAME", help="faults in this package")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time limit for the tests of one fault")
    options = parser.parse_args()
    faults = choose(read_list(), options.only, options.package)
    stale = {fault.id: problem for fault in faults if (problem := fault.problem(ROOT))}
    if stale:
        sys.exit("\n".join(f"{name} is stale: {problem}" for name, problem in stale.items()))
    warm_up()
    with tempfile.TemporaryDirectory(prefix="skipless-faults-") as folder:
        copy = Path(folder) / "checkout"
        copy_checkout(ROOT, copy)
        check_without_faults(copy, faults, options.seconds)
        outcomes = {fault: try_fault(copy, fault, options.seconds) for fault in faults}
    return summarise(outcomes)


def copy_checkout(root: Path, copy: Path) -> None:
    """Copy the code, its tests and what they read, but neither compiled files nor what somebody has trained here."""
    left_out = shutil.ignore_patterns(*LEFT_OUT)(str(root), [entry.name for entry in root.iterdir()])
    copy.mkdir()
    for entry in root.iterdir():
        if entry.name in left_out:
            continue
        if entry.is_dir():
            shutil.copytree(entry, copy / entry.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(entry, copy / entry.name)


def choose(faults: list[Fault], only: Sequence[str] | None, package: str | None) -> list[Fault]:
    """The faults that were asked for."""
    chosen = [fault for fault in faults if fault.id in (only or [fault.id]) and package in (None, fault.package)]
    missing = set(only or ()) - {fault.id for fault in faults}
    if missing or not chosen:
        known = sorted({fault.package for fault in faults})
        sys.exit(f"no such fault: {', '.join(sorted(missing)) or package}; packages: {', '.join(known)}")
    return chosen


def check_without_faults(copy: Path, faults: Sequence[Fault], seconds: float) -> None:
    """Exit where the tests do not pass on the code as it is."""
    arguments = list(dict.fromkeys(part for fault in faults for part in fault.tests.split()))
    found = run_tests(copy, arguments, seconds * len(faults))
    if found.status != pytest.ExitCode.OK:
        print((copy / "output.txt").read_text(encoding="utf-8", errors="replace"), file=sys.stderr)
        sys.exit(f"without a fault the tests do not pass: {found.first or 'see above'}")


def try_fault(copy: Path, fault: Fault, seconds: float) -> Outcome:
    """Run a fault's tests with the fault in the code, and print a line."""
    start = time.monotonic()
    with fault_in(fault, copy):
        found = run_tests(copy, fault.tests.split(), seconds)
    said = "caught  " if found.caught else "survived" if found.status == pytest.ExitCode.OK else "unclear "
    by = found.first or (f"the tests ended with status {found.status}" if found.status else "")
    print(f"{said} {fault.id:<40} {time.monotonic() - start:5.1f} s  {by}", flush=True)
    return found


def summarise(outcomes: dict[Fault, Outcome]) -> int:
    """Say how many were caught, and name the others; the exit status."""
    left = {fault: found for fault, found in outcomes.items() if not found.caught}
    print(f"\n{len(outcomes) - len(left)} of {len(outcomes)} caught ({1 - len(left) / len(outcomes):.1%})")
    for fault, found in left.items():
        reason = fault.survives or "not explained"
        what = "survived" if found.status == pytest.ExitCode.OK else "unclear (time limit, or no test ran)"
        print(f"{fault.id} {what}: {fault.breaks} {reason}")
    known = [fault for fault, found in left.items() if fault.survives and found.status == pytest.ExitCode.OK]
    return int(len(known) < len(left))


if __name__ == "__main__":
    sys.exit(main())
