"""Files as a list of groups of rows, each of which can be read on its own."""

from __future__ import annotations

import hashlib
import os
import re
import threading
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from polyhvd.data import petastorm
from polyhvd.data.cache import Cache, token
from polyhvd.data.columns import Column, NullsError, columns_of, described
from polyhvd.data.counting import count
from polyhvd.data.formats import SUFFIXES, Footer, ParquetFormat, TextFormat, format_by_suffix, format_of
from polyhvd.data.skips import Skips
from polyhvd.data.storage import (
    TIMEOUT_S,
    Source,
    StoredFile,
    Text,
    in_threads,
    is_passing,
    is_unanswered,
    listed,
)
from polyhvd.errors import DataError

__all__ = ["Group", "ParquetFiles"]

#: Held while row groups are counted, which several threads read.
_counting = threading.Lock()
_OBJECT_BYTES = 64  # of a short string in an array of objects, besides its characters

#: Values of partitions that are numbers.
_INTEGER = re.compile(r"-?[0-9]{1,18}")


class Group(NamedTuple):
    """A row group that has rows.

    Args:
        file: the number of its file.
        number: its number in the file.
        rows: how many of its rows are selected.
        stored_bytes: of all its columns, before compression.
    """

    file: int
    number: int
    rows: int
    stored_bytes: int


class ParquetFiles:
    """The row groups of files, and their selected columns.

    Footers are read at once, and kept. Files of other formats have them too: see :class:`Footer`.

    Args:
        source: as of :class:`polyhvd.data.ParquetLoader`.
        columns: their names; None: all.
        filter: a ``pyarrow.dataset.Expression``; None: all rows.
        fill_null, decode, pad: how columns become arrays, likewise.
        skips: of what is left out since it cannot be read; None: that is an error.
        format: of :func:`polyhvd.data.formats.format_of`; None: by the names of the files.
        filesystem: of pyarrow.fs or fsspec; None: that of the source.
        read_attempts: how often a read is tried on a remote file system.
        read_timeout_s: how long it may take there, with all attempts.
        cache: of row groups that were read; None: there is none.

    Raises:
        ValueError: an argument cannot be used.
        DataError: a file cannot be read, or has other columns than the first one.
    """

    def __init__(
        self,
        source: Source,
        *,
        columns: Sequence[str] | None = None,
        filter: Any = None,
        fill_null: Any = None,
        decode: Any = None,
        pad: Mapping[str, Any] | None = None,
        skips: Skips | None = None,
        format: Any = "parquet",
        filesystem: Any = None,
        read_attempts: int = 1,
        read_timeout_s: float = TIMEOUT_S,
        cache: Cache | None = None,
    ) -> None:
        import pyarrow.dataset

        if filter is not None and not isinstance(filter, pyarrow.dataset.Expression):
            raise ValueError(
                f"filter is {filter!r}; expected an expression such as pyarrow.compute.field('x') > 0"
            )
        named = None if format is None else format_of(format)
        suffixes = SUFFIXES if named is None else named.suffixes
        #: Paths that are left out, since they lead to files that have other paths in the source.
        found, self.links = listed(source, suffixes, filesystem, read_attempts, read_timeout_s)
        self.format = named or format_by_suffix([file for file, _ in found])
        self.skips = skips
        self._filter = filter
        self._cache = cache
        read = in_threads(self._footer_of, [file for file, _ in found])
        found = [item for item, footer in zip(found, read, strict=True) if footer is not None]
        if not found:
            raise DataError(f"none of the {len(read)} files can be read; the warnings have the reasons")
        self.files = [file for file, _ in found]
        footers = [footer for footer in read if footer is not None]
        self._footers = [footer for footer, _ in footers]
        if isinstance(self.format, TextFormat):
            self.format.join(self.files, self._footers)
        self._states = [state for _, state in footers]
        #: By names of columns, the value for each file that a folder ``name=value`` gives.
        self._partitions = self._partitions_of([values for _, values in found])
        #: Of the selected columns.
        self.schema = self._selected(columns)
        self.columns = columns_of(self.schema, fill_null, decode, pad)
        if isinstance(self.format, ParquetFormat):
            self._decode_as_petastorm_has_encoded(len(found[0][1]))
        #: In keys of the cache, what else decides which rows a group has.
        self._reading = token((type(self.format), vars(self.format), filter))
        #: Row groups that this process has read.
        self.groups_read = 0
        self._being_read: list[Group] = []
        groups = in_threads(self._groups_of, range(len(self.files)))
        self.groups: list[Group] = [group for those in groups for group in those]

    @property
    def is_filtered(self) -> bool:
        """Whether rows are left out."""
        return self._filter is not None

    @property
    def names(self) -> list[str]:
        """The paths below the folder that all files have in common, wherever that is."""
        paths = [file.absolute for file in self.files]
        folder = os.path.commonpath(map(os.path.dirname, paths))
        return [os.path.relpath(path, folder) for path in paths]

    def described(self) -> dict[str, str]:
        """Return for each file name a text about its rows and row groups, which differs if these do."""
        sizes: list[list[tuple[int, ...]]] = [[] for _ in self.files]
        for group in self.groups:
            sizes[group.file].append(group[1:])
        checksums = in_threads(self._checksum, range(len(self.files)))
        texts = {}
        for name, those, content in zip(self.names, sizes, checksums, strict=True):
            checksum = zlib.crc32(repr(those).encode(), content)
            rows, stored = (sum(size[place] for size in those) for place in (1, 2))
            parts = f"{len(those)} {self.format.groups}"
            texts[name] = f"{rows} rows in {parts} of {stored} bytes (checksum {checksum:08x})"
        return texts

    def _checksum(self, number: int) -> int:
        file = self.files[number]
        return self.format.checksum(file.storage, file.path, self._footers[number])

    @property
    def filter_text(self) -> str:
        """The expression by which rows are selected."""
        return str(self._filter)

    def read(self, group: Group) -> list[npt.NDArray[Any]]:
        """The selected rows of a row group: an array for each column.

        Several threads may call it.

        Raises:
            DataError: they cannot be read; the error names file, row group and column.
        """
        with _counting:
            self.groups_read += 1
            self._being_read.append(group)
        try:
            table = self._read_columns(group, self.schema.names)
        finally:
            with _counting:
                self._being_read.remove(group)
        count(data_groups=1, data_bytes=table.nbytes)
        return [self._decoded(group, column, table) for column in self.columns]

    def being_read(self) -> list[str]:
        """The row groups that threads are reading, as errors name them."""
        with _counting:
            groups = list(self._being_read)
        return [f"{self.files[group.file]}: row group {group.number}" for group in groups]

    def read_good(self, group: Group) -> tuple[list[npt.NDArray[Any]], npt.NDArray[np.bool_]]:
        """:meth:`read`, and which of the rows can be used: all, unless others are to be left out."""
        import pyarrow as pa

        try:
            return self.read(group), np.ones(group.rows, bool)
        except DataError as error:
            if self.skips is None or is_unanswered(error):
                raise
            self.skips.report(str(self.files[group.file]), error)
        arrays = [np.zeros((group.rows, *column.shape), column.dtype) for column in self.columns]
        is_good = np.zeros(group.rows, bool)
        try:
            table = self._read_columns(group, self.schema.names)
        except DataError as error:
            if is_unanswered(error):
                raise
            return arrays, is_good
        for row in range(group.rows):
            rows = table.slice(row, 1)
            with suppress(NullsError, UnicodeDecodeError, pa.ArrowException):
                decoded = [column.decode(rows.column(column.name)) for column in self.columns]
                for array, (value,) in zip(arrays, decoded, strict=True):
                    array[row] = value
                is_good[row] = True
        return arrays, is_good

    def row_bytes(self) -> float:
        """Bytes of a row in memory; on average, where columns have rows of different sizes."""
        known = [column.row_bytes for column in self.columns]
        fixed = sum(filter(None, known))
        varying = {
            column.name: column.value_bytes
            for column, size in zip(self.columns, known, strict=True)
            if size is None
        }
        rows = sum(rows for footer in self._footers for rows, _ in footer.groups)
        if not varying or not rows:
            return float(fixed)
        stored = sum(footer.column_bytes(varying) for footer in self._footers)
        return float(fixed + stored / rows + _OBJECT_BYTES * len(varying))

    def _footer_of(self, file: StoredFile) -> tuple[Footer, Any] | None:
        """Footer and state of a file; None: it is left out."""
        try:
            return self._read_footer(file)
        except DataError as error:
            if self.skips is None or is_unanswered(error):
                raise
            self.skips.report(str(file), error)
            count(data_files_skipped=1)
            return None

    def _decode_as_petastorm_has_encoded(self, depth: int) -> None:
        """Have columns of bytes for which there is no ``decode`` decoded, if Petastorm has written them."""
        if bare := {column.name: column for column in self.columns if column.is_bytes and not column.decoder}:
            for name, decoder in petastorm.decoders_of(self.files[0], depth, list(bare)).items():
                bare[name].decode_with(decoder)

    def _partitions_of(self, folders: list[dict[str, str | None]]) -> dict[str, Any]:
        """Arrow arrays of the values of all files. A column of this name in the files has precedence."""
        import pyarrow as pa

        for path, values in zip(self.files, folders, strict=True):
            if values.keys() != folders[0].keys():
                raise DataError(
                    f"{path} has the partitions {sorted(values)}, but {self.files[0]} has "
                    f"{sorted(folders[0])}; all files need the same folders name=value"
                )
        stored = self._footers[0].schema.names
        partitions = {}
        for name in folders[0]:
            array = pa.array([values[name] for values in folders], pa.string())
            given = array.drop_null().to_pylist()
            is_text = any(isinstance(values[name], Text) for values in folders)
            is_integer = bool(given) and not is_text and all(map(_INTEGER.fullmatch, given))
            partitions[name] = array.cast(pa.int64()) if is_integer else array
        return {name: values for name, values in partitions.items() if name not in stored}

    def _selected(self, names: Sequence[str] | None) -> Any:
        """The schema of the selected columns, which must be the same in all files."""
        import pyarrow as pa

        first = self._footers[0].schema
        for name, values in self._partitions.items():
            first = first.append(pa.field(name, values.type))
        if names is None:
            names = first.names
            if not names:
                raise DataError(f"{self.files[0]} has no columns; remove it, or do not name it as a source")
            self._require_no_more_than(set(names))
        if not isinstance(names, str):
            names = list(names)
        if isinstance(names, str) or not names:
            raise ValueError(f"columns is {names!r}; expected a list of names, or None for all columns")
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise ValueError(f"columns has {twice[0]!r} more than once")
        for path, footer in zip(self.files, self._footers, strict=True):
            schema = footer.schema
            for name in names:
                if name in self._partitions:
                    continue
                if schema.get_field_index(name) < 0:
                    raise DataError(
                        f"{path} has no single column {name!r}; its columns are {', '.join(schema.names)}"
                    )
                field, wanted = schema.field(name), first.field(name)
                if not (field.equals(wanted, check_metadata=True) or _have_one_form(wanted, field)):
                    raise DataError(
                        f"{path}: column {name!r} has the type {described(field)}, but "
                        f"{described(wanted)} in {self.files[0]}; all files need the same types"
                    )
        return pa.schema([first.field(name) for name in names])

    def _require_no_more_than(self, names: set[str]) -> None:
        """Raise DataError if a file has a column that the first one, which has these, does not have."""
        for path, footer in zip(self.files, self._footers, strict=True):
            if more := [name for name in footer.schema.names if name not in names]:
                raise DataError(
                    f"{path} has the column {more[0]!r}, which {self.files[0]} does not have; name the "
                    "columns to load with columns="
                )

    def _groups_of(self, file: int) -> list[Group]:
        groups = []
        for number, (rows, stored) in enumerate(self._footers[file].groups):
            if self._filter is not None and rows:
                rows = self._count(file, number)
            if rows:
                groups.append(Group(file, number, rows, stored))
        return groups

    def _count(self, file: int, number: int) -> int:
        """The rows of a row group that the filter selects. Where statistics decide, nothing is read."""
        import pyarrow as pa

        def read() -> int:
            scanner = self._scanner(file, number, [])
            rows: int = scanner.count_rows()
            if rows == self._footers[file].groups[number][0] and self._has_filter_of_floats:
                rows = scanner.to_table().num_rows  # statistics leave out NaN, for which it may be false
            return rows

        try:
            rows: int = self.files[file].call(read)
        except (OSError, pa.ArrowException) as error:
            text = f"{self.files[file]}: row group {number}: filter={self._filter}: {error}"
            if self.skips is None or is_unanswered(error):
                raise DataError(text) from error
            self.skips.report(str(self.files[file]), text)
            return 0
        return rows

    @cached_property
    def _has_filter_of_floats(self) -> bool:
        """Whether the filter needs columns of floating point numbers, or such that may contain them."""
        import pyarrow as pa
        from pyarrow import dataset, types

        fields = [*self._footers[0].schema, *(pa.field(k, v.type) for k, v in self._partitions.items())]
        others = [f for f in fields if not (types.is_floating(f.type) or types.is_nested(f.type))]
        try:
            dataset.dataset(pa.schema(others).empty_table()).scanner(filter=self._filter)
        except pa.ArrowInvalid:  # it names another column
            return True
        return False

    def _scanner(self, file: int, number: int, names: list[str], int96_unit: str = "ns") -> Any:
        """Selects rows by the filter, which may also be one of partitions.

        Args:
            file, number: of the row group.
            names: of columns.
            int96_unit: of timestamps that are stored as INT96.
        """
        import pyarrow as pa
        import pyarrow.compute
        from pyarrow import dataset

        storage, path, _ = self.files[file]
        footer = self._footers[file]
        if not isinstance(self.format, ParquetFormat):
            table = self.format.read(storage, path, footer, number, footer.schema.names)
            for name, values in self._partitions.items():
                table = table.append_column(name, pa.repeat(values[file], table.num_rows))
            return dataset.dataset(table).scanner(columns=names, filter=self._filter)
        schema = footer.schema
        for place, field in enumerate(footer.schema):
            if field.name in footer.int96:
                schema = schema.set(place, field.with_type(_with_unit(field.type, int96_unit)))
        known = pyarrow.compute.scalar(True)
        for name, values in self._partitions.items():
            schema = schema.append(pa.field(name, values.type))
            partition = pyarrow.compute.field(name)
            known &= partition == values[file] if values[file].is_valid else partition.is_null()
        fragment = dataset.ParquetFileFormat(coerce_int96_timestamp_unit=int96_unit).make_fragment(
            path, storage.arrow, partition_expression=known, row_groups=[number]
        )
        return fragment.scanner(schema=schema, columns=names, filter=self._filter)

    def _read_columns(self, group: Group, names: list[str]) -> Any:
        import pyarrow as pa

        stored = [name for name in names if name not in self._partitions]
        file = self.files[group.file]

        def read() -> Any:
            key = self._key(group, stored)
            if self._cache is not None and (table := self._cache.get(key)) is not None:
                count(data_groups_cached=1)
                return table
            try:
                table = self._table(group, stored)
            except FileNotFoundError:
                raise
            except (OSError, pa.ArrowException):
                self._require_unchanged(group.file)
                raise
            self._require_unchanged(group.file)
            if table.num_rows != group.rows:
                raise _changed(file)
            if self._cache is not None and key == self._key(group, stored):
                self._cache.put(key, table)
            return table

        try:
            table = file.call(read)
        except (OSError, pa.ArrowException) as error:
            raise DataError(self._where(group, names, error)) from error
        for name in names:
            if name in self._partitions:
                table = table.append_column(name, pa.repeat(self._partitions[name][group.file], group.rows))
        return table

    def _key(self, group: Group, names: list[str]) -> str:
        """The key of columns of a row group in the cache.

        It has the file's version of now, so that a file that was replaced is read, and the state when the
        loader was made, so that this is then an error as it is without a cache.

        Raises:
            OSError: the file cannot be looked up.
        """
        if self._cache is None:
            return ""
        storage, path, _ = self.files[group.file]
        types = [str(self._footers[group.file].schema.field(name)) for name in names]
        file = (storage.identity, path, self._states[group.file], storage.version(path))
        content = repr((file, group[1:], names, types, self._reading))
        return hashlib.sha256(content.encode(errors="surrogateescape")).hexdigest()

    def _read_footer(self, file: StoredFile) -> tuple[Footer, Any]:
        """The footer of a file, and the file's state before it was read."""
        import pyarrow as pa

        storage, path, state = file

        def read() -> tuple[Footer, Any]:
            found = storage.state(path) if state is None else state
            return self.format.footer(storage, path, storage.size(found)), found

        try:
            return file.call(read)
        except FileNotFoundError as error:
            raise DataError(f"{file} does not exist") from error
        except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
            raise DataError(f"{file} cannot be read as {self.format.name}: {error}") from error

    def _require_unchanged(self, number: int) -> None:
        """Raise DataError if a file is another one now, and was not written again with the same content."""
        storage, path, _ = file = self.files[number]
        if storage.state(path) == self._states[number]:
            return
        try:
            footer, state = self._read_footer(StoredFile(storage, path))
        except DataError as error:
            footer, state = None, None
            if isinstance(error.__cause__, OSError) and is_passing(error.__cause__) and storage.is_remote:
                raise
        if footer is None or not footer.equals(self._footers[number]):
            raise _changed(file)
        self._states[number] = state

    def _table(self, group: Group, names: list[str]) -> Any:
        storage, path, _ = self.files[group.file]
        footer = self._footers[group.file]
        if self._filter is not None:
            table = self._scanner(group.file, group.number, names).to_table()
        else:
            table = self.format.read(storage, path, footer, group.number, names)
        if wide := [name for name in names if name in footer.int96]:
            self._require_nanoseconds(group, wide, table)
        return table

    def _require_nanoseconds(self, group: Group, names: list[str], table: Any) -> None:
        """Raise DataError for timestamps of INT96 beyond those of nanoseconds, which Arrow does not check."""
        import pyarrow as pa

        fits = False
        with suppress(pa.ArrowInvalid):
            exact = self._scanner(group.file, group.number, names, "us").to_table()
            for name in names:
                exact.column(name).cast(table.column(name).type)
            fits = exact.num_rows == table.num_rows  # the filter may need them, too
        if not fits:
            columns = ", ".join(map(repr, names))
            raise DataError(
                f"{self.files[group.file]}: row group {group.number}, column {columns} has timestamps before "
                "1677 or after 2262, stored as INT96, which pyarrow reads as other times; write them as "
                "TIMESTAMP_MICROS (spark.sql.parquet.outputTimestampType in Spark), or select other columns "
                "with columns="
            )

    def _where(self, group: Group, names: list[str], error: Exception) -> str:
        """The part that cannot be read, down to the column if it is a single one."""
        import pyarrow as pa

        file = self.files[group.file]
        is_passing_error = file.storage.is_remote and is_passing(error)
        if len(names) > 1 and not is_passing_error:
            for name in names:
                try:
                    self._table(group, [name])
                except (OSError, pa.ArrowException) as found:
                    return self._where(group, [name], found)
        columns = ", ".join(map(repr, names))
        what = f"{file}: row group {group.number}, column {columns} cannot be read: {error}"
        if is_passing_error:
            return f"{what}; the log has the attempts; if the storage was overloaded, raise read_attempts="
        return (
            f"{what}; the file is damaged, was changed or removed after the loader was made, may not be "
            "accessed, or has null lists of a fixed size, which Arrow cannot read"
        )

    def _decoded(self, group: Group, column: Column, table: Any) -> npt.NDArray[Any]:
        import pyarrow as pa

        try:
            return column.decode(table.column(column.name))
        except NullsError as error:
            raise DataError(
                f"{self.files[group.file]}: row group {group.number}, column {column.name!r} has {error}; "
                f"pass fill_null= with a value that replaces them, or filter= to leave these rows out"
            ) from None
        except (UnicodeDecodeError, pa.ArrowException) as error:
            raise DataError(
                f"{self.files[group.file]}: row group {group.number}, column {column.name!r} cannot be made "
                f"an array: {error}; strings have to be UTF-8"
            ) from error


def _have_one_form(first: Any, other: Any) -> bool:
    """Return whether rows of two fields become the same arrays; raises ValueError if the first cannot."""
    if first.equals(other) and described(first) == described(other):
        return True
    form = Column(first).form
    try:
        return Column(other).form == form
    except ValueError:
        return False


def _with_unit(type_: Any, unit: str) -> Any:
    """The type with another unit of its timestamps, which may be in lists."""
    import pyarrow as pa

    if pa.types.is_timestamp(type_):
        return pa.timestamp(unit, type_.tz)
    is_fixed, is_large = pa.types.is_fixed_size_list(type_), pa.types.is_large_list(type_)
    if not (is_fixed or is_large or pa.types.is_list(type_)):
        return type_
    value = type_.value_field.with_type(_with_unit(type_.value_type, unit))
    if is_fixed:
        return pa.list_(value, type_.list_size)
    return pa.large_list(value) if is_large else pa.list_(value)


def _changed(file: StoredFile) -> DataError:
    return DataError(
        f"{file} has changed since the loader was made; files must not change while they are read"
    )


def _forget_in_child() -> None:
    global _counting
    _counting = threading.Lock()


os.register_at_fork(after_in_child=_forget_in_child)
