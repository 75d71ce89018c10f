"""From rows as files have them to a batch as the program gets it: images are decoded, lists are padded, rows
that cannot be read are left out or an error, and the user's function transforms the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from polyhvd.data.columns import Column, require_unmasked
from polyhvd.data.files import ParquetFiles
from polyhvd.data.images import ImageError
from polyhvd.data.order import Indices
from polyhvd.errors import DataError

__all__ = ["Finishing", "Made", "StandIn"]

#: An array of rows for each column.
_Arrays = list[npt.NDArray[Any]]


class Made(NamedTuple):
    """A batch, before it is given to the program.

    Args:
        loaded: its arrays; None: no row could be read.
        indices: the numbers of the rows.
        weight: of the batch.
        bytes: of the arrays, as far as it is known.
        left_out: file and reason of each row that could not be decoded.
    """

    loaded: Any
    indices: Indices
    weight: float
    bytes: int
    left_out: list[tuple[str, str]]


class Finishing:
    """Makes batches of rows, one by one, since what is made takes more memory. Another process can have a
    copy.

    Args:
        files: that the rows are from.
        transform: of :class:`polyhvd.data.FileLoader`.
        row_bytes: of a row in memory, before it is decoded.
    """

    def __init__(
        self,
        files: ParquetFiles,
        transform: Callable[[dict[str, npt.NDArray[Any]]], Any] | None,
        row_bytes: float,
    ) -> None:
        self._columns = files.columns
        self._transform = transform
        self._row_bytes = row_bytes
        self._skips = files.skips is not None
        self._is_filtered = files.is_filtered
        self._files = [str(file) for file in files.files]
        self._ends = np.cumsum([group.rows for group in files.groups])
        self._groups = np.asarray([(group.file, group.number) for group in files.groups]).reshape(-1, 2)
        #: Whether a batch is being made, which may be by functions of the program.
        self.is_running = False

    @property
    def is_trivial(self) -> bool:
        """Whether batches have the rows as they are read."""
        return self._transform is None and not any(column.decoder for column in self._columns)

    def __call__(self, arrays: _Arrays, indices: Indices, weight: float) -> Made:
        """The batch of some rows.

        Rows that are left out keep their place in the step with weight 0: the weight is multiplied with the
        part of the rows that is left.

        Args:
            arrays: of rows, one for each column.
            indices: the numbers of the rows; of those that could not be read their complements.
            weight: of the batch.

        Raises:
            DataError: a row cannot be decoded; the error names file, row group, row and column.
            ValueError: ``transform`` has returned no arrays.
            Exception: what ``transform`` or a function of ``decode=`` has raised.
        """
        self.is_running = True
        try:
            return self._made(arrays, indices, weight)
        finally:
            self.is_running = False

    def _made(self, arrays: _Arrays, indices: Indices, weight: float) -> Made:
        left_out: list[tuple[str, str]] = []
        decoded, is_good = self._decoded(arrays, indices, left_out)
        if not is_good.all():
            weight *= float(is_good.mean())
            decoded, indices = [rows[is_good] for rows in decoded], indices[is_good]
            if len(indices) == 0:
                return Made(None, indices, weight, 0, left_out)
        columns = zip(self._columns, decoded, strict=True)
        finished = [self._joined(column, rows, indices) for column, rows in columns]
        size = max(int(len(indices) * self._row_bytes), sum(array.nbytes for array in finished))
        names = [column.name for column in self._columns]
        loaded: Any = dict(zip(names, finished, strict=True))
        if self._transform is not None:
            loaded = self._transform(loaded)
            if not hasattr(loaded, "__getitem__"):  # such as None or a generator, which could be read once
                raise ValueError(f"transform returned {loaded!r}; expected a mapping or a sequence of arrays")
            values = loaded.values() if isinstance(loaded, Mapping) else loaded
            size = max(size, sum(getattr(value, "nbytes", 0) for value in values))
        return Made(loaded, indices, weight, size, left_out)

    def can_decode(self, arrays: _Arrays, index: int) -> bool:
        """Return whether a single row can be decoded."""
        return bool(self._decoded(arrays, np.asarray([index], np.int64), [])[1].all())

    def _decoded(
        self, arrays: _Arrays, indices: Indices, left_out: list[tuple[str, str]]
    ) -> tuple[_Arrays, npt.NDArray[np.bool_]]:
        """Rows that are decoded, and which of them are good."""
        is_good = indices >= 0
        decoded = list(arrays)
        for number, column in enumerate(self._columns):
            if column.decoder is None:
                continue
            together = _Together(len(indices))
            for place in np.flatnonzero(is_good):
                index = int(indices[place])
                try:
                    row = self._row(column, arrays[number][place], index)
                except Exception as error:
                    if not self._skips:
                        raise
                    is_known = isinstance(error, DataError)
                    reason = str(error) if is_known else f"{self._where(column, index)}: {error!r}"
                    left_out.append((self._place(index)[0], reason))
                    is_good[place] = False
                else:
                    together.put(int(place), row)
            decoded[number] = together.rows
        return decoded, is_good

    def _row(self, column: Column, data: Any, index: int) -> npt.NDArray[Any]:
        assert column.decoder is not None
        try:
            row = column.decoder(data)
            require_unmasked("the result of decode=", row)
            return np.asarray(row)
        except ImageError as error:
            raise DataError(f"{self._where(column, index)} cannot be decoded: {error}") from error
        except Exception as error:
            if hasattr(error, "add_note"):  # from Python 3.11 on
                error.add_note(self._where(column, index))
            raise

    def _joined(self, column: Column, rows: npt.NDArray[Any], indices: Indices) -> npt.NDArray[Any]:
        if column.decoder is None:
            return column.padded(rows)
        return self._stacked(column, list(rows), indices) if rows.dtype.hasobject else rows

    def _stacked(self, column: Column, rows: list[Any], indices: Indices) -> npt.NDArray[Any]:
        parts = [np.asarray(row) for row in rows]
        first = parts[0]
        for part, index in zip(parts, indices, strict=True):
            if (part.shape, part.dtype) != (first.shape, first.dtype):
                raise DataError(
                    f"{self._where(column, int(index))} is decoded to {part.dtype}{list(part.shape)}, but "
                    f"another row of the batch to {first.dtype}{list(first.shape)}; all need the same: "
                    f'pass a mode such as decode={{{column.name!r}: "RGB"}}, or a function that resizes'
                )
        return np.stack(parts)

    def _place(self, index: int) -> tuple[str, int, int]:
        """The file of a row, the number of its row group, and the row's number in it."""
        place = int(np.searchsorted(self._ends, index, side="right"))
        first = int(self._ends[place - 1]) if place else 0
        file, number = self._groups[place].tolist()
        return self._files[file], number, index - first

    def _where(self, column: Column, index: int) -> str:
        file, number, row = self._place(index)
        selected = " of those that filter= selects" if self._is_filtered else ""
        return f"{file}: row group {number}, row {row}{selected}, column {column.name!r}"


class _Together:
    """Decoded rows of a batch, each copied into the batch's array at once: the next one takes its memory.

    Args:
        count: how many rows there are.
    """

    def __init__(self, count: int) -> None:
        #: The array of all rows; of objects until there is a row, or if rows have different shapes or dtypes.
        self.rows: npt.NDArray[Any] = np.empty(count, object)
        self._has_row = False

    def put(self, place: int, row: npt.NDArray[Any]) -> None:
        """Add a row."""
        if not self._has_row and not row.dtype.hasobject:
            self.rows = np.zeros((len(self.rows), *row.shape), row.dtype)
        self._has_row = True
        if not self.rows.dtype.hasobject and (row.shape, row.dtype) != (self.rows.shape[1:], self.rows.dtype):
            apart = np.empty(len(self.rows), object)
            for number, known in enumerate(self.rows):
                apart[number] = known
            self.rows = apart
        self.rows[place] = row


class StandIn:
    """The row of a batch that has none: the first one of the files that can be read. It has weight 0.

    Args:
        files: in which it is searched for when it is first needed.
        finishing: of their rows.
    """

    def __init__(self, files: ParquetFiles, finishing: Finishing) -> None:
        self._files = files
        self._finishing = finishing
        self._row: tuple[_Arrays, Indices] | None = None

    def made(self) -> Made:
        """The batch.

        Raises:
            DataError: no row can be read.
        """
        if self._row is None:
            self._row = self._found()
        return self._finishing(*deepcopy(self._row), 0.0)  # the program may change it, and gets it again

    def _found(self) -> tuple[_Arrays, Indices]:
        first = 0
        for group in self._files.groups:
            arrays, is_good = self._files.read_good(group)
            for row in np.flatnonzero(is_good):
                own = [array[row : row + 1] for array in arrays]
                if self._finishing.can_decode(own, first + int(row)):
                    return own, np.asarray([first + row], np.int64)
            first += group.rows
        raise DataError(
            f"none of the {first} rows of {self._files.files[0]} and {len(self._files.files) - 1} other "
            "files can be read; the warnings have the reasons"
        )
