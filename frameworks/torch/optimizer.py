"""DistributedOptimizer: reduces gradients while backward runs, and has them all when it returns."""

from __future__ import annotations

import contextlib
import itertools
import re
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from polyhvd.torch.ops import Compression, collectives
from polyhvd.torch.rounds import EXPECTED, FROZEN, READY, REDUCED, Board, Section
from torch.utils.weak import WeakIdKeyDictionary

from polyhvd import context
from polyhvd.adapter import OpKind, ReduceOp
from polyhvd.api import process_set_id, resolve_op
from polyhvd.compression import Compressor
from polyhvd.errors import HorovodInternalError, InvalidArgumentError
from polyhvd.process_sets import ProcessSet, global_process_set
from polyhvd.reducer import GradientReducer

__all__ = ["DistributedOptimizer"]

Tensor = torch.Tensor
_PREFIX = "DistributedOptimizer"


class _Registry:
    """Which optimizer a parameter belongs to, and the rounds of each process set."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._boards: dict[ProcessSet, Board] = {}
        self._owners: Any = WeakIdKeyDictionary()

    def next_number(self) -> int:
        return next(self._numbers)

    def board(self, process_set: ProcessSet) -> Board:
        if process_set not in self._boards:

            def agree(states: bytearray) -> None:
                array = np.frombuffer(states, dtype=np.uint8)
                context.engine().submit(
                    OpKind.ALLREDUCE,
                    f"{_PREFIX}.ready",
                    (array,),
                    (array,),
                    ReduceOp.Max,
                    process_set=process_set_id(process_set),
                    priority=1,  # gradients have 0 and less
                    blocking=True,
                ).wait()

            self._boards[process_set] = Board(agree)
        return self._boards[process_set]

    def take(self, parameter: Tensor, gradients: _Gradients, position: int) -> None:
        """Let ``gradients`` handle a parameter from now on; the optimizer that had it loses it."""
        previous = self._owners.pop(parameter, None)
        if previous is not None:
            owner, hook = previous
            hook.remove()
            if owner() is not None:
                owner().retired = (
                    "a newer DistributedOptimizer has taken over parameters of this one; use that one"
                )
        self._owners[parameter] = (weakref.ref(gradients), _register(parameter, gradients, position))


_registry = _Registry()


def _register(parameter: Tensor, gradients: _Gradients, position: int) -> Any:
    owner = weakref.ref(gradients)

    def hook(_: Tensor) -> None:
        gradients = owner()
        if gradients is not None:
            gradients.on_gradient(position)

    register: Any = parameter.register_post_accumulate_grad_hook  # not typed by torch
    if parameter.requires_grad:
        return register(hook)
    parameter.requires_grad_(True)  # a frozen one may be thawed later, and takes no hook as it is
    try:
        return register(hook)
    finally:
        parameter.requires_grad_(False)


class _Gradients(Section):
    """The gradients of one optimizer, by position of the parameter."""

    def __init__(
        self,
        reducer: GradientReducer[Tensor],
        prefix: str,
        names: dict[int, str],
        op: int,
        passes_per_step: int,
        process_set: ProcessSet,
    ) -> None:
        super().__init__()
        self.passes_per_step = passes_per_step
        self._reducer = reducer
        self._prefix = prefix
        self._names = names
        # Averaging twice changes nothing: mean(mean(a) + b) = mean(a) + mean(b). So do Min and Max.
        self._repeatable = op not in (ReduceOp.Sum, ReduceOp.Product)
        self._process_set = process_set
        self._board = _registry.board(process_set)
        self._parameters: list[Tensor] = []
        self._passes: list[int] = []  # counted up to passes_per_step
        self._fresh: set[int] = set()  # written since their last reduction
        self._started: set[int] = set()
        self._reduced: set[int] = set()  # in this step
        self._backward = -1  # the graph task whose end we have asked to hear of
        self._seat = self._board.add(self)

    def adopt(self, parameters: Iterable[Tensor]) -> None:
        """Take over parameters, at the next positions."""
        for parameter in parameters:
            if torch.nn.parameter.is_lazy(parameter):
                raise InvalidArgumentError("a lazy parameter has no shape yet; run the model once before")
            position = len(self._parameters)
            self._parameters.append(parameter)
            self._passes.append(0)
            self._seat.size += 1
            _registry.take(parameter, self, position)

    def describe(self, position: int) -> str:
        """How an error names a parameter."""
        name = self._names.get(id(self._parameters[position]))
        return f"parameter {position}" if name is None else f"parameter {name!r}"

    @property
    def in_flight(self) -> bool:
        """Whether reductions run: within backward, or after one that has failed."""
        return bool(self._started)

    def _is_member(self) -> bool:
        return self._process_set is global_process_set or self._process_set.included()

    # Within backward ---------------------------------------------------------

    def on_gradient(self, position: int) -> None:
        """Called by autograd when ``grad`` of a parameter is complete for this backward."""
        if self.retired or not self._is_member():
            return
        self.settled = False
        self._passes[position] += 1
        self._fresh.add(position)
        task = torch._C._current_graph_task_id()
        if task != self._backward:
            self._backward = task
            torch.autograd.Variable._execution_engine.queue_callback(self._on_backward_end)
        if self._passes[position] >= self.passes_per_step:
            self._start(position)

    def _on_backward_end(self) -> None:
        # A round of another optimizer, in the same backward, has served this one, too.
        if self._started:
            self._board.hold_round(None)

    def _start(self, position: int) -> None:
        parameter = self._parameters[position]
        gradient = parameter.grad
        if position in self._started:
            raise InvalidArgumentError(
                f"the gradient of {self.describe(position)} was written while it was being reduced, after "
                "a backward that failed; call synchronize() on the optimizer after such an error"
            )
        if position in self._reduced and not self._repeatable:
            raise InvalidArgumentError(
                f"the gradient of {self.describe(position)} was computed again after its reduction; call "
                "step() or zero_grad() of the optimizer before, or raise backward_passes_per_step"
            )
        if gradient is None:
            gradient = parameter.grad = torch.zeros_like(parameter, requires_grad=False)
        elif gradient.layout is not torch.strided:
            raise InvalidArgumentError(
                f"the gradient of {self.describe(position)} is sparse, which is not supported; "
                "build the layer with sparse=False"
            )
        elif gradient.requires_grad:
            raise InvalidArgumentError(
                f"the gradient of {self.describe(position)} has a graph of its own, which a reduction would "
                "break; call backward() without create_graph, or use torch.autograd.grad()"
            )
        self._reducer.start(position, str(position), gradient, priority=-position)
        self._started.add(position)
        self._fresh.discard(position)

    # Rounds ------------------------------------------------------------------

    def report(self, *, at_step: bool) -> bytes:
        """See :class:`Section`. In a step, gradients that the user has set by hand count as well."""
        count = len(self._parameters)
        if len(self._started) == count:
            return bytes((READY,)) * count
        due = at_step or bool(self._started)
        states = bytearray(count)
        for position, parameter in enumerate(self._parameters):
            computed = due and position in self._fresh
            by_hand = at_step and parameter.grad is not None and position not in self._reduced
            if position not in self._started and (computed or by_hand):
                self._start(position)
            if position in self._started:
                states[position] = READY
            elif position in self._reduced:
                states[position] = REDUCED
            else:
                states[position] = EXPECTED if parameter.requires_grad else FROZEN
        return bytes(states)

    def start_missing(self, states: bytes) -> None:
        """See :class:`Section`. An absent gradient is zero."""
        for position, state in enumerate(states):
            if state == READY and position not in self._started:
                self._start(position)

    def finish(self) -> None:
        """See :class:`Section`."""
        for position in self._started:
            self._passes[position] %= self.passes_per_step
        self._reduced |= self._started
        self._started.clear()
        try:
            self._reducer.finish()
        except HorovodInternalError as error:
            raise type(error)(self._with_names(str(error))) from error

    def drop(self) -> None:
        """See :class:`Section`."""
        self._started.clear()
        self._reducer.drop()

    def _with_names(self, message: str) -> str:
        def name(match: re.Match[str]) -> str:
            return f"{match[0]} ({self.describe(int(match[1]))})"

        return re.sub(re.escape(f"'{self._prefix}.") + r"(\d+)'", name, message, count=1)

    # Steps -------------------------------------------------------------------

    def synchronize(self) -> None:
        """Return when every rank has come here and all gradients are reduced."""
        if self.retired:
            raise InvalidArgumentError(self.retired)
        if not self._is_member():
            return
        while not self.settled:
            self._board.hold_round(self)

    def forget_passes(self) -> None:
        """The gradients were set to zero."""
        self._passes = [0] * len(self._parameters)
        self._fresh.clear()
        self._reduced.clear()

    def end_step(self) -> None:
        """The gradients were used."""
        self.forget_passes()
        self.settled = False
        self.rounds = 0


class _DistributedOptimizer(torch.optim.Optimizer):
    """What :func:`DistributedOptimizer` puts before the class of the user's optimizer."""

    _gradients: _Gradients | None = None
    _synchronizes = True

    def _own_gradients(self) -> _Gradients:
        if self._gradients is None:
            raise InvalidArgumentError(
                "this is a copy of a DistributedOptimizer, which reduces nothing; "
                "make the copy of the original optimizer, and wrap that"
            )
        return self._gradients

    def synchronize(self) -> None:
        """Wait until every gradient is reduced. Backward has done so already, where all ranks ran it.

        Raises:
            HorovodInternalError: a reduction failed.
        """
        self._own_gradients().synchronize()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let ``step()`` use the gradients as they are, after an explicit ``synchronize()``."""
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Reduce gradients after this many backward passes, from now on."""
        gradients = self._own_gradients()
        gradients.passes_per_step = _checked_passes(passes)
        gradients.forget_passes()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, in the same order on every rank."""
        super().add_param_group(param_group)
        self._own_gradients().adopt(self.param_groups[-1]["params"])

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Set the gradients to zero, or to None, as the optimizer's own method does.

        Raises:
            InvalidArgumentError: a backward that failed has left reductions in flight.
        """
        gradients = self._own_gradients()
        if gradients.in_flight:
            raise InvalidArgumentError(
                "zero_grad() while gradients are being reduced: a backward did not come to its end; "
                "call synchronize() before"
            )
        super().zero_grad(*args, **kwargs)
        gradients.forget_passes()

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Wait for the gradients of all ranks, then step as the optimizer's own method does.

        With a closure, each of its gradients is reduced; its loss stays that of this rank.
        """
        gradients = self._own_gradients()
        self._opt_called = True  # torch's schedulers look at it
        closure = args[0] if args else kwargs.get("closure")
        if callable(closure):
            reduced = _reducing(closure, gradients)
            if args:
                args = (reduced, *args[1:])
            else:
                kwargs["closure"] = reduced
        elif self._synchronizes:
            gradients.synchronize()
        try:
            return super().step(*args, **kwargs)
        finally:
            gradients.end_step()

    # torch puts its own wrapper around a step() without these marks: hooks would run twice, and a
    # scheduler made before the optimizer was wrapped would complain.
    step.hooked = True  # type: ignore[attr-defined]
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


def _reducing(closure: Callable[[], Any], gradients: _Gradients) -> Callable[[], Any]:
    def reduced() -> Any:
        loss = closure()
        gradients.synchronize()
        gradients.end_step()
        return loss

    return reduced


def _checked_passes(passes: int) -> int:
    if passes < 1:
        raise InvalidArgumentError(f"backward_passes_per_step={passes}: expected 1 or more")
    return passes


def _checked_names(
    named_parameters: Iterable[tuple[str, Tensor]] | None, parameters: list[Tensor]
) -> dict[int, str]:
    """Names by id of the parameter."""
    if named_parameters is None:
        return {}
    pairs = list(named_parameters)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise InvalidArgumentError(
            "named_parameters: expected pairs of name and parameter; pass model.named_parameters()"
        )
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidArgumentError(f"named_parameters: names must be unique; found twice: {', '.join(twice)}")
    found = {id(parameter): name for name, parameter in pairs}
    unnamed = [position for position, parameter in enumerate(parameters) if id(parameter) not in found]
    if unnamed:
        raise InvalidArgumentError(
            f"named_parameters lacks the optimizer's parameters {unnamed}; pass those of the whole model"
        )
    return found


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Compressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = ReduceOp.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Make an optimizer reduce gradients over the ranks; returns it, now of a subclass of its class.

    Reductions start during backward, as soon as a gradient is ready, and have ended when it returns: what
    lies between ``backward()`` and ``step()`` (clipping, ``GradScaler.unscale_``) sees the result.
    A gradient that only some ranks have is zero on the others; one that no rank has stays None.
    A new DistributedOptimizer takes over the parameters of an older one.

    Args:
        optimizer: of ``torch.optim``, or a subclass; the same on every rank.
        named_parameters: pairs of name and parameter, for messages.
        compression: what is sent; see :class:`polyhvd.compression.Compression`.
        backward_passes_per_step: gradients of this many passes are added up, then reduced.
        op: Average (default), Sum, Min, Max or Product.
        gradient_predivide_factor: divides before the sum, instead of after it.
        num_groups, groups, sparse_as_dense: not supported yet; leave the defaults.
        process_set: the ranks that take part. On others, the optimizer works by itself.

    Raises:
        InvalidArgumentError: an argument cannot be used.
        NotInitializedError: before ``init()``.

    Example::

        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    """
    context.engine()
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"expected a torch.optim.Optimizer, found {type(optimizer).__name__}")
    if isinstance(optimizer, _DistributedOptimizer):
        raise InvalidArgumentError("the optimizer is a DistributedOptimizer already")
    if num_groups != 0 or groups is not None or sparse_as_dense:
        raise InvalidArgumentError(
            f"num_groups={num_groups}, groups={groups}, sparse_as_dense={sparse_as_dense}: "
            "not supported yet; leave them out"
        )
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    names = _checked_names(named_parameters, parameters)
    op = resolve_op(op)
    passes = _checked_passes(backward_passes_per_step)
    prefix = f"{_PREFIX}.{_registry.next_number()}"
    reducer = GradientReducer(
        collectives,
        prefix=prefix,
        op=op,
        compression=compression,
        gradient_predivide_factor=gradient_predivide_factor,
        process_set=process_set,
    )
    gradients = _Gradients(reducer, prefix, names, op, passes, process_set)
    gradients.adopt(parameters)
    base = type(optimizer)
    # The object stays the same, so whatever refers to it (a scheduler) sees the new step().
    if hasattr(optimizer.__dict__.get("step"), "__wrapped__"):
        del optimizer.__dict__["step"]  # a scheduler's wrapper around the old one
    optimizer.__class__ = type(base.__name__, (_DistributedOptimizer, base), {"__module__": base.__module__})
    optimizer._gradients = gradients  # type: ignore[attr-defined]
    return optimizer
