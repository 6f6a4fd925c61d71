"""The checkpoints of a run: saved in one piece, found, verified, pruned.

A checkpoint is staged, synced to disk and renamed (`staged_folder` in atomic_files.py), so a crash never leaves half
of one. Damage that comes later is found by the hashes, and `Checkpoints.latest_valid` then falls back to an older one.

Saving a step that is already there sets the old folder aside as `.old-step-<n>`, renames the new one into place, and
only then removes the old. A crash between the renames leaves the set-aside folder, which serves as
that step's checkpoint until a new one is saved.
"""

import re
import shutil
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import Any

from skipless.errors import UserError
from skipless.storage.atomic_files import (
    DiskFull,
    fsync,
    leftovers,
    make_folder,
    no_room_said,
    remove_folder,
    staged_folder,
    sweep,
    write_text,
)
from skipless.storage.checkpoint_format import ASIDE, FOLDER, About, Checkpoint, fill, open_checkpoint, render_state
from skipless.storage.manifest import Damaged, FileEntry, Manifest, Unreadable, unreadable
from skipless.storage.save_group import SaveGroup, SingleProcess
from skipless.storage.tensors import TENSORS, NamedTensors, write_tensors

_STEM = re.compile(r"[A-Za-z0-9_-]+")

_MARGIN = 16 << 20  # room for the headers, the folder itself, and the log lines that others write meanwhile


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
        aside = self.folder / f"{ASIDE}{path.name}"
        with self._disk_full(step):
            if aside.exists() and path.exists():
                remove_folder(aside)
            with staged_folder(path, set_aside=aside) as staging:
                self.save_group.exchange(staging.name)
                files = self._write(staging, step, tensors)
                fill(staging, step, files, state, score)
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

    def _disk_full(self, step: int) -> AbstractContextManager[None]:
        return no_room_said(f"the checkpoint of step {step} in {self.folder}")

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
            if match := FOLDER.fullmatch(entry.name):
                found[int(match["step"])] = entry
        return [found[step] for step in sorted(found)]

    @staticmethod
    def verify(path: Path | str) -> str | None:
        """Why a checkpoint is damaged, or None. Reads all of it and checks names, sizes, hashes and formats."""
        try:
            open_checkpoint(Path(path))
        except Damaged as damage:
            return str(damage)
        return None

    @staticmethod
    def load(path: Path | str, *, verified: bool = False) -> Checkpoint:
        """The checkpoint at `path`; a UserError with the reason if it is not valid.

        Where another process has just `verified` it, the hashes are not checked again.
        """
        try:
            return open_checkpoint(Path(path), "sizes" if verified else "all")
        except Damaged as damage:
            raise UserError(f"{path} is not a valid checkpoint: {damage}") from None

    def latest_valid(self) -> tuple[Checkpoint | None, list[tuple[Path, str]]]:
        """The newest checkpoint that is valid, if any, and the damaged ones that are newer, each with the reason."""
        damaged: list[tuple[Path, str]] = []
        for path in reversed(self.all()):
            try:
                return open_checkpoint(path), damaged
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
            path.rename(path.with_name(path.name.removeprefix(ASIDE)))
            fsync(self.folder)

    def _set_aside(self) -> list[Path]:
        return sorted(path for path in self.folder.glob(f"{ASIDE}*") if FOLDER.fullmatch(path.name))

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
                open_checkpoint(path)
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


def _signature(folder: Path) -> list[tuple[str, int, int, int]]:
    stats = [(entry.name, entry.stat()) for entry in folder.iterdir()]
    return sorted((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
