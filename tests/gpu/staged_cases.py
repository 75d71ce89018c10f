"""What a rank does in the tests of tensors on GPUs that pass through pinned memory."""

from __future__ import annotations

from typing import Any

import device_arrays
import device_collectives as gpu
import numpy as np
import oracle
import polyhvd.numpy as hvd
from device_arrays import DeviceArray, Stream, use_stream

__all__ = [
    "consumers_of_dlpack",
    "default_stream",
    "many_rounds",
    "same_bits_as_on_cpus",
    "second_gpu",
    "staged_bytes",
    "streams_in_a_ring",
]

Array = np.ndarray[Any, Any]

#: Of floats: a little more than a round of staging, and more rounds than it has slots.
ROUNDS = ((1 << 20) + 17, 4 * (1 << 20) + 5)


def _terms(count: int, seed: int = 0) -> list[Array]:
    return [oracle.contribution(np.dtype(np.float32), (count,), rank, seed) for rank in range(hvd.size())]


def same_bits_as_on_cpus() -> dict[str, int]:
    """Also where an operation is cut into rounds, and where several are one."""
    digests = {}
    for count in (1, 4099, *ROUNDS):
        mine = _terms(count)[hvd.rank()]
        for op in (hvd.Sum, hvd.Average, hvd.Adasum):
            what = f"{count} {op!r}"
            expected = hvd.allreduce(mine, name=f"cpu {what}", op=op, prescale_factor=0.3)
            result = gpu.allreduce(DeviceArray.from_numpy(mine), name=what, op=op, prescale_factor=0.3)
            assert np.array_equal(result.to_numpy(), expected), what
            digests[what] = oracle.digest(expected)
        rows = mine[: count // 3 * 3].reshape(-1, 3)
        expected = hvd.reducescatter(rows, name=f"cpu rows {count}", op=hvd.Sum)
        result = gpu.reducescatter(DeviceArray.from_numpy(rows), name=f"rows {count}", op=hvd.Sum)
        assert np.array_equal(result.to_numpy(), expected), f"reducescatter {count}"
    pair = [_terms(count, 1)[hvd.rank()] for count in (33, ROUNDS[0], 0, 1001)]
    expected = hvd.grouped_allreduce(pair, name="cpu group", op=hvd.Adasum)
    results = gpu.grouped_allreduce([DeviceArray.from_numpy(x) for x in pair], name="group", op=hvd.Adasum)
    for result, wanted in zip(results, expected, strict=True):
        assert np.array_equal(result.to_numpy(), wanted)
    return digests


def many_rounds() -> None:
    """Operations that take more rounds than there are slots, with parts that differ."""
    size, rank = hvd.size(), hvd.rank()
    for count in ROUNDS:
        terms = [np.arange(count + 1000 * r, dtype=np.float32) + r for r in range(size)]
        mine = DeviceArray.from_numpy(terms[rank])
        gathered = gpu.allgather(mine, name=f"gather {count}")
        root = DeviceArray.from_numpy(terms[0] * (rank == 0))
        assert gpu.broadcast_(root, 0, name=f"send {count}") is root
        splits = [[len(terms[r]) // size + (r if to == r else 0) for to in range(size)] for r in range(size)]
        for r in range(size):
            splits[r][r] = len(terms[r]) - sum(splits[r][to] for to in range(size) if to != r)
        swapped, received = gpu.alltoall(mine, splits[rank], name=f"swap {count}")
        oracle.check("allgather", gathered.to_numpy(), np.concatenate(terms), exact=True)
        oracle.check("broadcast", root.to_numpy(), terms[0], exact=True)
        starts = [sum(splits[r][:rank]) for r in range(size)]
        parts = [terms[r][starts[r] : starts[r] + splits[r][rank]] for r in range(size)]
        oracle.check("alltoall", swapped.to_numpy(), np.concatenate(parts), exact=True)
        assert list(received) == [splits[r][rank] for r in range(size)]


def streams_in_a_ring() -> None:
    """Each step's stream makes its tensor from the last one's result, and nobody waits on the CPU."""
    size = hvd.size()
    streams = [Stream() for _ in range(3)]
    value = np.arange(50_000, dtype=np.float32)
    with use_stream(streams[0]):
        tensor = DeviceArray.from_numpy(value + hvd.rank())
    for step in range(12):
        source, target = streams[step % 3], streams[(step + 1) % 3]
        with use_stream(source):
            handle = gpu.allreduce_async_(tensor, name="ring", op=hvd.Average)
        handle.wait(target.handle)
        with use_stream(target):
            gpu.synchronize(handle)
            found = tensor.to_numpy()
            expected = value + step + (size - 1) / 2
            assert np.allclose(found, expected), (step, found[:4], expected[:4])
            value_next = found - (size - 1) / 2 + 1 + hvd.rank()
            tensor.fill(value_next.astype(np.float32))


def consumers_of_dlpack() -> None:
    """The stream that a consumer names goes on after the operation, though another one was held."""
    size = hvd.size()
    for step in range(8):
        mine = np.full(60_000, hvd.rank() + 10 * step, np.float32)
        handle: Any = gpu.allgather_async(DeviceArray.from_numpy(mine), name="for a consumer")
        handle.wait()
        (buffer,) = handle.buffers()
        reader = Stream()
        assert buffer.__dlpack__(stream=reader.handle) is not None
        with use_stream(reader):
            found = DeviceArray(buffer.address, buffer.shape, mine.dtype, buffer, buffer.gpu).to_numpy()
        assert np.array_equal(found, np.repeat(np.arange(size) + 10 * step, len(mine))), step
        gpu.synchronize(handle)


def default_stream() -> None:
    """The stream that programs use which do not speak of streams."""
    with use_stream(Stream(0)):
        for step in range(5):
            tensor = DeviceArray.from_numpy(np.full(70_000, hvd.rank() + step, np.float32))
            result = gpu.allreduce(tensor, name="default", op=hvd.Sum).to_numpy()
            assert np.all(result == step * hvd.size() + sum(range(hvd.size()))), step


def second_gpu() -> str:
    """A rank stays with the GPU of its first operation; what was refused disturbs nothing."""
    ones = np.ones(4, np.float32)
    gpu.allreduce(DeviceArray.from_numpy(ones), name="first GPU")
    other = 1 - device_arrays.device()
    with use_stream(Stream(on=other)):
        tensor = DeviceArray.from_numpy(ones, on=other)
        try:
            gpu.allreduce(tensor, name="second GPU")
        except ValueError as error:
            message = str(error)
        else:
            raise AssertionError("a second GPU was served")
    assert np.all(gpu.allreduce(DeviceArray.from_numpy(ones), name="first again").to_numpy() == 1)
    return message


def staged_bytes(count: int) -> tuple[int, int]:
    """By how much the counter grows, for `count` floats on a GPU and on a CPU."""
    grown = []
    ones = np.ones(count, np.float32)
    for module, tensor in ((gpu, DeviceArray.from_numpy(ones)), (hvd, ones)):
        before = hvd.counters()["staged_bytes"]
        module.allreduce_(tensor, name="counted")
        grown.append(hvd.counters()["staged_bytes"] - before)
    return grown[0], grown[1]
