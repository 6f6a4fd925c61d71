"""Files and folders are whole or absent, whatever crashes."""

import json
import os
from pathlib import Path

import pytest

from skipless.errors import UserError
from skipless.storage import atomic_files as files
from skipless.storage.atomic_files import staged_folder, sweep, write_bytes, write_json, write_text


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


def fail(*_):
    raise OSError("disk")


def test_writes_replace_what_was_there(tmp_path):
    write_bytes(tmp_path / "a", b"\x00\xff")
    write_text(tmp_path / "b", "α\n")
    write_text(str(tmp_path / "b"), "β\n")
    assert (tmp_path / "a").read_bytes() == b"\x00\xff"
    assert (tmp_path / "b").read_text(encoding="utf-8") == "β\n"
    assert names(tmp_path) == ["a", "b"]


def test_json_has_one_form_and_no_nan(tmp_path):
    write_json(tmp_path / "a", {"b": 1, "a": [1e-5, None, "α"]})
    write_json(tmp_path / "b", {"a": [1e-5, None, "α"], "b": 1})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert json.loads((tmp_path / "a").read_text()) == {"a": [1e-5, None, "α"], "b": 1}
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="JSON compliant"):
            write_json(tmp_path / "a", {"x": bad})
    assert names(tmp_path) == ["a", "b"]


def test_files_get_the_permissions_of_the_umask(tmp_path):
    (tmp_path / "plain").touch()
    write_text(tmp_path / "written", "x")
    with staged_folder(tmp_path / "folder"):
        pass
    (tmp_path / "made").mkdir()
    assert (tmp_path / "written").stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert (tmp_path / "folder").stat().st_mode == (tmp_path / "made").stat().st_mode


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch, broken):
    write_text(tmp_path / "a", "old")
    monkeypatch.setattr(os, broken, fail)
    with pytest.raises(OSError, match="disk"):
        write_text(tmp_path / "a", "new")
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a").read_text() == "old"


def test_everything_is_forced_to_the_disk_before_it_is_renamed(tmp_path, monkeypatch):
    events = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append(str(Path(f"/proc/self/fd/{fd}").readlink())), fsync(fd)))
    monkeypatch.setattr(os, "rename", lambda old, new: (events.append("rename"), rename(old, new)))
    with staged_folder(tmp_path / "a") as staging:
        (staging / "inner").mkdir()
        (staging / "x").write_text("x")
        (staging / "inner" / "y").write_text("y")
    before, after = events[: events.index("rename")], events[events.index("rename") + 1 :]
    staged = {str(staging), str(staging / "x"), str(staging / "inner"), str(staging / "inner" / "y")}
    assert {str(tmp_path.parent), *staged} == set(before)
    assert before.index(str(staging)) == len(before) - 1
    assert after == [str(tmp_path)]


def test_a_staged_folder_appears_at_the_end_or_never(tmp_path):
    with staged_folder(tmp_path / "new" / "a") as staging:
        (staging / "x").write_text("x")
        assert not (tmp_path / "new" / "a").exists()
    assert (tmp_path / "new" / "a" / "x").read_text() == "x"

    def interrupted():
        with staged_folder(tmp_path / "b") as staging:
            (staging / "x").write_text("x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with pytest.raises(UserError, match="already exists"), staged_folder(tmp_path / "new"):
        pass
    assert names(tmp_path) == ["new"]
    assert names(tmp_path / "new") == ["a"]


def test_a_folder_that_is_replaced_is_set_aside_first(tmp_path):
    for text in ("one", "two"):
        with staged_folder(tmp_path / "a", set_aside=tmp_path / "old") as staging:
            (staging / "x").write_text(text)
    assert (tmp_path / "a" / "x").read_text() == "two"
    assert (tmp_path / "old" / "x").read_text() == "one"
    assert names(tmp_path) == ["a", "old"]


def test_sweep_removes_only_what_was_staged(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "x").touch()
    (tmp_path / ".tmp-folder-1").mkdir()
    (tmp_path / ".tmp-folder-1" / "x").touch()
    (tmp_path / ".tmp-file-1").touch()
    (tmp_path / ".tmp-link").symlink_to(tmp_path / "kept")
    assert [path.name for path in sweep(tmp_path)] == [".tmp-file-1", ".tmp-folder-1", ".tmp-link"]
    assert names(tmp_path) == ["kept"]
    assert names(tmp_path / "kept") == ["x"]
    assert sweep(tmp_path / "nowhere") == []


def test_sweep_by_name_leaves_what_others_write(tmp_path):
    for name in (".tmp-a.json-0123abcd", ".tmp-a.json-old", ".tmp-b.json-0123abcd", ".tmp-a.json-x-0123abcd"):
        (tmp_path / name).touch()
    assert [path.name for path in sweep(tmp_path, "a.json", "c.json")] == [".tmp-a.json-0123abcd", ".tmp-a.json-old"]
    assert names(tmp_path) == [".tmp-a.json-x-0123abcd", ".tmp-b.json-0123abcd"]


def test_remove_folder_leaves_no_half_folder(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    monkeypatch.setattr(files.shutil, "rmtree", lambda *_, **__: None)
    files.remove_folder(tmp_path / "a")
    monkeypatch.undo()
    assert [path.name.startswith(".tmp-a-") for path in tmp_path.iterdir()] == [True]
    assert len(sweep(tmp_path)) == 1


def test_a_replaced_folder_is_the_old_one_or_the_new(tmp_path):
    for text in ("one", "two"):
        with files.replaced_folder(tmp_path / "a") as staging:
            (staging / "x").write_text(text)
    assert (tmp_path / "a" / "x").read_text() == "two"
    (tmp_path / ".tmp-a-0123abcd").mkdir()

    def interrupted():
        with files.replaced_folder(tmp_path / "a") as staging:
            (staging / "x").write_text("three")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (tmp_path / "a" / "x").read_text() == "two"
    assert names(tmp_path) == ["a"]
