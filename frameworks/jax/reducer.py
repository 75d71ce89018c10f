"""Gradients over the ranks: trees of arrays, outside of ``jax.jit`` and in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from polyhvd.jax import derivatives
from polyhvd.jax.errors import naming_gradients
from polyhvd.jax.functions import Compression, functions

from polyhvd.collectives.adapter import ReduceOp
from polyhvd.collectives.operation import process_set_id
from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.errors import InvalidArgumentError
from polyhvd.runtime import current
from polyhvd.training.compression import AnyCompressor, KeyedCompressor
from polyhvd.training.options import Options
from polyhvd.training.reducer import Exchange, GradientReducer, Results, mark_of_names

__all__ = ["DistributedGradients", "grad", "value_and_grad"]

Tree = TypeVar("Tree")


class _JaxExchange(Exchange[jax.Array]):
    """Arrays of a step as one operation unless there are groups; results are new arrays."""

    whole_steps = True

    #: Returns names of the gradients of the step: their places in the tree.
    names: Callable[[], Sequence[str]] | None = None
    #: Of these names. A step may have another tree than the first one, whose names are compared.
    mark = 0

    def start(
        self, tensors: Sequence[jax.Array], name: str, priority: int, request: Mapping[str, Any]
    ) -> Results[jax.Array]:
        """Reduce arrays into new ones."""
        names = self.names
        if derivatives.is_recorded(tensors):
            reduced = derivatives.allreduce(tensors, name, **request, names=names)
            return lambda: reduced
        world, number = current.world(), process_set_id(request["process_set"])
        with naming_gradients(names, name, number, world):
            handle = self._collectives.grouped_allreduce_async(tensors, name=name, **request)

        def results() -> Sequence[jax.Array]:
            with naming_gradients(names, name, number, world):
                return self._collectives.synchronize(handle)

        return results

    def dense(self, gradient: Any) -> jax.Array:
        """The gradient, if it is an array."""
        return functions.value(gradient)

    def mark_of(self, keys: Sequence[Any]) -> int:
        """Return the mark of the tree, whose leaves have the keys as numbers."""
        return self.mark

    def marker(self, like: jax.Array, mark: int) -> jax.Array:
        """A new array."""
        return jnp.asarray(np.empty((0, mark), like.dtype))

    def put(self, key: Any, gradient: jax.Array, reduced: jax.Array) -> jax.Array:
        """The reduced gradient itself."""
        return reduced


class DistributedGradients:
    """Reduces gradients over the ranks: call it with a tree of them, outside of ``jax.jit`` or in it.

    It is what the other frameworks' distributed optimizers do before an update, and goes before that of any
    library. Not thread-safe.

    Args:
        op: Average, Sum or Adasum.
        compression: of the gradients on the wire: ``Compression.none``, ``.fp16``, ``.bf16``, one of your
            own, or, outside of ``jax.jit``, a :class:`polyhvd.training.compression.KeyedCompressor`.
        gradient_predivide_factor: splits the division of an average around the sum.
        groups: into how many operations to split the gradients of a step; None: one for all.
        process_set: the ranks that take part. Others keep their gradients as they are.
        name: matches the calls of the ranks; two that are used at the same time have different ones.

    Raises:
        InvalidArgumentError: an argument that is not supported.

    Example::

        import jax
        import jax.numpy as jnp
        import polyhvd.jax as hvd
        hvd.init()
        reduced = hvd.DistributedGradients(compression=hvd.Compression.fp16)
        gradients = reduced(jax.grad(lambda params: (params["w"] ** 2).sum())({"w": jnp.ones(3)}))
    """

    def __init__(
        self,
        op: int = ReduceOp.Average,
        compression: AnyCompressor = Compression.none,
        gradient_predivide_factor: float = 1.0,
        groups: int | None = None,
        process_set: ProcessSet = global_process_set,
        name: str = "DistributedGradients",
    ) -> None:
        if groups is not None and not isinstance(groups, int):
            raise InvalidArgumentError(
                f"groups={groups!r}: expected the number of operations; JAX's arrays have no identity"
            )
        options = Options(
            op=op,
            compression=compression,
            gradient_predivide_factor=gradient_predivide_factor,
            groups=groups,
            process_set=process_set,
        )
        self._exchange = _JaxExchange(functions.collectives)
        self._structure: Any = None  # of the last tree
        self._reducer = GradientReducer(self._exchange, prefix=name, options=options)

    def __call__(self, gradients: Tree) -> Tree:
        """The reduced gradients, in a tree of the same structure.

        Args:
            gradients: a tree of arrays of the same shapes and dtypes on every rank.

        Raises:
            RankMismatchError: the ranks' gradients differ in shapes or dtypes.
            HorovodInternalError: a rank was lost or has shut down; in ``jax.jit`` see
                :func:`translated_errors`.
        """
        leaves, structure = jax.tree_util.tree_flatten(gradients)
        self._exchange.names = lambda: _names(structure)
        if self._structure is None or structure != self._structure:
            self._structure, self._exchange.mark = structure, mark_of_names(_names(structure))
        # Of a parameter of integers there is none, in an array of type float0.
        some = {i: leaf for i, leaf in enumerate(leaves) if getattr(leaf, "dtype", None) != jax.dtypes.float0}
        if derivatives.is_recorded(list(some.values())):
            self._check_stateless()
        for i, leaf in self._reducer.reduce(some).items():
            leaves[i] = leaf
        tree: Tree = jax.tree_util.tree_unflatten(structure, leaves)
        return tree

    def _check_stateless(self) -> None:
        given = self._reducer.options.compression
        if isinstance(given, KeyedCompressor) or (
            isinstance(given, type) and issubclass(given, KeyedCompressor)
        ):
            raise InvalidArgumentError(
                f"compression={given!r} keeps state from step to step, which a compiled function cannot; "
                "reduce the gradients outside of jax.jit, or pass a compressor without state"
            )


def _names(structure: Any) -> list[str]:
    """Places of the leaves of a tree, as in "['dense']['kernel']"."""
    numbered = jax.tree_util.tree_unflatten(structure, range(structure.num_leaves))
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(numbered)[0]]


def value_and_grad(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False, **options: Any
) -> Callable[..., tuple[Any, Any]]:
    """Differentiate like ``jax.value_and_grad``, and reduce the gradients, not the value, over the ranks.

    Args:
        fun: a loss of this rank's data, a scalar; with ``has_aux`` a pair of it and anything else.
        argnums: positions of the arguments by which it is differentiated.
        has_aux: whether ``fun`` returns such a pair.
        options: see :class:`DistributedGradients`.

    Returns:
        A function of the arguments of ``fun`` that returns the value and the gradients.

    Raises:
        InvalidArgumentError: an option that is not supported.

    Example::

        import jax
        import jax.numpy as jnp
        import polyhvd.jax as hvd
        hvd.init()
        step = jax.jit(hvd.value_and_grad(lambda w, x: ((w * x) ** 2).sum()))
        loss, gradient = step(jnp.ones(3), jnp.full(3, hvd.rank() + 1.0))
    """
    derived = jax.value_and_grad(fun, argnums=argnums, has_aux=has_aux)
    reduced = DistributedGradients(**options)

    @wraps(fun)
    def value_and_reduced(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        value, gradients = derived(*args, **kwargs)
        return value, reduced(gradients)

    return value_and_reduced


def grad(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False, **options: Any
) -> Callable[..., Any]:
    """Differentiate like ``jax.grad``, and reduce the gradients over the ranks.

    Args:
        fun: see :func:`value_and_grad`.
        argnums: see :func:`value_and_grad`.
        has_aux: see :func:`value_and_grad`.
        **options: see :func:`value_and_grad`.

    Returns:
        A function of the arguments of ``fun`` that returns the gradients; with ``has_aux`` a pair of them and
        what else ``fun`` returns.

    Raises:
        InvalidArgumentError: an option that is not supported.

    Example::

        import jax.numpy as jnp
        import polyhvd.jax as hvd
        hvd.init()
        gradient = hvd.grad(lambda w: (w**2).sum(), op=hvd.Sum)(jnp.ones(3))
    """
    both = value_and_grad(fun, argnums=argnums, has_aux=has_aux, **options)

    @wraps(fun)
    def reduced(*args: Any, **kwargs: Any) -> Any:
        value, gradients = both(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return reduced
