"""Callbacks for models of ``tf.keras``."""

from __future__ import annotations

import tensorflow as tf
from polyhvd.tensorflow.keras import _callbacks

__all__ = ["BroadcastGlobalVariablesCallback", "MetricAverageCallback"]


class BroadcastGlobalVariablesCallback(_callbacks.BroadcastGlobalVariables, tf.keras.callbacks.Callback):
    """Starts all ranks with the root's weights and optimizer state; see the base class for arguments."""


class MetricAverageCallback(_callbacks.MetricAverage, tf.keras.callbacks.Callback):
    """Averages the metrics of an epoch over the ranks; callbacks that follow see the averages."""
