"""Collectives in functions that ``jax.jit`` compiles: a primitive that calls back to the host.

``jax.experimental.io_callback(ordered=True)`` promises nearly what a collective needs, and is made of the
same parts. This is a separate primitive for three reasons. JAX refuses ordered callbacks in
``jax.custom_vjp``, so there would be no gradients. It drops one in a loop whose result no gradient needs. And
it hands its arguments over as JAX's arrays, which may be copied by threads that are all in callbacks, waiting
for other ranks. Here a callback reads XLA's own memory. A ``pure_callback`` may be dropped and repeated.

What is used of JAX beyond its documented interfaces is in this module: effects, and the tokens of a thread.
"""

from __future__ import annotations

import atexit
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jaxlib
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from polyhvd.jax.errors import naming_gradients, remember

from polyhvd import _core, shutdown
from polyhvd.collectives import membership
from polyhvd.collectives.adapter import OpKind, ReduceOp
from polyhvd.collectives.operation import process_set_id
from polyhvd.collectives.process_sets import ProcessSet
from polyhvd.errors import (
    HorovodVersionMismatchError,
    InvalidArgumentError,
    UnsupportedError,
    UnsupportedTypeError,
)
from polyhvd.runtime import current

try:
    from jax._src import core as _jax_core
    from jax._src import dispatch as _dispatch
    from jax._src import effects as _effects
    from jax._src.interpreters import ad as _ad
    from jax._src.interpreters.partial_eval import DynamicJaxprTrace as _Staging

    _SETS = [
        _effects.lowerable_effects,
        _effects.ordered_effects,  # threads a token through all of them, and from call to call
        _effects.control_flow_allowed_effects,
        _effects.custom_derivatives_allowed_effects,
        _effects.partial_eval_kept_effects,  # without a result that anybody needs, too
    ]
    _TRACES, _TOKENS = _jax_core.trace_ctx, _dispatch.runtime_tokens
    _DIFFERENTIATED = (_ad.JVPTracer, _ad.LinearizeTracer)
except (ImportError, AttributeError) as error:
    raise HorovodVersionMismatchError(
        f"polyhvd.jax does not support this JAX ({jax.__version__}): {error}; install 0.6.2 or later"
    ) from error

#: Releases that crash in a program of JAX's own, which docs/jax.md shows.
_CRASHING = ("0.9.1", "0.9.2", "0.10.0", "0.10.1")
if jaxlib.__version__ in _CRASHING:
    warnings.warn(
        f"jaxlib {jaxlib.__version__} can crash with SIGSEGV while it compiles products of matrices; "
        "install jax==0.10.2",
        RuntimeWarning,
        stacklevel=2,
    )

__all__ = ["Collective", "are_differentiated", "is_staging", "run", "settle"]

Array = np.ndarray[Any, Any]
_EXIT_GRACE_S = 10.0


class _Effect(_effects.Effect):  # type: ignore[misc]
    """The effect of all collectives: JAX executes all of them, in the order of the program."""

    def __repr__(self) -> str:
        return "a collective of polyhvd.jax"


_EFFECT = _Effect()
for _set in _SETS:
    _set.add_type(_Effect)


def is_staging() -> bool:
    """Return whether what this thread calls is recorded, to be compiled, instead of done."""
    trace: Any = _TRACES.trace
    while trace is not None and not isinstance(trace, _Staging):
        trace = getattr(trace, "parent_trace", None)  # of derivatives that are made meanwhile
    return trace is not None


def are_differentiated(tensors: Sequence[Any]) -> bool:
    """Return whether what is done with one of these is differentiated."""
    return any(isinstance(tensor, _DIFFERENTIATED) for tensor in tensors)


def settle() -> None:
    """Return when the collectives of all compiled functions that this thread has called are done.

    If one of them has failed, its error is raised where its results are used; JAX would fail every later
    function with it, too.
    """
    if not _TOKENS.current_tokens and not _TOKENS.output_runtime_tokens:
        return
    try:
        jax.effects_barrier()
    except jax.errors.JaxRuntimeError:
        _TOKENS.clear()


def _finish() -> None:
    """Let compiled functions that still run come to their collectives, which others may need, then leave."""
    deadline = time.monotonic() + _EXIT_GRACE_S
    if not hasattr(sys, "last_value"):  # after an error the others may be elsewhere
        while time.monotonic() < deadline and not all(
            token._buf.is_ready() for token in _TOKENS.current_tokens.values()
        ):
            time.sleep(0.005)
    shutdown()
    _TOKENS.clear()  # JAX would print errors that were never read


atexit.register(_finish)  # after JAX and polyhvd have registered theirs, so that it runs before


@dataclass(frozen=True, eq=False)
class Collective:
    """One collective of a function that is compiled: what the callback does, in whichever world is current.

    Args:
        kind, name, op, root, prescale, postscale, process_set, priority: as of an operation.
        results: shape and dtype of each result.
        check_rows: of an allgather, whether all members have to have the rows that this rank has.
        size, position: members of the process set, and this rank among them, when it was compiled.
        names: returns those of gradients, to be compared between ranks.
    """

    kind: OpKind
    name: str | None
    process_set: ProcessSet
    results: tuple[jax.ShapeDtypeStruct, ...]
    op: int = ReduceOp.Sum
    root: int = -1
    prescale: float = 1.0
    postscale: float = 1.0
    priority: int = 0
    check_rows: bool = False
    size: int = 0
    position: int = 0
    names: Callable[[], Sequence[str]] | None = None

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"{self.kind.name.lower()} {self.name or 'without a name'!r}"

    def __repr__(self) -> str:
        return self.label

    def __call__(self, *arrays: Array) -> tuple[Array, ...]:
        """Run it, on a thread of XLA's or on the caller's."""
        try:
            return self._run(arrays)
        except BaseException as error:  # Ctrl-C, too
            remember(error)
            raise

    def _run(self, arrays: Sequence[Array]) -> tuple[Array, ...]:
        if self.kind == OpKind.BARRIER:
            membership.barrier(self.process_set)
            return ()
        if self.kind == OpKind.JOIN:
            return (np.int32(membership.join()),)  # type: ignore[return-value]
        world = self.process_set.world or current.world()
        number = process_set_id(self.process_set, world)
        found = self.process_set.size(), self.process_set.rank()
        if found != (self.size, self.position):
            raise InvalidArgumentError(
                f"{self.label}: the function was compiled for rank {self.position} of {self.size} in "
                f"{self.process_set}, and this is rank {found[1]} of {found[0]}; call "
                "jax.clear_caches() after init()"
            )
        sent = list(arrays)
        if self.check_rows:  # with the rank's, since another number would shift all that follows
            sent.append(np.array([[array.shape[0] for array in arrays]], np.int32))
        with naming_gradients(self.names, str(self.name), number, world):
            handle = world.engine.submit(
                self.kind,
                self.name,
                sent,
                None,
                self.op,
                self.root,
                self.prescale,
                self.postscale,
                number,
                self.priority,
                True,
                (),
            )
            handle.wait()
        dtypes = [array.dtype for array in arrays]
        results = []
        for i, buffer in enumerate(handle.buffers()):  # of an alltoall or of a check there is one more
            dtype = dtypes[i] if i < len(dtypes) else np.dtype(buffer.dtype)
            results.append(np.frombuffer(memoryview(buffer), dtype).reshape(buffer.shape))
        return self._checked(results, arrays)

    def _checked(self, results: list[Array], arrays: Sequence[Array]) -> tuple[Array, ...]:
        """The results, if they have the expected shapes; an error is raised on every rank."""
        if self.check_rows:
            found = results.pop().tolist()
            own = [array.shape[0] for array in arrays]
            if found != [own] * self.size:
                raise InvalidArgumentError(
                    f"{self.label}: the ranks have {found} rows; in a compiled function all need the same "
                    "number, and none may have joined, since shapes are fixed when it is compiled. Pad "
                    "them, or call it outside of jax.jit"
                )
        results = results[: len(self.results)]
        shapes = [result.shape for result in results]
        if shapes != [wanted.shape for wanted in self.results]:
            raise InvalidArgumentError(
                f"{self.label}: the results' shapes are {shapes}, expected "
                f"{[wanted.shape for wanted in self.results]}: a rank has joined, and a compiled function "
                "knows its shapes beforehand; call it outside of jax.jit"
            )
        return tuple(results)


_collective = Primitive("polyhvd_collective")
_collective.multiple_results = True


def run(collective: Collective, tensors: Sequence[jax.Array]) -> list[jax.Array]:
    """Record a collective in the function that is being compiled; its results.

    Raises:
        UnsupportedTypeError: of an element type that cannot be communicated.
    """
    for tensor in tensors:
        if tensor.dtype.name not in _core.DTYPES:
            raise UnsupportedTypeError(
                f"{collective.label}: arrays of {tensor.dtype.name} cannot be communicated, expected one of "
                f"{', '.join(_core.DTYPES)}; cast it"
            )
    return list(_collective.bind(*tensors, collective=collective))


@_collective.def_impl  # type: ignore[misc]
def _now(*tensors: jax.Array, collective: Collective) -> list[jax.Array]:
    """Run the collective of a recorded function that is not compiled."""
    settle()
    return [jax.numpy.asarray(result) for result in collective(*map(np.asarray, tensors))]


@_collective.def_effectful_abstract_eval  # type: ignore[misc]
def _abstract(*_: Any, collective: Collective) -> tuple[list[Any], set[Any]]:
    return [jax.core.ShapedArray(each.shape, each.dtype) for each in collective.results], {_EFFECT}


def _lower(context: Any, *operands: Any, collective: Collective) -> Any:
    token = context.tokens_in.get(_EFFECT)
    results, token, _ = mlir.emit_python_callback(
        context,
        collective,
        token,
        list(operands),
        context.avals_in,
        context.avals_out,
        has_side_effect=True,
    )
    context.set_tokens_out(mlir.TokenSet({_EFFECT: token}))
    return results


def _batch(_: Any, __: Any, *, collective: Collective) -> Any:
    raise UnsupportedError(
        f"{collective.label}: jax.vmap would make an unknown number of collectives of one; call it on the "
        "whole array, outside of the mapped function"
    )


mlir.register_lowering(_collective, _lower)
batching.primitive_batchers[_collective] = _batch
