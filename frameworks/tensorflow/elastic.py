"""Elastic training with TensorFlow: ``hvd.elastic``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from polyhvd.tensorflow.adapter import memory_of
from polyhvd.tensorflow.errors import as_polyhvd

from polyhvd.elastic import exports, loop
from polyhvd.elastic.exports import *
from polyhvd.elastic.state import HandlersState
from polyhvd.elastic.train import train_translating
from polyhvd.elastic.variables import KerasModelState, VariablesHandler
from polyhvd.errors import InvalidArgumentError

__all__ = [
    "TensorFlowKerasState",
    "TensorFlowState",
    "run",
    "run_fn",
    "train",
]
__all__ += exports.__all__


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """See :func:`polyhvd.elastic.loop.run`."""
    return loop.looped(func, translate=as_polyhvd)


def run_fn(func: Callable[..., Any], reset: Callable[[], Any]) -> Callable[..., Any]:
    """See :func:`polyhvd.elastic.loop.run_fn`."""
    return loop.looped(func, reset, as_polyhvd)


train = train_translating(as_polyhvd)
run.__doc__ = loop.run.__doc__
run_fn.__doc__ = loop.run_fn.__doc__


def _refuse_session(session: Any) -> None:
    if session is not None:
        raise InvalidArgumentError("session: sessions of tf.compat.v1 cannot be elastic; leave it out")


class TensorFlowState(HandlersState):
    """Variables of TensorFlow, and other attributes, by name.

    Args:
        variables: in the same order on every rank.
        session: None; sessions of ``tf.compat.v1`` cannot be elastic.
        kwargs: other attributes with their first values, which are pickled.

    Raises:
        InvalidArgumentError: there are no variables, or a session is given.

    Example::

        state = hvd.elastic.TensorFlowState([weights, bias], step=0)
    """

    variables: Any

    def __init__(self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any) -> None:
        _refuse_session(session)
        if variables is None:
            raise InvalidArgumentError(
                "TensorFlowState(variables=None): TensorFlow 2 keeps no list of variables"
            )
        handler = VariablesHandler(list(variables), lambda: self.variables, memory_of)
        object.__setattr__(self, "variables", handler.value)
        super().__init__({"variables": handler}, **kwargs)


class TensorFlowKerasState(KerasModelState):
    """A model of Keras, its optimizer and other attributes, by name, for loops of one's own.

    Args:
        model: built; its weights are kept.
        optimizer: None: the model's own, if it has one.
        backend: accepted for compatibility with Horovod.
        kwargs: other attributes with their first values, which are pickled.

    Raises:
        InvalidArgumentError: the model has no weights yet.

    Example::

        state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0)

        @hvd.elastic.run
        def train(state):
            for state.batch in range(state.batch, 1000):
                train_one_batch()
                state.commit()
    """

    _read = staticmethod(memory_of)

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        super().__init__(model, optimizer, **kwargs)


def __dir__() -> list[str]:
    return __all__
