"""The data of a job: every sample of an epoch once over all ranks, even if their number changes.

It imports no framework.

Example::

    from polyhvd.data import ArrayLoader
    loader = ArrayLoader([images, labels], batch_size=32)
    for batch in loader:
        train(*batch, weight=batch.weight)
"""

from __future__ import annotations

from polyhvd.data.arrays import ArrayLoader, Batch
from polyhvd.data.async_loader import AsyncDataLoaderMixin, BaseDataLoader
from polyhvd.data.batch_sampler import DistributedBatchSampler
from polyhvd.data.elastic_sampler import ElasticSampler
from polyhvd.data.order import Order, Run, Step
from polyhvd.data.parquet import FileLoader, ParquetLoader
from polyhvd.data.position import Position
from polyhvd.data.writing import write_parquet
from polyhvd.errors import DataError

__all__ = [
    "ArrayLoader",
    "AsyncDataLoaderMixin",
    "BaseDataLoader",
    "Batch",
    "DataError",
    "DistributedBatchSampler",
    "ElasticSampler",
    "FileLoader",
    "Order",
    "ParquetLoader",
    "Position",
    "Run",
    "Step",
    "write_parquet",
]


def __dir__() -> list[str]:
    return __all__
