"""Gradients over the ranks: MXNet's engine orders reads after the reduction, so nobody waits.

Row_sparse gradients are the exception: which rows there are is known only when they are computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mxnet.ndarray import NDArray
from mxnet.ndarray.sparse import BaseSparseNDArray
from polyhvd.mxnet import reads, sparse
from polyhvd.mxnet.native import Handle

from polyhvd.collectives.verbs import Collectives
from polyhvd.training.gradient_groups import KeyGroups
from polyhvd.training.options import Options
from polyhvd.training.reducer import GradientReducer

__all__ = ["EngineOrderedReducer"]


class EngineOrderedReducer(GradientReducer[NDArray]):
    """A :class:`GradientReducer` whose ``start()`` is all; ``finish()`` has nothing left to do."""

    def __init__(self, collectives: Collectives[NDArray], *, prefix: str, options: Options) -> None:
        super().__init__(collectives, prefix=prefix, options=options)
        self._started: list[Handle] = []  # since the last reduce()
        self._groups_started: list[Handle] = []
        self._failures_seen = reads.failures()

    def check(self) -> None:
        """Raise what a reduction of the last :meth:`reduce` has failed with by now.

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

    def _keep(self, handle: Handle) -> None:
        handle.forget_arrays()
        self._started.append(handle)

    def start(self, key: Any, name: str, gradient: NDArray, *, priority: int = 0) -> None:
        """Reduce ``gradient`` in place; errors surface at the next read of it."""
        super().start(key, name, gradient, priority=priority)
        handle, _, sent, compression_context = self._pending.pop(key)
        self._restore(gradient, sent, self._collectives.result(handle), compression_context)
        self._keep(handle)

    def start_group(self, name: str, gradients: Sequence[NDArray], *, priority: int = 0) -> None:
        """Reduce gradients in place as one operation."""
        packed = [self._compression.compress(gradient) for gradient in gradients]
        handle = self._collectives.grouped_allreduce_async(
            [sent for sent, _ in packed],
            name=f"{self._prefix}.{name}",
            op=self._op,
            prescale_factor=self._prescale,
            postscale_factor=self._postscale,
            process_set=self._process_set,
            priority=priority,
            in_place=True,
        )
        for gradient, result, (sent, compression_context) in zip(
            gradients, handle.result, packed, strict=True
        ):
            self._restore(gradient, sent, result, compression_context)
        self._groups_started.append(handle)

    def _restore(self, gradient: NDArray, sent: NDArray, result: NDArray, compression_context: Any) -> None:
        if sent is not gradient:
            restored = self._compression.decompress(result, compression_context)
            self._collectives.adapter.assign(gradient, restored)

    def reduce(
        self, gradients: Mapping[Any, NDArray], groups: KeyGroups, *, sparse_as_dense: bool = False
    ) -> None:
        """Reduce gradients in place, those with low keys first. Waits only for row_sparse ones.

        Args:
            gradients: by keys that are the same on all ranks.
            groups: which go together. Row_sparse gradients go by themselves.
            sparse_as_dense: treat them as dense ones.

        Raises:
            HorovodInternalError: a reduction of the last call has failed; this is told once.
        """
        try:
            self.check()
        finally:
            self._started = []
        is_sparse = {key: isinstance(gradient, BaseSparseNDArray) for key, gradient in gradients.items()}
        dense = {
            key: gradient.tostype("default") if is_sparse[key] else gradient
            for key, gradient in gradients.items()
            if sparse_as_dense or not is_sparse[key]
        }
        for keys in groups.divide(list(dense)):
            self._start_together("group", {key: dense[key] for key in keys})
        by_rows = {key: gradient for key, gradient in gradients.items() if is_sparse[key]}
        if sparse_as_dense:
            for key, gradient in by_rows.items():
                dense[key].tostype("row_sparse").copyto(gradient)
        elif by_rows:
            self._reduce_rows(by_rows)

    def _start_together(self, kind: str, gradients: Mapping[Any, NDArray]) -> None:
        """Reduce gradients in place as one operation, in whose name the kind is if there are several."""
        first = next(iter(gradients))
        # The first layers are needed first in the next forward pass.
        priority = -first if isinstance(first, int) else 0
        if len(gradients) > 1:
            self.start_group(f"{kind}.{first}", list(gradients.values()), priority=priority)
        else:
            self.start(first, str(first), gradients[first], priority=priority)

    def _reduce_rows(self, gradients: Mapping[Any, NDArray]) -> None:
        """Reduce row_sparse gradients; all are under way before the first is waited for."""
        names = {f"{self._prefix}.{key}": gradient for key, gradient in gradients.items()}
        parts = sparse.spread(names, self._process_set)
        self._start_together("rows", dict(zip(gradients, (values for _, values in parts), strict=True)))
        for gradient, (indices, values) in zip(gradients.values(), parts, strict=True):
            sparse.collect(indices, values, gradient).copyto(gradient)
