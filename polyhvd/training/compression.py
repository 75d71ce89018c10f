"""Gradients in fewer bytes on the wire, written once over ``adapter.cast``.

A user's own compressor has the same two methods::

    class Mine:
        def compress(self, tensor): return smaller, context
        def decompress(self, tensor, context): return original
"""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar

from polyhvd.collectives.adapter import FrameworkAdapter

__all__ = ["NO_COMPRESSION", "CastCompressor", "Compression", "Compressor", "NoneCompressor"]

T = TypeVar("T")


class Compressor(Protocol):
    """What ``compression=`` takes: Horovod's interface."""

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """The tensor to send, and what ``decompress`` needs to know."""

    def decompress(self, tensor: Any, context: Any) -> Any:
        """The received tensor in its original form."""


class NoneCompressor:
    """Sends tensors as they are."""

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """Return the tensor itself."""
        return tensor, None

    def decompress(self, tensor: Any, context: Any) -> Any:
        """Return the tensor itself."""
        return tensor


NO_COMPRESSION: Compressor = NoneCompressor()


class CastCompressor(Generic[T]):
    """Sends float32 and float64 tensors as float16 or bfloat16."""

    def __init__(self, adapter: FrameworkAdapter[T], dtype: str) -> None:
        self._adapter = adapter
        self._dtype = dtype

    def compress(self, tensor: T) -> tuple[T, str | None]:
        """Cast a wider floating-point tensor; others pass."""
        original = self._adapter.dtype(tensor)
        if original not in ("float32", "float64"):
            return tensor, None
        return self._adapter.cast(tensor, self._dtype), original

    def decompress(self, tensor: T, context: str | None) -> T:
        """Cast back to the original type."""
        return tensor if context is None else self._adapter.cast(tensor, context)


class Compression:
    """``Compression.none``, ``.fp16`` and ``.bf16`` of one framework."""

    def __init__(self, adapter: FrameworkAdapter[Any]) -> None:
        self.none = NO_COMPRESSION
        self.fp16: Compressor = CastCompressor(adapter, "float16")
        self.bf16: Compressor = CastCompressor(adapter, "bfloat16")
