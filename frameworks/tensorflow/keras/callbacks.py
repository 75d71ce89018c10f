"""Callbacks for models of ``tf.keras``."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from polyhvd.tensorflow.keras import _callbacks

from polyhvd.training.keras import callbacks as keras_callbacks

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "DataPositionCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "LogMetricsCallback",
    "MetricAverageCallback",
]


class BroadcastGlobalVariablesCallback(_callbacks.BroadcastGlobalVariables, tf.keras.callbacks.Callback):  # noqa: D101
    __doc__ = _callbacks.BroadcastGlobalVariables.__doc__


class DataPositionCallback(keras_callbacks.DataPosition, tf.keras.callbacks.Callback):  # noqa: D101
    __doc__ = keras_callbacks.DataPosition.__doc__


class MetricAverageCallback(_callbacks.MetricAverage, tf.keras.callbacks.Callback):  # noqa: D101
    __doc__ = _callbacks.MetricAverage.__doc__


class LearningRateScheduleCallback(keras_callbacks.LearningRateSchedule, tf.keras.callbacks.Callback):  # noqa: D101
    __doc__ = keras_callbacks.LearningRateSchedule.__doc__


class LearningRateWarmupCallback(keras_callbacks.LearningRateWarmup, tf.keras.callbacks.Callback):  # noqa: D101
    __doc__ = keras_callbacks.LearningRateWarmup.__doc__


class LogMetricsCallback(keras_callbacks.LogMetrics, tf.keras.callbacks.Callback):  # noqa: D101
    __doc__ = keras_callbacks.LogMetrics.__doc__


class BestModelCheckpoint(keras_callbacks.BestModel, tf.keras.callbacks.ModelCheckpoint):  # noqa: D101
    __doc__ = keras_callbacks.BestModel.__doc__

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        filepath: Any = None,
    ) -> None:
        super().__init__(monitor, verbose, mode, save_freq, filepath, save_weights_only)
