"""Checkpoints: write, verify, find and restore, with safetensors and JSON only; no pickle is read or written.

    checkpoints/step-00000500/
        model.safetensors, optimizer.safetensors, ...    named tensors, one file for each stem
        state.json                                       everything else that a run needs to go on
        manifest.json                                    step, score, size and SHA-256 of each file, and of itself

Where no process has the whole of a tensor, each writes its rows, and a stem has several files:
`model-00001-of-00004.safetensors`. A tensor is then the rows of all files that have its name, one below the other.

A checkpoint is staged, forced to the disk and renamed, so a crash never leaves half of one. Damage that comes later is
found by the hashes, and `Checkpoints.latest_valid` then falls back to an older one.

Saving a step that is already there sets the old folder aside as `.old-step-<n>`, renames the new one into place, and
only then removes the old. A crash between the renames leaves the set-aside folder, which stands for its step for as
long as there is no other.
"""

import errno
import hashlib
import json
import math
import random
import re
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from pydantic import Field, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from skipless.atomic import fsync, make_folder, remove_folder, sha256, staged_folder, to_json
from skipless.config import Config
from skipless.errors import UserError, unknown
from skipless.parallel import Channel

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "state.json"
TENSORS = ".safetensors"

_FOLDER = re.compile(r"(?P<aside>\.old-)?step-(?P<step>\d{8,})")
_STEM = re.compile(r"[A-Za-z0-9_-]+")
_SHARD = re.compile(r"(?P<stem>.+)-\d{5}-of-\d{5}")
_CHUNK = 4 << 20  # large enough that hashing and writing spend their time outside Python's lock
_MARGIN = 16 << 20  # room for the headers, the folder itself, and the log lines that others write meanwhile
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# The names of the safetensors format, little-endian.
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

NamedTensors = Mapping[str, Tensor]
Rows = Callable[[str, tuple[int, ...]], slice | None]
"""Which rows are wanted of a tensor, by its name and its shape; None for all of it."""


class DiskFull(UserError):
    """There is no room for a checkpoint. Nothing of it was left behind, and the earlier ones are as they were."""

    status = 3


class _Damaged(Exception):
    """Why a folder is not a valid checkpoint."""


class FileEntry(Config):
    """What the manifest says of one file."""

    size: int = Field(ge=0, description="Bytes.")
    sha256: str = Field(description="SHA-256 of the content, in hexadecimal.")


class Manifest(Config):
    """What a checkpoint consists of. Its file also has the SHA-256 of this content, as `sha256`."""

    format: int = Field(FORMAT, description="Version of the layout of the folder.")
    step: int = Field(ge=0, description="Optimiser steps taken.")
    score: float | None = Field(description="Lower is better; none if it was not measured or not finite.")
    files: dict[str, FileEntry] = Field(description="All files but the manifest.")

    def to_text(self) -> str:
        """The content of `manifest.json`."""
        content = self.model_dump()
        return to_json({**content, "sha256": _content_hash(content)})

    @classmethod
    def read(cls, path: Path) -> Self:
        """The manifest at `path`, if not one bit of it has changed."""
        text = path.read_bytes()
        content = _parse_json(text, path.name)
        digest = content.pop("sha256", None)
        if digest != _content_hash(content):
            raise _Damaged(f"{path.name} does not match its own hash")
        # The bytes as well, for a flipped bit can change a file and not its meaning: 1e-05 is also 1E-05.
        if text != to_json({**content, "sha256": digest}).encode():
            raise _Damaged(f"{path.name} is not as it was written")
        if content.get("format") != FORMAT:
            raise _Damaged(f"{path.name} is of format {content.get('format')!r}, and this version reads {FORMAT}")
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            raise _Damaged(f"{path.name} is not a manifest: {error.errors()[0]['msg']}") from error


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found valid. Its tensors are read when they are asked for."""

    path: Path
    step: int
    score: float | None
    state: dict[str, Any]
    files: Mapping[str, tuple[str, ...]]
    """The names of the files of each stem, in the order of their rows."""

    @property
    def stems(self) -> tuple[str, ...]:
        """What `tensors` can be asked for."""
        return tuple(self.files)

    def tensors(self, stem: str, rows: Rows = lambda name, shape: None) -> dict[str, Tensor]:
        """The named tensors of a stem, `model` for `model.safetensors`, on the CPU, or only the rows that are wanted.

        Tensors that were saved in parts come back in one piece.
        """
        if stem not in self.files:
            raise unknown("tensor file", stem, self.stems)
        try:
            with ExitStack() as stack:
                files = [stack.enter_context(safe_open(self.path / name, "pt")) for name in self.files[stem]]
                holders: dict[str, list[Any]] = {}
                for file in files:
                    for name in file.keys():  # noqa: SIM118  (it is no mapping)
                        holders.setdefault(name, []).append(file)
                return {name: _read(name, holding, rows) for name, holding in holders.items()}
        except (OSError, SafetensorError) as error:
            raise UserError(f"{self.path}: {stem} can no longer be read: {error}") from error


def _read(name: str, files: list[Any], rows: Rows) -> Tensor:
    """The wanted rows of a tensor whose rows lie in one or several files.

    A copy, for what safetensors returns may be the file itself, mapped: it changes, or ends in SIGBUS, with it.
    """
    shapes = [tuple(file.get_slice(name).get_shape()) for file in files]
    length = sum(shape[0] for shape in shapes) if shapes[0] else 0
    wanted = rows(name, (length, *shapes[0][1:]) if shapes[0] else ())
    if wanted is None and len(files) == 1:
        return files[0].get_tensor(name).clone()
    start, stop = (0, length) if wanted is None else (wanted.start, wanted.stop)
    parts, before = [], 0
    for file, (count, *_) in zip(files, shapes, strict=True):
        low, high = max(start - before, 0), min(stop - before, count)
        if low < high or not parts:  # an empty part knows the type
            parts.append(file.get_slice(name)[min(low, count) : max(high, min(low, count))])
        before += count
    return torch.cat(parts)


class Checkpoints:
    """The checkpoints in one folder: the newest `keep_last` that are valid, and the best by score.

    Only one process may save, or a crew that saves together; many may read. A reader that is overtaken by pruning gets
    a UserError, never a mixture.
    """

    def __init__(
        self, folder: Path | str, keep_last: int = 2, keep_best: bool = True, crew: Channel | None = None
    ) -> None:
        if keep_last < 1:
            raise UserError(f"keep_last is {keep_last}; at least 1 checkpoint must be kept")
        self.folder = Path(folder)
        self.keep_last = keep_last
        self.keep_best = keep_best
        self.crew = crew or Channel()
        self._just_saved: Path | None = None
        self._known_valid: dict[Path, Any] = {}

    def save(
        self, step: int, tensors: Mapping[str, NamedTensors], state: Mapping[str, Any], score: float | None = None
    ) -> Path:
        """Write the checkpoint of `step` and prune. `tensors` has the named tensors of each file by its stem.

        When this returns the checkpoint survives a loss of power. If it does not fit on the disk, DiskFull is raised
        and the earlier ones are as they were. `state` must be JSON; a score that is not finite counts as none.
        """
        return self._save(step, tensors, _render_state(state), score)

    def _save(self, step: int, tensors: Mapping[str, NamedTensors], state: bytes, score: float | None) -> Path:
        path = self.folder / f"step-{step:08d}"
        with self.crew.together(), self._disk_full(step):
            make_folder(self.folder)
        self._check_room(step, tensors, state)
        if self.crew.leads:
            self._lead(path, step, tensors, state, score)
            self._just_saved = path
            self._known_valid[path] = _signature(path)
            self.prune()
        else:
            self._write(self.folder / self.crew.exchange(None)[0], step, tensors)
        return path

    def _lead(
        self, path: Path, step: int, tensors: Mapping[str, NamedTensors], state: bytes, score: float | None
    ) -> None:
        """Stage the folder for all, and put it in its place when everyone's files are in it."""
        aside = self.folder / f".old-{path.name}"
        with self._disk_full(step):
            if aside.exists() and path.exists():
                remove_folder(aside)
            with staged_folder(path, set_aside=aside) as staging:
                self.crew.exchange(staging.name)
                files = self._write(staging, step, tensors)
                _fill(staging, step, files, state, score)

    def _write(self, staging: Path, step: int, tensors: Mapping[str, NamedTensors]) -> dict[str, FileEntry]:
        """Write this process's files of tensors; what all have written together."""
        own: dict[str, FileEntry] = {}
        with self.crew.together(), self._disk_full(step):
            for stem, named in tensors.items():
                if not _STEM.fullmatch(stem):
                    raise UserError(f"{stem!r} cannot name a file of tensors; letters, digits, '-' and '_' can")
                own[f"{stem}{TENSORS}"] = _write_tensors(staging / f"{stem}{TENSORS}", named)
                if not self.crew.leads:
                    fsync(staging / f"{stem}{TENSORS}")
        everyone = self.crew.exchange({name: entry.model_dump() for name, entry in own.items()})
        return {name: FileEntry.model_validate(entry) for part in everyone for name, entry in part.items()}

    @contextmanager
    def _disk_full(self, step: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in NO_ROOM:
                raise DiskFull(
                    f"no room for the checkpoint of step {step} in {self.folder}: {error.strerror}"
                ) from error
            raise

    def _check_room(self, step: int, tensors: Mapping[str, NamedTensors], state: bytes) -> None:
        own = sum(tensor.nbytes for named in tensors.values() for tensor in named.values())
        needed = sum(self.crew.exchange(own)) + len(state) + _MARGIN
        with self.crew.together():
            free = shutil.disk_usage(self.folder).free
            if needed > free:
                raise DiskFull(
                    f"no room for the checkpoint of step {step} in {self.folder}: "
                    f"it needs {needed / 1e6:,.0f} MB and {free / 1e6:,.0f} MB are free"
                )

    def all(self) -> list[Path]:
        """The folders of all checkpoints, valid or not, by step."""
        found: dict[int, Path] = {}
        # In this order `.old-step-<n>` comes before `step-<n>`, so what was set aside counts only where it is alone.
        for entry in sorted(self.folder.iterdir()) if self.folder.is_dir() else []:
            if match := _FOLDER.fullmatch(entry.name):
                found[int(match["step"])] = entry
        return [found[step] for step in sorted(found)]

    @staticmethod
    def verify(path: Path | str) -> str | None:
        """Why a checkpoint is damaged, or None. Reads all of it and checks names, sizes, hashes and formats."""
        try:
            _open(Path(path))
        except _Damaged as damage:
            return str(damage)
        return None

    @staticmethod
    def load(path: Path | str, *, verified: bool = False) -> Checkpoint:
        """The checkpoint at `path`; a UserError with the reason if it is not valid.

        Where another process has just `verified` it, the contents of its files are not read again.
        """
        try:
            return _open(Path(path), hashes=not verified)
        except _Damaged as damage:
            raise UserError(f"{path} is not a valid checkpoint: {damage}") from None

    def latest_valid(self) -> tuple[Checkpoint | None, list[tuple[Path, str]]]:
        """The newest checkpoint that is valid, if any, and the damaged ones that are newer, each with the reason."""
        damaged: list[tuple[Path, str]] = []
        for path in reversed(self.all()):
            try:
                return _open(path), damaged
            except _Damaged as damage:
                if path.exists():  # else the process that trains has just pruned it, and nothing is wrong
                    damaged.append((path, str(damage)))
        return None, damaged

    def prune(self) -> list[Path]:
        """Remove what is older than the newest `keep_last` valid checkpoints, but for the best; `save` does this.

        Nothing is removed while there are fewer valid ones than `keep_last`. A damaged one that is newer than those is
        left for its owner to look at.
        """
        paths = self.all()
        last = list(islice((path for path in reversed(paths) if self._is_valid(path)), self.keep_last))
        older = paths[: paths.index(last[-1])] if len(last) == self.keep_last else []
        spared = {self._just_saved, self._best(paths) if self.keep_best else None}
        removed = [path for path in older if path not in spared]
        superseded = [path for path in self.folder.glob(".old-step-*") if path not in paths]
        for path in removed + superseded:
            remove_folder(path)
            self._known_valid.pop(path, None)
        return removed

    def _best(self, paths: Iterable[Path]) -> Path | None:
        scores = {path: score for path in paths if (score := _score(path)) is not None}
        return next((path for path in sorted(scores, key=scores.__getitem__) if self._is_valid(path)), None)

    def _is_valid(self, path: Path) -> bool:
        """As `verify`, but what this process has written or read before, and nobody has touched, is not read again.

        A second reading would come from the system's cache of the file, and so could not tell more.
        """
        try:
            signature = _signature(path)
        except OSError:
            return False
        if self._known_valid.get(path) != signature:
            if self.verify(path) is not None:
                return False
            self._known_valid[path] = signature
        return True


class Bystander:
    """Stands in for `BackgroundSaver` in a process that writes nothing but takes part in gathering tensors."""

    def submit(
        self, step: int, tensors: Mapping[str, NamedTensors], state: Mapping[str, Any], score: Any = None
    ) -> None:
        """Take part in gathering."""
        for named in tensors.values():
            for _ in named.values():
                pass

    def wait(self) -> None:
        """There is nothing to wait for."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class BackgroundSaver:
    """Saves in a thread, so that training goes on while the disk is busy. At most one save is in flight.

    `submit` copies the tensors, into memory that is used again each time, and returns; the caller may then change them.
    What went wrong in the thread is raised by the next `submit`, `wait` or `close`, once.

        with BackgroundSaver(checkpoints) as saver:
            saver.submit(step, {"model": model.state_dict()}, {"step": step}, score=loss)
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        self.checkpoints = checkpoints
        self._buffers: dict[str, dict[str, Tensor]] = {}
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._in_flight: Future[Path] | None = None

    def submit(
        self, step: int, tensors: Mapping[str, NamedTensors], state: Mapping[str, Any], score: float | None = None
    ) -> None:
        """As `Checkpoints.save`, but returns as soon as the previous save is done and the tensors are copied."""
        self.wait()
        self._buffers = {stem: _copies(named, self._buffers.get(stem, {})) for stem, named in tensors.items()}
        self._in_flight = self._pool.submit(self.checkpoints._save, step, self._buffers, _render_state(state), score)

    def wait(self) -> None:
        """Wait for the save in flight, and raise what went wrong in it."""
        if self._in_flight is None:
            return
        try:
            self._in_flight.result()
        finally:
            # An interrupt can end the waiting before the save ends, and the thread then still reads the buffers.
            if self._in_flight.done():
                self._in_flight = None

    def close(self) -> None:
        """Wait as `wait` does, and end the thread."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"the checkpoint in flight failed too: {failure}")  # and must not hide the first error


@torch.no_grad()
def _copies(named: NamedTensors, buffers: NamedTensors) -> dict[str, Tensor]:
    copies = {}
    for name, tensor in named.items():
        buffer = buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        copies[name] = buffer.copy_(tensor)
    return copies


def _render_state(state: Mapping[str, Any]) -> bytes:
    try:
        return to_json(dict(state)).encode()
    except (TypeError, ValueError) as error:
        raise UserError(f"the state of a checkpoint must be JSON: {error}") from error


def _fill(folder: Path, step: int, files: dict[str, FileEntry], state: bytes, score: float | None) -> None:
    """Add to the files of tensors what makes a checkpoint of them."""
    (folder / STATE).write_bytes(state)
    files[STATE] = FileEntry(size=len(state), sha256=hashlib.sha256(state).hexdigest())
    usable = float(score) if score is not None and math.isfinite(score) else None
    manifest = Manifest(step=step, score=usable, files=files)
    (folder / MANIFEST).write_bytes(manifest.to_text().encode())


def _write_tensors(path: Path, named: NamedTensors) -> FileEntry:
    """Write a safetensors file, hashing on the way: header length (8 bytes), header (JSON), bytes of the tensors.

    Each tensor is written from where it lies, in chunks, without a copy of the whole and without a second reading for
    the hash. Tensors that share memory are written once for each name.
    """
    # Wide types first, so that every tensor starts at a multiple of its item size; the header is padded to 8 for that.
    order = sorted(named, key=lambda name: (-named[name].dtype.itemsize, name))
    header, end = {}, 0
    for name in order:
        tensor = named[name]
        if tensor.dtype not in _DTYPES or name == "__metadata__":
            raise UserError(f"tensor {name!r} of type {tensor.dtype} cannot be stored as safetensors")
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("xb") as file:
        for part in (struct.pack("<Q", len(text)), text, *(named[name] for name in order)):
            data = _bytes_of(part) if isinstance(part, Tensor) else memoryview(part)
            for at in range(0, len(data), _CHUNK):
                digest.update(data[at : at + _CHUNK])
                file.write(data[at : at + _CHUNK])
    return FileEntry(size=8 + len(text) + end, sha256=digest.hexdigest())


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _open(folder: Path, *, hashes: bool = True) -> Checkpoint:
    """The checkpoint in `folder`, after everything in it was read and checked; raises _Damaged."""
    try:
        names = _regular_files(folder)
        if MANIFEST not in names:
            raise _Damaged(f"{MANIFEST} is missing")
        manifest = Manifest.read(folder / MANIFEST)
        _check_names(folder, manifest, names - {MANIFEST})
        for name, entry in manifest.files.items():
            _check_file(folder / name, entry, hashes=hashes)
        state = _parse_json((folder / STATE).read_bytes(), STATE)
    except OSError as error:
        raise _Damaged(f"{Path(error.filename or folder).name} cannot be read: {error.strerror}") from error
    files: dict[str, tuple[str, ...]] = {}
    for name in sorted(name for name in manifest.files if name.endswith(TENSORS)):
        stem = name.removesuffix(TENSORS)
        shard = _SHARD.fullmatch(stem)
        stem = shard["stem"] if shard else stem
        files[stem] = (*files.get(stem, ()), name)
    return Checkpoint(path=folder, step=manifest.step, score=manifest.score, state=state, files=files)


def _regular_files(folder: Path) -> set[str]:
    """The names in `folder`. Names that start with a dot are the system's own and nothing reads them."""
    entries = {entry.name: entry for entry in folder.iterdir() if not entry.name.startswith(".")}
    for name, entry in entries.items():
        if entry.is_symlink() or not entry.is_file() or entry.suffix not in (".json", TENSORS):
            raise _Damaged(f"{name} does not belong in a checkpoint")
    return set(entries)


def _check_names(folder: Path, manifest: Manifest, names: set[str]) -> None:
    if missing := sorted((set(manifest.files) | {STATE}) - names):
        raise _Damaged(f"{missing[0]} is missing")
    if extra := sorted(names - set(manifest.files)):
        raise _Damaged(f"{extra[0]} is not in {MANIFEST}")
    match = _FOLDER.fullmatch(folder.name)
    if match and int(match["step"]) != manifest.step:
        raise _Damaged(f"its name says step {int(match['step'])} and {MANIFEST} says {manifest.step}")


def _check_file(path: Path, entry: FileEntry, *, hashes: bool) -> None:
    size = path.stat().st_size
    if size != entry.size:
        raise _Damaged(f"{path.name} has {size} bytes instead of {entry.size}")
    if hashes and sha256(path) != entry.sha256:
        raise _Damaged(f"{path.name} does not match its hash")
    if path.suffix == TENSORS:
        try:
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError as error:
            raise _Damaged(f"{path.name} is not a safetensors file: {error}") from error
    else:
        _parse_json(path.read_bytes(), path.name)


def _parse_json(text: bytes, name: str) -> dict[str, Any]:
    try:
        content = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise _Damaged(f"{name} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise _Damaged(f"{name} is not a JSON object")
    return content


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _content_hash(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(to_json(content).encode()).hexdigest()


def _score(folder: Path) -> float | None:
    try:
        return Manifest.read(folder / MANIFEST).score
    except (OSError, _Damaged):
        return None


def _signature(folder: Path) -> list[tuple[str, int, int, int]]:
    stats = [(entry.name, entry.stat()) for entry in folder.iterdir()]
    return sorted((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def optimizer_tensors(optimizer: Optimizer, names: Mapping[Parameter, str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What an optimiser remembers of each parameter: tensors by `<parameter>/<key>`, and the rest as JSON.

    Options of the groups, such as the learning rate, are not in it: those come from the configuration and the schedule.
    The tensors are the optimiser's own, not copies.
    """
    tensors: dict[str, Tensor] = {}
    described: dict[str, Any] = {}
    for name, parameter in _named_parameters(optimizer, names).items():
        remembered = optimizer.state.get(parameter, {})
        held = {key: value for key, value in remembered.items() if isinstance(value, Tensor)}
        tensors.update({f"{name}/{key}": value for key, value in held.items()})
        scalars = {key: value for key, value in remembered.items() if key not in held}
        described[name] = {"tensors": sorted(held), "scalars": scalars}
    return tensors, {"parameters": described}


def load_optimizer(
    optimizer: Optimizer, names: Mapping[Parameter, str], tensors: NamedTensors, state: Mapping[str, Any]
) -> None:
    """Make an optimiser remember what `optimizer_tensors` returned; training then goes on bit for bit as it would have.

    The optimiser must have the same parameters by name; they may be grouped otherwise.
    """
    described = state["parameters"]
    parameters = _named_parameters(optimizer, names)
    _check_same("parameters", expected=set(parameters), found=set(described))
    stored = {f"{name}/{key}" for name, entry in described.items() for key in entry["tensors"]}
    _check_same("tensors", expected=stored, found=set(tensors))
    remembered = {}
    for index, name in enumerate(parameters):
        entry = described[name]
        # Copies, for the optimiser changes its tensors in place and those of the caller are not its own.
        values = {key: tensors[f"{name}/{key}"].clone() for key in entry["tensors"]} | entry["scalars"]
        if values:
            remembered[index] = values
    # PyTorch numbers parameters in the order of the groups, and knows which device each value belongs on.
    optimizer.load_state_dict({"state": remembered, "param_groups": optimizer.state_dict()["param_groups"]})


def _named_parameters(optimizer: Optimizer, names: Mapping[Parameter, str]) -> dict[str, Parameter]:
    """The optimiser's parameters by name, in the order of its groups."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    named = {names[parameter]: parameter for parameter in parameters if parameter in names}
    if len(named) != len(parameters):
        raise UserError(f"{len(parameters) - len(named)} parameters of the optimiser have no name of their own")
    return named


def _check_same(kind: str, expected: set[str], found: set[str]) -> None:
    problems = [
        f"{problem} {', '.join(sorted(some)[:3])}{f' and {len(some) - 3} more' if len(some) > 3 else ''}"
        for problem, some in (("missing", expected - found), ("unexpected", found - expected))
        if some
    ]
    if problems:
        raise UserError(f"the stored optimiser has other {kind}: {'; '.join(problems)}")


def rng_state() -> dict[str, Any]:
    """The state of the global random generators of PyTorch (CPU, and CUDA if present), Python and numpy, as JSON."""
    version, words, gauss = random.getstate()
    _, key, position, has_gauss, cached = np.random.get_state()
    return {
        "torch": _to_hex(torch.get_rng_state()),
        "cuda": [_to_hex(state) for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
        "python": {"version": version, "words": _words_to_hex(words), "gauss": gauss},
        "numpy": {"words": _words_to_hex(key), "position": position, "has_gauss": has_gauss, "gauss": cached},
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Set the global random generators to what `rng_state` returned. States of GPUs that are not here are left out."""
    torch.set_rng_state(_from_hex(state["torch"]))
    for device, text in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(_from_hex(text), device)
    python = state["python"]
    random.setstate((python["version"], tuple(_hex_to_words(python["words"]).tolist()), python["gauss"]))
    numpy = state["numpy"]
    words = _hex_to_words(numpy["words"])
    np.random.set_state(("MT19937", words, numpy["position"], numpy["has_gauss"], numpy["gauss"]))


def _to_hex(state: Tensor) -> str:
    return state.numpy().tobytes().hex()


def _from_hex(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def _words_to_hex(words: Any) -> str:
    return np.asarray(words, dtype="<u4").tobytes().hex()


def _hex_to_words(text: str) -> np.ndarray:
    return np.frombuffer(bytes.fromhex(text), dtype="<u4")
