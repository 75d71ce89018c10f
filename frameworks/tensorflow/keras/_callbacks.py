"""What the callbacks do, without their base class: ``tf.keras`` and ``keras`` may be different ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf
from polyhvd.tensorflow import Average, broadcast_variables, ops
from polyhvd.tensorflow.gradients import _reference, accept_device

__all__ = ["BroadcastGlobalVariables", "MetricAverage"]


class BroadcastGlobalVariables:
    """Starts all ranks with the root's weights and optimizer state.

    Before the first step if the model is built by then, else after it. Seeds of random layers stay
    as they are, so that ranks drop out different units.

    Args:
        root_rank: world rank of the sender.
        device: accepted for Horovod's sake.
        local_variables: variables that stay as they are on each rank.
    """

    model: Any

    def __init__(
        self, root_rank: int, device: str = "", local_variables: Iterable[Any] | None = None
    ) -> None:
        super().__init__()
        accept_device(type(self).__name__, device=device)
        self.root_rank = root_rank
        self.broadcast_done = False
        self._local = {_reference(variable) for variable in local_variables or ()}

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast, if there is something to broadcast."""
        model, optimizer = self.model, self.model.optimizer
        build = getattr(optimizer, "build", None)
        if self.broadcast_done or not model.built or build is None:
            return
        if not getattr(optimizer, "built", False):
            build(model.trainable_variables)
            if hasattr(optimizer, "built"):
                optimizer.built = True
        self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcast, if it was too early at the beginning."""
        if not self.broadcast_done:
            self._broadcast()

    def _broadcast(self) -> None:
        optimizer = self.model.optimizer
        state = getattr(optimizer, "variables", ())
        variables = [*self.model.weights, *(state() if callable(state) else state)]
        unique = {_reference(v): v for v in variables if _reference(v) not in self._local}
        broadcast_variables(unique.values(), self.root_rank)
        self.broadcast_done = True


class MetricAverage:
    """Averages the metrics of an epoch over the ranks; callbacks that follow see the averages.

    Args:
        device: accepted for Horovod's sake.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        accept_device(type(self).__name__, device=device)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Overwrite the metrics."""
        if not logs:
            return
        keys = sorted(logs)
        values = tf.constant([float(logs[key]) for key in keys], tf.float64)
        averages = ops.allreduce([values], name="MetricAverageCallback", op=Average)[0]
        for key, value in zip(keys, averages.numpy().tolist(), strict=True):
            logs[key] = value
