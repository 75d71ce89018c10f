"""Which optimizer each parameter belongs to, and where each thread holds the rounds of a process set."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from polyhvd.torch.compiled import AVAILABLE, is_compiling
from polyhvd.torch.rounds import Board, hold_rounds
from torch.utils.weak import WeakIdKeyDictionary

from polyhvd.collectives.adapter import OpKind, ReduceOp
from polyhvd.collectives.numbering import ObjectNumbers
from polyhvd.collectives.process_sets import ProcessSet
from polyhvd.collectives.verbs import process_set_id
from polyhvd.runtime import current
from polyhvd.training.drift import names_of_some_ranks

if TYPE_CHECKING:
    from polyhvd.torch.backward import Gradients

__all__ = ["Registry", "hooked"]

Tensor = torch.Tensor
_BACKWARD = "a backward pass of DistributedOptimizer"


class _Ending(threading.local):
    """The backward that runs in a thread, and the optimizers that it has gradients for."""

    task = -1
    generation = 0  # of the world in which it began

    def __init__(self) -> None:
        #: Weakly: a backward that raises leaves them here, and their optimizer may be deleted then.
        self.among: list[weakref.ref[Gradients]] = []


class _Own(threading.local):
    """The boards of a thread."""

    def __init__(self) -> None:
        self.boards: dict[ProcessSet, Board] = {}


class Registry:
    """The owner of each parameter, the newest optimizer that has it, and the boards of each thread.

    Args:
        prefix: begins the names of operations.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._numbers = ObjectNumbers()
        self._own = _Own()
        self._everyone: weakref.WeakSet[Gradients] = weakref.WeakSet()
        self._owners: Any = WeakIdKeyDictionary()
        self._ending = _Ending()
        # After the numbers have: they free what is gone.
        current.on_change(self._restart)

    def number(self, gradients: Gradients, process_set: ProcessSet) -> int:
        """Return the number of an optimizer, the same on every rank."""
        return self._numbers.of(gradients, process_set)

    def _restart(self, engine: object) -> None:
        """The ranks of a new engine have made no optimizers but those that are in use, in this thread."""
        self._own = _Own()
        for gradients in sorted(self._everyone, key=lambda gradients: gradients.number):
            if engine is not None:
                gradients.restart()
            if not gradients.retired:
                self.place(gradients)

    def place(self, gradients: Gradients) -> None:
        """Let an optimizer that has just been made take part in the rounds of the calling thread."""
        self._everyone.add(gradients)
        number = gradients.number
        self._place(gradients, f".{number}" if number else "")

    def claim(self, gradients: Gradients) -> None:
        """Let an optimizer take part in the rounds of the calling thread, which uses it from now on.

        How often it has gone from thread to thread does not count in the name of a board: ranks may have
        pools of threads, or have joined. So a thread that has given the first optimizer that it claimed to
        a new thread is not to go on with others that it has claimed.
        """
        if self._own.boards.get(gradients.process_set) is not gradients.board:
            self._place(gradients, f".{gradients.number}.claimed")

    def _place(self, gradients: Gradients, suffix: str) -> None:
        board = self._board(gradients.process_set, suffix)
        board.add(gradients, gradients.count)

    def _board(self, process_set: ProcessSet, suffix: str) -> Board:
        """Return the board of the calling thread's rounds; ``suffix`` ends the names of a new board."""
        boards = self._own.boards
        if process_set not in boards:

            def start(name: str, array: Any, op: int, blocking: bool) -> Any:
                return current.world().engine.submit(
                    OpKind.ALLREDUCE,
                    f"{self._prefix}.{name}{suffix}",
                    (array,),
                    (array,),
                    op,
                    process_set=process_set_id(process_set),
                    priority=1,  # gradients have 0 and less
                    blocking=blocking,
                )

            def agree(states: bytearray, blocking: bool) -> Callable[[], None]:
                array = np.frombuffer(states, dtype=np.uint8)
                wait: Callable[[], None] = start("ready", array, ReduceOp.Max, blocking).wait
                return wait

            def call_roll() -> Callable[[], bool]:
                count = np.ones(1, dtype=np.int64)
                handle = start("present", count, ReduceOp.Sum, False)

                def are_all_there() -> bool:
                    handle.wait()
                    return int(count[0]) == process_set.size()

                return are_all_there

            def difference(names: Sequence[Sequence[str]]) -> str:
                number, name = process_set_id(process_set), f"{self._prefix}.names{suffix}"
                return names_of_some_ranks(current.world(), number, name, *names)

            boards[process_set] = Board(agree, call_roll, difference)
        return boards[process_set]

    def check(self, task: int) -> None:
        """Raise PeerLostError in a backward that began in a world that has ended."""
        if task == self._ending.task:
            current.of_generation(self._ending.generation, _BACKWARD)

    def hold_rounds_after(self, task: int, gradients: Gradients) -> None:
        """Reduce what an optimizer has ready, and all others in this backward, at the end of it.

        Args:
            task: torch's number of the backward that calls this.
            gradients: of the optimizer.
        """
        ending = self._ending
        if task != ending.task:
            generation = current.world().placement.generation
            ending.task, ending.among, ending.generation = task, [], generation
            among = ending.among
            torch.autograd.Variable._execution_engine.queue_callback(lambda: _hold_rounds(among, generation))
        ending.among.append(weakref.ref(gradients))

    def keep_local(self, parameter: Tensor, scale: Callable[[Tensor], Tensor]) -> None:
        """Let ``scale`` have each gradient of a parameter, before it is added up, instead of its owner."""
        owner, position, hooks = self._owners[parameter]
        _remove(hooks)
        self._owners[parameter] = owner, position, hooked(parameter, {"register_hook": scale})

    def collect_owners(self, parameters: Iterable[Tensor]) -> None:
        """Free optimizers of these parameters that only reference cycles keep, and not on every rank."""
        if any(entry is not None and entry[0]() is not None for entry in map(self._owners.get, parameters)):
            gc.collect()

    def take(self, parameter: Tensor, gradients: Gradients, position: int) -> None:
        """Let ``gradients`` reduce a parameter's gradients from now on, for all optimizers that have it."""
        previous = self._owners.pop(parameter, None)
        if previous is not None:
            reference, its_position, hooks = previous
            _remove(hooks)
            owner = reference()
            if owner is not None:
                owner.hand_over(its_position, gradients, position)
        hooks = _register(parameter, gradients, position)
        self._owners[parameter] = weakref.ref(gradients), position, hooks


def _hold_rounds(among: list[weakref.ref[Gradients]], generation: int) -> None:
    current.of_generation(generation, _BACKWARD)
    # A round of another optimizer's backward, within this one, may have served one already.
    alive = [gradients for reference in among if (gradients := reference()) is not None]
    boards = {id(gradients.board): gradients.board for gradients in alive if gradients.in_flight}
    among.clear()
    hold_rounds(list(boards.values()))


def _register(parameter: Tensor, gradients: Gradients, position: int) -> list[Any]:
    owner = weakref.ref(gradients)

    def after(_: Tensor) -> None:
        gradients = owner()
        if gradients is not None:
            if is_compiling():
                uncompiled(gradients.on_gradient, position)
            else:
                gradients.on_gradient(position)

    def before(_: Tensor) -> None:
        gradients = owner()
        if gradients is not None:
            if is_compiling():
                uncompiled(gradients.before_gradient, position)
            else:
                gradients.before_gradient(position)

    uncompiled = _uncompiled()
    hooks: dict[str, Any] = {"register_post_accumulate_grad_hook": after}
    if gradients.looks_before:
        hooks["register_hook"] = before
    return hooked(parameter, hooks)


@functools.cache
def _uncompiled() -> Callable[..., Any]:
    """Calls a function outside of compiled programs: compiled autograd traces hooks, too."""

    def call(function: Callable[[int], None], position: int) -> None:
        function(position)

    # Making any optimizer has imported what this takes.
    return torch.compiler.disable(call) if AVAILABLE else call


def hooked(parameter: Tensor, hooks: dict[str, Any]) -> list[Any]:
    """The handles of hooks, which are given by the parameter's methods that register them."""
    if not (parameter.is_floating_point() or parameter.is_complex()):
        return []  # can have no gradient, ever
    was_frozen = not parameter.requires_grad
    if was_frozen:
        parameter.requires_grad_(True)  # it may be thawed later, and takes no hook as it is
    try:
        return [getattr(parameter, register)(hook) for register, hook in hooks.items()]
    finally:
        if was_frozen:
            parameter.requires_grad_(False)


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
