"""The manifest of a folder: what it is, the size and the SHA-256 of each of its files, and a hash of itself.

Checkpoints and prepared data have one. Not a bit of the manifest, or of a file that it names, can change unnoticed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, TypeAdapter, ValidationError

from skipless.config.base import Config
from skipless.config.reading import NotJson, parse_object, read_bytes
from skipless.config.reading import Unreadable as UnreadableFile
from skipless.storage.atomic_files import to_json
from skipless.storage.hashing import hash_file, hash_samples, hash_text, hash_value

MANIFEST = "manifest.json"

OWN_HASH = "sha256"
"""The key of a manifest's hash of itself."""

_OWN_HASHES: dict[str, Callable[[dict[str, Any]], str]] = {
    OWN_HASH: lambda content: hash_text(to_json(content)),
    "checksum": hash_value,  # of data that version 0.1.0 prepared
}

Depth = Literal["sizes", "samples", "all"]
"""What is checked of a file beside its size: nothing more, its samples if it has any, or all of it."""


class Damaged(Exception):
    """A folder is not what its manifest says; the message is the reason."""


class Unreadable(Damaged):
    """The system could not read something that is there; it may be able to later."""


def unreadable(name: str, error: OSError) -> Damaged:
    """What an error in reading says of a folder."""
    kind = Damaged if isinstance(error, FileNotFoundError) else Unreadable
    return kind(f"{name} cannot be read: {error.strerror}")


class FileEntry(Config):
    """What a manifest says of one file."""

    size: int = Field(ge=0, description="Bytes.")
    sha256: str = Field(description="SHA-256 of the content, in hexadecimal.")
    sampled: str | None = Field(None, description="Of a large file, the SHA-256 of its first, middle and last block.")

    @classmethod
    def of(cls, path: Path, *, sampled_from: float = float("inf")) -> Self:
        """The entry of a file, with samples if it has at least so many bytes."""
        size = path.stat().st_size
        return cls(size=size, sha256=hash_file(path), sampled=hash_samples(path) if size >= sampled_from else None)

    def verify(self, path: Path, depth: Depth = "all") -> None:
        """Raise Damaged where a file is another than this entry says."""
        try:
            size = path.stat().st_size
            if size != self.size:
                raise Damaged(f"{path.name} has {size} bytes, and its manifest says {self.size}")
            if depth != "sizes" and not self._has_hash(path, depth):
                raise Damaged(f"{path.name} has changed: it does not match its hash")
        except OSError as error:
            raise unreadable(path.name, error) from error

    def _has_hash(self, path: Path, depth: Depth) -> bool:
        if depth == "samples" and self.sampled is not None:
            return hash_samples(path) == self.sampled
        return hash_file(path) == self.sha256


_FILES = TypeAdapter(dict[str, FileEntry])


@dataclass(frozen=True)
class Manifest:
    """What a folder says of itself, and of all its other files."""

    about: Mapping[str, Any]
    files: Mapping[str, FileEntry]

    def write(self, folder: Path) -> None:
        """Write `manifest.json`, the last file of a folder."""
        content = self.content()
        text = to_json({**content, OWN_HASH: _OWN_HASHES[OWN_HASH](content)})
        (folder / MANIFEST).write_bytes(text.encode())

    def content(self) -> dict[str, Any]:
        """All of it but the hash of itself, as JSON."""
        return {**self.about, "files": {name: file.model_dump(exclude_none=True) for name, file in self.files.items()}}

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The manifest of a folder, if not one bit of it has changed; else Damaged is raised."""
        content = _read_hashed(folder / MANIFEST)
        try:
            files = _FILES.validate_python(content.pop("files", None))
        except ValidationError as error:
            raise Damaged(f"{MANIFEST} is not a manifest: {error.errors()[0]['msg']}") from error
        return cls(content, files)

    def verify(self, folder: Path, depth: Depth = "all") -> None:
        """Raise Damaged where a file is not as it was written."""
        for name, file in self.files.items():
            file.verify(folder / name, depth)


def _read_hashed(path: Path) -> dict[str, Any]:
    """A JSON object that was written with a hash of itself, without that hash."""
    try:
        text = read_bytes(path)
    except UnreadableFile as error:
        if isinstance(error.__context__, OSError):
            raise unreadable(path.name, error.__context__) from error
        raise Damaged(f"{path.name} cannot be read: {error.reason}") from error
    content = parse_json(text, path.name)
    key = next((key for key in _OWN_HASHES if key in content), OWN_HASH)
    digest = content.pop(key, None)
    if digest != _OWN_HASHES[key](content):
        raise Damaged(f"{path.name} does not match its own hash")
    # The bytes as well, for a flipped bit can change a file and not its meaning: 1e-05 is also 1E-05.
    if text != to_json({**content, key: digest}).encode():
        raise Damaged(f"{path.name} is not as it was written")
    return content


def parse_json(text: bytes, name: str) -> dict[str, Any]:
    """A JSON object; `Damaged` where it is none."""
    try:
        return parse_object(text)
    except NotJson as error:
        raise Damaged(f"{name} {error}") from error
