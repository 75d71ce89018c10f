"""How fast an allreduce on GPUs is, beside a bare call of NCCL in the same run, in turns.

    polyhvdrun -np 2 python tests/gpu/bandwidth.py

On one GPU: with NCCL 2.30 or later, NCCL_MULTI_RANK_GPU_ENABLE=1 and TEST_CUDA_LIBRARY=libcuda.so.1. Without
the latter it runs on the stand-ins, whose speed means nothing.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Callable

import device_collectives as gpu
import numpy as np
import polyhvd.numpy as hvd
from device_arrays import DeviceArray, cuda, current_stream, device

from polyhvd.runtime import current
from polyhvd.runtime.gpu import nccl_libraries

_SIZES = [1 << n for n in range(10, 29, 2)]
_ROUNDS = 7
_IN_PROGRESS = 7
_FLOAT32, _SUM = 7, 0


class _UniqueId(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * 128),)


class _Config(ctypes.Structure):
    """ncclConfig_t as of 2.14."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("unused", ctypes.c_int),
    )


class _Nccl:
    """A communicator of our own over all ranks."""

    def __init__(self) -> None:
        paths = nccl_libraries(current.world().settings)
        self._library = next(filter(None, map(_opened, paths)), None)
        if self._library is None:
            raise SystemExit(f"no NCCL at any of {paths}")
        self._make_current()
        unique = _UniqueId()
        if hvd.rank() == 0:
            self._check(self._library.ncclGetUniqueId(ctypes.byref(unique)))
        data = hvd.broadcast_object(ctypes.string_at(ctypes.byref(unique), 128), root_rank=0)
        ctypes.memmove(ctypes.byref(unique), data, 128)
        config = _Config(ctypes.sizeof(_Config), 0xCAFEBEEF, 21400, 0, 0)
        self._comm = ctypes.c_void_p()
        self._check(
            self._library.ncclCommInitRankConfig(
                ctypes.byref(self._comm), hvd.size(), unique, hvd.rank(), ctypes.byref(config)
            )
        )

    def allreduce(self, tensor: DeviceArray) -> None:
        """In place, on the current stream."""
        address = ctypes.c_void_p(tensor.address)
        count = ctypes.c_size_t(tensor.nbytes // 4)
        stream = ctypes.c_void_p(current_stream().handle)
        self._check(self._library.ncclAllReduce(address, address, count, _FLOAT32, _SUM, self._comm, stream))

    def _make_current(self) -> None:
        ordinal, made = ctypes.c_int(), ctypes.c_void_p()
        cuda().call("cuDeviceGet", ctypes.byref(ordinal), device())
        cuda().call("cuDevicePrimaryCtxRetain", ctypes.byref(made), ordinal)
        cuda().call("cuCtxPushCurrent_v2", made)

    def _check(self, status: int) -> None:
        state = ctypes.c_int(status)
        while state.value == _IN_PROGRESS:
            self._library.ncclCommGetAsyncError(self._comm, ctypes.byref(state))
        if state.value != 0:
            raise SystemExit(f"NCCL failed with {state.value}")


def _opened(path: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(path)
    except OSError:
        return None


def _seconds(operation: Callable[[], None], repeats: int) -> float:
    hvd.barrier()
    begin = time.perf_counter()
    for _ in range(repeats):
        operation()
    current_stream().synchronize()
    return (time.perf_counter() - begin) / repeats


def main() -> None:
    """Print a line for each size, on rank 0."""
    hvd.init()
    largest = int(sys.argv[1]) if len(sys.argv) > 1 else _SIZES[-1]
    device()
    nccl = _Nccl()
    if hvd.rank() == 0:
        print(f"{'bytes':>11} {'NCCL MB/s':>11} {'polyhvd MB/s':>13} {'ratio':>6}")
    for size in [size for size in _SIZES if size <= largest]:
        tensor = DeviceArray.from_numpy(np.zeros(size // 4, np.float32))
        repeats = max(1, min(50, (64 << 20) // size))

        def ours(tensor: DeviceArray = tensor, size: int = size) -> None:
            gpu.synchronize(gpu.allreduce_async_(tensor, name=f"bandwidth {size}", op=hvd.Sum))

        ways = (lambda t=tensor: nccl.allreduce(t), ours)
        for way in ways:
            _seconds(way, 3)
        times = [[_seconds(way, repeats) for way in ways] for _ in range(_ROUNDS)]
        bare, through = (statistics.median(column) for column in zip(*times, strict=True))
        if hvd.rank() == 0:
            print(
                f"{size:>11} {size / bare / 1e6:>11.1f} {size / through / 1e6:>13.1f} {bare / through:>6.2f}"
            )
    moved = hvd.counters()["nccl_bytes"]
    if hvd.rank() == 0 and moved == 0:
        print("polyhvd did not use NCCL: tensors were staged")


if __name__ == "__main__":
    main()
