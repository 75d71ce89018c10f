"""The gradients of one optimizer: their reduction starts during backward, and ends with it."""

from __future__ import annotations

import re
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from polyhvd.torch.closures import joint_loss
from polyhvd.torch.derivatives import simple
from polyhvd.torch.reducer import TorchExchange
from polyhvd.torch.registry import Registry
from polyhvd.torch.rounds import EXPECTED, FROZEN, READY, REDUCED, Section
from polyhvd.torch.sparse import check_sparse_op
from polyhvd.torch.weights import DRIFT_REMEDY, UsedValues, checksums_of_states, values_of
from polyhvd.torch.written import Leftovers, Submitted

from polyhvd.collectives.adapter import ReduceOp
from polyhvd.errors import HorovodInternalError, InvalidArgumentError
from polyhvd.runtime import current
from polyhvd.training import passes
from polyhvd.training.drift import DriftCheck
from polyhvd.training.gradient_groups import KeyGroups
from polyhvd.training.options import Options
from polyhvd.training.reducer import GradientReducer

__all__ = ["Gradients"]

Tensor = torch.Tensor
_PREFIX = "DistributedOptimizer"
_ON_HOLD_MAX = 100  # passes that are added up until the last one is known


_registry = Registry(_PREFIX)


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
        """The name of the request, another one for a part: both recur, and stay in the response cache."""
        part = "" if len(self.held) == len(self.positions) else ".part"
        return f"group.{self.number}{part}"


class Gradients(Section):
    """The gradients of one optimizer, by position of the parameter.

    Args:
        optimizer: the optimizer.
        parameters: of the optimizer.
        names: of parameters, by ``id()``.
        options: of the optimizer.
        groups: positions of the parameters of each group.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[Tensor],
        names: dict[int, str],
        options: Options,
        groups: Sequence[Sequence[int]],
    ) -> None:
        super().__init__()
        self._optimizer = weakref.ref(optimizer)
        self.passes_per_step = options.backward_passes_per_step
        #: Gradients only add up until a backward pass without it, or the step.
        self.on_hold = False
        #: ``step()`` waits for gradients, unless the program has done so.
        self.awaited_in_step = True
        #: Of the optimizer in its process set, the same on every rank.
        self.number = _registry.number(self, options.process_set)
        self._prefix = f"{_PREFIX}.{self.number}"
        self._parameters: list[Tensor] = []
        self._known: set[int] = set()  # identities of these
        self._local: set[int] = set()  # those whose gradients stay on this rank
        # Groups become complete one by one, and are kept here.
        self._reducer = GradientReducer(
            TorchExchange(self._parameters, kept=self._local),
            prefix=self._prefix,
            options=options,
            groups=KeyGroups(),
        )
        self._names = names
        self._op = op = options.op
        # Averaging twice changes nothing: mean(mean(a) + b) = mean(a) + mean(b). So do Min and Max.
        self._repeatable = op in (ReduceOp.Average, ReduceOp.Min, ReduceOp.Max)
        #: A gradient that a step has used may still be there in the next one, and is to be added up once.
        self.looks_before = op == ReduceOp.Sum
        self._leftovers = Leftovers()
        self._submitted = Submitted()
        self._sparse_as_dense = options.sparse_as_dense
        self.process_set = options.process_set
        self._drift = DriftCheck(_PREFIX, options.process_set, DRIFT_REMEDY)
        #: Hyperparameters of the last step.
        self._used = UsedValues()
        self._values_due = False  # to be compared in the next round
        self._groups = [_Group(number, positions) for number, positions in enumerate(groups)]
        self._group_of = {position: group for group in self._groups for position in group.positions}
        self._passes: list[int] = []  # counted up to passes_per_step
        self._fresh: set[int] = set()  # written since their last reduction
        self._started: set[int] = set()  # held by their groups included
        self._sparse: dict[int, int] = {}  # of those: the sparse dimensions
        self._as_dense: dict[int, int] = {}  # of those, and meanwhile dense: likewise
        self._reduced: set[int] = set()  # in this step
        # Reduced by a step within backward, before the hook of the optimizer: the graph task of each.
        self._reduced_early: dict[int, int] = {}
        self._stepping_in = -1  # the graph task within which a step waits for gradients
        self._arriving = (-1, -1)  # the graph task and position that `before_gradient` has seen last
        #: Older optimizers that have parameters of this one, too, and their positions, by position.
        self._sharers: dict[int, list[tuple[weakref.ref[Gradients], int]]] = {}
        #: Newer ones that have parameters of this one and reduce their gradients, likewise.
        self._elsewhere: dict[int, tuple[Gradients, int]] = {}
        self._asked_for: set[int] = set()  # started for the step of a sharer
        #: Are called with a parameter and its gradient before this is reduced.
        self.observers: list[Callable[[Tensor, Tensor], None]] = []
        self._reported = b""  # in the last round
        self._backward = -1  # the graph task for whose end a callback is registered
        self._entered = -1  # the graph task whose thread is known to use this
        self._generation = current.world().placement.generation
        self._lost = 0  # generation of the world that has ended with gradients of this, until others come
        _registry.place(self)
        self.adopt(parameters)
        passes.register(self)

    def adopt(self, parameters: Iterable[Tensor]) -> None:
        """Take over parameters, at the next positions."""
        parameters = list(parameters)
        _registry.collect_owners(parameters)
        for parameter in parameters:
            if torch.nn.parameter.is_lazy(parameter):
                raise InvalidArgumentError("a lazy parameter has no shape yet; run the model once first")
            position = len(self._parameters)
            self._parameters.append(parameter)
            self._known.add(id(parameter))
            self._passes.append(0)
            self.place.size += 1
            _registry.take(parameter, self, position)
        if self._names:
            ordered = "\0".join(self._names.get(id(parameter), "") for parameter in self._parameters)
            self.digest = zlib.crc32(ordered.encode()) & 0xFFFF or 1
        self._drift.compare_again()  # with the values of parameters that were added later

    def check(self, groups: Iterable[dict[str, Any]]) -> None:
        """Raise an error if an optimizer has parameters whose gradients are not reduced."""
        for number, group in enumerate(groups):
            if not self._known.issuperset(map(id, group["params"])):
                raise InvalidArgumentError(
                    f"param_groups[{number}] of the optimizer has parameters that replace those for which "
                    "DistributedOptimizer was made, and whose gradients are not reduced; create a new "
                    "optimizer, and wrap it"
                )

    def hand_over(self, position: int, newer: Gradients, its_position: int) -> None:
        """Let a newer optimizer that has a parameter of this one, too, reduce its gradients for both."""
        if newer is self or newer._sharing_terms() != self._sharing_terms():
            self.retired = (
                "a newer DistributedOptimizer has taken over parameters of this one; use that one, or make "
                "both with the same op, process_set and backward_passes_per_step"
            )
        if self.retired:
            return
        newer._sharers[its_position] = [*self._sharers.pop(position, []), (weakref.ref(self), position)]
        for sharer, at in newer._sharers_of(its_position):
            sharer._elsewhere[at] = newer, its_position
        newer._passes[its_position], self._passes[position] = self._passes[position], 0
        for mine, theirs in ((self._fresh, newer._fresh), (self._reduced, newer._reduced)):
            if position in mine:
                mine.discard(position)
                theirs.add(its_position)
        self._leftovers.move(position, newer._leftovers, its_position)
        self._local.discard(position)
        group = self._group_of.pop(position, None)
        if group is not None:
            group.positions = [other for other in group.positions if other != position]
            group.absent -= position not in self._started

    def _sharing_terms(self) -> tuple[Any, ...]:
        return self._op, self.process_set, self.passes_per_step

    def _sharers_of(self, position: int) -> list[tuple[Gradients, int]]:
        found = [(reference(), at) for reference, at in self._sharers.get(position, ())]
        return [(sharer, at) for sharer, at in found if sharer is not None]

    def _lenders(self) -> dict[Gradients, list[int]]:
        """Optimizers that reduce gradients for this one, and their positions of them."""
        found: dict[Gradients, list[int]] = {}
        for other, position in self._elsewhere.values():
            found.setdefault(other, []).append(position)
        return found

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
        if position in self._elsewhere:
            self._elsewhere[position][0].keep_local(parameter)
            return
        if self._passes[position] or position in self._started or position in self._reduced:
            raise InvalidArgumentError(
                f"register_local_var: {self.describe(position)} has a gradient already; call it before "
                "backward()"
            )
        if position not in self._local:
            self._local.add(position)
            self.has_local = True
            _registry.keep_local(parameter, self._scaled_local())

    def _scaled_local(self) -> Callable[[Tensor], Tensor]:
        owner = weakref.ref(self)

        def scale(gradient: Tensor) -> Tensor:
            gradients = owner()
            return gradient if gradients is None else gradients._reducer.scaled_local(gradient)

        return scale

    def describe(self, position: int) -> str:
        """How an error names a parameter."""
        name = self._names.get(id(self._parameters[position]))
        return f"parameter {position}" if name is None else f"parameter {name!r}"

    def parameter_names(self) -> list[str]:
        """See :class:`Section`. Without names, positions and shapes."""
        return [
            self._names.get(id(parameter)) or f"parameter {i} of shape {list(parameter.shape)}"
            for i, parameter in enumerate(self._parameters)
        ]

    @property
    def count(self) -> int:
        """The number of parameters."""
        return len(self._parameters)

    def claim(self) -> None:
        """Let the calling thread use the optimizer from now on, and hold its rounds."""
        _registry.claim(self)

    @property
    def in_flight(self) -> bool:
        """Whether reductions run: within backward, or after one that has failed."""
        shared = any(position in other._started for other, position in self._elsewhere.values())
        return shared or bool(self._started)

    def passes_held(self) -> int:
        """See :class:`polyhvd.training.passes.CountedPasses`."""
        number = self.passes_per_step
        if self.retired or not (self._fresh or any(count % number for count in self._passes)):
            return 0
        return number if number > 1 else _ON_HOLD_MAX

    def drop_passes(self) -> None:
        """The same: their gradients are the state's to drop, their number goes with the world."""

    def restart(self) -> None:
        """Another world is current: what was begun in the last one is not to be waited for."""
        is_under_way = self._started or self._reduced or self._fresh or any(self._passes)
        # Replaced, not cleared: a thread may be in a backward of the last world, which fails.
        self._started, self._reduced, self._fresh = set(), set(), set()
        self._reduced_early = {}
        self._submitted = Submitted()
        self._groups = [_Group(group.number, group.positions) for group in self._groups]
        self._group_of = {position: group for group in self._groups for position in group.positions}
        self._reducer.drop()
        self._forget_started()
        self._forget_own()
        self._lost = self._generation if is_under_way else 0
        self._backward = self._entered = -1
        self.settled, self.rounds = False, 0
        self._generation = current.world().placement.generation
        # Steps that the ranks of the last world have taken last need not be the same.
        self._used, self.values_digest, self._values_due = UsedValues(), 0, False

    # Within backward ---------------------------------------------------------

    def _enter(self, task: int, position: int) -> None:
        """A backward has come to a parameter: its thread uses the optimizer from now on."""
        _registry.check(task)
        if self._parameters[position].is_cpu:  # for other devices autograd uses separate threads
            self._entered = task
            self.claim()

    def on_gradient(self, position: int) -> None:
        """Called by autograd when ``grad`` of a parameter is complete for this backward."""
        if self.retired or not self._reducer.takes_part():
            return
        task = torch._C._current_graph_task_id()
        if task != self._entered:
            self._enter(task, position)
        if self._reduced_early and self._reduced_early.pop(position, None) == task:
            return  # a hook that was registered earlier has called step()
        self.settled, self._lost = False, 0
        self._fresh.add(position)
        on_hold = self.on_hold
        if position in self._sharers:
            for sharer, _ in self._sharers_of(position):
                sharer.settled = False
                on_hold = on_hold or sharer.on_hold
        if on_hold:
            return
        self._passes[position] += 1
        if task != self._backward:
            self._backward = task
            _registry.hold_rounds_after(task, self)
        if self._passes[position] >= self.passes_per_step:
            self._start(position)

    def before_gradient(self, position: int) -> None:
        """Called by autograd before a gradient is added to ``grad`` of a parameter, if ``looks_before``.

        What a step has left there, equal on all ranks, counts once in their sum: on the first of them.
        """
        if self.retired or not self._reducer.takes_part():
            return
        task = torch._C._current_graph_task_id()
        self._arriving = task, position
        if self.process_set.rank() == 0:
            return
        if task != self._entered:
            self._enter(task, position)
        parameter = self._parameters[position]
        if self._leftovers.has(position, parameter.grad):
            parameter.grad = None

    def _start(self, position: int, agreed: int = FROZEN) -> None:
        """Reduce a gradient; ``agreed`` is the state that decides its layout, where it is known."""
        if position in self._started:
            raise InvalidArgumentError(
                f"the gradient of {self.describe(position)} was written while it was being reduced, after "
                "a backward that failed; call synchronize() on the optimizer after such an error"
            )
        if position in self._reduced and not self._repeatable:
            raise self._computed_again(position)
        gradient = self._gradient(position, agreed)
        for observe in self.observers:
            if position not in self._local:
                observe(self._parameters[position], gradient)
        group = self._group_of.get(position)
        if gradient.layout is not torch.strided:
            self._start_sparse(position, gradient)
        elif group is None:
            self._reducer.start_one(position, gradient, priority=-position)
        else:
            group.held[position] = gradient
        if position not in self._local:
            self._submitted.add(position, gradient)
        self._started.add(position)
        self._fresh.discard(position)
        if group is not None:
            group.absent -= 1
            if group.absent == 0:
                self._start_group(group)

    def _computed_again(self, position: int) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"the gradient of {self.describe(position)} was computed again after its reduction; call "
            "step() or zero_grad() of the optimizer before, or raise backward_passes_per_step"
        )

    def _gradient(self, position: int, agreed: int) -> Tensor:
        """The gradient of a parameter, zeros if it has none, in the layout in which it is reduced."""
        parameter = self._parameters[position]
        gradient = parameter.grad
        if position in self._local:  # but not on some other rank
            return _zeros(parameter, max(agreed - READY, 0))
        if gradient is None or self._counts_elsewhere(position, gradient):
            gradient = parameter.grad = _zeros(parameter, max(agreed - READY, 0))
        if gradient.requires_grad:
            raise InvalidArgumentError(
                f"the gradient of {self.describe(position)} has a graph, which a reduction would "
                "break; call backward() without create_graph, or use torch.autograd.grad()"
            )
        if gradient.layout not in (torch.strided, torch.sparse_coo):
            raise InvalidArgumentError(
                f"the gradient of {self.describe(position)} is of layout {gradient.layout}, expected "
                "torch.strided or torch.sparse_coo; convert it with to_dense() or to_sparse()"
            )
        is_sparse = gradient.layout is torch.sparse_coo
        if is_sparse and (self._sparse_as_dense or agreed == READY):
            if self._sparse_as_dense:
                self._as_dense[position] = gradient.sparse_dim()
            gradient = parameter.grad = gradient.to_dense()
        elif not is_sparse and agreed > READY and not self._sparse_as_dense:
            gradient = parameter.grad = gradient.to_sparse(agreed - READY)
        return gradient

    def _counts_elsewhere(self, position: int, gradient: Tensor) -> bool:
        """Return whether another rank's sum has this gradient; see :meth:`before_gradient`."""
        return self.looks_before and self._leftovers.has(position, gradient) and self.process_set.rank() != 0

    def _start_sparse(self, position: int, gradient: Tensor) -> None:
        try:
            check_sparse_op(self._op)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(
                f"the gradient of {self.describe(position)} is sparse; {error} with sparse_as_dense=True"
            ) from None
        self._reducer.start_sparse(position, gradient, priority=-position)
        self._sparse[position] = gradient.sparse_dim()

    def _start_group(self, group: _Group) -> None:
        """Reduce what a group holds: on every rank the same, by the time that this is called."""
        if group.held:
            name, held = group.name, dict(sorted(group.held.items()))
            group.held = {}
            self._reducer.start(name, held, priority=-next(iter(held)))

    # Rounds ------------------------------------------------------------------

    def report(self, *, at_step: bool) -> bytes:
        """See :class:`Section`. In a step, gradients that the user has set by hand count as well."""
        count = len(self._parameters)
        if len(self._started) == count and not self._sparse and not self._as_dense:
            self._reported = bytes((READY,)) * count
            return self._reported
        due = at_step or not self._started <= self._asked_for
        states = bytearray(count)
        for position, parameter in enumerate(self._parameters):
            computed = due and position in self._fresh
            if position in self._local:
                continue
            if position in self._elsewhere:  # and may be written until the step
                states[position] = EXPECTED if parameter.requires_grad else FROZEN
                continue
            if not at_step and not self._repeatable and self._leftovers.has(position, parameter.grad):
                self._leftovers.keep(position)
            if position not in self._started and (computed or (at_step and self._is_set_by_hand(position))):
                if not computed:
                    self._note_early(position)
                self._start(position)
            if position in self._sparse:
                states[position] = READY + self._sparse[position]
            elif position in self._as_dense:
                states[position] = READY + self._as_dense[position]
            elif position in self._started:
                states[position] = READY
            elif position in self._reduced:
                states[position] = REDUCED
            else:
                states[position] = EXPECTED if parameter.requires_grad else FROZEN
        self._reported = bytes(states)
        return self._reported

    def _is_set_by_hand(self, position: int) -> bool:
        """Return whether there is a gradient that is not known to be reduced already."""
        gradient = self._parameters[position].grad
        if gradient is None or position in self._reduced:
            return False
        # Where reducing twice changes nothing, it is the safe side: not all writes are seen.
        is_safe = self._repeatable and position not in self._sharers
        return is_safe or not self._leftovers.has(position, gradient)

    def _start_for_sharer(self, positions: Iterable[int]) -> None:
        """Reduce what an older optimizer is about to step with."""
        for position in positions:
            is_fresh = position in self._fresh
            if position in self._started or position in self._local:
                continue
            if is_fresh or self._is_set_by_hand(position):
                if not is_fresh:
                    self._note_early(position)
                self._start(position)
                self._asked_for.add(position)

    def _note_early(self, position: int) -> None:
        if self._stepping_in != -1 and self._parameters[position].grad is not None:
            self._reduced_early[position] = self._stepping_in

    def start_missing(self, states: bytes) -> None:
        """See :class:`Section`. An absent gradient is zero."""
        if self._drift.is_due():
            names = [self._names.get(id(parameter), str(i)) for i, parameter in enumerate(self._parameters)]
            if self._values_due:
                self._drift.begin(self._prefix, (), self._used.by_position(names, self._compared()))
            else:
                optimizer = self._optimizer()
                self._drift.begin(
                    self._prefix,
                    values_of(names, self._parameters, self._local),
                    states={}
                    if optimizer is None
                    else checksums_of_states(self._parameters, optimizer.state),
                )
            self._values_due = False
        if states != self._reported:
            for position, state in enumerate(states):
                if state >= READY and position not in self._started:
                    self._note_early(position)
                    self._start(position, state)
                if state > READY and self._sparse_as_dense and position not in self._local:
                    self._as_dense[position] = state - READY
        # Some of these lack gradients that no rank has.
        for group in self._groups:
            self._start_group(group)

    def finish(self) -> None:
        """See :class:`Section`."""
        for position in self._started:
            self._passes[position] %= self.passes_per_step
        self._reduced |= self._started
        as_dense = self._as_dense
        touched = self._submitted.touched(self._parameters)
        self._forget_started()
        errors: list[Exception] = []
        for finish in (self._reducer.finish, self._drift.finish):
            try:
                finish()
            except Exception as error:
                errors.append(error)
        for position, dimensions in as_dense.items():
            gradient = self._parameters[position].grad
            if gradient is not None and gradient.layout is torch.strided:
                self._parameters[position].grad = gradient.to_sparse(dimensions)
        if touched:
            errors.append(InvalidArgumentError(self._why_touched(touched)))
        if errors and isinstance(errors[0], HorovodInternalError):
            raise type(errors[0])(self._with_names(str(errors[0]))) from errors[0]
        if errors:
            raise errors[0]

    def _why_touched(self, positions: list[int]) -> str:
        names = ", ".join(self.describe(position) for position in positions[:3])
        more = f" and {len(positions) - 3} more" if len(positions) > 3 else ""
        return (
            f"the gradient of {names}{more} was changed or replaced while it was being reduced, so that it "
            "is wrong now, and maybe on some ranks only; a hook that was registered after "
            "DistributedOptimizer() does that: register hooks of gradients before it is made, or change "
            "gradients when backward() has returned, which is when they are reduced"
        )

    def note_values(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Keep the hyperparameters with which a step is taken, to be compared in the next round."""
        world = current.find()
        if world is not None and world.settings.check_drift != "off":
            self.values_digest = self._used.note(groups, self._local)

    def compare_values(self) -> None:
        """See :class:`Section`. Once in each world."""
        self._values_due = self._used.keep() and self._drift.compare_again()

    def _compared(self) -> set[int]:
        return {
            i
            for i, parameter in enumerate(self._parameters)
            if i not in self._local and parameter.requires_grad
        }

    def drop(self) -> None:
        """See :class:`Section`."""
        self._forget_started()
        self._reducer.drop()

    def _forget_started(self) -> None:
        self._started.clear()
        self._asked_for.clear()
        self._submitted.clear()
        self._sparse, self._as_dense = {}, {}
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
        if not self._reducer.takes_part():
            return
        if self._lost:
            current.of_generation(self._lost, "the gradients of DistributedOptimizer")
        task = torch._C._current_graph_task_id()
        lenders = self._lenders()
        for other in lenders:
            if other.retired:
                raise InvalidArgumentError(other.retired)
            if other._lost:
                current.of_generation(other._lost, "the gradients of DistributedOptimizer")
            _registry.claim(other)
        again = set() if self._repeatable else self._fresh & self._reduced
        self._fresh -= again  # an error, after all other gradients are reduced
        try:
            for each in (self, *lenders):
                each._stepping_in = task
                if task != -1:
                    each._forget_rounds_before()
            while not self.settled:
                for other, positions in lenders.items():
                    other._start_for_sharer(positions)
                self.board.hold_round(self)
        finally:
            self._fresh |= again
            for each in (self, *lenders):
                each._stepping_in = -1
        if again:
            raise self._computed_again(min(again))

    def _forget_rounds_before(self) -> None:
        """A step within backward: a gradient that was reduced before may have been written since, unseen."""
        self.settled = False
        task, position = self._arriving
        if self._repeatable:
            self._reduced.clear()
        elif task == self._stepping_in and position in self._reduced:
            self._start(position)  # raises

    def share_overflow(self) -> None:
        """Let a GradScaler find on every rank that a gradient which is not reduced has overflowed on one."""
        sections = (self, *self._lenders())
        if not any(section.has_local_anywhere for section in sections) or not self._reducer.takes_part():
            return
        local = [section._parameters[i].grad for section in sections for i in section._local]
        are_finite = all(bool(each.to_dense().isfinite().all()) for each in local if each is not None)
        found = torch.tensor([not are_finite], dtype=torch.uint8)
        name, op = f"{self._prefix}.overflow", ReduceOp.Max
        simple.allreduce_(found, name=name, op=op, process_set=self.process_set)
        gradients = (parameter.grad for parameter in self._parameters)
        gradient = next((gradient for gradient in gradients if gradient is not None), None)
        if found.item() and gradient is not None:
            gradient.mul_(float("inf"))

    def joint_loss(self, loss: Any) -> Any:
        """The ranks' losses as one; see :func:`polyhvd.torch.closures.joint_loss`."""
        if not self._reducer.takes_part():
            return loss
        return joint_loss(loss, name=f"{self._prefix}.loss", op=self._op, process_set=self.process_set)

    def forget_passes(self) -> None:
        """The gradients were set to zero."""
        self._forget_own()
        self.settled = False  # after a step that the program has skipped, too
        for other, positions in self._lenders().items():
            for position in positions:
                other._passes[position] = 0
            other._fresh.difference_update(positions)
            other._reduced.difference_update(positions)
            other._leftovers.forget_kept(positions)

    def _forget_own(self) -> None:
        self._lost = 0
        self._passes = [0] * len(self._parameters)
        self._fresh.clear()
        self._reduced.clear()
        self._leftovers.forget_kept()

    def end_step(self) -> None:
        """The gradients were used."""
        self._note_used(self._reduced)
        for other, positions in self._lenders().items():
            other._note_used(other._reduced.intersection(positions))
            other.settled = False
        self.forget_passes()
        self.settled = False
        self.rounds = 0

    def _note_used(self, positions: set[int]) -> None:
        known = positions & self._sharers.keys() if self._repeatable else positions
        self._leftovers.note(known, self._parameters)


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
