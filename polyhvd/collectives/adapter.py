"""The protocol between the collectives and a framework, which a framework's adapter implements.

An adapter knows how to hand its tensors to the core, and how to make, cast and name them. It
knows nothing of averaging, naming, fusion or retries: :mod:`.verbs` holds the semantics, once.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from polyhvd import _core
    from polyhvd.runtime.world import World

__all__ = ["Capability", "FrameworkAdapter", "Handle", "OpKind", "Operation", "ReduceOp"]

T = TypeVar("T")
if TYPE_CHECKING:
    # A plain Handle is one to anything: type checkers know defaults, Python from 3.13 on.
    from typing_extensions import TypeVar as _TypeVar

    R = _TypeVar("R", covariant=True, default=Any)
else:
    R = TypeVar("R", covariant=True)


class OpKind(enum.IntEnum):
    """The collectives, as numbered in csrc/control/types.h."""

    ALLREDUCE = 0
    ALLGATHER = 1
    BROADCAST = 2
    BARRIER = 3
    ALLTOALL = 4
    REDUCESCATTER = 5
    JOIN = 6
    ADD_PROCESS_SET = 7
    REMOVE_PROCESS_SET = 8


class ReduceOp(enum.IntEnum):
    """The reductions, with Horovod's numbers."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


class Capability(enum.Enum):
    """Optional features of an adapter; the shared tests skip only by these."""

    DIRECT = "tensors that the core reads itself"
    IN_PLACE = "in place"
    ASYNC = "handles that are done later"
    BFLOAT16 = "bfloat16"
    INT16 = "int16"
    BOOL = "bool"
    UNSIGNED = "uint16, uint32 and uint64"
    NON_CONTIGUOUS = "tensors that are not dense in memory"
    EMPTY = "tensors without elements"
    GRAPH = "operations in a compiled graph"
    AUTOGRAD = "gradients through operations"


class Operation(Protocol):
    """One collective, as :mod:`.verbs` asks an adapter for it; see :class:`.operation.Call`."""

    world: World  # that it is made in; an adapter submits to its engine
    kind: int
    name: str | None  # None: the core counts it, see Submission::turn in csrc/control/operation.h
    op: int
    root: int
    prescale: float
    postscale: float
    process_set: int
    priority: int
    blocking: bool
    numbers: Sequence[int]  # alltoall: rows for each member; empty: equal parts
    exact_gradient: bool | None  # for adapters that record gradients; see polyhvd.adjoints
    generation: int  # of the engine that it belongs to; 0: whichever is current

    @property
    def label(self) -> str:
        """Its name in messages."""

    def submit(self, inputs: Sequence[Any], outputs: Sequence[Any] | None) -> _core.Handle:
        """Submit it to its world's engine, for tensors that the core reads by itself.

        Args:
            inputs: arrays with the buffer protocol, or references by address.
            outputs: those that are overwritten; None: the core makes them.

        Raises:
            BufferError: one of them is not dense.
            TypeError: one of them is neither.
        """


class Handle(Protocol[R]):
    """A submitted operation, of which ``synchronize()`` returns an R.

    The core's own handle is one; engine-ordered frameworks bring theirs.
    """

    #: Outputs, in order; complete once ``finish`` has run.
    result: Any
    #: Called with the handle after ``wait()`` to make ``result``; None when it is there already.
    finish: Callable[[Any], Any] | None
    #: Belongs to :mod:`polyhvd.collectives.verbs`.
    slot: Any

    def done(self) -> bool:
        """Return whether ``wait()`` would return at once."""

    def wait(self) -> None:
        """Return when the operation is done; raise what it failed with."""


class FrameworkAdapter(Protocol[T]):
    """A framework, as seen from the collectives."""

    name: str
    capabilities: frozenset[Capability]

    def submit(self, operation: Operation, tensors: Sequence[T], out: Sequence[T] | None) -> Handle:
        """Start a collective on ``tensors``, results going to ``out``, or to new tensors when None.

        The returned handle's ``result`` (after ``finish``) is the list of output tensors; of an
        alltoall the exchanged tensor and, as int32, the rows received from each member. ``out`` is
        None but for allreduce and broadcast.
        Raises TypeError or ValueError, naming the operation, for tensors it cannot take.
        """

    def is_plain(self, tensor: T) -> bool:
        """Return whether the core may work on the tensor's own memory, on a CPU, if that is dense.

        Called only with ``Capability.DIRECT``. Raises TypeError for what cannot be communicated.
        """

    def dtype(self, tensor: T) -> str:
        """Element type by its NumPy name, such as "bfloat16"."""

    def cast(self, tensor: T, dtype: str) -> T:
        """A tensor with the same values in another element type; the same tensor if it has it."""

    def assign(self, target: T, value: T) -> None:
        """Write ``value`` into ``target``, casting to its element type."""

    def named_parameters(self, owner: object) -> Iterable[tuple[str, T]]:
        """Tensors of a model, dict or list of pairs, with names that are equal on all ranks."""
