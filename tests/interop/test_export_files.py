"""What lies beside an export and who may read it."""

import os
import resource
import signal
import stat
from contextlib import contextmanager

import pytest

from skipless.data.tokenizer import train
from skipless.interop.export import export_model
from skipless.nn.model import CausalLM
from skipless.storage.atomic_files import STAGING_PREFIX, DiskFull, staged_folder
from tests.helpers.tiny_runs import tiny


@pytest.fixture
def model():
    return CausalLM(tiny("python").model)


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
@pytest.mark.parametrize("to", ["safetensors", "hf"])
def test_modes_follow_the_umask(tmp_path, model, mask, to):
    if to == "hf":
        pytest.importorskip("transformers")
    before = os.umask(mask)
    try:
        folder = export_model(model, to, tmp_path / "out")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == dict.fromkeys(modes, 0o666 & ~mask)
    assert "model.safetensors" in modes


def leftovers(folder):
    return sorted(path.name for path in folder.glob(f"{STAGING_PREFIX}*"))


def test_what_a_killed_export_left_is_swept_by_the_next(tmp_path, model):
    pid = os.fork()
    if not pid:
        with staged_folder(tmp_path / "out") as folder:
            (folder / "model.safetensors").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert len(leftovers(tmp_path)) == 1
    export_model(model, "safetensors", tmp_path / "out")
    assert leftovers(tmp_path) == []


def test_an_export_that_is_being_written_is_not_swept(tmp_path, model):
    with staged_folder(tmp_path / "out", set_aside=tmp_path / "aside") as folder:
        export_model(model, "safetensors", tmp_path / "out")
        assert leftovers(tmp_path) == [folder.name]
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_modes_of_a_saved_model_follow_the_umask(tmp_path, model, mask):
    before = os.umask(mask)
    try:
        model.save(tmp_path / "out")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()}
    assert modes == dict.fromkeys(("config.json", "model.safetensors"), 0o666 & ~mask)


@contextmanager
def files_up_to(size):
    """Files that would be larger cannot be written."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("to", ["safetensors", "hf", "onnx"])
@pytest.mark.parametrize("room", [1 << 10, 4 << 10, 16 << 10])
def test_a_disk_that_is_full_is_said_and_leaves_nothing(tmp_path, to, room):
    """Whichever library it is that writes the file which does not fit."""
    model = CausalLM(tiny("python", {"model.d_model": 64, "data.vocab_size": 400}).model)
    with files_up_to(room), pytest.raises(DiskFull, match=r"no room for the export '.*out': File too large"):
        export_model(model, to, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("to", ["safetensors", "hf"])
def test_a_tokeniser_that_does_not_fit_is_said(tmp_path, to):
    """It is written last, and by a library of its own."""
    model = CausalLM(tiny("python", {"model.d_model": 16, "model.vocab_size": 1000}).model)
    text = " ".join(f"{number:x}" for number in range(30_000))
    model.tokenizer = train("bpe", lambda: iter([text]), vocab_size=60_000)
    whole = export_model(model, to, tmp_path / "whole")
    sizes = {path.name: path.stat().st_size for path in whole.rglob("*") if path.is_file()}
    largest = sizes.pop("tokenizer.json")
    assert max(sizes.values()) < largest - 1, "the tokeniser's file has to be the largest for this test"
    with files_up_to(largest - 1), pytest.raises(DiskFull, match=r"no room for the export '.*out': File too large"):
        export_model(model, to, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [whole]
