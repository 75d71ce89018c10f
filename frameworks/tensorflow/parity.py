"""Variables of TensorFlow, for jobs and comparisons with other frameworks.

Models of Keras, which has other backends, too, are read in polyhvd/training/keras.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from polyhvd.errors import InvalidArgumentError
from polyhvd.training.layouts import Layout
from polyhvd.training.mapping import Weight

__all__ = ["to_numpy", "weights_of"]


def weights_of(model: Any) -> list[Weight]:
    """The variables of a module, or a list of variables; they lie in common form.

    Args:
        model: a ``tf.Module``, or variables in an order that is the same on every rank.

    Raises:
        InvalidArgumentError: there are none.
    """
    variables: Iterable[tf.Variable] = model.variables if isinstance(model, tf.Module) else model
    found = [_weight(variable) for variable in variables]
    if not found:
        raise InvalidArgumentError(f"{type(model).__name__} has no variables; pass the model that is trained")
    return found


def to_numpy(tensor: Any) -> Any:
    """A copy of the values of an eager tensor, of slices with all rows.

    Raises:
        InvalidArgumentError: the tensor is one of a graph, and has no values yet.
    """
    if isinstance(tensor, tf.IndexedSlices):
        tensor = tf.convert_to_tensor(tensor)
    if not hasattr(tensor, "numpy"):
        raise InvalidArgumentError(
            f"{tensor.name} has no values while its function is traced; compare tensors outside of "
            "tf.function, or in a model that is compiled with run_eagerly=True"
        )
    return tensor.numpy().copy()


def _weight(variable: tf.Variable) -> Weight:
    return Weight(
        name=variable.name,
        role="",
        source=variable,
        layout=Layout(tuple(variable.shape)),
        dtype=variable.dtype.name,
        trainable=variable.trainable,
        read=lambda: variable.numpy().copy(),
        write=variable.assign,
    )
