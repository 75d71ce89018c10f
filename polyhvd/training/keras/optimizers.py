"""Wraps an optimizer of Keras on any of its backends: no tensors are touched here."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from polyhvd.training.compression import Compressor

__all__ = [
    "Wrapped",
    "is_distributed",
    "model_loader",
    "present",
    "reduced_first",
    "replace",
    "sharing_state",
    "with_all_variables",
]


class Wrapped:
    """Marks an optimizer that reduces its gradients. Mixed into a subclass of the optimizer's class."""

    _polyhvd_reduced = False  # inside polyhvd_already_reduced()

    #: Of gradients, variables or None, and a function: calls it with the gradients over the ranks, if this
    #: pass completes a step. ``is_scaled``: they are of a scaled loss. Subclasses have it as a method.
    polyhvd_step: Callable[..., Any]

    @contextmanager
    def polyhvd_already_reduced(self) -> Iterator[None]:
        """Use gradients as given: a wrapper of this optimizer has reduced them."""
        object.__setattr__(self, "_polyhvd_reduced", True)
        try:
            yield
        finally:
            object.__setattr__(self, "_polyhvd_reduced", False)


def is_distributed(optimizer: object) -> bool:
    """Return whether an optimizer is one of ours."""
    return isinstance(optimizer, Wrapped)


def sharing_state(optimizer: Any, mixin: type[Wrapped], attributes: dict[str, Any]) -> Any:
    """An instance of a subclass of the optimizer's class, with the same state.

    Under the name of its base, so that a saved model names the base, which needs no polyhvd to load.
    """
    base = type(optimizer)
    names = {**attributes, "__module__": base.__module__, "__qualname__": base.__qualname__}
    wrapped: Any = object.__new__(type(base.__name__, (mixin, base), names))
    object.__setattr__(wrapped, "__dict__", optimizer.__dict__)
    return wrapped


def with_all_variables(
    optimizer: Any, gradients: list[Any], variables: list[Any] | None
) -> tuple[list[Any], list[Any] | None]:
    """Gradients of all variables with which an optimizer of Keras 3 was built; None where a call has none.

    Programs leave out variables without a gradient. On other ranks these may be different ones, and gradients
    are paired by their positions.

    Args:
        optimizer: of Keras 3.
        gradients: of the call.
        variables: of the call; None: all.

    Returns:
        Gradients and variables; those of the call if it has all variables, or the optimizer was built with
        others.
    """
    known = getattr(optimizer, "_trainable_variables", None)
    if not variables or not known or len(variables) != len(gradients):
        return gradients, variables
    if len(variables) == len(known) and all(map(operator.is_, variables, known)):
        return gradients, variables
    key_of = optimizer._var_key
    given = {key_of(variable): gradient for variable, gradient in zip(variables, gradients, strict=True)}
    everything = [key_of(variable) for variable in known]
    if len(given) < len(variables) or not given.keys() <= set(everything):
        return gradients, variables
    return list(map(given.get, everything)), list(known)


def present(gradients: list[Any], variables: list[Any]) -> tuple[list[Any], list[Any]]:
    """The gradients that there are, and their variables; if there are none, all, which Keras refuses."""
    pairs = [pair for pair in zip(gradients, variables, strict=True) if pair[0] is not None]
    return ([pair[0] for pair in pairs], [pair[1] for pair in pairs]) if pairs else (gradients, variables)


def reduced_first(apply: Any, build: Callable[[Any, list[Any] | None], None]) -> Any:
    """Return a ``LossScaleOptimizer.apply`` for Keras 3 that reduces before it looks for overflow.

    Keras's method calls the inner optimizer only on ranks without overflow: they would wait for the others.

    Args:
        apply: the method.
        build: called with the optimizer and its variables before anything else.
    """

    @functools.wraps(apply)
    def reduce_and_apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        inner = self.inner_optimizer
        if not is_distributed(inner):
            return apply(self, grads, trainable_variables)
        own = None if trainable_variables is None else list(trainable_variables)
        grads, variables = with_all_variables(self, list(grads), own)
        build(self, variables)

        def apply_reduced(reduced: Any) -> Any:
            with inner.polyhvd_already_reduced():
                if variables is own or variables is None:
                    return apply(self, reduced, own)
                return apply(self, *present(reduced, variables))

        known = getattr(self, "_trainable_variables", None) if variables is None else variables
        return inner.polyhvd_step(grads, known or None, apply_reduced, is_scaled=True)

    return reduce_and_apply


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Put ``make(original)`` in the place of a function of Keras, once; where there is none, do nothing."""
    original = getattr(owner, name, None)
    if original is None or getattr(original, "polyhvd", False):
        return
    replacement = make(original)
    replacement.polyhvd = True
    setattr(owner, name, replacement)


def model_loader(keras: Any, distribute: Callable[..., Any], none: Compressor) -> Callable[..., Any]:
    """``load_model`` for a Keras module.

    Args:
        keras: ``keras`` or ``tf.keras``.
        distribute: ``DistributedOptimizer``.
        none: ``Compression.none`` of the same framework.
    """

    def load_model(
        filepath: Any,
        custom_optimizers: Sequence[type] | None = None,
        custom_objects: dict[str, Any] | None = None,
        compression: Compressor = none,
        legacy_opts: bool = False,
    ) -> Any:
        """Load a saved model with its optimizer wrapped by ``DistributedOptimizer``, its state kept.

        Args:
            filepath: as of ``keras.models.load_model``; saved with a wrapped optimizer or a plain one.
            custom_optimizers: classes of optimizers that Keras does not know.
            custom_objects: other names that Keras does not know.
            compression: as of ``DistributedOptimizer``.
            legacy_opts: accepted for compatibility with Horovod.

        Raises:
            OSError, ValueError: as of ``keras.models.load_model``.
            InvalidArgumentError: ``compression`` cannot be used.

        Example::

            model = hvd.load_model("model.keras", compression=hvd.Compression.fp16)
        """
        names = {cls.__name__: cls for cls in custom_optimizers or ()}
        names.update(custom_objects or {})
        model = keras.models.load_model(filepath, custom_objects=names)
        optimizer = getattr(model, "optimizer", None)
        inner = getattr(optimizer, "inner_optimizer", None)
        if optimizer is None or is_distributed(optimizer) or is_distributed(inner):
            return model
        if inner is not None:
            optimizer.inner_optimizer = distribute(inner, compression=compression)
        else:
            model.optimizer = distribute(optimizer, compression=compression)
        if getattr(model, "jit_compile", False):
            model.jit_compile = False
        return model

    return load_model
