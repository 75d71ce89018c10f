"""Callbacks for models of ``keras``."""

from __future__ import annotations

import keras
from polyhvd.keras.backend import on

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


class BroadcastGlobalVariablesCallback(on.BroadcastGlobalVariables, keras.callbacks.Callback):  # noqa: D101
    __doc__ = on.BroadcastGlobalVariables.__doc__


class DataPositionCallback(keras_callbacks.DataPosition, keras.callbacks.Callback):  # noqa: D101
    __doc__ = keras_callbacks.DataPosition.__doc__


class MetricAverageCallback(on.MetricAverage, keras.callbacks.Callback):  # noqa: D101
    __doc__ = on.MetricAverage.__doc__


class LearningRateScheduleCallback(keras_callbacks.LearningRateSchedule, keras.callbacks.Callback):  # noqa: D101
    __doc__ = keras_callbacks.LearningRateSchedule.__doc__


class LearningRateWarmupCallback(keras_callbacks.LearningRateWarmup, keras.callbacks.Callback):  # noqa: D101
    __doc__ = keras_callbacks.LearningRateWarmup.__doc__


class LogMetricsCallback(keras_callbacks.LogMetrics, keras.callbacks.Callback):  # noqa: D101
    __doc__ = keras_callbacks.LogMetrics.__doc__


class BestModelCheckpoint(keras_callbacks.BestModel, keras.callbacks.ModelCheckpoint):  # noqa: D101
    __doc__ = keras_callbacks.BestModel.__doc__
