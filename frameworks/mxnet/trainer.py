"""A Gluon trainer that averages gradients over the ranks."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from mxnet import gluon
from mxnet.gluon import Parameter
from mxnet.gluon.parameter import ParameterDict
from polyhvd.mxnet.ops import Compression, collectives
from polyhvd.mxnet.optimizer import DistributedOptimizer
from polyhvd.mxnet.reducer import EngineOrderedReducer, refuse_groups

from polyhvd.compression import Compressor
from polyhvd.errors import InvalidArgumentError
from polyhvd.process_sets import ProcessSet, global_process_set

__all__ = ["DistributedTrainer"]


class DistributedTrainer(gluon.Trainer):  # type: ignore[misc]
    """A :class:`mxnet.gluon.Trainer` whose gradients are averaged over the ranks.

    ``step(batch_size)`` takes the batch size of this rank. With n ranks it does what a single
    process does with the joined batch and ``step(n * batch_size)``: backward sums the gradients of
    the local samples, the ranks' sums are averaged, and the optimizer divides by ``batch_size``.
    Thus ``step(1)`` goes with a loss that is a mean. Between ``allreduce_grads()`` and ``update()``
    gradients are the averages; those of Horovod are the sums, divided by n in ``update()``.

    Nothing is waited for: MXNet's engine orders the reduction between backward and update.

    Args:
        params: as of ``gluon.Trainer``; the same on every rank. Gradients meet by their position.
        optimizer, optimizer_params: as of ``gluon.Trainer``.
        compression: ``Compression.none``, ``.fp16``, ``.bf16``, or a compressor of your own.
        gradient_predivide_factor: gradients are divided by it before the sum, the rest after it.
        prefix: keeps the gradients of several trainers apart when ranks step them in different order.
        num_groups: 0; explicit groups are not supported yet.
        process_set: the ranks that take part.

    Raises:
        InvalidArgumentError: sparse gradients, several devices in a process, or ``num_groups``.

    Example::

        trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
        with autograd.record():
            loss = loss_function(net(x), y)
        loss.backward()
        trainer.step(len(x))
    """

    def __init__(
        self,
        params: ParameterDict | Mapping[str, Parameter] | Sequence[Parameter],
        optimizer: Any,
        optimizer_params: Mapping[str, Any] | None = None,
        compression: Compressor = Compression.none,
        gradient_predivide_factor: float = 1.0,
        prefix: str | None = None,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        refuse_groups(num_groups)
        if isinstance(optimizer, DistributedOptimizer):
            warnings.warn("DistributedTrainer: the DistributedOptimizer was unwrapped", stacklevel=2)
            optimizer = optimizer.wrapped
        super().__init__(params, optimizer, optimizer_params, kvstore=None)
        if self._contains_sparse_weight or self._contains_sparse_grad:
            raise InvalidArgumentError("DistributedTrainer: sparse parameters or gradients are not supported")
        if self._contexts is not None and len(self._contexts) > 1:
            raise InvalidArgumentError(
                f"DistributedTrainer: a rank has one device, found {self._contexts}; start more ranks"
            )
        # Gluon sorts a dict by names that hold counters of the process; the order in which the
        # model was made is the same on every rank.
        self._in_order = list(params.values() if hasattr(params, "values") else params)
        self._process_set = process_set
        self._reducer = EngineOrderedReducer(
            collectives,
            prefix=f"{prefix or 'DistributedTrainer'}.gradient",
            compression=compression,
            gradient_predivide_factor=gradient_predivide_factor,
            process_set=process_set,
        )

    def _allreduce_grads(self) -> None:
        if self._process_set.size() == 1:
            return
        for position, parameter in enumerate(self._in_order):
            if parameter.grad_req != "null":
                # The first layers are needed first in the next forward pass.
                gradient = parameter.list_grad()[0]
                self._reducer.start(position, str(position), gradient, priority=-position)
