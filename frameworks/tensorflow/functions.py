"""The functions of polyhvd.tensorflow that differ from those of other frameworks, eager and in graphs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from polyhvd.tensorflow import ops, sparse
from polyhvd.tensorflow.compression import VariableState
from polyhvd.tensorflow.errors import as_tensorflow
from polyhvd.tensorflow.gradients import accept_device, as_dense, reduction_of

from polyhvd.collectives.adapter import Handle, ReduceOp
from polyhvd.collectives.functions import Functions
from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.collectives.verbs import Arguments, CopyArguments, ReductionArguments, ScatterArguments
from polyhvd.training.compression import NO_COMPRESSION, KeyedCompressor

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["TensorflowFunctions", "functions"]


class TensorflowFunctions(Functions[tf.Tensor]):
    """See :class:`polyhvd.collectives.functions.Functions`."""

    def checked(self, tensor: Any) -> tf.Tensor:
        """A tensor, of whatever TensorFlow makes one; tf.IndexedSlices are refused."""
        return as_dense(tensor, "the tensor")

    def resolved(self, op: int | None, average: bool | None = None) -> int:
        """See :func:`polyhvd.collectives.verbs.resolve_op`."""
        return reduction_of(op, average)

    def compressor(self, compression: Any, name: str | None) -> Any:
        """The state of a compressor that has one is in variables."""
        if not hasattr(compression, "for_operation"):
            return compression
        if isinstance(compression, KeyedCompressor):
            compression.hold(VariableState)
        with as_tensorflow():
            return super().compressor(compression, name)

    def allreduce_group(
        self, tensors: Sequence[tf.Tensor], *, op: int, **arguments: Unpack[ReductionArguments]
    ) -> list[tf.Tensor]:
        """Differentiable, and in graphs."""
        given: Any = arguments
        return ops.allreduce(tensors, op=op, **given)

    def allgather_group(
        self, tensors: Sequence[tf.Tensor], **arguments: Unpack[CopyArguments]
    ) -> list[tf.Tensor]:
        """Differentiable, and in graphs."""
        given: Any = arguments
        return ops.allgather(tensors, **given)

    def broadcast_one(
        self, tensor: tf.Tensor, root_rank: int, **arguments: Unpack[CopyArguments]
    ) -> tf.Tensor:
        """Differentiable, and in graphs."""
        given: Any = arguments
        return ops.broadcast([tensor], root_rank, **given)[0]

    def exchange(self, tensor: tf.Tensor, splits: Any, **arguments: Unpack[Arguments]) -> Any:
        """Differentiable, and in graphs."""
        given: Any = arguments
        return ops.alltoall(tensor, splits, **given)

    def reducescatter_group(
        self, tensors: Sequence[tf.Tensor], *, op: int, **arguments: Unpack[ScatterArguments]
    ) -> list[tf.Tensor]:
        """Differentiable, and in graphs."""
        given: Any = arguments
        return ops.reducescatter(tensors, op=op, **given)

    def allreduce(
        self,
        tensor: Any,
        average: bool | None = None,
        name: str | None = None,
        compression: Any = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        priority: int = 0,
        device_dense: str = "",
        device_sparse: str = "",
    ) -> Any:
        """Reduce a tensor; the result for tf.IndexedSlices is tf.IndexedSlices."""
        if compression is NO_COMPRESSION and not isinstance(tensor, tf.IndexedSlices):
            # A fast path: for a small tensor, Python's part takes as long as the collective.
            if device_dense or device_sparse:
                accept_device("allreduce", device_dense=device_dense, device_sparse=device_sparse)
            (result,) = ops.allreduce(
                [as_dense(tensor, "the tensor")],
                name=name,
                op=reduction_of(op, average),
                prescale_factor=prescale_factor,
                postscale_factor=postscale_factor,
                process_set=process_set,
                priority=priority,
            )
            return result
        (result,) = self.grouped_allreduce(
            [tensor],
            average,
            compression=compression,
            op=op,
            device_dense=device_dense,
            device_sparse=device_sparse,
            name=name,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
        )
        return result

    def grouped_allreduce(
        self,
        tensors: Iterable[Any],
        average: bool | None = None,
        *,
        compression: Any = None,
        op: int | None = None,
        device_dense: str = "",
        device_sparse: str = "",
        **arguments: Unpack[ReductionArguments],
    ) -> list[Any]:
        """Reduce tensors as one operation, and tf.IndexedSlices as a second one."""
        accept_device("allreduce", device_dense=device_dense, device_sparse=device_sparse)
        compression = None if compression is NO_COMPRESSION else compression
        tensors = list(tensors)
        results: list[Any] = [None] * len(tensors)
        slices = [i for i, tensor in enumerate(tensors) if isinstance(tensor, tf.IndexedSlices)]
        dense = [i for i in range(len(tensors)) if i not in slices]
        if slices:
            given: Any = dict(arguments)
            if given.get("name") is not None and dense:
                given["name"] += ".sparse"
            # Of slices, other rows are sent in each call: a compressor with state has none for them.
            stateless = compression is None or isinstance(compression, KeyedCompressor)
            reduced = sparse.allreduce(
                [tensors[i] for i in slices],
                op=self.resolved(op, average),
                compression=NO_COMPRESSION if stateless else self.compressor(compression, given.get("name")),
                **given,
            )
            for i, value in zip(slices, reduced, strict=True):
                results[i] = value
        if dense:
            values = super().grouped_allreduce(
                [tensors[i] for i in dense], average, compression=compression, op=op, **arguments
            )
            for i, value in zip(dense, values, strict=True):
                results[i] = value
        return results

    def reducescatter(
        self,
        tensor: tf.Tensor,
        *,
        compression: Any = None,
        op: int = ReduceOp.Average,
        device_dense: str = "",
        **arguments: Unpack[ScatterArguments],
    ) -> tf.Tensor:
        """Collectives run on the host."""
        accept_device("reducescatter", device_dense=device_dense)
        return super().reducescatter(tensor, compression=compression, op=op, **arguments)

    def grouped_reducescatter(
        self,
        tensors: Iterable[tf.Tensor],
        *,
        compression: Any = None,
        op: int = ReduceOp.Average,
        device_dense: str = "",
        **arguments: Unpack[ScatterArguments],
    ) -> list[tf.Tensor]:
        """Collectives run on the host."""
        accept_device("reducescatter", device_dense=device_dense)
        return super().grouped_reducescatter(tensors, compression=compression, op=op, **arguments)

    def alltoall_async(
        self, tensor: tf.Tensor, splits: Any = None, **arguments: Unpack[Arguments]
    ) -> Handle[tuple[tf.Tensor, tf.Tensor]]:
        """``splits`` may be a tensor."""
        return super().alltoall_async(tensor, ops.rows_of(splits), **arguments)

    def barrier(self, process_set: ProcessSet = global_process_set) -> Any:
        """In a graph of tf.compat.v1, the operation to run."""
        return ops.barrier(process_set)

    def join(self) -> Any:
        """In a graph, a scalar of int32."""
        return ops.join()


functions = TensorflowFunctions(ops.collectives)
