"""A state of arrays, which are overwritten in place by a restore and by other ranks' values."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from polyhvd.collectives.objects import broadcast_object
from polyhvd.collectives.process_sets import ProcessSet
from polyhvd.elastic.memory import form, like, overwrite
from polyhvd.elastic.state import ObjectState, copied, copied_by_name, own_rank
from polyhvd.training.state import put_tensors, take_tensors

__all__ = ["ArraysState"]

if TYPE_CHECKING:

    def byte_bounds(array: Array) -> tuple[int, int]: ...

elif hasattr(np, "byte_bounds"):  # of NumPy 1
    byte_bounds = np.byte_bounds
else:
    from numpy.lib.array_utils import byte_bounds

Array = np.ndarray[Any, Any]


class ArraysState(ObjectState):
    """See ``ArrayState`` of a framework.

    Args:
        broadcast: overwrites named arrays with those of a rank, in a process set, as ``broadcast_parameters``
            does.
        is_array: whether it can overwrite a value.
        kwargs: the attributes.
    """

    def __init__(
        self,
        broadcast: Callable[[list[tuple[str, Array]], int, ProcessSet], None],
        is_array: Callable[[Any], bool],
        **kwargs: Any,
    ) -> None:
        self._broadcast = broadcast
        self._is_array = is_array
        self._copies: list[Array] = []
        self._spare: list[Array] = []  # of the commit before, so that an interrupted save harms neither
        super().__init__(broadcast_object, own_rank, **kwargs)

    def save(self) -> None:
        """Keep a copy of the attributes.

        Raises:
            InvalidArgumentError: one of them cannot be copied.

        Example::

            state.save()
        """
        rest, arrays = self._taken()
        spare = like(arrays, self._spare)
        overwrite(spare, arrays)
        saved = copied_by_name(rest)
        self._saved, self._copies, self._spare = saved, spare, self._copies

    def restore(self) -> None:
        """Give the attributes the values of the copy; arrays of the same shape keep their memory.

        Example::

            state.restore()
        """
        _, arrays = self._taken()
        self._put(self._saved, self._fitting(arrays, [*map(form, self._copies)], self._copies))
        self._is_commit = self._saved is self._commit_copy

    def imported(self, values: dict[str, Any]) -> None:
        """See :meth:`ObjectState.imported`; arrays of the same shape keep their memory."""
        rest, received = take_tensors({name: values[name] for name in self._names}, self._is_array)
        _, arrays = self._taken()
        self._put(rest, self._fitting(arrays, [*map(form, received)], received))

    def _keep_synced(self, *, kept: bool) -> None:
        if kept:
            rest, _ = self._taken()
            self._saved = copied_by_name(rest)
            return
        if not self._spare:  # use the memory of the earlier commit, which is obsolete
            self._copies, self._spare = [], self._copies
        self.save()

    def _taken(self) -> tuple[dict[str, Any], list[Array]]:
        """The attributes without their arrays, and the arrays."""
        return take_tensors({name: getattr(self, name) for name in self._names}, self._is_array)

    def _put(self, rest: dict[str, Any], arrays: list[Array]) -> None:
        for name, value in put_tensors(copied(rest), arrays).items():
            setattr(self, name, value)

    @staticmethod
    def _fitting(
        arrays: list[Array], likes: list[tuple[Any, ...]], values: list[Array] | None = None
    ) -> list[Array]:
        """Arrays of these forms, those that are there if they fit, with these values if any."""
        if [*map(form, arrays)] != likes or not all(array.flags.writeable for array in arrays):
            arrays = [np.empty(shape, dtype, order) for shape, dtype, order in likes]
        if values is not None:
            overwrite(arrays, values)
        return arrays

    def _sync_from(self, root: int, *, among: ProcessSet | None) -> None:
        rest, arrays = self._taken()
        rest, likes = self._bcast_object(
            (rest, [*map(form, arrays)]), root_rank=root, name="elastic.state.objects"
        )
        if self._rank() != root:
            arrays = self._fitting(arrays, likes)
        if among is not None:
            buffers = [array if array.flags.writeable else array.copy() for array in arrays]  # the root's own
            named = [(f"elastic.{number}", array) for number, array in enumerate(buffers)]
            for some in [named] if _are_apart(buffers) else [[item] for item in named]:
                self._broadcast(some, root, among)
        self._put(rest, arrays)


def _are_apart(arrays: list[Array]) -> bool:
    """Return whether no two share memory, so that all may be in flight together."""
    end = 0
    for low, high in sorted(byte_bounds(array) for array in arrays if array.size):
        if low < end:
            return False
        end = high
    return True
