"""An MXNet optimizer that averages gradients over the ranks."""

from __future__ import annotations

import collections
import functools
import sys
from collections.abc import Sequence
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray
from polyhvd.mxnet import reads
from polyhvd.mxnet.errors import UnsupportedError, as_mxnets
from polyhvd.mxnet.names import places_of
from polyhvd.mxnet.passes import Sums, scale
from polyhvd.mxnet.reducer import MxnetExchange
from polyhvd.mxnet.weights import DRIFT_REMEDY, hyperparameters_of, values_of

from polyhvd.collectives.adapter import ReduceOp
from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.training import passes
from polyhvd.training.drift import DriftCheck
from polyhvd.training.gradient_groups import KeyGroups
from polyhvd.training.options import Options
from polyhvd.training.reducer import GradientReducer

__all__ = ["DistributedOptimizer"]


_Arguments = tuple[Any, ...]  # indices, weights, gradients, states


class DistributedOptimizer(mx.optimizer.Optimizer):  # type: ignore[misc]
    """An optimizer around another, which averages each gradient over the ranks before its update.

    For the Module API and for updaters; Gluon has :class:`DistributedTrainer`. Everything but the
    updates belongs to the wrapped optimizer, its attributes included. Gradients are averages:
    ``rescale_grad`` is 1 / (batch size of this rank).

    Every rank updates the same weights. A ``gluon.Trainer`` with ``ignore_stale_grad=True`` does not see to
    that where ranks use different ones, and the others would wait: :class:`DistributedTrainer` does.

    Args:
        optimizer: of MXNet.
        gradient_predivide_factor: gradients are divided by it before the sum, the rest after it.
        num_groups: divides the gradients of an update, in order, into so many groups, each of which is
            reduced as one request, all or none; 0: each by itself, and those that are ready are fused.
        process_set: the ranks that take part.
        op: Average, Sum or Adasum.
        groups: a list of lists of the indices under which updates come, each reduced as one request; or a
            number, which means ``num_groups``. MXNet updates weights of one dtype at a time, and that ends
            a group.
        sparse_as_dense: reduce row_sparse gradients as dense ones; else the rows that some rank has
            touched are reduced, and waited for.
        backward_passes_per_step: of so many updates of a weight, only the last is one: it gets the sum of
            all their gradients, reduced. Needs ``grad_req='write'``; with ``'add'`` leave it at 1, and
            update when the sum is complete.
        average_aggregated_gradients: divide by the number of passes.

    Raises:
        InvalidArgumentError: groups overlap, or another argument cannot be used.

    Example::

        optimizer = hvd.DistributedOptimizer(mx.optimizer.SGD(learning_rate=0.1))
    """

    _OWN = frozenset(
        {
            "_arguments",
            "_calls",
            "_drift",
            "_exchange",
            "_factor",
            "_groups",
            "_passes",
            "_placed",
            "_places",
            "_process_set",
            "_reducer",
            "_sums",
            "_weights",
            "wrapped",
        }
    )

    def __init__(
        self,
        optimizer: mx.optimizer.Optimizer,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
        *,
        op: int = ReduceOp.Average,
        groups: Sequence[Sequence[Any]] | int | None = None,
        sparse_as_dense: bool = False,
        backward_passes_per_step: int = 1,
        average_aggregated_gradients: bool = False,
    ) -> None:
        #: The optimizer that makes the updates.
        self.wrapped = optimizer
        with as_mxnets():
            options = Options(
                op=op,
                backward_passes_per_step=backward_passes_per_step,
                average_aggregated_gradients=average_aggregated_gradients,
                gradient_predivide_factor=gradient_predivide_factor,
                num_groups=num_groups,
                groups=groups,
                sparse_as_dense=sparse_as_dense,
                process_set=process_set,
            )
            self._groups = KeyGroups(options.grouping)
        self._passes = options.backward_passes_per_step
        self._factor = options.passes_factor
        self._calls: collections.Counter[Any] = collections.Counter()
        self._sums = Sums()
        self._drift: DriftCheck | None = None
        self._weights: dict[Any, NDArray] = {}  # of a step, by index, unless Gluon has listed the parameters
        self._placed: Any = None  # the Gluon trainer's parameters, for which _places was made
        self._places: dict[int, int] = {}  # numbers that they have on every rank, by index
        self._arguments = options.changed()
        self._process_set = options.process_set
        self._exchange = MxnetExchange()
        self._reducer = GradientReducer(
            self._exchange, prefix="DistributedOptimizer.gradient", options=options, groups=self._groups
        )
        passes.register(self)

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
        return functools.partial(type(self), **self._arguments), (self.wrapped,)

    @property
    def aggregate_num(self) -> int:
        """How many weights one update may concern: a group has to come in one piece."""
        number: int = self.wrapped.aggregate_num
        return sys.maxsize if self._groups else number

    def passes_held(self) -> int:
        """See :class:`polyhvd.training.passes.CountedPasses`."""
        return self._passes if self._calls else 0

    def drop_passes(self) -> None:
        """Forget the passes since the last update."""
        self._calls.clear()
        self._sums = Sums()

    def begin_anew(self) -> None:
        """Forget the step that is under way, and that it has failed: what it has changed is undone."""
        self.drop_passes()
        self._reducer.drop()
        self._exchange.forget_started()

    def _compare(self, index: Any, weight: Any) -> None:
        """Compare the ranks' weights before the first update.

        Without a Gluon trainer, the weights are known when the first update comes again. As many updates of
        another rank may be missing, the second step compares only names and shapes.
        """
        parameters = self.wrapped.param_dict  # of the Gluon trainer
        if self._drift is None:
            self._drift = DriftCheck(
                "DistributedOptimizer",
                self._process_set,
                DRIFT_REMEDY,
                step=1 if parameters else 2,
                reduces_singly=True,
            )
        if self._drift.is_settled or not self._reducer.takes_part():
            return
        with as_mxnets():
            if parameters:
                in_order = [parameters[i] for i in sorted(parameters, key=self._place_of)]
                named = [(each.name, None) if each.grad_req != "null" else None for each in in_order]
                self._drift.compare(
                    self._reducer.prefix,
                    lambda: values_of(in_order),
                    lambda: hyperparameters_of(self.wrapped, named),
                )
                return
            several = isinstance(index, (tuple, list))
            pairs = list(zip(index, weight, strict=True)) if several else [(index, weight)]
            if not pairs or pairs[0][0] not in self._weights:
                self._weights.update(pairs)
                return
            weights, self._weights = self._weights, dict(pairs)
            indices = list(weights)
            if all(isinstance(i, int) for i in indices):
                indices = list(range(max(indices) + 1))  # this rank has frozen those that are missing
            names = [self._name(i) for i in indices]
            if self._drift.is_due():
                arrays = [weights[i].asnumpy() if i in weights else None for i in indices]
                values = hyperparameters_of(self.wrapped, ((name, None) for name in names))
                self._drift.begin(self._reducer.prefix, zip(names, arrays, strict=True), values)
            elif self._drift.is_first:
                shapes = [np.array(weights[i].shape) if i in weights else None for i in indices]
                self._drift.begin(self._reducer.prefix, zip(names, shapes, strict=True))
            self._drift.finish()

    def _name(self, index: Any) -> str:
        parameter = self.wrapped.param_dict.get(index)
        return str(self.wrapped.idx2name.get(index, index)) if parameter is None else str(parameter.name)

    def _place_of(self, index: Any) -> Any:
        """Return the key of a weight, the same on every rank; with listed groups, its index."""
        parameters = self.wrapped.param_dict
        if self._placed is not parameters and not self._groups.are_listed:
            self._placed = parameters
            self._places = places_of([parameters[i].name for i in sorted(parameters)])
        return self._places.get(index, index)

    def _refuse_loss_scaler(self) -> None:
        """Raise where a Gluon trainer skips updates for gradients that overflow on its rank only."""
        parameter = next(iter(self.wrapped.param_dict.values()), None)
        trainer = getattr(parameter, "_trainer", None)
        if getattr(trainer, "_amp_loss_scaler", None) is not None:
            raise UnsupportedError(
                "DistributedOptimizer in a gluon.Trainer with AMP: the trainer looks for overflows before "
                "gradients are reduced, so each rank would skip other steps; pass the wrapped optimizer "
                "to DistributedTrainer(params, optimizer)"
            )

    def _due(self, arguments: _Arguments) -> _Arguments:
        """The updates that are the last of their passes, with the gradients of all of these."""
        if self._passes == 1:
            return arguments
        due = []
        for index, weight, gradient, state in zip(*arguments, strict=True):
            self._calls[index] += 1
            if self._calls[index] < self._passes:
                self._sums.add(index, gradient)
                continue
            del self._calls[index]
            self._sums.pour(index, gradient)
            scale(gradient, self._factor)
            due.append((index, weight, gradient, state))
        return tuple(zip(*due, strict=True))

    def _reduced(self, index: Any, weight: Any, gradient: Any, state: Any) -> list[_Arguments]:
        """Reduce the gradients; the arguments of the wrapped optimizer's updates."""
        several = isinstance(index, (tuple, list))
        given = (index, weight, gradient, state)
        arguments = self._due(given if several else tuple((argument,) for argument in given))
        if not arguments:
            return []
        if self._process_set.size() > 1:
            self._refuse_loss_scaler()
            gradients = dict(zip(map(self._place_of, arguments[0]), arguments[2], strict=True))
            in_order = sorted(gradients) if self._places else list(gradients)
            self._reducer.reduce({place: gradients[place] for place in in_order})
            self._exchange.check()  # nothing is updated from a gradient that is known to have failed
        number = self.wrapped.aggregate_num
        if not several or number == 0:  # it takes no lists
            return list(zip(*arguments, strict=True))
        return [
            tuple(argument[first : first + number] for argument in arguments)
            for first in range(0, len(arguments[0]), number)
        ]

    def update(self, index: Any, weight: NDArray, grad: NDArray, state: Any) -> None:
        """Average the gradient (or the list of them), then update."""
        self._compare(index, weight)
        with reads.updates:
            for arguments in self._reduced(index, weight, grad, state):
                self.wrapped.update(*arguments)

    def update_multi_precision(self, index: Any, weight: NDArray, grad: NDArray, state: Any) -> None:
        """Average the gradient (or the list of them), then update with a master copy of the weight."""
        self._compare(index, weight)
        with reads.updates:
            for arguments in self._reduced(index, weight, grad, state):
                self.wrapped.update_multi_precision(*arguments)

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
