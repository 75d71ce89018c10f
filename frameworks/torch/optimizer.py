"""DistributedOptimizer: reduces gradients while backward runs, and has them all when it returns."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from polyhvd.torch.adasum import AdasumOptimizer, Steps
from polyhvd.torch.backward import Gradients
from polyhvd.torch.mapped import MappedGradients, MappedOptimizer

from polyhvd.collectives.adapter import ReduceOp
from polyhvd.errors import InvalidArgumentError
from polyhvd.runtime import current
from polyhvd.training.gradient_groups import parameter_groups
from polyhvd.training.options import Options, passes_per_step

__all__ = ["distribute"]

Tensor = torch.Tensor
OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)


class _DistributedOptimizer(torch.optim.Optimizer):
    """The base class that :func:`DistributedOptimizer` puts before the user's optimizer."""

    def _own_gradients(self) -> Gradients:
        # No attribute of the class, so that wrappers that pass missing attributes on find it.
        gradients: Gradients | None = getattr(self, "_gradients", None)
        if gradients is None:
            raise InvalidArgumentError(
                "this is a copy of a DistributedOptimizer, which reduces nothing; "
                "make the copy of the original optimizer, and wrap that"
            )
        gradients.claim()
        return gradients

    def synchronize(self) -> None:
        """Wait until every gradient is reduced. Backward has done so already, where all ranks ran it.

        Raises:
            HorovodInternalError: a reduction failed.
        """
        self._own_gradients().synchronize()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let ``step()`` use the gradients as they are, after an explicit ``synchronize()``."""
        gradients = self._own_gradients()
        gradients.awaited_in_step = False
        try:
            yield
        finally:
            gradients.awaited_in_step = True

    def register_local_var(self, parameter: Tensor) -> None:
        """Let the gradient of a parameter stay on this rank: it is not reduced.

        Unless ``scale_local_gradients`` is False or ``op`` is not Average, it is divided by the number of
        ranks, which is its share in the average of all ranks' losses. Ranks may declare different
        parameters: one that others reduce is then reduced with zeros from this rank.

        Args:
            parameter: of this optimizer, without a gradient since the last step.

        Raises:
            InvalidArgumentError: it is not of this optimizer, or backward has begun.

        Example::

            for parameter in model.experts.parameters():
                optimizer.register_local_var(parameter)
        """
        self._own_gradients().keep_local(parameter)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients of the passes within add up on this rank; a later pass, or ``step()``, reduces.

        Example::

            with optimizer.no_sync():
                loss(first_half).backward()
            loss(second_half).backward()
            optimizer.step()
        """
        gradients = self._own_gradients()
        before, gradients.on_hold = gradients.on_hold, True
        try:
            yield
        finally:
            gradients.on_hold = before

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Reduce gradients after this many backward passes, from now on.

        Args:
            passes: an integer of 1 or more.

        Raises:
            InvalidArgumentError: it is something else.
        """
        gradients = self._own_gradients()
        gradients.passes_per_step = passes_per_step(passes)
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
                "zero_grad() while gradients are being reduced: a backward() has not completed; "
                "call synchronize() first"
            )
        super().zero_grad(*args, **kwargs)
        gradients.forget_passes()

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Wait for the gradients of all ranks, then step as the optimizer's own method does.

        With a closure, each of its gradients is reduced, and so is its loss: the optimizer gets the average
        of the ranks' losses (their sum with ``op=Sum``), the same on every rank. A rank whose closure returns
        None counts as one whose loss is zero. Every rank of the process set passes a closure, or none does.

        Raises:
            InvalidArgumentError: ``param_groups`` has parameters that ``add_param_group()`` has not added.
            HorovodInternalError: a reduction failed.
        """
        gradients = self._own_gradients()
        gradients.check(self.param_groups)
        self._opt_called = True  # torch's schedulers look at it
        closure = args[0] if args else kwargs.get("closure")
        if callable(closure):
            reduced = _reducing(closure, gradients)
            if args:
                args = (reduced, *args[1:])
            else:
                kwargs["closure"] = reduced
        elif gradients.awaited_in_step:
            gradients.synchronize()
        gradients.note_values(self.param_groups)
        try:
            return super().step(*args, **kwargs)
        finally:
            gradients.end_step()

    # torch puts its own wrapper around a step() without these marks: hooks would run twice, and a
    # scheduler made before the optimizer was wrapped would complain.
    step.hooked = True  # type: ignore[attr-defined]
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


def _reducing(closure: Callable[[], Any], gradients: Gradients) -> Callable[[], Any]:
    def reduced() -> Any:
        loss = closure()
        gradients.synchronize()
        gradients.end_step()
        return gradients.joint_loss(loss)

    return reduced


@functools.cache
def _share_overflows() -> None:
    """Have every GradScaler look at reduced gradients: all ranks then skip the same steps."""
    scaler: Any = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler
    unscale = getattr(scaler, "_unscale_grads_", None)
    if unscale is None:
        return

    @functools.wraps(unscale)
    def unscale_shared(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(optimizer, _DistributedOptimizer):
            gradients = optimizer._own_gradients()
            # Passes on hold, or fewer passes than a step has, leave the reduction to the step.
            if gradients.awaited_in_step:
                gradients.synchronize()
            gradients.share_overflow()
        if not isinstance(optimizer, MappedOptimizer):
            return unscale(self, optimizer, *args, **kwargs)
        mapped = optimizer._mapped
        if mapped.awaited_in_step:
            mapped.synchronize()
        found = unscale(self, optimizer, *args, **kwargs)
        # Fused optimizers are called in spite of an overflow, for others the scaler skips the step.
        is_called = getattr(optimizer, "_step_supports_amp_scaling", False)
        if not is_called and any(value.item() for value in found.values()):
            mapped.end_step()
        return found

    scaler._unscale_grads_ = unscale_shared


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


def distribute(
    optimizer: OptimizerT,
    named_parameters: Iterable[tuple[str, Tensor]] | None,
    options: Options,
) -> OptimizerT:
    """Put a class that reduces before that of an optimizer, and return it; see the wrapper for the arguments.

    Raises:
        InvalidArgumentError: an argument cannot be used.
        NotInitializedError: before ``init()``.
    """
    current.world()
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"expected a torch.optim.Optimizer, found {type(optimizer).__name__}")
    if isinstance(optimizer, (_DistributedOptimizer, AdasumOptimizer, MappedOptimizer)):
        raise InvalidArgumentError("the optimizer is a DistributedOptimizer already")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    trainable = [i for i, parameter in enumerate(parameters) if parameter.requires_grad]
    names = _checked_names(named_parameters, parameters)
    members = parameter_groups(parameters, trainable, options.grouping)
    _share_overflows()
    if options.mapping is not None:
        return _in_class(optimizer, MappedOptimizer, "_mapped", MappedGradients(parameters, options))
    if options.op == ReduceOp.Adasum:
        return _in_class(optimizer, AdasumOptimizer, "_steps", Steps(options, members, names, parameters))
    gradients = Gradients(optimizer, parameters, names, options, members)
    return _in_class(optimizer, _DistributedOptimizer, "_gradients", gradients)


def _in_class(optimizer: OptimizerT, mixin: type, attribute: str, value: Any) -> OptimizerT:
    """The same object, so that whatever refers to it (a scheduler) sees the new ``step()``."""
    base = type(optimizer)
    if hasattr(optimizer.__dict__.get("step"), "__wrapped__"):
        del optimizer.__dict__["step"]  # a scheduler's wrapper around the old one
    optimizer.__class__ = type(base.__name__, (mixin, base), {"__module__": base.__module__})
    setattr(optimizer, attribute, value)
    return optimizer
