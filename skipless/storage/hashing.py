"""SHA-256 hashes, in hexadecimal, by which a change of stored data is detected."""

import hashlib
import json
from pathlib import Path
from typing import Any

SAMPLE = 16 * 2**20
"""Bytes of each of the three samples of a large file."""


def hash_bytes(data: bytes) -> str:
    """The SHA-256 of bytes."""
    return hashlib.sha256(data).hexdigest()


def hash_text(text: str) -> str:
    """The SHA-256 of a text as UTF-8."""
    return hash_bytes(text.encode())


def hash_value(value: Any) -> str:
    """The SHA-256 of a value as JSON with sorted keys: the same for equal values."""
    return hash_text(json.dumps(value, sort_keys=True))


def hash_file(path: Path | str) -> str:
    """The SHA-256 of a whole file."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_samples(path: Path | str) -> str:
    """Of a large file's first, middle and last block: enough to notice a bad copy, quick at any size."""
    path, digest = Path(path), hashlib.sha256()
    size = path.stat().st_size
    with path.open("rb") as file:
        for start in (0, (size - SAMPLE) // 2, size - SAMPLE):
            file.seek(max(0, start))
            digest.update(file.read(SAMPLE))
    return digest.hexdigest()
