"""How this process asks the system for memory. Imports nothing heavy, because it has to come first."""

import ctypes
import platform


def keep_freed_memory() -> None:
    """Let this process keep what it frees, because the next step needs it again.

    glibc gives large arrays back to the system at once, and every page of the next one is then a fault: on a CPU that
    doubled the time of element-wise operations. Elsewhere than on glibc this does nothing.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    trim_threshold, mmap_threshold = -1, -3  # the names of malloc.h
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(mmap_threshold, 1 << 30) or mallopt(mmap_threshold, 1 << 25)  # the most that older versions take
    mallopt(trim_threshold, (1 << 31) - 1)
