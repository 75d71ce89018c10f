"""DistributedOptimizer with op=Adasum: ranks step by themselves, and their steps are combined."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from polyhvd.torch.base import collectives, increment_version
from polyhvd.torch.registry import hooked
from polyhvd.torch.weights import DRIFT_REMEDY, checksums_of_states, values_of

from polyhvd.collectives.numbering import ObjectNumbers
from polyhvd.errors import InvalidArgumentError
from polyhvd.training.drift import DriftCheck
from polyhvd.training.gradient_groups import KeyGroups
from polyhvd.training.options import Options, passes_per_step
from polyhvd.training.passes import register
from polyhvd.training.reducer import Exchange, GradientReducer

__all__ = ["AdasumOptimizer", "Steps"]

Tensor = torch.Tensor
_numbers = ObjectNumbers()


class Steps:
    """The values that an optimizer of this kind combines.

    Args:
        options: of the optimizer.
        groups: positions of the parameters of each group.
        names: of parameters, by ``id()``.
        parameters: of the optimizer.
    """

    def __init__(
        self,
        options: Options,
        groups: Sequence[Sequence[int]],
        names: Mapping[int, str],
        parameters: Sequence[Tensor],
    ) -> None:
        self._names = names
        self._prefix = f"DistributedOptimizer.adasum.{_numbers.of(self, options.process_set)}"
        self._drift = DriftCheck(
            "DistributedOptimizer", options.process_set, DRIFT_REMEDY, reduces_singly=True
        )
        self._reducer = GradientReducer(
            Exchange(collectives),
            prefix=self._prefix,
            options=options,
            groups=KeyGroups(groups),
        )
        #: Parameters that are each rank's own, by identity.
        self.local: set[int] = set()
        #: Whether a backward pass has made gradients that no step has used, if a step takes several.
        self.has_gradients = False
        self._passes_per_step = 1
        self._is_hooked = False
        self.expect_passes(options.backward_passes_per_step, parameters)
        register(self)

    def expect_passes(self, number: int, parameters: Sequence[Tensor]) -> None:
        """Let an elastic state commit after steps of so many passes, not between the passes."""
        self._passes_per_step = number
        if number == 1 or self._is_hooked:
            return
        owner = weakref.ref(self)

        def note(_: Tensor) -> None:
            steps = owner()
            if steps is not None:
                steps.has_gradients = True

        for parameter in parameters:
            hooked(parameter, {"register_post_accumulate_grad_hook": note})
        self._is_hooked = True

    def passes_held(self) -> int:
        """See :class:`polyhvd.training.passes.CountedPasses`."""
        return self._passes_per_step if self.has_gradients and self._passes_per_step > 1 else 0

    def drop_passes(self) -> None:
        """Forget the passes since the last step."""
        self.has_gradients = False

    def is_member(self) -> bool:
        """Return whether this rank takes part."""
        return self._reducer.takes_part()

    def compare(self, parameters: Sequence[Tensor], states: Mapping[Any, Any]) -> None:
        """In the first step, compare the ranks' parameters; :meth:`combine` reports what differs.

        Args:
            parameters: of the optimizer.
            states: of the optimizer, by parameter.
        """
        if self._drift.is_due():
            local = {i for i, parameter in enumerate(parameters) if id(parameter) in self.local}
            names = [self._names.get(id(parameter), str(i)) for i, parameter in enumerate(parameters)]
            self._drift.begin(
                self._prefix,
                values_of(names, parameters, local),
                states=checksums_of_states(parameters, states),
            )

    def compare_again(self) -> None:
        """Let the next :meth:`compare` compare the parameters, some of which were added."""
        self._drift.compare_again()

    @torch.no_grad()
    def combine(self, parameters: Sequence[Tensor], starts: dict[int, Tensor]) -> None:
        """Replace each parameter by its start plus the Adasum of all ranks' differences to it.

        When it fails, parameters are as they were at the start.

        Args:
            parameters: all of the optimizer's.
            starts: of those that can have been changed, by position.
        """
        differences = {i: (parameters[i].detach() - start).contiguous() for i, start in starts.items()}
        shared = [i for i in starts if id(parameters[i]) not in self.local]
        try:
            self._drift.finish()  # before ranks that train other parameters would wait for each other
            self._reducer.reduce({i: differences[i] for i in shared})
        except BaseException:
            for i, start in starts.items():
                parameters[i].copy_(start)
            raise
        for i in shared:
            torch.add(starts[i], differences[i], out=parameters[i].detach())
            increment_version(parameters[i])


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class AdasumOptimizer(torch.optim.Optimizer):
    """The base class that :func:`polyhvd.torch.DistributedOptimizer` puts before the user's optimizer.

    Gradients stay on their rank. Each rank takes its own step; the differences that steps have made are
    combined by Adasum (Maleki et al., "Scaling distributed training with adaptive summation", 2020,
    arXiv:2006.02924), and the model moves by the result, the same on every rank.
    """

    #: GradScaler calls step() on every rank, also on one that has overflowed.
    _step_supports_amp_scaling = True

    def _own_steps(self) -> Steps:
        steps: Steps | None = getattr(self, "_steps", None)
        if steps is None:
            raise InvalidArgumentError(
                "this is a copy of a DistributedOptimizer, which reduces nothing; "
                "make the copy of the original optimizer, and wrap that"
            )
        return steps

    def synchronize(self) -> None:
        """Return at once: gradients are not exchanged."""

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Change nothing; for scripts that call it."""
        yield

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Change nothing: no backward pass exchanges anything."""
        yield

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set after how many passes an elastic state may commit; ``step()`` takes all gradients so far.

        Raises:
            InvalidArgumentError: ``passes`` is not an integer of 1 or more.
        """
        self._own_steps().expect_passes(passes_per_step(passes), _parameters_of(self))

    def register_local_var(self, parameter: Tensor) -> None:
        """Let a parameter be this rank's own; on every rank."""
        self._own_steps().local.add(id(parameter))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, in the same order on every rank."""
        super().add_param_group(param_group)
        self._own_steps().compare_again()

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Set the gradients to zero, or to None, as the optimizer's own method does."""
        super().zero_grad(*args, **kwargs)
        self._own_steps().drop_passes()

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Step as the optimizer's own method does, and move the model by what all ranks' steps make together.

        Every rank has to call it. One that has overflowed under GradScaler adds nothing.
        """
        steps = self._own_steps()
        self._opt_called = True  # torch's schedulers look at it
        if not steps.is_member():
            result = self._local_step(*args, **kwargs)
        else:
            parameters = _parameters_of(self)
            steps.compare(parameters, self.state)
            starts = {i: p.detach().clone() for i, p in enumerate(parameters) if p.requires_grad}
            result = self._local_step(*args, **kwargs)
            steps.combine(parameters, starts)
        steps.drop_passes()
        return result

    def _local_step(self, *args: Any, **kwargs: Any) -> Any:
        """The step of the optimizer's own class, which need not know of GradScaler."""
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if found_inf is not None and found_inf.item():
            return None
        if scale is not None:
            for parameter in (p for group in self.param_groups for p in group["params"]):
                if parameter.grad is not None:
                    parameter.grad.mul_(1 / scale.item())
        hidden: dict[str, Any] = {
            name: self.__dict__.pop(name) for name in ("grad_scale", "found_inf") if name in vars(self)
        }
        try:
            return super().step(*args, **kwargs)
        finally:
            self.__dict__.update(hidden)

    # As in DistributedOptimizer: torch is not to put its own wrapper around this one.
    step.hooked = True  # type: ignore[attr-defined]
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
