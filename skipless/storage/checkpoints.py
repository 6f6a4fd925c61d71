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

import math
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from skipless.config.base import Config
from skipless.errors import UserError, unknown
from skipless.storage.files import (
    NO_ROOM,
    DiskFull,
    fsync,
    leftovers,
    make_folder,
    remove_folder,
    staged_folder,
    sweep,
    to_json,
    write_text,
)
from skipless.storage.hashing import hash_bytes
from skipless.storage.manifest import MANIFEST, Damaged, Depth, FileEntry, Manifest, Unreadable, parse_json, unreadable
from skipless.storage.save_group import SaveGroup, SingleProcess
from skipless.storage.tensors import TENSORS, NamedTensors, Rows, read_rows, write_tensors

FORMAT = 1

STATE = "state.json"

AVERAGE = "ema"
"""The stem of the weights' average over steps, beside `model`."""

_ASIDE = ".old-"

_FOLDER = re.compile(rf"({re.escape(_ASIDE)})?step-(?P<step>\d{{8,}})")

_STEM = re.compile(r"[A-Za-z0-9_-]+")

_SHARD = re.compile(r"(?P<stem>.+)-\d{5}-of-\d{5}")

_MARGIN = 16 << 20  # room for the headers, the folder itself, and the log lines that others write meanwhile


class About(Config):
    """What the manifest of a checkpoint says beside its files."""

    format: int = Field(FORMAT, description="Version of the layout of the folder.")
    step: int = Field(ge=0, description="Optimiser steps taken.")
    score: float | None = Field(description="Lower is better; none if it was not measured or not finite.")

    @classmethod
    def of(cls, manifest: Manifest) -> Self:
        """Raises Damaged where the manifest is not that of a checkpoint which this version reads."""
        if (found := manifest.about.get("format")) != FORMAT:
            raise Damaged(f"{MANIFEST} is of format {found!r}, and this version reads {FORMAT}")
        try:
            return cls.model_validate(manifest.about)
        except ValidationError as error:
            raise Damaged(f"{MANIFEST} is not a checkpoint's: {error.errors()[0]['msg']}") from error


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
                return {name: read_rows(name, holding, rows) for name, holding in holders.items()}
        except (OSError, SafetensorError) as error:
            raise UserError(f"{self.path}: {stem} can no longer be read: {error}") from error


class Checkpoints:
    """The checkpoints in one folder: the newest `keep_last` that are valid, and the best by score.

    Only one process may save, or the ranks of a `save_group` together; many may read. A reader that is overtaken by
    pruning gets a UserError, never a mixture. The first save leaves a `note`, a file outside of the folder: it tells a
    folder that was lost from one that never was.
    """

    def __init__(
        self,
        folder: Path | str,
        keep_last: int = 2,
        keep_best: bool = True,
        save_group: SaveGroup | None = None,
        note: Path | None = None,
    ) -> None:
        if keep_last < 1:
            raise UserError(f"keep_last is {keep_last}; at least 1 checkpoint must be kept")
        self.folder = Path(folder)
        self.keep_last = keep_last
        self.keep_best = keep_best
        self.save_group = save_group or SingleProcess()
        self.note = note
        self._just_saved: Path | None = None
        self._known_valid: dict[Path, Any] = {}
        self._unreadable: set[Path] = set()

    def save(
        self, step: int, tensors: Mapping[str, NamedTensors], state: Mapping[str, Any], score: float | None = None
    ) -> Path:
        """Write the checkpoint of `step` and prune. `tensors` has the named tensors of each file by its stem.

        When this returns the checkpoint survives a loss of power. If it does not fit on the disk, DiskFull is raised
        and the earlier ones are as they were. `state` must be JSON; a score that is not finite counts as none.
        """
        return self._save(step, tensors, render_state(state), score)

    def path_of(self, step: int) -> Path:
        """Where the checkpoint of a step is, or would be."""
        return self.folder / f"step-{step:08d}"

    def _save(self, step: int, tensors: Mapping[str, NamedTensors], state: bytes, score: float | None) -> Path:
        path = self.path_of(step)
        with self.save_group.raise_on_all_ranks(), self._disk_full(step):
            make_folder(self.folder)
        self._check_room(step, tensors, state)
        if self.save_group.is_main_process:
            self._save_as_main(path, step, tensors, state, score)
            self._just_saved = path
            self._known_valid[path] = _signature(path)
            self.prune()
        else:
            self._write(self.folder / self.save_group.exchange(None)[0], step, tensors)
        return path

    def _save_as_main(
        self, path: Path, step: int, tensors: Mapping[str, NamedTensors], state: bytes, score: float | None
    ) -> None:
        """Stage the folder for all ranks, and put it in its place when the files of all are in it."""
        aside = self.folder / f"{_ASIDE}{path.name}"
        with self._disk_full(step):
            if aside.exists() and path.exists():
                remove_folder(aside)
            with staged_folder(path, set_aside=aside) as staging:
                self.save_group.exchange(staging.name)
                files = self._write(staging, step, tensors)
                _fill(staging, step, files, state, score)
            if self.note is not None and not self.note.exists():
                write_text(self.note, "")

    def _write(self, staging: Path, step: int, tensors: Mapping[str, NamedTensors]) -> dict[str, FileEntry]:
        """Write this rank's files of tensors; the entries of what all ranks have written."""
        own: dict[str, FileEntry] = {}
        with self.save_group.raise_on_all_ranks(), self._disk_full(step):
            for stem, named in tensors.items():
                if not _STEM.fullmatch(stem):
                    raise UserError(f"{stem!r} cannot name a file of tensors; letters, digits, '-' and '_' can")
                own[f"{stem}{TENSORS}"] = write_tensors(staging / f"{stem}{TENSORS}", named)
        of_all = self.save_group.exchange({name: entry.model_dump(exclude_none=True) for name, entry in own.items()})
        return {name: FileEntry.model_validate(entry) for part in of_all for name, entry in part.items()}

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
        needed = sum(self.save_group.exchange(own)) + len(state) + _MARGIN
        with self.save_group.raise_on_all_ranks():
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
        except Damaged as damage:
            return str(damage)
        return None

    @staticmethod
    def load(path: Path | str, *, verified: bool = False) -> Checkpoint:
        """The checkpoint at `path`; a UserError with the reason if it is not valid.

        Where another process has just `verified` it, the hashes are not checked again.
        """
        try:
            return _open(Path(path), "sizes" if verified else "all")
        except Damaged as damage:
            raise UserError(f"{path} is not a valid checkpoint: {damage}") from None

    def latest_valid(self) -> tuple[Checkpoint | None, list[tuple[Path, str]]]:
        """The newest checkpoint that is valid, if any, and the damaged ones that are newer, each with the reason."""
        damaged: list[tuple[Path, str]] = []
        for path in reversed(self.all()):
            try:
                return _open(path), damaged
            except Damaged as damage:
                if path.exists():  # else the process that trains has just pruned it, and nothing is wrong
                    damaged.append((path, str(damage)))
        return None, damaged

    def prune(self) -> list[Path]:
        """Remove what is older than the newest `keep_last` valid checkpoints, but for the best; `save` does this.

        Nothing is removed while there are fewer valid ones than `keep_last`. A damaged one that is newer than those is
        left for its owner to look at. One that could not be read may be the best, and stays.
        """
        self._unreadable.clear()
        paths = self.all()
        last = list(islice((path for path in reversed(paths) if self._is_valid(path)), self.keep_last))
        older = paths[: paths.index(last[-1])] if len(last) == self.keep_last else []
        spared = {self._just_saved, self._best(paths) if self.keep_best else None, *self._unreadable}
        removed = [path for path in older if path not in spared]
        for path in removed:
            remove_folder(path)
            self._known_valid.pop(path, None)
        self._remove_superseded()
        return removed

    def leftovers(self) -> list[Path]:
        """What crashes left, or another process is at this instant: folders that are staged or set aside."""
        return [*leftovers(self.folder), *self._set_aside()]

    def sweep(self) -> None:
        """Remove what crashes left staged or set aside; a checkpoint without a successor gets its name back."""
        sweep(self.folder)
        self._remove_superseded()
        for path in self._set_aside():
            path.rename(path.with_name(path.name.removeprefix(_ASIDE)))
            fsync(self.folder)

    def _set_aside(self) -> list[Path]:
        return sorted(path for path in self.folder.glob(f"{_ASIDE}*") if _FOLDER.fullmatch(path.name))

    def _remove_superseded(self) -> None:
        standing = self.all()
        for path in self._set_aside():
            if path not in standing:
                remove_folder(path)
                self._known_valid.pop(path, None)

    def _best(self, paths: Iterable[Path]) -> Path | None:
        scores = {path: score for path in paths if (score := self._score(path)) is not None}
        return next((path for path in sorted(scores, key=scores.__getitem__) if self._is_valid(path)), None)

    def _is_valid(self, path: Path) -> bool:
        """As `verify`, but what this process has written or read before, and nobody has touched, is not read again.

        A second reading would come from the system's cache of the file, and so could not tell more.
        """
        try:
            signature = _signature(path)
            if self._known_valid.get(path) != signature:
                _open(path)
                self._known_valid[path] = signature
        except OSError as error:
            self._note_unreadable(path, unreadable(path.name, error))
            return False
        except Damaged as damage:
            self._note_unreadable(path, damage)
            return False
        return True

    def _score(self, path: Path) -> float | None:
        try:
            return About.of(Manifest.read(path)).score
        except Damaged as damage:
            self._note_unreadable(path, damage)
            return None

    def _note_unreadable(self, path: Path, damage: Damaged) -> None:
        if isinstance(damage, Unreadable):
            self._unreadable.add(path)


def render_state(state: Mapping[str, Any]) -> bytes:
    """The content of `state.json`."""
    try:
        return to_json(dict(state)).encode()
    except (TypeError, ValueError) as error:
        raise UserError(f"the state of a checkpoint must be JSON: {error}") from error


def _fill(folder: Path, step: int, files: dict[str, FileEntry], state: bytes, score: float | None) -> None:
    """Add to the files of tensors what makes a checkpoint of them."""
    (folder / STATE).write_bytes(state)
    files[STATE] = FileEntry(size=len(state), sha256=hash_bytes(state))
    usable = float(score) if score is not None and math.isfinite(score) else None
    Manifest(About(step=step, score=usable).model_dump(), files).write(folder)


def _open(folder: Path, depth: Depth = "all") -> Checkpoint:
    """The checkpoint in `folder`, after everything in it was checked; raises Damaged."""
    try:
        names = _regular_files(folder)
        if MANIFEST not in names:
            raise Damaged(f"{MANIFEST} is missing")
        manifest = Manifest.read(folder)
        about = About.of(manifest)
        _check_names(folder, about.step, set(manifest.files), names - {MANIFEST})
        manifest.verify(folder, depth)
        for name in manifest.files:
            _check_format(folder / name)
        state = parse_json((folder / STATE).read_bytes(), STATE)
    except OSError as error:
        raise unreadable(Path(error.filename or folder).name, error) from error
    files: dict[str, tuple[str, ...]] = {}
    for name in sorted(name for name in manifest.files if name.endswith(TENSORS)):
        stem = name.removesuffix(TENSORS)
        shard = _SHARD.fullmatch(stem)
        stem = shard["stem"] if shard else stem
        files[stem] = (*files.get(stem, ()), name)
    return Checkpoint(path=folder, step=about.step, score=about.score, state=state, files=files)


def _regular_files(folder: Path) -> set[str]:
    """The names in `folder`. Names that start with a dot are the system's own and nothing reads them."""
    entries = {entry.name: entry for entry in folder.iterdir() if not entry.name.startswith(".")}
    for name, entry in entries.items():
        if entry.is_symlink() or not entry.is_file() or entry.suffix not in (".json", TENSORS):
            raise Damaged(f"{name} does not belong in a checkpoint")
    return set(entries)


def _check_names(folder: Path, step: int, named: set[str], found: set[str]) -> None:
    if missing := sorted((named | {STATE}) - found):
        raise Damaged(f"{missing[0]} is missing")
    if extra := sorted(found - named):
        raise Damaged(f"{extra[0]} is not in {MANIFEST}")
    match = _FOLDER.fullmatch(folder.name)
    if match and int(match["step"]) != step:
        raise Damaged(f"its name says step {int(match['step'])} and {MANIFEST} says {step}")


def _check_format(path: Path) -> None:
    if path.suffix != TENSORS:
        parse_json(path.read_bytes(), path.name)
        return
    try:
        with safe_open(path, framework="pt"):
            pass
    except SafetensorError as error:
        raise Damaged(f"{path.name} is not a safetensors file: {error}") from error


def _signature(folder: Path) -> list[tuple[str, int, int, int]]:
    stats = [(entry.name, entry.stat()) for entry in folder.iterdir()]
    return sorted((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
