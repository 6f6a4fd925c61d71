"""Damaged files, full disks, losses that are not finite, and services that fail: nothing of it costs a run."""

import errno
import json
import os
import pickle
import random
import resource
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from skipless.analysis.evaluation import Evaluation
from skipless.runs import Run
from skipless.storage.atomic_files import FolderLost
from skipless.storage.checkpoints import Checkpoints
from skipless.storage.journal import Journal
from skipless.training import trackers
from skipless.training.stopping import NonFinite
from skipless.training.train import NoValidCheckpoint, train
from tests.helpers.tiny_runs import (
    Recorder,
    Stop,
    assert_same_run,
    newest,
    records,
    steps_kept,
    stop_at,
    tiny,
    write_config,
    write_text,
)

FILES = ["manifest.json", "model.safetensors", "optimizer0.safetensors", "state.json"]


@pytest.fixture(scope="module")
def reference(tmp_path_factory, source, cache_dir):
    """The folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    train(tiny(source), folder, trackers=[], cache_dir=cache_dir)
    return folder


@pytest.fixture(scope="module")
def left(tmp_path_factory, source, cache_dir):
    """The folder of a run that was left at step 9, with checkpoints of steps 4 and 8."""
    folder = tmp_path_factory.mktemp("left") / "run"
    with pytest.raises(Stop):
        train(tiny(source), folder, trackers=[], cache_dir=cache_dir, observer=stop_at(9))
    assert steps_kept(folder) == [4, 8]
    return folder


@pytest.fixture
def run(tmp_path, left):
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(left, tmp_path / "run"))


def go_on(folder, source, cache_dir) -> Recorder:
    seen = Recorder()
    train(tiny(source), folder, resume=True, trackers=[], cache_dir=cache_dir, observer=seen)
    return seen


# ------------------------------------------------------------------------------------- checkpoints


class MakesFile:
    """Its pickle makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path: Path) -> None:
    rng, data = random.Random(path.name), bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def replace_by_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps(MakesFile(path.parents[3] / "marker")))


DAMAGES = [truncate, flip_a_bit, Path.unlink, replace_by_pickle]


def test_the_pickle_would_make_the_file(tmp_path):
    pickle.loads(pickle.dumps(MakesFile(tmp_path / "marker")))  # noqa: S301
    assert (tmp_path / "marker").exists()


def test_an_unfinished_run_goes_on_from_the_newest(run, reference, source, cache_dir):
    assert go_on(run, source, cache_dir).messages == ["going on from step 8"]
    assert_same_run(run, reference)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_passed_over(run, reference, source, cache_dir, damage, name):
    assert sorted(path.name for path in newest(run).iterdir()) == FILES
    damage(newest(run) / name)
    skipped, going_on = go_on(run, source, cache_dir).messages
    assert skipped.startswith("skipped the damaged checkpoint step-00000008: ")
    assert name in skipped
    assert going_on == "going on from step 4"
    assert_same_run(run, reference)
    assert not (run.parent / "marker").exists()


def all_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def without_notes(run: Path) -> None:
    """As an earlier version left it."""
    (run / ".saved").unlink()


LOSSES = {
    "truncated": lambda run: [truncate(path / "model.safetensors") for path in Run(run).checkpoints().all()],
    "pickled": lambda run: [replace_by_pickle(path / "model.safetensors") for path in Run(run).checkpoints().all()],
    "gone": lambda run: shutil.rmtree(run / "checkpoints"),
    "emptied": lambda run: [shutil.rmtree(path) for path in Run(run).checkpoints().all()],
    "gone-of-an-earlier-version": lambda run: [without_notes(run), shutil.rmtree(run / "checkpoints")],
}


@pytest.mark.parametrize("loss", LOSSES)
def test_with_no_valid_checkpoint_left_it_stops_and_changes_nothing(run, source, cache_dir, loss):
    LOSSES[loss](run)
    before = all_files(run)
    with pytest.raises(NoValidCheckpoint) as caught:
        go_on(run, source, cache_dir)
    assert caught.value.status == 3
    text = str(caught.value)
    named = ["checkpoints is gone"] if "gone" in loss or loss == "emptied" else ["step-00000004: ", "step-00000008: "]
    for part in (str(run), *named, "begin again", "--name"):
        assert part in text
    assert {name: content for name, content in all_files(run).items() if name != ".lock"} == {
        name: content for name, content in before.items() if name != ".lock"
    }
    assert not (run.parent / "marker").exists()


def test_a_run_that_was_killed_before_its_first_save_begins_again(tmp_path, reference, source, cache_dir):
    with pytest.raises(Stop):
        train(tiny(source), tmp_path / "run", trackers=[], cache_dir=cache_dir, observer=stop_at(3))
    assert records(tmp_path / "run")
    assert go_on(tmp_path / "run", source, cache_dir).messages == []
    assert_same_run(tmp_path / "run", reference)


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
@pytest.mark.parametrize("size", [None, 0, 10, 150])
def test_lines_that_were_lost_are_said_and_it_goes_on(tmp_path, left, reference, source, cache_dir, name, size):
    run = Path(shutil.copytree(left, tmp_path / "run"))
    before = (run / name).read_bytes()
    if size is None:
        (run / name).unlink()
    else:
        os.truncate(run / name, min(size, len(before)))
    messages = go_on(run, source, cache_dir).messages
    assert_same_checkpoint_but_for_lines(newest(run), newest(reference))
    lines = (run / name).read_bytes().splitlines(keepends=True)
    whole = before[: size or 0].count(b"\n")
    if name == "metrics.jsonl":
        assert len(messages) == 2
        assert messages[1].startswith(f"{run / name} has {size or 0} bytes and had ")
        assert lines[:whole] == before.splitlines(keepends=True)[:whole]
        later = [record["step"] for record in map(json.loads, lines[whole:])]
        assert later == [record["step"] for record in records(reference) if record["step"] > 8]
    else:
        assert messages == ["going on from step 8"]  # there were none yet


def assert_same_checkpoint_but_for_lines(folder: Path, reference: Path) -> None:
    assert folder.name == reference.name
    for name in ("model.safetensors", "optimizer0.safetensors"):
        assert (folder / name).read_bytes() == (reference / name).read_bytes()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"config": {"task": "x"}}',
        b"\xff\xfe",
    ],
)
def test_a_damaged_config_is_refused(run, source, cache_dir, content):
    (run / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.json"):
        go_on(run, source, cache_dir)
    assert steps_kept(run) == [4, 8]


# -------------------------------------------------------------------------------------------- data


@pytest.mark.parametrize("name", ["train.bin", "valid.bin", "tokenizer.json", "manifest.json"])
def test_a_damaged_cache_is_built_again(tmp_path, run, reference, source, cache_dir, name):
    copy = Path(shutil.copytree(cache_dir, tmp_path / "cache"))
    for file in copy.glob(f"*/{name}"):
        truncate(file)
    seen = go_on(run, source, copy)
    assert any(stage.startswith("rebuild: ") and name in stage for stage in seen.stages)
    assert_same_run(run, reference)


def test_a_lost_cache_is_built_again(tmp_path, run, reference, source):
    assert go_on(run, source, tmp_path / "empty").stages[0].startswith("train tokenizer")
    assert_same_run(run, reference)


# --------------------------------------------------------------------------------------- full disk


@pytest.fixture
def training(tmp_path, source, cache_dir, fork_server):
    """Starts a training in a process: how, and where its run is."""

    def make(folder=tmp_path, **changes):
        cfg = tiny(source, {"model.d_model": 64}, **changes)
        file = write_config(tmp_path / "config.yaml", cfg)
        where = ["--runs", str(folder), "--cache-dir", str(cache_dir), "--track", "none", "--resume"]
        return lambda: fork_server.start(["train", "--config", str(file), "--name", "run", *where]), folder / "run"

    return make


def assert_stopped_by_a_full_disk(child, folder: Path) -> list[int]:
    assert child.wait() == 3, child.err
    assert child.err.startswith("skipless: ")
    assert child.err.count("\n") == 1
    for path in Run(folder).checkpoints().all():
        assert Checkpoints.verify(path) is None
    assert not list(folder.glob("checkpoints/.tmp-*"))
    return steps_kept(folder)


def test_a_checkpoint_that_does_not_fit_leaves_the_earlier_ones(training):
    start, folder = training(steps=600, save_every=10, eval_every=0)
    child = start()
    child.wait_until(lambda: len(steps_kept(folder)) >= 2)
    resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    kept = assert_stopped_by_a_full_disk(child, folder)
    assert "no room for the checkpoint of step " in child.err
    assert "File too large" in child.err
    assert 2 <= len(kept) <= 3
    again = start()
    again.wait_until(lambda: steps_kept(folder)[-1] > kept[-1])
    assert f"going on from step {kept[-1]}\n" in again.out


def test_a_line_of_metrics_that_does_not_fit_ends_the_same_way(training):
    start, folder = training(steps=3000, save_every=100, log_every=1, eval_every=0)
    child = start()
    child.wait_until(lambda: len(steps_kept(folder)) >= 1)
    full = (folder / "metrics.jsonl").stat().st_size + 2000
    resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (full, resource.RLIM_INFINITY))
    assert assert_stopped_by_a_full_disk(child, folder)
    assert "no room for " in child.err
    assert "metrics.jsonl" in child.err


def test_a_disk_that_is_full_from_the_start_is_said_in_a_line(training, fork_server):
    start, folder = training()
    server = fork_server.server.pid  # whose children have its limits from the first instant on
    before = resource.prlimit(server, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    child = start()
    resource.prlimit(server, resource.RLIMIT_FSIZE, before)
    assert assert_stopped_by_a_full_disk(child, folder) == []
    assert "File too large" in child.err


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 18 MB, of which a checkpoint wants 16 MB to stay free; resizes it."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=18m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a file system can only be mounted by root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_fills_up(training, small_disk):
    start, folder = training(small_disk, steps=40, save_every=2, keep_last=100, eval_every=0)
    child = start()
    kept = assert_stopped_by_a_full_disk(child, folder)
    assert "MB are free" in child.err
    assert 0 < kept[-1] < 40
    subprocess.run(["mount", "-o", "remount,size=100m", str(small_disk)], check=True)
    again = start()
    assert again.wait() == 0, again.err
    assert f"going on from step {kept[-1]}\n" in again.out
    assert steps_kept(folder)[-1] == 40


def test_a_folder_that_vanishes_is_status_3_and_is_not_made_again(tmp_path, source, cache_dir):
    folder = tmp_path / "run"
    seen = Recorder(on_log=lambda record: shutil.rmtree(folder) if record["step"] == 3 else None)
    with pytest.raises(FolderLost, match=r"run' is no longer there, so step 4 is not saved") as caught:
        train(tiny(source), folder, trackers=[], cache_dir=cache_dir, observer=seen)
    assert caught.value.status == 3
    assert not folder.exists()


def test_a_folder_that_becomes_read_only_is_status_3(tmp_path, source, cache_dir, monkeypatch):
    def refuse(self):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(tmp_path / "metrics.jsonl"))

    monkeypatch.setattr(Journal, "position", refuse)
    with pytest.raises(FolderLost, match=r"cannot be written to: Read-only file system \(.*metrics\.jsonl\)") as caught:
        train(tiny(source), tmp_path / "run", trackers=[], cache_dir=cache_dir)
    assert caught.value.status == 3


def test_a_disk_that_is_read_only_from_the_start(training, small_disk):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    start, folder = training(small_disk)
    child = start()
    assert child.wait() == 3
    assert child.err.startswith(f"skipless: {str(folder)!r} cannot be written to: Read-only file system")
    assert child.err.count("\n") == 1


# ------------------------------------------------------------------------------------- not finite


def weights(trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def train_until_not_finite(cfg, folder, cache_dir, spoil) -> tuple[str, dict, Recorder]:
    """The message, the weights as they were before the step that failed, and the observer."""
    before = {}

    def begin(trainer):
        spoil(trainer)
        step = trainer.step

        def watched():
            before.update(weights(trainer))
            return step()

        trainer.step = watched

    seen = Recorder(on_begin=begin)
    with pytest.raises(NonFinite) as caught:
        train(cfg, folder, trackers=[], cache_dir=cache_dir, observer=seen)
    assert caught.value.status == 3
    return str(caught.value), before, seen


def assert_nothing_was_lost(folder: Path, before: dict, seen: Recorder) -> None:
    after = weights(seen.trainer)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    assert steps_kept(folder)[-1] == 4
    assert Checkpoints.verify(newest(folder)) is None
    assert all(tensor.isfinite().all() for tensor in Checkpoints.load(newest(folder)).tensors("model").values())


BAD_GRADIENTS = {"layer 1": "blocks.0.", "layer 2": "blocks.1.", "layer 3": "blocks.2.", "embedding": "embedding."}


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("where", ["layer 1", "layer 2", "embedding"])
def test_a_gradient_that_is_not_finite(tmp_path, source, cache_dir, where, clip):
    def spoil(trainer):
        name, parameter = next(
            (name, p) for name, p in trainer.model.named_parameters() if name.startswith(BAD_GRADIENTS[where])
        )
        assert parameter.requires_grad, name
        parameter.register_hook(lambda grad: grad * float("nan") if trainer.state.step == 4 else grad)

    cfg = tiny(source, {"model.n_layer": 3}, clip=clip)
    message, before, seen = train_until_not_finite(cfg, tmp_path, cache_dir, spoil)
    assert message.startswith(f"step 5: the gradient's norm is nan, first in {where}")
    assert message.endswith("the update was not made")
    assert_nothing_was_lost(tmp_path, before, seen)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("layer", [1, 2, 3])
def test_a_loss_that_is_not_finite(tmp_path, source, cache_dir, layer, value):
    cfg = tiny(source, {"model.n_layer": 3}, eval_every=0)

    def spoil(trainer):
        step = trainer.step

        def spoiled():
            if trainer.state.step == 5:
                next(trainer.model.blocks[layer - 1].mlp.parameters()).data.fill_(value)
            return step()

        trainer.step = spoiled

    with pytest.raises(NonFinite, match=rf"^step 6: the loss is (nan|inf), first in layer {layer}; the update was not"):
        train(cfg, tmp_path, trackers=[], cache_dir=cache_dir, observer=Recorder(on_begin=spoil))
    assert steps_kept(tmp_path) == [4]
    assert Checkpoints.verify(newest(tmp_path)) is None
    assert [record["step"] for record in records(tmp_path)] == [3]


def test_a_held_out_loss_that_is_not_finite(tmp_path, source, cache_dir):
    def spoil(trainer):
        loss = {8: float("nan")}
        trainer.evaluate = lambda between: Evaluation(loss.get(trainer.state.step, 1.0), 1.0, None, 1, 1)

    with pytest.raises(NonFinite, match=r"^step 8: the held-out loss is nan"):
        train(tiny(source), tmp_path, trackers=[], cache_dir=cache_dir, observer=Recorder(on_begin=spoil))
    assert steps_kept(tmp_path) == [4]
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


def test_weights_that_are_not_finite_are_not_saved(tmp_path, source, cache_dir):
    def spoil(trainer):
        whole_step = trainer.step

        def step():
            measured = whole_step()
            if trainer.state.step == 8:
                trainer.model.embedding.weight.data[0, 0] = float("inf")
            return measured

        trainer.step = step

    cfg = tiny(source, eval_every=0)
    with pytest.raises(NonFinite, match=r"^step 8: embedding\.weight is not finite"):
        train(cfg, tmp_path, trackers=[], cache_dir=cache_dir, observer=Recorder(on_begin=spoil))
    assert steps_kept(tmp_path) == [4]


def test_a_learning_rate_that_is_too_high_stops_with_status_3(tmp_path, source, cache_dir, fork_server):
    cfg = tiny(source, lr=1e30, clip=None, eval_every=0)
    file = write_config(tmp_path / "config.yaml", cfg)
    where = ["--runs", str(tmp_path), "--cache-dir", str(cache_dir), "--track", "none"]
    child = fork_server.start(["train", "--config", str(file), "--name", "run", *where])
    assert child.wait() == 3
    assert child.err.startswith("skipless: step ")
    assert "the update was not made" in child.err
    assert child.err.count("\n") == 1


# -------------------------------------------------------------------------------------- trackers


def failing_tracker(*fails: str) -> tuple[type, list[str]]:
    """A tracker that raises in the named methods, and the list of what was called."""
    calls = []

    def act(name):
        calls.append(name)
        if name in fails:
            raise RuntimeError(f"no network in {name}")

    class Failing:
        def __init__(self, *_):
            act("init")

        def log(self, *_):
            act("log")

        def text(self, *_):
            act("text")

        def close(self):
            act("close")

    return Failing, calls


@pytest.mark.parametrize(
    ("fails", "called"),
    [
        (["init", "log", "text", "close"], ["init"]),
        (["log", "text", "close"], ["init", "log"]),
        (["text", "close"], ["init", *["log"] * 4, "text"]),
        (["close"], None),
    ],
    ids=["init", "log", "text", "close"],
)
def test_a_tracker_that_fails_is_dropped_and_named_once(
    tmp_path, monkeypatch, reference, source, cache_dir, fails, called
):
    kind, calls = failing_tracker(*fails)
    monkeypatch.setitem(trackers.TRACKERS, "tensorboard", kind)
    seen = Recorder()
    cfg = tiny(source, sample_every=6)
    train(cfg, tmp_path / "run", trackers=["tensorboard"], cache_dir=cache_dir, observer=seen)
    assert seen.messages == [f"tensorboard was dropped: no network in {fails[0]}"]
    assert called is None or calls == called
    assert calls.count("close") == (fails == ["close"])
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == len(seen.records)
    assert steps_kept(tmp_path / "run")[-1] == 12


def test_one_tracker_that_fails_leaves_the_others(tmp_path, monkeypatch, source, cache_dir):
    failing, _ = failing_tracker("init")
    working, calls = failing_tracker()
    monkeypatch.setitem(trackers.TRACKERS, "json", failing)  # a package that is there
    monkeypatch.setitem(trackers.TRACKERS, "tensorboard", working)
    seen = Recorder()
    train(tiny(source), tmp_path / "run", trackers=["json", "tensorboard"], cache_dir=cache_dir, observer=seen)
    assert seen.messages == ["json was dropped: no network in init"]
    assert calls.count("log") == len(seen.records)
    assert calls[-1] == "close"


def test_other_text_is_other_text(tmp_path, source):
    """The corpora of these tests do depend on their seed, so that equal runs are no accident."""
    other = write_text(tmp_path / "text", seed=1)
    first, second = (sorted(Path(glob).parent.glob("*.py"))[0] for glob in (source[6:], other[6:]))
    assert first.name == second.name
    assert first.read_text() != second.read_text()
