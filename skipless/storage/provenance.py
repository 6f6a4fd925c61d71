"""Where a result comes from: the versions and the machine."""

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import torch

from skipless.config.base import Config
from skipless.config.parts import PARTS, Part, Plugin, parts_in
from skipless.storage.hashing import hash_file


def versions() -> dict[str, str]:
    """Versions of what a result depends on."""
    names = ("skipless", "torch", "numpy", "tokenizers", "safetensors", "pydantic")
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in names}}


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
            "sha256": hash_file(plugin.file) if plugin.file and plugin.file.is_file() else None,
            "parts": [part.title for part in parts],
        }
        for plugin, parts in brought.items()
    ]
    return {"plugins": found} if found else {}


def missing_plugins(info: dict[str, Any]) -> str:
    """What to say where the configuration of something that was made with plugins cannot be read."""
    listed = info.get("plugins")
    named = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    missing = [one for one in named if not all(_is_known(title) for title in one.get("parts") or [])]
    if not missing:
        return ""
    names = " and ".join(f"{one.get('name')!r} ({one.get('file') or 'a module'})" for one in missing)
    give = " ".join(f"--plugin {one.get('file') or one.get('name')}" for one in missing)
    return f"; it was made with the plugin {names}: give {give}, or import it first"


def _is_known(title: Any) -> bool:
    return any(part.title == title for parts in PARTS.values() for part in parts.values())


def machine() -> dict[str, Any]:
    """The machine, for a reader of results."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _processor() -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as file:
            return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
