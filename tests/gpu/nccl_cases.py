"""What a rank does in the tests of tensors on GPUs that NCCL moves."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import device_collectives as gpu
import drivers
import ml_dtypes
import numpy as np
import oracle
import polyhvd.numpy as hvd
from device_arrays import DeviceArray, cuda, current_stream

from polyhvd.testing.worker import note

__all__ = [
    "allreduce",
    "bits_of_sums",
    "die_between_operations",
    "die_while_others_wait",
    "fail_in_operation",
    "groups",
    "integers_are_staged",
    "leave_while_streams_work",
    "many_in_flight",
    "reducescatter",
    "refused",
    "routes",
    "same_bits_in_reproducible_mode",
    "shared_objects",
]

Array = np.ndarray[Any, Any]

_SHAPES = ((), (17,), (3, 0), (101, 2971))
_FEW_SHAPES = ((4097,),)
#: Of a tensor that is packed with others, and of one that is not.
_SMALL, _LARGE = 16_000, 17_000


def _exact(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "biu"


def _epsilon(dtype: np.dtype[Any]) -> float:
    return 2.0**-8 if dtype == ml_dtypes.bfloat16 else float(np.finfo(dtype).eps)


def _check(what: str, actual: Array, terms: Sequence[Array], op: str, factor: float) -> None:
    """Floats within what one rounding for each step allows: NCCL rounds to the type in between."""
    expected = oracle.reduce(op, terms, 1.0, factor)
    if _exact(actual.dtype):
        oracle.check(what, actual, expected, exact=True)
        return
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), what
    wide = [np.abs(term.astype(np.float64)) for term in terms]
    scale = np.prod(wide, axis=0) if op == "Product" else np.sum(wide, axis=0)
    if op == "Average":
        factor /= len(terms)
    bound = (len(terms) + 2) * _epsilon(actual.dtype) * np.abs(factor) * scale + 1e-7
    worst = np.abs(actual.astype(np.float64) - expected.astype(np.float64)) - bound
    assert np.all(worst <= 0), f"{what}: wrong by {np.max(worst)} more than rounding allows"


def _combinations() -> list[tuple[str, float]]:
    plain = [(op, 1.0) for op in ("Sum", "Average", "Min", "Max", "Product")]
    return [*plain, ("Sum", 0.3), ("Average", 0.25), ("Max", 0.5), ("Product", 0.5)]


def _dtypes(op: str, factor: float) -> list[np.dtype[Any]]:
    # A factor has no meaning for bools, nor has an average.
    plain = op != "Average" and factor == 1.0
    return [dtype for dtype in drivers.get("device").dtypes if plain or dtype.kind != "b"]


def allreduce(shapes: Sequence[tuple[int, ...]] = _SHAPES, factors: bool = True) -> None:
    """Every element type, operation and kind of factor; arguments that are not the result stay."""
    size, rank = hvd.size(), hvd.rank()
    for op, factor in _combinations():
        for dtype in _dtypes(op, factor) if factors or factor == 1.0 else ():
            for shape in shapes if factor == 1.0 else _FEW_SHAPES:
                what = f"allreduce {op} {factor} {dtype.name} {list(shape)}"
                terms = [oracle.contribution(dtype, shape, r) for r in range(size)]
                mine = DeviceArray.from_numpy(terms[rank])
                options = {"op": getattr(hvd, op), "postscale_factor": factor}
                result = gpu.allreduce(mine, name=what, **options)
                _check(what, result.to_numpy(), terms, op, factor)
                oracle.check(f"argument of {what}", mine.to_numpy(), terms[rank], exact=True)
                gpu.allreduce_(mine, name=f"{what} in place", **options)
                _check(f"{what} in place", mine.to_numpy(), terms, op, factor)


def reducescatter() -> None:
    """Rows that divide and rows that do not; several tensors, whose parts are packed by member."""
    size, rank = hvd.size(), hvd.rank()
    for op, factor in _combinations():
        for dtype in _dtypes(op, factor):
            for rows in ((12,), (7,), (1,), (12, 5)):
                what = f"reducescatter {op} {factor} {dtype.name} {list(rows)}"
                terms = [[oracle.contribution(dtype, (n, 37), r) for n in rows] for r in range(size)]
                tensors = [DeviceArray.from_numpy(x) for x in terms[rank]]
                results = gpu.grouped_reducescatter(
                    tensors, name=what, op=getattr(hvd, op), postscale_factor=factor
                )
                for i, (n, result) in enumerate(zip(rows, results, strict=True)):
                    first = sum(n // size + (r < n % size) for r in range(rank))
                    kept = slice(first, first + n // size + (rank < n % size))
                    _check(what, result.to_numpy(), [t[i][kept] for t in terms], op, factor)


def groups() -> None:
    """Small tensors are packed, more than a buffer holds, and large ones among them are not."""
    size, rank = hvd.size(), hvd.rank()
    mixed = [_SMALL, 1, 0, _LARGE, 33, _SMALL, 100_003]
    for counts in ([5, 7], mixed, [_SMALL] * 300):
        terms = [
            [np.arange(n, dtype=np.float32) + 7 * r + i for i, n in enumerate(counts)] for r in range(size)
        ]
        tensors = [DeviceArray.from_numpy(x) for x in terms[rank]]
        results = gpu.grouped_allreduce(tensors, name=f"group {len(counts)}", op=hvd.Sum)
        for i, result in enumerate(results):
            oracle.check(f"{i} of {counts}", result.to_numpy(), np.sum([t[i] for t in terms], axis=0))


def many_in_flight() -> None:
    """Nobody waits on the CPU between operations, and each finds what the one before has left."""
    size, rank = hvd.size(), hvd.rank()
    tensors = [DeviceArray.from_numpy(np.full(n, rank + n, np.float32)) for n in (3, 5000, 40_000)]
    other = DeviceArray.from_numpy(np.full(3, rank, np.float32))
    for step in range(8):
        handles = [
            gpu.allreduce_async_(tensor, name=f"flight {i}", op=hvd.Average)
            for i, tensor in enumerate(tensors)
        ]
        rows = gpu.allgather_async(other, name="flight rows")
        for handle in handles:
            gpu.synchronize(handle)
        gathered = gpu.synchronize(rows).to_numpy()
        assert np.array_equal(gathered, np.repeat(np.arange(size), 3)), step
    for n, tensor in zip((3, 5000, 40_000), tensors, strict=True):
        assert np.allclose(tensor.to_numpy(), n + (size - 1) / 2)


def routes() -> dict[str, int]:
    """By how much the counters of both ways grow."""
    before = hvd.counters()
    gpu.allreduce(DeviceArray.from_numpy(np.ones(1000, np.float32)), name="routed", op=hvd.Sum)
    after = hvd.counters()
    return {name: after[name] - before[name] for name in ("nccl_bytes", "staged_bytes")}


def integers_are_staged() -> list[int]:
    """Bytes that NCCL moved of what it cannot reduce as it is meant."""
    moved = []
    for dtype, options in (
        (np.int16, {"op": hvd.Sum}),
        (np.uint16, {"op": hvd.Max}),
        (np.int32, {"op": hvd.Average}),
        (np.float32, {"op": hvd.Adasum}),
        (np.float16, {"op": hvd.Sum, "postscale_factor": 1e-6}),
        (np.float32, {"op": hvd.Product, "prescale_factor": 2.0}),
    ):
        before = hvd.counters()["nccl_bytes"]
        gpu.allreduce(DeviceArray.from_numpy(np.ones(9, dtype)), name=f"{dtype} {options}", **options)
        moved.append(hvd.counters()["nccl_bytes"] - before)
    return moved


def bits_of_sums() -> list[bytes]:
    """Of sums whose rounding depends on the order of their terms, large and small and together."""
    tensors = [
        DeviceArray.from_numpy(np.random.default_rng(hvd.rank()).standard_normal(n, np.float32))
        for n in (100_003, 17, 5000)
    ]
    results = gpu.grouped_allreduce(tensors, name="bits", op=hvd.Average)
    return [result.to_numpy().tobytes() for result in results]


def same_bits_in_reproducible_mode() -> tuple[bool, dict[str, int]]:
    """Whether a sum has the CPU's bits, and how it went."""
    mine = oracle.contribution(np.dtype(np.float32), (5000,), hvd.rank())
    expected = hvd.allreduce(mine, name="cpu", op=hvd.Average)
    result = gpu.allreduce(DeviceArray.from_numpy(mine), name="gpu", op=hvd.Average).to_numpy()
    root = gpu.broadcast(DeviceArray.from_numpy(mine), 0, name="moved").to_numpy()
    oracle.check("broadcast", root, oracle.contribution(np.dtype(np.float32), (5000,), 0), exact=True)
    return bool(np.array_equal(result, expected)), routes()


def shared_objects() -> list[str]:
    """NCCL's libraries in this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split()[-1] for line in lines if "libnccl" in line})


def refused() -> tuple[str, str]:
    """The type and words of what a first operation raises."""
    try:
        gpu.allreduce(DeviceArray.from_numpy(np.ones(4, np.float32)), name="first", op=hvd.Sum)
    except Exception as error:
        return type(error).__name__, str(error)
    raise AssertionError("it was served")


def _ends(operation: Callable[[], Any]) -> tuple[str, str]:
    """How it ends, and then everything after it: what streams wait for must be let go."""
    tensor = DeviceArray.from_numpy(np.ones(4, np.float32))
    try:
        for _ in range(1000):
            operation()
            time.sleep(0.01)  # the engine may notice between operations
    except Exception as error:
        tensor.to_numpy()
        return type(error).__name__, str(error)
    raise AssertionError("nothing has failed")


def fail_in_operation(fault: str) -> tuple[str, str, float]:
    """What a rank hears of a fault of NCCL's at its third launch, and seconds until then."""
    tensor = DeviceArray.from_numpy(np.ones(1000, np.float32))
    ctypes.CDLL(None).setenv(b"POLYHVD_STAND_IN_NCCL_FAULT", fault.encode(), 1)
    begin = time.monotonic()
    kind, words = _ends(lambda: gpu.allreduce_(tensor, name="again", op=hvd.Max))
    return kind, words, time.monotonic() - begin


def leave_while_streams_work(folder: str) -> float:
    """A sum that a rank's GPU makes after rank 0, which coordinates others, has shut down; and rank 0's."""
    leaving, released = Path(folder, "leaving"), Path(folder, "released")

    def await_file(path: Path) -> None:
        while not path.exists():
            time.sleep(0.001)

    def release() -> None:
        await_file(leaving)
        time.sleep(0.5)  # work that is given up ends before
        released.touch()

    # On another thread: the one that receives the departure waits for its GPU.
    releasing = threading.Thread(target=release)
    releasing.start()
    with cuda().busy(current_stream(), lambda: await_file(released)):
        mine = DeviceArray.from_numpy(np.full(1000, 1 + hvd.rank(), np.float32))
        result = gpu.allreduce(mine, name="the last one", op=hvd.Sum)
        if hvd.rank() == 0:
            leaving.touch()
            hvd.shutdown()
        else:
            with contextlib.suppress(hvd.HorovodInternalError):
                hvd.barrier()
        mean = float(result.to_numpy().mean())
    releasing.join()
    return mean


def die_between_operations(victim: int) -> tuple[str, float]:
    """The error on a rank after the test has killed the victim, and when the rank had it.

    Each rank notes the end of the operation before: no part of it is on its way to another rank then.
    """
    tensor = DeviceArray.from_numpy(np.ones(1000, np.float32))
    gpu.allreduce_(tensor, name="before", op=hvd.Max)
    tensor.to_numpy()
    note("between operations")
    if hvd.rank() == victim:
        signal.pause()
    _, words = _ends(lambda: gpu.allreduce_(tensor, name="after", op=hvd.Max))
    return words, time.monotonic()


def die_while_others_wait(victim: int) -> tuple[str, float]:
    """The error on a rank whose stream waits for a victim that is killed, and when the stream was free."""
    tensor = DeviceArray.from_numpy(np.ones(1000, np.float32))
    gpu.allreduce_(tensor, name="before", op=hvd.Max)
    tensor.to_numpy()
    fault = f"hang:{victim}:2"
    ctypes.CDLL(None).setenv(b"POLYHVD_STAND_IN_NCCL_FAULT", fault.encode(), 1)
    gpu.synchronize(gpu.allreduce_async_(tensor, name="stuck", op=hvd.Max))
    note("stuck")
    if hvd.rank() == victim:
        signal.pause()
    tensor.to_numpy()  # ends when the job's end lets go of the stream
    freed = time.monotonic()
    try:
        gpu.allreduce_(tensor, name="after", op=hvd.Max)
    except hvd.HorovodInternalError as error:
        return str(error), freed
    raise AssertionError("nothing has failed")
