"""A Gluon trainer that averages gradients over the ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.gluon import Parameter
from mxnet.gluon.parameter import ParameterDict
from polyhvd.mxnet import reads
from polyhvd.mxnet.base import Compression
from polyhvd.mxnet.errors import InvalidArgumentError, UnsupportedError, as_mxnets
from polyhvd.mxnet.optimizer import DistributedOptimizer
from polyhvd.mxnet.passes import Passes, fill
from polyhvd.mxnet.reducer import MxnetExchange
from polyhvd.mxnet.weights import DRIFT_REMEDY, checksums_of_states, hyperparameters_of, values_of

from polyhvd.collectives.adapter import OpKind, ReduceOp
from polyhvd.collectives.numbering import ObjectNumbers
from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.collectives.verbs import process_set_id
from polyhvd.runtime import current
from polyhvd.training.compression import Compressor
from polyhvd.training.drift import DriftCheck, Hyperparameters
from polyhvd.training.gradient_groups import KeyGroups, parameter_groups
from polyhvd.training.options import Options
from polyhvd.training.reducer import GradientReducer

__all__ = ["DistributedTrainer"]

_numbers = ObjectNumbers()


class DistributedTrainer(gluon.Trainer):  # type: ignore[misc]
    """A :class:`mxnet.gluon.Trainer` whose gradients are averaged over the ranks.

    ``step(batch_size)`` takes the batch size of this rank. With n ranks it does what a single
    process does with the joined batch and ``step(n * batch_size)``: backward sums the gradients of
    the local samples, the ranks' sums are averaged, and the optimizer divides by ``batch_size``.
    Thus ``step(1)`` goes with a loss that is a mean. Between ``allreduce_grads()`` and ``update()``
    gradients are the averages; those of Horovod are the sums, divided by n in ``update()``.

    Nothing is waited for: MXNet's engine orders the reduction between backward and update, and a
    gradient is reduced while backward still computes others. Row_sparse gradients, as of
    ``Embedding(sparse_grad=True)``, are waited for after all others have been started; of them only the
    rows that some rank has touched are sent.

    With ``backward_passes_per_step=n``, ``backward()`` and ``step()`` alternate as always, and every n-th
    ``step()`` reduces and updates; the others keep the gradients, and change no parameter. The gradients
    of the passes are added up: ``step(batch_size)`` divides by the batch size of one pass, unless
    ``average_aggregated_gradients`` is set. Gradients of ``grad_req='add'`` are added up by MXNet; set
    them to zero after each n-th step, as without us.

    ``step(batch_size, ignore_stale_grad=True)``, on all ranks, lets each of them use other parameters: one
    that any rank has used is updated by all, with zeros from those that have not; one that no rank has
    used is not changed. To find out which, the call waits until all ranks have made it.

    A gradient holds the reduced one after a step. With ``grad_req='add'`` and no zero after the step, the
    next backward adds to that, which then is reduced a second time: right for an average, while
    ``op=Sum`` multiplies the older part by the number of ranks.

    Args:
        params: as of ``gluon.Trainer``; the same on every rank. Gradients meet by their position.
        optimizer: as of ``gluon.Trainer``.
        optimizer_params: as of ``gluon.Trainer``.
        compression: ``Compression.none``, ``.fp16``, ``.bf16``, one of your own, or a
            :class:`polyhvd.training.compression.KeyedCompressor`, which may keep state for each gradient.
        gradient_predivide_factor: gradients are divided by it before the sum, the rest after it.
        prefix: begins the names of the gradients. Without it trainers are numbered in the order in which they
            are made, which has to be the same on every rank; ranks may step them in different order.
        num_groups: divides the gradients, in order, into so many groups, each of which is reduced as one
            request, all or none; 0: each by itself, and those that are ready are fused.
        process_set: the ranks that take part.
        op: Average, Sum or Adasum.
        groups: a list of lists of parameters, each reduced as one request, all or none; or a number,
            which means ``num_groups``.
        sparse_as_dense: reduce row_sparse gradients as dense ones.
        backward_passes_per_step: gradients of so many passes are added up, then reduced.
        average_aggregated_gradients: divide them by the number of passes.
        scale_local_gradients: divide the gradients of :meth:`register_local_var` by the number of ranks,
            where the others are averaged.
        mapping: of the model, by :func:`polyhvd.parity.mapping`, where ranks have different frameworks.

    Raises:
        InvalidArgumentError: sparse parameters, several devices in a process, groups that overlap or
            name a parameter that is not in ``params``, or another argument that cannot be used.

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
        groups: Sequence[Sequence[Parameter]] | int | None = None,
        sparse_as_dense: bool = False,
        backward_passes_per_step: int = 1,
        average_aggregated_gradients: bool = False,
        scale_local_gradients: bool = True,
        mapping: Any = None,
    ) -> None:
        with as_mxnets():
            options = Options(
                op=op,
                compression=compression,
                backward_passes_per_step=backward_passes_per_step,
                average_aggregated_gradients=average_aggregated_gradients,
                gradient_predivide_factor=gradient_predivide_factor,
                num_groups=num_groups,
                groups=groups,
                sparse_as_dense=sparse_as_dense,
                process_set=process_set,
                scale_local_gradients=scale_local_gradients,
                mapping=mapping,
            )
        if isinstance(optimizer, DistributedOptimizer):
            warnings.warn("DistributedTrainer: the DistributedOptimizer was unwrapped", stacklevel=2)
            optimizer = optimizer.wrapped
        _check_optimizer(optimizer)
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
        trained = [i for i, parameter in enumerate(self._in_order) if parameter.grad_req != "null"]
        self._process_set = options.process_set
        self._passes = Passes(options)
        self._is_due = True
        self._ignores_stale = False
        self._prefix = prefix or _numbers.name("DistributedTrainer", self, options.process_set)
        self._exchange = MxnetExchange()
        with as_mxnets():
            self._reducer = GradientReducer(
                self._exchange,
                # Without the number: saved states of compressors have these names, too.
                prefix=f"{prefix or 'DistributedTrainer'}.gradient",
                options=options,
                groups=KeyGroups(parameter_groups(self._in_order, trained, options.grouping)),
                sources={position: self._in_order[position] for position in trained},
            )
        self._is_mapped = options.mapping is not None
        self._drift = DriftCheck(
            "DistributedTrainer",
            options.process_set,
            DRIFT_REMEDY,
            mapping=options.mapping,
            reduces_singly=True,
        )

    def register_local_var(self, var: Parameter) -> None:
        """Let the gradient of a parameter stay on its rank; call it on every rank.

        It is divided by the number of ranks if ``scale_local_gradients`` is set and gradients are
        averaged: as large as if the other ranks had sent zeros.

        Raises:
            InvalidArgumentError: the trainer does not have this parameter.
        """
        for position, parameter in enumerate(self._in_order):
            if parameter is var:
                self._reducer.keep_local(position)
                return
        raise InvalidArgumentError(f"register_local_var: {var!r} is not in params of this DistributedTrainer")

    def step(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        """Reduce the gradients and update the parameters; see the class for passes and stale gradients.

        Args:
            batch_size: of this rank.
            ignore_stale_grad: skip what no rank has used since the last step; the same on every rank.
        """
        self._ignore_stale(ignore_stale_grad)
        super().step(batch_size, ignore_stale_grad)

    def allreduce_grads(self, ignore_stale_grad: bool = False) -> None:
        """Reduce the gradients, for an ``update()`` that follows with the same ``ignore_stale_grad``."""
        self._ignore_stale(ignore_stale_grad)
        super().allreduce_grads()

    def _ignore_stale(self, ignored: bool) -> None:
        if ignored and self._is_mapped:
            raise UnsupportedError(
                "ignore_stale_grad=True: ranks of other frameworks know no stale gradients; with a mapping "
                "every rank uses all parameters in each step"
            )
        self._ignores_stale = ignored

    def begin_anew(self) -> None:
        """Forget the step that is under way, and that it has failed: what it has changed is undone."""
        self._passes.drop_passes()
        self._reducer.drop()
        self._exchange.forget_started()

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that take part."""
        return self._process_set

    def shared_values(self) -> Iterator[tuple[str, Any] | None]:
        """Name and values of each parameter that is trained; None for others, and for a rank's own."""
        if self._is_mapped:
            return iter(())
        return values_of(self._in_order, self._reducer.local)

    def shared_hyperparameters(self) -> Hyperparameters:
        """The hyperparameters of the optimizer; empty if the ranks share no parameter."""
        names = (
            None if parameter.grad_req == "null" or i in self._reducer.local else (parameter.name, None)
            for i, parameter in enumerate(self._in_order)
        )
        return {} if self._is_mapped else hyperparameters_of(self._optimizer, names)

    def _checksums_of_states(self) -> dict[int, int]:
        by_number = checksums_of_states(self._updaters[0].states)
        numbers = [self._param2idx[parameter.name] for parameter in self._in_order]
        return {i: by_number[number] for i, number in enumerate(numbers) if number in by_number}

    def _mapped_values(self) -> Iterator[tuple[str, Any] | None]:
        shared = [
            parameter
            for position, parameter in enumerate(self._in_order)
            if parameter.grad_req != "null" and position not in self._reducer.local
        ]
        return iter(self._reducer.mapped_values((each.name for each in shared), shared))

    def _allreduce_grads(self) -> None:
        if self._reducer.takes_part():
            with as_mxnets():  # reads, which updates do not wait for
                self._drift.compare(
                    self._prefix,
                    self._mapped_values if self._is_mapped else self.shared_values,
                    self.shared_hyperparameters,
                    self._checksums_of_states,
                )
        with reads.updates:
            self._reduce()

    def _reduce(self) -> None:
        trained = {
            position: parameter
            for position, parameter in enumerate(self._in_order)
            if parameter.grad_req != "null"
        }
        self._is_due = self._passes.end(trained)
        if not self._is_due or self._process_set.size() == 1 or not self._reducer.takes_part():
            return
        if self._ignores_stale:
            local = {position: trained.pop(position) for position in self._reducer.local & trained.keys()}
            trained = self._used_by_any(trained) | local
        gradients = {position: parameter.list_grad()[0] for position, parameter in trained.items()}
        self._reducer.reduce(gradients, prefix=f"{self._prefix}.gradient")

    def _used_by_any(self, parameters: dict[int, Parameter]) -> dict[int, Parameter]:
        """Return the parameters with a fresh gradient on any rank; one that is stale here adds nothing."""
        data = {position: parameter.list_data()[0] for position, parameter in parameters.items()}
        used = np.array([bool(array._fresh_grad) for array in data.values()], dtype=np.uint8)
        anywhere = self._agree("used", used, ReduceOp.Max)
        kept: dict[int, Parameter] = {}
        for position, here, there in zip(parameters, used.tolist(), anywhere.tolist(), strict=True):
            if not there:
                continue
            kept[position] = parameters[position]
            if here:
                continue
            data[position]._fresh_grad = True
            if parameters[position].grad_req == "write":  # else it is a sum, to which nothing was added
                fill(parameters[position].list_grad()[0], 0)
        return kept

    def _agree(self, what: str, numbers: np.ndarray[Any, Any], op: ReduceOp) -> np.ndarray[Any, Any]:
        """Reduce a few numbers over the ranks; waits."""
        result = numbers.copy()
        name = f"{self._prefix}.{what}"
        number = process_set_id(self._process_set)
        with as_mxnets(), current.world().line(name, number):
            current.world().engine.submit(
                OpKind.ALLREDUCE,
                name,
                (result,),
                (result,),
                op=op,
                process_set=number,
                blocking=True,
            ).wait()
        return result

    def _update(self, ignore_stale_grad: bool = False) -> None:
        if not self._is_due:
            return
        if self._reducer.local and getattr(self, "_amp_loss_scaler", None) is not None:
            self._share_overflow()
        # A gradient that was not reduced holds an error, and MXNet skips its update, unless the
        # gradient was read. So none is read between here and the last update.
        with reads.updates:
            self._exchange.check()
            super()._update(ignore_stale_grad)

    def _share_overflow(self) -> None:
        """Let AMP find on every rank what a gradient that was not reduced has on one."""
        local = [
            self._in_order[position].list_grad()[0]
            for position in sorted(self._reducer.local)
            if self._in_order[position].grad_req != "null"
        ]
        if not local:
            return
        arrays = [gradient.as_nd_ndarray() for gradient in local]
        finite = mx.nd.multi_all_finite(*arrays, num_arrays=len(arrays)).asnumpy().astype(np.uint8)
        if not self._agree("finite", finite, ReduceOp.Min).all():
            fill(local[0], float("inf"))


def _check_optimizer(given: Any) -> None:
    if isinstance(given, (str, mx.optimizer.Optimizer)):
        return
    if isinstance(given, gluon.Trainer):
        advice = "give the name or the optimizer that it was made with; DistributedTrainer takes its place"
    else:
        advice = "its arguments are DistributedTrainer(params, optimizer, optimizer_params)"
    raise InvalidArgumentError(
        "DistributedTrainer: optimizer: expected a name, such as 'sgd', or an mx.optimizer.Optimizer; "
        f"found a {type(given).__qualname__}; {advice}"
    )
