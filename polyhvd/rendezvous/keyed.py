"""A base for stores that know nothing but keys: create, replace, read, remove.

Gathers are made by looking again and again, at times that grow with the waiting; *own* values by removing
them at the end. The first rank that sees a gather complete stores the answer for the others before it
continues: it may be gone, with its own values, before they look. Records are sealed, so that a process that
writes to the place without knowing the job's secret can delay a rank but not give it false values.
"""

from __future__ import annotations

import abc
import math
import secrets
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile

from polyhvd.rendezvous.records import Record, seal, unseal
from polyhvd.rendezvous.store import (
    VALUE_BYTES_MAX,
    GatherTimeoutError,
    Store,
    StoreError,
    check_count,
    check_value,
)

__all__ = ["KeyedStore"]

_WAITED_SHARE = 0.1  # of the time that was waited passes until the next look
#: Between two looks for the values of a gather, at least and at most.
_LOOK_FIRST_S, _LOOK_LAST_S = 0.002, 0.25
_ITEM = struct.Struct("!16sI")
_SPIN_S = 0.001  # between two calls of take at least, whatever is due


@dataclass
class _Gather:
    scope: str
    count: int
    since: float
    deadline: float
    former: bytes | None  # the answer to an earlier gather, which was there before this one
    look_at: float = 0.0
    present: int = 0  # below this index, all values have been there


class KeyedStore(Store):
    """The base of stores of keys. A subclass defines how a key is created, replaced, read and removed.

    The four raise StoreError, with a message that names the place, when that cannot be reached. Keys are
    text of any kind and length; records are bytes.

    An own value that its rank removes before any rank has seen the gather complete counts as never written.
    Answers of gathers stay for as long as the place does.

    Args:
        secret: the job's.
        rank: this process's, or ``auth.NO_RANK``. A rank is one process at a time: its *own* values
            replace those that an earlier process in its place has left behind.
        job: as :func:`polyhvd.rendezvous.store.job_name` makes it.
        address: of this host, as the other ranks reach it; empty: not known.
    """

    def __init__(
        self,
        secret: bytes,
        rank: int,
        *,
        job: str,
        address: str = "",
    ) -> None:
        self.secret = secret
        self.job = job
        self.address = address
        self._rank = rank
        self._writer = secrets.token_bytes(16)
        self._gathers: dict[int, _Gather] = {}
        self._next = 0
        self._own: set[str] = set()
        self._closed = False

    @abc.abstractmethod
    def _create(self, key: str, data: bytes) -> bool:
        """Write ``data`` whole under a key that has none; False, and no change, where there is one."""

    @abc.abstractmethod
    def _replace(self, key: str, data: bytes) -> None:
        """Write ``data`` whole under a key, whatever is there."""

    @abc.abstractmethod
    def _read(self, key: str) -> bytes | None:
        """The value of a key; None: it has none."""

    @abc.abstractmethod
    def _remove(self, key: str) -> None:
        """Remove what is under a key, if there is something."""

    def _refresh(self) -> None:
        """Called before a series of reads that shall see what others have written."""

    def _release(self) -> None:
        """Called once, at the end; never raises."""

    def close(self) -> None:
        """Remove this rank's own values, as far as the store can be reached."""
        if self._closed:
            return
        self._closed = True
        for key in self._own:
            with suppress(OSError):
                record = self._record(key)
                if record is not None and record.writer == self._writer:
                    self._remove(key)
        self._own.clear()
        self._gathers.clear()
        self._release()

    def fileno(self) -> int:
        """-1: there is no descriptor."""
        return -1

    @property
    def poll_s(self) -> float:
        """Seconds until the next look; if a descriptor signals values, until the next timeout."""
        has_descriptor = self.fileno() >= 0
        times = [gather.deadline if has_descriptor else gather.look_at for gather in self._gathers.values()]
        return max(_SPIN_S, min(times) - time.monotonic()) if times else math.inf

    def put(self, scope: str, index: int, value: bytes, *, own: bool = False) -> None:
        """Write a value, unless there is one already."""
        check_value(value)
        self._check_open()
        key = _key(scope, index)
        data = seal(Record(value, self._rank, self._writer, own), self.secret, self.job, key)
        created = self._create(key, data)
        if own and not created and self._is_stale(key):
            self._remove(key)
            created = self._create(key, data)
        if own and created:
            self._own.add(key)

    def forget(self, scope: str, index: int) -> None:
        """Remove a value that this rank wrote, perhaps as an earlier process in its place."""
        self._check_open()
        key = _key(scope, index)
        self._refresh()
        record = self._record(key)
        if record is not None and record.rank == self._rank:
            self._remove(key)
            self._own.discard(key)

    def post_gather(
        self, scope: str, count: int, wait_s: float, *, own: tuple[int, bytes] | None = None
    ) -> int:
        """Ask for values 0 .. count-1, after writing an own one; returns the request's number."""
        check_count(count)
        self._check_open()
        self._refresh()
        former = self._record(_answer_key(scope, count))  # before the own value can complete another
        if own is not None:
            self.put(scope, own[0], own[1], own=True)
        now = time.monotonic()
        self._next += 1
        gather = _Gather(scope, count, now, now + wait_s, None if former is None else former.value)
        self._gathers[self._next] = gather
        return self._next

    def take(self, request: int) -> list[bytes] | None:
        """The values of a request, or None while they are not there."""
        self._check_open()
        gather = self._gathers.get(request)
        now = time.monotonic()
        if gather is None or now < min(gather.look_at, gather.deadline):
            return None
        self._refresh()
        values = self._answer(gather) or self._look(gather)
        if values is None and now >= gather.deadline:
            del self._gathers[request]
            raise GatherTimeoutError(self._missing(gather))
        if values is not None:
            del self._gathers[request]
            return values
        wait_s = min(max(_WAITED_SHARE * (now - gather.since), _LOOK_FIRST_S), _LOOK_LAST_S)
        gather.look_at = time.monotonic() + wait_s
        return None

    def _answer(self, gather: _Gather) -> list[bytes] | None:
        """Values that another rank has collected since this gather began."""
        record = self._record(_answer_key(gather.scope, gather.count))
        if record is None or record.value == gather.former:
            return None
        return _unpack(record.value)

    def _look(self, gather: _Gather) -> list[bytes] | None:
        """Start at the first that was missing; all of them are read once nothing is."""
        while True:
            start = gather.present
            keys = (_key(gather.scope, index) for index in range(start, gather.count))
            found = takewhile(lambda record: record is not None, map(self._record, keys))
            records = [record for record in found if record is not None]
            gather.present = start + len(records)
            if gather.present < gather.count:
                return None
            if start == 0:
                self._publish(gather, records)
                return [record.value for record in records]
            gather.present = 0  # what was there may have gone, or been replaced

    def _publish(self, gather: _Gather, records: list[Record]) -> None:
        """Store a complete answer for the other ranks if some of its values may be removed."""
        answer = _pack(records)
        if answer == gather.former or not any(record.own for record in records):
            return
        if len(answer) > VALUE_BYTES_MAX:
            raise StoreError(f"the values of {gather.scope!r} are too large together: {len(answer)} bytes")
        key = _answer_key(gather.scope, gather.count)
        self._replace(key, seal(Record(answer, self._rank, self._writer, False), self.secret, self.job, key))

    def _missing(self, gather: _Gather) -> list[int]:
        indices = range(gather.count)
        return [index for index in indices if self._record(_key(gather.scope, index)) is None]

    def _record(self, key: str) -> Record | None:
        data = self._read(key)
        if data is None:
            return None
        try:
            return unseal(data, self.secret, self.job, key)
        except StoreError as error:
            raise StoreError(f"{self._place(key)} {error}") from None

    def _place(self, key: str) -> str:
        """The name of a key in messages."""
        return f"the value of {key!r}"

    def _is_stale(self, key: str) -> bool:
        """Return whether the key has an own value of an earlier process in this rank's place."""
        self._refresh()
        record = self._record(key)
        return (
            record is not None and record.own and record.rank == self._rank and record.writer != self._writer
        )

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("the store is closed")


def _key(scope: str, index: int) -> str:
    return f"{scope}/{int(index)}"


def _answer_key(scope: str, count: int) -> str:
    return f"{scope}/all {count}"


def _pack(records: list[Record]) -> bytes:
    """The values in order, with their writers, so that the answers to two gathers of one scope differ."""
    return b"".join(_ITEM.pack(record.writer, len(record.value)) + record.value for record in records)


def _unpack(answer: bytes) -> list[bytes]:
    values, begin = [], 0
    while begin < len(answer):
        _, size = _ITEM.unpack_from(answer, begin)
        begin += _ITEM.size + size
        values.append(answer[begin - size : begin])
    return values
