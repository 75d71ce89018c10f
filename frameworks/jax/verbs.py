"""The collectives for JAX, with Horovod's signatures.

Made by ``make verbs`` from polyhvd/collectives/table and from dialect.py: change these instead. What the
functions do is in polyhvd/collectives/functions.py, and in functions.py for what is peculiar to JAX.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar, overload

import jax
from polyhvd.jax.functions import Compression, functions

from polyhvd.collectives.adapter import Handle, ReduceOp
from polyhvd.collectives.operation import Number
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


def allreduce(
    tensor: jax.Array | Number,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor | KeyedCompressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> jax.Array:
    """Reduce an array, or a number, elementwise over the ranks into a new array.

    All ranks get the same result, bit by bit.

    Differentiable for Average and Sum, in reverse, where every rank runs the same backward. May be called in
    ``jax.jit``, where it is a callback on the host that runs in its place among the collectives of the
    program, exactly once each time.

    Args:
        tensor: an array of any shape, which may be empty, or a number, which stands for an array without
            dimensions; shape and dtype are the same on every rank: float16, bfloat16, float32, integers of 8
            to 32 bits, or bool, on one device; with jax_enable_x64 float64 and integers of 64 bits, too.
        average: the older form of ``op``: True is Average, False is Sum. Give one of the two at most.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        compression: ``Compression.none``, ``.fp16`` or ``.bf16``: float32 and float64 are sent, and reduced,
            in that dtype, and the result is cast back. Or an object with the same two methods, or a
            KeyedCompressor, which keeps its state by ``name`` and so needs one.
        op: Average, Sum, Adasum, Min, Max or Product of the module; None is Average. The average of integers
            is truncated, and bool has none. Adasum takes floating-point numbers alone.
        prescale_factor: multiplies each rank's array before the reduction, integers as float64.
        postscale_factor: multiplies the result, likewise.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.

    Returns:
        A new array of the same shape and dtype.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process set; nothing
            was sent.
        TypeError: an argument is no array, or its dtype cannot be sent.
        RankMismatchError: the ranks' shapes, dtypes or arguments differ; on every rank, and the job goes on.
        HorovodInternalError: a rank was lost or has shut down, or a transfer has timed out.

    Example::

        import jax.numpy as jnp
        import polyhvd.jax as hvd
        hvd.init()
        mean = hvd.allreduce(jnp.array([1.0, 2.0]))
        total = hvd.allreduce(jnp.array([1.0, 2.0]), op=hvd.Sum)  # [1.0 * hvd.size(), 2.0 * hvd.size()]
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
    )


def allreduce_async(
    tensor: jax.Array | Number,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[jax.Array]:
    """Start :func:`allreduce`, and return at once.

    Leave the array alone until ``synchronize()`` has returned.

    For arrays outside of ``jax.jit``; the result is unknown to ``jax.grad``.

    Args:
        tensor: an array of any shape, which may be empty, or a number, which stands for an array without
            dimensions; shape and dtype are the same on every rank: float16, bfloat16, float32, integers of 8
            to 32 bits, or bool, on one device; with jax_enable_x64 float64 and integers of 64 bits, too.
        average: the older form of ``op``: True is Average, False is Sum. Give one of the two at most.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        op: Average, Sum, Adasum, Min, Max or Product of the module; None is Average. The average of integers
            is truncated, and bool has none. Adasum takes floating-point numbers alone.
        prescale_factor: multiplies each rank's array before the reduction, integers as float64.
        postscale_factor: multiplies the result, likewise.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.

    Returns:
        A handle for ``poll()`` and ``synchronize()``, which returns the new array and raises what went wrong.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process set; nothing
            was sent.
        TypeError: an argument is no array, or its dtype cannot be sent.
        RankMismatchError: the ranks' shapes, dtypes or arguments differ; on every rank, and the job goes on.
        HorovodInternalError: a rank was lost or has shut down, or a transfer has timed out.

    Example::

        import jax.numpy as jnp
        import polyhvd.jax as hvd
        hvd.init()
        handle = hvd.allreduce_async(jnp.ones((3,)), op=hvd.Sum)
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


def grouped_allreduce(
    tensors: Iterable[jax.Array],
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor | KeyedCompressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[jax.Array]:
    """Reduce several arrays over the ranks into new ones, as one operation: all or none.

    All ranks get the same result, bit by bit.

    Differentiable for Average and Sum, in reverse, where every rank runs the same backward. May be called in
    ``jax.jit``, where it is a callback on the host that runs in its place among the collectives of the
    program, exactly once each time.

    Args:
        tensors: arrays, as many on every rank, in the same order; each as ``tensor`` of :func:`allreduce`.
            Their dtypes may differ.
        average: the older form of ``op``: True is Average, False is Sum. Give one of the two at most.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        compression: ``Compression.none``, ``.fp16`` or ``.bf16``: float32 and float64 are sent, and reduced,
            in that dtype, and the result is cast back. Or an object with the same two methods, or a
            KeyedCompressor, which keeps its state by ``name`` and so needs one.
        op: Average, Sum, Adasum, Min, Max or Product of the module; None is Average. The average of integers
            is truncated, and bool has none. Adasum takes floating-point numbers alone.
        prescale_factor: multiplies each rank's array before the reduction, integers as float64.
        postscale_factor: multiplies the result, likewise.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.

    Returns:
        New arrays in the order of ``tensors``, of the same shapes and dtypes.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process set; nothing
            was sent.
        TypeError: an argument is no array, or its dtype cannot be sent.
        RankMismatchError: the ranks' shapes, dtypes or arguments differ; on every rank, and the job goes on.
        HorovodInternalError: a rank was lost or has shut down, or a transfer has timed out.

    Example::

        import jax.numpy as jnp
        import polyhvd.jax as hvd
        hvd.init()
        weight, bias = hvd.grouped_allreduce([jnp.ones((2, 3)), jnp.ones((3,))])
    """
    return functions.grouped_allreduce(
        tensors,
        average=average,
        name=name,
        compression=compression,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )


def grouped_allreduce_async(
    tensors: Iterable[jax.Array],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[jax.Array]]:
    """Start :func:`grouped_allreduce`, and return at once.

    Leave the arrays alone until ``synchronize()`` has returned.

    For arrays outside of ``jax.jit``; the result is unknown to ``jax.grad``.

    Args:
        tensors: arrays, as many on every rank, in the same order; each as ``tensor`` of
            :func:`allreduce_async`. Their dtypes may differ.
        average: the older form of ``op``: True is Average, False is Sum. Give one of the two at most.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        op: Average, Sum, Adasum, Min, Max or Product of the module; None is Average. The average of integers
            is truncated, and bool has none. Adasum takes floating-point numbers alone.
        prescale_factor: multiplies each rank's array before the reduction, integers as float64.
        postscale_factor: multiplies the result, likewise.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.

    Returns:
        A handle for ``poll()`` and ``synchronize()``, which returns the list of new arrays and raises what
        went wrong.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process set; nothing
            was sent.
        TypeError: an argument is no array, or its dtype cannot be sent.
        RankMismatchError: the ranks' shapes, dtypes or arguments differ; on every rank, and the job goes on.
        HorovodInternalError: a rank was lost or has shut down, or a transfer has timed out.

    Example::

        import jax.numpy as jnp
        import polyhvd.jax as hvd
        hvd.init()
        handle = hvd.grouped_allreduce_async([jnp.ones((2, 3)), jnp.ones((3,))])
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


def allgather(
    tensor: jax.Array,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    exact_gradient: bool | None = None,
) -> jax.Array:
    """Concatenate the ranks' arrays along the first dimension, in order of rank, on every rank.

    The first dimension may differ from rank to rank, and be 0; the result's is the sum of all.

    Differentiable, in reverse, where every rank runs the same backward. May be called in ``jax.jit``, where
    it is a callback on the host that runs in its place among the collectives of the program, exactly once
    each time. There all ranks have the same number of rows, since a result's shape is known beforehand.

    Args:
        tensor: an array with at least one dimension. All dimensions but the first, and the dtype, are the
            same on every rank: float16, bfloat16, float32, integers of 8 to 32 bits, or bool, on one device;
            with jax_enable_x64 float64 and integers of 64 bits, too.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.
        exact_gradient: True: the gradient is that of the sum of all ranks' losses. False: divided by the
            number of ranks, as in Horovod. None: as the environment variable ``POLYHVD_EXACT_GRADIENTS``
            says, which is False by default. The same on every rank.

    Returns:
        A new array with the rows of all ranks.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process set; nothing
            was sent.
        TypeError: an argument is no array, or its dtype cannot be sent.
        RankMismatchError: the ranks' shapes, dtypes or arguments differ; on every rank, and the job goes on.
        HorovodInternalError: a rank was lost or has shut down, or a transfer has timed out.

    Example::

        import jax.numpy as jnp
        import polyhvd.jax as hvd
        hvd.init()
        rows = hvd.allgather(jnp.ones((2, 3)))  # of shape (2 * hvd.size(), 3)
    """
    return functions.allgather(tensor, name=name, process_set=process_set, exact_gradient=exact_gradient)


def allgather_async(
    tensor: jax.Array,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[jax.Array]:
    """Start :func:`allgather`, and return at once.

    Leave the array alone until ``synchronize()`` has returned.

    For arrays outside of ``jax.jit``; the result is unknown to ``jax.grad``.

    Args:
        tensor: an array with at least one dimension. All dimensions but the first, and the dtype, are the
            same on every rank: float16, bfloat16, float32, integers of 8 to 32 bits, or bool, on one device;
            with jax_enable_x64 float64 and integers of 64 bits, too.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.

    Returns:
        A handle for ``poll()`` and ``synchronize()``, which returns the new array and raises what went wrong.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process set; nothing
            was sent.
        TypeError: an argument is no array, or its dtype cannot be sent.
        RankMismatchError: the ranks' shapes, dtypes or arguments differ; on every rank, and the job goes on.
        HorovodInternalError: a rank was lost or has shut down, or a transfer has timed out.

    Example::

        import jax.numpy as jnp
        import polyhvd.jax as hvd
        hvd.init()
        handle = hvd.allgather_async(jnp.ones((2, 3)))
        rows = hvd.synchronize(handle)  # of shape (2 * hvd.size(), 3)
    """
    return functions.allgather_async(tensor, name=name, process_set=process_set)


def grouped_allgather(
    tensors: Iterable[jax.Array],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    exact_gradient: bool | None = None,
) -> list[jax.Array]:
    """Gather several arrays, as one operation: all or none; see :func:`allgather`.

    The first dimension may differ from rank to rank, and be 0; the result's is the sum of all.

    Differentiable, in reverse, where every rank runs the same backward. May be called in ``jax.jit``, where
    it is a callback on the host that runs in its place among the collectives of the program, exactly once
    each time. There all ranks have the same number of rows, since a result's shape is known beforehand.

    Args:
        tensors: arrays, as many on every rank, in the same order; each as ``tensor`` of :func:`allgather`.
            Their dtypes may differ.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.
        exact_gradient: True: the gradient is that of the sum of all ranks' losses. False: divided by the
            number of ranks, as in Horovod. None: as the environment variable ``POLYHVD_EXACT_GRADIENTS``
            says, which is False by default. The same on every rank.

    Returns:
        New arrays in the order of ``tensors``, each with the rows of all ranks.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process set; nothing
            was sent.
        TypeError: an argument is no array, or its dtype cannot be sent.
        RankMismatchError: the ranks' shapes, dtypes or arguments differ; on every rank, and the job goes on.
        HorovodInternalError: a rank was lost or has shut down, or a transfer has timed out.

    Example::

        import jax.numpy as jnp
        import polyhvd.jax as hvd
        hvd.init()
        images, labels = hvd.grouped_allgather([jnp.ones((2, 3)), jnp.ones((2,))])
    """
    return functions.grouped_allgather(
        tensors,
        name=name,
        process_set=process_set,
        exact_gradient=exact_gradient,
    )


def grouped_allgather_async(
    tensors: Iterable[jax.Array],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[jax.Array]]:
    """Start :func:`grouped_allgather`, and return at once.

    Leave the arrays alone until ``synchronize()`` has returned.

    For arrays outside of ``jax.jit``; the result is unknown to ``jax.grad``.

    Args:
        tensors: arrays, as many on every rank, in the same order; each as ``tensor`` of
            :func:`allgather_async`. Their dtypes may differ.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.

    Returns:
        A handle for ``poll()`` and ``synchronize()``, which returns the list of new arrays and raises what
        went wrong.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process set; nothing
            was sent.
        TypeError: an argument is no array, or its dtype cannot be sent.
        RankMismatchError: the ranks' shapes, dtypes or arguments differ; on every rank, and the job goes on.
        HorovodInternalError: a rank was lost or has shut down, or a transfer has timed out.

    Example::

        import jax.numpy as jnp
        import polyhvd.jax as hvd
        hvd.init()
        handle = hvd.grouped_allgather_async([jnp.ones((2, 3)), jnp.ones((2,))])
        images, labels = hvd.synchronize(handle)
    """
    return functions.grouped_allgather_async(tensors, name=name, process_set=process_set)


def broadcast(
    tensor: jax.Array | Number,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    exact_gradient: bool | None = None,
) -> jax.Array:
    """Return a copy of the root's array, or number, on every rank.

    Differentiable, in reverse, where every rank runs the same backward. May be called in ``jax.jit``, where
    it is a callback on the host that runs in its place among the collectives of the program, exactly once
    each time.

    Args:
        tensor: an array of any shape, which may be empty, or a number, which stands for an array without
            dimensions; shape and dtype are the same on every rank: float16, bfloat16, float32, integers of 8
            to 32 bits, or bool, on one device; with jax_enable_x64 float64 and integers of 64 bits, too. Its
            values matter on the root alone.
        root_rank: world rank of the sender, which is a member of the process set.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.
        exact_gradient: True: the gradient is that of the sum of all ranks' losses. False: divided by the
            number of ranks, as in Horovod. None: as the environment variable ``POLYHVD_EXACT_GRADIENTS``
            says, which is False by default. The same on every rank.

    Returns:
        A new array, on the root as well.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process set; nothing
            was sent.
        TypeError: an argument is no array, or its dtype cannot be sent.
        RankMismatchError: the ranks' shapes, dtypes or arguments differ; on every rank, and the job goes on.
        HorovodInternalError: a rank was lost or has shut down, or a transfer has timed out.

    Example::

        import jax.numpy as jnp
        import polyhvd.jax as hvd
        hvd.init()
        weights = hvd.broadcast(jnp.ones((3,)), root_rank=0)
    """
    return functions.broadcast(
        tensor,
        root_rank,
        name=name,
        process_set=process_set,
        exact_gradient=exact_gradient,
    )


def broadcast_async(
    tensor: jax.Array | Number,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[jax.Array]:
    """Start :func:`broadcast`, and return at once.

    Leave the array alone until ``synchronize()`` has returned.

    For arrays outside of ``jax.jit``; the result is unknown to ``jax.grad``.

    Args:
        tensor: an array of any shape, which may be empty, or a number, which stands for an array without
            dimensions; shape and dtype are the same on every rank: float16, bfloat16, float32, integers of 8
            to 32 bits, or bool, on one device; with jax_enable_x64 float64 and integers of 64 bits, too. Its
            values matter on the root alone.
        root_rank: world rank of the sender, which is a member of the process set.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.

    Returns:
        A handle for ``poll()`` and ``synchronize()``, which returns the new array and raises what went wrong.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process set; nothing
            was sent.
        TypeError: an argument is no array, or its dtype cannot be sent.
        RankMismatchError: the ranks' shapes, dtypes or arguments differ; on every rank, and the job goes on.
        HorovodInternalError: a rank was lost or has shut down, or a transfer has timed out.

    Example::

        import jax.numpy as jnp
        import polyhvd.jax as hvd
        hvd.init()
        handle = hvd.broadcast_async(jnp.ones((3,)), root_rank=0)
        weights = hvd.synchronize(handle)
    """
    return functions.broadcast_async(tensor, root_rank, name=name, process_set=process_set)


@overload
def alltoall(
    tensor: jax.Array,
    splits: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> jax.Array: ...


@overload
def alltoall(
    tensor: jax.Array,
    splits: Sequence[int] | jax.Array,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> tuple[jax.Array, jax.Array]: ...


def alltoall(
    tensor: jax.Array,
    splits: Sequence[int] | jax.Array | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Exchange rows with all ranks.

    Each rank sends consecutive rows of its array to the ranks in turn, and gets what they have sent to it, in
    order of rank.

    Differentiable, in reverse, where every rank runs the same backward. May be called in ``jax.jit``, where
    it is a callback on the host that runs in its place among the collectives of the program, exactly once
    each time. There the parts are equal, since a result's shape is known beforehand.

    Args:
        tensor: an array with at least one dimension. All dimensions but the first, and the dtype, are the
            same on every rank: float16, bfloat16, float32, integers of 8 to 32 bits, or bool, on one device;
            with jax_enable_x64 float64 and integers of 64 bits, too.
        splits: how many rows go to each rank of the process set, in order of rank: whole numbers, at most as
            many in all as ``tensor`` has. None: equal parts.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.

    Returns:
        A new array with the received rows. With ``splits`` a tuple of it and of how many rows came from each
        rank, as int32.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process set; nothing
            was sent.
        TypeError: an argument is no array, or its dtype cannot be sent.
        RankMismatchError: the ranks' shapes, dtypes or arguments differ; on every rank, and the job goes on.
        HorovodInternalError: a rank was lost or has shut down, or a transfer has timed out.

    Example::

        import jax.numpy as jnp
        import polyhvd.jax as hvd
        hvd.init()
        rows = jnp.ones((2 * hvd.size(), 3))
        received, counts = hvd.alltoall(rows, splits=[2] * hvd.size())  # two rows for each rank
    """
    return functions.alltoall(tensor, splits, name=name, process_set=process_set)


def alltoall_async(
    tensor: jax.Array,
    splits: Sequence[int] | jax.Array | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[tuple[jax.Array, jax.Array]]:
    """Start :func:`alltoall`, and return at once.

    Leave the array alone until ``synchronize()`` has returned.

    For arrays outside of ``jax.jit``; the result is unknown to ``jax.grad``.

    Args:
        tensor: an array with at least one dimension. All dimensions but the first, and the dtype, are the
            same on every rank: float16, bfloat16, float32, integers of 8 to 32 bits, or bool, on one device;
            with jax_enable_x64 float64 and integers of 64 bits, too.
        splits: how many rows go to each rank of the process set, in order of rank: whole numbers, at most as
            many in all as ``tensor`` has. None: equal parts.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.

    Returns:
        A handle for ``poll()`` and ``synchronize()``, which returns the tuple of the received rows and of how
        many came from each rank, also without ``splits``, and raises what went wrong.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process set; nothing
            was sent.
        TypeError: an argument is no array, or its dtype cannot be sent.
        RankMismatchError: the ranks' shapes, dtypes or arguments differ; on every rank, and the job goes on.
        HorovodInternalError: a rank was lost or has shut down, or a transfer has timed out.

    Example::

        import jax.numpy as jnp
        import polyhvd.jax as hvd
        hvd.init()
        handle = hvd.alltoall_async(jnp.ones((2 * hvd.size(), 3)))
        received, counts = hvd.synchronize(handle)
    """
    return functions.alltoall_async(tensor, splits, name=name, process_set=process_set)


def reducescatter(
    tensor: jax.Array,
    name: str | None = None,
    compression: Compressor | KeyedCompressor = Compression.none,
    op: int = ReduceOp.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    exact_gradient: bool | None = None,
) -> jax.Array:
    """Reduce an array elementwise over the ranks, and return this rank's part of the rows.

    Rows are dealt out in order of rank; where they do not divide, the first ranks get one more.

    Differentiable for Average and Sum, in reverse, where every rank runs the same backward. May be called in
    ``jax.jit``, where it is a callback on the host that runs in its place among the collectives of the
    program, exactly once each time.

    Args:
        tensor: an array with at least one dimension; shape and dtype are the same on every rank: float16,
            bfloat16, float32, integers of 8 to 32 bits, or bool, on one device; with jax_enable_x64 float64
            and integers of 64 bits, too.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        compression: ``Compression.none``, ``.fp16`` or ``.bf16``: float32 and float64 are sent, and reduced,
            in that dtype, and the result is cast back. Or an object with the same two methods, or a
            KeyedCompressor, which keeps its state by ``name`` and so needs one.
        op: Average, Sum, Min, Max or Product of the module. The average of integers is truncated, and bool
            has none. Adasum, which needs whole arrays, is refused.
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
            was sent.
        TypeError: an argument is no array, or its dtype cannot be sent.
        RankMismatchError: the ranks' shapes, dtypes or arguments differ; on every rank, and the job goes on.
        HorovodInternalError: a rank was lost or has shut down, or a transfer has timed out.

    Example::

        import jax.numpy as jnp
        import polyhvd.jax as hvd
        hvd.init()
        rows = hvd.reducescatter(jnp.ones((2 * hvd.size(), 3)), op=hvd.Sum)  # of shape (2, 3)
    """
    return functions.reducescatter(
        tensor,
        name=name,
        compression=compression,
        op=op,
        process_set=process_set,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        exact_gradient=exact_gradient,
    )


def reducescatter_async(
    tensor: jax.Array,
    name: str | None = None,
    op: int = ReduceOp.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[jax.Array]:
    """Start :func:`reducescatter`, and return at once.

    Leave the array alone until ``synchronize()`` has returned.

    For arrays outside of ``jax.jit``; the result is unknown to ``jax.grad``.

    Args:
        tensor: an array with at least one dimension; shape and dtype are the same on every rank: float16,
            bfloat16, float32, integers of 8 to 32 bits, or bool, on one device; with jax_enable_x64 float64
            and integers of 64 bits, too.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        op: Average, Sum, Min, Max or Product of the module. The average of integers is truncated, and bool
            has none. Adasum, which needs whole arrays, is refused.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.
        prescale_factor: multiplies each rank's array before the reduction, integers as float64.
        postscale_factor: multiplies the result, likewise.

    Returns:
        A handle for ``poll()`` and ``synchronize()``, which returns the new array and raises what went wrong.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process set; nothing
            was sent.
        TypeError: an argument is no array, or its dtype cannot be sent.
        RankMismatchError: the ranks' shapes, dtypes or arguments differ; on every rank, and the job goes on.
        HorovodInternalError: a rank was lost or has shut down, or a transfer has timed out.

    Example::

        import jax.numpy as jnp
        import polyhvd.jax as hvd
        hvd.init()
        handle = hvd.reducescatter_async(jnp.ones((2 * hvd.size(), 3)), op=hvd.Sum)
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


def grouped_reducescatter(
    tensors: Iterable[jax.Array],
    name: str | None = None,
    compression: Compressor | KeyedCompressor = Compression.none,
    op: int = ReduceOp.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    exact_gradient: bool | None = None,
) -> list[jax.Array]:
    """Reduce several arrays and return this rank's rows, as one operation: all or none.

    Rows are dealt out in order of rank; where they do not divide, the first ranks get one more.

    Differentiable for Average and Sum, in reverse, where every rank runs the same backward. May be called in
    ``jax.jit``, where it is a callback on the host that runs in its place among the collectives of the
    program, exactly once each time.

    Args:
        tensors: arrays, as many on every rank, in the same order; each as ``tensor`` of
            :func:`reducescatter`. Their dtypes may differ.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        compression: ``Compression.none``, ``.fp16`` or ``.bf16``: float32 and float64 are sent, and reduced,
            in that dtype, and the result is cast back. Or an object with the same two methods, or a
            KeyedCompressor, which keeps its state by ``name`` and so needs one.
        op: Average, Sum, Min, Max or Product of the module. The average of integers is truncated, and bool
            has none. Adasum, which needs whole arrays, is refused.
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
            was sent.
        TypeError: an argument is no array, or its dtype cannot be sent.
        RankMismatchError: the ranks' shapes, dtypes or arguments differ; on every rank, and the job goes on.
        HorovodInternalError: a rank was lost or has shut down, or a transfer has timed out.

    Example::

        import jax.numpy as jnp
        import polyhvd.jax as hvd
        hvd.init()
        pair = [jnp.ones((2 * hvd.size(), 3)), jnp.ones((hvd.size(),))]
        first, second = hvd.grouped_reducescatter(pair)
    """
    return functions.grouped_reducescatter(
        tensors,
        name=name,
        compression=compression,
        op=op,
        process_set=process_set,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        exact_gradient=exact_gradient,
    )


def grouped_reducescatter_async(
    tensors: Iterable[jax.Array],
    name: str | None = None,
    op: int = ReduceOp.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[list[jax.Array]]:
    """Start :func:`grouped_reducescatter`, and return at once.

    Leave the arrays alone until ``synchronize()`` has returned.

    For arrays outside of ``jax.jit``; the result is unknown to ``jax.grad``.

    Args:
        tensors: arrays, as many on every rank, in the same order; each as ``tensor`` of
            :func:`reducescatter_async`. Their dtypes may differ.
        name: matches the calls of the ranks; one name may be in flight once. Without one, a rank's n-th call
            of this collective on the process set matches the n-th of the others.
        op: Average, Sum, Min, Max or Product of the module. The average of integers is truncated, and bool
            has none. Adasum, which needs whole arrays, is refused.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.
        prescale_factor: multiplies each rank's array before the reduction, integers as float64.
        postscale_factor: multiplies the result, likewise.

    Returns:
        A handle for ``poll()`` and ``synchronize()``, which returns the list of new arrays and raises what
        went wrong.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process set; nothing
            was sent.
        TypeError: an argument is no array, or its dtype cannot be sent.
        RankMismatchError: the ranks' shapes, dtypes or arguments differ; on every rank, and the job goes on.
        HorovodInternalError: a rank was lost or has shut down, or a transfer has timed out.

    Example::

        import jax.numpy as jnp
        import polyhvd.jax as hvd
        hvd.init()
        pair = [jnp.ones((2 * hvd.size(), 3)), jnp.ones((hvd.size(),))]
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


def poll(
    handle: Handle[R],
) -> bool:
    """Say whether :func:`synchronize` would return without waiting.

    Args:
        handle: what an asynchronous function has returned.

    Returns:
        True when the operation has ended, also with an error. Raises nothing.

    Example::

        import jax.numpy as jnp
        import polyhvd.jax as hvd
        hvd.init()
        handle = hvd.allreduce_async(jnp.ones((3,)))
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
        RankMismatchError: the ranks' shapes, dtypes or arguments differ; on every rank, and the job goes on.
        HorovodInternalError: a rank was lost or has shut down, or a transfer has timed out.

    Example::

        import jax.numpy as jnp
        import polyhvd.jax as hvd
        hvd.init()
        handle = hvd.allreduce_async(jnp.ones((3,)))
        mean = hvd.synchronize(handle)
    """
    return functions.synchronize(handle)


def barrier(
    process_set: ProcessSet = global_process_set,
) -> None:
    """Return when every rank of the process set has called it.

    May be called in ``jax.jit``, where it is a callback on the host that runs in its place among the
    collectives of the program, exactly once each time.

    Args:
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        InvalidArgumentError: a bad call, such as a name that is in flight or an unknown process set; nothing
            was sent.
        HorovodInternalError: a rank was lost or has shut down, or a transfer has timed out.

    Example::

        import jax.numpy as jnp
        import polyhvd.jax as hvd
        hvd.init()
        hvd.barrier()
    """
    return functions.barrier(process_set=process_set)


def join() -> int | jax.Array:
    """Say that this rank has run out of data, and return when all ranks have.

    Meanwhile it takes part in the operations of the others: with zeros in sums and averages, which still
    divide by the number of ranks, with neutral elements in other reductions, and without rows in allgather
    and alltoall. It cannot be the root of a broadcast, nor start an operation of its own. For process sets
    that others have added meanwhile, ask ``process_set_of()`` afterwards.

    May be called in ``jax.jit``, where it is a callback on the host that runs in its place among the
    collectives of the program, exactly once each time. There the result is an array of int32 without
    dimensions.

    Returns:
        The rank that joined last: it has seen the most data.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        HorovodInternalError: a rank was lost or has shut down, or a transfer has timed out.

    Example::

        import jax.numpy as jnp
        import polyhvd.jax as hvd
        hvd.init()
        for batch in batches:  # as many as this rank has
            train(batch)
        last = hvd.join()
    """
    return functions.join()
