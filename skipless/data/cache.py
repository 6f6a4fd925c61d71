"""Finished folders of files: written aside, moved into place at once, and checked whenever they are opened."""

import fcntl
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from skipless import atomic
from skipless.errors import UserError

MANIFEST = "manifest.json"
HASHED_WHOLE = 256 * 2**20
_BLOCK = 16 * 2**20


class Damaged(Exception):
    """A folder is not what its manifest says; the message is the reason."""


def write_manifest(folder: Path, manifest: dict[str, Any], names: list[str]) -> None:
    """Record a folder's files, and everything else there is to say of it, in `manifest.json`."""
    files = {name: _record(folder / name) for name in names}
    (folder / MANIFEST).write_text(_render({**manifest, "files": files}), encoding="utf-8")


def verify(folder: Path) -> dict[str, Any]:
    """The manifest of a folder whose files are all as they were written; raises `Damaged` with the reason if not."""
    manifest = _read_manifest(folder / MANIFEST)
    for name, record in manifest["files"].items():
        _verify_file(folder / name, record)
    return manifest


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        manifest = json.loads(text)
    except OSError as error:
        raise Damaged(f"{path.name} cannot be read: {error.strerror}") from None
    except ValueError:
        raise Damaged(f"{path.name} is not JSON") from None
    if not isinstance(manifest, dict) or _render(manifest) != text:
        raise Damaged(f"{path.name} has changed: its checksum is another")
    return manifest


def _verify_file(path: Path, record: dict[str, Any]) -> None:
    try:
        size = path.stat().st_size
        if size != record["size"]:
            raise Damaged(f"{path.name} has {size} bytes, and the manifest says {record['size']}")
        method = "sampled" if "sampled" in record else "sha256"
        if _HASHES[method](path) != record[method]:
            raise Damaged(f"{path.name} has changed: its {method} hash is another than the manifest's")
    except OSError as error:
        raise Damaged(f"{path.name} cannot be read: {error.strerror}") from None


def _record(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    record = {"size": size, "sha256": atomic.sha256(path)}
    return {**record, "sampled": _hash_sampled(path)} if size > HASHED_WHOLE else record


def _hash_sampled(path: Path) -> str:
    """Of a large file, the first, the middle and the last block: enough to notice a bad copy, quick at any size."""
    digest = hashlib.sha256()
    size = path.stat().st_size
    with path.open("rb") as file:
        for start in (0, (size - _BLOCK) // 2, size - _BLOCK):
            file.seek(max(0, start))
            digest.update(file.read(_BLOCK))
    return digest.hexdigest()


_HASHES: dict[str, Callable[[Path], str]] = {"sha256": atomic.sha256, "sampled": _hash_sampled}


def _render(manifest: dict[str, Any]) -> str:
    """The one text that a manifest has, with a checksum of itself: no byte of it can change unnoticed."""
    body = {key: value for key, value in manifest.items() if key != "checksum"}
    checksum = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({**body, "checksum": checksum}, indent=2, sort_keys=True) + "\n"


@contextmanager
def locked(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold a lock among processes; it is gone when its holder is, however that ends."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise UserError(
            f"cache folder {str(path.parent)!r} cannot be written ({error.strerror}); $SKIPLESS_CACHE names another"
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """A folder to write in, which becomes `folder` if all goes well and vanishes if not; the caller holds the lock."""
    for leftover in folder.parent.glob(f"{atomic.STAGING_PREFIX}{folder.name}-*"):  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    old = folder.with_name(f"{atomic.STAGING_PREFIX}{folder.name}-old")
    with atomic.staged_folder(folder, set_aside=old) as stage:
        yield stage
    shutil.rmtree(old, ignore_errors=True)
