"""Elastic training of models of ``tf.keras``: ``hvd.elastic``."""

from __future__ import annotations

from typing import Any

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


class KerasState(KerasModelState):
    """A model of Keras, its optimizer and other attributes, by name.

    Args:
        model: built; its weights are kept.
        optimizer: None: the model's own.
        kwargs: other attributes with their first values, which are pickled.

    Raises:
        InvalidArgumentError: the model has no weights yet.

    Example::

        state = hvd.elastic.KerasState(model, epoch=0, batch=0)

        @hvd.elastic.run
        def train(state):
            model.fit(data, epochs=10 - state.epoch, callbacks=[
                hvd.elastic.UpdateEpochStateCallback(state), hvd.elastic.CommitStateCallback(state)])
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        super().__init__(memory_of, model, optimizer, **kwargs)


class CommitStateCallback(CommitState, tf.keras.callbacks.Callback):  # noqa: D101
    __doc__ = CommitState.__doc__


class UpdateBatchStateCallback(UpdateBatchState, tf.keras.callbacks.Callback):  # noqa: D101
    __doc__ = UpdateBatchState.__doc__


class UpdateEpochStateCallback(UpdateEpochState, tf.keras.callbacks.Callback):  # noqa: D101
    __doc__ = UpdateEpochState.__doc__


def __dir__() -> list[str]:
    return __all__
