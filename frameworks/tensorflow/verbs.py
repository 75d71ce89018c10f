"""The collectives for TensorFlow, with Horovod's signatures.

Made by ``make verbs`` from polyhvd/collectives/table and from dialect.py: change these instead. What the
functions do is in polyhvd/collectives/functions.py, and in functions.py for what is peculiar to TensorFlow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar, overload

import tensorflow as tf
from polyhvd.tensorflow.compression import Compression
from polyhvd.tensorflow.functions import functions
from polyhvd.tensorflow.names import do_not_convert

from polyhvd.collectives.adapter import Handle, ReduceOp
from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.training.compression import Compressor, KeyedCompressor

__all__ = [
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_async",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_async",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_async",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "synchronize",
]

R = TypeVar("R")


@do_not_convert
def allreduce(
    tensor: tf.types.experimental.TensorLike | tf.IndexedSlices,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor | KeyedCompressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> tf.Tensor | tf.IndexedSlices:
    """Reduce a tensor, or a number, elementwise over the ranks into a new tensor.

    All ranks get the same result, bit by bit.

    Of tf.IndexedSlices, whose rows may differ in number, the result is tf.IndexedSlices with the rows of all
    ranks; scaled integers are added up first, and have each index once. An average of integers has
    floating-point numbers. Only Average and Sum are possible. Differentiable for Average and Sum, where every
    rank runs the same backward. May be called eagerly and in ``tf.function``, where every collective is
    asynchronous.

    Args:
        tensor: a tensor of any shape, which may be empty, or a number, which stands for a tensor without
            dimensions; shape and dtype are the same on every rank: float16, bfloat16, float32, float64,
            integers of 8 to 64 bits, or bool.
        average: the older form of ``op``: True is Average, False is Sum. Give one of the two at most.
        device_dense: accepted for Horovod's sake; collectives run on the host, and another device is refused.
        device_sparse: accepted for Horovod's sake; collectives run on the host, and another device is
            refused.
        compression: ``Compression.none``, ``.fp16`` or ``.bf16``: float32 and float64 are sent, and reduced,
            in that dtype, and the result is cast back. Or an object with the same two methods, or a
            KeyedCompressor, which keeps its state by ``name`` and so needs one.
        op: Average, Sum, Adasum, Min, Max or Product of the module; None is Average. The average of integers
            is truncated, and bool has none. Adasum takes floating-point numbers alone.
        prescale_factor: multiplies each rank's tensor before the reduction, integers as float64.
        postscale_factor: multiplies the result, likewise.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.
        ignore_name_scope: accepted for Horovod's sake; name scopes are never part of names.

    Returns:
        A new tensor of the same shape and dtype.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        tf.errors.InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process
            set; nothing was sent. It is a ValueError, too.
        TypeError: an argument is no tensor, or its dtype cannot be sent.
        tf.errors.FailedPreconditionError: the ranks' shapes, dtypes or arguments differ; on every rank, and
            the job goes on.
        tf.errors.AbortedError: a rank was lost or has shut down. Outside of a ``tf.function`` it is a
            HorovodInternalError, too. A transfer that has timed out is a tf.errors.DeadlineExceededError.

    Example::

        import tensorflow as tf
        import polyhvd.tensorflow as hvd
        hvd.init()
        mean = hvd.allreduce(tf.constant([1.0, 2.0]))
        total = hvd.allreduce(tf.constant([1.0, 2.0]), op=hvd.Sum)  # [1.0 * hvd.size(), 2.0 * hvd.size()]
    """
    return functions.allreduce(
        tensor,
        average,
        name,
        compression,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        device_dense=device_dense,
        device_sparse=device_sparse,
    )


@do_not_convert
def allreduce_async(
    tensor: tf.types.experimental.TensorLike,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[tf.Tensor]:
    """Start :func:`allreduce`, and return at once.

    Leave the tensor alone until ``synchronize()`` has returned.

    For eager tensors; the result is unknown to gradient tapes.

    Args:
        tensor: a tensor of any shape, which may be empty, or a number, which stands for a tensor without
            dimensions; shape and dtype are the same on every rank: float16, bfloat16, float32, float64,
            integers of 8 to 64 bits, or bool.
        average: the older form of ``op``: True is Average, False is Sum. Give one of the two at most.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        op: Average, Sum, Adasum, Min, Max or Product of the module; None is Average. The average of integers
            is truncated, and bool has none. Adasum takes floating-point numbers alone.
        prescale_factor: multiplies each rank's tensor before the reduction, integers as float64.
        postscale_factor: multiplies the result, likewise.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.

    Returns:
        A handle for ``poll()`` and ``synchronize()``, which returns the new tensor and raises what went
        wrong.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        tf.errors.InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process
            set; nothing was sent. It is a ValueError, too.
        TypeError: an argument is no tensor, or its dtype cannot be sent.
        tf.errors.FailedPreconditionError: the ranks' shapes, dtypes or arguments differ; on every rank, and
            the job goes on.
        tf.errors.AbortedError: a rank was lost or has shut down. Outside of a ``tf.function`` it is a
            HorovodInternalError, too. A transfer that has timed out is a tf.errors.DeadlineExceededError.

    Example::

        import tensorflow as tf
        import polyhvd.tensorflow as hvd
        hvd.init()
        handle = hvd.allreduce_async(tf.ones((3,)), op=hvd.Sum)
        total = hvd.synchronize(handle)  # every element is hvd.size()
    """
    return functions.allreduce_async(
        tensor,
        average,
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
    )


@do_not_convert
def grouped_allreduce(
    tensors: Iterable[tf.types.experimental.TensorLike | tf.IndexedSlices],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor | KeyedCompressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[tf.Tensor | tf.IndexedSlices]:
    """Reduce several tensors over the ranks into new ones, as one operation: all or none.

    All ranks get the same result, bit by bit.

    Of tf.IndexedSlices, whose rows may differ in number, the result is tf.IndexedSlices with the rows of all
    ranks; scaled integers are added up first, and have each index once. An average of integers has
    floating-point numbers. Only Average and Sum are possible. They are reduced by a separate operation.
    Differentiable for Average and Sum, where every rank runs the same backward. May be called eagerly and in
    ``tf.function``, where every collective is asynchronous.

    Args:
        tensors: tensors, as many on every rank, in the same order; each as ``tensor`` of :func:`allreduce`.
            Their dtypes may differ.
        average: the older form of ``op``: True is Average, False is Sum. Give one of the two at most.
        device_dense: accepted for Horovod's sake; collectives run on the host, and another device is refused.
        device_sparse: accepted for Horovod's sake; collectives run on the host, and another device is
            refused.
        compression: ``Compression.none``, ``.fp16`` or ``.bf16``: float32 and float64 are sent, and reduced,
            in that dtype, and the result is cast back. Or an object with the same two methods, or a
            KeyedCompressor, which keeps its state by ``name`` and so needs one.
        op: Average, Sum, Adasum, Min, Max or Product of the module; None is Average. The average of integers
            is truncated, and bool has none. Adasum takes floating-point numbers alone.
        prescale_factor: multiplies each rank's tensor before the reduction, integers as float64.
        postscale_factor: multiplies the result, likewise.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.
        ignore_name_scope: accepted for Horovod's sake; name scopes are never part of names.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.

    Returns:
        New tensors in the order of ``tensors``, of the same shapes and dtypes.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        tf.errors.InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process
            set; nothing was sent. It is a ValueError, too.
        TypeError: an argument is no tensor, or its dtype cannot be sent.
        tf.errors.FailedPreconditionError: the ranks' shapes, dtypes or arguments differ; on every rank, and
            the job goes on.
        tf.errors.AbortedError: a rank was lost or has shut down. Outside of a ``tf.function`` it is a
            HorovodInternalError, too. A transfer that has timed out is a tf.errors.DeadlineExceededError.

    Example::

        import tensorflow as tf
        import polyhvd.tensorflow as hvd
        hvd.init()
        weight, bias = hvd.grouped_allreduce([tf.ones((2, 3)), tf.ones((3,))])
    """
    return functions.grouped_allreduce(
        tensors,
        average=average,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
        name=name,
    )


@do_not_convert
def grouped_allreduce_async(
    tensors: Iterable[tf.types.experimental.TensorLike],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[tf.Tensor]]:
    """Start :func:`grouped_allreduce`, and return at once.

    Leave the tensors alone until ``synchronize()`` has returned.

    For eager tensors; the result is unknown to gradient tapes.

    Args:
        tensors: tensors, as many on every rank, in the same order; each as ``tensor`` of
            :func:`allreduce_async`. Their dtypes may differ.
        average: the older form of ``op``: True is Average, False is Sum. Give one of the two at most.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        op: Average, Sum, Adasum, Min, Max or Product of the module; None is Average. The average of integers
            is truncated, and bool has none. Adasum takes floating-point numbers alone.
        prescale_factor: multiplies each rank's tensor before the reduction, integers as float64.
        postscale_factor: multiplies the result, likewise.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.

    Returns:
        A handle for ``poll()`` and ``synchronize()``, which returns the list of new tensors and raises what
        went wrong.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        tf.errors.InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process
            set; nothing was sent. It is a ValueError, too.
        TypeError: an argument is no tensor, or its dtype cannot be sent.
        tf.errors.FailedPreconditionError: the ranks' shapes, dtypes or arguments differ; on every rank, and
            the job goes on.
        tf.errors.AbortedError: a rank was lost or has shut down. Outside of a ``tf.function`` it is a
            HorovodInternalError, too. A transfer that has timed out is a tf.errors.DeadlineExceededError.

    Example::

        import tensorflow as tf
        import polyhvd.tensorflow as hvd
        hvd.init()
        handle = hvd.grouped_allreduce_async([tf.ones((2, 3)), tf.ones((3,))])
        weight, bias = hvd.synchronize(handle)
    """
    return functions.grouped_allreduce_async(
        tensors,
        average=average,
        name=name,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )


@do_not_convert
def allgather(
    tensor: tf.types.experimental.TensorLike,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
    exact_gradient: bool | None = None,
) -> tf.Tensor:
    """Concatenate the ranks' tensors along the first dimension, in order of rank, on every rank.

    The first dimension may differ from rank to rank, and be 0; the result's is the sum of all.

    Differentiable, where every rank runs the same backward. May be called eagerly and in ``tf.function``,
    where every collective is asynchronous.

    Args:
        tensor: a tensor with at least one dimension. All dimensions but the first, and the dtype, are the
            same on every rank: float16, bfloat16, float32, float64, integers of 8 to 64 bits, or bool.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        ignore_name_scope: accepted for Horovod's sake; name scopes are never part of names.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.
        exact_gradient: True: the gradient is that of the sum of all ranks' losses. False: divided by the
            number of ranks, as in Horovod. None: as the environment variable ``POLYHVD_EXACT_GRADIENTS``
            says, which is False by default. The same on every rank.

    Returns:
        A new tensor with the rows of all ranks.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        tf.errors.InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process
            set; nothing was sent. It is a ValueError, too.
        TypeError: an argument is no tensor, or its dtype cannot be sent.
        tf.errors.FailedPreconditionError: the ranks' shapes, dtypes or arguments differ; on every rank, and
            the job goes on.
        tf.errors.AbortedError: a rank was lost or has shut down. Outside of a ``tf.function`` it is a
            HorovodInternalError, too. A transfer that has timed out is a tf.errors.DeadlineExceededError.

    Example::

        import tensorflow as tf
        import polyhvd.tensorflow as hvd
        hvd.init()
        rows = hvd.allgather(tf.ones((2, 3)))  # of shape (2 * hvd.size(), 3)
    """
    return functions.allgather(tensor, name=name, process_set=process_set, exact_gradient=exact_gradient)


@do_not_convert
def allgather_async(
    tensor: tf.types.experimental.TensorLike,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[tf.Tensor]:
    """Start :func:`allgather`, and return at once.

    Leave the tensor alone until ``synchronize()`` has returned.

    For eager tensors; the result is unknown to gradient tapes.

    Args:
        tensor: a tensor with at least one dimension. All dimensions but the first, and the dtype, are the
            same on every rank: float16, bfloat16, float32, float64, integers of 8 to 64 bits, or bool.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.

    Returns:
        A handle for ``poll()`` and ``synchronize()``, which returns the new tensor and raises what went
        wrong.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        tf.errors.InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process
            set; nothing was sent. It is a ValueError, too.
        TypeError: an argument is no tensor, or its dtype cannot be sent.
        tf.errors.FailedPreconditionError: the ranks' shapes, dtypes or arguments differ; on every rank, and
            the job goes on.
        tf.errors.AbortedError: a rank was lost or has shut down. Outside of a ``tf.function`` it is a
            HorovodInternalError, too. A transfer that has timed out is a tf.errors.DeadlineExceededError.

    Example::

        import tensorflow as tf
        import polyhvd.tensorflow as hvd
        hvd.init()
        handle = hvd.allgather_async(tf.ones((2, 3)))
        rows = hvd.synchronize(handle)  # of shape (2 * hvd.size(), 3)
    """
    return functions.allgather_async(tensor, name=name, process_set=process_set)


@do_not_convert
def grouped_allgather(
    tensors: Iterable[tf.types.experimental.TensorLike],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
    exact_gradient: bool | None = None,
) -> list[tf.Tensor]:
    """Gather several tensors, as one operation: all or none; see :func:`allgather`.

    The first dimension may differ from rank to rank, and be 0; the result's is the sum of all.

    Differentiable, where every rank runs the same backward. May be called eagerly and in ``tf.function``,
    where every collective is asynchronous.

    Args:
        tensors: tensors, as many on every rank, in the same order; each as ``tensor`` of :func:`allgather`.
            Their dtypes may differ.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        ignore_name_scope: accepted for Horovod's sake; name scopes are never part of names.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.
        exact_gradient: True: the gradient is that of the sum of all ranks' losses. False: divided by the
            number of ranks, as in Horovod. None: as the environment variable ``POLYHVD_EXACT_GRADIENTS``
            says, which is False by default. The same on every rank.

    Returns:
        New tensors in the order of ``tensors``, each with the rows of all ranks.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        tf.errors.InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process
            set; nothing was sent. It is a ValueError, too.
        TypeError: an argument is no tensor, or its dtype cannot be sent.
        tf.errors.FailedPreconditionError: the ranks' shapes, dtypes or arguments differ; on every rank, and
            the job goes on.
        tf.errors.AbortedError: a rank was lost or has shut down. Outside of a ``tf.function`` it is a
            HorovodInternalError, too. A transfer that has timed out is a tf.errors.DeadlineExceededError.

    Example::

        import tensorflow as tf
        import polyhvd.tensorflow as hvd
        hvd.init()
        images, labels = hvd.grouped_allgather([tf.ones((2, 3)), tf.ones((2,))])
    """
    return functions.grouped_allgather(
        tensors,
        name=name,
        process_set=process_set,
        exact_gradient=exact_gradient,
    )


@do_not_convert
def grouped_allgather_async(
    tensors: Iterable[tf.types.experimental.TensorLike],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[tf.Tensor]]:
    """Start :func:`grouped_allgather`, and return at once.

    Leave the tensors alone until ``synchronize()`` has returned.

    For eager tensors; the result is unknown to gradient tapes.

    Args:
        tensors: tensors, as many on every rank, in the same order; each as ``tensor`` of
            :func:`allgather_async`. Their dtypes may differ.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.

    Returns:
        A handle for ``poll()`` and ``synchronize()``, which returns the list of new tensors and raises what
        went wrong.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        tf.errors.InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process
            set; nothing was sent. It is a ValueError, too.
        TypeError: an argument is no tensor, or its dtype cannot be sent.
        tf.errors.FailedPreconditionError: the ranks' shapes, dtypes or arguments differ; on every rank, and
            the job goes on.
        tf.errors.AbortedError: a rank was lost or has shut down. Outside of a ``tf.function`` it is a
            HorovodInternalError, too. A transfer that has timed out is a tf.errors.DeadlineExceededError.

    Example::

        import tensorflow as tf
        import polyhvd.tensorflow as hvd
        hvd.init()
        handle = hvd.grouped_allgather_async([tf.ones((2, 3)), tf.ones((2,))])
        images, labels = hvd.synchronize(handle)
    """
    return functions.grouped_allgather_async(tensors, name=name, process_set=process_set)


@do_not_convert
def broadcast(
    tensor: tf.types.experimental.TensorLike,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
    exact_gradient: bool | None = None,
) -> tf.Tensor:
    """Return a copy of the root's tensor, or number, on every rank.

    Differentiable, where every rank runs the same backward. May be called eagerly and in ``tf.function``,
    where every collective is asynchronous.

    Args:
        tensor: a tensor of any shape, which may be empty, or a number, which stands for a tensor without
            dimensions; shape and dtype are the same on every rank: float16, bfloat16, float32, float64,
            integers of 8 to 64 bits, or bool. Its values matter on the root alone.
        root_rank: world rank of the sender, which is a member of the process set.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        ignore_name_scope: accepted for Horovod's sake; name scopes are never part of names.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.
        exact_gradient: True: the gradient is that of the sum of all ranks' losses. False: divided by the
            number of ranks, as in Horovod. None: as the environment variable ``POLYHVD_EXACT_GRADIENTS``
            says, which is False by default. The same on every rank.

    Returns:
        A new tensor, on the root as well.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        tf.errors.InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process
            set; nothing was sent. It is a ValueError, too.
        TypeError: an argument is no tensor, or its dtype cannot be sent.
        tf.errors.FailedPreconditionError: the ranks' shapes, dtypes or arguments differ; on every rank, and
            the job goes on.
        tf.errors.AbortedError: a rank was lost or has shut down. Outside of a ``tf.function`` it is a
            HorovodInternalError, too. A transfer that has timed out is a tf.errors.DeadlineExceededError.

    Example::

        import tensorflow as tf
        import polyhvd.tensorflow as hvd
        hvd.init()
        weights = hvd.broadcast(tf.ones((3,)), root_rank=0)
    """
    return functions.broadcast(
        tensor,
        root_rank,
        name=name,
        process_set=process_set,
        exact_gradient=exact_gradient,
    )


@do_not_convert
def broadcast_async(
    tensor: tf.types.experimental.TensorLike,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[tf.Tensor]:
    """Start :func:`broadcast`, and return at once.

    Leave the tensor alone until ``synchronize()`` has returned.

    For eager tensors; the result is unknown to gradient tapes.

    Args:
        tensor: a tensor of any shape, which may be empty, or a number, which stands for a tensor without
            dimensions; shape and dtype are the same on every rank: float16, bfloat16, float32, float64,
            integers of 8 to 64 bits, or bool. Its values matter on the root alone.
        root_rank: world rank of the sender, which is a member of the process set.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.

    Returns:
        A handle for ``poll()`` and ``synchronize()``, which returns the new tensor and raises what went
        wrong.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        tf.errors.InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process
            set; nothing was sent. It is a ValueError, too.
        TypeError: an argument is no tensor, or its dtype cannot be sent.
        tf.errors.FailedPreconditionError: the ranks' shapes, dtypes or arguments differ; on every rank, and
            the job goes on.
        tf.errors.AbortedError: a rank was lost or has shut down. Outside of a ``tf.function`` it is a
            HorovodInternalError, too. A transfer that has timed out is a tf.errors.DeadlineExceededError.

    Example::

        import tensorflow as tf
        import polyhvd.tensorflow as hvd
        hvd.init()
        handle = hvd.broadcast_async(tf.ones((3,)), root_rank=0)
        weights = hvd.synchronize(handle)
    """
    return functions.broadcast_async(tensor, root_rank, name=name, process_set=process_set)


@overload
def alltoall(
    tensor: tf.types.experimental.TensorLike,
    splits: None = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor: ...


@overload
def alltoall(
    tensor: tf.types.experimental.TensorLike,
    splits: Sequence[int] | tf.types.experimental.TensorLike,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tuple[tf.Tensor, tf.Tensor]: ...


@do_not_convert
def alltoall(
    tensor: tf.types.experimental.TensorLike,
    splits: Sequence[int] | tf.types.experimental.TensorLike | None = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor | tuple[tf.Tensor, tf.Tensor]:
    """Exchange rows with all ranks.

    Each rank sends consecutive rows of its tensor to the ranks in turn, and gets what they have sent to it,
    in order of rank.

    Differentiable, where every rank runs the same backward. May be called eagerly and in ``tf.function``,
    where every collective is asynchronous.

    Args:
        tensor: a tensor with at least one dimension. All dimensions but the first, and the dtype, are the
            same on every rank: float16, bfloat16, float32, float64, integers of 8 to 64 bits, or bool.
        splits: how many rows go to each rank of the process set, in order of rank: whole numbers, at most as
            many in all as ``tensor`` has. A tensor is of int32 or int64, and in a ``tf.function`` need not be
            known before that runs. None: equal parts.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        ignore_name_scope: accepted for Horovod's sake; name scopes are never part of names.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.

    Returns:
        A new tensor with the received rows. With ``splits`` a tuple of it and of how many rows came from each
        rank, as int32.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        tf.errors.InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process
            set; nothing was sent. It is a ValueError, too.
        TypeError: an argument is no tensor, or its dtype cannot be sent.
        tf.errors.FailedPreconditionError: the ranks' shapes, dtypes or arguments differ; on every rank, and
            the job goes on.
        tf.errors.AbortedError: a rank was lost or has shut down. Outside of a ``tf.function`` it is a
            HorovodInternalError, too. A transfer that has timed out is a tf.errors.DeadlineExceededError.

    Example::

        import tensorflow as tf
        import polyhvd.tensorflow as hvd
        hvd.init()
        rows = tf.ones((2 * hvd.size(), 3))
        received, counts = hvd.alltoall(rows, splits=[2] * hvd.size())  # two rows for each rank
    """
    return functions.alltoall(tensor, splits, name=name, process_set=process_set)


@do_not_convert
def alltoall_async(
    tensor: tf.types.experimental.TensorLike,
    splits: Sequence[int] | tf.types.experimental.TensorLike | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[tuple[tf.Tensor, tf.Tensor]]:
    """Start :func:`alltoall`, and return at once.

    Leave the tensor alone until ``synchronize()`` has returned.

    For eager tensors; the result is unknown to gradient tapes.

    Args:
        tensor: a tensor with at least one dimension. All dimensions but the first, and the dtype, are the
            same on every rank: float16, bfloat16, float32, float64, integers of 8 to 64 bits, or bool.
        splits: how many rows go to each rank of the process set, in order of rank: whole numbers, at most as
            many in all as ``tensor`` has. A tensor is of int32 or int64, and in a ``tf.function`` need not be
            known before that runs. None: equal parts.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.

    Returns:
        A handle for ``poll()`` and ``synchronize()``, which returns the tuple of the received rows and of how
        many came from each rank, also without ``splits``, and raises what went wrong.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        tf.errors.InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process
            set; nothing was sent. It is a ValueError, too.
        TypeError: an argument is no tensor, or its dtype cannot be sent.
        tf.errors.FailedPreconditionError: the ranks' shapes, dtypes or arguments differ; on every rank, and
            the job goes on.
        tf.errors.AbortedError: a rank was lost or has shut down. Outside of a ``tf.function`` it is a
            HorovodInternalError, too. A transfer that has timed out is a tf.errors.DeadlineExceededError.

    Example::

        import tensorflow as tf
        import polyhvd.tensorflow as hvd
        hvd.init()
        handle = hvd.alltoall_async(tf.ones((2 * hvd.size(), 3)))
        received, counts = hvd.synchronize(handle)
    """
    return functions.alltoall_async(tensor, splits, name=name, process_set=process_set)


@do_not_convert
def reducescatter(
    tensor: tf.types.experimental.TensorLike,
    device_dense: str = "",
    compression: Compressor | KeyedCompressor = Compression.none,
    op: int = ReduceOp.Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    exact_gradient: bool | None = None,
) -> tf.Tensor:
    """Reduce a tensor elementwise over the ranks, and return this rank's part of the rows.

    Rows are dealt out in order of rank; where they do not divide, the first ranks get one more.

    Differentiable for Average and Sum, where every rank runs the same backward. May be called eagerly and in
    ``tf.function``, where every collective is asynchronous.

    Args:
        tensor: a tensor with at least one dimension; shape and dtype are the same on every rank: float16,
            bfloat16, float32, float64, integers of 8 to 64 bits, or bool.
        device_dense: accepted for Horovod's sake; collectives run on the host, and another device is refused.
        compression: ``Compression.none``, ``.fp16`` or ``.bf16``: float32 and float64 are sent, and reduced,
            in that dtype, and the result is cast back. Or an object with the same two methods, or a
            KeyedCompressor, which keeps its state by ``name`` and so needs one.
        op: Average, Sum, Min, Max or Product of the module. The average of integers is truncated, and bool
            has none. Adasum, which needs whole tensors, is refused.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.
        ignore_name_scope: accepted for Horovod's sake; name scopes are never part of names.
        prescale_factor: multiplies each rank's tensor before the reduction, integers as float64.
        postscale_factor: multiplies the result, likewise.
        exact_gradient: True: the gradient is that of the sum of all ranks' losses. False: multiplied by the
            number of ranks, as in Horovod. None: as the environment variable ``POLYHVD_EXACT_GRADIENTS``
            says, which is False by default. The same on every rank.

    Returns:
        A new tensor with this rank's rows of the result.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        tf.errors.InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process
            set; nothing was sent. It is a ValueError, too.
        TypeError: an argument is no tensor, or its dtype cannot be sent.
        tf.errors.FailedPreconditionError: the ranks' shapes, dtypes or arguments differ; on every rank, and
            the job goes on.
        tf.errors.AbortedError: a rank was lost or has shut down. Outside of a ``tf.function`` it is a
            HorovodInternalError, too. A transfer that has timed out is a tf.errors.DeadlineExceededError.

    Example::

        import tensorflow as tf
        import polyhvd.tensorflow as hvd
        hvd.init()
        rows = hvd.reducescatter(tf.ones((2 * hvd.size(), 3)), op=hvd.Sum)  # of shape (2, 3)
    """
    return functions.reducescatter(
        tensor,
        device_dense=device_dense,
        compression=compression,
        op=op,
        name=name,
        process_set=process_set,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        exact_gradient=exact_gradient,
    )


@do_not_convert
def reducescatter_async(
    tensor: tf.types.experimental.TensorLike,
    name: str | None = None,
    op: int = ReduceOp.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[tf.Tensor]:
    """Start :func:`reducescatter`, and return at once.

    Leave the tensor alone until ``synchronize()`` has returned.

    For eager tensors; the result is unknown to gradient tapes.

    Args:
        tensor: a tensor with at least one dimension; shape and dtype are the same on every rank: float16,
            bfloat16, float32, float64, integers of 8 to 64 bits, or bool.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        op: Average, Sum, Min, Max or Product of the module. The average of integers is truncated, and bool
            has none. Adasum, which needs whole tensors, is refused.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.
        prescale_factor: multiplies each rank's tensor before the reduction, integers as float64.
        postscale_factor: multiplies the result, likewise.

    Returns:
        A handle for ``poll()`` and ``synchronize()``, which returns the new tensor and raises what went
        wrong.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        tf.errors.InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process
            set; nothing was sent. It is a ValueError, too.
        TypeError: an argument is no tensor, or its dtype cannot be sent.
        tf.errors.FailedPreconditionError: the ranks' shapes, dtypes or arguments differ; on every rank, and
            the job goes on.
        tf.errors.AbortedError: a rank was lost or has shut down. Outside of a ``tf.function`` it is a
            HorovodInternalError, too. A transfer that has timed out is a tf.errors.DeadlineExceededError.

    Example::

        import tensorflow as tf
        import polyhvd.tensorflow as hvd
        hvd.init()
        handle = hvd.reducescatter_async(tf.ones((2 * hvd.size(), 3)), op=hvd.Sum)
        rows = hvd.synchronize(handle)  # of shape (2, 3)
    """
    return functions.reducescatter_async(
        tensor,
        name=name,
        op=op,
        process_set=process_set,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
    )


@do_not_convert
def grouped_reducescatter(
    tensors: Iterable[tf.types.experimental.TensorLike],
    device_dense: str = "",
    compression: Compressor | KeyedCompressor = Compression.none,
    op: int = ReduceOp.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    ignore_name_scope: bool = False,
    exact_gradient: bool | None = None,
) -> list[tf.Tensor]:
    """Reduce several tensors and return this rank's rows, as one operation: all or none.

    Rows are dealt out in order of rank; where they do not divide, the first ranks get one more.

    Differentiable for Average and Sum, where every rank runs the same backward. May be called eagerly and in
    ``tf.function``, where every collective is asynchronous.

    Args:
        tensors: tensors, as many on every rank, in the same order; each as ``tensor`` of
            :func:`reducescatter`. Their dtypes may differ.
        device_dense: accepted for Horovod's sake; collectives run on the host, and another device is refused.
        compression: ``Compression.none``, ``.fp16`` or ``.bf16``: float32 and float64 are sent, and reduced,
            in that dtype, and the result is cast back. Or an object with the same two methods, or a
            KeyedCompressor, which keeps its state by ``name`` and so needs one.
        op: Average, Sum, Min, Max or Product of the module. The average of integers is truncated, and bool
            has none. Adasum, which needs whole tensors, is refused.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.
        prescale_factor: multiplies each rank's tensor before the reduction, integers as float64.
        postscale_factor: multiplies the result, likewise.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        ignore_name_scope: accepted for Horovod's sake; name scopes are never part of names.
        exact_gradient: True: the gradient is that of the sum of all ranks' losses. False: multiplied by the
            number of ranks, as in Horovod. None: as the environment variable ``POLYHVD_EXACT_GRADIENTS``
            says, which is False by default. The same on every rank.

    Returns:
        New tensors in the order of ``tensors``, each with this rank's rows of the result.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        tf.errors.InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process
            set; nothing was sent. It is a ValueError, too.
        TypeError: an argument is no tensor, or its dtype cannot be sent.
        tf.errors.FailedPreconditionError: the ranks' shapes, dtypes or arguments differ; on every rank, and
            the job goes on.
        tf.errors.AbortedError: a rank was lost or has shut down. Outside of a ``tf.function`` it is a
            HorovodInternalError, too. A transfer that has timed out is a tf.errors.DeadlineExceededError.

    Example::

        import tensorflow as tf
        import polyhvd.tensorflow as hvd
        hvd.init()
        pair = [tf.ones((2 * hvd.size(), 3)), tf.ones((hvd.size(),))]
        first, second = hvd.grouped_reducescatter(pair)
    """
    return functions.grouped_reducescatter(
        tensors,
        device_dense=device_dense,
        compression=compression,
        op=op,
        process_set=process_set,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        name=name,
        exact_gradient=exact_gradient,
    )


@do_not_convert
def grouped_reducescatter_async(
    tensors: Iterable[tf.types.experimental.TensorLike],
    name: str | None = None,
    op: int = ReduceOp.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[list[tf.Tensor]]:
    """Start :func:`grouped_reducescatter`, and return at once.

    Leave the tensors alone until ``synchronize()`` has returned.

    For eager tensors; the result is unknown to gradient tapes.

    Args:
        tensors: tensors, as many on every rank, in the same order; each as ``tensor`` of
            :func:`reducescatter_async`. Their dtypes may differ.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        op: Average, Sum, Min, Max or Product of the module. The average of integers is truncated, and bool
            has none. Adasum, which needs whole tensors, is refused.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.
        prescale_factor: multiplies each rank's tensor before the reduction, integers as float64.
        postscale_factor: multiplies the result, likewise.

    Returns:
        A handle for ``poll()`` and ``synchronize()``, which returns the list of new tensors and raises what
        went wrong.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        tf.errors.InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process
            set; nothing was sent. It is a ValueError, too.
        TypeError: an argument is no tensor, or its dtype cannot be sent.
        tf.errors.FailedPreconditionError: the ranks' shapes, dtypes or arguments differ; on every rank, and
            the job goes on.
        tf.errors.AbortedError: a rank was lost or has shut down. Outside of a ``tf.function`` it is a
            HorovodInternalError, too. A transfer that has timed out is a tf.errors.DeadlineExceededError.

    Example::

        import tensorflow as tf
        import polyhvd.tensorflow as hvd
        hvd.init()
        pair = [tf.ones((2 * hvd.size(), 3)), tf.ones((hvd.size(),))]
        handle = hvd.grouped_reducescatter_async(pair)
        first, second = hvd.synchronize(handle)
    """
    return functions.grouped_reducescatter_async(
        tensors,
        name=name,
        op=op,
        process_set=process_set,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
    )


@do_not_convert
def poll(
    handle: Handle[R],
) -> bool:
    """Say whether :func:`synchronize` would return without waiting.

    Args:
        handle: what an asynchronous function has returned.

    Returns:
        True when the operation has ended, also with an error. Raises nothing.

    Example::

        import tensorflow as tf
        import polyhvd.tensorflow as hvd
        hvd.init()
        handle = hvd.allreduce_async(tf.ones((3,)))
        is_done = hvd.poll(handle)
        hvd.synchronize(handle)
    """
    return functions.poll(handle)


@do_not_convert
def synchronize(
    handle: Handle[R],
) -> R:
    """Wait for an operation that an asynchronous function has started, and return its result.

    Args:
        handle: what an asynchronous function has returned.

    Returns:
        What the same function without ``_async`` returns; of ``alltoall_async`` the tuple. May be called
        again, with the same result.

    Raises:
        tf.errors.FailedPreconditionError: the ranks' shapes, dtypes or arguments differ; on every rank, and
            the job goes on.
        tf.errors.AbortedError: a rank was lost or has shut down. Outside of a ``tf.function`` it is a
            HorovodInternalError, too. A transfer that has timed out is a tf.errors.DeadlineExceededError.

    Example::

        import tensorflow as tf
        import polyhvd.tensorflow as hvd
        hvd.init()
        handle = hvd.allreduce_async(tf.ones((3,)))
        mean = hvd.synchronize(handle)
    """
    return functions.synchronize(handle)


@do_not_convert
def barrier(
    process_set: ProcessSet = global_process_set,
) -> tf.Operation | None:
    """Return when every rank of the process set has called it.

    In a graph it runs after the collectives before it and before those after it; in one of tf.compat.v1 the
    operation to run is returned.

    Args:
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        tf.errors.InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process
            set; nothing was sent. It is a ValueError, too.
        tf.errors.AbortedError: a rank was lost or has shut down. Outside of a ``tf.function`` it is a
            HorovodInternalError, too. A transfer that has timed out is a tf.errors.DeadlineExceededError.

    Example::

        import tensorflow as tf
        import polyhvd.tensorflow as hvd
        hvd.init()
        hvd.barrier()
    """
    return functions.barrier(process_set=process_set)


@do_not_convert
def join() -> int | tf.Tensor:
    """Say that this rank has run out of data, and return when all ranks have.

    Meanwhile it takes part in the operations of the others: with zeros in sums and averages, which still
    divide by the number of ranks, with neutral elements in other reductions, and without rows in allgather
    and alltoall. It cannot be the root of a broadcast, nor start an operation of its own. For process sets
    that others have added meanwhile, ask ``process_set_of()`` afterwards.

    In a graph, where it keeps its place among the collectives, the result is a scalar of int32.

    Returns:
        The rank that joined last: it has seen the most data.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        tf.errors.AbortedError: a rank was lost or has shut down. Outside of a ``tf.function`` it is a
            HorovodInternalError, too. A transfer that has timed out is a tf.errors.DeadlineExceededError.

    Example::

        import tensorflow as tf
        import polyhvd.tensorflow as hvd
        hvd.init()
        for batch in batches:  # as many as this rank has
            train(batch)
        last = hvd.join()
    """
    return functions.join()
