"""The estimator of Lightning for Spark ML, from the folder of its adapter. See ``polyhvd docs spark``."""

from __future__ import annotations

from importlib import import_module

_found = import_module("polyhvd.lightning.spark")
LightningEstimator = _found.LightningEstimator
LightningModel = _found.LightningModel
TorchEstimator = LightningEstimator  # Horovod's names
TorchModel = LightningModel

__all__ = ["LightningEstimator", "LightningModel", "TorchEstimator", "TorchModel"]
