"""A process that has PyTorch loaded and forks trainings on demand: each is a process of its own, and starts at once.

    python -m tests.helpers.fork_server

Reads a JSON object a line: `{"arguments": [...], "out": path, "err": path}` answers with the process id, and
`{"pid": number}` with the exit status, or null while it runs. A `target`, as in `module:function`, is called with the
arguments in the place of the command.
"""

import importlib
import json
import os
import sys
import traceback


def load() -> None:
    import torch._dynamo  # noqa: F401  what the optimisers load when they are made

    import skipless.experiments.report.summary
    import skipless.terminal.progress
    import skipless.terminal.runs
    import skipless.training.dry_run
    import skipless.training.train  # noqa: F401


def start(arguments: list[str], out: str, err: str, target: str | None = None) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        for number, path, mode in ((0, os.devnull, os.O_RDONLY), (1, out, os.O_WRONLY), (2, err, os.O_WRONLY)):
            os.dup2(os.open(path, mode | os.O_CREAT, 0o666), number)
        status = become_skipless(arguments) if target is None else call(target, arguments)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def call(target: str, arguments: list[str]) -> int:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)(arguments)


def become_skipless(arguments: list[str]) -> int:
    from skipless.cli import run

    sys.argv = ["skipless", *arguments]
    try:
        return run(arguments)
    except BaseException:
        traceback.print_exc()
        return 1


def poll(pid: int) -> int | None:
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def serve() -> None:
    load()
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(poll(**request) if "pid" in request else start(**request)), flush=True)


if __name__ == "__main__":
    serve()
