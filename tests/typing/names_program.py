"""A type checker refuses names that no module has, and accepts those that are imported at their first use."""

from __future__ import annotations

import polyhvd.cupy
import polyhvd.jax
import polyhvd.keras
import polyhvd.lightning
import polyhvd.mxnet
import polyhvd.numpy
import polyhvd.tensorflow
import polyhvd.tensorflow.keras
import polyhvd.torch

import polyhvd
import polyhvd.data
import polyhvd.parity
import polyhvd.ray
import polyhvd.sagemaker
import polyhvd.spark
import polyhvd.testing


def unknown() -> None:
    polyhvd.siez()  # type: ignore[attr-defined]
    polyhvd.cupy.broadcast_paramters()  # type: ignore[attr-defined]
    polyhvd.data.ParquetLoadr()  # type: ignore[attr-defined]
    polyhvd.jax.broadcast_paramters()  # type: ignore[attr-defined]
    polyhvd.keras.broadcast_variable()  # type: ignore[attr-defined]
    polyhvd.lightning.allreduces()  # type: ignore[attr-defined]
    polyhvd.mxnet.broadcast_paramters()  # type: ignore[attr-defined]
    polyhvd.numpy.broadcast_paramters()  # type: ignore[attr-defined]
    polyhvd.parity.comparee()  # type: ignore[attr-defined]
    polyhvd.ray.RayExecuter()  # type: ignore[attr-defined]
    polyhvd.sagemaker.model_directory()  # type: ignore[attr-defined]
    polyhvd.spark.run_elastc()  # type: ignore[attr-defined]
    polyhvd.tensorflow.broadcast_variable()  # type: ignore[attr-defined]
    polyhvd.tensorflow.keras.broadcast_variable()  # type: ignore[attr-defined]
    polyhvd.testing.Wolrd()  # type: ignore[attr-defined]
    polyhvd.torch.broadcast_paramters()  # type: ignore[attr-defined]


def shared_by_all_frameworks() -> None:
    print(polyhvd.numpy.HorovodInternalError, polyhvd.torch.RankMismatchError, polyhvd.mxnet.nccl_built())
    print(polyhvd.jax.Sum, polyhvd.keras.size(), polyhvd.tensorflow.HostsUpdatedInterrupt)


def imported_at_first_use() -> None:
    print(polyhvd.size(), polyhvd.run, polyhvd.doctor, polyhvd.HorovodInternalError)
    print(polyhvd.capabilities, polyhvd.collectives, polyhvd.config, polyhvd.errors)
    print(polyhvd.launch, polyhvd.observe, polyhvd.shared)
    print(polyhvd.keras.elastic.run, polyhvd.lightning.elastic, polyhvd.mxnet.elastic.run)
    print(polyhvd.numpy.elastic.run, polyhvd.tensorflow.elastic.run, polyhvd.tensorflow.keras.elastic.run)
    print(polyhvd.tensorflow.SyncBatchNormalization, polyhvd.torch.elastic.run)
