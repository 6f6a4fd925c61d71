"""torchrun on this machine: tasks of `worker.py`, or the command as a user starts it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from skipless.storage.atomic_files import write_json
from tests.helpers.processes import holds

ROOT = Path(__file__).parents[2]
PATH = os.pathsep.join([str(Path(__file__).parent / "no_pickle"), str(ROOT)])
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONPATH": PATH,
    "MALLOC_MMAP_THRESHOLD_": "65536",  # so that memory can be measured
    # PyTorch's compiler keeps what it has made as pickles; these switch that off
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
    "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}


def torchrun(size: int, *arguments: str) -> list[str]:
    alone = [] if "--nnodes" in arguments else ["--standalone"]
    return [sys.executable, "-m", "torch.distributed.run", *alone, "--nproc-per-node", str(size), *arguments]


class TorchrunWorkers:
    """Processes that wait for tasks of `worker.py`, for to start them takes longer than most tasks do."""

    def __init__(self, folder: Path, size: int, *, may_pickle: bool) -> None:
        self.folder, self.size, self.asked = folder, size, 0
        self.log = (folder / "log.txt").open("w+")
        command = torchrun(size, "-m", "tests.helpers.torchrun_worker", str(folder), str(os.getpid()))
        environment = ENVIRONMENT | ({"PYTHONPATH": str(ROOT)} if may_pickle else {})
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=self.log, stderr=subprocess.STDOUT)

    def do(self, tasks: list) -> list:
        """What the first process found for each task; every process has to have done all of them."""
        found = [self.folder / f"found-{self.asked}-{rank}.json" for rank in range(self.size)]
        write_json(self.folder / f"tasks-{self.asked}.json", tasks)
        self.asked += 1
        end = time.monotonic() + 5400
        while not all(path.exists() for path in found):
            assert self.process.poll() is None, (self.folder / "log.txt").read_text()[-6000:]
            assert time.monotonic() < end
            time.sleep(0.05)
        results = [json.loads(path.read_text()) for path in found]
        assert all(len(one) == len(tasks) for one in results)
        return results[0]

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()
        self.log.close()


class Launched:
    """`torchrun -m skipless train` as a process, and what it prints."""

    def __init__(self, folder: Path, size: int, arguments: list[str], *options: str, module: str = "skipless") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "log.txt"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                torchrun(size, *options, "-m", module, *arguments),
                cwd=ROOT,
                env=ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def text(self) -> str:
        return self.log.read_text()

    def ranks(self) -> dict[int, int]:
        """The process ids by rank, of those that are there now."""
        found = {}
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        for pid in children.read_text().split():
            try:
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:  # it has just ended
                continue
            rank = next((int(entry[5:]) for entry in environment if entry.startswith(b"RANK=")), None)
            if rank is not None:
                found[rank] = int(pid)
        return found

    def send(self, rank: int, number: signal.Signals) -> int | None:
        """Signal one rank, if it is there; its process id."""
        pid = self.ranks().get(rank)
        if pid is not None:
            os.kill(pid, number)
        return pid

    def wait_until(self, condition, timeout: float = 3600) -> None:
        end = time.monotonic() + timeout
        while not holds(condition):
            assert self.process.poll() is None, f"ended with {self.process.returncode} too early:\n{self.text[-4000:]}"
            if time.monotonic() > end:
                self.close()
                pytest.fail(f"nothing happened within {timeout} s:\n{self.text[-4000:]}")
            time.sleep(0.002)

    def wait(self, timeout: float = 3600) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.close()
            pytest.fail(f"it did not end within {timeout} s:\n{self.text[-4000:]}")

    def close(self) -> None:
        for pid in self.ranks().values() if self.process.poll() is None else []:
            os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
