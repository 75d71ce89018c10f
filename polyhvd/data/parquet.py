"""Batches of the rows of files, of which a rank reads its part."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from polyhvd.data.agreement import Agreement
from polyhvd.data.ahead import Ahead
from polyhvd.data.cache import cache_of
from polyhvd.data.columns import described, require_pyarrow
from polyhvd.data.files import ParquetFiles
from polyhvd.data.finishing import Finishing, StandIn
from polyhvd.data.loader import Batch, Loader
from polyhvd.data.order import Indices, Order, Section, Step, at_least
from polyhvd.data.position import Place, current_place
from polyhvd.data.read_ahead import ReadAhead
from polyhvd.data.skips import Skips
from polyhvd.data.storage import TIMEOUT_S, Source
from polyhvd.data.workers import Workers
from polyhvd.errors import NotInitializedError
from polyhvd.runtime import current

__all__ = ["FileLoader", "ParquetLoader"]

_STREAMS_MAX = 64
#: A stream's last row group is mostly the next one's first, and read by both: one more than ten is 10 %.
_GROUPS_OF_STREAM = 10
#: More ranks than streams read all of them, so that there are some also where more is read twice, or held.
_STREAMS_OF_FEW_GROUPS = 4
_STREAMS_OF_LARGE_GROUPS = 8
#: Rows of more groups mix hardly better, and many small files would have to be read before the first batch.
_GROUPS_MIXED_MAX = 1024
_MIB = 1 << 20
#: Threads that read row groups ahead. Those of a remote file system wait for it most of the time.
_READERS_REMOTE, _READERS_LOCAL = 16, 2
_LAST_TASK_S = 1.0  # how long the thread may take to end when the worker processes have ended
_PLANNED_MAX = 1000  # parts of steps whose rows are not read yet; small, and made faster than read


class FileLoader(Loader):
    """Loads batches of files of Parquet, Arrow IPC, CSV or JSON lines: every row of an epoch once over all
    ranks, however their number changes.

    It behaves as :class:`polyhvd.data.ArrayLoader`: the same batches, the same position, the same order of
    rows for the same seed, whatever the number of ranks. A rank reads its own row groups. A thread reads
    them, shuffles rows and makes batches ahead of the step that is under way.

    Columns of numbers, points in time and booleans become arrays of their dtype. FixedSizeList,
    ``arrow.fixed_shape_tensor``, and FixedSizeBinary with ``shape`` and ``dtype`` in the field's metadata
    become arrays with more axes. Strings, bytes and decimals become arrays of objects. Images and lists of
    different lengths need ``decode`` and ``pad``. Arrays and images in data sets of Petastorm are decoded
    without them.

    Args:
        source: a file, a folder, a pattern such as ``"train/*.parquet"``, or a list of these, each a path or
            a URI such as ``"s3://bucket/train/"`` of a file system that pyarrow or fsspec knows. A folder
            stands for the files within it, in subfolders too, with a suffix of the format. The files
            of a folder or pattern are in the order of their paths. Every rank has to see the same files, in
            the same order: sort lists that come from the file system. Folders named ``key=value`` within it
            are columns.
        format: "parquet", "ipc" (also "arrow" and "feather"), "csv", "tsv" or "json" (an object on each
            line), or a ``pyarrow.dataset.CsvFileFormat``; None: by the suffix of the files.
        columns: their names; None: all.
        batch_size: rows of a step for each rank. With more ranks a step has more rows.
        global_batch_size: rows of a step over all ranks, whatever their number. One of the two is given.
        shuffle: whether the order differs from epoch to epoch.
        seed: of the order, an integer of at least 0, the same on every rank.
        last: "even", "short" or "drop", as of :class:`polyhvd.data.ArrayLoader`.
        filter: a ``pyarrow.dataset.Expression``; only rows for which it is true exist for the loader.
        fill_null: the value that replaces nulls, or a mapping of names of columns to such values; without,
            a null is an error.
        decode: names of columns of bytes that are JPEG or PNG images. Pillow makes of them arrays of uint8,
            [row, height, width, channel]; grey ones have no channels. A mapping has for each name a mode to
            which images are converted ("L", "RGB" or "RGBA"), a function that makes an array of a row's
            bytes, or None. Rows of a batch need equal shapes.
        pad: for each column of lists of different lengths the value that extends them to the longest of the
            batch; None leaves a row of objects for each, which ``transform`` can make an array.
        transform: is called with each batch, a dict of arrays by the names of the columns, in the thread that
            reads ahead or in ``workers``. What it returns, another mapping or a sequence, takes its place.
            Its exceptions are raised where the batch is asked for.
        workers: the number of processes that decode and transform batches; 0: the thread does it. Order and
            content of the batches are the same. They are new Python processes, which get ``transform`` and
            the functions of ``decode`` by cloudpickle, with copies of what these refer to, and return arrays
            in shared memory. Each of them may be one batch ahead, whatever ``prefetch_bytes``.
        on_error: "raise", or "skip": rows that cannot be read are left out, with a warning for each file, and
            counted in ``hvd.counters()``. They keep their place in the order, with weight 0. Files that
            cannot be opened are left out of the order.
        streams: into how many streams an epoch is cut; None: so many that at most a tenth of the row groups
            is read twice, up to 64. If rows are not shuffled, it is the number of ranks, each of which reads
            another part of the files, in their order; or as if they were shuffled, in an elastic job. 1 keeps
            the order of the files over all ranks, and has each rank read all row groups.
        shuffle_bytes: memory for the rows that all ranks together hold to shuffle them.
        prefetch_bytes: how many bytes of batches the thread is ahead at most; and as many of row groups that
            are read before they are needed, of a remote file system up to 16 at the same time.
        filesystem: of ``pyarrow.fs`` or fsspec, which ``source`` is in; None: the local one, or that of the
            URI.
        read_attempts: how often a read of a remote file system is tried. The waits between attempts begin
            at 0.2 s and double up to 10 s.
        read_timeout_s: how many seconds a read of a remote file system may take, with all attempts; and how
            long a process of ``workers`` may be stopped by a signal.
        cache: keeps the selected columns of row groups that were read, for later epochs and for all ranks and
            jobs of this user on this host: "memory"; "disk", in the folder for temporary files; or a
            ``pathlib.Path`` of a folder. Row groups of a file that was replaced are not used any more.
        cache_bytes: how much it holds at most, in bytes, 1 GiB of memory or 16 GiB of disk if it is None.
            What was not used for longest is dropped.
        placement: returns rank and size; None: those of the current world.

    Raises:
        ModuleNotFoundError: pyarrow, or a package that the file system needs, is not installed.
        ValueError: an argument is out of range, or a column has a type that cannot be an array.
        DataError: a file cannot be read, or its columns differ from those of the first file. While batches
            are loaded it also names the row group and the column.

    Example::

        loader = FileLoader("train/*.csv", columns=["x", "label"], batch_size=64, seed=1)
        for epoch in range(10):
            loader.set_epoch(epoch)
            for batch in loader:
                train(batch["x"], batch["label"], weight=batch.weight)
    """

    _format: Any = None

    def __init__(
        self,
        source: Source,
        *,
        format: Any = None,
        columns: Sequence[str] | None = None,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        last: str = "even",
        filter: Any = None,
        fill_null: Any | Mapping[str, Any] = None,
        decode: Sequence[str] | Mapping[str, str | Callable[[bytes], Any] | None] | None = None,
        pad: Mapping[str, Any] | None = None,
        transform: Callable[[dict[str, npt.NDArray[Any]]], Any] | None = None,
        workers: int = 0,
        on_error: str = "raise",
        streams: int | None = None,
        shuffle_bytes: int = 128 * _MIB,
        prefetch_bytes: int = 32 * _MIB,
        filesystem: Any = None,
        read_attempts: int = 4,
        read_timeout_s: float = TIMEOUT_S,
        cache: str | os.PathLike[str] | None = None,
        cache_bytes: int | None = None,
        placement: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        require_pyarrow(f"polyhvd.data.{type(self).__name__}")
        self._shuffle_bytes = at_least(1, "shuffle_bytes", shuffle_bytes)
        self._prefetch_bytes = at_least(0, "prefetch_bytes", prefetch_bytes)
        self._workers_count = at_least(0, "workers", workers)
        if transform is not None and not callable(transform):
            raise ValueError(f"transform is {transform!r}; expected a function of a dict of arrays")
        if on_error not in ("raise", "skip"):
            raise ValueError(f"on_error is {on_error!r}; expected 'raise' or 'skip'")
        if not 0 < read_timeout_s < float("inf"):
            raise ValueError(f"read_timeout_s is {read_timeout_s!r}; expected a number of seconds above 0")
        self._stopped_s = read_timeout_s
        self._files = ParquetFiles(
            source,
            columns=columns,
            filter=filter,
            fill_null=fill_null,
            decode=decode,
            pad=pad,
            skips=Skips() if on_error == "skip" else None,
            format=self._format if format is None else format,
            filesystem=filesystem,
            read_attempts=at_least(1, "read_attempts", read_attempts),
            read_timeout_s=read_timeout_s,
            cache=cache_of(cache, cache_bytes),
        )
        sizes = np.asarray([group.rows for group in self._files.groups], np.int64)
        self._row_bytes = self._files.row_bytes() + 8  # and the number of the row
        largest = int(sizes.max(initial=1))
        if streams is None:
            suitable = self._suitable_streams(len(sizes), largest)
            streams = suitable if shuffle else _streams_in_order(placement, int(sizes.sum()), suitable)
        if shuffle:
            by_memory = int(self._shuffle_bytes / (at_least(1, "streams", streams) * self._row_bytes))
            by_groups = max(1, _GROUPS_MIXED_MAX // streams) * int(sizes.mean() if len(sizes) else 1)
            window = min(by_memory, by_groups)
        else:
            window = largest  # rows come as they are stored, so that one row group after the other will do
        super().__init__(
            Order(
                sizes,
                seed=seed,
                streams=streams,
                window=max(1, window),
                shuffle=shuffle,
                files=self._files.names,
            ),
            batch_size,
            global_batch_size=global_batch_size,
            last=last,
            placement=placement,
        )
        self._finishing = Finishing(self._files, transform, self._row_bytes)
        self._stand_in = StandIn(self._files, self._finishing)
        self._workers: Workers | None = None
        self._ahead: tuple[_Expected, Ahead] | None = None
        if placement is None:
            self._agreement = Agreement(type(self).__name__, self._described)

    def _described(self) -> dict[str, dict[str, str]]:
        """The files and columns, and what all loaders have."""
        return {
            "column": {
                field.name: f"{described(field)}{', decoded' * (column.decoder is not None)}"
                for field, column in zip(self.schema, self._files.columns, strict=True)
            },
            "expression": {"filter": self._files.filter_text},
            "file": self._files.described(),
            **super()._described(),
        }

    @property
    def schema(self) -> Any:
        """The selected columns, as a ``pyarrow.Schema``."""
        return self._files.schema

    @property
    def groups_read(self) -> int:
        """How many row groups this process has read."""
        return self._files.groups_read

    def describe(self) -> str:
        """Describe in text which rows the loader reads and how well it shuffles. Reads nothing.

        Warnings say how files should be written where row groups are too large, or too few for the ranks of
        the current world.

        Example::

            print(loader.describe())
        """
        order, groups, files = self._order, self._files.groups, self._files
        stored = sum(group.stored_bytes for group in groups)
        names = ", ".join(f"{c.name} {c.dtype}{list(c.shape) or ''}" for c in files.columns)
        lines = [
            f"{order.total:,} rows in {len(groups):,} {files.format.groups} of {len(files.files):,} files, "
            f"{stored / _MIB:,.1f} MiB before compression",
            f"columns: {names}; about {self._row_bytes:,.0f} bytes a row",
        ]
        if links := files.links:
            count = f"{len(links):,} linked path{'s' * (len(links) > 1)}"
            lines.append(f"left out: {count} of files that the source contains anyway, such as {links[0]}")
        if groups:
            if order.shuffle:
                lines += self._describe_shuffling()
            lines += self._describe_reads()
        return "\n".join(lines)

    def _describe_shuffling(self) -> Iterator[str]:
        order, groups = self._order, self._files.groups
        window = min(order.window or order.total, order.length(0))
        mixed = min(len(groups), order.streams * max(1, window * len(groups) // order.total))
        yield (
            f"shuffling: {order.streams} streams, each mixed within {window:,} rows: at any time rows of "
            f"about {mixed:,} of the {len(groups):,} row groups"
        )
        held = order.streams * max(group.rows for group in groups) * self._row_bytes
        if held > 2 * self._shuffle_bytes:
            wanted = max(1, int(self._shuffle_bytes / (order.streams * self._row_bytes)))
            yield (
                f"warning: row groups are large: one rank holds up to {held / _MIB:,.0f} MiB of them to "
                f"shuffle rows; write files with at most {wanted:,} rows per group "
                "(write_parquet(rows_per_group=...))"
            )

    def _describe_reads(self) -> Iterator[str]:
        order = self._order
        try:
            size = self._place().size
        except NotInitializedError:
            return
        groups = len(self._files.groups)
        readers = float(order.readers(max(size, self._rows(Place(0, size))), size).mean())
        times = readers * (1 + (order.streams - 1) / groups)
        if size <= order.streams and times <= 2:
            yield f"reading: {size} rank{'s' * (size > 1)} read a row group {times:.1f} times in an epoch"
            return
        if size <= order.streams:
            cause = f"steps of few rows are not spread evenly over {size} ranks"
            cure = (
                "use batches of at least 10 rows for each rank, or a number of ranks that is a power of two"
            )
        elif order.shuffle and groups < _GROUPS_OF_STREAM * size:
            rows = max(1, order.total // (_GROUPS_OF_STREAM * size))
            cure = f"write files with at most {rows:,} rows per group (write_parquet(rows_per_group=...))"
        else:
            streams = 1 << (size - 1).bit_length()
            cure = f"pass streams={streams}"
            cure += "" if order.shuffle else ", which interleaves rows of as many parts of the data"
        if size > order.streams:
            cause = f"{size} ranks share {order.streams} stream{'s' * (order.streams > 1)}"
        yield f"warning: {cause}: a row group is read about {times:.1f} times in an epoch; {cure}"

    def __iter__(self) -> Iterator[Batch]:
        """The batches of the steps that are left in this epoch."""
        self._end()
        return super().__iter__()

    def _suitable_streams(self, groups: int, largest: int) -> int:
        """A power of two, the same for any number of ranks."""
        by_reads = max(groups // _GROUPS_OF_STREAM, min(_STREAMS_OF_FEW_GROUPS, groups // 2))
        by_memory = max(_STREAMS_OF_LARGE_GROUPS, int(self._shuffle_bytes / (largest * self._row_bytes)))
        most = max(1, min(_STREAMS_MAX, by_reads, by_memory))
        return 1 << (most.bit_length() - 1)

    def _load(self, step: Step, place: Place) -> Batch:
        expected = _Expected(self._order, self._epoch, step.cursor, place)
        if self._ahead is None or self._ahead[0] != expected or not self._ahead[1].is_usable:
            self._end(wait=True)  # or two threads would call ``transform`` at the same time
            if self._workers_count and (self._workers is None or not self._workers.is_usable):
                self._workers = Workers(self._workers_count, self._finishing, self._stopped_s)
            self._stand_in = StandIn(self._files, self._finishing)
            shard = _Shard(self._files, self._order, self._epoch, self._row_bytes, self._prefetch_bytes)
            rows = self._rows(place)
            self._ahead = (
                expected,
                Ahead(
                    shard.steps(step.cursor, rows, place, self._last),
                    self._finishing,
                    self._workers,
                    bytes_max=self._prefetch_bytes,
                    epoch=self._epoch,
                    number=step.cursor // rows,
                    label=type(self).__name__ if self._agreement is None else self._agreement.label,
                    reading=self._files.being_read,
                ),
            )
        ahead = self._ahead[1]
        made = ahead.next()
        self._ahead = (expected._replace(cursor=step.after), ahead)
        if self._files.skips is not None:
            for file, reason in made.left_out:
                self._files.skips.report(file, reason)
            if made.loaded is None:
                made = self._stand_in.made()
        return Batch(made.loaded, made.indices, made.weight)

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy, which starts another thread and other processes to read ahead."""
        return {**super().__getstate__(), "_ahead": None, "_workers": None}

    def _template(self) -> Batch:
        columns = self._files.columns
        if not self._finishing.is_trivial:
            return super()._template()
        arrays = {
            column.name: column.padded(np.empty((0, *column.shape), column.dtype)) for column in columns
        }
        return Batch(arrays, np.empty(0, np.int64), 1.0)

    def _end(self, *, wait: bool = False) -> None:
        """Release what an iteration has needed; ``wait``: until its thread has ended."""
        if self._ahead is None:
            return
        ahead = self._ahead[1]
        has_ended = ahead.close() if ahead.is_usable else ahead.ends_within(0.0)  # it was waited for before
        if not has_ended and self._workers is not None:
            self._workers.close()  # the thread waits for them
            has_ended = ahead.ends_within(_LAST_TASK_S)
        if has_ended or (wait and ahead.ends_within(None)):
            self._ahead = None


class ParquetLoader(FileLoader):
    """The :class:`FileLoader` of Parquet files.

    Args:
        source: the folders' files end in .parquet, .parq or .pq.

            ``format``, ``columns``, ``batch_size``, ``global_batch_size``, ``shuffle``, ``seed``, ``last``,
            ``filter``, ``fill_null``, ``decode``, ``pad``, ``transform``, ``workers``, ``on_error``,
            ``streams``, ``shuffle_bytes``, ``prefetch_bytes``, ``filesystem``, ``read_attempts``,
            ``read_timeout_s``, ``cache``, ``cache_bytes`` and ``placement`` are those of
            :class:`FileLoader`, where ``format`` is "parquet" if it is None.

    Raises:
        ModuleNotFoundError, ValueError, DataError: as :class:`FileLoader` does.

    Example::

        loader = ParquetLoader("train/", columns=["image", "label"], batch_size=64, seed=1)
        for epoch in range(10):
            loader.set_epoch(epoch)
            for batch in loader:
                train(batch["image"], batch["label"], weight=batch.weight)
    """

    _format = "parquet"


def _streams_in_order(placement: Callable[[], tuple[int, int]] | None, rows: int, suitable: int) -> int:
    """Return the number of ranks; in an elastic job, whose ranks change, a number that suits any of them."""
    world = current.find()
    if placement is None and world is not None and world.member is not None:
        return suitable
    try:
        size = Place(*(placement or current_place)()).size
    except NotInitializedError:  # the loader is made before init()
        return 1
    return max(1, min(size, rows))


class _Expected(NamedTuple):
    """The step whose batch is the next that the thread hands over."""

    order: Order
    epoch: int
    cursor: int
    place: Place


#: An array for each column, and the numbers of the rows.
_Arrays = list[npt.NDArray[Any]]


class _Opened(NamedTuple):
    """A window that is loaded when a stream's rows come to it, in place of the stream's former one."""

    stream: int
    sections: list[Section]
    places: Indices | None


class _Taken(NamedTuple):
    """Rows of a step, as streams and rows of their windows."""

    pieces: list[tuple[int, slice]]
    weight: float | None  # of the step, which ends with these rows; None: more follow


class _Shard:
    """The rows that a rank reads in an epoch: of each of its streams the window that is being used.

    Steps are planned before their rows are read, so that row groups of later steps are read at the same time.
    It belongs to one thread, which starts others to read.

    Args:
        files: with the row groups.
        order: of their rows.
        epoch: its number.
        row_bytes: of a row in memory.
        ahead_bytes: of row groups that are read before they are needed.
    """

    def __init__(
        self, files: ParquetFiles, order: Order, epoch: int, row_bytes: float, ahead_bytes: int
    ) -> None:
        self._files = files
        self._order = order
        self._epoch = epoch
        self._row_bytes = row_bytes
        self._ahead_bytes = ahead_bytes
        sizes = np.asarray([group.rows for group in files.groups], np.int64)
        self._offsets = np.cumsum(sizes) - sizes
        self._windows: dict[int, _Arrays] = {}
        #: Of each stream the last row group of its window, if more of its rows follow: its number, the number
        #: of the first row that is kept, and the rows.
        self._kept: dict[int, tuple[int, int, _Arrays]] = {}
        self._planned: deque[_Opened | _Taken] = deque()

    def steps(
        self, cursor: int, rows: int, place: Place, last: str
    ) -> Generator[tuple[_Arrays, float], None, None]:
        """The arrays and the weight of a rank's rows in each step from a position on."""
        is_remote = any(file.storage.is_remote for file in self._files.files)
        pieces: list[_Arrays] = []
        with ReadAhead(
            self._groups(self._plan(cursor, rows, place, last)),
            size=lambda group: int(self._files.groups[group].rows * self._row_bytes),
            read=self._read,
            bytes_max=self._ahead_bytes,
            threads=_READERS_REMOTE if is_remote else _READERS_LOCAL,
        ) as ahead:
            while True:
                if not self._planned:
                    ahead.begin()
                    if not self._planned:
                        return
                planned = self._planned.popleft()
                if isinstance(planned, _Opened):
                    self._windows.pop(planned.stream, None)  # its memory is free while the next one is read
                    self._windows[planned.stream] = self._mixed(planned, ahead)
                    continue
                for stream, taken in planned.pieces:
                    own = [array[taken] for array in self._windows[stream]]
                    if planned.weight is None:  # or the views would keep all windows that this step replaces
                        own = [array.copy() for array in own]
                    pieces.append(own)
                if planned.weight is not None:
                    yield [np.concatenate(parts) for parts in zip(*pieces, strict=True)], planned.weight
                    pieces = []

    def _plan(self, cursor: int, rows: int, place: Place, last: str) -> Iterator[_Opened | _Taken]:
        """Which windows are loaded and which of their rows are taken, in order."""
        bounds: dict[int, tuple[int, int]] = {}
        while (step := self._order.step(cursor, rows, place.size, last)) is not None:
            runs, weight = self._order.dealt(step, place.rank)
            pieces: list[tuple[int, slice]] = []
            for stream, first, length in runs:
                while length:
                    begin, end = bounds.get(stream, (0, 0))
                    if not begin <= first < end:
                        if pieces and pieces[-1][0] == stream:  # it is in the window that is replaced
                            yield _Taken(pieces, None)
                            pieces = []
                        begin, end, sections, places = self._order.window_at(self._epoch, stream, first)
                        bounds[stream] = (begin, end)
                        yield _Opened(stream, sections, places)
                    taken = min(length, end - first)
                    pieces.append((stream, slice(first - begin, first - begin + taken)))
                    first, length = first + taken, length - taken
            yield _Taken(pieces, weight)
            cursor = step.after

    def _groups(self, plan: Iterator[_Opened | _Taken]) -> Iterator[int | None]:
        """The row groups to read, in order, of what is put in line; None: the line is long enough."""
        kept: dict[int, int] = {}
        for planned in plan:
            while len(self._planned) >= _PLANNED_MAX:
                yield None
            self._planned.append(planned)
            if isinstance(planned, _Opened):
                known = kept.pop(planned.stream, None)
                group, first, rows = planned.sections[-1]
                if first + rows < self._files.groups[group].rows:
                    kept[planned.stream] = group
                for number, section in enumerate(planned.sections):
                    if number or section.group != known:
                        yield section.group

    def _mixed(self, opened: _Opened, ahead: ReadAhead[_Arrays]) -> _Arrays:
        """The rows of sections, each in its place."""
        stream, sections, places = opened
        total = sum(section.rows for section in sections)
        known = self._kept.pop(stream, None)
        mixed: _Arrays = []
        done = 0
        for group, first, rows in sections:
            if known is not None and known[0] == group:
                _, base, arrays = known
            else:
                base, arrays = 0, ahead.next()
            known = None
            begin, end = first - base, first - base + rows
            if done + rows == total and end < len(arrays[-1]):
                rest = [array[end:] for array in arrays]
                if places is not None:  # the rows before them are in the window
                    rest = [array.copy() for array in rest]
                self._kept[stream] = (group, first + rows, rest)
            own = [array[begin:end] for array in arrays]
            if places is None and rows == total:
                return own
            if not mixed:
                mixed = [np.empty((total, *array.shape[1:]), array.dtype) for array in own]
            target = slice(done, done + rows) if places is None else places[done : done + rows]
            for whole, part in zip(mixed, own, strict=True):
                whole[target] = part
            done += rows
        return mixed

    def _read(self, number: int) -> _Arrays:
        group = self._files.groups[number]
        first = int(self._offsets[number])
        rows = np.arange(first, first + group.rows)
        arrays, is_good = self._files.read_good(group)
        return [*arrays, np.where(is_good, rows, ~rows)]
