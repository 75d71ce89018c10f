"""Optimizers that average gradients over the ranks: Keras 3, Keras 2 (tf_keras) and tf.compat.v1.

Each becomes an instance of a subclass of its class, made on the fly, that shares its state with
the original: ``isinstance``, ``get_config``, ``from_config`` and saved models see nothing new.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import tensorflow as tf
from polyhvd.tensorflow.drift import DriftOp
from polyhvd.tensorflow.errors import invalid
from polyhvd.tensorflow.gradients import accept_device
from polyhvd.tensorflow.keras_hooks import build_before_branching, teach_keras_2, teach_keras_3
from polyhvd.tensorflow.names import do_not_convert
from polyhvd.tensorflow.passes import Passes, only_effects
from polyhvd.tensorflow.reducer import TensorflowReducer

from polyhvd.runtime import current
from polyhvd.training.keras.optimizers import (
    Wrapped,
    is_distributed,
    present,
    sharing_state,
    with_all_variables,
)
from polyhvd.training.options import Options

__all__ = ["distribute"]


class _Distributed(Wrapped):
    """The base class of the optimizers."""

    _polyhvd: TensorflowReducer
    _polyhvd_drift: DriftOp
    _polyhvd_new_passes: Callable[[], Passes]
    _polyhvd_known_passes: WeakKeyDictionary[Any, Passes]

    @property
    def polyhvd_passes(self) -> Passes:
        """The passes of this optimizer; one that is made of its class and config counts for itself."""
        known = self._polyhvd_known_passes
        if self not in known:
            known[self] = type(self)._polyhvd_new_passes()
        return known[self]

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
        """Call ``apply`` with the gradients over the ranks, if this pass completes a step.

        Returns:
            What it returned; of several passes in a step nothing of interest.
        """
        current.world()
        gradients = list(gradients)
        if self._polyhvd_reduced:
            return apply(gradients)
        sources = None if variables is None else list(variables)
        if sources is not None and (is_scaled or hasattr(self, "inner_optimizer")):
            gradients = self._polyhvd.share_overflow(gradients, sources)
        if self.polyhvd_passes.number == 1:
            with self._polyhvd_drift.before(sources, self):
                reduced = self._polyhvd(gradients, sources)
            return apply(reduced)
        prefix = self._polyhvd.name_of_step()

        def complete(totals: list[Any]) -> Any:
            with self._polyhvd_drift.before(sources, self):
                reduced = self._polyhvd(totals, sources, prefix)
            return only_effects(apply(reduced))

        return self.polyhvd_passes.run(gradients, sources, complete, only_effects)[0]


class _Keras3(_Distributed):
    @do_not_convert
    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """Reduce, then let the optimizer clip and apply."""
        own = None if trainable_variables is None else list(trainable_variables)
        grads, variables = with_all_variables(self, list(grads), own)
        if self.polyhvd_passes.number > 1:
            build_before_branching(self, variables)
        known = getattr(self, "_trainable_variables", None) if variables is None else variables
        base_apply = super().apply  # type: ignore[misc]

        def apply(reduced: list[Any]) -> Any:
            if variables is own or variables is None:
                return base_apply(reduced, own)
            return base_apply(*present(reduced, variables))

        return self.polyhvd_step(grads, known or None, apply)


class _Keras2(_Distributed):
    @do_not_convert
    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Reduce, then let the optimizer clip and apply."""
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]
        base_apply = super().apply_gradients  # type: ignore[misc]

        def apply(reduced: list[Any]) -> Any:
            return base_apply(list(zip(reduced, variables, strict=True)), *args, **kwargs)

        return self.polyhvd_step([gradient for gradient, _ in pairs], variables, apply)


class _Version1(_Distributed):
    #: Of the last compute_gradients(): whether its pass completes a step.
    _polyhvd_complete: Any = None

    @do_not_convert
    def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's gradients, reduced: what follows may clip them.

        Of several passes in a step, those before the last return this rank's own.
        """
        pairs = super().compute_gradients(*args, **kwargs)  # type: ignore[misc]
        current.world()
        variables = [variable for _, variable in pairs]
        gradients = [gradient for gradient, _ in pairs]
        passes = self.polyhvd_passes
        if passes.number == 1:
            return list(zip(self._polyhvd(gradients, variables), variables, strict=True))
        there = [i for i, gradient in enumerate(gradients) if gradient is not None]
        prefix = self._polyhvd.name_of_step()

        def reduce(totals: list[Any]) -> list[Any]:
            reduced = self._polyhvd(totals, variables, prefix)
            return [_identity(reduced[i]) for i in there]

        results, complete = passes.run(
            gradients, variables, reduce, lambda parts: [_identity(parts[i]) for i in there]
        )
        object.__setattr__(self, "_polyhvd_complete", complete)
        for i, value in zip(there, results, strict=True):
            gradients[i] = value
        return list(zip(gradients, variables, strict=True))

    @do_not_convert
    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: Any = None) -> Any:
        """Apply the gradients in the last pass of a step; ``global_step`` counts passes, as in Horovod."""
        pairs, complete = list(grads_and_vars), self._polyhvd_complete
        base_apply = super().apply_gradients  # type: ignore[misc]
        if complete is None:
            return base_apply(pairs, global_step=global_step, name=name)

        def apply() -> tf.Tensor:
            return only_effects(base_apply(pairs, global_step=global_step, name=name))

        def skip() -> tf.Tensor:
            return only_effects([] if global_step is None else global_step.assign_add(1, read_value=False))

        if tf.executing_eagerly():
            return apply() if complete else skip()
        return tf.group(tf.cond(complete, apply, skip))


def _identity(gradient: Any) -> Any:
    return tf.nest.map_structure(tf.identity, gradient, expand_composites=True)


def _mixin_for(optimizer: object) -> type[_Distributed]:
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return _Version1
    if hasattr(optimizer, "stateless_apply") and hasattr(optimizer, "apply"):
        import keras

        if keras.backend.backend() != "tensorflow":
            raise invalid(
                f"DistributedOptimizer: Keras runs on {keras.backend.backend()}, and this is the one of "
                "TensorFlow; set KERAS_BACKEND=tensorflow, or import polyhvd.keras"
            )
        teach_keras_3()
        return _Keras3
    if hasattr(optimizer, "apply_gradients"):
        for package in {cls.__module__.partition(".")[0] for cls in type(optimizer).__mro__}:
            teach_keras_2(package)
        return _Keras2
    raise invalid(
        "DistributedOptimizer expects an optimizer of Keras or tf.compat.v1, found "
        f"{type(optimizer).__name__}"
    )


@do_not_convert
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
        InvalidArgumentError: it is no such optimizer, or distributed already, or another device is meant.
    """
    accept_device("DistributedOptimizer", device_dense=device_dense, device_sparse=device_sparse)
    reducer = TensorflowReducer(name or f"Distributed{type(optimizer).__name__}", options, local_layers)
    if is_distributed(optimizer):
        raise invalid("the optimizer is distributed already; wrap it once")
    attributes = {
        "_polyhvd": reducer,
        "_polyhvd_drift": DriftOp(reducer),
        "_polyhvd_new_passes": staticmethod(functools.partial(Passes, options)),
        "_polyhvd_known_passes": WeakKeyDictionary(),
    }
    return sharing_state(optimizer, _mixin_for(optimizer), attributes)
