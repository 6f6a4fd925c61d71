"""A process that has PyTorch loaded and forks trainings on demand: each is a process of its own, and starts at once.

    python -m tests.helpers.fork_server

Reads a JSON object a line: `{"arguments": [...], "out": path, "err": path}` answers with the process id, and
`{"pid": number}` with the exit status, or null while it runs. A `target`, as in `module:function`, is called with the
arguments in the place of the command, and an `environment` is in the place of the server's.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO


def load() -> None:
    import torch._dynamo  # what the optimisers load when they are made

    import skipless
    import skipless.experiments.report.summary
    import skipless.experiments.worker
    import skipless.terminal.progress
    import skipless.terminal.runs
    import skipless.training.dry_run
    import skipless.training.train
    from skipless.analysis.costs import training_memory
    from skipless.analysis.speed import matmul_speed

    # what each would do once, and what PyTorch does the first time that it is asked
    matmul_speed(torch.device("cpu"), torch.float32)
    for causal in (True, False):
        training_memory(skipless.ModelConfig(n_layer=2, d_model=32, n_head=2, max_seq_len=16), 4, causal=causal)


def start(
    arguments: list[str], out: str, err: str, target: str | None = None, environment: dict[str, str] | None = None
) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        for number, path, mode in ((0, os.devnull, os.O_RDONLY), (1, out, os.O_WRONLY), (2, err, os.O_WRONLY)):
            os.dup2(os.open(path, mode | os.O_CREAT, 0o666), number)
        if environment is not None:
            os.environ.clear()
            os.environ.update(environment)
        status = become_skipless(arguments) if target is None else call(target, arguments)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def call(target: str, arguments: list[str]) -> int:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)(arguments)


def measure_memory(arguments: list[str]) -> int:
    """What `skipless bench` asks of a process of its own."""
    from skipless.tasks.bench import _child

    print(_child(**json.loads(arguments[0])))
    return 0


def become_skipless(arguments: list[str]) -> int:
    from skipless.cli import run

    sys.argv = ["skipless", *arguments]
    try:
        return run(arguments)
    except BaseException:
        traceback.print_exc()
        return 1


def become_skipless_with_forked_workers(arguments: list[str]) -> int:
    """The command, whose pool forks its workers: their parent is who it would be, and they start at once."""
    from skipless.experiments import pool

    pool.subprocess = SimpleNamespace(Popen=ForkedWorker, DEVNULL=subprocess.DEVNULL)
    pool.LOOK_EVERY = 0.02
    return become_skipless(arguments)


class ForkedWorker:
    """In the place of `subprocess.Popen` as a pool calls it."""

    def __init__(self, command: list[str], *, stderr: BinaryIO, env: Mapping[str, str], **_: object) -> None:
        assert command[1:-1] == ["-m", "skipless.experiments.worker"]
        self.pid = start(
            [command[-1], str(Path.cwd())], os.devnull, stderr.name, f"{__spec__.name}:become_worker", dict(env)
        )
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = poll(self.pid)
        return self.returncode

    def wait(self) -> int:
        while (status := self.poll()) is None:
            time.sleep(0.01)
        return status

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


def become_worker(arguments: list[str]) -> int:
    """A worker of a pool, in a session of its own; it ends with the process that it was forked from."""
    from skipless.experiments import worker
    from skipless.experiments.messages import JobFile

    file, folder = map(Path, arguments)
    os.setsid()
    os.chdir(folder)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    JobFile.read(file).model_copy(update={"parent": os.getppid()}).write(file)
    return worker.main(file)


def poll(pid: int) -> int | None:
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def serve() -> None:
    load()
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(poll(**request) if "pid" in request else start(**request)), flush=True)
    os._exit(0)  # there is nothing to tidy up, and much that was loaded


if __name__ == "__main__":
    serve()
