"""The estimator of Keras for Spark ML, from the folder of Keras's adapter. See ``polyhvd docs spark``."""

from __future__ import annotations

from importlib import import_module

_found = import_module("polyhvd.keras.spark")
KerasEstimator = _found.KerasEstimator
KerasModel = _found.KerasModel

__all__ = ["KerasEstimator", "KerasModel"]
