"""Where a result comes from: the versions and the machine."""

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import torch


def versions() -> dict[str, str]:
    """Versions of what a result depends on."""
    names = ("skipless", "torch", "numpy", "tokenizers", "safetensors", "pydantic")
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in names}}


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
