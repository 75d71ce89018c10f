"""The functions of polyhvd.jax that differ from those of other frameworks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from polyhvd.jax import derivatives, traced
from polyhvd.jax.adapter import JaxAdapter, check

from polyhvd.collectives import membership
from polyhvd.collectives.adapter import OpKind
from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.collectives.verbs import Arguments, CopyArguments, ReductionArguments, ScatterArguments
from polyhvd.errors import InvalidArgumentError
from polyhvd.training.arrays import ArrayFunctions
from polyhvd.training.compression import KeyedCompressor

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Compression", "JaxFunctions", "functions"]


class JaxFunctions(ArrayFunctions[jax.Array]):
    """See :class:`polyhvd.collectives.functions.Functions`."""

    def __init__(self) -> None:
        super().__init__(JaxAdapter(), jnp.asarray)

    def checked(self, tensor: Any) -> jax.Array:
        """The array itself; raises TypeError for what is none."""
        return check(tensor)

    def compressor(self, compression: Any, name: str | None) -> Any:
        """One with state cannot be compiled: what it keeps would be what was recorded."""
        if isinstance(compression, KeyedCompressor) and traced.is_staging():
            raise InvalidArgumentError(
                f"compression={type(compression).__name__} keeps state from call to call, which a compiled "
                "function cannot; call it outside of jax.jit, or pass a compressor without state"
            )
        return super().compressor(compression, name)

    def allreduce_one(
        self,
        tensor: jax.Array,
        name: str | None,
        op: int,
        prescale_factor: float,
        postscale_factor: float,
        process_set: ProcessSet,
        priority: int,
    ) -> jax.Array:
        """Differentiable, and compiled."""
        factors = prescale_factor, postscale_factor
        if not derivatives.is_recorded((tensor,)):
            return super().allreduce_one(tensor, name, op, *factors, process_set, priority)
        return derivatives.allreduce((tensor,), name, op, *factors, process_set, priority)[0]

    def allreduce_group(
        self, tensors: Sequence[jax.Array], *, op: int, **arguments: Unpack[ReductionArguments]
    ) -> list[jax.Array]:
        """Differentiable, and compiled."""
        if not derivatives.is_recorded(tensors):
            return super().allreduce_group(tensors, op=op, **arguments)
        return derivatives.allreduce(tensors, op=op, **arguments)

    def allgather_group(
        self, tensors: Sequence[jax.Array], **arguments: Unpack[CopyArguments]
    ) -> list[jax.Array]:
        """Differentiable, and compiled."""
        if not derivatives.is_recorded(tensors):
            return super().allgather_group(tensors, **arguments)
        given: Any = arguments
        return derivatives.allgather(tensors, **given)

    def broadcast_one(
        self, tensor: jax.Array, root_rank: int, **arguments: Unpack[CopyArguments]
    ) -> jax.Array:
        """Differentiable, and compiled."""
        if not derivatives.is_recorded((tensor,)):
            return super().broadcast_one(tensor, root_rank, **arguments)
        given: Any = arguments
        return derivatives.broadcast(tensor, root_rank, **given)

    def exchange(self, tensor: jax.Array, splits: Any, **arguments: Unpack[Arguments]) -> Any:
        """Differentiable, and compiled."""
        if not derivatives.is_recorded((tensor,)):
            return super().exchange(tensor, splits, **arguments)
        given: Any = arguments
        received = derivatives.alltoall(tensor, splits, **given)
        return received[0] if splits is None else received

    def reducescatter_group(
        self, tensors: Sequence[jax.Array], *, op: int, **arguments: Unpack[ScatterArguments]
    ) -> list[jax.Array]:
        """Differentiable, and compiled."""
        if not derivatives.is_recorded(tensors):
            return super().reducescatter_group(tensors, op=op, **arguments)
        given: Any = arguments
        return derivatives.reducescatter(tensors, op=op, **given)

    def barrier(self, process_set: ProcessSet = global_process_set) -> None:
        """In its place among the collectives of a function that is compiled, too."""
        if traced.is_staging():
            traced.run(traced.Collective(OpKind.BARRIER, None, process_set, ()), ())
            return
        traced.settle()
        membership.barrier(process_set)

    def join(self) -> Any:
        """In a function that is compiled, an array of int32."""
        if traced.is_staging():
            last = jax.ShapeDtypeStruct((), jnp.int32)
            return traced.run(traced.Collective(OpKind.JOIN, None, global_process_set, (last,)), ())[0]
        traced.settle()
        return membership.join()


functions = JaxFunctions()
Compression = functions.Compression
