"""Gradients over the ranks without any wait: MXNet's engine orders reads after the reduction."""

from __future__ import annotations

from typing import Any

from mxnet.ndarray import NDArray

from polyhvd.errors import InvalidArgumentError
from polyhvd.reducer import GradientReducer

__all__ = ["EngineOrderedReducer", "refuse_groups"]


class EngineOrderedReducer(GradientReducer[NDArray]):
    """A :class:`GradientReducer` whose ``start()`` is all; ``finish()`` has nothing left to do."""

    def start(self, key: Any, name: str, gradient: NDArray, *, priority: int = 0) -> None:
        """Reduce ``gradient`` in place; errors surface at the next read of it."""
        super().start(key, name, gradient, priority=priority)
        handle, _, sent, compression_context = self._pending.pop(key)
        if sent is not gradient:
            restored = self._compression.decompress(handle.result[0], compression_context)
            self._collectives.adapter.assign(gradient, restored)


def refuse_groups(num_groups: int) -> None:
    """Raise for the values of ``num_groups`` that are not supported yet."""
    if num_groups != 0:
        raise InvalidArgumentError(
            f"num_groups={num_groups!r} is not supported; leave it at 0: gradients that are ready are fused"
        )
