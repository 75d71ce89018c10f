"""polyhvd's errors out of compiled functions, where JAX raises a JaxRuntimeError with their text."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import jax

__all__ = ["known", "remember", "translated_errors"]

#: Those that collectives of compiled functions have raised last, of all threads. Appending is atomic.
_raised: deque[BaseException] = deque(maxlen=64)


def remember(error: BaseException) -> None:
    """Remember an error that is about to leave a callback: only its text comes out."""
    _raised.append(error.with_traceback(None))  # whose frames hold arrays


def known(error: BaseException) -> BaseException | None:
    """The error of a collective that JAX's error has come of; None: it has come of something else."""
    text = str(error)
    return next((each for each in reversed(tuple(_raised)) if _quoted(each) in text), None)


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
