"""What this machine is and can do: device, precision, speed of matrix products, versions."""

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from skipless.errors import UserError

BF16_PROBE = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); print(float((a @ a).sum()))"


def pick_device(name: str) -> torch.device:
    """`auto` is the accelerator, if there is one."""
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.ones(1, device=device).item()
    except Exception as error:  # each backend has its own way to say that it is not there
        reason = (str(error).splitlines() or ["it is not there"])[0]
        raise UserError(f"device {name!r} cannot be used: {reason}; try auto or cpu") from None
    return device


def pick_dtype(precision: str, device: torch.device) -> torch.dtype:
    """The type of the matrix products: float32 on a CPU unless told otherwise, bfloat16 on an accelerator."""
    on_cpu = device.type == "cpu"
    if precision == "auto":
        precision = "fp32" if on_cpu else "bf16"
    if precision == "bf16" and on_cpu:
        check_cpu_bf16()
    if precision == "fp16" and on_cpu:
        raise UserError("precision fp16 needs an accelerator; on a CPU use fp32")
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]


@cache
def check_cpu_bf16() -> None:
    """Raise where a bfloat16 product would kill the process, as it does on CPUs that promise AMX and do not allow it.

    The product is tried in a child process, for the signal cannot be caught.
    """
    done = subprocess.run([sys.executable, "-c", BF16_PROBE], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise UserError(
            f"bfloat16 products do not work on this CPU (a test process ended with status {done.returncode}); use "
            "precision fp32, or set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 before starting Python"
        )


@cache
def matmul_speed(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second of a large matrix product, the best of a few; training is held against it."""
    size = 1024 if device.type == "cpu" else 4096
    # a generator of its own: the global one belongs to the training, which must go on as if nothing had been measured
    a = torch.randn(size, size, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    best = float("inf")
    for _ in range(12):
        wait(device)
        start = time.perf_counter()
        a @ a
        wait(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def wait(device: torch.device) -> None:
    """Until everything that was asked of a device is done; a CPU has done it already."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """The most memory that was held at once while something ran, above what was held before."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    status = Path("/proc/self/status")
    if not status.exists():
        raise UserError("the peak memory of a CPU process is read from /proc, which this system does not have")
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = _status(status, "VmRSS")
    run()
    return _status(status, "VmHWM") - before


def _status(file: Path, key: str) -> int:
    return next(1024 * int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith(key))


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be had on a device, if it can be told."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with Path("/proc/meminfo").open(encoding="utf-8") as file:
            return next(1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None


def check_memory(needed: int, device: torch.device, purpose: str) -> None:
    """Raise before memory runs out, for then the system may end any process without a word."""
    free = free_memory(device)
    if free is not None and needed > free:
        raise UserError(f"{purpose} needs about {needed / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB are free on {device}")


def compiler_problem() -> str | None:
    """Why torch.compile cannot be used here, or None."""
    try:
        torch.compile(lambda x: x.sin() + 1, fullgraph=True)(torch.ones(4))
    except Exception as error:  # a missing compiler shows in many ways
        return str(error).strip().splitlines()[0]
    return None


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
