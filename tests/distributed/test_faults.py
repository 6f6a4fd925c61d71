"""torchrun with processes that are killed, stopped or asked to end."""

import json
import random
import re
import signal
import socket
import time
from pathlib import Path

import pytest

import skipless
from skipless.runs import Run
from skipless.storage.atomic_files import STAGING_PREFIX
from tests.helpers.tiny_runs import assert_same_run, checkpoint_names, newest_step, tiny, write_config
from tests.helpers.torchrun import Launched

STEPS = 60
OFTEN = {
    "train.steps": STEPS,
    "train.eval_every": 20,
    "train.sample_every": 30,
    "train.log_every": 5,
    "train.gains_every": 15,
    "train.save_every": 2,
    "model.dropout": 0.1,
}
KINDS = {"ddp": {"kind": "ddp"}, "sharded": {"kind": "fsdp", "checkpoint": "sharded"}}


@pytest.fixture
def configured(source):
    def make(parallel, **train):
        return tiny(source, OFTEN).merge({"parallel": parallel, "train": train})

    return make


@pytest.fixture
def arguments(tmp_path, configured, cache_dir):
    def make(name, parallel, *more, **train):
        file = write_config(tmp_path / f"{name}.yaml", configured(parallel, **train))
        where = ["--runs", str(tmp_path / "runs"), "--cache-dir", str(cache_dir)]
        return ["train", "--config", str(file), "--name", name, *where, "--track", "none", *more]

    return make


@pytest.fixture
def launch():
    """Makes a `Launched`, and ends it with the test."""
    started = []

    def start(*options, **how):
        started.append(Launched(*options, **how))
        return started[-1]

    yield start
    for launched in started:
        launched.close()


def said(text: str) -> list[str]:
    """What the command itself printed as an error."""
    return [line for line in text.splitlines() if line.startswith("skipless: ")]


def kill_again_and_again(launched, folder, kills: int, seed: int) -> list[int]:
    """SIGKILL one of two ranks, now and then just when a checkpoint is being written; the steps at which it was."""
    rng, steps = random.Random(seed), []
    for number in range(kills):
        target = newest_step(folder) + rng.randrange(1, 4)
        launched.wait_until(lambda target=target: newest_step(folder) >= target)
        if number % 2:
            launched.wait_until(lambda: any(name.startswith(STAGING_PREFIX) for name in checkpoint_names(folder)))
        else:
            time.sleep(rng.uniform(0, 0.05))
        rank = rng.randrange(2)
        pid = launched.send(rank, signal.SIGKILL)
        assert pid is not None
        steps.append(newest_step(folder))
        launched.wait_until(lambda pid=pid, rank=rank: launched.ranks().get(rank, pid) != pid)
    return steps


@pytest.fixture
def kill_and_compare(tmp_path, launch, run_tasks, configured, arguments, cache_dir):
    def look(kind: str, kills: int, steps: int) -> None:
        """A run that is killed again and again, beside one of as many ranks that is left alone."""
        folder, reference = tmp_path / "runs" / "killed", tmp_path / "runs" / "reference"
        cfg = configured(KINDS[kind], steps=steps).model_dump(mode="json")
        run_tasks(2, [("train", {"cfg": cfg, "cache_dir": str(cache_dir), "folder": str(reference)})])
        command = arguments("killed", KINDS[kind], steps=steps)
        launched = launch(tmp_path / "killed", 2, command, "--max-restarts", str(kills))
        killed = kill_again_and_again(launched, folder, kills, seed=kills)
        assert launched.wait() == 0, launched.text[-4000:]
        assert launched.text.count("going on from step") >= kills - (killed[0] < 0)
        assert_same_run(folder, reference)
        assert not [name for name in checkpoint_names(folder) if name.startswith(STAGING_PREFIX)]

    return look


@pytest.mark.slow
def test_a_run_survives_the_killing_of_a_rank(kill_and_compare):
    kill_and_compare("sharded", kills=1, steps=STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_survives_ten_kills(kill_and_compare, kind):
    kill_and_compare(kind, kills=10, steps=3 * STEPS)


@pytest.mark.slow
def test_a_signal_to_one_rank_saves_and_one_that_hangs_is_named(tmp_path, launch, arguments):
    """SIGTERM to the second rank ends all; started again, they go on until the second rank stops answering."""
    folder = tmp_path / "runs" / "asked"
    command = arguments("asked", {"kind": "ddp", "timeout": 12}, steps=10**6)
    launched = launch(tmp_path, 2, command, "--max-restarts", "1")
    launched.wait_until(lambda: newest_step(folder) >= 4)
    launched.send(1, signal.SIGTERM)
    launched.wait_until(lambda: said(launched.text))
    (line,) = said(launched.text)
    step = int(re.fullmatch(r"skipless: SIGTERM: saved at step (\d+); continue with --resume", line)[1])
    launched.wait_until(lambda: f"going on from step {step}\n" in launched.text)

    launched.wait_until(lambda: newest_step(folder) > step)
    before = newest_step(folder)
    start = time.monotonic()
    launched.send(1, signal.SIGSTOP)
    launched.wait_until(lambda: len(said(launched.text)) > 1)
    assert time.monotonic() - start > 6
    line = said(launched.text)[-1]
    pattern = r"skipless: step \d+: rank 1 did not answer within 12 s; the last checkpoint is intact"
    assert re.fullmatch(pattern, line), line
    launched.send(1, signal.SIGKILL)  # else torchrun gives it half a minute
    assert launched.wait() != 0
    assert newest_step(folder) >= before
    assert Run(folder).checkpoints().latest_valid()[1] == []
    assert not any(name.startswith(STAGING_PREFIX) for name in checkpoint_names(folder))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1, None])
def test_a_signal_to_any_rank_or_to_torchrun_saves_all(tmp_path, launch, arguments, rank):
    folder = tmp_path / "runs" / "asked"
    launched = launch(tmp_path, 2, arguments("asked", KINDS["sharded"], steps=10**6))
    launched.wait_until(lambda: newest_step(folder) >= 4)
    if rank is None:
        launched.process.send_signal(signal.SIGTERM)
    else:
        launched.send(rank, signal.SIGTERM)
    assert launched.wait() != 0
    (line,) = said(launched.text)
    step = int(re.fullmatch(r"skipless: SIGTERM: saved at step (\d+); continue with --resume", line)[1])
    assert newest_step(folder) == step
    assert Run(folder).checkpoints().latest_valid()[1] == []


@pytest.mark.slow
def test_launchers_of_two_machines_bring_a_run_back(tmp_path, launch, run_tasks, configured, arguments, cache_dir):
    """Only the launcher whose process dies counts a restart; the other follows."""
    folder, reference = tmp_path / "runs" / "killed", tmp_path / "runs" / "reference"
    cfg = configured(KINDS["sharded"], steps=2 * STEPS).model_dump(mode="json")
    run_tasks(2, [("train", {"cfg": cfg, "cache_dir": str(cache_dir), "folder": str(reference)})])
    with socket.socket() as free:
        free.bind(("localhost", 0))
        meeting = f"localhost:{free.getsockname()[1]}"
    options = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", meeting, "--rdzv-id", "two"]
    command = arguments("killed", KINDS["sharded"], steps=2 * STEPS)
    launchers = [
        launch(tmp_path / name, 1, command, *options, "--max-restarts", "3", "--local-addr", "localhost")
        for name in ("one", "other")
    ]
    for launched in launchers:
        step = newest_step(folder)
        launched.wait_until(lambda step=step: newest_step(folder) > step + 4)
        ((rank, pid),) = launched.ranks().items()
        launched.send(rank, signal.SIGKILL)
        launched.wait_until(lambda launched=launched, pid=pid: pid not in launched.ranks().values())
    for launched in launchers:
        assert launched.wait() == 0, launched.text[-4000:]
    assert sum(launched.text.count("going on from step") for launched in launchers) >= 2
    assert_same_run(folder, reference)


def test_bad_input_is_one_line_for_all_processes(tmp_path, launch, arguments):
    launched = launch(tmp_path, 2, arguments("bad", KINDS["ddp"], "--set", "train.lr=-1"))
    assert launched.wait() != 0
    assert len(said(launched.text)) == 1
    of_ours = f'File "{Path(skipless.__file__).parent}'
    assert of_ours not in launched.text  # torchrun has a traceback of its own


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_run_that_is_refused_is_not_gone_on_with_by_a_restart(tmp_path, launch, arguments, size):
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    launched = launch(tmp_path, size, arguments("mine", KINDS["ddp"]), "--max-restarts", "1")
    assert launched.wait() != 0
    assert len(said(launched.text)) == 2
    assert all("exists already" in line for line in said(launched.text))
    assert [path.name for path in folder.iterdir()] == ["config.json"]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        pytest.param(["--lr", "fast"], r"skipless: rank 1: Invalid value for '--lr': .*", marks=pytest.mark.slow),
        pytest.param(["--set", "train.lr=-1"], r"skipless: rank 1: .*train\.lr.*-1.*", marks=pytest.mark.slow),
        (["--name", "other"], r"skipless: rank 1 has another run than rank 0: --name is other and not mine; .*"),
    ],
)
def test_an_option_of_one_rank_alone_is_named(tmp_path, launch, arguments, more, expected):
    command = ["1", json.dumps(more), *arguments("mine", KINDS["ddp"])]
    launched = launch(tmp_path, 2, command, module="tests.helpers.one_rank_differs")
    assert launched.wait() != 0
    (line,) = said(launched.text)
    assert re.fullmatch(expected, line), line
    assert not (tmp_path / "runs").exists()
