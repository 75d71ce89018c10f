"""Compression for tensors, eager and in graphs, and the variables in which compressors keep state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import tensorflow as tf
from polyhvd.tensorflow.ops import adapter

from polyhvd.training.compression import Compression as _Compression
from polyhvd.training.compression import CompressorState

__all__ = ["Compression", "VariableState"]

Compression = _Compression(adapter)


class VariableState(CompressorState):
    """The state of a compressor, in variables: they outlive the function that is being traced."""

    def __init__(self) -> None:
        super().__init__()
        self._loaded: dict[str, Any] = {}  # until the variables are made
        self._writes: list[Any] = []  # of the graph that is being made

    def get(self, key: str, initial: Callable[[], Any]) -> tf.Tensor:
        """The value of a variable, which is made where there is none, from ``initial()``."""
        if key not in self._tensors:
            with tf.init_scope():
                value = self._loaded.pop(key, None)
                self._tensors[key] = _variable(initial() if value is None else value)
        return tf.convert_to_tensor(self._tensors[key])

    def set(self, key: str, tensor: Any) -> None:
        """Assign to the variable; in a graph, what is sent or returned afterwards waits for that."""
        if key not in self._tensors:
            shape, dtype = tensor.shape, tensor.dtype
            self.get(key, lambda: tf.zeros(shape, dtype))
        write = self._tensors[key].assign(tensor, read_value=False)
        if not tf.executing_eagerly():
            self._writes.append(write)

    def items(self) -> dict[str, Any]:
        """The values, as NumPy arrays."""
        values = {key: np.array(variable.numpy()) for key, variable in self._tensors.items()}
        return values | self._loaded

    def replace(self, tensors: Mapping[str, Any]) -> None:
        """Assign these; variables that are in none of them, and may be part of a graph, become zero."""
        self._loaded = {key: value for key, value in tensors.items() if key not in self._tensors}
        for key, variable in self._tensors.items():
            value = tensors.get(key)
            variable.assign(tf.zeros_like(variable) if value is None else value)

    def variables(self) -> dict[str, Any]:
        """The variables, by key."""
        return dict(self._tensors)

    @property
    def has_writes(self) -> bool:
        """Whether something has been assigned in a graph since the last :meth:`after_writes`."""
        return bool(self._writes)

    def after_writes(self) -> AbstractContextManager[Any]:
        """Let operations of the graph that are made within wait for what was assigned."""
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        writes = [write for write in self._writes if write.graph is graph]
        self._writes = []
        return tf.control_dependencies(writes) if writes else nullcontext()


def _variable(initial: Any) -> Any:
    if tf.compat.v1.executing_eagerly_outside_functions():
        return tf.Variable(initial, trainable=False)
    return tf.compat.v1.Variable(
        initial, trainable=False, use_resource=True, collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES]
    )
