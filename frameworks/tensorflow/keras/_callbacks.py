"""The callbacks that touch tensors, without their base class: ``tf.keras`` and ``keras`` may be two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyhvd.tensorflow import broadcast_variables
from polyhvd.tensorflow.gradients import accept_device
from polyhvd.tensorflow.reducer import reference

from polyhvd.training.keras import callbacks as keras_callbacks

__all__ = ["BroadcastGlobalVariables", "MetricAverage"]


class _OnTheHost:
    def _accept_device(self, device: str) -> None:
        accept_device(type(self).__name__, device=device)

    def _reference(self, variable: Any) -> Any:
        return reference(variable)


class BroadcastGlobalVariables(_OnTheHost, keras_callbacks.BroadcastGlobalVariables):
    __doc__ = keras_callbacks.BroadcastGlobalVariables.__doc__

    def _send(self, variables: Sequence[Any]) -> None:
        broadcast_variables(variables, self.root_rank)


class MetricAverage(_OnTheHost, keras_callbacks.MetricAverage):
    __doc__ = keras_callbacks.MetricAverage.__doc__
