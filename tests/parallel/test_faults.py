"""torchrun with processes that are killed, stopped or asked to end."""

import random
import re
import signal
import time

import pytest

from skipless.atomic import STAGING_PREFIX
from skipless.runs import Run
from tests.parallel.launch import Launched
from tests.train.test_resume import names, newest_step
from tests.train.tiny import assert_same_run, tiny, write_config

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
def arguments(tmp_path, source, cache_dir):
    def make(name, parallel, *more, **changes):
        cfg = tiny(source, OFTEN).merge({"parallel": parallel}).merge(changes)
        file = write_config(tmp_path / f"{name}.yaml", cfg)
        where = ["--runs", str(tmp_path / "runs"), "--cache-dir", str(cache_dir)]
        return ["train", "--config", str(file), "--name", name, *where, "--track", "none", *more]

    return make


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
            launched.wait_until(lambda: any(name.startswith(STAGING_PREFIX) for name in names(folder)))
        else:
            time.sleep(rng.uniform(0, 0.05))
        rank = rng.randrange(2)
        pid = launched.send(rank, signal.SIGKILL)
        assert pid is not None
        steps.append(newest_step(folder))
        launched.wait_until(lambda pid=pid, rank=rank: launched.ranks().get(rank, pid) != pid)
    return steps


def kill_and_compare(tmp_path, arguments, kind: str, kills: int, steps: int) -> None:
    options, changes = KINDS[kind], {"train": {"steps": steps}}
    reference = Launched(tmp_path / "reference", 2, arguments("reference", options, **changes))
    assert reference.wait() == 0, reference.text[-4000:]
    command = arguments("killed", options, **changes)
    launched = Launched(tmp_path / "killed", 2, command, "--max-restarts", str(kills + 2))
    folder = tmp_path / "runs" / "killed"
    killed = kill_again_and_again(launched, folder, kills, seed=kills)
    assert launched.wait(1200) == 0, launched.text[-4000:]
    assert launched.text.count("going on from step") >= kills - (killed[0] < 0)
    assert_same_run(folder, tmp_path / "runs" / "reference")
    assert not [name for name in names(folder) if name.startswith(STAGING_PREFIX)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_survives_the_killing_of_ranks(tmp_path, arguments, kind):
    kill_and_compare(tmp_path, arguments, kind, kills=2, steps=STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_survives_ten_kills(tmp_path, arguments, kind):
    kill_and_compare(tmp_path, arguments, kind, kills=10, steps=3 * STEPS)


def test_a_signal_to_one_rank_saves_and_one_that_hangs_is_named(tmp_path, arguments):
    """SIGTERM to the second rank ends all; the run then goes on until the second rank stops answering."""
    folder = tmp_path / "runs" / "asked"
    launched = Launched(tmp_path / "first", 2, arguments("asked", KINDS["ddp"], train={"steps": 10**6}))
    launched.wait_until(lambda: newest_step(folder) >= 4)
    launched.send(1, signal.SIGTERM)
    assert launched.wait() != 0
    (line,) = said(launched.text)
    step = int(re.fullmatch(r"skipless: SIGTERM: saved at step (\d+); go on with --resume auto", line)[1])
    assert newest_step(folder) == step
    assert not any(name.startswith(STAGING_PREFIX) for name in names(folder))

    patience = {"kind": "ddp", "timeout": 8}
    command = arguments("asked", patience, "--resume", "auto", train={"steps": 10**6})
    launched = Launched(tmp_path / "second", 2, command)
    launched.wait_until(lambda: newest_step(folder) > step)
    before = newest_step(folder)
    launched.send(1, signal.SIGSTOP)
    start = time.monotonic()
    launched.wait_until(lambda: said(launched.text), timeout=300)
    assert time.monotonic() - start > 4
    (line,) = said(launched.text)
    pattern = r"skipless: step \d+: rank 1 did not answer within 8 s; the last checkpoint is intact"
    assert re.fullmatch(pattern, line), line
    launched.send(1, signal.SIGKILL)  # else torchrun gives it half a minute
    assert launched.wait() != 0
    assert newest_step(folder) >= before
    assert Run(folder).checkpoints().latest_valid()[1] == []


def test_bad_input_is_one_line_for_all_processes(tmp_path, arguments):
    launched = Launched(tmp_path, 2, arguments("bad", KINDS["ddp"], "--set", "train.lr=-1"))
    assert launched.wait() != 0
    assert len(said(launched.text)) == 1
    assert "Traceback" not in launched.text.split("torch.distributed")[0]
