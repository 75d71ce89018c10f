"""How the collectives are called for TensorFlow; ``make verbs`` makes verbs.py of it."""

from __future__ import annotations

from dataclasses import replace

from polyhvd.collectives.table import PARAMETERS, Dialect, Parameter

__all__ = ["DIALECT"]

_GRADIENT = (
    "Differentiable for Average and Sum, where every rank runs the same backward. May be called eagerly and "
    "in ``tf.function``, where every collective is asynchronous."
)
_COPIES = _GRADIENT.replace("Differentiable for Average and Sum", "Differentiable")
_SLICES = (
    "Of tf.IndexedSlices, whose rows may differ in number, the result is tf.IndexedSlices with the rows of "
    "all ranks; scaled integers are added up first, and have each index once. An average of integers has "
    "floating-point numbers. Only Average and Sum are supported."
)
_DEVICE = (
    "accepted for compatibility with Horovod; collectives run on the host, and another device is refused."
)

DIALECT = Dialect(
    title="TensorFlow",
    module="polyhvd.tensorflow",
    tensor="tensor",
    type="tf.Tensor",
    given="tf.types.experimental.TensorLike",
    imports=(
        "import tensorflow as tf",
        "from polyhvd.tensorflow.compression import Compression",
        "from polyhvd.tensorflow.functions import functions",
        "from polyhvd.tensorflow.names import do_not_convert",
    ),
    example_import="import tensorflow as tf",
    ones="tf.ones",
    array="tf.constant",
    dtypes="float16, bfloat16, float32, float64, integers of 8 to 64 bits, or bool",
    lacks=frozenset(
        {
            *("allreduce_", "allreduce_async_", "grouped_allreduce_", "grouped_allreduce_async_"),
            *("broadcast_", "broadcast_async_"),
        }
    ),
    without=frozenset({"priority"}),
    async_without=frozenset({"exact_gradient"}),
    parameters=(
        Parameter("device_dense", "str", _DEVICE, '""'),
        Parameter("device_sparse", "str", _DEVICE, '""'),
        Parameter(
            "ignore_name_scope",
            "bool",
            "accepted for compatibility with Horovod; name scopes are never part of names.",
            "False",
            is_passed=False,
        ),
        replace(
            PARAMETERS["splits"],
            text="how many rows go to each rank of the process set, in order of rank: whole numbers, at most "
            "as many in all as ``tensor`` has. A tensor is of int32 or int64, and in a ``tf.function`` need "
            "not be known before that runs. None: equal parts.",
        ),
    ),
    order={
        "allreduce": "tensor average device_dense device_sparse compression op prescale_factor "
        "postscale_factor name process_set ignore_name_scope",
        "grouped_allreduce": "tensors average device_dense device_sparse compression op prescale_factor "
        "postscale_factor process_set ignore_name_scope name",
        "allgather": "tensor name ignore_name_scope process_set exact_gradient",
        "grouped_allgather": "tensors name ignore_name_scope process_set exact_gradient",
        "broadcast": "tensor root_rank name ignore_name_scope process_set exact_gradient",
        "alltoall": "tensor splits name ignore_name_scope process_set",
        "reducescatter": "tensor device_dense compression op name process_set ignore_name_scope "
        "prescale_factor postscale_factor exact_gradient",
        "grouped_reducescatter": "tensors device_dense compression op process_set prescale_factor "
        "postscale_factor name ignore_name_scope exact_gradient",
    },
    notes={
        "allreduce": f"{_SLICES} {_GRADIENT}",
        "grouped_allreduce": f"{_SLICES} They are reduced by a separate operation. {_GRADIENT}",
        "allgather*": _COPIES,
        "broadcast*": _COPIES,
        "alltoall*": _COPIES,
        "reducescatter*": _GRADIENT,
        "*_async": "For eager tensors; the result is unknown to gradient tapes.",
        "barrier": "In a graph it runs after the collectives before it and before those after it; in one of "
        "tf.compat.v1 the operation to run is returned.",
        "join": "In a graph, where it keeps its place among the collectives, the result is a scalar of "
        "int32.",
    },
    types={
        "allreduce.tensor": "{Given} | tf.IndexedSlices",
        "allreduce.return": "tf.Tensor | tf.IndexedSlices",
        "grouped_allreduce.tensors": "Iterable[{Given} | tf.IndexedSlices]",
        "grouped_allreduce.return": "list[tf.Tensor | tf.IndexedSlices]",
        "barrier.return": "tf.Operation | None",
        "join.return": "int | tf.Tensor",
    },
    raises={
        "InvalidArgumentError": (
            "tf.errors.InvalidArgumentError",
            "a bad call, such as a name that is in flight or an unknown process set; nothing was sent. It is "
            "a ValueError, too.",
        ),
        "RankMismatchError": (
            "tf.errors.FailedPreconditionError",
            "the ranks' shapes, dtypes or arguments differ; on every rank, and the job goes on.",
        ),
        "HorovodInternalError": (
            "tf.errors.AbortedError",
            "a rank was lost or has shut down. Outside of a ``tf.function`` it is a HorovodInternalError, "
            "too. A transfer that has timed out is a tf.errors.DeadlineExceededError.",
        ),
    },
    decorator="@do_not_convert",
)
