"""``SyncBatchNorm`` under the module path that Horovod's users import it from."""

from __future__ import annotations

from polyhvd.torch.batch_norm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
