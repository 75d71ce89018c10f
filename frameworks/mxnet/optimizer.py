"""An MXNet optimizer that averages gradients over the ranks."""

from __future__ import annotations

from typing import Any

import mxnet as mx
from mxnet.ndarray import NDArray
from polyhvd.mxnet.ops import collectives
from polyhvd.mxnet.reducer import EngineOrderedReducer, refuse_groups

from polyhvd.process_sets import ProcessSet, global_process_set

__all__ = ["DistributedOptimizer"]


class DistributedOptimizer(mx.optimizer.Optimizer):  # type: ignore[misc]
    """An optimizer around another, which averages each gradient over the ranks before its update.

    For the Module API and for updaters; Gluon has :class:`DistributedTrainer`. Everything but the
    updates belongs to the wrapped optimizer, its attributes included. Gradients are averages:
    ``rescale_grad`` is 1 / (batch size of this rank).

    Args:
        optimizer: of MXNet.
        gradient_predivide_factor: gradients are divided by it before the sum, the rest after it.
        num_groups: 0; explicit groups are not supported yet.
        process_set: the ranks that take part.

    Example::

        optimizer = hvd.DistributedOptimizer(mx.optimizer.SGD(learning_rate=0.1))
    """

    _OWN = frozenset({"wrapped", "_arguments", "_process_set", "_reducer"})

    def __init__(
        self,
        optimizer: mx.optimizer.Optimizer,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        refuse_groups(num_groups)
        #: The optimizer that makes the updates.
        self.wrapped = optimizer
        in_world = process_set is global_process_set
        self._arguments = (gradient_predivide_factor, 0, *(() if in_world else (process_set,)))
        self._process_set = process_set
        self._reducer = EngineOrderedReducer(
            collectives,
            prefix="DistributedOptimizer.gradient",
            gradient_predivide_factor=gradient_predivide_factor,
            process_set=process_set,
        )

    def __getattr__(self, name: str) -> Any:
        if name in self._OWN:  # not there yet: unpickling
            raise AttributeError(name)
        return getattr(self.wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.wrapped, name, value)

    def __reduce__(self) -> Any:  # Module.save_optimizer_states pickles the optimizer
        return type(self), (self.wrapped, *self._arguments)

    def _reduce(self, index: Any, gradient: Any) -> None:
        if self._process_set.size() == 1:
            return
        several = isinstance(index, (tuple, list))
        for key, array in zip(index, gradient, strict=True) if several else ((index, gradient),):
            priority = -key if isinstance(key, int) else 0
            self._reducer.start(key, str(key), array, priority=priority)

    def update(self, index: Any, weight: NDArray, grad: NDArray, state: Any) -> None:
        """Average the gradient (or the list of them), then update."""
        self._reduce(index, grad)
        self.wrapped.update(index, weight, grad, state)

    def update_multi_precision(self, index: Any, weight: NDArray, grad: NDArray, state: Any) -> None:
        """Average the gradient (or the list of them), then update with a master copy of the weight."""
        self._reduce(index, grad)
        self.wrapped.update_multi_precision(index, weight, grad, state)

    def create_state(self, index: Any, weight: NDArray) -> Any:
        """Let the wrapped optimizer make its state."""
        return self.wrapped.create_state(index, weight)

    def create_state_multi_precision(self, index: Any, weight: NDArray) -> Any:
        """Let the wrapped optimizer make its state."""
        return self.wrapped.create_state_multi_precision(index, weight)

    @property
    def learning_rate(self) -> float:
        """The wrapped optimizer's current learning rate."""
        rate: float = self.wrapped.learning_rate
        return rate

    def set_learning_rate(self, lr: float) -> None:
        """Set the wrapped optimizer's learning rate."""
        self.wrapped.set_learning_rate(lr)

    def set_lr_mult(self, args_lr_mult: dict[Any, float]) -> None:
        """Set the wrapped optimizer's multipliers of the learning rate."""
        self.wrapped.set_lr_mult(args_lr_mult)

    def set_wd_mult(self, args_wd_mult: dict[Any, float]) -> None:
        """Set the wrapped optimizer's multipliers of the weight decay."""
        self.wrapped.set_wd_mult(args_wd_mult)

    def _set_current_context(self, device_id: int) -> None:
        self.wrapped._set_current_context(device_id)
