"""DistributedOptimizer in jobs whose other ranks have other frameworks: gradients are reduced in the step.

Ranks of PyTorch agree during backward on which gradients there are (rounds.py); other frameworks do not, so
here every trained parameter is reduced in every step.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from polyhvd.torch.reducer import TorchExchange
from polyhvd.torch.registry import hooked

from polyhvd.collectives.adapter import ReduceOp
from polyhvd.errors import InvalidArgumentError, UnsupportedError
from polyhvd.training.drift import DriftCheck
from polyhvd.training.gradient_groups import KeyGroups
from polyhvd.training.options import Options
from polyhvd.training.reducer import GradientReducer

__all__ = ["MappedGradients", "MappedOptimizer"]

Tensor = torch.Tensor


class MappedGradients:
    """The gradients of one optimizer, by position of the parameter.

    Args:
        parameters: of the optimizer.
        options: of the optimizer, with a mapping.
    """

    def __init__(self, parameters: Sequence[Tensor], options: Options) -> None:
        self._parameters = list(parameters)
        self._trained = {i: p for i, p in enumerate(self._parameters) if p.requires_grad}
        self._reducer = GradientReducer(
            TorchExchange(self._parameters, kept=set()),
            prefix=options.mapping.prefix,
            options=options,
            groups=KeyGroups(),
            sources=self._trained,
        )
        self._drift = DriftCheck("DistributedOptimizer", options.process_set, "", mapping=options.mapping)
        self._are_reduced = False
        #: Are called with a parameter and its gradient before this is reduced.
        self.observers: list[Callable[[Tensor, Tensor], None]] = []
        #: ``step()`` reduces gradients, unless the program has done so.
        self.awaited_in_step = True
        self._is_repeatable = options.op in (ReduceOp.Average, ReduceOp.Min, ReduceOp.Max)
        owner = weakref.ref(self)

        def note(parameter: Tensor) -> None:
            gradients = owner()
            if gradients is not None:
                gradients._note_gradient()

        for parameter in self._trained.values():
            hooked(parameter, {"register_post_accumulate_grad_hook": note})

    def _note_gradient(self) -> None:
        """A backward pass has written a gradient, which is reduced in the next step."""
        if self._are_reduced and not self._is_repeatable:
            raise InvalidArgumentError(
                "a gradient was computed again after its reduction; call step() or zero_grad() of the "
                "optimizer before"
            )
        self._are_reduced = False

    def check(self, groups: Sequence[dict[str, Any]]) -> None:
        """Raise an error if the optimizer trains parameters that are not reduced."""
        known = set(map(id, self._trained.values()))
        found = [p for group in groups for p in group["params"] if p.requires_grad and id(p) not in known]
        if found:
            raise UnsupportedError(
                f"mapping: the optimizer trains {len(found)} parameters, the first of shape "
                f"{list(found[0].shape)}, that were added or unfrozen after DistributedOptimizer was made; "
                "create the mapping and the optimizer after that"
            )

    def synchronize(self) -> None:
        """Reduce the gradients, unless that was done since the last step."""
        if self._are_reduced or not self._reducer.takes_part():
            return
        gradients = {}
        for position, parameter in self._trained.items():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, requires_grad=False)
            gradients[position] = parameter.grad
            for observe in self.observers:
                observe(parameter, parameter.grad)
        self._drift.compare(
            "", lambda: self._reducer.mapped_values(map(str, self._trained), self._trained.values())
        )
        self._reducer.reduce(gradients)
        self._are_reduced = True

    def end_step(self) -> None:
        """Begin the next step: the gradients were used, or set to zero."""
        self._are_reduced = False


class MappedOptimizer(torch.optim.Optimizer):
    """The base class of :func:`polyhvd.torch.DistributedOptimizer` with a mapping."""

    _mapped: MappedGradients

    def synchronize(self) -> None:
        """Reduce the gradients now, to look at them or to clip them before ``step()``.

        Raises:
            HorovodInternalError: a reduction failed.
        """
        self._mapped.synchronize()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let ``step()`` use the gradients as they are, after an explicit ``synchronize()``."""
        self._mapped.awaited_in_step = False
        try:
            yield
        finally:
            self._mapped.awaited_in_step = True

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Reset the optimizer's gradients, and end the step."""
        super().zero_grad(*args, **kwargs)
        self._mapped.end_step()

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Reduce the gradients, and update the parameters.

        Raises:
            UnsupportedError: there is a closure, which ranks of other frameworks cannot call in step, or a
                parameter was added or unfrozen.
            HorovodInternalError: a reduction failed.
        """
        if closure is not None:
            raise UnsupportedError(
                "step(closure) with a mapping: ranks of other frameworks do not compute gradients again "
                "within a step; call backward() before step()"
            )
        self._mapped.check(self.param_groups)
        if self._mapped.awaited_in_step:
            self._mapped.synchronize()
        result = super().step(*args, **kwargs)
        self._mapped.end_step()
        return result

    # As in DistributedOptimizer: torch's own wrapper would run hooks twice.
    step.hooked = True  # type: ignore[attr-defined]
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
