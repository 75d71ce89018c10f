"""Results of object collectives that a program calls before its first elastic function.

The ranks that make these calls record the results. A process that joins the job later gets them from the
record, since the other ranks are past these calls.
"""

from __future__ import annotations

import pickle
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from polyhvd.errors import InvalidArgumentError
from polyhvd.rendezvous.store import StoreError

__all__ = ["BYTES_MAX", "Prologue", "not_recorded"]

#: Of the pickles that are recorded, all together. A larger result is left out.
BYTES_MAX = 1 << 20


class Prologue:
    """See the module. Thread-safe.

    Args:
        load: returns what :meth:`encoded` has returned on another rank; raises StoreError.
    """

    def __init__(self, load: Callable[[], bytes]) -> None:
        self._load = load
        self._lock = threading.Lock()  # of what follows
        #: Of each call in its order, by function and name: pickles, or None for what was too large.
        self._results: dict[tuple[str, str | None], list[list[bytes] | None]] = {}
        self._bytes_left = BYTES_MAX
        self._served: Counter[tuple[str, str | None]] = Counter()
        self._recorded: dict[tuple[str, str | None], list[list[bytes] | None]] | None = None
        self._is_over = False

    def end(self) -> None:
        """The first elastic function has begun: nothing more is recorded or returned."""
        with self._lock:
            self._is_over = True

    def encoded(self) -> bytes:
        """The records, for other processes."""
        with self._lock:
            return pickle.dumps(self._results)

    def record(self, call: str, name: str | None, pickles: Sequence[memoryview]) -> None:
        """Keep the result of a call of all ranks.

        Args:
            call: the function.
            name: as the program has given it.
            pickles: of the objects that it has returned.
        """
        with self._lock:
            if self._is_over:
                return
            size = sum(len(item) for item in pickles)
            fits = size <= self._bytes_left
            self._bytes_left -= size if fits else 0
            kept = [bytes(item) for item in pickles] if fits else None
            self._results.setdefault((call, name), []).append(kept)

    def result(self, call: str, name: str | None) -> list[Any]:
        """The objects that the same call has returned on the ranks that have made it.

        Raises:
            InvalidArgumentError: they were not recorded.
        """
        key = call, name
        with self._lock:
            if self._is_over:
                raise not_recorded(call, name, "results are recorded only before the first elastic function")
            if self._recorded is None:
                try:
                    self._recorded = pickle.loads(self._load())
                except StoreError as error:
                    raise not_recorded(call, name, str(error)) from None
            number = self._served[key]
            self._served[key] += 1
            calls = self._recorded.get(key, [])
        if number >= len(calls):
            raise not_recorded(
                call, name, f"they have made {len(calls)} such calls, and this is number {number + 1}"
            )
        pickles = calls[number]
        if pickles is None:
            raise not_recorded(
                call, name, f"it has more than {BYTES_MAX} bytes, or earlier ones have left no room"
            )
        return [pickle.loads(item) for item in pickles]


def not_recorded(call: str, name: str | None, why: str) -> InvalidArgumentError:
    """The error of a call whose result a new process cannot have."""
    subject = call if name is None else f"{call} {name!r}"
    return InvalidArgumentError(
        f"{subject}: this process joined an elastic job that is running, and the other ranks are past this "
        f"call. Its result was not recorded: {why}. Move the call into the function of elastic.run or "
        "elastic.train, or keep its result in the state"
    )
