"""Checkpoints survive kills, full disks and damage, restore bit for bit, and never touch pickle."""

import errno
import io
import itertools
import json
import multiprocessing
import os
import pickle
import random
import resource
import shutil
import sys
import threading
import time

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from skipless.errors import UserError
from skipless.storage import atomic_files as files
from skipless.storage import checkpoints as checkpoints_module
from skipless.storage import tensors as tensors_module
from skipless.storage.atomic_files import DiskFull, sweep
from skipless.storage.checkpoints import Checkpoints
from skipless.storage.hashing import hash_file, hash_text
from skipless.storage.saver import BackgroundSaver
from skipless.training.state import load_optimizer, optimizer_tensors, rng_state, set_rng_state

# Children are forked from a clean process that has PyTorch loaded already: quick, and free of this one's threads.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["skipless.storage.checkpoints"])

FILES = ["manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"]


@pytest.fixture(autouse=True)
def no_pickle(monkeypatch):
    """Reading a pickle is an error in every test of this file."""

    def refuse(*_, **__):
        raise AssertionError("a pickle was read")

    for module, name in [(pickle, "load"), (pickle, "loads"), (torch, "load")]:
        monkeypatch.setattr(module, name, refuse)
    # Still a class, for parts of PyTorch that are loaded late derive their own from it.
    monkeypatch.setattr(pickle, "Unpickler", type("Unpickler", (pickle.Unpickler,), {"load": refuse}))


def content(step, version=0, size=64):
    """Tensors that can be told from those of every other step and version."""
    weights = torch.arange(size * size, dtype=torch.float32).reshape(size, size) + 10 * step + version
    return {"model": {"w": weights, "b": weights[0].bfloat16()}, "optimizer": {"w/step": torch.tensor(float(step))}}


def save(checkpoints, step, version=0, score=None):
    return checkpoints.save(step, content(step, version), {"step": step, "version": version}, score)


def assert_as_saved(found):
    assert found.state["step"] == found.step
    for stem, named in content(found.step, found.state["version"]).items():
        assert_equal(found.tensors(stem), named)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name], tensor), name


def names(checkpoints):
    return sorted(entry.name for entry in checkpoints.folder.iterdir())


def steps(checkpoints):
    return [int(path.name.removeprefix("step-")) for path in checkpoints.all()]


# Round trips


def test_a_checkpoint_comes_back_as_it_was_saved(tmp_path):
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    assert checkpoints.all() == []
    assert checkpoints.latest_valid() == (None, [])
    path = save(checkpoints, 7, score=0.1 + 0.2)
    assert path.name == "step-00000007"
    assert sorted(entry.name for entry in path.iterdir()) == FILES
    assert checkpoints.verify(path) is None
    found = checkpoints.load(str(path))
    assert (found.path, found.step, found.score) == (path, 7, 0.1 + 0.2)
    assert_as_saved(found)
    assert names(checkpoints) == [path.name]


TENSORS = {
    "fp32": torch.randn(3, 5),
    "bf16": torch.randn(7).bfloat16(),
    "fp16": torch.randn(2, 1, 3).half(),
    "fp64": torch.randn(3).double(),
    "fp8": torch.randn(5).to(torch.float8_e4m3fn).view(torch.float8_e4m3fn),
    "complex": torch.randn(3, dtype=torch.complex64),
    "int64": torch.tensor([-(2**63), 2**63 - 1]),
    "int32": torch.arange(3, dtype=torch.int32),
    "int8": torch.tensor([-128, 127], dtype=torch.int8),
    "uint8": torch.arange(9, dtype=torch.uint8),
    "bool": torch.tensor([True, False, True]),
    "scalar": torch.tensor(3.5),
    "bool scalar": torch.tensor(True),
    "empty": torch.empty(0, 3),
    "empty bool": torch.empty(0, dtype=torch.bool),
    "nan": torch.tensor([float("inf"), -0.0]),
    "ä/名.weight": torch.ones(1),
}


def test_every_type_and_shape_loads_with_safetensors(tmp_path):
    path = Checkpoints(tmp_path).save(1, {"model": TENSORS, "none": {}}, {})
    with safe_open(path / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(TENSORS)
        found = {name: file.get_tensor(name) for name in TENSORS}
    for both in (found, load_file(path / "model.safetensors")):
        assert {name: tensor.dtype for name, tensor in both.items()} == {n: t.dtype for n, t in TENSORS.items()}
        for name, tensor in TENSORS.items():
            assert both[name].shape == tensor.shape, name
            assert both[name].tolist() == tensor.tolist(), name
    assert Checkpoints.load(path).tensors("none") == {}


def test_tensors_start_at_multiples_of_their_item_size(tmp_path):
    path = Checkpoints(tmp_path).save(1, {"model": TENSORS}, {})
    data = (path / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    for name, entry in json.loads(data[8 : 8 + length]).items():
        assert entry["data_offsets"][0] % TENSORS[name].dtype.itemsize == 0, name


def test_a_tensor_larger_than_a_chunk(tmp_path, monkeypatch):
    monkeypatch.setattr(tensors_module, "_CHUNK", 1000)
    assert_as_saved(Checkpoints.load(save(Checkpoints(tmp_path), 1)))


def test_shared_and_strided_tensors_and_parameters(tmp_path):
    base = torch.randn(6, 8)
    linear = torch.nn.Linear(3, 2)
    named = {"a": base, "tied": base, "t": base.T, "slice": base[1:5:2, ::3], "expanded": base[:1].expand(4, 8)}
    named |= linear.state_dict(keep_vars=True)
    found = Checkpoints.load(Checkpoints(tmp_path).save(1, {"model": named}, {})).tensors("model")
    assert_equal(found, named)


def test_state_comes_back_exactly_and_must_be_json(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    state = {"loss": 0.1 + 0.2, "tiny": 5e-324, "nested": {"a": [1, None, True, "α"]}, "big": 2**70}
    assert checkpoints.load(checkpoints.save(1, {}, state)).state == state
    bad_states: list[dict] = [{"x": float("nan")}, {"x": {1, 2}}, {"x": torch.ones(1)}, {"x": 1, 2: 3}]
    for bad in bad_states:
        with pytest.raises(UserError, match="must be JSON"):
            checkpoints.save(2, {}, bad)
    assert names(checkpoints) == ["step-00000001"]


@pytest.mark.parametrize("score", [None, float("nan"), float("inf")])
def test_a_score_that_is_no_number_counts_as_none(tmp_path, score):
    assert Checkpoints.load(save(Checkpoints(tmp_path), 1, score=score)).score is None


def test_what_cannot_be_stored_is_refused_and_leaves_nothing(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for tensors in (
        {"../model": {}},
        {"model": {"x": torch.ones(1, dtype=torch.complex128)}},
        {"model": {"__metadata__": torch.ones(1)}},
    ):
        with pytest.raises(UserError, match="cannot"):
            checkpoints.save(1, tensors, {})
    assert names(checkpoints) == []
    with pytest.raises(UserError, match="keep_last is 0"):
        Checkpoints(tmp_path, keep_last=0)


def test_tensors_that_were_read_are_independent_of_the_file(tmp_path):
    found = Checkpoints.load(save(Checkpoints(tmp_path), 1))
    first = found.tensors("model")
    first["w"].zero_()
    assert Checkpoints.verify(found.path) is None
    second = found.tensors("model")
    (found.path / "model.safetensors").write_bytes(b"")
    assert_equal(second, content(1)["model"])


def test_an_unknown_stem_is_named_with_the_known_ones(tmp_path):
    found = Checkpoints.load(save(Checkpoints(tmp_path), 1))
    with pytest.raises(UserError, match=r"'modle'; known: model, optimizer; did you mean 'model'"):
        found.tensors("modle")
    shutil.rmtree(found.path)
    with pytest.raises(UserError, match="can no longer be read"):
        found.tensors("model")


# Damage


class Bomb:
    """Unpickling this makes a file."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (os.mkdir, (str(self.marker),))


def damages(name, data, marker):
    """What can happen to a file: a description and the new content, None if it is gone."""
    for length in sorted({0, 1, 7, 8, 9, len(data) // 2, len(data) - 1}):
        yield f"truncated to {length}", data[:length]
    yield "longer", data + b"\0"
    yield "deleted", None
    yield "zeroed", bytes(len(data))
    yield "pickle", pickle.dumps(Bomb(marker))
    yield "pickle of the same size", pickle.dumps(Bomb(marker)).ljust(len(data), b"\0")[: len(data)]
    if b"1e-05" in data:
        yield "changed, with the same meaning", data.replace(b"1e-05", b"1E-05")
    # An odd stride passes through all eight bits of a byte; the manifest vouches for the rest and is tried more finely.
    for bit in range(0, 8 * len(data), 3 if name == "manifest.json" else 8 * len(data) // 200 | 1):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        yield f"bit {bit} flipped", bytes(flipped)


@pytest.mark.parametrize("name", FILES)
def test_damage_is_found_and_the_previous_checkpoint_used(tmp_path, name):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    older, newest = save(checkpoints, 1), save(checkpoints, 2, score=1e-5)
    file, marker = newest / name, tmp_path / "marker"
    data = file.read_bytes()
    for description, damaged in damages(name, data, marker):
        file.unlink(missing_ok=True)
        if damaged is not None:
            file.write_bytes(damaged)
        found, skipped = checkpoints.latest_valid()
        assert found is not None, description
        assert found.path == older, description
        assert [path for path, _ in skipped] == [newest], description
        assert name in skipped[0][1], (description, skipped)
    assert not marker.exists()
    assert name in (checkpoints.verify(newest) or "")
    with pytest.raises(UserError, match=f"step-00000002 is not a valid checkpoint: {name}"):
        checkpoints.load(newest)
    file.write_bytes(data)
    assert checkpoints.verify(newest) is None


def test_the_bomb_would_go_off(tmp_path, monkeypatch):
    monkeypatch.undo()
    pickle.loads(pickle.dumps(Bomb(tmp_path / "marker")))  # noqa: S301
    assert (tmp_path / "marker").exists()


def forge(path, name, data):
    """Replace or add a file and make the manifest agree, as someone with bad intent would."""
    (path / name).write_bytes(data)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest.pop("sha256")
    manifest["files"][name] = {"size": len(data), "sha256": hash_file(path / name)}
    manifest["sha256"] = hash_text(files.to_json(manifest))
    (path / "manifest.json").write_text(files.to_json(manifest))


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "model.pt", "extra.safetensors"])
def test_a_pickle_with_a_matching_manifest_is_not_read(tmp_path, name):
    path = save(Checkpoints(tmp_path / "checkpoints"), 1)
    forge(path, name, pickle.dumps(Bomb(tmp_path / "marker")))
    reason = Checkpoints.verify(path)
    assert reason is not None
    assert name in reason
    assert not (tmp_path / "marker").exists()


def test_what_does_not_belong_is_named(tmp_path):
    path = save(Checkpoints(tmp_path), 1)
    assert Checkpoints.verify(tmp_path / "nowhere") == "nowhere cannot be read: No such file or directory"
    (path / ".DS_Store").touch()
    assert Checkpoints.verify(path) is None
    (path / "more.json").write_text("{}")
    assert Checkpoints.verify(path) == "more.json is not in manifest.json"
    (path / "more.json").unlink()
    (path / "weights.pt").touch()
    assert Checkpoints.verify(path) == "weights.pt does not belong in a checkpoint"
    (path / "weights.pt").unlink()
    (path / "state.json").rename(tmp_path / "state.json")
    (path / "state.json").symlink_to(tmp_path / "state.json")
    assert Checkpoints.verify(path) == "state.json does not belong in a checkpoint"


def test_manifests_of_another_make_are_refused(tmp_path):
    path = save(Checkpoints(tmp_path), 1)
    original = json.loads((path / "manifest.json").read_text())
    changes = [({"format": 2}, "format 2"), ({"files": [1]}, "not a manifest"), ({"step": 5}, "says 5")]
    for change, reason in [*changes, ({"files": {}}, "model.safetensors is not in")]:
        manifest = original | change
        manifest.pop("sha256")
        manifest["sha256"] = hash_text(files.to_json(manifest))
        (path / "manifest.json").write_text(files.to_json(manifest))
        assert reason in (Checkpoints.verify(path) or "")
    for text, reason in [("[1]", "not a JSON object"), ("[" * 100_000, "not JSON"), ('{"a": NaN}', "not JSON")]:
        (path / "manifest.json").write_text(text)
        assert reason in (Checkpoints.verify(path) or "")


def test_a_copy_may_have_any_name_but_not_that_of_another_step(tmp_path):
    path = save(Checkpoints(tmp_path), 1)
    shutil.copytree(path, tmp_path / "best")
    assert Checkpoints.verify(tmp_path / "best") is None
    path.rename(tmp_path / "step-00000002")
    assert "says step 2" in (Checkpoints.verify(tmp_path / "step-00000002") or "")


# What is kept


def test_the_last_and_the_best_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    kept = []
    for step, score in enumerate([3.0, 1.0, 2.0, 4.0, 0.5, None, 2.0, 2.0], start=1):
        save(checkpoints, step, score=score)
        kept.append(steps(checkpoints))
    assert kept == [[1], [1, 2], [2, 3], [2, 3, 4], [4, 5], [5, 6], [5, 6, 7], [5, 7, 8]]
    only_last = Checkpoints(tmp_path, keep_last=1, keep_best=False)
    save(only_last, 9)
    assert steps(only_last) == [9]
    assert names(only_last) == ["step-00000009"]


def test_damaged_ones_do_not_count_as_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_best=False)
    first, second = save(checkpoints, 1), save(checkpoints, 2)
    (second / "model.safetensors").write_bytes(b"")
    save(checkpoints, 3)
    assert steps(checkpoints) == [1, 2, 3]  # 1 is the valid previous one, 2 is left to look at
    (checkpoints.all()[-1] / "state.json").unlink()
    assert checkpoints.prune() == []
    found, skipped = checkpoints.latest_valid()
    assert found is not None
    assert found.path == first
    assert [path.name for path, _ in skipped] == ["step-00000003", "step-00000002"]
    save(checkpoints, 4)
    save(checkpoints, 5)
    assert steps(checkpoints) == [4, 5]


def test_nothing_is_removed_while_too_few_are_valid(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    (save(checkpoints, 1) / "state.json").unlink()
    save(checkpoints, 2)
    assert steps(checkpoints) == [1, 2]


def test_a_damaged_best_gives_way_to_the_next_best(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    best = save(checkpoints, 1, score=1.0)
    Checkpoints(tmp_path, keep_last=9).save(2, content(2), {}, score=2.0)
    (best / "model.safetensors").write_bytes(b"")
    save(checkpoints, 3, score=3.0)
    assert steps(checkpoints) == [2, 3]


def test_going_back_does_not_prune_what_was_just_saved(tmp_path):
    for step in (10, 20):
        save(Checkpoints(tmp_path), step)
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 5)
    assert steps(checkpoints) == [5, 10, 20]


def test_pruning_reads_again_only_what_was_touched(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    paths = [save(checkpoints, step) for step in (1, 2)]
    opened = []
    check = checkpoints_module.open_checkpoint
    monkeypatch.setattr(checkpoints_module, "open_checkpoint", lambda folder: (opened.append(folder), check(folder))[1])
    checkpoints.prune()
    assert opened == []
    os.utime(paths[0] / "state.json", ns=(1, 1))
    checkpoints.prune()
    checkpoints.prune()
    assert opened == [paths[0]]


def test_saving_the_same_step_again_replaces_it(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for version in range(3):
        found = checkpoints.load(save(checkpoints, 5, version))
        assert found.state["version"] == version
        assert_as_saved(found)
    assert names(checkpoints) == ["step-00000005"]


def test_sweep_gives_back_the_name_of_what_was_set_aside_alone(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step in (5, 6):
        save(checkpoints, step)
        (tmp_path / f"step-{step:08d}").rename(tmp_path / f".old-step-{step:08d}")  # killed between two renames
    save(checkpoints, 6, version=1)
    (tmp_path / ".old-step-00000006").mkdir()
    (tmp_path / ".tmp-step-00000007-0123abcd").mkdir()
    (tmp_path / ".old-step-of-mine").mkdir()
    assert len(checkpoints.leftovers()) == 3
    checkpoints.sweep()
    assert checkpoints.leftovers() == []
    assert names(checkpoints) == [".old-step-of-mine", "step-00000005", "step-00000006"]
    assert [Checkpoints.load(path).state["version"] for path in checkpoints.all()] == [0, 1]
    Checkpoints(tmp_path / "nowhere").sweep()


# Kills


def save_forever(folder):
    checkpoints = Checkpoints(folder)
    newest = checkpoints.latest_valid()[0]
    for step in itertools.count(newest.step + 1 if newest else 1):
        for version in range(2):  # the second replaces the first
            save(checkpoints, step, version, score=float(step * 7919 % 101))


def test_a_kill_at_any_instant_leaves_a_valid_checkpoint(tmp_path):
    checkpoints, reached, chance = Checkpoints(tmp_path), 1, random.Random(0)
    save(checkpoints, reached)
    for _ in range(15):
        process = FORKS.Process(target=save_forever, args=(tmp_path,), daemon=True)
        process.start()
        deadline = time.monotonic() + 600
        while checkpoints.all()[-1].name <= f"step-{reached:08d}" and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.05))
        process.kill()
        process.join()
        found, damaged = checkpoints.latest_valid()
        assert found is not None
        assert damaged == []
        assert found.step >= reached
        assert_as_saved(found)
        assert all(checkpoints.verify(path) is None for path in checkpoints.all())
        sweep(tmp_path)
        assert not list(tmp_path.glob(".tmp-*"))
        reached = found.step
    assert reached > 15


def crash_everywhere(root, step):
    """Save `step` over and over in forked children that die just before the first, second, ... file operation."""
    for nth in itertools.count(1):
        checkpoints = Checkpoints(root / str(nth), keep_best=False)
        for before in (1, 2, 3):
            save(checkpoints, before)
        child = os.fork()
        if child == 0:
            die_at(nth)
            save(checkpoints, step, version=1)
            os._exit(0)
        if os.waitpid(child, 0)[1] == 0:
            return


def die_at(nth):
    seen = itertools.count(1)

    def hook(event, args):
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir") and next(seen) == nth:
            os._exit(1)

    sys.addaudithook(hook)


@pytest.mark.parametrize("step", [3, 4], ids=["replace", "new"])
def test_a_crash_before_each_file_operation(tmp_path, step):
    process = FORKS.Process(target=crash_everywhere, args=(tmp_path, step))
    process.start()
    process.join(30)
    assert process.exitcode == 0
    outcomes = []
    for folder in sorted(tmp_path.iterdir(), key=lambda path: int(path.name)):
        checkpoints = Checkpoints(folder, keep_best=False)
        found, damaged = checkpoints.latest_valid()
        assert found is not None
        assert damaged == []
        assert_as_saved(found)
        assert len(checkpoints.all()) >= 2
        assert all(checkpoints.verify(path) is None for path in checkpoints.all())
        outcomes.append((found.step, found.state["version"], found.path.name[:5]))
        sweep(folder)
        save(checkpoints, step, version=2)
        assert names(checkpoints) == [f"step-{step - 1:08d}", f"step-{step:08d}"]
        assert checkpoints.load(checkpoints.all()[-1]).state["version"] == 2
    # All three outcomes came about: before the new one is in place, between the renames, and after.
    expected = {(3, 0, "step-"), (3, 0, ".old-"), (3, 1, "step-")} if step == 3 else {(3, 0, "step-"), (4, 1, "step-")}
    assert set(outcomes) == expected
    assert len(outcomes) > 15


# Full disks


def save_beyond_the_limit(folder):
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    checkpoints = Checkpoints(folder)
    large = {"model": {"small": torch.ones(10), "w": torch.ones(1 << 19)}}
    for attempt in (2, 1):
        with pytest.raises(DiskFull, match=f"no room for the checkpoint of step {attempt} in .*: File too large"):
            checkpoints.save(attempt, large, {})
    with pytest.raises(DiskFull), BackgroundSaver(checkpoints) as saver:
        saver.submit(2, large, {})
    with pytest.raises(DiskFull):
        checkpoints.save(2, {}, {"text": "x" * (2 << 20)})


def test_a_file_size_limit_is_a_full_disk(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    process = FORKS.Process(target=save_beyond_the_limit, args=(tmp_path,))
    process.start()
    process.join(30)
    assert process.exitcode == 0
    assert names(checkpoints) == ["step-00000001"]
    assert_as_saved(checkpoints.load(checkpoints.all()[0]))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("where", ["write", "fsync"])
def test_no_space_while_writing(tmp_path, monkeypatch, code, where):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)

    def fail(*_):
        raise OSError(code, os.strerror(code))

    if where == "fsync":
        monkeypatch.setattr(os, "fsync", fail)
    else:
        write = tensors_module.write_tensors
        monkeypatch.setattr(checkpoints_module, "write_tensors", lambda *args: (write(*args), fail()))
    with pytest.raises(OSError if code == errno.EIO else DiskFull, match=os.strerror(code)):
        save(checkpoints, 2)
    monkeypatch.undo()
    assert names(checkpoints) == ["step-00000001"]
    assert_as_saved(checkpoints.load(checkpoints.all()[0]))


def test_space_is_checked_before_anything_is_written(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9 - 10**6, 10**6))
    monkeypatch.setattr(checkpoints_module, "fill", None)
    with pytest.raises(DiskFull, match=r"it needs 17 MB and 1 MB are free"):
        save(checkpoints, 1)
    assert names(checkpoints) == []


# In the background


def test_the_snapshot_is_taken_when_submit_returns(tmp_path, monkeypatch):
    checkpoints, gate = Checkpoints(tmp_path, keep_last=9), threading.Event()
    fill = checkpoints_module.fill
    monkeypatch.setattr(checkpoints_module, "fill", lambda *args: (gate.wait(600), fill(*args)))
    tensors, state = content(1), {"step": 1, "version": 0}
    with BackgroundSaver(checkpoints) as saver:
        saver.submit(1, tensors, state)
        for named in tensors.values():
            for tensor in named.values():
                tensor.zero_()
        state["version"] = 9
        gate.set()
        saver.wait()
        assert_as_saved(checkpoints.load(checkpoints.all()[0]))
        for step in (2, 3):
            saver.submit(step, content(step), {"step": step, "version": 0})
    assert steps(checkpoints) == [1, 2, 3]
    for path in checkpoints.all():
        assert_as_saved(checkpoints.load(path))


def test_buffers_are_used_again_and_follow_shapes(tmp_path):
    with BackgroundSaver(Checkpoints(tmp_path)) as saver:
        saver.submit(1, {"model": {"a": torch.ones(3), "b": torch.ones(3)}}, {})
        first = saver._buffers["model"]
        saver.submit(2, {"model": {"a": torch.zeros(3), "b": torch.zeros(4), "c": torch.zeros(())}}, {})
        second = saver._buffers["model"]
        saver.wait()
    assert second["a"] is first["a"]
    assert second["b"] is not first["b"]
    assert_equal(
        Checkpoints.load(tmp_path / "step-00000002").tensors("model"),
        {"a": torch.zeros(3), "b": torch.zeros(4), "c": torch.zeros(())},
    )


def test_at_most_one_save_is_in_flight(tmp_path, monkeypatch):
    running, most, threads = 0, 0, set()
    fill, lock, submitted = checkpoints_module.fill, threading.Lock(), threading.Event()

    def slow(*args):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        threads.add(threading.current_thread().name)
        assert submitted.wait(60)  # else to submit was to wait for it
        time.sleep(0.05)
        fill(*args)
        running -= 1

    monkeypatch.setattr(checkpoints_module, "fill", slow)
    with BackgroundSaver(Checkpoints(tmp_path)) as saver:
        saver.submit(1, content(1), {})
        submitted.set()
        for step in (2, 3):
            saver.submit(step, content(step), {})
            assert Checkpoints.verify(tmp_path / f"step-{step - 1:08d}") is None
    assert most == 1
    assert threads == {"checkpoint_0"}


@pytest.mark.parametrize("surface", ["submit", "wait", "close"])
def test_an_error_of_the_thread_is_raised_once(tmp_path, monkeypatch, surface):
    saver = BackgroundSaver(Checkpoints(tmp_path))
    monkeypatch.setattr(checkpoints_module, "fill", lambda *_: 1 / 0)
    saver.submit(1, content(1), {})
    with pytest.raises(ZeroDivisionError):
        saver.submit(2, content(2), {}) if surface == "submit" else getattr(saver, surface)()
    monkeypatch.undo()
    saver.wait()
    if surface != "close":
        saver.submit(3, content(3), {})
    saver.close()
    assert [path.name for path in tmp_path.iterdir()] == ([] if surface == "close" else ["step-00000003"])


def test_an_error_of_the_thread_does_not_hide_that_of_the_block(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints_module, "fill", lambda *_: 1 / 0)

    def block():
        with BackgroundSaver(Checkpoints(tmp_path)) as saver:
            saver.submit(1, content(1), {})
            raise KeyError("first")

    with pytest.raises(KeyError) as caught:
        block()
    assert caught.value.__notes__ == ["the checkpoint in flight failed too: division by zero"]


def test_an_interrupted_wait_does_not_free_the_buffers(tmp_path, monkeypatch):
    gate, fill = threading.Event(), checkpoints_module.fill
    monkeypatch.setattr(checkpoints_module, "fill", lambda *args: (gate.wait(600), fill(*args)))
    with BackgroundSaver(Checkpoints(tmp_path)) as saver:
        saver.submit(1, content(1), {"step": 1, "version": 0})
        with monkeypatch.context() as patch:
            patch.setattr("concurrent.futures.Future.result", lambda _: signal_interrupt())
            with pytest.raises(KeyboardInterrupt):
                saver.wait()
        threading.Timer(0.05, gate.set).start()
        saver.submit(2, content(2), {"step": 2, "version": 0})
    for path in Checkpoints(tmp_path).all():
        assert_as_saved(Checkpoints.load(path))


def signal_interrupt():
    raise KeyboardInterrupt


# Optimisers and random generators

OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "adamw-amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True, foreach=True),
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, nesterov=True),
    "muon": lambda parameters: torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=0.01),
}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.unused = torch.nn.Linear(4, 8), torch.nn.Linear(8, 2), torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.two(torch.nn.functional.dropout(self.one(x).tanh(), 0.2))


def make(kind, dtype=torch.float32):
    torch.manual_seed(0)
    model = Net().to(dtype)
    return model, OPTIMIZERS[kind](list(model.parameters())), {p: n for n, p in model.named_parameters()}


def train(model, optimizer, count):
    for _ in range(count):
        optimizer.zero_grad()
        x = torch.randn(5, 4, dtype=model.one.weight.dtype) * random.random() + float(np.random.normal())
        model(x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_bit_for_bit(tmp_path, kind, dtype):
    model, optimizer, names = make(kind, dtype)
    train(model, optimizer, 5)
    held, described = optimizer_tensors(optimizer, names)
    with BackgroundSaver(Checkpoints(tmp_path)) as saver:
        saver.submit(
            5, {"model": model.state_dict(), "optimizer": held}, {"optimizer": described, "random": rng_state()}
        )
        train(model, optimizer, 5)

    again, optimizer_again, names_again = make(kind, dtype)
    train(again, optimizer_again, 1)  # what it remembers from before must go
    found = Checkpoints.load(tmp_path / "step-00000005")
    again.load_state_dict(found.tensors("model"))
    load_optimizer(optimizer_again, names_again, found.tensors("optimizer"), found.state["optimizer"])
    set_rng_state(found.state["random"])
    train(again, optimizer_again, 5)

    assert_equal(again.state_dict(), model.state_dict())
    expected, found_state = optimizer_tensors(optimizer, names), optimizer_tensors(optimizer_again, names_again)
    assert_equal(found_state[0], expected[0])
    assert found_state[1] == expected[1]
    assert bool(expected[0]) == (kind != "sgd")
    assert not any(name.startswith("unused") for name in expected[0])


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimiser_that_has_not_stepped(kind):
    model, optimizer, names = make(kind)
    held, described = optimizer_tensors(optimizer, names)
    assert held == {}
    train(model, optimizer, 2)
    load_optimizer(optimizer, names, held, json.loads(json.dumps(described)))
    assert optimizer_tensors(optimizer, names) == ({}, described)


def test_options_of_the_groups_are_left_as_configured():
    model, optimizer, names = make("adamw")
    train(model, optimizer, 1)
    stored = optimizer_tensors(optimizer, names)
    optimizer.param_groups[0]["lr"] = 0.5
    load_optimizer(optimizer, names, *stored)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)


def test_other_groups_in_another_order_get_the_state_of_their_names():
    model, optimizer, names = make("sgd-momentum")
    train(model, optimizer, 2)
    stored = optimizer_tensors(optimizer, names)
    parameters = list(model.parameters())[::-1]
    groups = [{"params": parameters[:3]}, {"params": parameters[3:], "weight_decay": 0.1}]
    regrouped = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    load_optimizer(regrouped, names, *stored)
    assert_equal(optimizer_tensors(regrouped, names)[0], stored[0])


def test_what_is_loaded_is_a_copy():
    model, optimizer, names = make("sgd-momentum")
    train(model, optimizer, 1)
    held, described = optimizer_tensors(optimizer, names)
    copies = {name: tensor.clone() for name, tensor in held.items()}
    load_optimizer(optimizer, names, copies, described)
    train(model, optimizer, 1)
    assert_equal(copies, held)


def test_other_parameters_are_named():
    model, optimizer, names = make("adamw")
    train(model, optimizer, 1)
    held, described = optimizer_tensors(optimizer, names)
    fewer = torch.optim.AdamW(model.one.parameters())
    with pytest.raises(
        UserError, match=r"other parameters: unexpected two\.bias, two\.weight, unused\.bias and 1 more"
    ):
        load_optimizer(fewer, names, held, described)
    lost = {"parameters": {k: v for k, v in described["parameters"].items() if k != "one.bias"}}
    with pytest.raises(UserError, match=r"other parameters: missing one\.bias"):
        load_optimizer(optimizer, names, held, lost)
    incomplete = {name: tensor for name, tensor in held.items() if name != "one.bias/exp_avg"}
    with pytest.raises(UserError, match=r"other tensors: missing one\.bias/exp_avg$"):
        load_optimizer(optimizer, names, incomplete, described)
    with pytest.raises(UserError, match=r"other tensors: unexpected one\.bias/x$"):
        load_optimizer(optimizer, names, held | {"one.bias/x": torch.ones(1)}, described)
    for bad in (dict(list(names.items())[:1]), dict.fromkeys(names, "same")):
        with pytest.raises(UserError, match="5 parameters of the optimiser have no name of their own"):
            optimizer_tensors(optimizer, bad)


def draw():
    return torch.randn(3).tolist(), random.random(), random.gauss(0, 1), np.random.rand(), np.random.normal()


def test_random_generators_go_on_where_they_were():
    draw()  # leaves the second half of a Gaussian pair in Python's and numpy's generators
    state = json.loads(json.dumps(rng_state()))
    expected = [draw(), draw()]
    draw()
    set_rng_state(state)
    assert [draw(), draw()] == expected
    assert rng_state() != state


def test_reading_pickles_is_refused_here():
    data = io.BytesIO(pickle.dumps(1))
    by_class, from_bytes = lambda file: pickle.Unpickler(file).load(), lambda file: pickle.loads(file.read())  # noqa: S301
    for read in (pickle.load, torch.load, by_class, from_bytes):
        with pytest.raises(AssertionError, match="a pickle was read"):
            read(data)
