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
from polyhvd.mxnet.reducer import EngineOrderedReducer, Groups

from polyhvd.adapter import ReduceOp
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

    Nothing is waited for: MXNet's engine orders the reduction between backward and update. Row_sparse
    gradients, as of ``Embedding(sparse_grad=True)``, are waited for after all others have been started;
    of them only the rows that some rank has touched are sent.

    Args:
        params: as of ``gluon.Trainer``; the same on every rank. Gradients meet by their position.
        optimizer, optimizer_params: as of ``gluon.Trainer``.
        compression: ``Compression.none``, ``.fp16``, ``.bf16``, or a compressor of your own.
        gradient_predivide_factor: gradients are divided by it before the sum, the rest after it.
        prefix: keeps the gradients of several trainers apart when ranks step them in different order.
        num_groups: divides the gradients, in order, into so many groups, each of which is reduced as one
            request, all or none; 0: each by itself, and those that are ready are fused.
        process_set: the ranks that take part.
        op: Average, Sum or Adasum.
        groups: lists of parameters, each reduced as one request, all or none.
        sparse_as_dense: reduce row_sparse gradients as dense ones.

    Raises:
        InvalidArgumentError: sparse parameters, several devices in a process, or groups that overlap or
            name a parameter that is not trained.

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
        *,
        op: int = ReduceOp.Average,
        groups: Sequence[Sequence[Parameter]] | None = None,
        sparse_as_dense: bool = False,
    ) -> None:
        if isinstance(optimizer, DistributedOptimizer):
            warnings.warn("DistributedTrainer: the DistributedOptimizer was unwrapped", stacklevel=2)
            optimizer = optimizer.wrapped
        super().__init__(params, optimizer, optimizer_params, kvstore=None)
        if self._contains_sparse_weight:
            raise InvalidArgumentError(
                "DistributedTrainer: params: row_sparse parameters need a kvstore; give them stype='default'"
            )
        if self._contexts is not None and len(self._contexts) > 1:
            raise InvalidArgumentError(
                f"DistributedTrainer: a rank has one device, found {self._contexts}; start more ranks"
            )
        # Gluon sorts a dict by names that hold counters of the process; the order in which the
        # model was made is the same on every rank.
        self._in_order = list(params.values() if hasattr(params, "values") else params)
        self._groups = Groups(num_groups, self._positions(groups))
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set
        self._reducer = EngineOrderedReducer(
            collectives,
            prefix=f"{prefix or 'DistributedTrainer'}.gradient",
            op=op,
            compression=compression,
            gradient_predivide_factor=gradient_predivide_factor,
            process_set=process_set,
        )

    def _positions(self, groups: Sequence[Sequence[Parameter]] | None) -> list[list[int]] | None:
        if groups is None:
            return None
        position_of = {id(parameter): position for position, parameter in enumerate(self._in_order)}
        unknown = [str(p) for group in groups for p in group if id(p) not in position_of]
        if unknown:
            raise InvalidArgumentError(
                f"DistributedTrainer: groups names {', '.join(unknown)}, which is not in params"
            )
        return [[position_of[id(parameter)] for parameter in group] for group in groups]

    def _allreduce_grads(self) -> None:
        if self._process_set.size() == 1:
            return
        gradients = {
            position: parameter.list_grad()[0]
            for position, parameter in enumerate(self._in_order)
            if parameter.grad_req != "null"
        }
        self._reducer.reduce(gradients, self._groups, sparse_as_dense=self._sparse_as_dense)
