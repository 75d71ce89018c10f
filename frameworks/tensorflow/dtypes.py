"""Which types of tensors can be communicated."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf
from polyhvd.tensorflow.errors import UnsupportedTypeError

from polyhvd.collectives.adapter import OpKind

__all__ = ["check"]

_KNOWN = (
    tf.uint8,
    tf.uint16,
    tf.uint32,
    tf.uint64,
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


def check(kind: OpKind, tensors: Iterable[Any]) -> None:
    """Refuse tensors of types that no operation knows, in eager code and in graphs."""
    verb = kind.name.lower()
    for dtype in dict.fromkeys(tensor.dtype.base_dtype for tensor in tensors):
        if dtype in _KNOWN:
            continue
        names = [known.name for known in _KNOWN]
        raise UnsupportedTypeError(
            None,
            None,
            f"{verb}: a tensor of {dtype.name} cannot be communicated; tf.cast() it to one of "
            f"{', '.join(names[:-1])} or {names[-1]}",
        )
