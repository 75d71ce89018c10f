"""Gradients over the ranks, for all optimizers: scale, compress, reduce, put back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from polyhvd.collectives.adapter import Handle, ReduceOp
from polyhvd.collectives.verbs import Collectives
from polyhvd.training.options import Options

__all__ = ["GradientReducer"]

T = TypeVar("T")


class GradientReducer(Generic[T]):
    """Reduces gradients in place as they become ready. Not thread-safe: one per optimizer.

    Args:
        collectives: of the framework.
        prefix: begins the names on the wire; gradients are named by their position in the optimizer,
            so that names agree between ranks and recur.
        options: of the optimizer.
        arguments: instead of ``options``, some of their fields, by name; of any reduction.
    """

    def __init__(
        self,
        collectives: Collectives[T],
        *,
        prefix: str,
        options: Options | None = None,
        **arguments: Any,
    ) -> None:
        options = options or Options(ops=tuple(ReduceOp), **arguments)
        self._collectives = collectives
        self._prefix = prefix
        self._op = options.op
        self._compression = options.compression
        self._prescale, self._postscale = options.prescale_factor, options.postscale_factor
        self._process_set = options.process_set
        self._pending: dict[Any, tuple[Handle, T, T, Any]] = {}
        self._pending_groups: list[tuple[Handle, list[tuple[T, T, Any]]]] = []

    def start(self, key: Any, name: str, gradient: T, *, priority: int = 0) -> None:
        """Begin to reduce ``gradient``; ``key`` identifies it until :meth:`finish`."""
        sent, compression_context = self._compression.compress(gradient)
        handle = self._collectives.allreduce_async(
            sent,
            name=f"{self._prefix}.{name}",
            op=self._op,
            prescale_factor=self._prescale,
            postscale_factor=self._postscale,
            process_set=self._process_set,
            priority=priority,
            in_place=True,
        )
        self._pending[key] = (handle, gradient, sent, compression_context)

    def start_group(self, name: str, gradients: Sequence[T], *, priority: int = 0) -> None:
        """Begin to reduce several gradients, of any dtypes, as one operation: all or none."""
        parts = [(gradient, *self._compression.compress(gradient)) for gradient in gradients]
        handle = self._collectives.grouped_allreduce_async(
            [sent for _, sent, _ in parts],
            name=f"{self._prefix}.{name}",
            op=self._op,
            prescale_factor=self._prescale,
            postscale_factor=self._postscale,
            process_set=self._process_set,
            priority=priority,
            in_place=True,
        )
        self._pending_groups.append((handle, parts))

    def is_started(self, key: Any) -> bool:
        """Whether this gradient is under way."""
        return key in self._pending

    def drop(self) -> None:
        """Forget all gradients: others may never send theirs. Their memory lives until the core lets go."""
        self._pending = {}
        self._pending_groups = []

    def finish(self) -> None:
        """Wait for all gradients; each tensor then holds the result.

        When one fails, the others are waited for all the same, and the first error is raised.
        """
        pending, groups = self._pending, self._pending_groups
        self.drop()
        first_error: BaseException | None = None
        for handle, gradient, sent, compression_context in pending.values():
            try:
                self._restore(gradient, sent, compression_context, self._collectives.synchronize(handle))
            except Exception as error:
                first_error = first_error or error
        for handle, parts in groups:
            try:
                for part, result in zip(parts, self._collectives.synchronize(handle), strict=True):
                    self._restore(*part, result)
            except Exception as error:
                first_error = first_error or error
        if first_error is not None:
            raise first_error

    def _restore(self, gradient: T, sent: T, compression_context: Any, result: T) -> None:
        if sent is not gradient:
            restored = self._compression.decompress(result, compression_context)
            self._collectives.adapter.assign(gradient, restored)
