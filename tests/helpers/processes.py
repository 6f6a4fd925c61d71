"""Trainings as processes of their own: the command as a user starts it, and the same forked from a warm process."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def holds(condition: Callable[[], object]) -> bool:
    """Whether it does; not while a process makes and removes the folder that it looks into."""
    try:
        return bool(condition())
    except FileNotFoundError:
        return False


@dataclass
class Child:
    """A process, and the files of what it prints."""

    pid: int
    out_file: Path
    err_file: Path
    ask: Callable[[], int | None]
    status: int | None = None

    def poll(self) -> int | None:
        """The exit status, negative for a signal as in `subprocess`, or None while it runs."""
        if self.status is None:
            self.status = self.ask()
        return self.status

    def wait(self, timeout: float = 600) -> int:
        """Wait for its end. Looks are counted, not seconds: the machine may be paused, and the tests with it."""
        for _ in range(int(100 * timeout)):
            if (status := self.poll()) is not None:
                return status
            time.sleep(0.01)
        self.send(signal.SIGKILL)
        pytest.fail(f"the process did not end within {timeout} s:\n{self.out}{self.err}")

    def send(self, number: signal.Signals) -> None:
        if self.poll() is None:  # until it is waited for, the number is its own
            os.kill(self.pid, number)

    def stop_when(self, condition: Callable[[], bool]) -> None:
        """Have the process stand still (SIGSTOP) at an instant at which this holds, however busy the machine is."""
        while True:
            self.wait_until(condition)
            self.send(signal.SIGSTOP)
            self.wait_until(self._stands_still)
            if holds(condition):
                return
            self.send(signal.SIGCONT)

    def _stands_still(self) -> bool:
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        except OSError:  # it has ended
            return False

    def wait_until(self, condition: Callable[[], bool], timeout: float = 600) -> None:
        """Wait for something that the process is to do; fails if it ends before."""
        for number in itertools.count(1):
            if holds(condition):
                return
            time.sleep(0.001)
            if number % 50 == 0:
                assert self.poll() is None, f"ended with {self.status} too early:\n{self.out}{self.err}"
            if number > 1000 * timeout:
                self.send(signal.SIGKILL)
                pytest.fail(f"nothing happened within {timeout} s:\n{self.out}{self.err}")

    def cpu_seconds(self) -> float:
        """What the process has computed so far, in all of its threads."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def out(self) -> str:
        return self.out_file.read_text()

    @property
    def err(self) -> str:
        return self.err_file.read_text()


@dataclass
class Worker:
    """A forked worker of a pool, which asks it what it asks of a `subprocess.Popen`."""

    child: Child

    @property
    def pid(self) -> int:
        return self.child.pid

    @property
    def returncode(self) -> int | None:
        return self.child.status

    def poll(self) -> int | None:
        return self.child.poll()

    def wait(self) -> int:
        return self.child.wait()

    def terminate(self) -> None:
        self.child.send(signal.SIGTERM)

    def kill(self) -> None:
        self.child.send(signal.SIGKILL)


class ForkServer:
    """The client of `fork_server.py`; ends its children with itself."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.numbers, self.children = folder, itertools.count(), []
        self.server = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.fork_server"],
            cwd=ROOT,
            env=ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, arguments: list[str], target: str | None = None) -> Child:
        """`skipless` with these arguments, or a function `module:name` that is called with them, forked."""
        out, err = _log_files(self.folder, next(self.numbers))
        return self._fork(arguments, out, err, target)

    def start_with_forked_workers(self, arguments: list[str]) -> Child:
        """`skipless` with these arguments, forked, and its workers forked from it."""
        return self.start(arguments, "tests.helpers.fork_server:become_skipless_with_forked_workers")

    def start_worker(self, command: list[str], *, stderr: BinaryIO, env: Mapping[str, str], **_: object) -> "Worker":
        """In the place of `subprocess.Popen` as a pool calls it."""
        assert command[1:-1] == ["-m", "skipless.experiments.worker"]
        target = "tests.helpers.fork_server:become_worker"
        return Worker(
            self._fork([command[-1], str(Path.cwd())], Path(os.devnull), Path(stderr.name), target, dict(env))
        )

    def _fork(self, arguments: list[str], out: Path, err: Path, target: str | None, environment=None) -> Child:
        request = {"arguments": arguments, "out": str(out), "err": str(err)}
        pid = self._ask(**request, target=target, environment=environment)
        child = Child(pid, out, err, lambda: self._ask(pid=pid))
        self.children.append(child)
        return child

    def _ask(self, **request) -> int | None:
        self.server.stdin.write(json.dumps(request) + "\n")
        self.server.stdin.flush()
        return json.loads(self.server.stdout.readline())

    def close(self) -> None:
        for child in self.children:
            child.send(signal.SIGKILL)
            child.wait()
        self.server.stdin.close()
        self.server.wait(30)
        self.server.stdout.close()


class Commands:
    """`python -m skipless`, as from a shell."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.numbers, self.children = folder, itertools.count(), []

    def start(self, arguments: list[str]) -> Child:
        """`skipless` with these arguments."""
        out, err = _log_files(self.folder, next(self.numbers))
        with out.open("w") as out_file, err.open("w") as err_file:
            process = subprocess.Popen(
                [sys.executable, "-m", "skipless", *arguments],
                env=ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=out_file,
                stderr=err_file,
            )
        child = Child(process.pid, out, err, process.poll)
        self.children.append(child)
        return child

    def close(self) -> None:
        for child in self.children:
            child.send(signal.SIGKILL)
            child.wait()


def _log_files(folder: Path, number: int) -> tuple[Path, Path]:
    files = folder / f"{number}.out", folder / f"{number}.err"
    for file in files:
        file.touch()
    return files
