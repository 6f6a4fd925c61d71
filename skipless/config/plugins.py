"""Modules and files that add parts: loaded by name, by path, or because an installed package says that it has some."""

import hashlib
import importlib
import importlib.util
import shlex
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from skipless.config.base import Config
from skipless.config.block import BLOCKS
from skipless.config.parts import PARTS, Part, Plugin, parts_in
from skipless.errors import UserError, first_line, user_path

GROUP = "skipless.parts"
"""The entry point by which an installed package says that it has parts: a name, and a module that adds them."""

LOADED: dict[str, str] = {}
"""Module's name → what a worker process is told to load: that name, or the path of the file."""

_loading: list[Plugin] = []
_installed: list[str] = []


def load_plugin(given: str) -> None:
    """Load a plugin: a module's name, or the path of a Python file. A second time does nothing.

    What it had added is taken back where it fails half-way.
    """
    file = _file(given)
    name = given if file is None else file.stem
    if file is not None:
        there = sys.modules.get(name)
        other = _file_of(there)
        if name in LOADED and other != file:
            raise UserError(f"two plugins are called {name!r}: {other} and {file}; give one of them another name")
        if there is not None and other != file:
            raise UserError(f"the plugin {str(file)!r} has the name of a module that is there already, {name!r}")
    if name in LOADED:
        return
    with _said(given), _loading_from(Plugin(name, file)):
        module = importlib.import_module(name) if file is None else _run(name, file)
    LOADED[name] = name if file is None else str(file)
    del module


def load_installed() -> None:
    """Load what installed packages bring by the entry point `skipless.parts`; a second time does nothing."""
    for point in entry_points(group=GROUP):
        if point.value not in _installed:
            _installed.append(point.value)
            load_plugin(point.value.partition(":")[0])


def known_plugins() -> tuple[str, ...]:
    """What another process has to load to know the same parts: those that were loaded, and those imported by hand."""
    imported = [part.plugin for parts in PARTS.values() for part in parts.values() if part.plugin is not None]
    by_hand = [one for one in imported if one.name not in (*LOADED, "__main__") and one.name.isidentifier()]
    return (*LOADED.values(), *dict.fromkeys(str(one.file or one.name) for one in by_hand))


def origin(depth: int = 2) -> Plugin:
    """Who adds a part: the plugin that is being loaded, or the module that asks."""
    if _loading:
        return _loading[-1]
    asks: dict[str, Any] = sys._getframe(depth).f_globals
    file = asks.get("__file__")
    return Plugin(str(asks.get("__name__", "__main__")), Path(file).resolve() if file else None)


def plugins_of(config: Config) -> dict[str, Any]:
    """`plugins`: those that brought parts of a configuration, their files and what these held; nothing if none did."""
    brought: dict[Plugin, list[Part]] = {}
    for part in parts_in(config):
        if part.plugin is not None:
            brought.setdefault(part.plugin, []).append(part)
    found = [
        {
            "name": plugin.name,
            "file": None if plugin.file is None else str(plugin.file),
            "sha256": _hash(plugin.file),
            "parts": [part.title for part in parts],
        }
        for plugin, parts in brought.items()
    ]
    return {"plugins": found} if found else {}


def plugins_needed(config: Config) -> dict[str, Any]:
    """The same without the paths of this machine, for what goes to others."""
    found = plugins_of(config).get("plugins", [])
    return {"plugins": [{**one, "file": None} for one in found]} if found else {}


def _hash(file: Path | None) -> str | None:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file and file.is_file() else None


def missing_plugins(info: dict[str, Any]) -> str:
    """What to say where the configuration of something that was made with plugins cannot be read."""
    listed = info.get("plugins")
    named = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    missing = [one for one in named if not all(_is_known(title) for title in one.get("parts") or [])]
    if not missing:
        return ""
    names = " and ".join(f"{one.get('name')!r}" for one in missing)
    give = " ".join(f"--plugin {shlex.quote(str(one.get('file') or one.get('name')))}" for one in missing)
    return f"; it was made with the plugin {names}: give {give}, or import it first"


def _is_known(title: Any) -> bool:
    return any(part.title == title for parts in PARTS.values() for part in parts.values())


def _file(given: str) -> Path | None:
    """The file that is meant, if it is one: a path, or the name of a module that lies in this folder."""
    path = user_path(given)
    if path.suffix == ".py" or len(path.parts) > 1:
        if not path.is_file():
            raise UserError(f"there is no plugin {given!r}: no such file")
        return path.resolve()
    beside = Path(f"{given}.py")
    try:
        known = importlib.util.find_spec(given) is not None
    except (ImportError, ValueError, AttributeError):
        known = False
    if not known and not beside.is_file():
        raise UserError(f"there is no plugin {given!r}: neither a module of that name nor a file {str(beside)!r}")
    return None if known and not beside.is_file() else beside.resolve()


def _file_of(module: ModuleType | None) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file).resolve() if file else None


def _run(name: str, file: Path) -> ModuleType:
    if name in sys.modules:  # imported by hand
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextmanager
def _loading_from(plugin: Plugin) -> Iterator[None]:
    before = {kind: dict(parts) for kind, parts in PARTS.items()}
    presets = dict(BLOCKS)
    _loading.append(plugin)
    try:
        yield
    except BaseException:
        for kind, parts in before.items():
            PARTS[kind].clear()
            PARTS[kind].update(parts)
        BLOCKS.clear()
        BLOCKS.update(presets)
        raise
    finally:
        _loading.pop()


@contextmanager
def _said(given: str) -> Iterator[None]:
    """What a plugin raises, in a line that names it and the place."""
    try:
        yield
    except UserError as error:
        raise UserError(f"plugin {given!r}: {error}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        place = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename][-1]
        where = f"{Path(place.filename).name}, line {place.lineno}"
        if isinstance(error, SyntaxError) and error.filename:
            where = f"{Path(error.filename).name}, line {error.lineno}"
        said = f"{type(error).__name__}: {first_line(error)}"  # pyrefly: ignore
        raise UserError(f"plugin {given!r} cannot be loaded: {said} ({where})") from error
