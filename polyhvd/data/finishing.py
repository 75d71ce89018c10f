"""From rows as files have them to a batch as the program gets it: images are decoded, lists are padded, and
rows that cannot be read are left out or an error."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import numpy.typing as npt

from polyhvd.data.columns import Column
from polyhvd.data.files import Group, ParquetFiles
from polyhvd.data.images import ImageError
from polyhvd.data.order import Indices
from polyhvd.errors import DataError

__all__ = ["Finishing"]

#: An array of rows for each column.
_Arrays = list[npt.NDArray[Any]]


class Finishing:
    """Finishes batches. It is done batch by batch, since what is finished takes more memory.

    Args:
        files: that the rows are from.
    """

    def __init__(self, files: ParquetFiles) -> None:
        self._files = files
        self._ends = np.cumsum([group.rows for group in files.groups])
        self._spare: tuple[_Arrays, Indices] | None = None  # a single row, decoded

    def finish(self, arrays: _Arrays, indices: Indices, weight: float) -> tuple[_Arrays, Indices, float]:
        """The arrays, indices and weight of a batch.

        Rows that are left out keep their place in the step with weight 0: the weight is multiplied with the
        part of the rows that is left. If there is none, the batch has another row and weight 0.

        Args:
            arrays: of rows, one for each column.
            indices: the numbers of the rows; of those that could not be read their complements.
            weight: of the batch.

        Raises:
            DataError: a row cannot be decoded; the error names file, row group, row and column.
            Exception: what a function of ``decode=`` has raised.
        """
        decoded, is_good = self._decoded(arrays, indices)
        if not is_good.all():
            weight *= float(is_good.mean())
            decoded, indices = [rows[is_good] for rows in decoded], indices[is_good]
        if len(indices) == 0:
            decoded, indices = deepcopy(self._stand_in())  # the program may change it, and gets it again
        elif self._spare is None and self._files.skips is not None:
            self._spare = deepcopy(([rows[:1] for rows in decoded], indices[:1]))
        columns = zip(self._files.columns, decoded, strict=True)
        return [self._joined(column, rows, indices) for column, rows in columns], indices, weight

    def _decoded(self, arrays: _Arrays, indices: Indices) -> tuple[_Arrays, npt.NDArray[np.bool_]]:
        """Rows that are decoded but in no common array, and which of them are good."""
        is_good = indices >= 0
        decoded = list(arrays)
        for number, column in enumerate(self._files.columns):
            if column.decoder is None:
                continue
            decoded[number] = np.empty(len(indices), object)
            for place in np.flatnonzero(is_good):
                index = int(indices[place])
                try:
                    decoded[number][place] = self._row(column, arrays[number][place], index)
                except Exception as error:
                    if self._files.skips is None:
                        raise
                    reason = (
                        error if isinstance(error, DataError) else f"{self._where(column, index)}: {error!r}"
                    )
                    self._files.skips.report(str(self._files.files[self._place(index)[0].file]), reason)
                    is_good[place] = False
        return decoded, is_good

    def _row(self, column: Column, data: Any, index: int) -> npt.NDArray[Any]:
        assert column.decoder is not None
        try:
            return np.asarray(column.decoder(data))
        except ImageError as error:
            raise DataError(f"{self._where(column, index)} cannot be decoded: {error}") from error
        except Exception as error:
            if hasattr(error, "add_note"):  # from Python 3.11 on
                error.add_note(self._where(column, index))
            raise

    def _stand_in(self) -> tuple[_Arrays, Indices]:
        """A row that can be read, for a batch that has none."""
        first = 0
        for group in self._files.groups if self._spare is None else ():
            arrays, is_good = self._files.read_good(group)
            for row in np.flatnonzero(is_good):
                indices = np.asarray([first + row], np.int64)
                decoded, is_decoded = self._decoded([array[row : row + 1] for array in arrays], indices)
                if is_decoded.all():
                    self._spare = decoded, indices
                    return self._spare
            first += group.rows
        if self._spare is None:
            raise DataError(
                f"none of the {first} rows of {self._files.files[0]} and {len(self._files.files) - 1} other "
                "files can be read; the warnings have the reasons"
            )
        return self._spare

    def _joined(self, column: Column, rows: npt.NDArray[Any], indices: Indices) -> npt.NDArray[Any]:
        return column.padded(rows) if column.decoder is None else self._stacked(column, list(rows), indices)

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

    def _place(self, index: int) -> tuple[Group, int]:
        """The row group that has a row, and the row's number in it."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        group = self._files.groups[number]
        return group, index - int(self._ends[number]) + group.rows

    def _where(self, column: Column, index: int) -> str:
        group, row = self._place(index)
        selected = " of those that filter= selects" if self._files.is_filtered else ""
        return (
            f"{self._files.files[group.file]}: row group {group.number}, row {row}{selected}, "
            f"column {column.name!r}"
        )
