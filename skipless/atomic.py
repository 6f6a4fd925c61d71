"""Files and folders that are wholly there or not there at all, and the lock on a run's folder.

Whatever is written here is first staged beside its place under a name that starts with `.tmp-`, forced to the disk, and
then renamed. A reader, or a process that starts after a crash, sees the old content or the new, never a part of either.
What a crash can leave behind are the staged files themselves: `sweep` removes them.
"""

import fcntl
import functools
import hashlib
import json
import os
import secrets
import shutil
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from skipless.errors import UserError

STAGING_PREFIX = ".tmp-"

IN_USE = "is in use by"
"""How a UserError says that another process has the lock."""


def to_json(value: Any) -> str:
    """The text that `write_json` writes: sorted keys, one form for one value, and no NaN or infinity."""
    return json.dumps(value, sort_keys=True, allow_nan=False, indent=2) + "\n"


def write_json(path: Path | str, value: Any) -> None:
    """Put `value` at `path` as JSON, in one step."""
    write_text(path, to_json(value))


def write_text(path: Path | str, text: str) -> None:
    """Put `text` at `path` as UTF-8, in one step."""
    write_bytes(path, text.encode())


def write_bytes(path: Path | str, data: bytes) -> None:
    """Put `data` at `path` in one step: once this returns, it survives a loss of power."""
    path = Path(path)
    staging = _staging_path(path)
    try:
        with staging.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        staging.replace(path)
    except BaseException:
        staging.unlink(missing_ok=True)
        raise
    fsync(path.parent)


@contextmanager
def staged_folder(path: Path | str, set_aside: Path | None = None) -> Iterator[Path]:
    """A new folder to fill, which becomes `path` in one step when the block ends, or nothing if it fails.

    If `path` is already there, it is renamed to `set_aside` just before the new one takes its place. A crash between
    the two renames leaves only the set-aside folder, whole; without a `set_aside`, an existing `path` is refused.
    """
    path = Path(path)
    if set_aside is None and path.exists():
        raise UserError(f"{path} already exists")
    make_folder(path.parent)
    staging = _staging_path(path)
    try:
        staging.mkdir()
        yield staging
        _fsync_tree(staging)
        if set_aside is not None and path.exists():
            path.rename(set_aside)
        staging.rename(path)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    fsync(path.parent)


def make_folder(path: Path) -> None:
    """Make a folder and its missing parents, so that they survive a loss of power."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        fsync(path.parent)


def remove_folder(path: Path) -> None:
    """Remove a folder: a rename takes it out of sight first, so that nobody ever finds a half-empty one.

    What cannot be deleted after the rename is left for `sweep`.
    """
    doomed = _staging_path(path)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def sweep(folder: Path | str) -> list[Path]:
    """Remove what crashes left staged in `folder`, and say what that was. Only for the process that may write there."""
    leftovers = sorted(Path(folder).glob(STAGING_PREFIX + "*"))
    for leftover in leftovers:
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()
    return leftovers


def sha256(path: Path | str) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync(path: Path) -> None:
    """Force a file, or the list of names of a folder, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _fsync_tree(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir():
            _fsync_tree(entry)
        else:
            fsync(entry)
    fsync(folder)


def _staging_path(path: Path) -> Path:
    # Not from tempfile, which makes files that only their owner may read, whatever the umask says.
    return path.with_name(f"{STAGING_PREFIX}{path.name}-{secrets.token_hex(4)}")


class RunLock:
    """One writer for a run's folder: an exclusive lock on `folder/.lock`, held for as long as this process lives.

    The system holds the lock for the open file, not for its name, so a crash frees it and leaves nothing to clean up.
    The file stays, with the process id of its last holder, which is only ever read to say who is in the way.

        with RunLock("runs/one"):
            ...
    """

    def __init__(self, folder: Path | str) -> None:
        self.path = Path(folder) / ".lock"
        self._fd: int | None = None

    def acquire(self) -> None:
        """Take the lock, or raise a UserError that names the process that has it."""
        make_folder(self.path.parent)
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            self._lock(fd)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        _held.add(self)
        _watch_forks()

    def _lock(self, fd: int) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(fd, 32, 0).decode(errors="replace").strip()
            holder = f"process {pid}" if pid else "another process"
            raise UserError(f"{self.path.parent} {IN_USE} {holder}; wait for it to end, or stop it") from None
        except OSError as error:
            raise UserError(f"{self.path} cannot be locked: {error.strerror}") from error
        # One write of a fixed width: a reader in between finds the old number or the new one, never half of one.
        os.pwrite(fd, f"{os.getpid():<20}\n".encode(), 0)

    def release(self) -> None:
        """Let the lock go; does nothing if it is not held."""
        if self._fd is not None:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            self._forget()

    def _forget(self) -> None:
        _held.discard(self)
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def is_locked(folder: Path | str) -> bool:
    """Whether some process holds the lock of a folder at this instant."""
    try:
        fd = os.open(Path(folder) / ".lock", os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


_held: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _drop_in_child() -> None:
    for lock in list(_held):
        lock._forget()


@functools.cache
def _watch_forks() -> None:
    # A program that is executed does not inherit the open file, but a plain fork (a data loader's worker) does, and
    # would keep the lock after its parent has died. To close the copy in the child leaves the parent's lock alone.
    os.register_at_fork(after_in_child=_drop_in_child)
