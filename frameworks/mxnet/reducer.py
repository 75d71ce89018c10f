"""How gradients of MXNet are sent: its engine orders reads after the reduction, so Python does not wait.

Row_sparse gradients are the exception: which rows there are is known only when they are computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mxnet.ndarray import NDArray
from mxnet.ndarray.sparse import BaseSparseNDArray
from polyhvd.mxnet import reads, sparse
from polyhvd.mxnet.base import collectives
from polyhvd.mxnet.native import Handle
from polyhvd.mxnet.passes import scale

from polyhvd.training.compression import Compressor
from polyhvd.training.reducer import Exchange, Results

__all__ = ["MxnetExchange"]


class MxnetExchange(Exchange[NDArray]):
    """In place, in the order of MXNet's engine: results can be used at once, and errors surface at reads."""

    def __init__(self) -> None:
        super().__init__(collectives)
        self._started: list[Handle] = []  # since the last begin()
        self._groups_started: list[Handle] = []
        self._failures_seen = reads.failures()

    def begin(self) -> None:
        """Raise the error of a reduction of the last step, once."""
        try:
            self.check()
        finally:
            self._started = []

    def forget_started(self) -> None:
        """Forget what was started: the program knows that it has failed."""
        self._started, self._groups_started = [], []
        self._failures_seen = reads.failures()

    def check(self) -> None:
        """Raise what a reduction since the last :meth:`begin` has failed with by now.

        Waits for groups: MXNet keeps one error for all arrays of an operation, which may be gone before the
        last of their updates is skipped.
        """
        groups, self._groups_started = self._groups_started, []
        self._started += groups
        for handle in groups:
            handle.wait()
            handle.forget_arrays()
        seen = reads.failures()
        if seen == self._failures_seen:
            return
        for handle in self._started:
            error = handle.failure()
            if error is not None:
                raise error
        self._failures_seen = seen

    def start(
        self, tensors: Sequence[NDArray], name: str, priority: int, request: Mapping[str, Any]
    ) -> Results[NDArray]:
        """Let MXNet's engine reduce arrays as soon as they are computed."""
        handle: Any
        if len(tensors) == 1:
            handle = collectives.allreduce_async(
                tensors[0], name=name, priority=priority, in_place=True, **request
            )
            handle.forget_arrays()
            self._started.append(handle)
        else:
            handle = collectives.grouped_allreduce_async(
                tensors, name=name, priority=priority, in_place=True, **request
            )
            self._groups_started.append(handle)
        return lambda: tensors

    def start_sparse(
        self,
        gradients: Mapping[Any, NDArray],
        prefix: str,
        compression: Compressor,
        priority: int,
        request: Mapping[str, Any],
    ) -> Results[NDArray]:
        """Begin to reduce arrays of rows; with operations other than sums, waits for the ranks' indices."""
        if request["op"] in sparse.SUMS:
            sums = [
                sparse.start_sum(
                    gradient, name=f"{prefix}.{key}", priority=priority, compression=compression, **request
                )
                for key, gradient in gradients.items()
            ]
            return lambda: [collectives.synchronize(handle) for handle in sums]
        names = {f"{prefix}.{key}": gradient for key, gradient in gradients.items()}
        parts = sparse.spread(names, request["process_set"])
        packed = [compression.compress(values) for _, values in parts]
        first = next(iter(gradients))
        name = f"{prefix}.{first}" if len(gradients) == 1 else f"{prefix}.rows.{first}"
        results = self.start([sent for sent, _ in packed], name, priority, request)

        def collect() -> list[NDArray]:
            values = [
                compression.decompress(value, context)
                for value, (_, context) in zip(results(), packed, strict=True)
            ]
            return [
                sparse.collect(indices, value, gradient)
                for (indices, _), value, gradient in zip(parts, values, gradients.values(), strict=True)
            ]

        return collect

    def is_sparse(self, gradient: NDArray) -> bool:
        """Return whether it is row_sparse."""
        return isinstance(gradient, BaseSparseNDArray)

    def dense(self, gradient: NDArray) -> NDArray:
        """The same numbers as an array with all rows."""
        return gradient.tostype("default") if self.is_sparse(gradient) else gradient

    def put(self, key: Any, gradient: NDArray, reduced: NDArray) -> NDArray:
        """Write the gradient in place, in its own storage type; waits for that of a row_sparse one."""
        if self.is_sparse(gradient) and not self.is_sparse(reduced):
            reduced = reduced.tostype("row_sparse")
        return super().put(key, gradient, reduced)

    def divided(self, gradient: NDArray, divisor: int) -> NDArray:
        """Divide in place."""
        scale(gradient, 1.0 / divisor)
        return gradient
