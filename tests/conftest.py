import subprocess
from types import SimpleNamespace

import hypothesis
import pytest
import torch

from tests.helpers.browser import find_chromium
from tests.helpers.processes import Commands, ForkServer
from tests.helpers.tiny_runs import write_text
from tests.helpers.torchrun import TorchrunWorkers

# how long an example takes is up to what else the machine does
hypothesis.settings.register_profile("skipless", deadline=None)
hypothesis.settings.load_profile("skipless")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def source(tmp_path_factory) -> str:
    """Text that is written once; nothing may change it."""
    return write_text(tmp_path_factory.mktemp("text") / "modules")


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory):
    """Prepared data, shared by the tests that do not damage it."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory):
    """Starts commands as forked processes."""
    fork_server = ForkServer(tmp_path_factory.mktemp("fork_server"))
    yield fork_server
    fork_server.close()


@pytest.fixture(scope="module")
def forked_workers(fork_server):
    """Pools of this process fork their workers from one that has PyTorch loaded; otherwise they are as ever."""
    from skipless.experiments import pool

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "subprocess", SimpleNamespace(Popen=fork_server.start_worker, DEVNULL=subprocess.DEVNULL))
        patch.setattr(pool, "LOOK_EVERY", 0.02)
        yield


@pytest.fixture(scope="session")
def commands(tmp_path_factory):
    """Starts trainings as commands."""
    commands = Commands(tmp_path_factory.mktemp("commands"))
    yield commands
    commands.close()


@pytest.fixture(scope="session")
def run_tasks(tmp_path_factory):
    """Does tasks of `worker.py` by some number of processes, which are started when they are first needed.

    To read or write a pickle is an error in them, unless they may: PyTorch's compiler does.
    """
    started: dict[tuple[int, bool], TorchrunWorkers] = {}

    def run(size: int, tasks: list, *, may_pickle: bool = False) -> list:
        key = size, may_pickle
        if key not in started or started[key].process.poll() is not None:
            started[key] = TorchrunWorkers(tmp_path_factory.mktemp(f"workers-of-{size}"), size, may_pickle=may_pickle)
        return started[key].do(tasks)

    yield run
    for workers in started.values():
        workers.close()


@pytest.fixture(scope="module")
def browser():
    """Chromium without a window."""
    path = find_chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"], timeout=180_000)
        yield browser
        browser.close()
