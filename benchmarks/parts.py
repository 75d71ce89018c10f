"""The parts of a run: which peers do what, on how many ranks, on one host or on two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks import workloads
from benchmarks.workloads import KB, MB, Workload

POLYHVD = ("torch", "numpy", "mxnet", "tensorflow")
HOROVOD = ("horovod", "horovod-mpi")
ALL = (*POLYHVD, *HOROVOD, "gloo", "openmpi", "mpich", "kvstore", "floor")
GRADIENTS = (*ALL, "tensorflow-alone", "tensorflow-met")
DTYPED = ("numpy", "gloo", "openmpi", "floor")
ROUTED = ("torch", "horovod-mpi", "gloo", "openmpi")
TRAINING = ("torch", "torch-alone", "torch-met", *HOROVOD, "gloo", "mxnet", "mxnet-alone", "mxnet-met")
TRAINING += ("kvstore", "tensorflow", "keras-alone", "keras-met", "mwms")


@dataclass(frozen=True)
class Part:
    """A table. The first of `peers` is what the others are compared with.

    Where columns are compared with each other they take turns too, `in_turns`. Then the tensors of all of
    them are there at once.
    """

    name: str
    title: str
    peers: tuple[str, ...]
    workloads: Sequence[Workload]
    size: int = 2
    hosts: int = 1
    in_turns: bool = False
    rate_mbit: int = 0  # of the cable between two hosts; 0: what it can do


CROWDED = (KB, 64 * KB, MB, 16 * MB, 64 * MB)
BETWEEN = (KB, MB, 16 * MB, 64 * MB)

PARTS = (
    Part("allreduce", "allreduce in place, blocking", ALL, workloads.blocking()),
    Part("async", "allreduce through a handle", ALL[:-1], workloads.asynchronous(), in_turns=True),
    Part(
        "gradients", "the 161 gradients of ResNet-50, 102 MB", GRADIENTS, workloads.gradients(), in_turns=True
    ),
    Part("dtypes", "allreduce of other dtypes", DTYPED, workloads.dtypes(), in_turns=True),
    Part("steps", "a whole training step (Keras: five)", TRAINING, workloads.steps()),
    *(
        Part(
            f"crowded-{size}",
            f"allreduce by {size} ranks",
            ("torch", "numpy", *HOROVOD, "gloo", "openmpi", "floor"),
            [*workloads.blocking(CROWDED), *workloads.gradients()],
            size=size,
        )
        for size in (4, 8)
    ),
    Part("hosts", "allreduce between two hosts", ROUTED, workloads.blocking(BETWEEN), hosts=2),
    Part(
        "hosts-1gbit",
        "allreduce between two hosts, the cable limited to 1 Gbit/s",
        ROUTED,
        workloads.blocking(BETWEEN[1:]),
        hosts=2,
        rate_mbit=1000,
    ),
)


def chosen(names: Sequence[str], peers: Sequence[str], bytes_max: int) -> list[Part]:
    """The parts of these names, all if there are none, without peers and sizes that are not wanted."""
    parts = [part for part in PARTS if not names or part.name in names]
    return [
        replace(
            part,
            peers=tuple(peer for peer in part.peers if not peers or peer in peers),
            workloads=[w for w in part.workloads if w.bytes <= bytes_max or len(w.elements) > 1],
        )
        for part in parts
    ]
