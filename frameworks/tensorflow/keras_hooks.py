"""Keras's private hooks for a wrapped optimizer, for which it has no public interface.

Functions of Keras are replaced by ones that ask first whether the optimizer is ours; for others they
do what they did. If a version of Keras lacks them, the consequences are: with ``jit_compile`` a clear
error at the first step instead of a step that is not compiled; and a LossScaleOptimizer around ours,
instead of in it, takes the ranks apart when one of them overflows.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import tensorflow as tf

from polyhvd.training.keras.optimizers import is_distributed, reduced_first, replace

__all__ = ["build_before_branching", "teach_keras_2", "teach_keras_3"]


def build_before_branching(optimizer: Any, variables: list[Any] | None) -> None:
    """Make the variables of an optimizer of Keras 3, which cannot be done in a branch of a graph."""
    if variables and not optimizer.built:
        with tf.init_scope():
            optimizer.build(variables)
        optimizer.built = True


def _without_xla(supports_jit: Any) -> Any:
    """Return a ``model_supports_jit`` that is false if a model calls collectives: XLA cannot compile it."""

    @functools.wraps(supports_jit)
    def model_supports_jit(model: Any) -> bool:
        optimizer = getattr(model, "optimizer", None)
        ours = is_distributed(optimizer) or is_distributed(getattr(optimizer, "inner_optimizer", None))
        return not ours and bool(supports_jit(model))

    return model_supports_jit


def _pairs_reduced_first(apply_gradients: Any) -> Any:
    """:func:`reduced_first` for ``apply_gradients`` in Keras 2."""

    @functools.wraps(apply_gradients)
    def reduce_and_apply(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        inner = self.inner_optimizer
        if not is_distributed(inner):
            return apply_gradients(self, grads_and_vars, *args, **kwargs)
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]

        def apply_reduced(reduced: Any) -> Any:
            with inner.polyhvd_already_reduced():
                return apply_gradients(self, list(zip(reduced, variables, strict=True)), *args, **kwargs)

        gradients = [gradient for gradient, _ in pairs]
        return inner.polyhvd_step(gradients, variables, apply_reduced, is_scaled=True)

    return reduce_and_apply


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def teach_keras_3() -> None:
    """Replace what is to be replaced in ``keras``, once."""
    from keras.optimizers import LossScaleOptimizer

    replace(_module("keras.src.trainers.trainer"), "model_supports_jit", _without_xla)
    replace(LossScaleOptimizer, "apply", lambda apply: reduced_first(apply, build_before_branching))


def teach_keras_2(package: str) -> None:
    """The same in ``keras`` before its version 3, or in ``tf_keras``."""
    module = _module(f"{package}.src.mixed_precision.loss_scale_optimizer")
    for name in ("LossScaleOptimizer", "LossScaleOptimizerV3"):
        replace(getattr(module, name, None), "apply_gradients", _pairs_reduced_first)
