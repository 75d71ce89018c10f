"""Parameters from one rank to all."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from polyhvd.jax.functions import functions

from polyhvd.collectives.operation import process_set_id
from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.training.naming import require_same_names
from polyhvd.training.state import MODEL_ADVICE

__all__ = ["broadcast_parameters"]

Tree = TypeVar("Tree")


def broadcast_parameters(
    params: Tree, root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> Tree:
    """Return the root's arrays on every rank, in a tree of the same structure.

    JAX's arrays cannot be overwritten: the result takes the place of ``params``. It works for parameters as
    for the state of an optimizer.

    Args:
        params: a tree of arrays, of random keys, or of numbers, which become arrays. Its structure, and
            shapes and dtypes, are the same on every rank.
        root_rank: world rank of the sender, which is a member of the process set.
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        InvalidArgumentError: the process set is unknown.
        UnsupportedError: in a function that is being compiled.
        RankMismatchError: the ranks' shapes or dtypes differ.
        HorovodInternalError: a rank was lost or has shut down, or a transfer has timed out.

    Example::

        import jax.numpy as jnp
        import polyhvd.jax as hvd
        hvd.init()
        params = hvd.broadcast_parameters({"weight": jnp.ones((2, 3)), "bias": jnp.ones((3,))}, root_rank=0)
    """
    collectives = functions.collectives
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    first_error: Exception | None = None
    received: list[Any] = []
    arrays = [_numbers(leaf) for _, leaf in leaves]
    # Calls follow each other, whatever their threads.
    number, names = process_set_id(process_set), [jax.tree_util.keystr(path) for path, _ in leaves]
    with collectives.world.line("parameter", number):
        require_same_names(
            collectives.world, number, "broadcast_parameters", names, MODEL_ADVICE, "parameter"
        )
        handles = [
            collectives.broadcast_async(
                array,
                root_rank,
                name=f"parameter.{name}",
                process_set=process_set,
            )
            for name, array in zip(names, arrays, strict=True)
        ]
        for handle, (_, leaf) in zip(handles, leaves, strict=True):
            try:
                received.append(_like(leaf, collectives.synchronize(handle)))
            except Exception as error:
                first_error = first_error or error
    if first_error is not None:
        raise first_error
    tree: Tree = jax.tree_util.tree_unflatten(structure, received)
    return tree


def _are_keys(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _numbers(leaf: Any) -> jax.Array:
    return jax.random.key_data(leaf) if _are_keys(leaf) else jnp.asarray(leaf)


def _like(leaf: Any, numbers: jax.Array) -> jax.Array:
    """Random keys of the numbers that they were sent as, or these."""
    if not _are_keys(leaf):
        return numbers
    return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(leaf))
