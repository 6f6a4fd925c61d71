"""A process that keeps what it frees."""

import platform
import subprocess
import sys

import pytest

CODE = """
import re, sys
from pathlib import Path
from skipless.training.allocator import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
import torch
def held():
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text()).group(1)) / 1024
before = held()
array = torch.ones(50, 1024, 1024)
del array
print(held() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has this setting")
def test_freed_memory_is_kept():
    megabytes = {
        how: float(subprocess.run([sys.executable, "-c", CODE, how], capture_output=True, text=True, check=True).stdout)
        for how in ("keep", "plain")
    }
    assert megabytes["keep"] > 190
    assert megabytes["plain"] < 50
