"""Collectives in ``tf.vectorized_map``: each becomes one on the rows of all iterations together.

TensorFlow's own fallback, a loop for each collective, would run the loops in an order that differs between
ranks.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from polyhvd.tensorflow.errors import invalid

from polyhvd.collectives.adapter import ReduceOp

__all__ = []  # TensorFlow finds them by the names of ops

_INSTEAD = "; call it outside of tf.vectorized_map(), on all rows, or use tf.map_fn()"


def _iterations_second(tensor: tf.Tensor) -> tf.Tensor:
    """The iterations' tensors, stacked along the first dimension, along the second one; and back."""
    rank = tf.rank(tensor)
    return tf.transpose(tensor, tf.concat([[1, 0], tf.range(2, rank)], axis=0))


def _pfor() -> Any:
    """The module. Its package has a function of that name, too, in TensorFlow 2.13."""
    return importlib.import_module("tensorflow.python.ops.parallel_for.pfor")


def _run(pfor_input: Any, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    pfor = _pfor()
    dtypes = [output.dtype for output in pfor_input.outputs]
    created = pfor._create_op(pfor_input.op_type, list(inputs), dtypes, attrs=pfor_input.op.node_def.attr)
    return list(created.outputs)


def _stacked(pfor_input: Any) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """The tensors of all iterations, and what stands after them: the generation, the same for all."""
    count = len(pfor_input.outputs)
    pfor_input.stack_inputs(range(count))
    rest = [pfor_input.unstacked_input(i) for i in range(count, pfor_input.num_inputs)]
    return [pfor_input.stacked_input(i) for i in range(count)], rest


def _name(pfor_input: Any) -> str:
    verb = pfor_input.op_type.removeprefix("Polyhvd").lower()
    return f"{verb} {pfor_input.get_attr('tensor_name').decode()!r}"


def _elementwise(pfor_input: Any, wrap: Callable[..., Any]) -> list[Any]:
    """Every element by itself, so that stacking changes nothing."""
    is_reduction = pfor_input.op_type == "PolyhvdAllreduce"
    if is_reduction and pfor_input.get_attr("reduce_op") == ReduceOp.Adasum:
        raise invalid(f"{_name(pfor_input)} with op=Adasum depends on the tensor as a whole{_INSTEAD}")
    tensors, rest = _stacked(pfor_input)
    return [wrap(output, True) for output in _run(pfor_input, [*tensors, *rest])]


def _by_rows(pfor_input: Any, wrap: Callable[..., Any]) -> list[Any]:
    """Rows of each iteration are exchanged or concatenated in the same way."""
    tensors, rest = _stacked(pfor_input)
    inputs = [*map(_iterations_second, tensors), *rest]
    return [wrap(_iterations_second(output), True) for output in _run(pfor_input, inputs)]


def _exchanged(pfor_input: Any, wrap: Callable[..., Any]) -> list[Any]:
    if pfor_input.input(1).is_stacked:
        raise invalid(f"{_name(pfor_input)}: splits that differ between iterations{_INSTEAD}")
    tensor = _iterations_second(pfor_input.stacked_input(0))
    rest = [pfor_input.unstacked_input(i) for i in range(1, pfor_input.num_inputs)]
    output, received = _run(pfor_input, [tensor, *rest])
    return [wrap(_iterations_second(output), True), wrap(received, False)]


def _generation(pfor_input: Any, wrap: Callable[..., Any]) -> list[Any]:
    """One for all iterations."""
    return [wrap(output, False) for output in _run(pfor_input, [])]


_CONVERTERS = {
    "PolyhvdGeneration": _generation,
    "PolyhvdAllreduce": _elementwise,
    "PolyhvdBroadcast": _elementwise,
    "PolyhvdAllgather": _by_rows,
    "PolyhvdReducescatter": _by_rows,
    "PolyhvdAlltoall": _exchanged,
}


def _register() -> None:
    pfor = _pfor()
    for op_type, convert in _CONVERTERS.items():
        pfor.RegisterPFor(op_type)(lambda pfor_input, convert=convert: convert(pfor_input, pfor.wrap))


_register()
