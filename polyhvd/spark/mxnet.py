"""The estimator of Gluon for Spark ML, from the folder of MXNet's adapter. See ``polyhvd docs spark``."""

from __future__ import annotations

from importlib import import_module

_found = import_module("polyhvd.mxnet.spark")
GluonEstimator = _found.GluonEstimator
GluonModel = _found.GluonModel

__all__ = ["GluonEstimator", "GluonModel"]
