"""Samplers that Gluon's DataLoader, and what is built on it, knows as its own."""

from __future__ import annotations

from mxnet.gluon.data import Sampler

from polyhvd import data

__all__ = ["DistributedBatchSampler", "ElasticSampler"]


class DistributedBatchSampler(data.DistributedBatchSampler, Sampler):
    """:class:`polyhvd.data.DistributedBatchSampler`, as a ``mxnet.gluon.data.Sampler``."""

    __doc__ = data.DistributedBatchSampler.__doc__


class ElasticSampler(data.ElasticSampler, Sampler):
    """:class:`polyhvd.data.ElasticSampler`, as a ``mxnet.gluon.data.Sampler``."""

    __doc__ = data.ElasticSampler.__doc__


def __dir__() -> list[str]:
    return __all__
