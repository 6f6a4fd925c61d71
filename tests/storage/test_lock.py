"""A folder has one writer, whatever crashes; who is refused can tell by the type, and who waits gets his turn."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from skipless.errors import UserError
from skipless.storage import lock as lock_module
from skipless.storage.lock import FolderLock, InUse, is_locked

HOLD = """
import sys, time
from skipless.storage.lock import FolderLock
lock = FolderLock(sys.argv[1])
lock.acquire()
{then}
print("held", flush=True)
time.sleep(600)
"""


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
        with pytest.raises(InUse, match=rf"in use by process {holder.pid};") as refused:
            FolderLock(tmp_path).acquire()
        assert (refused.value.folder, refused.value.pid) == (tmp_path, holder.pid)
    finally:
        end(holder)


def test_a_killed_holder_frees_the_lock(tmp_path):
    holder = start_holder(tmp_path)
    end(holder)
    with FolderLock(tmp_path):
        assert int((tmp_path / ".lock").read_text()) == os.getpid()


def test_a_second_lock_in_the_same_process_is_refused_until_the_first_ends(tmp_path):
    first, second = FolderLock(tmp_path / "new"), FolderLock(tmp_path / "new")
    first.acquire()
    with pytest.raises(InUse, match=f"process {os.getpid()}"):
        second.acquire()
    first.release()
    first.release()
    with second:
        pass


@pytest.mark.parametrize(
    "then",
    [
        "import os\nr, w = os.pipe()\nif os.fork() == 0:\n    os.write(w, b'.')\n    time.sleep(600)\nos.read(r, 1)",
        "import subprocess\nsubprocess.Popen(['sleep', '600'], close_fds=False)",
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
        with FolderLock(tmp_path):
            pass
    finally:
        os.killpg(holder.pid, signal.SIGKILL)
        holder.stdout.close()


def test_a_forked_child_leaves_the_lock_to_its_parent(tmp_path):
    then = "import os\npid = os.fork()\nif pid == 0:\n    lock.release()\n    os._exit(0)\nos.waitpid(pid, 0)"
    holder = start_holder(tmp_path, then)
    try:
        with pytest.raises(InUse, match=f"process {holder.pid}"):
            FolderLock(tmp_path).acquire()
    finally:
        end(holder)


def test_in_use_is_a_type_with_its_own_exit_status(tmp_path):
    with FolderLock(tmp_path), pytest.raises(UserError) as refused:
        FolderLock(str(tmp_path)).acquire()
    assert type(refused.value) is InUse
    assert (refused.value.folder, refused.value.pid, refused.value.status) == (tmp_path, os.getpid(), 4)
    assert UserError.status == 2


@pytest.mark.parametrize("content", ["", "somebody\n"])
def test_a_holder_that_has_not_said_who_it_is_is_another_process(tmp_path, content):
    with FolderLock(tmp_path):
        (tmp_path / ".lock").write_text(content)
        with pytest.raises(InUse, match="is in use by another process;") as refused:
            FolderLock(tmp_path).acquire()
    assert refused.value.pid is None


def test_a_lock_that_the_file_system_does_not_have_is_not_in_use(tmp_path, monkeypatch):
    def refuse(fd, how):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(lock_module.fcntl, "flock", refuse)
    with pytest.raises(UserError, match="cannot be locked: No locks available") as refused:
        FolderLock(tmp_path).acquire()
    assert not isinstance(refused.value, InUse)


def test_locks_can_be_seen(tmp_path):
    assert not is_locked(tmp_path / "nowhere")
    with FolderLock(tmp_path):
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)


def test_who_waits_is_told_and_gets_his_turn(tmp_path):
    said, order = [], []
    entered, release = threading.Event(), threading.Event()
    file = tmp_path / "beside.lock"

    def hold():
        with FolderLock(tmp_path / "folder", file=file):
            entered.set()
            release.wait(10)
            order.append("first")

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait(10)

    def on_wait():
        said.append("waiting")
        release.set()

    with FolderLock(tmp_path / "folder", file=file, on_wait=on_wait):
        order.append("second")
    thread.join()
    assert (said, order) == (["waiting"], ["first", "second"])
    assert not (tmp_path / "folder").exists()  # its lock lies beside it
    with FolderLock(tmp_path / "folder", file=file, on_wait=lambda: pytest.fail("nobody has it")):
        assert int(file.read_text()) == os.getpid()


def test_a_killed_holder_frees_those_who_wait(tmp_path):
    holder, waits = start_holder(tmp_path), threading.Event()

    def kill_when_asked():
        waits.wait(10)
        holder.kill()

    thread = threading.Thread(target=kill_when_asked)
    thread.start()
    with FolderLock(tmp_path, on_wait=waits.set):
        assert waits.is_set()
    thread.join()
    end(holder)
