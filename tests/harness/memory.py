"""How much memory this process has in use."""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path


def resident_bytes() -> int:
    """Memory in RAM, without what malloc keeps of freed memory: megabytes that differ from run to run."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
