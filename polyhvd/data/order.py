"""The order in which a job reads its rows: only arithmetic, the same for any number of ranks.

Rows lie in row groups: the units in which files are read, or single rows of an array. An epoch shuffles the
groups and cuts the sequence into V streams of equal length; rows are shuffled within windows of a stream.
Position p of the epoch is row ``p // V`` of stream ``p % V``. Nothing here reads data, knows a world, a
clock or a framework.
"""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["LAST", "Indices", "Order", "Run", "Section", "Step", "Window", "at_least", "permutation"]

Indices = npt.NDArray[np.int64]

_ROWS_MAX = 1 << 62
_PATTERNS_MAX = 256  # that are kept, each of at most as many runs as streams
#: What becomes of the rows that do not fill a step at the end of an epoch.
LAST = ("even", "drop", "short")

# SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014), with
# constants of Stafford's variant 13: a counter goes through a bijection of 64 bits. It is integer
# arithmetic written out here, so that an order is the same on every machine and with every version of
# NumPy, whose own streams may change.
_BITS = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_SHIFTS_AND_FACTORS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))


def _mix(value: Any) -> Any:
    """The finalizer, of one number or of an array of uint64."""
    for shift, factor in _SHIFTS_AND_FACTORS:
        if isinstance(value, int):
            value = (value ^ value >> shift) * factor & _BITS
        else:
            value = (value ^ value >> np.uint64(shift)) * np.uint64(factor)
    return value


def permutation(count: int, *key: int) -> Indices:
    """A permutation of ``count`` numbers that depends only on the key, uniform over keys.

    They are sorted by SplitMix64's number of each. Those of one key all differ, since the generator is a
    bijection of its counter, so that the result does not depend on how equal ones would be sorted.

    Args:
        count: how many numbers, from 0.
        key: integers of at least 0, of which the lowest 64 bits count.

    Example::

        permutation(60000, seed, epoch)
    """
    state = 0
    for part in key:
        state = _mix(state + _GAMMA + part & _BITS)
    counters = np.arange(1, count + 1, dtype=np.uint64)
    return np.argsort(_mix(counters * np.uint64(_GAMMA) + np.uint64(state))).astype(np.int64, copy=False)


class Run(NamedTuple):
    """Consecutive rows of one stream.

    Attributes:
        stream: its number, from 0.
        first: the first of the rows, counted within the stream.
        length: how many there are.

    Example::

        order.rows(0, [Run(stream=3, first=10, length=2)])
    """

    stream: int
    first: int
    length: int


class Section(NamedTuple):
    """Consecutive rows of one row group.

    Args:
        group: its number, from 0.
        first: the first of the rows, counted within the group.
        rows: how many there are.
    """

    group: int
    first: int
    rows: int


class Window(NamedTuple):
    """The rows of a stream that are shuffled among themselves.

    Args:
        begin: the first row, counted within the stream.
        end: one past the last row.
        sections: where the rows are stored, in the order of the stream before rows are shuffled.
        places: the place in the window of each row of the sections; None: rows are not shuffled.
    """

    begin: int
    end: int
    sections: list[Section]
    places: Indices | None


@dataclass(frozen=True)
class Step:
    """The positions that all ranks together take in one step.

    Args:
        cursor: the first position.
        rows: how many positions, of all ranks.
        size: number of ranks.

    Example::

        Step(cursor=0, rows=65, size=2).share(0)  # 33
    """

    cursor: int
    rows: int
    size: int

    @property
    def after(self) -> int:
        """The cursor after this step."""
        return self.cursor + self.rows

    def bounds(self, rank: int) -> tuple[int, int]:
        """A rank's part of the step's rows, once these are sorted by stream: first, and one past the last."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is not below the {self.size} ranks of this step")
        even, more = divmod(self.rows, self.size)
        first = rank * even + min(rank, more)
        return first, first + even + (rank < more)

    def share(self, rank: int) -> int:
        """How many rows are a rank's. Those of two ranks differ by at most one."""
        first, end = self.bounds(rank)
        return end - first

    def weight(self, rank: int) -> float:
        """The factor of a rank's mean, so that the average over ranks is the mean over rows."""
        return self.share(rank) * self.size / self.rows


class Order:
    """The order of rows in every epoch.

    Args:
        groups: the number of rows of each row group. Groups may be empty.
        seed: an integer of at least 0; another seed is another order.
        streams: V, into how many streams an epoch is cut. It is part of the order. Choose at least the
            number of ranks of the largest world, so that a rank reads few streams; powers of two suit most
            sizes.
        window: within how many consecutive rows of a stream rows are shuffled; a reader holds the groups of
            a window of each of its streams. None: a whole stream.
        shuffle: False keeps groups, and rows within them, as they are.
        files: the names of the files that the groups are in, for :attr:`checksum`.

    Raises:
        ValueError: an argument is out of range.

    Example::

        order = Order([4096] * 1024, seed=1, window=16384)
        step = order.step(cursor=0, rows=256, size=4)
        rows = order.rows(epoch=0, runs=order.runs(step, rank=0))
    """

    def __init__(
        self,
        groups: Sequence[int] | npt.NDArray[Any],
        *,
        seed: int = 0,
        streams: int = 64,
        window: int | None = None,
        shuffle: bool = True,
        files: Sequence[str] = (),
    ) -> None:
        sizes = np.asarray(groups)
        if sizes.ndim != 1 or (sizes.size and (sizes.dtype.kind not in "iu" or sizes.min() < 0)):
            raise ValueError(
                "groups has to list the number of rows of each row group, as integers of at least 0"
            )
        self.seed = at_least(0, "seed", seed)
        self.streams = at_least(1, "streams", streams)
        self.window = None if window is None else at_least(1, "window", window)
        self.shuffle = shuffle
        self._files = files
        if sizes.size and float(sizes.sum(dtype=np.float64)) > _ROWS_MAX:
            raise ValueError(f"groups has more than {_ROWS_MAX} rows in all")
        self._sizes: Indices = sizes.astype(np.int64, copy=False)
        self.total = int(self._sizes.sum())
        #: Every group is one row: neither the groups nor where they begin have to be kept.
        self._rows_alone = bool(sizes.size == 0 or sizes.min() == sizes.max() == 1)
        self._single = bool(sizes.size == 0 or sizes.max() <= 1)
        if not self._rows_alone:
            self._full = np.flatnonzero(self._sizes)  # the groups that have rows
            self._offsets = np.cumsum(self._sizes) - self._sizes  # the first row of each group
        even, more = divmod(self.total, self.streams)
        numbers = np.arange(self.streams, dtype=np.int64)
        self._starts = numbers * even + np.minimum(numbers, more)  # of each stream, in the sequence of rows
        self._in_line = np.asarray(_spread(self.streams))
        # Caches. Threads that compute one at the same time store equal ones.
        self._layout: tuple[int, Indices, Indices] | None = None
        self._windows: dict[int, tuple[int, int, Indices]] = {}
        self._patterns: dict[tuple[int, int, int, int], list[Run]] = {}

    @classmethod
    def of_rows(cls, rows: int, *, seed: int = 0, streams: int | None = None, shuffle: bool = True) -> Order:
        """The order of rows that are read one by one: each is a group, so that an epoch is one permutation.

        The arguments are those of the class; ``streams=None``: 64 if rows are shuffled, else 1, which keeps
        their order.
        """
        groups = np.broadcast_to(np.int64(1), (at_least(0, "rows", rows),))
        if streams is None:
            streams = 64 if shuffle else 1
        return cls(groups, seed=seed, streams=streams, shuffle=shuffle)

    def with_options(self, *, seed: int, streams: int, window: int | None) -> Order:
        """The order of the same row groups with other options, which are those of the class."""
        return Order(
            self._sizes, seed=seed, streams=streams, window=window, shuffle=self.shuffle, files=self._files
        )

    @cached_property
    def checksum(self) -> int:
        """The CRC-32 of the names of the files and the sizes of the row groups, the same on every machine."""
        names = "\0".join(self._files).encode(errors="surrogateescape")
        return zlib.crc32(self._sizes.astype("<i8").tobytes(), zlib.crc32(names))

    def length(self, stream: int) -> int:
        """The number of rows of a stream; those of two streams differ by at most one."""
        return (self.total - stream + self.streams - 1) // self.streams

    def step(self, cursor: int, rows: int, size: int, last: str = "even") -> Step | None:
        """The step that begins at a position; None: the epoch has no more.

        Args:
            cursor: how many rows of the epoch have been used.
            rows: of a full step, over all ranks; at least ``size``.
            size: number of ranks.
            last: "even" splits the rows that remain as evenly as possible; if they are fewer than ranks,
                together with those of the step before. "short" keeps them apart, so that no step is larger
                than ``rows``, but some ranks may have none. "drop" leaves them out.

        Raises:
            ValueError: an argument is out of range.
        """
        left = self._left(cursor, rows, size, last)
        if left == 0 or (last == "drop" and left < rows):
            return None
        together = last == "even" and left < rows + size
        return Step(cursor, left if together else min(left, rows), size)

    def steps(self, cursor: int, rows: int, size: int, last: str = "even") -> int:
        """How many steps an epoch has from a position on, if the world stays as it is.

        The arguments are those of :meth:`step`.
        """
        full, rest = divmod(self._left(cursor, rows, size, last), rows)
        wanted = {"even": rest >= size or full == 0, "short": True, "drop": False}[last]
        return full + (rest > 0 and wanted)

    def _left(self, cursor: int, rows: int, size: int, last: str) -> int:
        at_least(1, "size", size)
        if at_least(1, "rows", rows) < size:
            raise ValueError(
                f"a step of {rows} rows leaves some of {size} ranks without any; use at least {size}"
            )
        if not 0 <= cursor <= self.total:
            raise ValueError(f"cursor is {cursor}, but an epoch has positions 0 to {self.total}")
        if last not in LAST:
            raise ValueError(f"last is {last!r}; it has to be one of {', '.join(map(repr, LAST))}")
        return self.total - cursor

    def runs(self, step: Step, rank: int) -> list[Run]:
        """A rank's rows of a step: what it gets where the rows, sorted by stream, are cut into one piece
        per rank.

        Streams stand in line by their bit-reversed numbers (the sequence of van der Corput). Consecutive
        positions, which belong to consecutive streams, are thus spread evenly over the line whatever their
        number is, and the
        cuts stay near the same streams in all steps: a rank reads its own streams, and shares those at its
        borders.
        """
        begin, end = step.bounds(rank)
        if step.after > self.total:
            raise ValueError(f"the step ends at position {step.after}, but the epoch at {self.total}")
        row, stream = divmod(step.cursor, self.streams)
        key = (stream, step.rows, begin, end)
        if (pattern := self._patterns.get(key)) is None:
            if len(self._patterns) == _PATTERNS_MAX:
                self._patterns.clear()
            pattern = self._patterns[key] = self._pattern(*key)
        return [Run(stream, row + first, length) for stream, first, length in pattern]

    def _pattern(self, cursor: int, rows: int, begin: int, end: int) -> list[Run]:
        """The runs of a piece of a step; those of a step ``streams`` positions later begin one row later."""
        streams = self._in_line
        first = (cursor - streams + self.streams - 1) // self.streams
        count = (cursor + rows - streams + self.streams - 1) // self.streams - first
        after = np.cumsum(count)
        low = np.maximum(begin - (after - count), 0)
        high = np.minimum(end - (after - count), count)
        found = np.flatnonzero(low < high)
        columns = (streams[found], (first + low)[found], (high - low)[found])
        return [Run(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]

    def readers(self, rows: int, size: int) -> Indices:
        """How many ranks read each stream in an epoch of full steps.

        Args:
            rows: of a step, over all ranks; at least ``size``.
            size: number of ranks.

        Returns:
            Their number for each stream, [stream].

        Example::

            Order([4096] * 1024, streams=64).readers(rows=30, size=3).mean()  # 1.66
        """
        step = Step(0, rows, size)
        firsts = np.asarray([step.bounds(rank)[0] for rank in range(size)])
        changes = np.zeros((self.streams, size + 1), np.int64)
        # The pattern of a step depends on the stream that it begins with.
        kinds = self.streams // math.gcd(self.streams, rows)
        for number in range(min(kinds, max(1, self.total // rows))):
            cursor, streams = number * rows % self.streams, self._in_line
            first = (cursor - streams + self.streams - 1) // self.streams
            count = (cursor + rows - streams + self.streams - 1) // self.streams - first
            after = np.cumsum(count)
            found = np.flatnonzero(count)
            lowest = np.searchsorted(firsts, (after - count)[found], "right") - 1
            highest = np.searchsorted(firsts, after[found] - 1, "right") - 1
            changes[streams[found], lowest] += 1
            changes[streams[found], highest + 1] -= 1
        readers: Indices = (np.cumsum(changes, axis=1) > 0).sum(axis=1, dtype=np.int64)
        return readers

    def dealt(self, step: Step, rank: int) -> tuple[list[Run], float]:
        """A rank's rows of a step and their weight; if it has none, one row of weight 0, for means."""
        weight = step.weight(rank)
        return self.runs(step, rank if weight else 0), weight  # rank 0 then has a single one

    def rows(self, epoch: int, runs: Sequence[Run]) -> Indices:
        """The numbers of the rows of runs, counted over all groups in the order in which these were given."""
        groups, within = self.locate(epoch, runs)
        return groups if self._rows_alone else self._offsets[groups] + within

    def locate(self, epoch: int, runs: Sequence[Run]) -> tuple[Indices, Indices]:
        """Return for each row of runs its row group, and its place in the group.

        Args:
            epoch: of at least 0.
            runs: those of :meth:`runs`.

        Raises:
            ValueError: a run leaves its stream, or the epoch is negative.
        """
        epoch = at_least(0, "epoch", epoch)
        for stream, first, count in runs:
            if not (0 <= stream < self.streams and first >= 0 and first + count <= self.length(stream)):
                raise ValueError(f"{Run(stream, first, count)} leaves the rows of the {self.streams} streams")
        if not runs:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        if self.shuffle and not self._single:
            places = np.concatenate([self._in_windows(epoch, run) for run in runs])
        else:
            places = np.concatenate(
                [np.arange(run.first, run.first + run.length) + self._starts[run.stream] for run in runs]
            )
        groups, starts = self._sequence(epoch)
        if self._single:
            return groups[places], np.zeros_like(places)
        found = np.searchsorted(starts, places, "right") - 1
        return groups[found], places - starts[found]

    def window_at(self, epoch: int, stream: int, row: int) -> Window:
        """The window that a row of a stream is in.

        Args:
            epoch: of at least 0.
            stream: its number.
            row: counted within the stream; it has to be below :meth:`length`.
        """
        length = self.length(stream)
        width = self.window or length
        number = row // width
        begin, end = number * width, min((number + 1) * width, length)
        places = None
        if self.shuffle and not self._single:
            places = np.empty(end - begin, np.int64)
            places[permutation(end - begin, self.seed, epoch, 1 + stream, number)] = np.arange(end - begin)
        return Window(
            begin, end, self._sections(epoch, int(self._starts[stream]) + begin, end - begin), places
        )

    def _sections(self, epoch: int, place: int, rows: int) -> list[Section]:
        """Return where consecutive rows of an epoch's sequence of groups are stored."""
        groups, starts = self._sequence(epoch)
        if self._single:
            return [Section(group, 0, 1) for group in groups[place : place + rows].tolist()]
        sections = []
        index = int(np.searchsorted(starts, place, "right")) - 1
        while rows:
            group = int(groups[index])
            first = place - int(starts[index])
            taken = min(rows, int(self._sizes[group]) - first)
            sections.append(Section(group, first, taken))
            index, place, rows = index + 1, place + taken, rows - taken
        return sections

    def _sequence(self, epoch: int) -> tuple[Indices, Indices]:
        """The groups that have rows, as an epoch orders them, and where each begins among the rows."""
        cached = self._layout
        if cached is None or cached[0] != epoch:
            count = self.total if self._rows_alone else len(self._full)
            groups = permutation(count, self.seed, epoch) if self.shuffle else np.arange(count)
            starts = np.empty(0, np.int64)
            if not self._rows_alone:
                groups = self._full[groups]
            if not self._single:
                sizes = self._sizes[groups]
                starts = np.cumsum(sizes) - sizes
            cached = self._layout = (epoch, groups, starts)
        return cached[1], cached[2]

    def _in_windows(self, epoch: int, run: Run) -> Indices:
        """Return the places of a run's rows in the sequence, after each window of the stream was shuffled."""
        length = self.length(run.stream)
        window = self.window or length
        parts = []
        place, end = run.first, run.first + run.length
        while place < end:
            number, within = divmod(place, window)
            rows = min(window, length - number * window)
            taken = min(rows - within, end - place)
            shuffled = self._shuffled(epoch, run.stream, number, rows)
            parts.append(
                shuffled[within : within + taken] + (int(self._starts[run.stream]) + number * window)
            )
            place += taken
        return np.concatenate(parts)

    def _shuffled(self, epoch: int, stream: int, number: int, rows: int) -> Indices:
        """The permutation of a window; the latest of each stream is kept."""
        cached = self._windows.get(stream)
        if cached is None or cached[:2] != (epoch, number):
            cached = (epoch, number, permutation(rows, self.seed, epoch, 1 + stream, number))
            self._windows[stream] = cached
        return cached[2]


def _spread(count: int) -> list[int]:
    """The numbers below ``count``, sorted by their reversed bits."""
    bits = max(1, (count - 1).bit_length())
    return sorted(range(count), key=lambda number: int(f"{number:0{bits}b}"[::-1], 2))


def at_least(least: int, name: str, value: int) -> int:
    """An integer argument of at least ``least`` and at most 63 bits; raises ValueError otherwise."""
    try:
        number = value.__index__()
    except AttributeError:
        number = least - 1
    if number < least or number > sys.maxsize:
        limit = f" and at most {sys.maxsize}" if number > sys.maxsize else ""
        raise ValueError(f"{name} is {value!r}; it has to be an integer of at least {least}{limit}")
    return number
