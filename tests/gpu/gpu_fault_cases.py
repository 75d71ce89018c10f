"""What a rank does in the tests of failing GPUs."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from pathlib import Path

import device_arrays
import numpy as np
import polyhvd.numpy as hvd
from device_arrays import DeviceArray

from polyhvd import _core
from polyhvd.collectives.adapter import OpKind
from polyhvd.runtime import current

__all__ = [
    "die_in_transfer",
    "fail_in_transfer",
    "libraries_after_work_on_cpus",
    "refused_without_driver",
    "refused_without_gpu",
]

#: Of floats: many rounds.
_LARGE = 16 << 20
_ENOUGH_BYTES = 10 << 20


def _reduce(tensor: DeviceArray) -> np.ndarray:  # type: ignore[type-arg]
    ref = tensor.ref()
    handle = current.world().engine.submit(OpKind.ALLREDUCE, "large", [ref], [ref])
    handle.wait()
    return tensor.to_numpy()


def _die_when_under_way() -> None:
    while hvd.counters()["staged_bytes"] < _ENOUGH_BYTES:
        time.sleep(0)
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_transfer(victim: int) -> tuple[str, bool]:
    """The errors that the survivors get, and whether their tensors are theirs again."""
    tensor = DeviceArray.from_numpy(np.ones(_LARGE, np.float32))
    if hvd.rank() == victim:
        threading.Thread(target=_die_when_under_way).start()
    try:
        _reduce(tensor)
    except hvd.HorovodInternalError as error:
        # Nothing of the transfer comes any more: these values stay.
        values = np.arange(_LARGE, dtype=np.float32)
        tensor.fill(values)
        return str(error), bool(np.array_equal(tensor.to_numpy(), values))
    raise AssertionError("the transfer ended well")


def fail_in_transfer(victim: int, variable: str, call: str) -> str:
    """The error that a rank gets when a call of the driver fails on one of them."""
    tensor = DeviceArray.from_numpy(np.ones(_LARGE, np.float32))
    if hvd.rank() == victim:
        ctypes.CDLL(None).setenv(variable.encode(), call.encode(), 1)
    hvd.barrier()
    try:
        _reduce(tensor)
    except hvd.HorovodInternalError as error:
        tensor.owner.address = 0  # type: ignore[attr-defined]  # a GPU that has failed frees nothing
        return str(error)
    raise AssertionError("the transfer ended well")


def refused_without_driver() -> str:
    """A tensor on a GPU of whose driver there is none; then one of the CPU."""
    ref = _core.TensorRef(4096, (4,), "float32", None, 0, 0)
    try:
        current.world().engine.submit(OpKind.ALLREDUCE, "nowhere", [ref], [ref])
    except ValueError as error:
        assert np.all(hvd.allreduce(np.ones(3, np.float32), name="after", op=hvd.Sum) == hvd.size())
        return str(error)
    raise AssertionError("served without a driver")


def refused_without_gpu() -> str:
    """The same where a driver finds no GPU."""
    ctypes.CDLL(str(device_arrays.STAND_IN))
    return refused_without_driver()


def libraries_after_work_on_cpus() -> list[str]:
    """Which of the process's libraries are a GPU's."""
    hvd.allreduce(np.ones(3, np.float32), name="on CPUs")
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "libcuda" in line or "libnccl" in line]
