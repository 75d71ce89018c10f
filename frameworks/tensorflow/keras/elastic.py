"""Elastic training of models of ``tf.keras``: ``hvd.elastic``."""

from __future__ import annotations

import tensorflow as tf
from polyhvd.tensorflow.adapter import memory_of
from polyhvd.tensorflow.elastic import run, run_fn, train

from polyhvd.elastic import exports
from polyhvd.elastic.exports import *
from polyhvd.elastic.keras import CommitState, UpdateBatchState, UpdateEpochState
from polyhvd.elastic.variables import KerasModelState

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
    "run_fn",
    "train",
]
__all__ += exports.__all__


class KerasState(KerasModelState):  # noqa: D101
    __doc__ = KerasModelState.__doc__
    _read = staticmethod(memory_of)


class CommitStateCallback(CommitState, tf.keras.callbacks.Callback):  # noqa: D101
    __doc__ = CommitState.__doc__


class UpdateBatchStateCallback(UpdateBatchState, tf.keras.callbacks.Callback):  # noqa: D101
    __doc__ = UpdateBatchState.__doc__


class UpdateEpochStateCallback(UpdateEpochState, tf.keras.callbacks.Callback):  # noqa: D101
    __doc__ = UpdateEpochState.__doc__


def __dir__() -> list[str]:
    return __all__
