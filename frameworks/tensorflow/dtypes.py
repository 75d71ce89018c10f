"""Which types of tensors can be reduced, and which only moved."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf
from polyhvd.tensorflow.errors import UnsupportedTypeError

from polyhvd.adapter import OpKind

__all__ = ["check"]

_UNSIGNED = frozenset({tf.uint16, tf.uint32, tf.uint64})
_REDUCIBLE = (
    tf.uint8,
    tf.int8,
    tf.int16,
    tf.int32,
    tf.int64,
    tf.float16,
    tf.bfloat16,
    tf.float32,
    tf.float64,
    tf.bool,
)
_REDUCTIONS = frozenset({OpKind.ALLREDUCE, OpKind.REDUCESCATTER})


def check(kind: OpKind, tensors: Iterable[Any]) -> None:
    """Refuse tensors of types that an operation does not know, alike in eager code and in graphs."""
    verb = kind.name.lower()
    for dtype in dict.fromkeys(tensor.dtype.base_dtype for tensor in tensors):
        if dtype in _REDUCIBLE or (dtype in _UNSIGNED and kind not in _REDUCTIONS):
            continue
        if dtype in _UNSIGNED:
            raise UnsupportedTypeError(
                None,
                None,
                f"{verb}: a tensor of {dtype.name} can be gathered, broadcast and exchanged, but not "
                "reduced; tf.cast() it to int32 or int64",
            )
        names = [known.name for known in _REDUCIBLE]
        raise UnsupportedTypeError(
            None,
            None,
            f"{verb}: a tensor of {dtype.name} cannot be communicated; tf.cast() it to one of "
            f"{', '.join(names[:-1])} or {names[-1]}",
        )
