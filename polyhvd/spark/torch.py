"""The estimator of PyTorch for Spark ML, from the folder of PyTorch's adapter. See ``polyhvd docs spark``."""

from __future__ import annotations

from importlib import import_module

_found = import_module("polyhvd.torch.spark")
TorchEstimator = _found.TorchEstimator
TorchModel = _found.TorchModel

__all__ = ["TorchEstimator", "TorchModel"]
