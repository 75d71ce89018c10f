"""Formats of files: which groups of rows a file has, and how one of them is read.

The groups are Parquet's row groups, the record batches of Arrow's IPC files, and blocks of about 1 MiB of
text.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from polyhvd.data.storage import Storage, StoredFile
from polyhvd.errors import DataError

__all__ = ["SUFFIXES", "Footer", "Format", "ParquetFormat", "TextFormat", "format_by_suffix", "format_of"]

_BLOCK_BYTES = 1 << 20
#: Of a block: pyarrow takes the size of a block of text, which has to be larger, as an int32.
_BLOCK_MAX = (1 << 31) - 2
#: Handing a smaller row group to Arrow's threads takes longer than reading it. Several are read at a time.
_THREADED_BYTES = 8 << 20
_CONVERT_OPTIONS = (
    *("check_utf8", "column_types", "null_values", "true_values", "false_values", "decimal_point"),
    *("strings_can_be_null", "quoted_strings_can_be_null", "timestamp_parsers", "default_column_type"),
)
_INTEGER = re.compile(r"\s*[+-]?\d{1,400}\s*")
#: Options of reading that blocks cannot have.
_READ_OPTIONS = (
    "column_names",
    "autogenerate_column_names",
    "skip_rows",
    "skip_rows_after_names",
    "encoding",
)


@dataclass
class Footer:
    """Schema and groups of a file, read before its rows.

    Args:
        schema: of its columns.
        groups: for each group of rows, how many there are, and their bytes before compression.
        detail: what the format needs to read a group, or to see that the file is the same.
    """

    schema: Any
    groups: list[tuple[int, int]]
    detail: Any

    def equals(self, other: Footer) -> bool:
        """Return whether the files have the same content, as far as footers show it."""
        return bool(self.groups == other.groups and self.detail == other.detail)

    @cached_property
    def int96(self) -> set[str]:
        """The columns of timestamps, or lists of them, that are stored as INT96, as by Spark: of any year."""
        return set()

    def column_bytes(self, value_bytes: Mapping[str, int]) -> int:
        """Bytes of columns before compression; an estimate, where the format does not store them.

        Args:
            value_bytes: by the names of the columns, the bytes in memory of each value of a list, or 0.
        """
        return sum(size for _, size in self.groups)


class Format(ABC):
    """A format of files."""

    name: str
    suffixes: tuple[str, ...]
    groups = "row groups"

    @abstractmethod
    def footer(self, storage: Storage, path: str, size: int | None) -> Footer:
        """Read what is known of a file.

        Raises:
            OSError: it cannot be read.
            pyarrow.ArrowException: it is not of this format.
        """

    @abstractmethod
    def read(self, storage: Storage, path: str, footer: Footer, number: int, names: list[str]) -> Any:
        """Read columns of a group, as a ``pyarrow.Table``; raises as :meth:`footer` does."""

    def checksum(self, storage: Storage, path: str, footer: Footer) -> int:
        """A number that differs for most files of the same sizes with other values or in another order.

        It is 0 where that would have to be read: of formats that store nothing which depends on values, and
        of remote files, of which the hosts have no copies.
        """
        return 0


class _ParquetFooter(Footer):
    def equals(self, other: Footer) -> bool:
        return bool(self.detail.equals(other.detail))

    @cached_property
    def int96(self) -> set[str]:
        names = set(self.schema.names)
        columns = map(self.detail.schema.column, range(self.detail.num_columns))
        owners = {_owner(column.path, names) for column in columns if column.physical_type == "INT96"}
        return {owner for owner in owners if owner is not None}

    def column_bytes(self, value_bytes: Mapping[str, int]) -> int:
        paths = [self.detail.schema.column(number).path for number in range(self.detail.num_columns)]
        owners = [(n, owner) for n, path in enumerate(paths) if (owner := _owner(path, value_bytes))]
        stored = 0
        for group in map(self.detail.row_group, range(self.detail.num_row_groups)):
            for number, owner in owners:
                chunk = group.column(number)
                # Lists of small integers are stored in fewer bytes than they have in memory.
                stored += max(chunk.total_uncompressed_size, chunk.num_values * value_bytes[owner])
        return stored


def _owner(path: str, names: Container[str]) -> str | None:
    """Return the column that has a path: the values of lists have one such as "x.list.element"."""
    while path and path not in names:
        path = path.rpartition(".")[0]
    return path or None


class ParquetFormat(Format):
    """Parquet, whose statistics of row groups also serve filters."""

    name = "a Parquet file"
    suffixes = (".parquet", ".parq", ".pq")

    def footer(self, storage: Storage, path: str, size: int | None) -> Footer:
        """The file's own footer, read by one request where the size is known."""
        from pyarrow import dataset

        fragment = dataset.ParquetFileFormat().make_fragment(path, storage.arrow, file_size=size)
        metadata = fragment.metadata
        groups = map(metadata.row_group, range(metadata.num_row_groups))
        sizes = [(group.num_rows, group.total_byte_size) for group in groups]
        return _ParquetFooter(metadata.schema.to_arrow_schema(), sizes, metadata)

    def checksum(self, storage: Storage, path: str, footer: Footer) -> int:
        """That of the bytes of the footer, which has the compressed sizes and the extremes of columns."""
        if storage.is_remote:
            return 0
        with suppress(OSError), open(path, "rb") as file:  # reading rows has the error
            file.seek(-8, os.SEEK_END)
            size = int.from_bytes(file.read(4), "little")
            file.seek(-8 - size, os.SEEK_END)
            return zlib.crc32(file.read(size))
        return 0

    def read(self, storage: Storage, path: str, footer: Footer, number: int, names: list[str]) -> Any:
        """Read columns of a row group."""
        from pyarrow import parquet

        source = storage.arrow.open_input_file(path)
        options = {"metadata": footer.detail, "pre_buffer": storage.is_remote and len(names) > 1}
        is_large = footer.groups[number][1] > _THREADED_BYTES
        with source, parquet.ParquetFile(source, **options) as file:
            return file.read_row_group(number, columns=names, use_threads=is_large)


class _IpcFooter(Footer):
    def equals(self, other: Footer) -> bool:
        return False  # nothing in it depends on the values


class _IpcFormat(Format):
    name = "an Arrow IPC file"
    groups = "record batches"
    suffixes = (".arrow", ".feather", ".ipc")

    def footer(self, storage: Storage, path: str, size: int | None) -> Footer:
        from pyarrow import ipc

        with storage.arrow.open_input_file(path) as source:
            with ipc.open_file(source) as reader:
                schema, count = reader.schema, reader.num_record_batches
            # The numbers of rows are beside the batches, of which one column has to be read.
            fields = range(len(schema))
            narrow = min(fields, key=lambda n: _bit_width(schema.field(n).type), default=0)
            options = ipc.IpcReadOptions(included_fields=[narrow] if len(schema) else None)
            with ipc.open_file(source, options=options) as reader:
                rows = [reader.get_batch(number).num_rows for number in range(count)]
            stored = source.size()
        groups = [(n, stored * n // max(1, sum(rows))) for n in rows]
        return _IpcFooter(schema, groups, None)

    def read(self, storage: Storage, path: str, footer: Footer, number: int, names: list[str]) -> Any:
        import pyarrow as pa
        from pyarrow import ipc

        fields = [footer.schema.get_field_index(name) for name in names]
        options = ipc.IpcReadOptions(included_fields=fields or None)
        with storage.arrow.open_input_file(path) as source, ipc.open_file(source, options=options) as reader:
            return pa.Table.from_batches([reader.get_batch(number)]).select(names)


def _bit_width(type_: Any) -> int:
    try:
        return int(type_.bit_width)
    except ValueError:  # of variable width
        return 1 << 62


#: Integers from here on may have no float64 of the same value.
_EXACT_MAX = 1 << 53


@dataclass
class _TextFooter(Footer):
    large: dict[str, int]  # of columns, an integer that float64 would round


def _is_rounded(value: int) -> bool:
    """Return whether no float64 has the value."""
    return abs(value) > _EXACT_MAX and (abs(value) >> 1024 > 0 or int(float(value)) != value)


def _rounded_in(column: Any) -> int | float | None:
    """An integer of a column, or of its lists, that float64 would round; or a float that may be one."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.types

    while pa.types.is_list(column.type):
        column = pc.list_flatten(column)
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)) or not len(column):
        return None
    large = (
        pc.greater(column, _EXACT_MAX)
        if pa.types.is_integer(column.type)
        else pc.greater_equal(column, 2.0**53)
    )
    small = (
        pc.less(column, -_EXACT_MAX)
        if pa.types.is_integer(column.type)
        else pc.less_equal(column, -(2.0**53))
    )
    found = column.filter(pc.or_(large, small))
    if pa.types.is_floating(column.type):
        return float(found[0].as_py()) if len(found) else None
    return next((value for value in found.to_pylist() if _is_rounded(value)), None)


def _leaf_type(type_: Any) -> Any:
    """The type of the values of lists, however deep."""
    import pyarrow as pa
    import pyarrow.types

    while pa.types.is_list(type_):
        type_ = type_.value_type
    return type_


class TextFormat(Format):
    """Lines of text, cut into blocks whose rows are counted by parsing each of them once."""

    def footer(self, storage: Storage, path: str, size: int | None) -> Footer:
        """Cut the text into blocks, and parse each for its rows and types."""
        import pyarrow as pa

        bounds, rows, schemas, begin = [], [], [], 0
        large: dict[str, int] = {}
        names: list[str] | None = None
        with storage.arrow.open_input_stream(path, compression=None) as source:
            for block in self._blocks(source):
                table = self._parsed(block, names)
                names = names or table.schema.names
                bounds.append((begin, len(block), zlib.crc32(block), names if begin else None))
                rows.append((table.num_rows, len(block)))
                schemas.append(table.schema)
                begin += len(block)
                for name, column in zip(table.schema.names, table.columns, strict=True):
                    if self._infers(name) and (value := _rounded_in(column)) is not None:
                        if isinstance(value, float):
                            value = next(
                                filter(_is_rounded, self._integers(block, bounds[-1][3], name)), None
                            )
                        if value is not None:
                            large.setdefault(name, value)
        try:
            schema = self._unified(schemas) if schemas else pa.schema([])
        except pa.ArrowException as error:
            raise pa.ArrowInvalid(f"{error}; {self._type_cure}") from error
        return _TextFooter(schema, rows, bounds, large)

    def checksum(self, storage: Storage, path: str, footer: Footer) -> int:
        """That of the checksums of the blocks."""
        return zlib.crc32(repr([block[:3] for block in footer.detail]).encode())

    def read(self, storage: Storage, path: str, footer: Footer, number: int, names: list[str]) -> Any:
        """Read columns of a block.

        Raises:
            OSError: it has other bytes than before.
        """
        import pyarrow as pa

        begin, length, checksum, header = footer.detail[number]
        with storage.arrow.open_input_file(path) as source:
            source.seek(begin)
            block = source.read(length)
        if zlib.crc32(block) != checksum:
            raise OSError("its bytes differ from those that were read when the loader was made")
        fields = [footer.schema.field(name) for name in names] or footer.schema
        return self._parsed(block, header, pa.schema(fields)).select(names)

    def join(self, files: Sequence[StoredFile], footers: Sequence[Any]) -> None:
        """Give all files common types.

        Raises:
            DataError: the types of a column do not fit together, or would round its integers.
        """
        import pyarrow as pa
        import pyarrow.types

        joined = footers[0].schema
        for file, footer in zip(files, footers, strict=True):
            try:
                joined = self._unified([joined, footer.schema])
            except pa.ArrowException as error:
                raise DataError(
                    f"{file}: its columns have other types than those of {files[0]}: {error}; "
                    f"{self._type_cure}"
                ) from error
        for file, footer in zip(files, footers, strict=True):
            for name, value in footer.large.items():
                if pa.types.is_floating(_leaf_type(joined.field(name).type)):
                    raise DataError(
                        f"{file}: column {name!r} has the integer {value}, which would be rounded, since "
                        "other values of the column have fractions, or it does not fit into int64; "
                        f"{self._cure}"
                    )
            names = joined.names if self._may_lack_columns else footer.schema.names
            footer.schema = pa.schema([joined.field(name) for name in names])

    _may_lack_columns = False
    _cure = "write them as strings, or the whole column with a decimal point if it may be rounded"
    _type_cure = "write all values of a column with the same type"
    _size_cure = "write each object on a separate line"
    groups = "blocks"

    def _blocks(self, source: Any) -> Iterator[bytes]:
        import pyarrow as pa

        waiting, begin = b"", 0
        # Twice as much is read until a row ends.
        while more := source.read(min(max(_BLOCK_BYTES, len(waiting)), _BLOCK_MAX - len(waiting))):
            waiting += more
            end = self._last_end(waiting)
            if end:
                yield waiting[:end]
                waiting, begin = waiting[end:], begin + end
            elif len(waiting) == _BLOCK_MAX:
                raise pa.ArrowInvalid(
                    f"the block of text that begins at byte {begin} has not ended after {_BLOCK_MAX} bytes, "
                    f"the most that pyarrow can parse at once; {self._size_cure}"
                )
        if waiting:
            yield waiting

    @abstractmethod
    def _last_end(self, text: bytes) -> int:
        """How many bytes of a text are whole rows."""

    def _unified(self, schemas: list[Any]) -> Any:
        """Return the schema that fits all blocks or files; raises ``pyarrow.ArrowException`` if none does."""
        import pyarrow as pa

        return pa.unify_schemas(schemas, promote_options="permissive")

    def _infers(self, name: str) -> bool:
        """Return whether the type of a column is found from its text."""
        return True

    @abstractmethod
    def _integers(self, block: bytes, header: list[str] | None, name: str) -> Iterator[int]:
        """The values of a column that are written as integers."""

    @abstractmethod
    def _parsed(self, block: bytes, header: list[str] | None, schema: Any = None) -> Any:
        """A table of a block; without a header, the first row of text has the names of the columns."""


class _CsvFormat(TextFormat):
    name = "a CSV file"
    suffixes: tuple[str, ...] = (".csv",)

    def __init__(self, dataset_format: Any = None, delimiter: str = ",") -> None:
        from pyarrow import csv

        given = csv.ParseOptions(delimiter=delimiter)
        self._convert: dict[str, Any] = {}
        if dataset_format is not None:
            given = dataset_format.parse_options
            scan, usual = dataset_format.default_fragment_scan_options, csv.ReadOptions()
            for name in _READ_OPTIONS:
                if (value := getattr(scan.read_options, name)) != getattr(usual, name):
                    raise ValueError(
                        f"format has ReadOptions({name}={value!r}), which is not supported: the first row "
                        "of a CSV file has to name the columns, and the text has to be UTF-8; convert the "
                        "files with write_parquet"
                    )
            convert = scan.convert_options
            known = (
                name for name in _CONVERT_OPTIONS if hasattr(convert, name)
            )  # of this version of pyarrow
            self._convert = {name: getattr(convert, name) for name in known}
        options = ("delimiter", "quote_char", "double_quote", "escape_char", "ignore_empty_lines")
        self._parse = {name: getattr(given, name) for name in options}
        self._quote = (self._parse["quote_char"] or "").encode()
        self._delimiter = self._parse["delimiter"].encode()

    def _last_end(self, text: bytes) -> int:
        if self._parse["escape_char"]:
            return 0  # the file is one block
        if not self._quote or self._quote not in text:
            return text.rfind(b"\n") + 1
        data = np.frombuffer(text, np.uint8)
        marks = np.flatnonzero(data == ord(self._quote))
        doubled = self._quote if self._parse["double_quote"] else b""
        begins = marks[::2][int(marks[0] == 0) :]
        if not np.isin(data[begins - 1], list(self._delimiter + b"\r\n" + doubled)).all():
            # Unquoted fields have quotes, too.
            found = _quoted_parts(self._delimiter, self._quote, bool(doubled)).finditer(text)
            marks = np.asarray([(each.start(), each.end() - 1) for each in found], np.int64).reshape(-1)
        ends = np.flatnonzero(data == ord("\n"))
        outside = ends[np.searchsorted(marks, ends) % 2 == 0]
        return int(outside[-1]) + 1 if len(outside) else 0

    def _parsed(self, block: bytes, header: list[str] | None, schema: Any = None) -> Any:
        import pyarrow as pa
        from pyarrow import csv

        convert = dict(self._convert)
        if schema is not None:
            convert["column_types"], convert["include_columns"] = schema, schema.names
        return csv.read_csv(
            pa.BufferReader(block),
            csv.ReadOptions(use_threads=False, block_size=len(block) + 1, column_names=header),
            csv.ParseOptions(**self._parse, newlines_in_values=True),
            csv.ConvertOptions(**convert),
        )

    def _infers(self, name: str) -> bool:
        return name not in (self._convert.get("column_types") or {})

    def _integers(self, block: bytes, header: list[str] | None, name: str) -> Iterator[int]:
        import pyarrow as pa

        column = self._parsed(block, header, pa.schema([(name, pa.string())])).column(name)
        return (int(text) for text in column.to_pylist() if text and _INTEGER.fullmatch(text))

    _type_cure = (
        "pass format=pyarrow.dataset.CsvFileFormat(...) with ConvertOptions(column_types=...) for this column"
    )
    _cure = f"{_type_cure}, such as uint64, string, or float64 if it may be rounded"
    _size_cure = (
        "with ParseOptions(escape_char=...) a whole file is one block: split the file, or double the quotes "
        "within quoted fields and omit escape_char; without it, look for a quote that is not closed, or pass "
        "ParseOptions(quote_char=False) if fields are not quoted"
    )


def _quoted_parts(delimiter: bytes, quote: bytes, is_doubled: bool) -> re.Pattern[bytes]:
    """Match the quoted parts of fields, as pyarrow finds them. The last one of a text may not be closed."""
    delimiter, quote = re.escape(delimiter), re.escape(quote)
    text = rb"[^%b]*" % quote
    doubled = rb"(?:%b%b%b)*" % (quote, quote, text) if is_doubled else b""
    return re.compile(rb"(?<![^%b\r\n])%b%b%b(?:%b|\Z)" % (delimiter, quote, text, doubled, quote))


class _TsvFormat(_CsvFormat):
    suffixes = (".tsv",)

    def __init__(self) -> None:
        super().__init__(delimiter="\t")


class _JsonFormat(TextFormat):
    name = "a file of JSON lines"
    suffixes = (".jsonl", ".ndjson", ".json")
    _may_lack_columns = True

    def _last_end(self, text: bytes) -> int:
        return text.rfind(b"\n") + 1

    def _unified(self, schemas: list[Any]) -> Any:
        import pyarrow as pa
        import pyarrow.types

        # pyarrow makes timestamps of strings if all strings of a block look like these.
        strings = {field.name for schema in schemas for field in schema if pa.types.is_string(field.type)}
        changed = list(schemas)
        for number, schema in enumerate(schemas):
            for place, field in enumerate(schema):
                if field.name in strings and pa.types.is_timestamp(field.type):
                    changed[number] = changed[number].set(place, field.with_type(pa.string()))
        return super()._unified(changed)

    def _integers(self, block: bytes, header: list[str] | None, name: str) -> Iterator[int]:
        for line in block.splitlines():
            if line.strip():
                yield from _integers_of(json.loads(line, parse_int=_number).get(name))

    def _parsed(self, block: bytes, header: list[str] | None, schema: Any = None) -> Any:
        import pyarrow as pa
        from pyarrow import json as arrow_json

        if not block.strip():
            return pa.table({})
        options = arrow_json.ParseOptions(
            explicit_schema=schema, unexpected_field_behavior="infer" if schema is None else "ignore"
        )
        read = arrow_json.ReadOptions(use_threads=False, block_size=len(block) + 1)
        return arrow_json.read_json(pa.BufferReader(block), read, options)


def _number(text: str) -> int | float:
    """Return a number of JSON; one of thousands of digits is infinite."""
    return int(text) if len(text) < 400 else float(text)


def _integers_of(value: Any) -> Iterator[int]:
    if isinstance(value, list):
        for inner in value:
            yield from _integers_of(inner)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value


_FORMATS: dict[str, Any] = {
    "parquet": ParquetFormat,
    **dict.fromkeys(("ipc", "arrow", "feather"), _IpcFormat),
    "csv": _CsvFormat,
    "tsv": _TsvFormat,
    "json": _JsonFormat,
}


def format_of(format: Any) -> Format:
    """A format by its name, or as pyarrow.dataset has it.

    Raises:
        ValueError: it is unknown, or has options that are not supported.
    """
    from pyarrow import dataset

    if isinstance(format, dataset.CsvFileFormat):
        return _CsvFormat(format)
    if not isinstance(format, str) or format not in _FORMATS:
        raise ValueError(
            f"format is {format!r}; expected one of {', '.join(map(repr, _FORMATS))}, or a "
            "pyarrow.dataset.CsvFileFormat"
        )
    made: Format = _FORMATS[format]()
    return made


def format_by_suffix(files: Sequence[StoredFile]) -> Format:
    """The format that the names of all files end in.

    Raises:
        DataError: there are several, or none.
    """
    found: dict[str, StoredFile] = {}
    for file in files:
        names = [name for name, format in _FORMATS.items() if file.path.endswith(format.suffixes)]
        if not names:
            raise DataError(
                f"{file} is not a folder, and has an unknown suffix; name the format with format="
            )
        found.setdefault(names[0], file)
    if len(found) > 1:
        listed = ", ".join(f"{name} ({file})" for name, file in found.items())
        raise DataError(f"the files have several formats: {listed}; select one with format=")
    return format_of(*found)


#: Of the files of a folder whose format is not named.
SUFFIXES = tuple(suffix for name in dict.fromkeys(_FORMATS.values()) for suffix in name.suffixes)
