"""Files are whole or absent, and a run's folder has one writer, whatever crashes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from skipless import atomic
from skipless.atomic import RunLock, sha256, staged_folder, sweep, write_bytes, write_json, write_text
from skipless.errors import UserError

HOLD = """
import sys, time
from skipless.atomic import RunLock
lock = RunLock(sys.argv[1])
lock.acquire()
{then}
print("held", flush=True)
time.sleep(60)
"""


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
    assert {str(staging), str(staging / "x"), str(staging / "inner"), str(staging / "inner" / "y")} == set(before)
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


def test_remove_folder_leaves_no_half_folder(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    monkeypatch.setattr(atomic.shutil, "rmtree", lambda *_, **__: None)
    atomic.remove_folder(tmp_path / "a")
    monkeypatch.undo()
    assert [path.name.startswith(".tmp-a-") for path in tmp_path.iterdir()] == [True]
    assert len(sweep(tmp_path)) == 1


def test_sha256(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    assert sha256(tmp_path / "a") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def start_holder(folder, then=""):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD.format(then=then), str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def end(process):
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_process_is_refused_and_told_who_is_there(tmp_path):
    holder = start_holder(tmp_path)
    try:
        with pytest.raises(UserError, match=rf"in use by process {holder.pid};"):
            RunLock(tmp_path).acquire()
    finally:
        end(holder)


def test_a_killed_holder_frees_the_lock(tmp_path):
    holder = start_holder(tmp_path)
    end(holder)
    with RunLock(tmp_path):
        assert int((tmp_path / ".lock").read_text()) == os.getpid()


def test_a_second_lock_in_the_same_process_is_refused_until_the_first_ends(tmp_path):
    first, second = RunLock(tmp_path / "new"), RunLock(tmp_path / "new")
    first.acquire()
    with pytest.raises(UserError, match=f"process {os.getpid()}"):
        second.acquire()
    first.release()
    first.release()
    with second:
        pass


@pytest.mark.parametrize(
    "then",
    [
        "import os\nif os.fork() == 0:\n    time.sleep(60)\n    os._exit(0)\ntime.sleep(0.2)",
        "import subprocess\nsubprocess.Popen(['sleep', '60'], close_fds=False)",
    ],
    ids=["fork", "exec"],
)
def test_children_of_a_killed_holder_do_not_keep_the_lock(tmp_path, then):
    # Its own session, so that the orphan can be ended with it.
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD.format(then=then), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == "held\n"
        holder.kill()
        holder.wait()
        os.killpg(holder.pid, 0)  # the child is alive
        with RunLock(tmp_path):
            pass
    finally:
        os.killpg(holder.pid, signal.SIGKILL)
        holder.stdout.close()


def test_a_forked_child_leaves_the_lock_to_its_parent(tmp_path):
    then = "import os\npid = os.fork()\nif pid == 0:\n    lock.release()\n    os._exit(0)\nos.waitpid(pid, 0)"
    holder = start_holder(tmp_path, then)
    try:
        with pytest.raises(UserError, match=f"process {holder.pid}"):
            RunLock(tmp_path).acquire()
    finally:
        end(holder)
