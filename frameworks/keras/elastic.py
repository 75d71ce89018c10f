"""Elastic training of models of ``keras``: ``hvd.elastic``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from polyhvd.keras.backend import on

from polyhvd.elastic import exports, loop
from polyhvd.elastic.exports import *
from polyhvd.elastic.keras import CommitState, UpdateBatchState, UpdateEpochState
from polyhvd.elastic.train import train_translating
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


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """See :func:`polyhvd.elastic.loop.run`."""
    return loop.looped(func, translate=on.as_polyhvd)


def run_fn(func: Callable[..., Any], reset: Callable[[], Any]) -> Callable[..., Any]:
    """See :func:`polyhvd.elastic.loop.run_fn`."""
    return loop.looped(func, reset, on.as_polyhvd)


train = train_translating(on.as_polyhvd)
run.__doc__ = loop.run.__doc__
run_fn.__doc__ = loop.run_fn.__doc__


class KerasState(KerasModelState):  # noqa: D101
    __doc__ = KerasModelState.__doc__
    _read = staticmethod(on.memory_of)


class CommitStateCallback(CommitState, keras.callbacks.Callback):  # noqa: D101
    __doc__ = CommitState.__doc__


class UpdateBatchStateCallback(UpdateBatchState, keras.callbacks.Callback):  # noqa: D101
    __doc__ = UpdateBatchState.__doc__


class UpdateEpochStateCallback(UpdateEpochState, keras.callbacks.Callback):  # noqa: D101
    __doc__ = UpdateEpochState.__doc__


def __dir__() -> list[str]:
    return __all__
