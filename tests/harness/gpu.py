"""Where tests find GPUs: real ones when POLYHVD_TEST_GPU=1, else the stand-ins that `make` builds."""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["is_there", "settings", "stand_ins_are_built"]

ROOT = Path(__file__).resolve().parents[2]
_BUILT = ROOT / "build" / "gpu"
_SOURCES = ROOT / "tests" / "gpu" / "stand_in"


def is_there() -> bool:
    """Whether the tests shall run on a GPU of this machine."""
    return os.environ.get("POLYHVD_TEST_GPU") == "1"


def stand_ins_are_built() -> bool:
    """Whether there are libraries to take the place of CUDA's."""
    return (_BUILT / "libcuda.so.1").is_file()


def settings() -> tuple[tuple[str, str], ...]:
    """Environment of ranks that have tensors on GPUs."""
    if is_there():
        return (("NCCL_MULTI_RANK_GPU_ENABLE", "1"),)
    return (
        ("TEST_CUDA_LIBRARY", str(_BUILT / "libcuda.so.1")),
        ("POLYHVD_NCCL_LIBRARY", str(_BUILT / "libnccl.so.2")),
        ("POLYHVD_STAND_IN_NCCL_VERSION", "23000"),  # which lets ranks share a GPU
        ("NCCL_MULTI_RANK_GPU_ENABLE", "1"),
        ("PYTHONPATH", os.pathsep.join([str(_SOURCES), *filter(None, sys.path)])),
    )
