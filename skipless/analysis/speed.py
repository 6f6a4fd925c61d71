"""Speed and memory of what runs on a device, measured."""

import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from skipless.errors import UserError


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
