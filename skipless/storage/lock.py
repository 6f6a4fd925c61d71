"""One writer for a folder: the lock that every process which writes there takes."""

import fcntl
import functools
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Self

from skipless.errors import UserError
from skipless.storage.atomic_files import make_folder

LOCK = ".lock"


class InUse(UserError):
    """Another process has the lock of `folder`; `pid` is its number, or None if it has not said."""

    status = 4

    def __init__(self, folder: Path, pid: int | None) -> None:
        self.folder, self.pid = folder, pid
        holder = "another process" if pid is None else f"process {pid}"
        super().__init__(f"{folder} is in use by {holder}; wait for it to end, or stop it")


class FolderLock:
    """An exclusive lock among processes for a folder, on `folder/.lock` or another `file`.

    If another process has it, `InUse` is raised. With an `on_wait`, that is called instead and the lock is waited for.

    The system holds the lock for the open file, not for its name, so a crash frees it and leaves nothing to clean up.
    The file stays, with the process id of its last holder, which is only ever read to say who is in the way.

        with FolderLock("runs/one"):
            ...
    """

    def __init__(
        self, folder: Path | str, *, file: Path | None = None, on_wait: Callable[[], object] | None = None
    ) -> None:
        self.folder = Path(folder)
        self.path = file or self.folder / LOCK
        self.on_wait = on_wait
        self._fd: int | None = None

    def acquire(self) -> bool:
        """Take the lock. Always true: Optuna asks for an answer."""
        make_folder(self.path.parent)
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        _open_locks.add(self)
        _watch_forks()
        try:
            self._lock(self._fd)
        except BaseException:
            self._close()
            raise
        return True

    def _lock(self, fd: int) -> None:
        if not self._flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB):
            if self.on_wait is None:
                raise InUse(self.folder, _holder(fd))
            self.on_wait()
            self._flock(fd, fcntl.LOCK_EX)
        # One write of a fixed width: a reader in between finds the old number or the new one, never half of one.
        os.pwrite(fd, f"{os.getpid():<20}\n".encode(), 0)

    def _flock(self, fd: int, how: int) -> bool:
        try:
            fcntl.flock(fd, how)
        except BlockingIOError:
            return False
        except OSError as error:
            raise UserError(f"{self.path} cannot be locked: {error.strerror}") from error
        return True

    def release(self) -> None:
        """Let the lock go; does nothing if it is not held."""
        if self._fd is not None:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            self._close()

    def _close(self) -> None:
        _open_locks.discard(self)
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _holder(fd: int) -> int | None:
    text = os.pread(fd, 32, 0).strip()
    return int(text) if text.isdigit() else None


def is_locked(folder: Path | str) -> bool:
    """Whether some process holds the lock of a folder at this instant."""
    try:
        fd = os.open(Path(folder) / LOCK, os.O_RDONLY | os.O_NONBLOCK)  # should it be a pipe
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


_open_locks: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _close_in_child() -> None:
    for lock in list(_open_locks):
        lock._close()


@functools.cache
def _watch_forks() -> None:
    # A program that is executed does not inherit the open file, but a plain fork (a data loader's worker) does, and
    # would keep the lock after its parent has died. To close the copy in the child leaves the parent's lock alone.
    os.register_at_fork(after_in_child=_close_in_child)
