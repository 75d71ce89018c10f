"""The collectives for MXNet, with Horovod's signatures.

Made by ``make verbs`` from polyhvd/collectives/table and from dialect.py: change these instead. What the
functions do is in polyhvd/collectives/functions.py, and in functions.py for what is peculiar to MXNet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar, overload

from mxnet.ndarray import NDArray
from polyhvd.mxnet.functions import functions

from polyhvd.collectives.adapter import Handle, ReduceOp
from polyhvd.collectives.operation import Number
from polyhvd.collectives.process_sets import ProcessSet, global_process_set

__all__ = [
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "synchronize",
]

R = TypeVar("R")


def allreduce(
    tensor: NDArray | Number,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> NDArray:
    """Reduce an array, or a number, elementwise over the ranks into a new array.

    All ranks get the same result, bit by bit.

    Of a row_sparse array only the rows that a rank has are sent; the call waits until it is computed, and for
    Min, Max and Product until all ranks have told their rows. Sums and averages have a gradient, where every
    rank runs the same backward.

    Returns at once: MXNet's engine runs it once the arrays are ready, and reads of the results wait for it.
    What fails after the call has returned is raised by these reads.

    Args:
        tensor: an array of any shape, which may be empty, or a number, which stands for an array without
            dimensions; shape and dtype are the same on every rank: float16, bfloat16, float32, float64,
            uint8, int8, int32, int64, or bool.
        average: the older form of ``op``: True is Average, False is Sum. Give one of the two at most.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        priority: of the operations that are ready, those of higher priority are run first.
        prescale_factor: multiplies each rank's array before the reduction, integers as float64.
        postscale_factor: multiplies the result, likewise.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.
        op: Average, Sum, Adasum, Min, Max or Product of the module; None is Average. The average of integers
            is truncated, and bool has none. Adasum takes floating-point numbers alone.

    Returns:
        A new array of the same shape and dtype.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process set; nothing
            was sent. It is an MXNetError, too.
        TypeError: an argument is no array, or its dtype cannot be sent.
        RankMismatchError: the ranks' shapes, dtypes or arguments differ; on every rank, where the result is
            read. It is an MXNetError, too.
        HorovodInternalError: a rank was lost or has shut down, or a transfer has timed out; where the result
            is read. It is an MXNetError, too.

    Example::

        import mxnet as mx
        import polyhvd.mxnet as hvd
        hvd.init()
        mean = hvd.allreduce(mx.nd.array([1.0, 2.0]))
        total = hvd.allreduce(mx.nd.array([1.0, 2.0]), op=hvd.Sum)  # [1.0 * hvd.size(), 2.0 * hvd.size()]
    """
    return functions.allreduce(
        tensor,
        average,
        name,
        priority=priority,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
        op=op,
    )


def allreduce_(
    tensor: NDArray,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> NDArray:
    """Reduce an array elementwise over the ranks, in place.

    All ranks get the same result, bit by bit.

    Of a row_sparse array only the rows that a rank has are sent; the call waits until it is computed, and for
    Min, Max and Product until all ranks have told their rows. The result is unknown to autograd.

    Returns at once: MXNet's engine runs it once the arrays are ready, and reads of the results wait for it.
    What fails after the call has returned is raised by these reads.

    Args:
        tensor: an array of any shape, which is overwritten; shape and dtype are the same on every rank:
            float16, bfloat16, float32, float64, uint8, int8, int32, int64, or bool.
        average: the older form of ``op``: True is Average, False is Sum. Give one of the two at most.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        priority: of the operations that are ready, those of higher priority are run first.
        prescale_factor: multiplies each rank's array before the reduction, integers as float64.
        postscale_factor: multiplies the result, likewise.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.
        op: Average, Sum, Adasum, Min, Max or Product of the module; None is Average. The average of integers
            is truncated, and bool has none. Adasum takes floating-point numbers alone.

    Returns:
        ``tensor`` itself.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process set; nothing
            was sent. It is an MXNetError, too.
        TypeError: an argument is no array, or its dtype cannot be sent.
        RankMismatchError: the ranks' shapes, dtypes or arguments differ; on every rank, where the result is
            read. It is an MXNetError, too.
        HorovodInternalError: a rank was lost or has shut down, or a transfer has timed out; where the result
            is read. It is an MXNetError, too.

    Example::

        import mxnet as mx
        import polyhvd.mxnet as hvd
        hvd.init()
        gradient = mx.nd.ones((3,))
        hvd.allreduce_(gradient, op=hvd.Sum)  # every element is hvd.size()
    """
    return functions.allreduce_(
        tensor,
        average,
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        priority,
    )


def allreduce_async(
    tensor: NDArray | Number,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> Handle[NDArray]:
    """Start :func:`allreduce`, and return at once.

    Leave the array alone until ``synchronize()`` has returned.

    Args:
        tensor: an array of any shape, which may be empty, or a number, which stands for an array without
            dimensions; shape and dtype are the same on every rank: float16, bfloat16, float32, float64,
            uint8, int8, int32, int64, or bool.
        average: the older form of ``op``: True is Average, False is Sum. Give one of the two at most.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        priority: of the operations that are ready, those of higher priority are run first.
        prescale_factor: multiplies each rank's array before the reduction, integers as float64.
        postscale_factor: multiplies the result, likewise.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.
        op: Average, Sum, Adasum, Min, Max or Product of the module; None is Average. The average of integers
            is truncated, and bool has none. Adasum takes floating-point numbers alone.

    Returns:
        A handle for ``poll()`` and ``synchronize()``, which returns the new array and raises what went wrong.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process set; nothing
            was sent. It is an MXNetError, too.
        TypeError: an argument is no array, or its dtype cannot be sent.
        RankMismatchError: the ranks' shapes, dtypes or arguments differ; on every rank, where the result is
            read. It is an MXNetError, too.
        HorovodInternalError: a rank was lost or has shut down, or a transfer has timed out; where the result
            is read. It is an MXNetError, too.

    Example::

        import mxnet as mx
        import polyhvd.mxnet as hvd
        hvd.init()
        handle = hvd.allreduce_async(mx.nd.ones((3,)), op=hvd.Sum)
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
        priority,
    )


def allreduce_async_(
    tensor: NDArray,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> Handle[NDArray]:
    """Start :func:`allreduce_`, and return at once.

    Leave the array alone until ``synchronize()`` has returned.

    Args:
        tensor: an array of any shape, which is overwritten; shape and dtype are the same on every rank:
            float16, bfloat16, float32, float64, uint8, int8, int32, int64, or bool.
        average: the older form of ``op``: True is Average, False is Sum. Give one of the two at most.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        priority: of the operations that are ready, those of higher priority are run first.
        prescale_factor: multiplies each rank's array before the reduction, integers as float64.
        postscale_factor: multiplies the result, likewise.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.
        op: Average, Sum, Adasum, Min, Max or Product of the module; None is Average. The average of integers
            is truncated, and bool has none. Adasum takes floating-point numbers alone.

    Returns:
        A handle for ``poll()`` and ``synchronize()``, which returns ``tensor`` and raises what went wrong.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process set; nothing
            was sent. It is an MXNetError, too.
        TypeError: an argument is no array, or its dtype cannot be sent.
        RankMismatchError: the ranks' shapes, dtypes or arguments differ; on every rank, where the result is
            read. It is an MXNetError, too.
        HorovodInternalError: a rank was lost or has shut down, or a transfer has timed out; where the result
            is read. It is an MXNetError, too.

    Example::

        import mxnet as mx
        import polyhvd.mxnet as hvd
        hvd.init()
        gradient = mx.nd.ones((3,))
        handle = hvd.allreduce_async_(gradient, op=hvd.Sum)
        hvd.synchronize(handle)  # now every element of gradient is hvd.size()
    """
    return functions.allreduce_async_(
        tensor,
        average,
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        priority,
    )


def grouped_allreduce(
    tensors: Iterable[NDArray],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> list[NDArray]:
    """Reduce several arrays over the ranks into new ones, as one operation: all or none.

    All ranks get the same result, bit by bit.

    Sums and averages have a gradient, where every rank runs the same backward.

    Returns at once: MXNet's engine runs it once the arrays are ready, and reads of the results wait for it.
    What fails after the call has returned is raised by these reads.

    Args:
        tensors: arrays, as many on every rank, in the same order; each as ``tensor`` of :func:`allreduce`.
            Their dtypes may differ.
        average: the older form of ``op``: True is Average, False is Sum. Give one of the two at most.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        priority: of the operations that are ready, those of higher priority are run first.
        prescale_factor: multiplies each rank's array before the reduction, integers as float64.
        postscale_factor: multiplies the result, likewise.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.
        op: Average, Sum, Adasum, Min, Max or Product of the module; None is Average. The average of integers
            is truncated, and bool has none. Adasum takes floating-point numbers alone.

    Returns:
        New arrays in the order of ``tensors``, of the same shapes and dtypes.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process set; nothing
            was sent. It is an MXNetError, too.
        TypeError: an argument is no array, or its dtype cannot be sent.
        RankMismatchError: the ranks' shapes, dtypes or arguments differ; on every rank, where the result is
            read. It is an MXNetError, too.
        HorovodInternalError: a rank was lost or has shut down, or a transfer has timed out; where the result
            is read. It is an MXNetError, too.

    Example::

        import mxnet as mx
        import polyhvd.mxnet as hvd
        hvd.init()
        weight, bias = hvd.grouped_allreduce([mx.nd.ones((2, 3)), mx.nd.ones((3,))])
    """
    return functions.grouped_allreduce(
        tensors,
        average=average,
        name=name,
        priority=priority,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
        op=op,
    )


def grouped_allreduce_(
    tensors: Iterable[NDArray],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> list[NDArray]:
    """Reduce several arrays over the ranks in place, as one operation: all or none.

    All ranks get the same result, bit by bit.

    The results are unknown to autograd.

    Returns at once: MXNet's engine runs it once the arrays are ready, and reads of the results wait for it.
    What fails after the call has returned is raised by these reads.

    Args:
        tensors: arrays, as many on every rank, in the same order; each as ``tensor`` of :func:`allreduce_`.
            Their dtypes may differ.
        average: the older form of ``op``: True is Average, False is Sum. Give one of the two at most.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        priority: of the operations that are ready, those of higher priority are run first.
        prescale_factor: multiplies each rank's array before the reduction, integers as float64.
        postscale_factor: multiplies the result, likewise.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.
        op: Average, Sum, Adasum, Min, Max or Product of the module; None is Average. The average of integers
            is truncated, and bool has none. Adasum takes floating-point numbers alone.

    Returns:
        The arrays themselves.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process set; nothing
            was sent. It is an MXNetError, too.
        TypeError: an argument is no array, or its dtype cannot be sent.
        RankMismatchError: the ranks' shapes, dtypes or arguments differ; on every rank, where the result is
            read. It is an MXNetError, too.
        HorovodInternalError: a rank was lost or has shut down, or a transfer has timed out; where the result
            is read. It is an MXNetError, too.

    Example::

        import mxnet as mx
        import polyhvd.mxnet as hvd
        hvd.init()
        gradients = [mx.nd.ones((2, 3)), mx.nd.ones((3,))]
        hvd.grouped_allreduce_(gradients, op=hvd.Sum)
    """
    return functions.grouped_allreduce_(
        tensors,
        average=average,
        name=name,
        priority=priority,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
        op=op,
    )


def grouped_allreduce_async(
    tensors: Iterable[NDArray],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> Handle[list[NDArray]]:
    """Start :func:`grouped_allreduce`, and return at once.

    Leave the arrays alone until ``synchronize()`` has returned.

    Args:
        tensors: arrays, as many on every rank, in the same order; each as ``tensor`` of
            :func:`allreduce_async`. Their dtypes may differ.
        average: the older form of ``op``: True is Average, False is Sum. Give one of the two at most.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        priority: of the operations that are ready, those of higher priority are run first.
        prescale_factor: multiplies each rank's array before the reduction, integers as float64.
        postscale_factor: multiplies the result, likewise.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.
        op: Average, Sum, Adasum, Min, Max or Product of the module; None is Average. The average of integers
            is truncated, and bool has none. Adasum takes floating-point numbers alone.

    Returns:
        A handle for ``poll()`` and ``synchronize()``, which returns the list of new arrays and raises what
        went wrong.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process set; nothing
            was sent. It is an MXNetError, too.
        TypeError: an argument is no array, or its dtype cannot be sent.
        RankMismatchError: the ranks' shapes, dtypes or arguments differ; on every rank, where the result is
            read. It is an MXNetError, too.
        HorovodInternalError: a rank was lost or has shut down, or a transfer has timed out; where the result
            is read. It is an MXNetError, too.

    Example::

        import mxnet as mx
        import polyhvd.mxnet as hvd
        hvd.init()
        handle = hvd.grouped_allreduce_async([mx.nd.ones((2, 3)), mx.nd.ones((3,))])
        weight, bias = hvd.synchronize(handle)
    """
    return functions.grouped_allreduce_async(
        tensors,
        average=average,
        name=name,
        priority=priority,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
        op=op,
    )


def grouped_allreduce_async_(
    tensors: Iterable[NDArray],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> Handle[list[NDArray]]:
    """Start :func:`grouped_allreduce_`, and return at once.

    Leave the arrays alone until ``synchronize()`` has returned.

    Args:
        tensors: arrays, as many on every rank, in the same order; each as ``tensor`` of
            :func:`allreduce_async_`. Their dtypes may differ.
        average: the older form of ``op``: True is Average, False is Sum. Give one of the two at most.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        priority: of the operations that are ready, those of higher priority are run first.
        prescale_factor: multiplies each rank's array before the reduction, integers as float64.
        postscale_factor: multiplies the result, likewise.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.
        op: Average, Sum, Adasum, Min, Max or Product of the module; None is Average. The average of integers
            is truncated, and bool has none. Adasum takes floating-point numbers alone.

    Returns:
        A handle for ``poll()`` and ``synchronize()``, which returns the list of the arrays themselves and
        raises what went wrong.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process set; nothing
            was sent. It is an MXNetError, too.
        TypeError: an argument is no array, or its dtype cannot be sent.
        RankMismatchError: the ranks' shapes, dtypes or arguments differ; on every rank, where the result is
            read. It is an MXNetError, too.
        HorovodInternalError: a rank was lost or has shut down, or a transfer has timed out; where the result
            is read. It is an MXNetError, too.

    Example::

        import mxnet as mx
        import polyhvd.mxnet as hvd
        hvd.init()
        gradients = [mx.nd.ones((2, 3)), mx.nd.ones((3,))]
        handle = hvd.grouped_allreduce_async_(gradients, op=hvd.Sum)
        hvd.synchronize(handle)
    """
    return functions.grouped_allreduce_async_(
        tensors,
        average=average,
        name=name,
        priority=priority,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
        op=op,
    )


def allgather(
    tensor: NDArray,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    exact_gradient: bool | None = None,
) -> NDArray:
    """Concatenate the ranks' arrays along the first dimension, in order of rank, on every rank.

    The first dimension may differ from rank to rank, and be 0; the result's is the sum of all.

    The call waits until all ranks' arrays are computed and the size of the result is known. The result has a
    gradient, where every rank runs the same backward.

    Returns at once: MXNet's engine runs it once the arrays are ready, and reads of the results wait for it.
    What fails after the call has returned is raised by these reads.

    Args:
        tensor: an array with at least one dimension. All dimensions but the first, and the dtype, are the
            same on every rank: float16, bfloat16, float32, float64, uint8, int8, int32, int64, or bool.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        priority: of the operations that are ready, those of higher priority are run first.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.
        exact_gradient: True: the gradient is that of the sum of all ranks' losses. False: divided by the
            number of ranks, as in Horovod. None: as the environment variable ``POLYHVD_EXACT_GRADIENTS``
            says, which is False by default. The same on every rank.

    Returns:
        A new array with the rows of all ranks.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process set; nothing
            was sent. It is an MXNetError, too.
        TypeError: an argument is no array, or its dtype cannot be sent.
        RankMismatchError: the ranks' shapes, dtypes or arguments differ; on every rank, where the result is
            read. It is an MXNetError, too.
        HorovodInternalError: a rank was lost or has shut down, or a transfer has timed out; where the result
            is read. It is an MXNetError, too.

    Example::

        import mxnet as mx
        import polyhvd.mxnet as hvd
        hvd.init()
        rows = hvd.allgather(mx.nd.ones((2, 3)))  # of shape (2 * hvd.size(), 3)
    """
    return functions.allgather(
        tensor,
        name=name,
        priority=priority,
        process_set=process_set,
        exact_gradient=exact_gradient,
    )


def allgather_async(
    tensor: NDArray,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    exact_gradient: bool | None = None,
) -> Handle[NDArray]:
    """Start :func:`allgather`, and return at once.

    Leave the array alone until ``synchronize()`` has returned.

    Args:
        tensor: an array with at least one dimension. All dimensions but the first, and the dtype, are the
            same on every rank: float16, bfloat16, float32, float64, uint8, int8, int32, int64, or bool.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        priority: of the operations that are ready, those of higher priority are run first.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.
        exact_gradient: True: the gradient is that of the sum of all ranks' losses. False: divided by the
            number of ranks, as in Horovod. None: as the environment variable ``POLYHVD_EXACT_GRADIENTS``
            says, which is False by default. The same on every rank.

    Returns:
        A handle for ``poll()`` and ``synchronize()``, which returns the new array and raises what went wrong.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process set; nothing
            was sent. It is an MXNetError, too.
        TypeError: an argument is no array, or its dtype cannot be sent.
        RankMismatchError: the ranks' shapes, dtypes or arguments differ; on every rank, where the result is
            read. It is an MXNetError, too.
        HorovodInternalError: a rank was lost or has shut down, or a transfer has timed out; where the result
            is read. It is an MXNetError, too.

    Example::

        import mxnet as mx
        import polyhvd.mxnet as hvd
        hvd.init()
        handle = hvd.allgather_async(mx.nd.ones((2, 3)))
        rows = hvd.synchronize(handle)  # of shape (2 * hvd.size(), 3)
    """
    return functions.allgather_async(
        tensor,
        name=name,
        priority=priority,
        process_set=process_set,
        exact_gradient=exact_gradient,
    )


def grouped_allgather(
    tensors: Iterable[NDArray],
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    exact_gradient: bool | None = None,
) -> list[NDArray]:
    """Gather several arrays, as one operation: all or none; see :func:`allgather`.

    The first dimension may differ from rank to rank, and be 0; the result's is the sum of all.

    The call waits until all ranks' arrays are computed and the size of the result is known. The result has a
    gradient, where every rank runs the same backward.

    Returns at once: MXNet's engine runs it once the arrays are ready, and reads of the results wait for it.
    What fails after the call has returned is raised by these reads.

    Args:
        tensors: arrays, as many on every rank, in the same order; each as ``tensor`` of :func:`allgather`.
            Their dtypes may differ.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        priority: of the operations that are ready, those of higher priority are run first.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.
        exact_gradient: True: the gradient is that of the sum of all ranks' losses. False: divided by the
            number of ranks, as in Horovod. None: as the environment variable ``POLYHVD_EXACT_GRADIENTS``
            says, which is False by default. The same on every rank.

    Returns:
        New arrays in the order of ``tensors``, each with the rows of all ranks.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process set; nothing
            was sent. It is an MXNetError, too.
        TypeError: an argument is no array, or its dtype cannot be sent.
        RankMismatchError: the ranks' shapes, dtypes or arguments differ; on every rank, where the result is
            read. It is an MXNetError, too.
        HorovodInternalError: a rank was lost or has shut down, or a transfer has timed out; where the result
            is read. It is an MXNetError, too.

    Example::

        import mxnet as mx
        import polyhvd.mxnet as hvd
        hvd.init()
        images, labels = hvd.grouped_allgather([mx.nd.ones((2, 3)), mx.nd.ones((2,))])
    """
    return functions.grouped_allgather(
        tensors,
        name=name,
        priority=priority,
        process_set=process_set,
        exact_gradient=exact_gradient,
    )


def grouped_allgather_async(
    tensors: Iterable[NDArray],
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    exact_gradient: bool | None = None,
) -> Handle[list[NDArray]]:
    """Start :func:`grouped_allgather`, and return at once.

    Leave the arrays alone until ``synchronize()`` has returned.

    Args:
        tensors: arrays, as many on every rank, in the same order; each as ``tensor`` of
            :func:`allgather_async`. Their dtypes may differ.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        priority: of the operations that are ready, those of higher priority are run first.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.
        exact_gradient: True: the gradient is that of the sum of all ranks' losses. False: divided by the
            number of ranks, as in Horovod. None: as the environment variable ``POLYHVD_EXACT_GRADIENTS``
            says, which is False by default. The same on every rank.

    Returns:
        A handle for ``poll()`` and ``synchronize()``, which returns the list of new arrays and raises what
        went wrong.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process set; nothing
            was sent. It is an MXNetError, too.
        TypeError: an argument is no array, or its dtype cannot be sent.
        RankMismatchError: the ranks' shapes, dtypes or arguments differ; on every rank, where the result is
            read. It is an MXNetError, too.
        HorovodInternalError: a rank was lost or has shut down, or a transfer has timed out; where the result
            is read. It is an MXNetError, too.

    Example::

        import mxnet as mx
        import polyhvd.mxnet as hvd
        hvd.init()
        handle = hvd.grouped_allgather_async([mx.nd.ones((2, 3)), mx.nd.ones((2,))])
        images, labels = hvd.synchronize(handle)
    """
    return functions.grouped_allgather_async(
        tensors,
        name=name,
        priority=priority,
        process_set=process_set,
        exact_gradient=exact_gradient,
    )


def broadcast(
    tensor: NDArray | Number,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    exact_gradient: bool | None = None,
) -> NDArray:
    """Return a copy of the root's array, or number, on every rank.

    The result has a gradient, where every rank runs the same backward.

    Returns at once: MXNet's engine runs it once the arrays are ready, and reads of the results wait for it.
    What fails after the call has returned is raised by these reads.

    Args:
        tensor: an array of any shape, which may be empty, or a number, which stands for an array without
            dimensions; shape and dtype are the same on every rank: float16, bfloat16, float32, float64,
            uint8, int8, int32, int64, or bool. Its values matter on the root alone.
        root_rank: world rank of the sender, which is a member of the process set.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        priority: of the operations that are ready, those of higher priority are run first.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.
        exact_gradient: True: the gradient is that of the sum of all ranks' losses. False: divided by the
            number of ranks, as in Horovod. None: as the environment variable ``POLYHVD_EXACT_GRADIENTS``
            says, which is False by default. The same on every rank.

    Returns:
        A new array, on the root as well.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process set; nothing
            was sent. It is an MXNetError, too.
        TypeError: an argument is no array, or its dtype cannot be sent.
        RankMismatchError: the ranks' shapes, dtypes or arguments differ; on every rank, where the result is
            read. It is an MXNetError, too.
        HorovodInternalError: a rank was lost or has shut down, or a transfer has timed out; where the result
            is read. It is an MXNetError, too.

    Example::

        import mxnet as mx
        import polyhvd.mxnet as hvd
        hvd.init()
        weights = hvd.broadcast(mx.nd.ones((3,)), root_rank=0)
    """
    return functions.broadcast(
        tensor,
        root_rank,
        name=name,
        priority=priority,
        process_set=process_set,
        exact_gradient=exact_gradient,
    )


def broadcast_(
    tensor: NDArray,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> NDArray:
    """Overwrite an array with the root's, on every rank.

    The result is unknown to autograd.

    Returns at once: MXNet's engine runs it once the arrays are ready, and reads of the results wait for it.
    What fails after the call has returned is raised by these reads.

    Args:
        tensor: an array of any shape, which is overwritten; shape and dtype are the same on every rank:
            float16, bfloat16, float32, float64, uint8, int8, int32, int64, or bool. The root's is only read.
        root_rank: world rank of the sender, which is a member of the process set.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        priority: of the operations that are ready, those of higher priority are run first.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.

    Returns:
        ``tensor`` itself.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process set; nothing
            was sent. It is an MXNetError, too.
        TypeError: an argument is no array, or its dtype cannot be sent.
        RankMismatchError: the ranks' shapes, dtypes or arguments differ; on every rank, where the result is
            read. It is an MXNetError, too.
        HorovodInternalError: a rank was lost or has shut down, or a transfer has timed out; where the result
            is read. It is an MXNetError, too.

    Example::

        import mxnet as mx
        import polyhvd.mxnet as hvd
        hvd.init()
        weights = mx.nd.ones((3,))
        hvd.broadcast_(weights, root_rank=0)
    """
    return functions.broadcast_(tensor, root_rank, name=name, priority=priority, process_set=process_set)


def broadcast_async(
    tensor: NDArray | Number,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    exact_gradient: bool | None = None,
) -> Handle[NDArray]:
    """Start :func:`broadcast`, and return at once.

    Leave the array alone until ``synchronize()`` has returned.

    Args:
        tensor: an array of any shape, which may be empty, or a number, which stands for an array without
            dimensions; shape and dtype are the same on every rank: float16, bfloat16, float32, float64,
            uint8, int8, int32, int64, or bool. Its values matter on the root alone.
        root_rank: world rank of the sender, which is a member of the process set.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        priority: of the operations that are ready, those of higher priority are run first.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.
        exact_gradient: True: the gradient is that of the sum of all ranks' losses. False: divided by the
            number of ranks, as in Horovod. None: as the environment variable ``POLYHVD_EXACT_GRADIENTS``
            says, which is False by default. The same on every rank.

    Returns:
        A handle for ``poll()`` and ``synchronize()``, which returns the new array and raises what went wrong.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process set; nothing
            was sent. It is an MXNetError, too.
        TypeError: an argument is no array, or its dtype cannot be sent.
        RankMismatchError: the ranks' shapes, dtypes or arguments differ; on every rank, where the result is
            read. It is an MXNetError, too.
        HorovodInternalError: a rank was lost or has shut down, or a transfer has timed out; where the result
            is read. It is an MXNetError, too.

    Example::

        import mxnet as mx
        import polyhvd.mxnet as hvd
        hvd.init()
        handle = hvd.broadcast_async(mx.nd.ones((3,)), root_rank=0)
        weights = hvd.synchronize(handle)
    """
    return functions.broadcast_async(
        tensor,
        root_rank,
        name=name,
        priority=priority,
        process_set=process_set,
        exact_gradient=exact_gradient,
    )


def broadcast_async_(
    tensor: NDArray,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Handle[NDArray]:
    """Start :func:`broadcast_`, and return at once.

    Leave the array alone until ``synchronize()`` has returned.

    Args:
        tensor: an array of any shape, which is overwritten; shape and dtype are the same on every rank:
            float16, bfloat16, float32, float64, uint8, int8, int32, int64, or bool. The root's is only read.
        root_rank: world rank of the sender, which is a member of the process set.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        priority: of the operations that are ready, those of higher priority are run first.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.

    Returns:
        A handle for ``poll()`` and ``synchronize()``, which returns ``tensor`` and raises what went wrong.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process set; nothing
            was sent. It is an MXNetError, too.
        TypeError: an argument is no array, or its dtype cannot be sent.
        RankMismatchError: the ranks' shapes, dtypes or arguments differ; on every rank, where the result is
            read. It is an MXNetError, too.
        HorovodInternalError: a rank was lost or has shut down, or a transfer has timed out; where the result
            is read. It is an MXNetError, too.

    Example::

        import mxnet as mx
        import polyhvd.mxnet as hvd
        hvd.init()
        weights = mx.nd.ones((3,))
        handle = hvd.broadcast_async_(weights, root_rank=0)
        hvd.synchronize(handle)
    """
    return functions.broadcast_async_(
        tensor,
        root_rank,
        name=name,
        priority=priority,
        process_set=process_set,
    )


@overload
def alltoall(
    tensor: NDArray,
    splits: None = None,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> NDArray: ...


@overload
def alltoall(
    tensor: NDArray,
    splits: Sequence[int] | NDArray,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> tuple[NDArray, NDArray]: ...


def alltoall(
    tensor: NDArray,
    splits: Sequence[int] | NDArray | None = None,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> NDArray | tuple[NDArray, NDArray]:
    """Exchange rows with all ranks.

    Each rank sends consecutive rows of its array to the ranks in turn, and gets what they have sent to it, in
    order of rank.

    The call waits until all ranks have told their splits, not for the data. The rows have a gradient, where
    every rank runs the same backward.

    Returns at once: MXNet's engine runs it once the arrays are ready, and reads of the results wait for it.
    What fails after the call has returned is raised by these reads.

    Args:
        tensor: an array with at least one dimension. All dimensions but the first, and the dtype, are the
            same on every rank: float16, bfloat16, float32, float64, uint8, int8, int32, int64, or bool.
        splits: how many rows go to each rank of the process set, in order of rank: whole numbers, at most as
            many in all as ``tensor`` has. None: equal parts.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        priority: of the operations that are ready, those of higher priority are run first.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.

    Returns:
        A new array with the received rows. With ``splits`` a tuple of it and of how many rows came from each
        rank, as int32.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process set; nothing
            was sent. It is an MXNetError, too.
        TypeError: an argument is no array, or its dtype cannot be sent.
        RankMismatchError: the ranks' shapes, dtypes or arguments differ; on every rank, where the result is
            read. It is an MXNetError, too.
        HorovodInternalError: a rank was lost or has shut down, or a transfer has timed out; where the result
            is read. It is an MXNetError, too.

    Example::

        import mxnet as mx
        import polyhvd.mxnet as hvd
        hvd.init()
        rows = mx.nd.ones((2 * hvd.size(), 3))
        received, counts = hvd.alltoall(rows, splits=[2] * hvd.size())  # two rows for each rank
    """
    return functions.alltoall(tensor, splits, name=name, priority=priority, process_set=process_set)


def alltoall_async(
    tensor: NDArray,
    splits: Sequence[int] | NDArray | None = None,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Handle[tuple[NDArray, NDArray]]:
    """Start :func:`alltoall`, and return at once.

    Leave the array alone until ``synchronize()`` has returned.

    Args:
        tensor: an array with at least one dimension. All dimensions but the first, and the dtype, are the
            same on every rank: float16, bfloat16, float32, float64, uint8, int8, int32, int64, or bool.
        splits: how many rows go to each rank of the process set, in order of rank: whole numbers, at most as
            many in all as ``tensor`` has. None: equal parts.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        priority: of the operations that are ready, those of higher priority are run first.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.

    Returns:
        A handle for ``poll()`` and ``synchronize()``, which returns the tuple of the received rows and of how
        many came from each rank, also without ``splits``, and raises what went wrong.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process set; nothing
            was sent. It is an MXNetError, too.
        TypeError: an argument is no array, or its dtype cannot be sent.
        RankMismatchError: the ranks' shapes, dtypes or arguments differ; on every rank, where the result is
            read. It is an MXNetError, too.
        HorovodInternalError: a rank was lost or has shut down, or a transfer has timed out; where the result
            is read. It is an MXNetError, too.

    Example::

        import mxnet as mx
        import polyhvd.mxnet as hvd
        hvd.init()
        handle = hvd.alltoall_async(mx.nd.ones((2 * hvd.size(), 3)))
        received, counts = hvd.synchronize(handle)
    """
    return functions.alltoall_async(tensor, splits, name=name, priority=priority, process_set=process_set)


def reducescatter(
    tensor: NDArray,
    op: int = ReduceOp.Average,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    exact_gradient: bool | None = None,
) -> NDArray:
    """Reduce an array elementwise over the ranks, and return this rank's part of the rows.

    Rows are dealt out in order of rank; where they do not divide, the first ranks get one more.

    Sums and averages have a gradient, where every rank runs the same backward.

    Returns at once: MXNet's engine runs it once the arrays are ready, and reads of the results wait for it.
    What fails after the call has returned is raised by these reads.

    Args:
        tensor: an array with at least one dimension; shape and dtype are the same on every rank: float16,
            bfloat16, float32, float64, uint8, int8, int32, int64, or bool.
        op: Average, Sum, Min, Max or Product of the module. The average of integers is truncated, and bool
            has none. Adasum, which needs whole arrays, is refused.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        priority: of the operations that are ready, those of higher priority are run first.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.
        prescale_factor: multiplies each rank's array before the reduction, integers as float64.
        postscale_factor: multiplies the result, likewise.
        exact_gradient: True: the gradient is that of the sum of all ranks' losses. False: multiplied by the
            number of ranks, as in Horovod. None: as the environment variable ``POLYHVD_EXACT_GRADIENTS``
            says, which is False by default. The same on every rank.

    Returns:
        A new array with this rank's rows of the result.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process set; nothing
            was sent. It is an MXNetError, too.
        TypeError: an argument is no array, or its dtype cannot be sent.
        RankMismatchError: the ranks' shapes, dtypes or arguments differ; on every rank, where the result is
            read. It is an MXNetError, too.
        HorovodInternalError: a rank was lost or has shut down, or a transfer has timed out; where the result
            is read. It is an MXNetError, too.

    Example::

        import mxnet as mx
        import polyhvd.mxnet as hvd
        hvd.init()
        rows = hvd.reducescatter(mx.nd.ones((2 * hvd.size(), 3)), op=hvd.Sum)  # of shape (2, 3)
    """
    return functions.reducescatter(
        tensor,
        op=op,
        name=name,
        priority=priority,
        process_set=process_set,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        exact_gradient=exact_gradient,
    )


def reducescatter_async(
    tensor: NDArray,
    op: int = ReduceOp.Average,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    exact_gradient: bool | None = None,
) -> Handle[NDArray]:
    """Start :func:`reducescatter`, and return at once.

    Leave the array alone until ``synchronize()`` has returned.

    Args:
        tensor: an array with at least one dimension; shape and dtype are the same on every rank: float16,
            bfloat16, float32, float64, uint8, int8, int32, int64, or bool.
        op: Average, Sum, Min, Max or Product of the module. The average of integers is truncated, and bool
            has none. Adasum, which needs whole arrays, is refused.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        priority: of the operations that are ready, those of higher priority are run first.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.
        prescale_factor: multiplies each rank's array before the reduction, integers as float64.
        postscale_factor: multiplies the result, likewise.
        exact_gradient: True: the gradient is that of the sum of all ranks' losses. False: multiplied by the
            number of ranks, as in Horovod. None: as the environment variable ``POLYHVD_EXACT_GRADIENTS``
            says, which is False by default. The same on every rank.

    Returns:
        A handle for ``poll()`` and ``synchronize()``, which returns the new array and raises what went wrong.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process set; nothing
            was sent. It is an MXNetError, too.
        TypeError: an argument is no array, or its dtype cannot be sent.
        RankMismatchError: the ranks' shapes, dtypes or arguments differ; on every rank, where the result is
            read. It is an MXNetError, too.
        HorovodInternalError: a rank was lost or has shut down, or a transfer has timed out; where the result
            is read. It is an MXNetError, too.

    Example::

        import mxnet as mx
        import polyhvd.mxnet as hvd
        hvd.init()
        handle = hvd.reducescatter_async(mx.nd.ones((2 * hvd.size(), 3)), op=hvd.Sum)
        rows = hvd.synchronize(handle)  # of shape (2, 3)
    """
    return functions.reducescatter_async(
        tensor,
        op=op,
        name=name,
        priority=priority,
        process_set=process_set,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        exact_gradient=exact_gradient,
    )


def grouped_reducescatter(
    tensors: Iterable[NDArray],
    op: int = ReduceOp.Average,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    exact_gradient: bool | None = None,
) -> list[NDArray]:
    """Reduce several arrays and return this rank's rows, as one operation: all or none.

    Rows are dealt out in order of rank; where they do not divide, the first ranks get one more.

    Sums and averages have a gradient, where every rank runs the same backward.

    Returns at once: MXNet's engine runs it once the arrays are ready, and reads of the results wait for it.
    What fails after the call has returned is raised by these reads.

    Args:
        tensors: arrays, as many on every rank, in the same order; each as ``tensor`` of
            :func:`reducescatter`. Their dtypes may differ.
        op: Average, Sum, Min, Max or Product of the module. The average of integers is truncated, and bool
            has none. Adasum, which needs whole arrays, is refused.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        priority: of the operations that are ready, those of higher priority are run first.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.
        prescale_factor: multiplies each rank's array before the reduction, integers as float64.
        postscale_factor: multiplies the result, likewise.
        exact_gradient: True: the gradient is that of the sum of all ranks' losses. False: multiplied by the
            number of ranks, as in Horovod. None: as the environment variable ``POLYHVD_EXACT_GRADIENTS``
            says, which is False by default. The same on every rank.

    Returns:
        New arrays in the order of ``tensors``, each with this rank's rows of the result.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process set; nothing
            was sent. It is an MXNetError, too.
        TypeError: an argument is no array, or its dtype cannot be sent.
        RankMismatchError: the ranks' shapes, dtypes or arguments differ; on every rank, where the result is
            read. It is an MXNetError, too.
        HorovodInternalError: a rank was lost or has shut down, or a transfer has timed out; where the result
            is read. It is an MXNetError, too.

    Example::

        import mxnet as mx
        import polyhvd.mxnet as hvd
        hvd.init()
        pair = [mx.nd.ones((2 * hvd.size(), 3)), mx.nd.ones((hvd.size(),))]
        first, second = hvd.grouped_reducescatter(pair)
    """
    return functions.grouped_reducescatter(
        tensors,
        op=op,
        name=name,
        priority=priority,
        process_set=process_set,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        exact_gradient=exact_gradient,
    )


def grouped_reducescatter_async(
    tensors: Iterable[NDArray],
    op: int = ReduceOp.Average,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    exact_gradient: bool | None = None,
) -> Handle[list[NDArray]]:
    """Start :func:`grouped_reducescatter`, and return at once.

    Leave the arrays alone until ``synchronize()`` has returned.

    Args:
        tensors: arrays, as many on every rank, in the same order; each as ``tensor`` of
            :func:`reducescatter_async`. Their dtypes may differ.
        op: Average, Sum, Min, Max or Product of the module. The average of integers is truncated, and bool
            has none. Adasum, which needs whole arrays, is refused.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        priority: of the operations that are ready, those of higher priority are run first.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.
        prescale_factor: multiplies each rank's array before the reduction, integers as float64.
        postscale_factor: multiplies the result, likewise.
        exact_gradient: True: the gradient is that of the sum of all ranks' losses. False: multiplied by the
            number of ranks, as in Horovod. None: as the environment variable ``POLYHVD_EXACT_GRADIENTS``
            says, which is False by default. The same on every rank.

    Returns:
        A handle for ``poll()`` and ``synchronize()``, which returns the list of new arrays and raises what
        went wrong.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process set; nothing
            was sent. It is an MXNetError, too.
        TypeError: an argument is no array, or its dtype cannot be sent.
        RankMismatchError: the ranks' shapes, dtypes or arguments differ; on every rank, where the result is
            read. It is an MXNetError, too.
        HorovodInternalError: a rank was lost or has shut down, or a transfer has timed out; where the result
            is read. It is an MXNetError, too.

    Example::

        import mxnet as mx
        import polyhvd.mxnet as hvd
        hvd.init()
        pair = [mx.nd.ones((2 * hvd.size(), 3)), mx.nd.ones((hvd.size(),))]
        handle = hvd.grouped_reducescatter_async(pair)
        first, second = hvd.synchronize(handle)
    """
    return functions.grouped_reducescatter_async(
        tensors,
        op=op,
        name=name,
        priority=priority,
        process_set=process_set,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        exact_gradient=exact_gradient,
    )


def poll(
    handle: Handle[R],
) -> bool:
    """Say whether :func:`synchronize` would return without waiting.

    Args:
        handle: what an asynchronous function has returned.

    Returns:
        True when the operation has ended, also with an error. Raises nothing.

    Example::

        import mxnet as mx
        import polyhvd.mxnet as hvd
        hvd.init()
        handle = hvd.allreduce_async(mx.nd.ones((3,)))
        is_done = hvd.poll(handle)
        hvd.synchronize(handle)
    """
    return functions.poll(handle)


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
        RankMismatchError: the ranks' shapes, dtypes or arguments differ; on every rank, where the result is
            read. It is an MXNetError, too.
        HorovodInternalError: a rank was lost or has shut down, or a transfer has timed out; where the result
            is read. It is an MXNetError, too.

    Example::

        import mxnet as mx
        import polyhvd.mxnet as hvd
        hvd.init()
        handle = hvd.allreduce_async(mx.nd.ones((3,)))
        mean = hvd.synchronize(handle)
    """
    return functions.synchronize(handle)


def join() -> int:
    """Say that this rank has run out of data, and return when all ranks have.

    Meanwhile it takes part in the operations of the others: with zeros in sums and averages, which still
    divide by the number of ranks, with neutral elements in other reductions, and without rows in allgather
    and alltoall. It cannot be the root of a broadcast, nor start an operation of its own. For process sets
    that others have added meanwhile, ask ``process_set_of()`` afterwards.

    It waits first for everything that MXNet's engine was given, and raises what of it has failed unnoticed.

    Returns:
        The rank that joined last: it has seen the most data.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        HorovodInternalError: a rank was lost or has shut down, or a transfer has timed out; where the result
            is read. It is an MXNetError, too.

    Example::

        import mxnet as mx
        import polyhvd.mxnet as hvd
        hvd.init()
        for batch in batches:  # as many as this rank has
            train(batch)
        last = hvd.join()
    """
    return functions.join()
