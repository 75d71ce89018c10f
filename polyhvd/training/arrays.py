"""Common code of frameworks whose tensors are plain arrays: NumPy, CuPy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

from polyhvd.collectives.adapter import FrameworkAdapter
from polyhvd.collectives.functions import Functions
from polyhvd.collectives.operation import is_number
from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.collectives.verbs import Collectives
from polyhvd.runtime.world import World
from polyhvd.training.compression import Compression
from polyhvd.training.state import broadcast_named

__all__ = ["ArrayFunctions", "named_arrays"]

T = TypeVar("T")


def named_arrays(owner: Any) -> Iterable[tuple[str, Any]]:
    """Items of a mapping, or pairs, or a list of arrays named by position."""
    if isinstance(owner, Mapping):
        return sorted(owner.items())
    pairs = list(owner)
    if pairs and not isinstance(pairs[0], tuple):
        return [(str(i), array) for i, array in enumerate(pairs)]
    return pairs


class ArrayFunctions(Functions[T], Generic[T]):
    """The functions of such a framework, in one world or in whichever is current.

    Args:
        adapter: the framework's.
        from_number: an array without dimensions that holds a number of Python's or NumPy's.
        world: in which they are; None: in the current one of the process.
    """

    def __init__(
        self, adapter: FrameworkAdapter[T], from_number: Callable[[Any], T], world: World | None = None
    ) -> None:
        super().__init__(Collectives(adapter, world))
        self._from_number = from_number
        self.Compression = Compression(adapter)

    def value(self, tensor: Any) -> T:
        """An array, or a number as one."""
        return self._from_number(tensor) if is_number(tensor) else self.checked(tensor)

    def broadcast_parameters(
        self, params: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set
    ) -> None:
        """Overwrite a dict of arrays, or a list of (name, array) pairs, with the root's."""
        named = list(self.collectives.adapter.named_parameters(params))
        names = [str(name) for name, _ in named]
        broadcast_named(self.collectives, named, root_rank, process_set, names=names)
