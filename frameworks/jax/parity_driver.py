"""JAX as the conformance tests use it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from polyhvd.parity.driver import Driver

__all__ = ["DRIVERS"]

Array = np.ndarray[Any, Any]


class _Jax(Driver):
    @property
    def settings(self) -> tuple[tuple[str, str], ...]:
        return (("JAX_ENABLE_X64", "1"),)

    def from_numpy(self, array: Array) -> Any:
        import jax.numpy as jnp

        return jnp.array(array)

    def to_numpy(self, tensor: Any) -> Array:
        import jax

        assert isinstance(tensor, jax.Array), type(tensor)
        return np.asarray(tensor)

    def gradients(
        self, function: Callable[..., Sequence[Any]], arrays: Sequence[Array], weights: Sequence[Array]
    ) -> list[Array]:
        import jax

        _, backward = jax.vjp(lambda *tensors: self.call(function, *tensors), *map(self.from_numpy, arrays))
        return [np.asarray(gradient) for gradient in backward([self.from_numpy(w) for w in weights])]

    def broadcast_parameters(self, parameters: dict[str, Any], root: int) -> None:
        parameters.update(self.hvd.broadcast_parameters(parameters, root_rank=root))

    def unsupported(self) -> Sequence[Any]:
        import jax
        import jax.numpy as jnp

        return [jnp.ones(4, "complex64"), jnp.ones(4, "float8_e4m3fn"), jax.random.split(jax.random.key(0))]


DRIVERS = (_Jax,)
