"""``kvstore="horovod"``: the gradients of a plain ``gluon.Trainer`` are added up over the ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import mxnet as mx
from mxnet.gluon import trainer as gluon_trainer
from mxnet.kvstore import KVStoreBase
from mxnet.module import module
from mxnet.ndarray import NDArray
from polyhvd.mxnet.base import collectives
from polyhvd.mxnet.errors import UnsupportedError
from polyhvd.mxnet.names import places_of

from polyhvd.collectives.adapter import ReduceOp
from polyhvd.runtime import current

__all__ = ["Horovod", "install"]


class Horovod(KVStoreBase):  # type: ignore[misc]
    """The store that ``mx.kv.create("horovod")`` makes, and ``gluon.Trainer(kvstore="horovod")`` uses.

    Parameters begin with rank 0's. Gradients are added up, as by ``dist_sync``: with n ranks,
    ``step(n * batch_size)`` averages over the samples of all of them.

    Args:
        parameters: of the trainer, by name, in the order of its keys.
    """

    def __init__(self, parameters: Mapping[str, Any] | None = None) -> None:
        self._places = places_of(list(parameters or ()))

    def _name_of(self, key: Any) -> str:
        """Return the name of a key in messages, the same on every rank."""
        return str(self._places.get(key, key))

    def broadcast(self, key: Any, value: NDArray, out: NDArray | list[NDArray], priority: int = 0) -> None:
        """Write rank 0's array to ``out``."""
        first, *others = out if isinstance(out, list) else [out]
        if first is not value:
            value.copyto(first)
        name = f"kvstore.{self._name_of(key)}"
        collectives.broadcast_async(first, 0, name=name, priority=priority, in_place=True)
        for other in others:
            first.copyto(other)

    def pushpull(self, key: Any, value: NDArray | list[NDArray], out: Any = None, priority: int = 0) -> None:
        """Add arrays up, those of a list and of all ranks, and write the sum to ``out``, or to ``value``."""
        given = value if isinstance(value, list) else [value]
        first, *others = given if out is None else out if isinstance(out, list) else [out]
        total = mx.nd.add_n(*(array.as_in_context(first.context) for array in given))
        total.copyto(first)
        name = f"kvstore.gradient.{self._name_of(key)}"
        collectives.allreduce_async(first, op=ReduceOp.Sum, name=name, priority=priority, in_place=True)
        for other in others:
            first.copyto(other)

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Optimizers run on each rank, not in the store."""
        return False

    @property
    def type(self) -> str:
        """The name of the store."""
        return "horovod"

    @property
    def rank(self) -> int:
        """World rank of this process."""
        return current.world().placement.rank

    @property
    def num_workers(self) -> int:
        """Number of ranks."""
        return current.world().placement.size


def install() -> None:
    """Register the store, and have MXNet use it: it makes none for one device where no name has ``dist``."""
    KVStoreBase.register(Horovod)
    _replace(gluon_trainer, lambda create, number, params: create(Horovod(params), number, params))
    for owner in (mx.model, module):
        _replace(owner, _refuse)


def _refuse(*_: Any) -> Any:
    raise UnsupportedError(
        "kvstore='horovod' works with gluon.Trainer; for modules pass kvstore=None and "
        "optimizer=hvd.DistributedOptimizer(optimizer)"
    )


def _replace(owner: Any, use: Callable[..., Any]) -> None:
    original = owner._create_kvstore

    @functools.wraps(original)
    def create_kvstore(kvstore: Any, *arguments: Any) -> Any:
        is_ours = isinstance(kvstore, Horovod) or (isinstance(kvstore, str) and kvstore.lower() == "horovod")
        return use(original, *arguments) if is_ours else original(kvstore, *arguments)

    owner._create_kvstore = create_kvstore
