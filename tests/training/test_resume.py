"""A training that is killed at any instant goes on bit for bit, and one that is asked to stop saves and says so."""

import math
import os
import random
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from skipless import cli
from skipless.config.run import RunConfig
from skipless.data import prepare
from skipless.errors import UserError
from skipless.runs import Run
from skipless.storage.atomic_files import STAGING_PREFIX
from skipless.storage.checkpoints import Checkpoints
from skipless.training.stopping import Interrupted
from skipless.training.train import train
from skipless.training.trainer import Trainer, fit_vocabulary
from tests.helpers.tiny_runs import (
    MASKED,
    Recorder,
    Stop,
    assert_same_run,
    checkpoint_names,
    newest,
    newest_step,
    records,
    state_of,
    steps_kept,
    stop_at,
    tiny,
    write_config,
)

STEPS = 60
# Lines of metrics do not fall on checkpoints, so that half-measured losses are in them.
OFTEN = {
    "train.steps": STEPS,
    "train.eval_every": 20,
    "train.sample_every": 30,
    "train.health_every": 15,
    "train.log_every": 5,
    "train.gains_every": 15,
}
ACCUMULATE = {"train.batch_size": 6, "train.micro_batch": 2, "model.dropout": 0.1}
RAMP = {"train.batch_size": 8, "train.micro_batch": 2, "train.batch_ramp": 0.6}
VARIANTS = {
    "causal": {"train.save_every": 3},
    "accumulation-dropout": {**ACCUMULATE, "train.save_every": 2},
    "ramp": {**RAMP, "train.save_every": 2},
    "masked": {**MASKED, "train.save_every": 1},
    "wsd-average-recompute": {
        "train.schedule": "wsd",
        "train.decay": 20,
        "train.ema": 0.9,
        "train.activation_checkpointing": True,
        "model.dropout": 0.1,
        "train.save_every": 3,
    },
    "muon": {"train.optimizer": "muon", "train.save_every": 3},
    "long": {**RAMP, "model.dropout": 0.1, "train.save_every": 1, "train.steps": 300},
    "long-masked": {**MASKED, "train.save_every": 2, "train.steps": 300},
}


@dataclass(frozen=True)
class Setting:
    """A configuration as a file, and where its runs and its data go."""

    cfg: RunConfig
    file: Path
    runs: Path
    cache_dir: Path

    def arguments(self, name: str, *more: str) -> list[str]:
        where = ["--runs", str(self.runs), "--cache-dir", str(self.cache_dir)]
        return ["train", "--config", str(self.file), "--name", name, *where, "--track", "none", *more]

    def folder(self, name: str) -> Path:
        return self.runs / name


@pytest.fixture(scope="module")
def settings(tmp_path_factory, source, cache_dir):
    """Makes a setting from changes."""

    def make(*changes, **train):
        folder = tmp_path_factory.mktemp("setting")
        cfg = tiny(source, *changes, **train)
        return Setting(cfg, write_config(folder / "config.yaml", cfg), folder / "runs", cache_dir)

    return make


@pytest.fixture(scope="module")
def variant(settings, fork_server):
    """The setting of a variant, with the uninterrupted run that others are held against."""
    made = {}

    def make(name):
        if name not in made:
            setting = settings(OFTEN, VARIANTS[name])
            child = fork_server.start(setting.arguments("reference"))
            assert child.wait() == 0, child.err
            made[name] = setting
        return made[name]

    return make


def staged(folder: Path) -> bool:
    return any(name.startswith(STAGING_PREFIX) for name in checkpoint_names(folder))


def kill_at_random(start, setting: Setting, name: str, kills: int, seed: int) -> None:
    """Train to the end through kills: the first at any time of the start, the others from random steps on."""
    rng, folder = random.Random(seed), setting.folder(name)
    # in the first half, so that it has not come to its end by the time it is killed
    targets = sorted(rng.randrange(1, setting.cfg.train.steps // 2) for _ in range(kills - 1))
    for target in [-1, *targets]:
        reached = -1 if target < 0 else max(target, newest_step(folder) + 1)
        child = start(setting.arguments(name, "--resume"))
        child.wait_until(lambda reached=reached: newest_step(folder) >= reached)
        time.sleep(rng.uniform(0, 0.5 if target < 0 else 0.05))
        child.send(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL, child.err
    child = start(setting.arguments(name, "--resume"))
    assert child.wait() == 0, child.err


def finish(start, setting: Setting, name: str) -> None:
    child = start(setting.arguments(name, "--resume"))
    assert child.wait() == 0, child.err
    assert_same_run(setting.folder(name), setting.folder("reference"))


# ----------------------------------------------------------------------------------------- kills


SELDOM = [pytest.param(name, marks=pytest.mark.slow) for name in ("masked", "accumulation-dropout", "ramp", "muon")]


@pytest.mark.parametrize("name", ["causal", "wsd-average-recompute", *SELDOM])
def test_killed_at_random_it_ends_as_if_it_had_not_been(variant, fork_server, name):
    setting = variant(name)
    kill_at_random(fork_server.start, setting, "killed", kills=4, seed=len(name))
    assert_same_run(setting.folder("killed"), setting.folder("reference"))


def test_all_generators_of_a_checkpoint_start_from_the_seed(source, cache_dir):
    cfg = tiny(source)
    corpus = prepare(cfg.data, cache_dir=cache_dir)
    found = []
    for number in (1, 2):
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(number)
        found.append(Trainer(fit_vocabulary(cfg, corpus), corpus).description()["rng"])
    assert found[0] == found[1]


def test_the_time_left_is_from_the_steps_of_this_session(source, cache_dir, tmp_path):
    """Before it, the machine may have been busy."""
    cfg = tiny(source, {"train.steps": 8})
    corpus = prepare(cfg.data, cache_dir=cache_dir)
    trainer = Trainer(fit_vocabulary(cfg, corpus), corpus)
    assert math.isnan(trainer.seconds_left())
    trainer.state.step, trainer.state.seconds = 4, 4000.0
    assert trainer.seconds_left() == 4000.0
    Checkpoints(tmp_path).save(4, trainer.tensors(), trainer.description())
    again = Trainer(fit_vocabulary(cfg, corpus), corpus)
    again.restore(Checkpoints(tmp_path).latest_valid()[0])
    assert math.isnan(again.seconds_left())
    again.state.step, again.state.seconds = 6, 4001.0
    assert again.seconds_left() == 1.0


def test_the_references_exercise_what_they_are_to_show(variant):
    lines = records(variant("ramp").folder("reference"))
    assert {line["batch_size"] for line in lines if "batch_size" in line} == {2, 4, 6, 8}
    assert {key for line in lines for key in line} >= {"loss", "valid_loss", "gains", "health"}
    assert len(list(Run(variant("causal").folder("reference")).samples())) == 2
    assert len(list(newest(variant("muon").folder("reference")).glob("optimizer*.safetensors"))) == 2


def test_killed_inside_a_save(variant, fork_server):
    setting = variant("causal")
    folder = setting.folder("in-saves")
    for _ in range(3):
        child = fork_server.start(setting.arguments("in-saves", "--resume"))
        before = newest_step(folder)
        child.stop_when(lambda before=before: newest_step(folder) > before and staged(folder))
        child.send(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL, child.err
        assert staged(folder)
    finish(fork_server.start, setting, "in-saves")
    assert not staged(folder)


def test_killed_as_a_command(variant, commands):
    setting = variant("causal")
    kill_at_random(commands.start, setting, "command", kills=2, seed=0)
    assert_same_run(setting.folder("command"), setting.folder("reference"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["long", "long-masked"])
def test_thirty_kills_of_a_command(variant, commands, name):
    setting = variant(name)
    kill_at_random(commands.start, setting, "thirty", kills=30, seed=1)
    assert_same_run(setting.folder("thirty"), setting.folder("reference"))


# --------------------------------------------------------------------------------------- signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop_it_saves_and_goes_on_later(variant, fork_server, number):
    setting = variant("causal")
    folder = setting.folder(number.name)
    child = fork_server.start(setting.arguments(number.name))
    child.wait_until(lambda: newest_step(folder) >= 9)
    child.send(number)
    assert child.wait() == 128 + number
    step = newest_step(folder)
    assert child.err == f"skipless: {number.name}: saved at step {step}; continue with --resume\n"
    assert 9 <= step < STEPS
    assert state_of(newest(folder))["step"] == step
    assert Checkpoints.verify(newest(folder)) is None
    assert records(folder)[-1]["step"] <= step
    finish(fork_server.start, setting, number.name)


@pytest.fixture(scope="module")
def evaluating(settings, fork_server):
    """A setting in which evaluations are long and steps are short, with its uninterrupted run."""
    setting = settings(steps=10, save_every=1, eval_every=1, eval_rows=2000, log_every=1)
    child = fork_server.start(setting.arguments("reference"))
    assert child.wait() == 0, child.err
    return setting


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop_while_it_evaluates(evaluating, fork_server, number):
    setting, name = evaluating, f"stopped-{number.name}"
    child, folder = fork_server.start(setting.arguments(name)), setting.folder(name)

    def evaluates() -> bool:
        """The line of a step is written before its evaluation, and that of the evaluation after it."""
        return newest_step(folder) >= 2 and "valid_loss" not in records(folder)[-1]

    child.stop_when(evaluates)
    child.send(number)
    child.send(signal.SIGCONT)
    assert child.wait() == 128 + number
    # The evaluation of the last step is not in the checkpoint, so it was left in the middle.
    state = state_of(newest(folder))
    assert state["evaluated"] < state["step"] == newest_step(folder)
    finish(fork_server.start, setting, name)


@pytest.mark.parametrize("step", [4, 8])
def test_asked_to_stop_between_the_two_held_out_losses_it_loses_neither(tmp_path, source, cache_dir, monkeypatch, step):
    """Half-way, and at the end, where nothing but the second loss is missing."""
    cfg = tiny(source, steps=8, eval_every=4, tuning_rows=8)
    train(cfg, tmp_path / "reference", trackers=[], cache_dir=cache_dir)
    evaluate = Trainer.evaluate_for_tuning

    def signalled(trainer, between):
        if trainer.state.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(trainer, between)

    monkeypatch.setattr(Trainer, "evaluate_for_tuning", signalled)
    with pytest.raises(Interrupted):
        train(cfg, tmp_path / "run", trackers=[], cache_dir=cache_dir)
    monkeypatch.undo()
    assert steps_kept(tmp_path / "run")[-1] == step
    train(cfg, tmp_path / "run", resume=True, trackers=[], cache_dir=cache_dir)
    assert [record["step"] for record in records(tmp_path / "run") if "tuning_loss" in record] == [0, 4, 8]
    assert_same_run(tmp_path / "run", tmp_path / "reference")


def test_a_second_interrupt_ends_it_at_once(settings, fork_server):
    setting = settings(steps=2, batch_size=20_000, micro_batch=1, eval_every=0)
    child = fork_server.start(setting.arguments("stubborn"))
    child.wait_until(lambda: "parameters on cpu" in child.out)
    said = child.cpu_seconds()
    child.wait_until(lambda: child.cpu_seconds() > said + 0.3)  # now it is in its first step, which takes many seconds
    child.send(signal.SIGINT)
    time.sleep(0.3)
    assert child.poll() is None
    while child.poll() is None:  # two that come before the first was seen are one
        child.send(signal.SIGINT)
        time.sleep(0.1)
    assert child.status == 130
    # at the end of the step it would have saved, and said so
    assert newest_step(setting.folder("stubborn")) == -1
    assert child.err == ""


# ------------------------------------------------------------------------- what may be gone on with


def test_to_resume_a_finished_run_changes_nothing(variant, fork_server):
    setting = variant("causal")
    shutil.copytree(setting.folder("reference"), setting.folder("finished"))
    made = [setting.folder("finished") / name for name in ("metrics.jsonl", "samples.jsonl")]
    made += [path for path in (setting.folder("finished") / "checkpoints").rglob("*") if path.is_file()]
    before = {path: (path.stat().st_ino, path.read_bytes()) for path in made}
    finish(fork_server.start, setting, "finished")
    assert {path: (path.stat().st_ino, path.read_bytes()) for path in made} == before
    assert steps_kept(setting.folder("finished")) == steps_kept(setting.folder("reference"))


def test_to_resume_a_finished_run_removes_what_a_crash_left(variant, fork_server):
    setting = variant("causal")
    shutil.copytree(setting.folder("reference"), setting.folder("crashed"))
    checkpoints = setting.folder("crashed") / "checkpoints"
    newest = max(checkpoints.glob("step-*"))
    shutil.copytree(newest, checkpoints / f".old-{newest.name}")
    (checkpoints / f".tmp-{newest.name}").mkdir()
    finish(fork_server.start, setting, "crashed")
    names = {path.name for path in (setting.folder("reference") / "checkpoints").iterdir()}
    assert {path.name for path in checkpoints.iterdir()} == names


def test_to_resume_what_is_not_there_is_to_begin(tmp_path, source, cache_dir):
    cfg, seen = tiny(source), Recorder()
    train(cfg, tmp_path / "plain", trackers=[], cache_dir=cache_dir)
    train(cfg, tmp_path / "resumed", resume=True, trackers=[], cache_dir=cache_dir, observer=seen)
    assert seen.messages == []
    assert seen.records[0]["step"] == 0
    assert_same_run(tmp_path / "resumed", tmp_path / "plain")


@pytest.fixture
def unfinished(settings, cache_dir):
    """A run of 12 steps that was left at the ninth; its newest checkpoint is of the eighth."""
    setting = settings()
    with pytest.raises(Stop):
        train(setting.cfg, setting.folder("run"), trackers=[], cache_dir=cache_dir, observer=stop_at(9))
    assert steps_kept(setting.folder("run")) == [4, 8]
    return setting


def test_a_run_that_exists_is_not_written_over(unfinished, capsys):
    assert cli.run(unfinished.arguments("run")) == 2
    assert "exists already: continue with --resume" in capsys.readouterr().err
    assert steps_kept(unfinished.folder("run")) == [4, 8]


def test_a_run_that_was_trained_while_data_was_prepared_is_not_written_over(tmp_path, source, cache_dir):
    cfg, folder, before = tiny(source), tmp_path / "run", {}

    class SlowPreparation(Recorder):
        def data(self, stage, done, total):
            if not before:
                before["started"] = b""
                train(cfg, folder, trackers=[], cache_dir=cache_dir)
                before.update({path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()})

    with pytest.raises(UserError, match="exists already: continue with --resume"):
        train(cfg, folder, trackers=[], cache_dir=tmp_path / "empty", observer=SlowPreparation())
    for name in ("config.json", "metrics.jsonl", "samples.jsonl"):
        assert (folder / name).read_bytes() == before[name], name
    assert steps_kept(folder)[-1] == 12
    train(cfg, folder, resume=True, trackers=[], cache_dir=cache_dir)


@pytest.mark.parametrize("lost", [["config.json"], ["config.json", "metrics.jsonl"], ["config.json", "checkpoints"]])
def test_what_is_left_of_a_run_is_not_written_over(unfinished, capsys, lost):
    folder = unfinished.folder("run")
    for name in lost:
        shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()
    left = sorted(path.name for path in folder.rglob("*"))
    assert cli.run(unfinished.arguments("run")) == 2
    assert "exists already" in capsys.readouterr().err
    assert sorted(path.name for path in folder.rglob("*")) == left


def test_another_configuration_is_refused_with_both_values(unfinished, capsys):
    before = (unfinished.folder("run") / "config.json").read_bytes()
    other = ["--resume", "--steps", "16", "--set", "train.clip=null"]
    assert cli.run(unfinished.arguments("run", *other)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("skipless: ")
    assert "train.steps: 12 → 16" in line
    assert "train.clip: 1.0 → None" in line
    assert "--accept-changes" in line
    assert (unfinished.folder("run") / "config.json").read_bytes() == before
    assert steps_kept(unfinished.folder("run")) == [4, 8]


def test_another_configuration_can_be_accepted(unfinished):
    folder = unfinished.folder("run")
    assert cli.run(unfinished.arguments("run", "--resume", "--steps", "16", "--accept-changes")) == 0
    assert Run(folder).config().train.steps == 16
    assert [record["step"] for record in records(folder) if "loss" in record] == [3, 6, 9, 12, 15, 16]


@pytest.mark.parametrize(
    ("key", "value"),
    [("model.n_layer", 3), ("model.d_model", 64), ("train.optimizer", "muon"), ("model.block", "pre-ln")],
)
def test_changes_that_do_not_fit_the_checkpoint_are_refused(unfinished, capsys, key, value):
    before = (unfinished.folder("run") / "config.json").read_bytes()
    other = ["--resume", "--set", f"{key}={value}", "--accept-changes"]
    assert cli.run(unfinished.arguments("run", *other)) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert (unfinished.folder("run") / "config.json").read_bytes() == before


def random_words(seed: int) -> str:
    """Text with so many words that any vocabulary gets full."""
    rng = random.Random(seed)
    return " ".join("".join(rng.choices("abcdefghij", k=5)) for _ in range(4000))


def test_other_data_is_refused_and_leaves_the_run_as_it_was(tmp_path, capsys):
    for name, seed in (("train.txt", 1), ("valid.txt", 2)):
        (tmp_path / name).write_text(random_words(seed))
    sources = {"data.valid_source": f"files:{tmp_path}/valid.txt", "data.valid_fraction": 0.0}
    cfg = tiny(f"files:{tmp_path}/train.txt", sources)
    with pytest.raises(Stop):
        train(cfg, tmp_path / "run", trackers=[], cache_dir=tmp_path / "cache", observer=stop_at(9))
    kept = ("config.json", "tokenizer.json", "metrics.jsonl")
    before = {name: (tmp_path / "run" / name).read_bytes() for name in kept}
    (tmp_path / "train.txt").write_text(random_words(3))
    where = ["--runs", str(tmp_path), "--cache-dir", str(tmp_path / "cache"), "--track", "none"]
    file = write_config(tmp_path / "config.yaml", cfg)
    assert cli.run(["train", "--config", str(file), "--name", "run", "--resume", *where]) == 2
    assert "was trained on other data" in capsys.readouterr().err
    for name, content in before.items():
        assert (tmp_path / "run" / name).read_bytes() == content, name


def test_one_process_at_a_time(variant, fork_server):
    setting = variant("causal")
    folder = setting.folder("shared")
    first = fork_server.start(setting.arguments("shared"))
    first.wait_until(lambda: newest_step(folder) >= 3)
    os.kill(first.pid, signal.SIGSTOP)  # it lives, and is slow enough for the second to come
    second = fork_server.start(setting.arguments("shared", "--resume"))
    assert second.wait() == 4
    assert second.err.startswith("skipless: ")
    assert f"is in use by process {first.pid}; wait for it to end, or stop it" in second.err
    assert second.err.count("\n") == 1
    first.send(signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    finish(fork_server.start, setting, "shared")


def test_the_setting_is_what_the_command_reads(variant):
    setting = variant("causal")
    found = Run(setting.folder("reference")).config()
    assert found == setting.cfg.override({"model.vocab_size": found.model.vocab_size})
