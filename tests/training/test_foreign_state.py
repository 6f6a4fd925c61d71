"""A checkpoint whose files are whole and whose state is not that of the training: a line, and nothing is changed."""

import json
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from skipless import cli
from skipless.data import prepare
from skipless.errors import UserError
from skipless.runs import Run
from skipless.storage.manifest import FileEntry, Manifest
from skipless.training.train import train
from skipless.training.trainer import Trainer, fit_vocabulary
from tests.helpers.tiny_runs import Stop, newest, stop_at, tiny, write_config

ODD = [None, True, -1, 1.5, 10**30, float("nan"), "", "x", "zz" * 9, [], {}, [[]], {"a": 1}, [None], ["x"]]


@pytest.fixture
def run(tmp_path, source, cache_dir):
    """A run that was left before its end."""
    with pytest.raises(Stop):
        train(tiny(source), tmp_path / "run", trackers=[], cache_dir=cache_dir, observer=stop_at(9))
    return Run(tmp_path / "run")


def seal(checkpoint) -> None:
    """Make a manifest that agrees with whatever the files hold now."""
    about, files = Manifest.read(checkpoint).about, Manifest.read(checkpoint).files
    Manifest(about, {name: FileEntry.of(checkpoint / name) for name in files}).write(checkpoint)


def lacks(*keys):
    def change(state):
        for key in keys[:-1]:
            state = state[key]
        del state[keys[-1]]

    return change


def has(value, *keys):
    def change(state):
        for key in keys[:-1]:
            state = state[key]
        state[keys[-1]] = value

    return change


CHANGES = {
    "empty": lambda state: state.clear(),
    "no counters": lacks("state"),
    "a counter that is text": has("x", "state", "tokens"),
    "a counter of another version": has(1, "state", "unknown"),
    "another step": has(7, "state", "step"),
    "no optimiser": lacks("optimizers"),
    "an optimiser that is a number": has(5, "optimizers"),
    "parameters that are a list": has([], "optimizers", 0, "parameters"),
    "no generators": lacks("rng"),
    "a generator of another size": has("00", "rng", "torch"),
    "a generator that is a list": has([], "rng", "numpy", "words"),
    "no positions": lacks("journals", "samples"),
    "a position before the beginning": has(-5, "journals", "metrics"),
    "a position that is text": has("9", "journals", "metrics"),
}


def resume(run, source, cache_dir, capsys) -> str:
    """What the command says that cannot resume a run, which it leaves as it was."""
    kept = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file() and path.name != ".lock"}
    file = write_config(run.folder.parent / "config.yaml", tiny(source))
    where = ["--runs", str(run.folder.parent), "--cache-dir", str(cache_dir), "--track", "none"]
    capsys.readouterr()
    assert cli.run(["train", "--config", str(file), "--name", "run", "--resume", *where]) == 2
    assert {path: path.read_bytes() for path in kept} == kept
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("name", CHANGES)
def test_a_state_that_is_not_that_of_the_training(run, source, cache_dir, capsys, name):
    checkpoint = newest(run.folder)
    state = json.loads((checkpoint / "state.json").read_text())
    CHANGES[name](state)
    (checkpoint / "state.json").write_text(json.dumps(state))
    seal(checkpoint)
    assert checkpoint.name in resume(run, source, cache_dir, capsys)


def test_what_an_optimiser_remembers_of_another_shape(run, source, cache_dir, capsys):
    checkpoint = newest(run.folder)
    tensors = load_file(checkpoint / "optimizer0.safetensors")
    name = next(name for name, tensor in tensors.items() if tensor.dim() == 2)
    tensors[name] = torch.zeros(3, 5)
    save_file(tensors, checkpoint / "optimizer0.safetensors")
    seal(checkpoint)
    assert f"has {name} of 3 × 5, and the parameter is" in resume(run, source, cache_dir, capsys)


def places(content):
    pairs = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in pairs:
        yield content, key
        yield from places(value)


def test_any_part_of_a_state_can_be_odd(run, source, cache_dir):
    """It is restored, or refused with an error for people."""
    cfg = tiny(source)
    corpus = prepare(cfg.data, cache_dir=cache_dir)
    trainer = Trainer(fit_vocabulary(cfg, corpus), corpus)
    checkpoint, _ = run.checkpoints().latest_valid()
    text = json.dumps(checkpoint.state)
    count = len(list(places(checkpoint.state)))

    @settings(max_examples=150, database=None)
    @given(st.integers(0, count - 1), st.sampled_from(ODD))
    def restore(place, value):
        state = json.loads(text)
        holder, key = list(places(state))[place]
        holder[key] = value
        with suppress(UserError):
            trainer.restore(replace(checkpoint, state=state))

    restore()
    trainer.restore(checkpoint)
    assert trainer.state.step == checkpoint.step
