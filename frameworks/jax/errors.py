"""polyhvd's errors out of compiled functions, where JAX raises a JaxRuntimeError with their text."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import jax

from polyhvd.errors import RankMismatchError
from polyhvd.runtime.world import World
from polyhvd.training.drift import names_of_some_ranks
from polyhvd.training.naming import require_same_order

__all__ = ["known", "naming_gradients", "remember", "translated_errors"]

#: Those that collectives of compiled functions have raised last, of all threads. Appending is atomic.
_raised: deque[BaseException] = deque(maxlen=64)
#: Process sets and names of the reductions whose gradients have been compared by name.
_compared: WeakKeyDictionary[World, set[tuple[int, str]]] = WeakKeyDictionary()
#: In the core's message about shapes: position of the tensor, and number of tensors.
_TENSOR = re.compile(r"tensor (\d+) of (\d+) as ")
_ADVICE = "pass the same tree on every rank"


def remember(error: BaseException) -> None:
    """Remember an error that is about to leave a callback: only its text comes out."""
    _raised.append(error.with_traceback(None))  # whose frames hold arrays


def known(error: BaseException) -> BaseException | None:
    """The error of a collective that JAX's error has come of; None: it has come of something else."""
    text = str(error)
    return next((each for each in reversed(tuple(_raised)) if _quoted(each) in text), None)


@contextmanager
def naming_gradients(
    names: Callable[[], Sequence[str]] | None, operation: str, number: int, world: World
) -> Iterator[None]:
    """Compare names of gradients between ranks before the first reduction in a world, and after a mismatch.

    Args:
        names: returns those of this rank; None: compare nothing, on every rank.
        operation: name of the reduction.
        number: of the process set.
        world: of the ranks.

    Raises:
        RankMismatchError: ranks have other names, or the reduction has failed with it; on every rank.
    """
    if names is None:
        yield
        return
    seen = _compared.setdefault(world, set())
    if (number, operation) not in seen and world.settings.check_drift != "off":
        _compare(names, operation, number, world)
        seen.add((number, operation))
    try:
        yield
    except RankMismatchError as error:
        _compare(names, operation, number, world)
        own, found = list(names()), _TENSOR.search(str(error))
        require_same_order(world, number, operation, own, _ADVICE, f"{operation}.order")
        position, count = (int(found[1]), int(found[2])) if found else (0, 0)
        if count != len(own) + 1 or position == len(own):  # groups, or the marker, which comes last
            raise
        text = f"{error}; tensor {position} is the gradient of {own[position]!r}"
        raise RankMismatchError(text) from error


def _compare(names: Callable[[], Sequence[str]], operation: str, number: int, world: World) -> None:
    found = names_of_some_ranks(world, number, f"{operation}.names", names())
    if found:
        raise RankMismatchError(
            f"{operation}: the ranks have gradients of different parameters: {found}; pass the same tree on "
            "every rank, with zeros as the gradients of frozen parameters"
        )


def _quoted(error: BaseException) -> str:
    """The text with which JAX quotes an error: of Ctrl-C only the name of its class."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


@contextmanager
def translated_errors() -> Iterator[None]:
    """Raise what a collective of a compiled function has failed with, not JAX's error that quotes it.

    ``jax.jit`` turns every error of a callback into a ``jax.errors.JaxRuntimeError``, and raises it where the
    function is called, or wherever its results are used first. Within this context, or in a function that it
    decorates, the error is that of the collective: what catches HorovodInternalError can catch it. At the end
    of the context the collectives of all functions that this thread has called are done.

    Raises:
        HorovodInternalError: a rank was lost or has shut down.
        RankMismatchError: the ranks' shapes, dtypes or arguments differ.
        InvalidArgumentError: a call that is wrong by itself, such as of a process set that is gone.

    Example::

        import jax
        import jax.numpy as jnp
        import polyhvd.jax as hvd
        hvd.init()
        step = jax.jit(lambda x: hvd.allreduce(x))
        with hvd.translated_errors():
            y = step(jnp.ones(3))
    """
    from polyhvd.jax import traced

    try:
        yield
        jax.effects_barrier()
    except jax.errors.JaxRuntimeError as error:
        traced.settle()
        found = known(error)
        if found is None:
            raise
        raise found from error
