"""The device of a process: which one, the type of its matrix products, its free memory."""

import subprocess
import sys
from functools import cache
from pathlib import Path

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
