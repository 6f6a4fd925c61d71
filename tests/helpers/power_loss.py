"""A loss of power, simulated: what is done to a folder is recorded, and replayed up to any point as a disk may have it.

`Recorder` notes the system calls that decide what survives (fsync, rename, mkdir, unlink …) as they are made, and
before each of them compares the folder with what it knows. So nothing is missed, whoever writes: a library in C as well
as Python. What is written between two such calls is one operation, of which any part may have reached the disk.

`crashes` gives the states that a file system may be in if the power fails after some of the operations. What was not
forced to the disk by an fsync of that very file or folder may be there or not, whatever was done before or after it:

- each new name, removal and rename since its folder's last fsync, independently of the others (a rename is atomic);
- each block of content since the file's last fsync: the old one, the new one, zeros, or the file ends before it.
"""

import itertools
import os
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK = 512
ROOT = 0
"""The number of the recorded folder itself; everything else below it gets the next one."""

Tree = dict[str, bytes | None]
"""Path → content, or None for a folder."""


@dataclass(frozen=True)
class Written:
    """A file has new content."""

    node: int
    content: bytes


@dataclass(frozen=True)
class Named:
    """A name in a folder is another file or folder now, or none; a rename changes two names at once."""

    changes: tuple[tuple[int, str, int | None], ...]
    source: tuple[int, str, int] | None = None
    """Of a rename: the name that goes away, if it is still that of what is renamed."""

    def touches(self, folder: int) -> bool:
        return any(where == folder for where, *_ in self.changes) or (
            self.source is not None and self.source[0] == folder
        )


@dataclass(frozen=True)
class Forced:
    """An fsync of a file or folder."""

    node: int


Operation = Written | Named | Forced


@dataclass
class Image:
    """Folders and files by number."""

    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})
    contents: dict[int, bytes] = field(default_factory=dict)

    def copy(self) -> "Image":
        return Image({node: dict(names) for node, names in self.folders.items()}, dict(self.contents))

    def apply(self, operation: Named) -> None:
        if operation.source is not None:
            folder, name, node = operation.source
            if self.folders.setdefault(folder, {}).get(name) == node:
                del self.folders[folder][name]
        for folder, name, node in operation.changes:
            if node is None:
                self.folders.setdefault(folder, {}).pop(name, None)
            else:
                self.folders.setdefault(folder, {})[name] = node

    def paths(self, is_folder: Callable[[int], bool], node: int = ROOT, prefix: str = "") -> Iterator[tuple[str, int]]:
        for name, child in self.folders.get(node, {}).items():
            yield prefix + name, child
            if is_folder(child):
                yield from self.paths(is_folder, child, f"{prefix}{name}/")


class Killed(BaseException):
    """Raised in the place of an operation, and of all that follow, as if the process had been killed."""


class Recorder:
    """Records what is done below a folder while it is entered; `kill_at` ends the process before that many calls."""

    CALLS = (
        "fsync",
        "rename",
        "replace",
        "mkdir",
        "unlink",
        "remove",
        "rmdir",
        "truncate",
        "ftruncate",
        "link",
        "symlink",
    )

    def __init__(self, root: Path, kill_at: int | None = None) -> None:
        self.root, self.kill_at, self.calls = root, kill_at, 0
        self.operations: list[Operation] = []
        self.numbers = itertools.count(ROOT + 1)
        self.now, self.folders = Image(), {ROOT}
        self._look()
        self.base = self.now.copy()
        self.operations.clear()
        self._real: dict[str, Callable[..., Any]] = {}

    def __enter__(self) -> "Recorder":
        for name in self.CALLS:
            self._real[name] = getattr(os, name)
            setattr(os, name, self._recorded(name))
        return self

    def __exit__(self, *_: object) -> None:
        for name, real in self._real.items():
            setattr(os, name, real)
        self._look()

    def _recorded(self, name: str) -> Callable[..., Any]:
        real = self._real[name]

        def call(*arguments: Any, **options: Any) -> Any:
            self._look()
            self.calls += 1
            if self.kill_at is not None and self.calls > self.kill_at:
                raise Killed
            note = self._forced(arguments) if name == "fsync" else None
            renamed = self._renamed(arguments, options) if name in ("rename", "replace") else None
            result = real(*arguments, **options)
            for operation in (note, renamed):
                if operation is not None:
                    self._note(operation)
            self._look()
            return result

        return call

    def _note(self, operation: Operation) -> None:
        self.operations.append(operation)
        if isinstance(operation, Named):
            self.now.apply(operation)
        elif isinstance(operation, Written):
            self.now.contents[operation.node] = operation.content

    def _forced(self, arguments: tuple[Any, ...]) -> Forced | None:
        target = arguments[0] if isinstance(arguments[0], int) else arguments[0].fileno()
        node = self._node(Path(f"/proc/self/fd/{target}").readlink())
        return None if node is None else Forced(node)

    def _renamed(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> Named | None:
        assert not any(options.values()), "renames by a folder's descriptor are not expected"
        source, target = (Path(os.path.abspath(os.fspath(path))) for path in arguments)  # noqa: PTH100
        node, above, below = self._node(source), self._node(source.parent), self._node(target.parent)
        if node is None or above is None or below is None:
            assert node is above is below is None, "a rename into the folder or out of it"
            return None
        return Named(((below, target.name, node),), source=(above, source.name, node))

    def _node(self, path: Path) -> int | None:
        if path != self.root and self.root not in path.parents:
            return None
        node: int | None = ROOT
        for part in path.relative_to(self.root).parts:
            node = self.now.folders.get(node, {}).get(part) if node is not None else None
        return node

    def _look(self, folder: int = ROOT, path: Path | None = None) -> None:
        """Note what was done since the last look by calls that are not recorded."""
        path = path or self.root
        known = self.now.folders.setdefault(folder, {})
        with os.scandir(path) as found:
            entries = {entry.name: entry for entry in found}
        for name in [name for name in known if name not in entries]:
            self._note(Named(((folder, name, None),)))
        for name, entry in sorted(entries.items()):
            assert not entry.is_symlink(), f"{entry.path} is a link"
            node = known.get(name)
            if node is None:
                node = next(self.numbers)
                if entry.is_dir():
                    self.folders.add(node)
                self._note(Named(((folder, name, node),)))
            if entry.is_dir():
                self._look(node, path / name)
            elif (content := (path / name).read_bytes()) != self.now.contents.get(node, b""):
                self._note(Written(node, content))

    def tree(self) -> Tree:
        """The folder as it is now, from the record alone."""
        return self._tree(self.now, self.now.contents)

    def _tree(self, image: Image, contents: dict[int, bytes]) -> Tree:
        found = image.paths(self.folders.__contains__)
        return {path: None if node in self.folders else contents.get(node, b"") for path, node in found}

    def crashes(self, done: int, rng: random.Random, limit: int) -> Iterator[Tree]:
        """Different states of the disk after a crash when `done` operations had been called; at most about `limit`."""
        disk, pending, written = self._reached(done)
        seen = set()
        for chosen in _subsets(len(pending), rng, limit):
            image = disk.copy()
            for number in chosen:
                image.apply(pending[number])
            there = {node for _, node in image.paths(self.folders.__contains__)}
            unsure = [node for node in written if node in there]
            variants = [list(_versions(disk.contents.get(node, b""), written[node], rng)) for node in unsure]
            for contents in _combinations(variants, rng, max(2, limit // 8)):
                tree = self._tree(image, disk.contents | dict(zip(unsure, contents, strict=True)))
                key = hash(tuple(sorted(tree.items(), key=lambda item: item[0])))
                if key not in seen:
                    seen.add(key)
                    yield tree

    def _reached(self, done: int) -> tuple[Image, list[Named], dict[int, bytes]]:
        """What is on the disk for certain, the changes of names that may be, and the content that may be."""
        disk, pending, written = self.base.copy(), [], {}
        for operation in self.operations[:done]:
            if isinstance(operation, Written):
                written[operation.node] = operation.content
            elif isinstance(operation, Named):
                pending.append(operation)
            elif operation.node in self.folders:
                for change in (one for one in pending if one.touches(operation.node)):
                    disk.apply(change)
                pending = [one for one in pending if not one.touches(operation.node)]
            elif operation.node in written:
                disk.contents[operation.node] = written.pop(operation.node)
        return disk, pending, written


def _subsets(count: int, rng: random.Random, limit: int) -> Iterator[list[int]]:
    """Every subset of so many, or if those are too many: all prefixes, all but one, each alone, and random ones."""
    everything = range(count)
    if 2**count <= limit:
        for size in range(count + 1):
            yield from map(list, itertools.combinations(everything, size))
        return
    for number in range(count + 1):
        yield list(everything[:number])
    for number in everything:
        yield [number]
        yield [one for one in everything if one != number]
    for _ in range(max(0, limit - 3 * count)):
        yield [one for one in everything if rng.random() < 0.5]


def _versions(old: bytes, new: bytes, rng: random.Random) -> Iterator[bytes]:
    """What a file may hold that was changed and not forced to the disk."""
    blocks = range(0, max(len(new), 1), BLOCK)
    cut = rng.choice(blocks)
    yield from (new, old, b"", bytes(len(new)))
    yield new[: cut + BLOCK // 2]
    yield new[:cut] + bytes(len(new) - cut)
    yield b"".join(
        rng.choice([new[at : at + BLOCK], bytes(len(new[at : at + BLOCK])), old[at : at + BLOCK]]) for at in blocks
    )


def _combinations(variants: list[list[bytes]], rng: random.Random, limit: int) -> Iterator[tuple[bytes, ...]]:
    """Every choice of one version for each file, or if those are too many: all new, all old, and random ones."""
    count = 1
    for versions in variants:
        count *= len(versions)
    if count <= limit:
        yield from itertools.product(*variants)
        return
    for number in range(2):
        yield tuple(versions[number] for versions in variants)
    for _ in range(limit - 2):
        yield tuple(rng.choice(versions) for versions in variants)


def write_tree(tree: Tree, folder: Path) -> Path:
    """The state of a disk as real files, in a folder that is there or not."""
    folder.mkdir(exist_ok=True)
    for path, content in tree.items():
        if content is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(content)
    return folder


def read_tree(folder: Path) -> Tree:
    """A folder as the disk has it."""
    found = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes() for path in found}


def run_until_killed(root: Path, kill_at: int, action: Callable[[], object]) -> bool:
    """Whether an action was killed before its call number `kill_at`, or had ended before."""
    with Recorder(root, kill_at), suppress(Killed):
        action()
        return False
    return True
