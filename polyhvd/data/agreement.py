"""Compares what the ranks of a world read, without waiting for ranks that read nothing."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import threading
import time
import weakref
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from polyhvd.errors import DataError, HorovodInternalError
from polyhvd.runtime import current
from polyhvd.runtime.world import World

__all__ = ["Agreement", "Description"]

#: Of names of operations that no rank waits for; see csrc/control/unhurried.h.
_PREFIX = "polyhvd.data/"
#: How long a rank waits for the descriptions of the others when it sees that they differ. Others may see it
#: one batch later only, and need this rank's part in the step until then.
_FIRST_WAIT_S = 5.0
#: How long it waits with the next batch.
_WAIT_S = 10.0
#: For a checksum of another rank that may be on the way when the first epoch ends: nothing may follow it.
_END_WAIT_S = 0.5
_POLL_S = 0.005
_CALLERS = 4  # of a loader, by which the ranks recognise it
_OWN = (str(Path(__file__).parents[1]) + os.sep, str(Path(__file__).parents[2] / "frameworks") + os.sep)

#: What to do about a difference under a heading.
_CURE = "all ranks need the same data and arguments"
_CURES = {
    "file": "all ranks need the same files: check that the folder is the same on all hosts and that no "
    "program writes to it while loaders are made",
    "position": "have all ranks load the same state and call set_epoch() with the same number",
}

#: Under headings, a text for each name, in order: {"files": {"0.parquet": "100 rows"}}.
Description = Mapping[str, Mapping[str, str]]

#: The beginning of a difference in the number of the epoch only.
_EPOCH = "position 'epoch'"
_LOG = logging.getLogger("polyhvd")

_lock = threading.Lock()
#: How many loaders of the same callers this process has made in a world, or has used there and made before.
_made: weakref.WeakKeyDictionary[World, Counter[str]] = weakref.WeakKeyDictionary()
_made_outside: Counter[str] = Counter()  # while there was no world
#: How often each of them, or a copy of it, has begun to load in a world.
_begun: weakref.WeakKeyDictionary[World, Counter[str]] = weakref.WeakKeyDictionary()


@dataclass(eq=False)
class _Sent:
    """A checksum that the other ranks may not have sent yet.

    Args:
        label: of the loader.
        handle: of the exchange.
        at: when it was sent, by ``time.monotonic()``.
    """

    label: str
    handle: Any
    at: float


#: Those of which no other rank's absence was reported. Under ``_lock``.
_sent: weakref.WeakKeyDictionary[World, list[_Sent]] = weakref.WeakKeyDictionary()


class Agreement:
    """Raises an error on every rank if loaders that are the same line of a program read different data.

    A rank sends a checksum when its loader begins to load in a world, and goes on. It looks at those of the
    others with later batches, when all ranks have sent theirs, as they have once they have completed
    a collective within the loop. If only some ranks load, nothing is compared, and none of them waits. They
    report it once, after the time in which a stall is reported.

    It has to be made in the constructor of the loader.

    Args:
        what: the name of the loader's class.
        describe: returns the properties that must be equal on all ranks when they begin to load.
    """

    def __init__(self, what: str, describe: Callable[[], Description]) -> None:
        self._describe = describe
        callers = _callers()
        #: The class of the loader and the line that has made it.
        self.label = f"{what}({callers[0]})" if callers else what
        key = hashlib.sha256(json.dumps([what, callers]).encode()).hexdigest()[:16]
        with _lock:  # numbered here, since a rank may load from one of them before the others do
            made = _made_in(current.find())
            made[key] += 1
            self._key, self._number = key, made[key]
        self._world: weakref.ref[World] | None = None
        self._name = ""
        self._handle: Any = None
        self._has_waited = False  # in this world, at the end of an epoch
        self._text = b""  # compressed, what the checksum is of, until it is compared: positions move
        #: Once it is known that ranks differ: their descriptions on the way, and the ranks by what they have.
        self._difference: tuple[Any, dict[int, int], list[list[int]]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which compares separately."""
        return {**self.__dict__, "_world": None, "_handle": None, "_text": b"", "_difference": None}

    def check(self, *, at_end: bool = False) -> None:
        """Send the checksum if that was not done in this world, and compare those of all that are there.

        Args:
            at_end: an epoch has ended. After the first one, this waits a moment for the others' checksums.

        Raises:
            DataError: the ranks read different data. It names the first difference.
        """
        world = current.find()
        if world is None or world.placement.size == 1 or world.engine.behind or world.has_joined:
            return
        try:
            _report_absent(world)
            if self._world is None or self._world() is not world:
                self._begin(world)
            elif self._difference is not None:
                self._report(world, _WAIT_S, is_last=True)
            elif self._handle is not None and self._has_all(at_end):
                handle, self._handle = self._handle, None
                with _lock:
                    _sent[world] = [sent for sent in _sent.get(world, ()) if sent.handle is not handle]
                self._compare(world, world.numpy.synchronize(handle))
        except HorovodInternalError:
            self._handle = None  # the program's next collective fails, too

    def _has_all(self, at_end: bool) -> bool:
        if at_end and not self._has_waited:
            self._has_waited = True
            deadline = time.monotonic() + _END_WAIT_S
            while not self._handle.done() and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        return bool(self._handle.done())

    def _begin(self, world: World) -> None:
        own = f"{self._key}.{self._number}"
        with _lock:
            made = _made_in(world)
            made[self._key] = max(made[self._key], self._number)
            begun = _begun.setdefault(world, Counter())
            begun[own] += 1
            number = begun[own]
        self._world, self._difference, self._has_waited = weakref.ref(world), None, False
        self._name = f"{_PREFIX}{self.label}.{own}.{number}"
        items = [[heading, list(texts.items())] for heading, texts in self._describe().items()]
        text = json.dumps(items).encode()
        self._text = zlib.compress(text, 1)  # libraries of zlib compress differently
        numbers = np.array([[world.placement.rank, len(self._text)]], "<i8").view(np.uint8)
        digest = np.frombuffer(hashlib.sha256(text).digest(), np.uint8)[None]
        row = np.concatenate([numbers, digest], axis=1)
        self._handle = world.numpy.allgather_async(row, name=self._name)
        with _lock:
            _sent.setdefault(world, []).append(_Sent(self.label, self._handle, time.monotonic()))

    def _compare(self, world: World, rows: Any) -> None:
        digests: dict[bytes, list[int]] = defaultdict(list)
        lengths: dict[int, int] = {}
        for row in rows:
            rank, lengths[rank] = row[:16].view("<i8").tolist()
            digests[row[16:].tobytes()].append(rank)
        text, self._text = self._text, b""
        if len(digests) == 1:
            return
        handle = world.numpy.allgather_async(np.frombuffer(text, np.uint8), name=f"{self._name}.all")
        self._difference = handle, lengths, list(digests.values())
        self._report(world, _FIRST_WAIT_S, is_last=False)

    def _report(self, world: World, wait_s: float, *, is_last: bool) -> None:
        """Raise the error once the descriptions of all ranks are there, or, if ``is_last``, without them.

        A process that has joined an elastic job counts epochs from 0 if the program does not set them.
        That is only a warning, since the job would be lost.
        """
        assert self._difference is not None
        handle, lengths, groups = self._difference
        deadline = time.monotonic() + wait_s
        while not handle.done():
            if time.monotonic() > deadline:
                if not is_last:
                    return
                break
            time.sleep(_POLL_S)
        self._difference, heading = None, ""
        if handle.done():
            heading, difference = _difference(_unpacked(world.numpy.synchronize(handle), lengths))
        else:
            named = " and ".join(map(ranks_named, groups))
            difference = f"{named} have different data, arguments or positions"
        text = (
            f"{self.label}: the ranks read different data: {difference}; {_CURES.get(heading, _CURE)}, or "
            "pass placement= for a loader that not all ranks share"
        )
        if difference.startswith(_EPOCH) and world.member is not None and world.placement.generation > 1:
            # A rank has joined an elastic job. All have equally many steps, so it goes on.
            if world.placement.rank == 0:
                _LOG.warning("%s. Until then some rows are read twice, and others not at all", text)
            return
        raise DataError(text)


def _made_in(world: World | None) -> Counter[str]:
    """The numbers of ``_made`` for a world, or for a process without one; ``_lock`` is held.

    A process that joins an elastic job has made no loaders in former worlds, so these do not count. It makes
    loaders before ``init()`` as the others have, and these count in each world.
    """
    return _made_outside if world is None else _made.setdefault(world, _made_outside.copy())


def _report_absent(world: World) -> None:
    """Warn once of each loader that the other ranks have not begun to load, in the time in which a stall is
    reported. Loaders whose loops have ended are reported when another one loads a batch."""
    if world.settings.stall_check_disable:
        return
    now = time.monotonic()
    due: list[_Sent] = []
    with _lock:  # loaders of several threads come here
        left: list[_Sent] = []
        for sent in _sent.get(world, ()):
            (due if now - sent.at >= world.settings.stall_warn_s else left).append(sent)
        if due:
            _sent[world] = left
    for sent in due:
        if sent.handle.done():
            continue
        _LOG.warning(
            "%s: rank %d of %d began to load %.0f s ago, and other ranks have not begun: it gets only its "
            "part of the rows. If other ranks do not load them, pass placement=lambda: (0, 1)",
            sent.label,
            world.placement.rank,
            world.placement.size,
            now - sent.at,
        )


def _unpacked(everything: Any, lengths: Mapping[int, int]) -> dict[int, Description]:
    """The descriptions of all ranks."""
    packed, begin = everything.tobytes(), 0
    found: dict[int, Description] = {}
    for rank, length in lengths.items():
        items = json.loads(zlib.decompress(packed[begin : begin + length]))
        found[rank] = {heading: dict(texts) for heading, texts in items}
        begin += length
    return found


def ranks_named(ranks: list[int]) -> str:
    """Ranks in a sentence.

    Example::

        ranks_named([0, 2]) == "ranks 0, 2"
    """
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}"


def _difference(found: Mapping[int, Description]) -> tuple[str, str]:
    """The heading of the first difference between the descriptions of ranks, and the difference in words."""
    headings = dict.fromkeys(heading for description in found.values() for heading in description)
    for heading in headings:
        texts = {rank: description.get(heading, {}) for rank, description in found.items()}
        for name in dict.fromkeys(name for those in texts.values() for name in those):
            ranks: dict[str, list[int]] = defaultdict(list)
            for rank, those in texts.items():
                ranks[those.get(name, "missing")].append(rank)
            if len(ranks) > 1:
                return heading, f"{heading} {name!r}: " + "; ".join(
                    f"{text} on {ranks_named(those)}" for text, those in ranks.items()
                )
        for place, names in enumerate(zip(*texts.values(), strict=False)):
            if len(set(names)) > 1:
                ranks = defaultdict(list)
                for rank, name in zip(texts, names, strict=True):
                    ranks[name].append(rank)
                return heading, f"{heading} number {place} in the order: " + "; ".join(
                    f"{name!r} on {ranks_named(those)}" for name, those in ranks.items()
                )
    raise AssertionError  # they are different


def _callers() -> list[str]:
    """The lines of the program that the current call came from, innermost first."""
    found: list[str] = []
    frame: Any = sys._getframe(1)
    while frame is not None and len(found) < _CALLERS:
        path = frame.f_code.co_filename
        if not path.startswith(_OWN):
            found.append(f"{os.path.basename(path)}:{frame.f_lineno}")
        frame = frame.f_back
    return found


def _forget_in_child() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_in_child)
