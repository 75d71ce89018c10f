"""The functions of polyhvd.mxnet that differ from those of other frameworks.

Those that return no handle return the results themselves: MXNet's engine makes reads of them wait.
Results in new arrays are known to autograd; those of in-place forms are not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray
from mxnet.ndarray.sparse import RowSparseNDArray
from polyhvd.mxnet import sparse
from polyhvd.mxnet.base import collectives

from polyhvd.collectives.adapter import Handle
from polyhvd.collectives.functions import Functions
from polyhvd.collectives.operation import is_number
from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.collectives.verbs import Arguments

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["MxnetFunctions", "functions"]

R = TypeVar("R")


class MxnetFunctions(Functions[NDArray]):
    """See :class:`polyhvd.collectives.functions.Functions`."""

    def value(self, tensor: Any) -> NDArray:
        """An array, or a number as one of one element."""
        if not is_number(tensor):
            return tensor
        number = np.asarray(tensor)
        return mx.nd.array([tensor], dtype=np.float32 if type(tensor) is float else number.dtype)

    def finished(self, handle: Handle[R]) -> R:
        """The outputs of an operation, before it has written them."""
        if handle.finish is not None:  # the result is made on this thread, in the end
            return self.collectives.synchronize(handle)
        result: R = self.collectives.result(handle)
        return result

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
    ) -> NDArray:
        """Of a row_sparse array only the rows that a rank has are sent."""
        return self.finished(
            self.allreduce_async(
                tensor, average, name, op, prescale_factor, postscale_factor, process_set, priority
            )
        )

    def allreduce_(
        self,
        tensor: NDArray,
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        priority: int = 0,
    ) -> NDArray:
        """Of a row_sparse array only the rows that a rank has are sent."""
        return self.finished(
            self.allreduce_async_(
                tensor, average, name, op, prescale_factor, postscale_factor, process_set, priority
            )
        )

    def allreduce_async(
        self,
        tensor: Any,
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        priority: int = 0,
    ) -> Handle[NDArray]:
        """Of a row_sparse array only the rows that a rank has are sent."""
        start = self._sparse if isinstance(tensor, RowSparseNDArray) else super().allreduce_async
        return start(tensor, average, name, op, prescale_factor, postscale_factor, process_set, priority)

    def allreduce_async_(
        self,
        tensor: NDArray,
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        priority: int = 0,
    ) -> Handle[NDArray]:
        """Of a row_sparse array only the rows that a rank has are sent."""
        if isinstance(tensor, RowSparseNDArray):
            return self._sparse(
                *(tensor, average, name, op, prescale_factor, postscale_factor, process_set, priority),
                in_place=True,
            )
        return self.collectives.allreduce_async(
            tensor,
            name=name,
            op=self.resolved(op, average),
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
            priority=priority,
            in_place=True,
        )

    def _sparse(
        self,
        tensor: RowSparseNDArray,
        average: bool | None,
        name: str | None,
        op: int | None,
        prescale_factor: float,
        postscale_factor: float,
        process_set: ProcessSet,
        priority: int,
        in_place: bool = False,
    ) -> Handle[NDArray]:
        arguments = {
            "name": name,
            "op": self.resolved(op, average),
            "prescale_factor": prescale_factor,
            "postscale_factor": postscale_factor,
            "process_set": process_set,
            "priority": priority,
        }
        return sparse.allreduce_async(collectives, tensor, in_place, arguments)

    def exchange(self, tensor: NDArray, splits: Any, **arguments: Unpack[Arguments]) -> Any:
        """The call waits for ``splits``, which may be an array."""
        return super().exchange(tensor, _on_host(splits), **arguments)

    def alltoall_async(
        self, tensor: NDArray, splits: Any = None, **arguments: Unpack[Arguments]
    ) -> Handle[tuple[NDArray, NDArray]]:
        """The call waits for ``splits``, which may be an array."""
        return super().alltoall_async(tensor, _on_host(splits), **arguments)

    def join(self) -> int:
        """Wait for earlier work of MXNet's engine; raises its failures that were not noticed."""
        mx.nd.waitall()
        return super().join()


def _on_host(splits: Any) -> Any:
    return splits.asnumpy() if isinstance(splits, NDArray) else splits


functions = MxnetFunctions(collectives)
