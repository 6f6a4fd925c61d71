"""An I/O error at every single system call of a write: what was there stays, and the next write works."""

import errno
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from skipless.config.model import ModelConfig
from skipless.errors import UserError
from skipless.interop.export import export_model
from skipless.nn.model import CausalLM
from skipless.storage.atomic_files import DiskFull, replaced_folder, staged_file, sweep, write_json
from skipless.storage.checkpoints import Checkpoints
from skipless.storage.journal import Journal
from skipless.tasks.new_part import new_part
from tests.helpers.io_errors import FailingDisk
from tests.helpers.power_loss import read_tree

FAULTS = {
    "EIO once": (errno.EIO, False),
    "EIO from then on": (errno.EIO, True),
    "ENOSPC once": (errno.ENOSPC, False),
    "ENOSPC from then on": (errno.ENOSPC, True),
}


@dataclass(frozen=True)
class Write:
    """A write of something that is there already."""

    before: Callable[[Path], object]
    act: Callable[[Path], object]
    look: Callable[[Path], Any]
    """What is there, wholly; None if it is not."""
    calls: int
    """It makes at least so many."""


def save(folder: Path, step: int, seed: int = 0, **options: Any) -> None:
    drawn = torch.Generator().manual_seed(seed)
    tensors = {"model": {"weight": torch.randn(40, generator=drawn)}, "optimizer": {"step": torch.tensor(step)}}
    Checkpoints(folder, **options).save(step, tensors, {"seed": seed}, score=float(step))


def save_after_sweep(folder: Path, step: int, seed: int = 0, **options: Any) -> None:
    """As a run does that goes on."""
    if folder.exists():
        sweep(folder)
    save(folder, step, seed, **options)


def two(folder: Path) -> None:
    save(folder, 1)
    save(folder, 2)


def newest(folder: Path) -> Any:
    found, _ = Checkpoints(folder).latest_valid()
    return found and (found.step, found.state, found.tensors("model")["weight"].tolist())


MODEL = CausalLM(ModelConfig(n_layer=1, d_model=8, n_head=1, vocab_size=11, max_seq_len=4))


def export(folder: Path, seed: int) -> None:
    torch.manual_seed(seed)
    export_model(CausalLM(MODEL.config), "safetensors", folder / "out", overwrite=True)


def answer(folder: Path, text: bytes) -> None:
    """Line by line, as `predict --output` does."""
    with staged_file(folder / "answers.jsonl") as file:
        for _ in range(3):
            file.write(text)
            file.flush()


def exported(folder: Path) -> Any:
    return read_tree(folder / "out") or read_tree(folder / ".old-out")


def replace(folder: Path, text: str) -> None:
    with replaced_folder(folder / "corpus") as staging:
        (staging / "tokens.bin").write_bytes(text.encode())


def replaced(folder: Path) -> Any:
    return read_tree(folder / "corpus") or read_tree(folder / ".tmp-corpus-old")


WRITES = {
    "a save that prunes": Write(two, partial(save_after_sweep, step=3), newest, 15),
    "a save that keeps one": Write(two, partial(save_after_sweep, step=3, keep_last=1, keep_best=False), newest, 15),
    "the same step again": Write(two, partial(save_after_sweep, step=2, seed=5), newest, 15),
    "a file": Write(
        lambda folder: write_json(folder / "glue.json", {"a": 1}),
        lambda folder: write_json(folder / "glue.json", {"a": 2}),
        lambda folder: (folder / "glue.json").read_text(),
        3,
    ),
    "a file that is filled line by line": Write(
        partial(answer, text=b"old"),
        partial(answer, text=b"new"),
        lambda folder: (folder / "answers.jsonl").read_text(),
        5,
    ),
    "a folder that is replaced": Write(partial(replace, text="old"), partial(replace, text="new"), replaced, 4),
    "an export": Write(partial(export, seed=1), partial(export, seed=2), exported, 8),
}


SELDOM = ("a save that keeps one", "the same step again")
SLOW = [pytest.param(fault, marks=pytest.mark.slow) for fault in ("EIO from then on", "ENOSPC once")]


@pytest.mark.parametrize("fault", ["EIO once", "ENOSPC from then on", *SLOW])
@pytest.mark.parametrize(
    "name", [name if name not in SELDOM else pytest.param(name, marks=pytest.mark.slow) for name in WRITES]
)
def test_an_error_at_any_call_leaves_the_old_or_the_new(tmp_path, name, fault):
    write, (number, broken) = WRITES[name], FAULTS[fault]
    base = tmp_path / "base"
    base.mkdir()
    write.before(base)
    old = write.look(base)
    whole = tmp_path / "whole"
    shutil.copytree(base, whole)
    write.act(whole)
    new, names = write.look(whole), sorted(path.name for path in whole.iterdir())
    assert old != new
    for at in range(1, 1000):
        folder = tmp_path / str(at)
        shutil.copytree(base, folder)
        with FailingDisk(at, number, broken=broken) as disk:
            raised = None
            try:
                write.act(folder)
            except (UserError, OSError) as error:
                raised = error
        if raised is not None and number == errno.ENOSPC:
            assert isinstance(raised, DiskFull) or getattr(raised, "errno", None) == number, disk.calls[-1]
        found = write.look(folder)
        assert found in (old, new), f"call {at}: {disk.calls[at - 1]}"
        assert raised or found == new, f"call {at}: {disk.calls[at - 1]} failed, and nobody was told"
        write.act(folder)
        assert write.look(folder) == new
        assert sorted(path.name for path in folder.iterdir()) == names, f"left behind by call {at}"
        shutil.rmtree(folder)
        if not disk.hit:
            break
    assert raised is None
    assert write.calls < at < 999


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_first_save_that_fails_can_be_made_again(tmp_path, number):
    for at in range(1, 1000):
        folder = tmp_path / str(at) / "run" / "checkpoints"
        with FailingDisk(at, number, broken=True) as disk, suppress(UserError, OSError):
            save_after_sweep(folder, 1)
        assert newest(folder) is None or newest(folder)[0] == 1
        save_after_sweep(folder, 1)
        assert [path.name for path in folder.iterdir()] == ["step-00000001"]
        if not disk.hit:
            break
    assert 10 < at < 999


FIRST = {
    "a saved model": lambda folder: MODEL.save(folder / "out"),
    "a part of one's own": lambda folder: new_part("mine", "norm", folder),
}


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("name", FIRST)
def test_what_was_not_there_is_whole_or_can_be_made_again(tmp_path, monkeypatch, number, name):
    monkeypatch.setattr("skipless.nn.saving.version", lambda name: "1")  # Python remembers a lookup that failed
    FIRST[name](tmp_path / "whole")
    whole = read_tree(tmp_path / "whole")
    for at in range(1, 1000):
        folder = tmp_path / str(at)
        with FailingDisk(at, number) as disk, suppress(UserError, OSError):
            FIRST[name](folder)
        found = read_tree(folder)
        assert found.items() <= whole.items(), f"call {at}: {disk.calls[at - 1]}"
        if found != whole:
            FIRST[name](folder)
        assert read_tree(folder) == whole, f"left behind by call {at}"
        if not disk.hit:
            break
    assert 5 < at < 999


def test_a_line_of_metrics_that_does_not_fit_is_cut_off_again(tmp_path):
    journal = Journal(tmp_path / "metrics.jsonl")
    journal.append({"step": 1})
    position = journal.position()
    journal.close()
    for at in range(1, 20):
        with FailingDisk(at, errno.ENOSPC) as disk, suppress(DiskFull, OSError):
            journal = Journal(tmp_path / "metrics.jsonl")
            journal.append({"step": 2})
            journal.position()
        again = Journal(tmp_path / "metrics.jsonl")
        again.cut(position)
        again.close()
        assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"step": 1}\n'
        if not disk.hit:
            break
    assert 2 < at < 19
