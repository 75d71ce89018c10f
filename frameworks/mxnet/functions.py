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
from polyhvd.mxnet.adapter import MxnetCollectives
from polyhvd.mxnet.base import adapter

from polyhvd.collectives.adapter import Handle
from polyhvd.collectives.functions import Functions
from polyhvd.collectives.operation import is_number
from polyhvd.collectives.verbs import Arguments

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["MxnetFunctions", "functions"]

R = TypeVar("R")


class _WithSparse(MxnetCollectives):
    """Collectives whose allreduce sends only the rows that a rank has of a row_sparse array."""

    def allreduce_async(
        self, tensor: NDArray, *, in_place: bool = False, blocking: bool = False, **arguments: Any
    ) -> Handle[NDArray]:
        """See :class:`polyhvd.collectives.verbs.Collectives`."""
        if isinstance(tensor, RowSparseNDArray):
            return sparse.allreduce_async(self, tensor, in_place, arguments)
        return super().allreduce_async(tensor, in_place=in_place, blocking=blocking, **arguments)


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


functions = MxnetFunctions(_WithSparse(adapter))
