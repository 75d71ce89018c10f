"""JAX's arrays, as the collectives see them: on one device, read where they lie on a CPU.

Functions that ``jax.jit`` compiles use a separate primitive; see traced.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from polyhvd.jax import traced

from polyhvd.collectives.adapter import Capability, Handle, Operation
from polyhvd.errors import UnsupportedError, UnsupportedTypeError

__all__ = ["JaxAdapter", "check"]


def check(tensor: Any) -> jax.Array:
    """The array itself; raises TypeError for what cannot be sent, of an array a ValueError as well."""
    if not isinstance(tensor, jax.Array):
        raise TypeError(f"expected a jax.Array, found {type(tensor).__name__}; use jnp.asarray()")
    if jnp.issubdtype(tensor.dtype, jax.dtypes.prng_key):
        raise UnsupportedTypeError(
            f"an array of random keys ({tensor.dtype}) has no numbers to communicate; pass "
            "jax.random.key_data(keys), and give the result to jax.random.wrap_key_data()"
        )
    if not isinstance(tensor, jax.core.Tracer) and len(tensor.sharding.device_set) != 1:
        raise UnsupportedTypeError(
            f"the array is on {len(tensor.sharding.device_set)} devices, expected one; pass a part of it, "
            "such as array.addressable_data(0), or all of it: jax.device_put(array, jax.devices()[0])"
        )
    return tensor


def _on_host(tensor: jax.Array, label: str) -> np.ndarray[Any, Any]:
    """The array's memory, without a copy on a CPU, when it has been computed.

    While NumPy looks at it JAX does not give it away: a function to which the array is donated meanwhile
    gets a copy.
    """
    check(tensor)
    if isinstance(tensor, jax.core.Tracer):
        raise UnsupportedError(
            f"{label!r}: asynchronous calls need arrays with values, and a function that is "
            "compiled or differentiated has none yet; call the plain form there"
        )
    return np.ascontiguousarray(tensor) if tensor.ndim else np.asarray(tensor)


def _on_device(buffer: Any, device: Any) -> jax.Array:
    """The core's buffer as an array that keeps it alive."""
    array: jax.Array = jax.dlpack.from_dlpack(buffer)
    return array if array.device == device else jax.device_put(array, device)


class JaxAdapter:
    """See :class:`polyhvd.collectives.adapter.FrameworkAdapter`."""

    name = "jax"
    capabilities = frozenset(
        {
            Capability.ASYNC,
            Capability.BFLOAT16,
            Capability.INT16,
            Capability.BOOL,
            Capability.UNSIGNED,
            Capability.EMPTY,
            Capability.GRAPH,
            Capability.AUTOGRAD,
        }
    )

    def submit(
        self, operation: Operation, tensors: Sequence[jax.Array], out: Sequence[jax.Array] | None
    ) -> Handle:
        """Hand arrays to the core where they lie; results go to new ones.

        Collectives of compiled functions that this thread has called come first, as in the program.
        """
        if traced.is_staging():
            raise UnsupportedError(
                f"{operation.label!r}: this function is being compiled, and would not call it again; call "
                "asynchronous forms outside of jax.jit, or the plain form here"
            )
        if out is not None:
            raise UnsupportedError(f"{operation.label!r}: JAX's arrays cannot be overwritten")
        traced.settle()
        arrays = [_on_host(tensor, operation.label) for tensor in tensors]
        handle = operation.submit(arrays, None)
        devices = [tensor.device for tensor in tensors]

        def finish(done: Any) -> list[jax.Array]:
            buffers = done.buffers()  # of an alltoall one more, the rows received
            return [_on_device(buffer, devices[min(i, len(devices) - 1)]) for i, buffer in enumerate(buffers)]

        handle.finish = finish
        return handle

    def is_plain(self, tensor: jax.Array) -> bool:
        """None: the core does not read them itself."""
        return False

    def dtype(self, tensor: jax.Array) -> str:
        """Name of the array's element type."""
        return str(tensor.dtype.name)

    def cast(self, tensor: jax.Array, dtype: str) -> jax.Array:
        """``tensor.astype(dtype)``, also in a function that is compiled."""
        return tensor.astype(dtype)

    def assign(self, target: jax.Array, value: jax.Array) -> None:
        """Raises UnsupportedError: JAX's arrays cannot be overwritten."""
        raise UnsupportedError("JAX's arrays cannot be overwritten; use the returned array")

    def named_parameters(self, owner: object) -> Iterable[tuple[str, jax.Array]]:
        """Leaves of a tree, by their paths in it."""
        leaves, _ = jax.tree_util.tree_flatten_with_path(owner)
        return [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]
