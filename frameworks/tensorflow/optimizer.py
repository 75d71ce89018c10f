"""Optimizers that average gradients over the ranks: Keras 3, Keras 2 (tf_keras) and tf.compat.v1.

Each becomes an instance of a subclass of its own class, made on the fly, that shares its state with
the original: ``isinstance``, ``get_config``, ``from_config`` and saved models see nothing new.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from polyhvd.tensorflow.compression import Compression
from polyhvd.tensorflow.errors import invalid
from polyhvd.tensorflow.gradients import Reduction, accept_device, only_default
from polyhvd.tensorflow.keras_hooks import teach_keras_2, teach_keras_3
from polyhvd.tensorflow.names import do_not_convert

from polyhvd import context
from polyhvd.adapter import ReduceOp
from polyhvd.compression import Compressor
from polyhvd.process_sets import ProcessSet, global_process_set

__all__ = ["DistributedOptimizer", "is_distributed", "wrap"]


class _Distributed:
    """Marks a wrapped optimizer."""

    _polyhvd: Reduction
    _polyhvd_reduced = False  # inside already_reduced()

    def polyhvd_reduce(self, gradients: Iterable[Any], variables: Iterable[Any] | None) -> list[Any]:
        """The gradients over the ranks."""
        context.engine()
        gradients = list(gradients)
        if self._polyhvd_reduced:
            return gradients
        return self._polyhvd(gradients, None if variables is None else list(variables))

    @contextmanager
    def polyhvd_already_reduced(self) -> Iterator[None]:
        """Take gradients as they come: somebody around this optimizer has reduced them."""
        object.__setattr__(self, "_polyhvd_reduced", True)
        try:
            yield
        finally:
            object.__setattr__(self, "_polyhvd_reduced", False)


class _Keras3(_Distributed):
    @do_not_convert
    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """Reduce, then let the optimizer clip and apply."""
        variables = None if trainable_variables is None else list(trainable_variables)
        known = getattr(self, "_trainable_variables", None) if variables is None else variables
        reduced = self.polyhvd_reduce(grads, known or None)
        return super().apply(reduced, variables)  # type: ignore[misc]


class _Keras2(_Distributed):
    @do_not_convert
    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Reduce, then let the optimizer clip and apply."""
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]
        reduced = self.polyhvd_reduce([gradient for gradient, _ in pairs], variables)
        return super().apply_gradients(  # type: ignore[misc]
            list(zip(reduced, variables, strict=True)), *args, **kwargs
        )


class _Version1(_Distributed):
    @do_not_convert
    def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's gradients, reduced: what follows may clip them."""
        pairs = super().compute_gradients(*args, **kwargs)  # type: ignore[misc]
        variables = [variable for _, variable in pairs]
        reduced = self.polyhvd_reduce([gradient for gradient, _ in pairs], variables)
        return list(zip(reduced, variables, strict=True))


def is_distributed(optimizer: object) -> bool:
    """Whether an optimizer is one of ours."""
    return isinstance(optimizer, _Distributed)


def _mixin_for(optimizer: object) -> type[_Distributed]:
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return _Version1
    if hasattr(optimizer, "stateless_apply") and hasattr(optimizer, "apply"):
        import keras

        if keras.backend.backend() != "tensorflow":
            raise invalid(
                f"DistributedOptimizer: Keras runs on {keras.backend.backend()}; set KERAS_BACKEND=tensorflow"
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


def wrap(optimizer: Any, reduction: Reduction) -> Any:
    """An optimizer that shares the state of this one and reduces first."""
    if is_distributed(optimizer):
        raise invalid("the optimizer is distributed already; wrap it once")
    base = type(optimizer)
    # Under the name of its base, so that a saved model names the base, which everybody can load.
    names = {"_polyhvd": reduction, "__module__": base.__module__, "__qualname__": base.__qualname__}
    wrapped = object.__new__(type(base.__name__, (_mixin_for(optimizer), base), names))
    object.__setattr__(wrapped, "__dict__", optimizer.__dict__)
    return wrapped


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = ReduceOp.Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Wrap an optimizer so that it applies gradients reduced over the ranks.

    Args:
        optimizer: of Keras 3, Keras 2 or tf.compat.v1. The result shares its state.
        name: begins the names of the operations; the default is the optimizer's class.
        use_locking, average_aggregated_gradients: accepted for Horovod's sake.
        device_dense, device_sparse: likewise; collectives run on the host.
        compression: of the gradients on the wire.
        sparse_as_dense: reduce tf.IndexedSlices (of embeddings) as dense tensors; else their rows are
            gathered, and come back with each index once.
        backward_passes_per_step: 1.
        op: Average, Sum or Adasum.
        gradient_predivide_factor: splits the division of an average around the sum.
        groups: how to split the gradients of a step into operations: into this many, or one for each list
            of variables and one for each variable in none; None: one for all.
        num_groups: the number alone.
        process_set: the ranks that take part.
        scale_local_gradients: divide gradients that stay local by the number of ranks.

    Raises:
        InvalidArgumentError: an argument that is not supported, or later, in a function that XLA
            compiles: compile the model with ``jit_compile=False``.

    Example::

        model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3 * hvd.size())), loss)
    """
    accept_device("DistributedOptimizer", device_dense=device_dense, device_sparse=device_sparse)
    only_default(
        "DistributedOptimizer",
        backward_passes_per_step=(backward_passes_per_step, 1),
    )
    reduction = Reduction(
        prefix=name or f"Distributed{type(optimizer).__name__}",
        compression=compression,
        op=op,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    return wrap(optimizer, reduction)
