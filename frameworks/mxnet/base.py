"""The one adapter of this process and its collectives, for the other modules of this folder."""

from __future__ import annotations

from polyhvd.mxnet.adapter import MxnetAdapter, MxnetCollectives

from polyhvd.training.compression import Compression as _Compression

__all__ = ["Compression", "adapter", "collectives"]

adapter = MxnetAdapter()
collectives = MxnetCollectives(adapter)
Compression = _Compression(adapter)
