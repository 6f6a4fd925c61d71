"""Files and folders that are wholly there or not there at all.

Whatever is written here is first staged beside its place under a name that starts with `.tmp-`, forced to the disk, and
then renamed. A reader, or a process that starts after a crash, never sees a part of either the old content or the new.
What a crash can leave behind are the staged files themselves: `sweep` removes them.
"""

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from skipless.errors import UserError

STAGING_PREFIX = ".tmp-"

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskFull(UserError):
    """The disk is full. What was being saved is given up whole; earlier checkpoints are intact."""

    status = 3

    def __init__(self, message: str, reason: str = "the disk is full") -> None:
        super().__init__(message)
        self.reason = reason


@contextmanager
def no_room_said(what: str) -> Iterator[None]:
    """A block in which an OSError of a full disk becomes a `DiskFull` that says what there was no room for.

    Where such blocks are nested, the outermost has the word: what is inside it may be staged under a name that nobody
    has ever seen.
    """
    try:
        yield
    except DiskFull as inner:
        raise DiskFull(f"no room for {what}: {inner.reason}", inner.reason) from inner
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        reason = error.strerror or os.strerror(error.errno)
        raise DiskFull(f"no room for {what}: {reason}", reason) from error


class FolderLost(UserError):
    """A folder that was being written to has become read-only, failed, or disappeared."""

    status = 3


BROKEN = (errno.EIO, errno.EROFS, errno.ESTALE, errno.ENODEV, errno.ENXIO)
"""What the system says of a disk that is broken, gone, or can only be read."""

LOST = (*BROKEN, errno.ENOENT, errno.EACCES, errno.EPERM)
"""And of a folder that was there a moment ago."""


@contextmanager
def folder_lost(folder: Path, numbers: tuple[int, ...] = LOST) -> Iterator[None]:
    """A block in which an OSError with one of these errno values becomes a `FolderLost`."""
    try:
        yield
    except OSError as error:
        if error.errno not in numbers:
            raise
        where = f" ({error.filename})" if error.filename else ""
        raise FolderLost(f"{str(folder)!r} cannot be written to: {error.strerror or error}{where}") from error


def check_there(file: Path, step: int) -> None:
    """A `FolderLost` where the file that says whose folder this is has gone: a save would make the folder again."""
    if not file.exists():
        raise FolderLost(f"{str(file.parent)!r} is no longer there, so step {step} is not saved")


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
    with staged_file(path) as file:
        file.write(data)


@contextmanager
def staged_file(path: Path | str) -> Iterator[BinaryIO]:
    """A new file to fill, which becomes `path` in one step when the block ends, or nothing if it fails."""
    path = Path(path)
    with no_room_said(str(path)), _staged(path, partial(Path.touch, exist_ok=False)) as staging:
        with staging.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        staging.replace(path)
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
    with _staged(path, Path.mkdir) as staging:
        yield staging
        _fsync_tree(staging)
        if set_aside is not None and path.exists():
            path.rename(set_aside)
        staging.rename(path)
    fsync(path.parent)


@contextmanager
def replaced_folder(path: Path) -> Iterator[Path]:
    """A new folder to fill, which then replaces `path`, if there is one; nothing changes if filling it fails.

    It takes two renames, and between them `path` does not exist. Only one process at a time may replace a folder. If
    the last one was killed between the two, what it had set aside is put back first.
    """
    old = path.with_name(f"{STAGING_PREFIX}{path.name}-old")
    if old.exists() and not path.exists():
        old.rename(path)
        fsync(path.parent)
    with staged_folder(path, set_aside=old) as staging:
        yield staging
    shutil.rmtree(old, ignore_errors=True)


def make_folder(path: Path) -> None:
    """Make a folder and its missing parents, so that they survive a power loss.

    One that is there already may have been made by a process that was killed before it could force it to the disk, so
    that is done again.
    """
    if path.is_dir():
        _fsync_if_allowed(path.parent)
    else:
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        fsync(path.parent)


def _fsync_if_allowed(folder: Path) -> None:
    """Fsync a folder of somebody else's, unless we may not, or its file system has no fsync."""
    try:
        fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EINVAL, errno.EROFS):
            raise


def check_folder(path: Path) -> None:
    """A UserError where files could not be written into a folder, which may not be there yet; leaves nothing behind."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    made: list[Path] = []
    try:
        for folder in reversed(missing):
            folder.mkdir()
            made.append(folder)
        probe = _staging_path(path / "probe")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"cannot write into the folder {str(path)!r}: {error.strerror}") from None
    finally:
        for folder in reversed(made):
            with suppress(OSError):  # somebody else may have put something in
                folder.rmdir()


def remove_folder(path: Path) -> None:
    """Remove a folder: a rename takes it out of sight first, so that nobody ever finds a half-empty one.

    What cannot be deleted after the rename is left for `sweep`, or for the next time.
    """
    remove_abandoned(path)
    doomed = _staging_path(path)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def leftovers(folder: Path | str, *names: str) -> list[Path]:
    """What is staged in `folder`, or was when a process was killed: all of it, or what was to get these names."""
    everything = Path(folder).glob(f"{STAGING_PREFIX}*")
    return sorted(path for path in everything if not names or any(_is_staged_for(name, path) for name in names))


def sweep(folder: Path | str, *names: str) -> list[Path]:
    """Remove what crashes left staged in `folder`, and say what that was: all of it, or what was to get these names.

    Only for the process that may write there, or may write what has these names.
    """
    found = leftovers(folder, *names)
    for leftover in found:
        _remove(leftover)
    return found


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _remove_if_possible(path: Path) -> None:
    with suppress(OSError):
        _remove(path)


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


@contextmanager
def _staged(path: Path, make: Callable[[Path], object]) -> Iterator[Path]:
    """A new file or folder beside `path`, to be renamed in the block, and removed if that fails.

    It is locked meanwhile. The system frees the lock when its holder dies, so what a killed process has left behind can
    be told from what another one is writing, and the next to write the same path removes it.
    """
    remove_abandoned(path)
    staging, fd = _make_locked(path, make)
    try:
        yield staging
    except BaseException:
        _remove_if_possible(staging)
        raise
    finally:
        os.close(fd)


def _make_locked(path: Path, make: Callable[[Path], object]) -> tuple[Path, int]:
    """A new staged file or folder, and the descriptor that holds its lock."""
    while True:
        staging = _staging_path(path)
        with ExitStack() as undo:
            undo.callback(_remove_if_possible, staging)
            make(staging)
            try:
                fd = os.open(staging, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:  # another process took it for abandoned before it was locked
                continue
            undo.callback(os.close, fd)
            if _try_lock(fd) and staging.exists():
                undo.pop_all()
                return staging, fd


def remove_abandoned(path: Path) -> None:
    """Remove what processes that are dead have left staged for `path`."""
    for leftover in path.parent.glob(f"{STAGING_PREFIX}*"):
        if _is_staged_for(path.name, leftover):
            _remove_if_abandoned(leftover)


def _remove_if_abandoned(leftover: Path) -> None:
    try:
        fd = os.open(leftover, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # should it be a pipe
    except OSError:  # its process has just renamed or removed it
        return
    try:
        if _try_lock(fd, where_unknown=False):
            _remove_if_possible(leftover)
    finally:
        os.close(fd)


def _try_lock(fd: int, *, where_unknown: bool = True) -> bool:
    """Lock an open file or folder if nobody else has; `where_unknown` is the answer of a file system without locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return where_unknown
    return True


def _is_staged_for(name: str, path: Path) -> bool:
    return re.fullmatch(re.escape(f"{STAGING_PREFIX}{name}-") + "(old|[0-9a-f]{8})", path.name) is not None


def _staging_path(path: Path) -> Path:
    # Not from tempfile, which makes files that only their owner may read, whatever the umask says.
    return path.with_name(f"{STAGING_PREFIX}{path.name}-{secrets.token_hex(4)}")
