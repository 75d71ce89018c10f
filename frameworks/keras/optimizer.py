"""Optimizers of Keras 3 on PyTorch that average gradients over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import torch
from polyhvd.torch.base import collectives

from polyhvd.errors import InvalidArgumentError
from polyhvd.runtime import current
from polyhvd.training import passes
from polyhvd.training.drift import DriftCheck, shapes_of
from polyhvd.training.keras.optimizers import (
    Wrapped,
    is_distributed,
    present,
    reduced_first,
    replace,
    sharing_state,
    with_all_variables,
)
from polyhvd.training.keras.weights import DRIFT_REMEDY, hyperparameters_of, path_of, values_of
from polyhvd.training.options import Options
from polyhvd.training.reducer import Exchange, GradientReducer, keras_layers

__all__ = ["accept_device", "distribute"]

Tensor = torch.Tensor


def accept_device(where: str, **devices: str) -> None:
    """Take Horovod's ``device_dense`` and ``device_sparse``, where the host is meant.

    Args:
        where: what takes them.
        devices: by name.

    Raises:
        InvalidArgumentError: another device is meant.
    """
    for name, device in devices.items():
        if device and "cpu" not in device.lower():
            raise InvalidArgumentError(
                f"{where}({name}={device!r}): collectives run on the host; leave it at ''"
            )


class _Exchange(Exchange[Tensor]):
    """Gradients where they lie, unless several lie there, or one has holes."""

    whole_steps = True
    scales_local_sums = True

    def __init__(self) -> None:
        super().__init__(collectives)
        self._seen: set[int] = set()  # memory that a gradient of this step has

    def begin(self) -> None:
        """Forget the last step."""
        self._seen.clear()

    def dense(self, gradient: Tensor) -> Tensor:
        """The gradient, dense and in memory that no other one has: it is reduced where it lies."""
        dense = gradient.to_dense() if gradient.layout is not torch.strided else gradient
        storage = dense.untyped_storage().data_ptr()
        if storage in self._seen or not dense.is_contiguous():
            dense = dense.clone(memory_format=torch.contiguous_format)
        self._seen.add(storage)
        return dense

    def zeros(self, source: Any) -> Tensor:
        """Like a variable of Keras."""
        return torch.zeros_like(source.value, requires_grad=False)

    def transposed(self, tensor: Tensor, axes: Sequence[int]) -> Tensor:
        """A copy in separate memory: it is reduced there."""
        return tensor.permute(*axes).contiguous()

    @torch.compiler.disable
    def with_overflow_of(self, gradient: Tensor, others: Sequence[Tensor]) -> Tensor:
        """Return the gradient, or infinity (NaN for zero) in each element if another one is not finite."""
        are_finite = all(bool(torch.as_tensor(other).to_dense().isfinite().all()) for other in others)
        return gradient if are_finite else torch.as_tensor(gradient) * float("inf")

    def name_of(self, source: Any) -> str:
        """Return the path of a variable of Keras."""
        return path_of(source)

    def marker(self, like: Tensor, mark: int) -> Tensor:
        """A new tensor."""
        return like.new_empty((0, mark))

    def put(self, key: Any, gradient: Tensor, reduced: Tensor) -> Tensor:
        """The reduced gradient itself."""
        return reduced


@torch.compiler.disable
def _reduced(
    reducer: GradientReducer[Tensor],
    drift: DriftCheck,
    gradients: Sequence[Any],
    sources: Sequence[Any] | None,
    optimizer: Any,
) -> list[Any]:
    """The reduced gradients, None where there was none; operations of torch.compile end before it.

    On a rank outside of the process set they stay what they are.
    """
    if not reducer.takes_part():
        return list(gradients)
    if drift.is_due() and sources is not None:
        local = reducer.are_local(sources)
        if reducer.options.mapping is None:
            values = hyperparameters_of(optimizer, sources, local)
            drift.begin(reducer.prefix, values_of(sources, local), values)
        else:
            shared = [source for source, stays in zip(sources, local, strict=True) if not stays]
            drift.begin(reducer.prefix, reducer.mapped_values(map(path_of, shared), shared))
    elif sources is not None and drift.is_first:
        drift.begin(reducer.prefix, shapes_of(values_of(sources, reducer.are_local(sources))))
        drift.finish()
    given = {i: torch.as_tensor(g).detach() for i, g in enumerate(gradients) if g is not None}
    reduced = reducer.reduce(given, sources)
    drift.finish()
    return [reduced.get(i) for i in range(len(gradients))]


class _Passes:
    """Adds up the gradients of several calls."""

    def __init__(self, options: Options) -> None:
        self.number = options.backward_passes_per_step
        self._average = options.average_aggregated_gradients
        self._count = 0
        self._sums: dict[Any, Tensor] = {}  # by variable, or by position if variables are unknown
        passes.register(self)

    def passes_held(self) -> int:
        """See :class:`polyhvd.training.passes.CountedPasses`."""
        return self.number if self._count else 0

    def drop_passes(self) -> None:
        """Forget the calls since the last step."""
        self._count, self._sums = 0, {}

    def add(self, gradients: Sequence[Any], sources: Sequence[Any] | None) -> list[Any] | None:
        """The totals of these variables, in the last call of a step."""
        self._count += 1
        keys = range(len(gradients)) if sources is None else [id(source) for source in sources]
        for key, gradient in zip(keys, gradients, strict=True):
            if gradient is not None and key in self._sums:
                self._sums[key] += gradient
            elif gradient is not None:
                self._sums[key] = gradient.clone()
        if self._count < self.number:
            return None
        self._count = 0
        totals = [self._sums.pop(key, None) for key in keys]
        return (
            [None if total is None else total / self.number for total in totals] if self._average else totals
        )


class _Distributed(Wrapped):
    """The base class that is put before the wrapped optimizer's own class."""

    _polyhvd: GradientReducer[Tensor]
    _polyhvd_drift: DriftCheck
    _polyhvd_passes: _Passes

    def register_local_var(self, var: Any) -> None:
        """Leave the gradient of a variable on its rank."""
        self._polyhvd.keep_local(var)

    def polyhvd_step(
        self,
        gradients: Iterable[Any],
        variables: Iterable[Any] | None,
        apply: Callable[[list[Any]], Any],
        *,
        is_scaled: bool = False,
    ) -> Any:
        """See the base class."""
        current.world()
        parts = list(gradients)
        if self._polyhvd_reduced:
            return apply(parts)
        sources = None if variables is None else list(variables)
        if sources is not None and (is_scaled or hasattr(self, "inner_optimizer")):
            parts = self._polyhvd.share_overflow(parts, sources)
        if self._polyhvd_passes.number == 1:
            return apply(_reduced(self._polyhvd, self._polyhvd_drift, parts, sources, self))
        totals = self._polyhvd_passes.add(parts, sources)
        if totals is None:
            return None
        return apply(_reduced(self._polyhvd, self._polyhvd_drift, totals, sources, self))

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """Reduce, then let the optimizer clip and apply."""
        own = None if trainable_variables is None else list(trainable_variables)
        grads, variables = with_all_variables(self, list(grads), own)
        known = getattr(self, "_trainable_variables", None) if variables is None else variables
        base_apply = super().apply  # type: ignore[misc]

        def apply(reduced: list[Any]) -> Any:
            if variables is own or variables is None:
                return base_apply(reduced, own)
            return base_apply(*present(reduced, variables))

        return self.polyhvd_step(grads, known or None, apply)


def _build_nothing(optimizer: Any, variables: list[Any] | None) -> None:
    """Variables can be made at any time."""


def distribute(
    optimizer: Any,
    name: str | None,
    device_dense: str,
    device_sparse: str,
    options: Options,
    local_layers: Any = None,
) -> Any:
    """An optimizer that shares the state of this one and reduces first; see the wrappers for the arguments.

    Raises:
        InvalidArgumentError: an argument cannot be used.
    """
    accept_device("DistributedOptimizer", device_dense=device_dense, device_sparse=device_sparse)
    if is_distributed(optimizer):
        raise InvalidArgumentError("the optimizer is distributed already; wrap it once")
    if not (hasattr(optimizer, "stateless_apply") and hasattr(optimizer, "apply")):
        raise InvalidArgumentError(
            f"DistributedOptimizer expects an optimizer of Keras 3, found {type(optimizer).__name__}"
        )
    replace(keras.optimizers.LossScaleOptimizer, "apply", lambda apply: reduced_first(apply, _build_nothing))
    reducer = GradientReducer(
        _Exchange(),
        prefix=name or f"Distributed{type(optimizer).__name__}",
        options=options,
        local_layers=keras_layers(local_layers, "register_local_var() of the optimizer"),
    )
    attributes = {
        "_polyhvd": reducer,
        "_polyhvd_drift": DriftCheck(
            "DistributedOptimizer", options.process_set, DRIFT_REMEDY, step=2, mapping=options.mapping
        ),
        "_polyhvd_passes": _Passes(options),
    }
    return sharing_state(optimizer, _Distributed, attributes)
