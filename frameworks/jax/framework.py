"""Facts about JAX that are read without importing it."""

from __future__ import annotations

from polyhvd.installed import Framework

__all__ = ["FRAMEWORK"]

FRAMEWORK = Framework(
    title="JAX",
    packages=("jax",),
    versions="0.6.2 to 0.10",
    install="pip install 'jax>=0.6.2,<0.11,!=0.9.1,!=0.9.2,!=0.10.0,!=0.10.1'",
    distributions=("jax",),
    place=6,
)
