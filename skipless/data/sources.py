"""Where documents come from: `name:rest`, with the names in `SOURCES`."""

import gzip
import hashlib
import io
import json
import os
import sys
import sysconfig
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import Any

from skipless.config.reading import Unreadable, read_bytes
from skipless.errors import MissingExtra, UserError, did_you_mean, first_line, unknown, user_path


class Source(ABC):
    """Documents in a fixed order, read one at a time, as often as they are asked for."""

    @abstractmethod
    def __iter__(self) -> Iterator[str]: ...

    @abstractmethod
    def fingerprint(self) -> str:
        """A hash that changes when the documents do, without reading them."""

    def total_bytes(self) -> int | None:
        """About how many bytes the documents have, where that is cheap to know."""
        return None

    def check(self) -> None:
        """A UserError where there is nothing to read, as far as a look at the first document tells."""
        next(iter(self), None)


class PythonStdlib(Source):
    """`python-stdlib`: every .py file of the running interpreter's standard library."""

    SKIPPED = {"site-packages", "dist-packages", "__pycache__"}

    def __init__(self, rest: str) -> None:
        if rest:
            raise UserError(f"source 'python-stdlib' takes no argument, got {rest!r}")
        self.root = Path(sysconfig.get_path("stdlib"))

    def _files(self) -> Iterator[Path]:
        return (path for path in _tree(self.root, self.SKIPPED) if path.suffix == ".py")

    def __iter__(self) -> Iterator[str]:
        return map(_read, self._files())

    def fingerprint(self) -> str:
        """The interpreter's version, and the names and sizes of the files."""
        files = ((path.relative_to(self.root).as_posix(), path.stat().st_size) for path in self._files())
        return _hash([("python-stdlib", sys.version), *files])

    def total_bytes(self) -> int:
        """The sizes of the files."""
        return sum(path.stat().st_size for path in self._files())


class Files(Source):
    """`files:GLOB`: each matching file is a document; `**` is any depth of folders."""

    def __init__(self, rest: str) -> None:
        self.pattern = _required(rest, "files:GLOB")

    def __iter__(self) -> Iterator[str]:
        return map(_read, _matching(self.pattern))

    def fingerprint(self) -> str:
        """The names, sizes and times of change of the files."""
        return _hash(_stamps("files", self.pattern))

    def total_bytes(self) -> int:
        """The sizes of the files."""
        return sum(path.stat().st_size for path in _matching(self.pattern))


class JsonLines(Source):
    """`jsonl:PATH#field`: a field of each line, by default `text`; PATH may be a glob, and its files .gz or .zst."""

    def __init__(self, rest: str) -> None:
        path, _, field = rest.rpartition("#") if "#" in rest else (rest, "", "")
        self.pattern = _required(path, "jsonl:PATH#field")
        self.field = field or "text"

    def __iter__(self) -> Iterator[str]:
        for path in _matching(self.pattern):
            for number, line in enumerate(file_lines(path), start=1):
                if not line.isspace():
                    yield self._document(line, f"{path}, line {number}")

    def _document(self, line: bytes, where: str) -> str:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: not valid JSON ({error})") from None
        if not isinstance(record, dict):
            raise UserError(f"{where}: expected a JSON object, got {type(record).__name__}")
        return _field(record, self.field, where)

    def fingerprint(self) -> str:
        """The names, sizes and times of change of the files, and the field."""
        return _hash(_stamps(f"jsonl#{self.field}", self.pattern))


class Hub(Source):
    """`hf:DATASET[:config][@split]#field`: a data set of the Hugging Face hub, streamed; by default `@train#text`.

    The fingerprint is the name alone, so that what was prepared once can be used without a network; to read a data
    set that has changed, prepare it with `rebuild`.
    """

    def __init__(self, rest: str) -> None:
        self.name = _required(rest, "hf:DATASET[:config][@split]#field")
        name, _, field = rest.partition("#")
        name, _, split = name.partition("@")
        self.dataset, _, self.config = name.partition(":")
        self.split, self.field = split or "train", field or "text"

    def __iter__(self) -> Iterator[str]:
        for number, record in enumerate(self._open(), start=1):
            yield _field(record, self.field, f"hf:{self.name}, record {number}")

    def _open(self) -> Iterable[dict[str, Any]]:
        datasets = optional("datasets", "hub", f"source 'hf:{self.name}'")
        try:
            return datasets.load_dataset(self.dataset, self.config or None, split=self.split, streaming=True)
        except Exception as error:  # datasets raises a dozen kinds, all of them about the name or the network
            raise UserError(f"source 'hf:{self.name}' cannot be opened: {first_line(error)}") from error

    def check(self) -> None:
        """Nothing: what was prepared once is used without a network."""

    def fingerprint(self) -> str:
        """The name of the data set, its configuration, split and field."""
        return _hash([("hf", self.dataset, self.config, self.split, self.field)])


CORPORA: dict[str, str | None] = {
    "code": "python-stdlib",
    "wiki": "hf:wikimedia/wikipedia:20231101.en#text",
    "books": None,  # Languini's can no longer be had
    "codeparrot": "hf:huggingface-course/codeparrot-ds-train#content",
    "codeparrot-valid": "hf:huggingface-course/codeparrot-ds-valid#content",
    "pile": "hf:monology/pile-uncopyrighted#text",
}
"""The corpora that experiments name, and where each is unless `$SKIPLESS_CORPUS_NAME` says otherwise."""


def corpus_variable(name: str) -> str:
    """The environment variable that says where a corpus is."""
    if name not in CORPORA:
        raise unknown("corpus", name, CORPORA)
    return f"SKIPLESS_CORPUS_{name.upper().replace('-', '_')}"


def corpus_source(name: str) -> Source:
    """`corpus:NAME`: text by what it is, wherever it lies on this machine.

    So the configuration of a run names its corpus and no path; what the text really was is kept in its fingerprint.
    """
    variable = corpus_variable(name)
    spec = os.environ.get(variable) or CORPORA[name]
    if spec is None:
        raise UserError(f"corpus {name!r} is not here: say where with --corpus {name}=jsonl:PATH#field, or ${variable}")
    if spec.startswith("corpus:"):
        raise UserError(f"corpus {name!r} must be a source, not another corpus: {spec!r}")
    return open_source(spec)


SOURCES: dict[str, Callable[[str], Source]] = {
    "python-stdlib": PythonStdlib,
    "files": Files,
    "jsonl": JsonLines,
    "hf": Hub,
    "corpus": corpus_source,
}
"""What may stand before the first colon of a source."""


def open_source(spec: str) -> Source:
    """The source that `name:rest` stands for."""
    name, _, rest = spec.partition(":")
    if name not in SOURCES:
        raise unknown("source", name, SOURCES)
    return SOURCES[name](rest)


def _required(rest: str, form: str) -> str:
    if not rest.strip("#@:"):
        raise UserError(f"source {form.partition(':')[0]!r} needs an argument: {form}")
    return rest


def optional(module: str, extra: str, purpose: str) -> Any:
    """A module that may not be installed."""
    try:
        return import_module(module)
    except ImportError:
        raise MissingExtra(module, extra, purpose) from None


def _field(record: dict[str, Any], field: str, where: str) -> str:
    if field not in record:
        raise UserError(f"{where}: no field {field!r}; fields: {', '.join(record)}{did_you_mean(field, record)}")
    if not isinstance(record[field], str):
        raise UserError(f"{where}: field {field!r} holds {type(record[field]).__name__}, expected a string")
    return record[field]


def _hash(rows: Iterable[tuple[Any, ...]]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row).encode() + b"\n")
    return digest.hexdigest()


def _stamps(kind: str, pattern: str) -> Iterator[tuple[Any, ...]]:
    yield (kind,)
    for path in _matching(pattern):
        stat = path.stat()
        yield path.as_posix(), stat.st_size, stat.st_mtime_ns


def _read(path: Path) -> str:
    try:
        return read_bytes(path).decode("utf-8", errors="replace")
    except Unreadable as error:
        raise UserError(f"{path} cannot be read: {error.reason}") from None


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """What is in a folder, sorted by name: the order of a source must not depend on the file system."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise UserError(f"folder {str(folder)!r} cannot be read: {error.strerror}") from None


def _tree(folder: Path, skipped: set[str]) -> Iterator[Path]:
    """Every file below a folder, one folder in memory at a time."""
    for entry in _entries(folder):
        if entry.name in skipped:
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _tree(Path(entry.path), skipped)
        elif entry.is_file():
            yield Path(entry.path)


def _matching(pattern: str) -> Iterator[Path]:
    """The files that a glob matches, in a fixed order; unlike `sorted(glob(...))` the list is never held."""
    path = user_path(pattern)
    found = False
    for match in [path] if path.is_file() else _glob(Path(path.anchor), path.relative_to(path.anchor).parts):
        found = True
        yield match
    if not found:
        raise UserError(f"no file matches {pattern!r}{_hint(path)}")


def _glob(folder: Path, parts: tuple[str, ...]) -> Iterator[Path]:
    """Files below `folder` that match the parts of a pattern; as in a shell, wildcards do not match leading dots."""
    if not parts:
        return
    head, rest = parts[0], parts[1:]
    if not _has_wildcard(head):
        if (folder / head).is_dir():
            yield from _glob(folder / head, rest)
        elif not rest and (folder / head).is_file():
            yield folder / head
        return
    if head == "**" and rest:
        yield from _glob(folder, rest)
    for entry in _entries(folder):
        if entry.name.startswith(".") > head.startswith(".") or not fnmatchcase(entry.name, head):
            continue
        # links to folders are not followed below `**`: they can lead in a circle
        if entry.is_dir(follow_symlinks=head != "**"):
            yield from _glob(Path(entry.path), parts if head == "**" else rest)
        elif not rest and entry.is_file():
            yield Path(entry.path)


def _has_wildcard(part: str) -> bool:
    return any(sign in part for sign in "*?[")


def _hint(path: Path) -> str:
    """Why a pattern may match nothing: it is a folder, or a folder that it names is not there."""
    if path.is_dir():
        return f": it is a folder; did you mean {str(path / '**')!r}?"
    folder = Path(path.anchor)
    for part in path.relative_to(path.anchor).parts[:-1]:
        if _has_wildcard(part):
            break
        folder /= part
        if not folder.is_dir():
            return f": folder {str(folder)!r} does not exist"
    return ""


def file_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, which may be compressed (.gz, .zst), one at a time."""
    try:
        with _open(path) as file:
            yield from file
    except UserError:
        raise
    except (EOFError, zlib.error, OSError) as error:
        raise UserError(f"{path} cannot be read: {first_line(error)}") from None


def _open(path: Path) -> io.BufferedIOBase:
    if path.suffix == ".gz":
        return gzip.open(path)
    if path.suffix == ".zst":
        import zstandard

        return io.BufferedReader(_Zstandard(path, zstandard), 1 << 20)
    return path.open("rb")


class _Zstandard(io.RawIOBase):
    """Decompresses frame after frame, and notices a file that stops inside one: zstandard's own reader does not."""

    def __init__(self, path: Path, zstandard: Any) -> None:
        self._zstandard = zstandard
        self._file = path.open("rb")
        self._frame: Any = None
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            compressed = self._file.read(1 << 16)
            if not compressed:
                if self._frame is not None:
                    raise EOFError("the compressed file stops in the middle")
                return 0
            self._ready = self._decompress(compressed)
        part, self._ready = self._ready[: len(buffer)], self._ready[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)

    def _decompress(self, compressed: bytes) -> bytes:
        out = []
        while compressed:
            if self._frame is None:
                # files made with --long need a window larger than the default limit
                self._frame = self._zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()
            try:
                out.append(self._frame.decompress(compressed))
            except self._zstandard.ZstdError as error:
                raise OSError(str(error)) from None
            compressed = self._frame.unused_data if self._frame.eof else b""
            self._frame = None if self._frame.eof else self._frame
        return b"".join(out)

    def close(self) -> None:
        self._file.close()
        super().close()
