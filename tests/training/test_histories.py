"""Several processes on one run: started, paused, killed and resumed at random. No work that was saved is ever lost."""

import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from skipless.runs import Run
from tests.helpers.processes import Child, ForkServer
from tests.helpers.tiny_runs import assert_same_run, newest_step, tiny, write_config

STEPS = 40
SETTINGS = {"train.steps": STEPS, "train.save_every": 2, "train.eval_every": 10, "train.log_every": 5}
AT_ONCE = 3
ENDS = {0: "finished", 2: "exists already", 4: "in use by", -signal.SIGKILL: ""}
"""Exit statuses that a process may have, and what it says with them."""


@dataclass
class History:
    """What was done to a run, and what was seen of it."""

    server: ForkServer
    arguments: list[str]
    folder: Path
    rng: random.Random
    alive: list[Child] = field(default_factory=list)
    paused: set[int] = field(default_factory=set)
    events: list[str] = field(default_factory=list)
    saved: int = -1
    finished: dict[str, bytes] | None = None
    """The files of the run since it was finished."""

    def act(self) -> None:
        """One random action on a random process, a while, and a look at what came of everything so far."""
        kinds = ["start", "resume", "resume", "pause", "go on", "kill", "wait"]
        self.do(self.rng.choice(kinds if self.alive else kinds[:3]))
        time.sleep(self.rng.choice([0.0, 0.05, 0.3]) * self.rng.random())
        self.look()

    def do(self, kind: str) -> None:
        """One action on a random process."""
        if kind in ("start", "resume"):
            if len(self.alive) < AT_ONCE:
                self._start(kind)
        elif kind != "wait":
            self._signal(kind, self.rng.choice(self.alive))

    def _start(self, kind: str) -> None:
        child = self.server.start([*self.arguments, *(["--resume"] if kind == "resume" else [])])
        self.alive.append(child)
        self.events.append(f"{kind} {child.pid}")

    def _signal(self, kind: str, child: Child) -> None:
        numbers = {"pause": signal.SIGSTOP, "go on": signal.SIGCONT, "kill": signal.SIGKILL}
        child.send(numbers[kind])
        self.events.append(f"{kind} {child.pid}")
        if kind == "pause":
            self.paused.add(child.pid)
        else:
            self.paused.discard(child.pid)

    def look(self) -> None:
        """Steps that are saved never go back, processes end as they may, and what is finished does not change."""
        for child in [child for child in self.alive if child.poll() is not None]:
            self.alive.remove(child)
            self.paused.discard(child.pid)
            self.events.append(f"{child.pid} ends with {child.status} at step {newest_step(self.folder)}")
            assert child.status in ENDS, f"{self.told()}\n{child.out}{child.err}"
            assert ENDS[child.status] in child.err or child.status == 0, f"{self.told()}\n{child.err}"
            if child.status == 0 and self.finished is None:
                self.finished = self._files()
        checkpoint, _ = Run(self.folder).checkpoints().latest_valid()
        now = checkpoint.step if checkpoint else -1
        assert now >= self.saved, f"step {self.saved} was saved, and {now} is there now:\n{self.told()}"
        self.saved = now
        if self.finished is not None:
            assert now == STEPS, self.told()
            assert self._files() == self.finished, f"a finished run was changed:\n{self.told()}"

    def _files(self) -> dict[str, bytes]:
        """What a run has made: lines and checkpoints."""
        run = Run(self.folder)
        paths = [run.metrics_file, run.samples_file, *run.checkpoints().folder.rglob("*")]
        return {str(path): path.read_bytes() for path in paths if path.is_file()}

    def told(self) -> str:
        return "\n".join(self.events)

    def end(self) -> None:
        """Let everything that is left go to its end, and then one more."""
        for child in self.alive:
            child.send(signal.SIGCONT)
        while self.alive:
            time.sleep(0.02)
            self.look()
        last = self.server.start([*self.arguments, "--resume"])
        assert last.wait() == 0, f"{self.told()}\n{last.err}"
        self.look()


@pytest.fixture(scope="module")
def arguments(tmp_path_factory, source, cache_dir):
    """Of a training by its name, and the folder of its runs."""
    folder = tmp_path_factory.mktemp("histories")
    file = write_config(folder / "config.yaml", tiny(source, SETTINGS))
    where = ["--runs", str(folder / "runs"), "--cache-dir", str(cache_dir), "--track", "none"]
    return lambda name: ["train", "--config", str(file), *where, "--name", name], folder / "runs"


@pytest.fixture(scope="module")
def reference(arguments, fork_server):
    """What a process that is alone and left alone makes."""
    made, runs = arguments
    child = fork_server.start(made("reference"))
    assert child.wait() == 0, child.err
    return runs / "reference"


def live_through(arguments, reference, fork_server, seed: int, actions: int) -> list[str]:
    made, runs = arguments
    name = f"history-{seed}"
    history = History(fork_server, made(name), runs / name, random.Random(seed))
    for kind in ("start", "pause", "resume", "kill"):  # one of each at least, whatever chance and the machine do
        history.do(kind)
    for _ in range(actions):
        history.act()
    history.end()
    assert_same_run(runs / name, reference)
    return history.events


def test_a_short_history_loses_nothing(arguments, reference, fork_server):
    events = live_through(arguments, reference, fork_server, seed=3, actions=25)
    for kind in ("start", "resume", "pause", "kill"):
        assert any(event.startswith(kind) for event in events), kind


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 120))
def test_a_long_history_loses_nothing(arguments, reference, fork_server, seed):
    assert len(live_through(arguments, reference, fork_server, seed, actions=120)) > 60
