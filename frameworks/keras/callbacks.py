"""Callbacks for models of ``keras``."""

from __future__ import annotations

import keras
from polyhvd.tensorflow.keras import _callbacks

__all__ = ["BroadcastGlobalVariablesCallback", "MetricAverageCallback"]


class BroadcastGlobalVariablesCallback(_callbacks.BroadcastGlobalVariables, keras.callbacks.Callback):
    """Starts all ranks with the root's weights and optimizer state; see the base class for arguments."""


class MetricAverageCallback(_callbacks.MetricAverage, keras.callbacks.Callback):
    """Averages the metrics of an epoch over the ranks; callbacks that follow see the averages."""
