"""A terminal, a reader or a disk behind the output that goes away costs no training its work."""

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from skipless.distributed.group import Group
from skipless.training.stopping import Interrupted, Signals
from skipless.training.train import train
from tests.helpers.processes import ENVIRONMENT, ROOT, Child
from tests.helpers.tiny_runs import Recorder, newest_step, records, steps_kept, tiny, write_config

MANY = 100_000
"""Steps that nobody waits for."""


@pytest.fixture
def arguments(tmp_path, source, cache_dir):
    """The command line of a training that saves only at its end, unless it is asked to stop."""

    def make(steps: int, *more: str) -> list[str]:
        cfg = tiny(source, steps=steps, save_every=MANY, eval_every=0)
        file = write_config(tmp_path / "config.yaml", cfg)
        where = ["--runs", str(tmp_path), "--cache-dir", str(cache_dir), "--track", "none"]
        return ["train", "--config", str(file), "--name", "run", *where, *more]

    return make


def start(arguments: list[str], err: Path, before=None, **how) -> tuple[subprocess.Popen, Child]:
    with err.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "skipless", *arguments],
            cwd=ROOT,
            env=ENVIRONMENT,
            **{"stdin": subprocess.DEVNULL, "stderr": errors, **how},
            preexec_fn=before,
        )
    return process, Child(process.pid, err, err, process.poll)


def test_a_reader_that_has_seen_enough_leaves_a_checkpoint(tmp_path, arguments):
    process, child = start(arguments(MANY), tmp_path / "err", stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline().strip()
        process.stdout.close()  # as `| head -1` does
        assert child.wait() == 141, child.err
        step = newest_step(tmp_path / "run")
        assert step >= 0
        assert child.err == f"skipless: SIGPIPE: saved at step {step}; continue with --resume\n"
    finally:
        child.send(signal.SIGKILL)


def test_a_full_disk_behind_the_output_ends_no_training(tmp_path, arguments):
    with Path("/dev/full").open("w") as full:
        _, child = start(arguments(6), tmp_path / "err", stdout=full)
    assert child.wait() == 3  # nobody has seen the result
    assert steps_kept(tmp_path / "run") == [6]
    assert records(tmp_path / "run")[-1]["step"] == 6
    first, *rest = child.err.splitlines()
    assert first == "skipless: nothing more is shown (No space left on device); the work continues"
    assert rest == ["skipless: No space left on device"]


def test_nothing_can_be_said_at_all(tmp_path, arguments):
    with Path("/dev/full").open("w") as full:
        _, child = start(arguments(6), tmp_path / "err", stdout=full, stderr=full)
    assert child.wait() == 3
    assert steps_kept(tmp_path / "run") == [6]


@pytest.mark.parametrize("command", [["--version"], ["--help"], ["train", "--help"]])
def test_output_that_does_not_fit_is_status_3(tmp_path, command):
    with Path("/dev/full").open("w") as full:
        _, child = start(command, tmp_path / "err", stdout=full)
    assert child.wait() == 3
    assert child.err.startswith("skipless: ")
    assert child.err.count("\n") == 1


def take_terminal() -> None:
    """In a child: the terminal on its stdin becomes its own, whose end it is told of."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def ignore_hangups() -> None:
    """As `take_terminal`, under nohup."""
    take_terminal()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


@pytest.mark.parametrize(
    ("before", "steps", "status"),
    [(take_terminal, MANY, 129), pytest.param(ignore_hangups, 400, 3, marks=pytest.mark.slow)],
)
def test_a_terminal_that_is_closed(tmp_path, arguments, fork_server, before, steps, status):
    """Once it is closed, what is written to it is an error; nohup says to go on all the same."""
    master, slave = pty.openpty()
    try:
        _, child = start(arguments(steps), tmp_path / "err", before, stdin=slave, stdout=slave, stderr=slave)
        os.close(slave)
        child.wait_until(lambda: bool(records(tmp_path / "run")) if (tmp_path / "run").exists() else False)
    finally:
        os.close(master)
    assert child.wait() == status
    step = newest_step(tmp_path / "run")
    assert step == steps if before is ignore_hangups else 0 < step < steps
    if before is take_terminal:
        child = fork_server.start(arguments(MANY, "--resume", "--steps", "4", "--accept-changes"))
        assert child.wait() == 0, child.err


def test_a_second_hangup_is_borne(monkeypatch, request):
    """A terminal sends one, and the shell in it another; and who is then asked to end has not been asked twice."""
    monkeypatch.setattr(os, "_exit", lambda status: pytest.fail(f"ended with {status}"))
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    request.addfinalizer(lambda: signal.signal(signal.SIGHUP, before))
    with Signals(Group()) as signals:
        for number in (signal.SIGHUP, signal.SIGHUP):
            signal.raise_signal(number)
            assert signals.received == signal.SIGHUP
        signal.raise_signal(signal.SIGTERM)
        assert signals.received == signal.SIGTERM
        signal.raise_signal(signal.SIGHUP)
        assert signals.received == signal.SIGTERM


def test_hangups_that_are_ignored_stay_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals(Group()) as signals:
            signal.raise_signal(signal.SIGHUP)
            assert signals.received == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_observer_of_ones_own_whose_pipe_is_closed(tmp_path, source, cache_dir):
    def closed(record):
        raise BrokenPipeError

    with pytest.raises(Interrupted) as caught:
        train(
            tiny(source, save_every=MANY), tmp_path, trackers=[], cache_dir=cache_dir, observer=Recorder(on_log=closed)
        )
    assert caught.value.status == 141
    assert steps_kept(tmp_path) == [0]
