"""One checkpoint: its files, how it is filled, checked and read. No pickle is read or written.

    step-00000500/
        model.safetensors, optimizer.safetensors, ...    named tensors, one file for each stem
        state.json                                       everything else that a run needs to go on
        manifest.json                                    step, score, size and SHA-256 of each file, and of itself

Where no process has the whole of a tensor, each writes its rows, and a stem has several files:
`model-00001-of-00004.safetensors`. A tensor is then the rows of all files that have its name, one below the other.

What makes the writing atomic, and which checkpoints are kept: `checkpoints.py`.
"""

import math
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from skipless.config.base import Config
from skipless.errors import UserError, unknown
from skipless.storage.atomic_files import (
    to_json,
)
from skipless.storage.hashing import hash_bytes
from skipless.storage.manifest import MANIFEST, Damaged, Depth, FileEntry, Manifest, parse_json, unreadable
from skipless.storage.tensors import TENSORS, Rows, read_rows

FORMAT = 1

STATE = "state.json"

AVERAGE = "ema"
"""The stem of the weights' average over steps, beside `model`."""

ASIDE = ".old-"

FOLDER = re.compile(rf"({re.escape(ASIDE)})?step-(?P<step>\d{{8,}})")

_SHARD = re.compile(r"(?P<stem>.+)-\d{5}-of-\d{5}")


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


def render_state(state: Mapping[str, Any]) -> bytes:
    """The content of `state.json`."""
    try:
        return to_json(dict(state)).encode()
    except (TypeError, ValueError) as error:
        raise UserError(f"the state of a checkpoint must be JSON: {error}") from error


def fill(folder: Path, step: int, files: dict[str, FileEntry], state: bytes, score: float | None) -> None:
    """Add to the files of tensors what makes a checkpoint of them."""
    (folder / STATE).write_bytes(state)
    files[STATE] = FileEntry(size=len(state), sha256=hash_bytes(state))
    usable = float(score) if score is not None and math.isfinite(score) else None
    Manifest(About(step=step, score=usable).model_dump(), files).write(folder)


def open_checkpoint(folder: Path, depth: Depth = "all") -> Checkpoint:
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
    match = FOLDER.fullmatch(folder.name)
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
