"""A checkpoint that several write: threads stand in for processes, each with its rows of every tensor."""

import errno
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skipless.errors import UserError
from skipless.storage import checkpoints as checkpoints_module
from skipless.storage.atomic_files import STAGING_PREFIX
from skipless.storage.checkpoints import Checkpoints
from tests.helpers.thread_ranks import thread_channels


def rows_of(tensor, rank, size):
    count = -(-tensor.shape[0] // size)
    return tensor[rank * count : (rank + 1) * count]


def share(named, rank, size):
    """What one of them writes: its rows, if it has any, and the first one what has no rows."""
    shares = {name: rows_of(t, rank, size) for name, t in named.items() if t.ndim}
    return {name: t for name, t in shares.items() if len(t)} | {
        n: t for n, t in named.items() if not t.ndim and not rank
    }


def save_together(folder, size, step, named):
    """Everyone saves; what each one raised, or None."""

    def save(channel):
        stem = f"model-{channel.rank + 1:05d}-of-{size:05d}"
        try:
            Checkpoints(folder, save_group=channel).save(step, {stem: share(named, channel.rank, size)}, {"step": step})
        except UserError as error:
            return error
        return None

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(save, thread_channels(size)))


def tensors(sizes):
    named = {f"t{i}": torch.arange(n * 3, dtype=torch.float32).view(n, 3) + 100 * i for i, n in enumerate(sizes)}
    return named | {"step": torch.tensor(7.0)}


@settings(max_examples=25)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 5), st.data())
def test_any_number_writes_and_any_rows_are_read(tmp_path_factory, sizes, size, data):
    folder, named = tmp_path_factory.mktemp("checkpoints"), tensors(sizes)
    assert save_together(folder, size, 3, named) == [None] * size
    (path,) = Checkpoints(folder).all()
    assert Checkpoints.verify(path) is None
    found = Checkpoints.load(path)
    assert found.stems == ("model",)
    assert len(found.files["model"]) == size
    for name, tensor in found.tensors("model").items():
        assert torch.equal(tensor, named[name])
    cuts = {name: sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2))) for name, n in zip(named, sizes, strict=False)}

    def wanted(name, shape):
        assert shape == tuple(named[name].shape)
        return slice(*cuts[name]) if name in cuts else None

    for name, tensor in found.tensors("model", wanted).items():
        assert torch.equal(tensor, named[name][slice(*cuts[name])] if name in cuts else named[name])


def test_damage_to_any_shard_is_found(tmp_path):
    for step in (1, 2):
        save_together(tmp_path, 3, step, tensors([6]))
    newest = Checkpoints(tmp_path).all()[-1]
    shard = newest / "model-00002-of-00003.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert "model-00002-of-00003" in Checkpoints.verify(newest)
    found, damaged = Checkpoints(tmp_path).latest_valid()
    assert (found.step, [path for path, _ in damaged]) == (1, [newest])
    shard.unlink()
    assert "missing" in Checkpoints.verify(newest)


@pytest.mark.parametrize("broken", [0, 2])
def test_one_that_cannot_write_stops_all_and_leaves_nothing(tmp_path, monkeypatch, broken):
    assert save_together(tmp_path, 3, 1, tensors([6])) == [None] * 3
    write = checkpoints_module.write_tensors

    def fail(path, named):
        if f"-{broken + 1:05d}-of" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, named)

    monkeypatch.setattr(checkpoints_module, "write_tensors", fail)
    problems = save_together(tmp_path, 3, 2, tensors([6]))
    assert all("no room for the checkpoint of step 2" in str(problem) for problem in problems)
    assert [problem.status for problem in problems] == [3] * 3
    assert [path.name for path in Checkpoints(tmp_path).all()] == ["step-00000001"]
    assert not list(tmp_path.glob(STAGING_PREFIX + "*"))
    assert Checkpoints(tmp_path).latest_valid()[0].step == 1


def test_one_that_dies_in_the_middle_of_a_save_leaves_the_earlier_checkpoint(tmp_path, monkeypatch):
    """The others have written their files by then; what is staged is no checkpoint."""
    save_together(tmp_path, 3, 1, tensors([6]))
    write, staged, written = checkpoints_module.write_tensors, [], threading.Barrier(3)

    def die(path, named):
        entry = write(path, named)
        staged.append(path.parent)
        written.wait(60)
        if "-00003-of" in path.name:
            raise KeyboardInterrupt  # no UserError: nobody is told
        return entry

    monkeypatch.setattr(checkpoints_module, "write_tensors", die)
    everyone = thread_channels(3)

    def save(channel):
        try:
            stem = f"model-{channel.rank + 1:05d}-of-00003"
            Checkpoints(tmp_path, save_group=channel).save(2, {stem: share(tensors([6]), channel.rank, 3)}, {"step": 2})
        except KeyboardInterrupt:
            channel.barrier.abort()  # as a connection that breaks
            raise

    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(save, channel) for channel in everyone]
        raised = [type(job.exception()) for job in jobs]
    assert raised == [threading.BrokenBarrierError, threading.BrokenBarrierError, KeyboardInterrupt]
    assert len(staged) == 3
    assert all(folder.name.startswith(STAGING_PREFIX) for folder in staged)
    assert [path.name for path in Checkpoints(tmp_path).all()] == ["step-00000001"]
    assert Checkpoints(tmp_path).latest_valid()[0].step == 1
