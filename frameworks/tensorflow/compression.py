"""``Compression.none``, ``.fp16`` and ``.bf16`` for tensors, eager and in graphs."""

from __future__ import annotations

from polyhvd.tensorflow.ops import adapter

from polyhvd.training.compression import Compression as _Compression

__all__ = ["Compression"]

Compression = _Compression(adapter)
