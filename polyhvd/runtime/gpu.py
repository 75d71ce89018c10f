"""Where the libraries of GPUs are, and their versions. A job asks only for paths: the
core opens a library at the first operation on a GPU.
"""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from polyhvd.config import Settings

__all__ = ["Found", "nccl_libraries", "probe_cuda", "probe_nccl", "version_text"]

_CUDA = "libcuda.so.1"
_NCCL = "libnccl.so.2"
_NCCL_MIN = 21400  # as in backends/nccl/library.h


def nccl_libraries(settings: Settings) -> list[str]:
    """File names and paths at which NCCL may be, the likeliest first.

    One that is in the process already, such as PyTorch's, is taken before all of these.
    """
    if settings.nccl_library:
        return [settings.nccl_library]
    # Of the packages nvidia-nccl-cu12, -cu13, ...: frameworks bring them along, and load no other one.
    # A folder of sys.path that this user may not look into has none.
    wheels = [Path(folder) / "nvidia" / "nccl" / "lib" / _NCCL for folder in sys.path if folder]
    return [*dict.fromkeys(str(path) for path in wheels if os.path.exists(path)), _NCCL]


@dataclass(frozen=True)
class Found:
    """A library, with its version as the number that it gives."""

    path: str
    version: int


def probe_nccl(settings: Settings) -> Found | str:
    """The NCCL that a job would use, or why there is none. Opens it, and nothing more."""
    reasons = []
    for path in nccl_libraries(settings):
        found = _version_in(path, "ncclGetVersion")
        if isinstance(found, Found) and found.version < _NCCL_MIN:
            found = f"{path}: NCCL {version_text(found.version)}; {version_text(_NCCL_MIN)} is needed"
        if isinstance(found, Found):
            return found
        reasons.append(found)
    return "; ".join(reasons)


def version_text(version: int) -> str:
    """NCCL's number as text: 2.28.9 for 22809, and 2.8.4 for 2804."""
    step = 1000 if version < 10000 else 10000
    return f"{version // step}.{version % step // 100}.{version % 100}"


def probe_cuda() -> Found | str:
    """The CUDA driver, or why it cannot be used. Touches no GPU."""
    return _version_in(_CUDA, "cuDriverGetVersion")


def _version_in(path: str, function: str) -> Found | str:
    version = ctypes.c_int()
    try:
        status = getattr(ctypes.CDLL(path), function)(ctypes.byref(version))
    except (OSError, AttributeError) as error:
        return str(error) if path in str(error) else f"{path}: {error}"
    return Found(path, version.value) if status == 0 else f"{path}: {function} failed with {status}"
