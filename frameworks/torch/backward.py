"""The gradients of one optimizer: their reduction starts during backward, and ends with it."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from polyhvd.torch.base import collectives
from polyhvd.torch.closures import joint_loss
from polyhvd.torch.rounds import EXPECTED, FROZEN, READY, REDUCED, Board, Section
from polyhvd.torch.sparse import check_sparse_op, start_sparse_allreduce
from torch.utils.weak import WeakIdKeyDictionary

from polyhvd import context
from polyhvd.adapter import Handle, OpKind, ReduceOp
from polyhvd.api import process_set_id
from polyhvd.compression import Compressor
from polyhvd.errors import HorovodInternalError, InvalidArgumentError
from polyhvd.numbering import ObjectNumbers
from polyhvd.process_sets import ProcessSet, global_process_set
from polyhvd.reducer import GradientReducer

__all__ = ["Gradients"]

Tensor = torch.Tensor
_PREFIX = "DistributedOptimizer"


class _Registry:
    """Which optimizer a parameter belongs to, and the rounds of each process set."""

    def __init__(self) -> None:
        self._numbers = ObjectNumbers()
        self._boards: dict[ProcessSet, Board] = {}
        self._owners: Any = WeakIdKeyDictionary()
        # After the numbers have: they free what is gone.
        context.on_engine_change(self._begin_anew)

    def number(self, gradients: Gradients, process_set: ProcessSet) -> int:
        """Of an optimizer, the same on every rank."""
        return self._numbers.of(gradients, process_set)

    def _begin_anew(self, _: int) -> None:
        """The ranks of a new engine have made no optimizers but those that are in use."""
        for board in self._boards.values():
            board.forget_the_gone()

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

    def keep_local(self, parameter: Tensor, scale: Callable[[Tensor], Tensor]) -> None:
        """Let ``scale`` have each gradient of a parameter, before it is added up, instead of its owner."""
        owner, hook = self._owners[parameter]
        hook.remove()
        self._owners[parameter] = owner, _hooked(parameter, parameter.register_hook, scale)

    def take(self, parameter: Tensor, gradients: Gradients, position: int) -> None:
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


def _register(parameter: Tensor, gradients: Gradients, position: int) -> Any:
    owner = weakref.ref(gradients)

    def hook(_: Tensor) -> None:
        gradients = owner()
        if gradients is not None:
            gradients.on_gradient(position)

    return _hooked(parameter, parameter.register_post_accumulate_grad_hook, hook)


def _hooked(parameter: Tensor, register: Any, hook: Callable[..., Any]) -> Any:
    """The handle of a hook. ``register`` is a method of the parameter, not typed by torch."""
    if parameter.requires_grad:
        return register(hook)
    parameter.requires_grad_(True)  # a frozen one may be thawed later, and takes no hook as it is
    try:
        return register(hook)
    finally:
        parameter.requires_grad_(False)


class _Group:
    """Gradients that are reduced by one request, when the last one is ready: all or none."""

    def __init__(self, number: int, positions: Sequence[int]) -> None:
        self.number = number
        self.positions = positions
        self.clear()

    def clear(self) -> None:
        self.absent = len(self.positions)  # without a gradient in this round
        self.held: dict[int, Tensor] = {}  # dense gradients that wait for the others

    @property
    def name(self) -> str:
        """Of the request; another one for a part, so that both recur and stay in the response cache."""
        part = "" if len(self.held) == len(self.positions) else ".part"
        return f"group.{self.number}{part}"


class Gradients(Section):
    """The gradients of one optimizer, by position of the parameter.

    Args:
        parameters: of the optimizer.
        names: of parameters, by ``id()``.
        passes_per_step: gradients of as many backward passes are added up, then reduced.
        groups: positions of the parameters of each group.
        sparse_as_dense: make sparse gradients dense.
        scale_local: divide gradients that stay local by the number of ranks, if others are averaged.
        op, compression, gradient_predivide_factor, process_set: as in the optimizer.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        names: dict[int, str],
        *,
        passes_per_step: int,
        op: int,
        compression: Compressor,
        gradient_predivide_factor: float,
        groups: Sequence[Sequence[int]],
        sparse_as_dense: bool,
        scale_local: bool,
        process_set: ProcessSet,
    ) -> None:
        super().__init__()
        self.passes_per_step = passes_per_step
        #: Gradients only add up until a backward pass without it, or the step.
        self.on_hold = False
        #: ``step()`` waits for gradients, unless the program has done so.
        self.awaited_in_step = True
        self._prefix = f"{_PREFIX}.{_registry.number(self, process_set)}"
        self._reducer = GradientReducer(
            collectives,
            prefix=self._prefix,
            op=op,
            compression=compression,
            gradient_predivide_factor=gradient_predivide_factor,
            process_set=process_set,
        )
        self._names = names
        self._op = op
        # Averaging twice changes nothing: mean(mean(a) + b) = mean(a) + mean(b). So do Min and Max.
        self._repeatable = op in (ReduceOp.Average, ReduceOp.Min, ReduceOp.Max)
        self._compression = compression
        self._sparse_as_dense = sparse_as_dense
        self._scale_local = scale_local and op == ReduceOp.Average
        self._process_set = process_set
        self._groups = [_Group(number, positions) for number, positions in enumerate(groups)]
        self._group_of = {position: group for group in self._groups for position in group.positions}
        self._board = _registry.board(process_set)
        self._parameters: list[Tensor] = []
        self._local: set[int] = set()  # those whose gradients stay on this rank
        self._passes: list[int] = []  # counted up to passes_per_step
        self._fresh: set[int] = set()  # written since their last reduction
        self._started: set[int] = set()  # held by their groups included
        self._sparse: dict[int, tuple[int, Handle]] = {}  # of those: the sparse dimensions
        self._reduced: set[int] = set()  # in this step
        self._reported = b""  # in the last round
        self._backward = -1  # the graph task whose end we have asked to hear of
        self._seat = self._board.add(self)
        self.adopt(parameters)

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

    def keep_local(self, parameter: Tensor) -> None:
        """Let gradients of a parameter stay on this rank from now on."""
        if self.retired:
            raise InvalidArgumentError(self.retired)
        positions = [i for i, known in enumerate(self._parameters) if known is parameter]
        if not positions:
            raise InvalidArgumentError(
                "register_local_var: the optimizer has no such parameter; pass one of those that it was "
                "made with"
            )
        (position,) = positions
        if self._passes[position] or position in self._started or position in self._reduced:
            raise InvalidArgumentError(
                f"register_local_var: {self.describe(position)} has a gradient already; call it before "
                "backward()"
            )
        if position not in self._local:
            self._local.add(position)
            _registry.keep_local(parameter, self._scaled_local())

    def _scaled_local(self) -> Callable[[Tensor], Tensor]:
        owner = weakref.ref(self)

        def scale(gradient: Tensor) -> Tensor:
            gradients = owner()
            if gradients is None or not gradients._scale_local or not gradients._is_member():
                return gradient
            return gradient / gradients._process_set.size()

        return scale

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
        self._fresh.add(position)
        if self.on_hold:
            return
        self._passes[position] += 1
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

    def _start(self, position: int, agreed: int = FROZEN) -> None:
        """Reduce a gradient; ``agreed`` is the state that decides its layout, where it is known."""
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
        gradient = self._gradient(position, agreed)
        group = self._group_of.get(position)
        if gradient.layout is not torch.strided:
            self._sparse[position] = gradient.sparse_dim(), self._start_sparse(position, gradient)
        elif group is None:
            self._reducer.start(position, str(position), gradient, priority=-position)
        else:
            group.held[position] = gradient
        self._started.add(position)
        self._fresh.discard(position)
        if group is not None:
            group.absent -= 1
            if group.absent == 0:
                self._start_group(group)

    def _gradient(self, position: int, agreed: int) -> Tensor:
        """The gradient of a parameter, zeros if it has none, in the layout in which it is reduced."""
        parameter = self._parameters[position]
        gradient = parameter.grad
        if position in self._local:  # but not on some other rank
            return _zeros(parameter, max(agreed - READY, 0))
        if gradient is None:
            gradient = parameter.grad = _zeros(parameter, max(agreed - READY, 0))
        if gradient.requires_grad:
            raise InvalidArgumentError(
                f"the gradient of {self.describe(position)} has a graph of its own, which a reduction would "
                "break; call backward() without create_graph, or use torch.autograd.grad()"
            )
        if gradient.layout not in (torch.strided, torch.sparse_coo):
            raise InvalidArgumentError(
                f"the gradient of {self.describe(position)} is of layout {gradient.layout}, expected "
                "torch.strided or torch.sparse_coo; convert it with to_dense() or to_sparse()"
            )
        is_sparse = gradient.layout is torch.sparse_coo
        if is_sparse and (self._sparse_as_dense or agreed == READY):
            gradient = parameter.grad = gradient.to_dense()
        elif not is_sparse and agreed > READY:
            gradient = parameter.grad = gradient.to_sparse(agreed - READY)
        return gradient

    def _start_sparse(self, position: int, gradient: Tensor) -> Handle:
        try:
            check_sparse_op(self._op)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(
                f"the gradient of {self.describe(position)} is sparse; {error} with sparse_as_dense=True"
            ) from None
        return start_sparse_allreduce(
            gradient,
            name=f"{self._prefix}.{position}",
            op=self._op,
            process_set=self._process_set,
            compression=self._compression,
            priority=-position,
        )

    def _start_group(self, group: _Group) -> None:
        """Reduce what a group holds: on every rank the same, by the time that this is called."""
        if group.held:
            name, held = group.name, sorted(group.held.items())
            group.held = {}
            self._reducer.start_group(name, [gradient for _, gradient in held], priority=-held[0][0])

    # Rounds ------------------------------------------------------------------

    def report(self, *, at_step: bool) -> bytes:
        """See :class:`Section`. In a step, gradients that the user has set by hand count as well."""
        count = len(self._parameters)
        if len(self._started) == count and not self._sparse:
            self._reported = bytes((READY,)) * count
            return self._reported
        due = at_step or bool(self._started)
        states = bytearray(count)
        for position, parameter in enumerate(self._parameters):
            computed = due and position in self._fresh
            by_hand = at_step and parameter.grad is not None and position not in self._reduced
            if position in self._local:
                continue
            if position not in self._started and (computed or by_hand):
                self._start(position)
            if position in self._sparse:
                states[position] = READY + self._sparse[position][0]
            elif position in self._started:
                states[position] = READY
            elif position in self._reduced:
                states[position] = REDUCED
            else:
                states[position] = EXPECTED if parameter.requires_grad else FROZEN
        self._reported = bytes(states)
        return self._reported

    def start_missing(self, states: bytes) -> None:
        """See :class:`Section`. An absent gradient is zero."""
        if states != self._reported:
            for position, state in enumerate(states):
                if state >= READY and position not in self._started:
                    self._start(position, state)
        # Some of these lack gradients that no rank has.
        for group in self._groups:
            self._start_group(group)

    def finish(self) -> None:
        """See :class:`Section`."""
        for position in self._started:
            self._passes[position] %= self.passes_per_step
        self._reduced |= self._started
        sparse = self._sparse
        self._forget_started()
        errors: list[Exception] = []
        for position, (_, handle) in sparse.items():
            try:
                result = collectives.synchronize(handle)
                if position not in self._local:
                    self._parameters[position].grad = result
            except Exception as error:
                errors.append(error)
        try:
            self._reducer.finish()
        except Exception as error:
            errors.append(error)
        if errors and isinstance(errors[0], HorovodInternalError):
            raise type(errors[0])(self._with_names(str(errors[0]))) from errors[0]
        if errors:
            raise errors[0]

    def drop(self) -> None:
        """See :class:`Section`."""
        self._forget_started()
        self._reducer.drop()

    def _forget_started(self) -> None:
        self._started.clear()
        self._sparse = {}
        for group in self._groups:
            group.clear()

    def _with_names(self, message: str) -> str:
        def name(match: re.Match[str]) -> str:
            if match[1] is None:
                return f"{match[0]} ({self.describe(int(match[2]))})"
            members = [self.describe(position) for position in self._groups[int(match[2])].positions]
            return f"{match[0]} ({', '.join(members)})"

        pattern = re.escape(f"'{self._prefix}.") + r"(group\.)?(\d+)(?:\.part)?'"
        return re.sub(pattern, name, message, count=1)

    # Steps -------------------------------------------------------------------

    def synchronize(self) -> None:
        """Return when every rank has come here and all gradients are reduced."""
        if self.retired:
            raise InvalidArgumentError(self.retired)
        if not self._is_member():
            return
        while not self.settled:
            self._board.hold_round(self)

    def joint_loss(self, loss: Any) -> Any:
        """The ranks' losses as one; see :func:`polyhvd.torch.closures.joint_loss`."""
        if not self._is_member():
            return loss
        return joint_loss(loss, name=f"{self._prefix}.loss", op=self._op, process_set=self._process_set)

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


def _zeros(parameter: Tensor, sparse_dimensions: int) -> Tensor:
    """No gradient: dense, or without any nonzeros."""
    if sparse_dimensions == 0:
        return torch.zeros_like(parameter, requires_grad=False)
    return torch.sparse_coo_tensor(
        torch.empty(sparse_dimensions, 0, dtype=torch.int64),
        torch.empty(0, *parameter.shape[sparse_dimensions:], dtype=parameter.dtype),
        parameter.shape,
        check_invariants=True,
    )
