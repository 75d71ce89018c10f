"""Parquet files that loaders read well."""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from polyhvd.data.columns import arrow_of, described, require_pyarrow
from polyhvd.data.order import at_least
from polyhvd.data.storage import Storage, storage_of

__all__ = ["is_pandas", "write_parquet"]

_GROUP_BYTES = 1 << 20
_ATTEMPTS = 4  # to give a remote file its name
_FORMS = ("tensor", "bytes")


def write_parquet(
    data: Any,
    path: str | os.PathLike[str],
    *,
    rows_per_group: int | None = None,
    arrays_as: str = "bytes",
    compression: str | None = "snappy",
    filesystem: Any = None,
) -> int:
    """Write a Parquet file for :class:`polyhvd.data.ParquetLoader`.

    The file appears under its name when it is whole and on disk, and replaces a former one. Until then it
    has a name that begins with a dot, which loaders of the folder leave out, and which is removed if writing
    fails. Several ranks may write at the same time, each its own file of one folder. Object stores copy the
    whole file to give it its name.

    Args:
        data: a mapping of names to arrays with an entry for each row; or a DataFrame of pandas or Polars, a
            ``pyarrow.Table`` or a ``pyarrow.RecordBatch``; or an iterable of any of these, which is written
            as it comes, and of which only a row group is held in memory.
        path: of the file, or a URI such as ``"s3://bucket/train/0.parquet"``. Folders that do not exist are
            made, but no buckets.
        rows_per_group: rows of a row group, the unit that is read and shuffled; None: about 1 MiB.
        arrays_as: how rows that are arrays are stored. "bytes" is FixedSizeBinary with ``shape`` and
            ``dtype`` in the field's metadata. "tensor" is Arrow's type ``arrow.fixed_shape_tensor``, which
            other programs know; it is read ten to twenty times slower, and larger if elements have 1 or 2
            bytes.
        compression: one that Parquet knows, such as "zstd"; None: none.
        filesystem: of ``pyarrow.fs`` or fsspec, which ``path`` is in; None: the local one, or that of
            the URI.

    Returns:
        The number of rows.

    Raises:
        ModuleNotFoundError: pyarrow, or a package that the file system needs, is not installed.
        DataError: the file system of the URI cannot be opened.
        ValueError: an argument is out of range, an array cannot be stored, arrays have different numbers of
            rows, or parts of an iterable have different columns.
        OSError: the file cannot be written.

    Example::

        write_parquet({"image": images, "label": labels}, "train/0.parquet", rows_per_group=1000)
    """
    require_pyarrow("polyhvd.data.write_parquet")
    from pyarrow import parquet

    if arrays_as not in _FORMS:
        raise ValueError(f"arrays_as is {arrays_as!r}; it has to be one of {', '.join(map(repr, _FORMS))}")
    if rows_per_group is not None:
        at_least(1, "rows_per_group", rows_per_group)
    tables = _tables(data, as_bytes=arrays_as == "bytes")
    first = next(tables, None)
    if first is None:
        raise ValueError("data is empty; expected at least one part, which has the file's columns")
    written = 0
    storage, place = storage_of(path, filesystem, _ATTEMPTS)
    with _whole_remote_file(storage, place) if storage.is_remote else _whole_file(Path(place)) as file:
        writer = parquet.ParquetWriter(
            file, first.schema, compression=compression or "none", use_dictionary=_repetitive(first.schema)
        )
        with writer:
            for group in _groups(itertools.chain([first], tables), rows_per_group):
                writer.write_table(group, row_group_size=group.num_rows)
                written += group.num_rows
    return written


@contextmanager
def _whole_file(path: Path) -> Iterator[Path]:
    """A name for a file that gets its own when it was written, and is removed when that fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.parent / f".{path.name}.{secrets.token_hex(8)}"
    try:
        yield new
        with open(new, "rb") as file:
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException as error:
        new.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and error.filename is None:  # pyarrow's, of a full disk
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from None
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def _whole_remote_file(storage: Storage, path: str) -> Iterator[Any]:
    """A stream to a file that gets its name when it was written, and is removed when that fails."""
    folder, slash, name = path.rpartition("/")
    new = f"{folder}{slash}.{name}.{secrets.token_hex(8)}"
    try:
        try:
            stream = storage.arrow.open_output_stream(new)
        except FileNotFoundError:
            storage.arrow.create_dir(folder, recursive=True)
            stream = storage.arrow.open_output_stream(new)
        with stream:
            yield stream
        storage.call(storage.name(path), lambda: storage.arrow.move(new, path))
    except BaseException:
        with suppress(Exception):
            storage.arrow.delete_file(new)
        raise


def _tables(data: Any, *, as_bytes: bool) -> Iterator[Any]:
    """The parts of the data as tables of one schema."""
    schema = None
    for number, part in enumerate(_parts(data)):
        table = _table(part, as_bytes=as_bytes)
        if schema is not None and not (
            table.schema.equals(schema, check_metadata=False) and _listed(table.schema) == _listed(schema)
        ):
            raise ValueError(
                f"part {number} of the data has the columns {_listed(table.schema)}, but part 0 "
                f"{_listed(schema)}; all parts need the same"
            )
        schema = schema or table.schema
        yield table.replace_schema_metadata(schema.metadata)


def _parts(data: Any) -> Iterable[Any]:
    if _is_part(data):
        return [data]
    if isinstance(data, Iterable) and not isinstance(data, (str, bytes)) and not hasattr(data, "shape"):
        return data
    raise ValueError(
        f"data is a {type(data).__qualname__}; expected a mapping of names to arrays, a DataFrame, an Arrow "
        "table, or an iterable of these"
    )


def _is_part(data: Any) -> bool:
    return (
        isinstance(data, Mapping)
        or is_pandas(data)
        or hasattr(data, "__arrow_c_stream__")
        or hasattr(data, "__arrow_c_array__")
    )


def is_pandas(data: Any) -> bool:
    """Return whether it is an object of pandas, which is not imported for that."""
    return type(data).__module__.partition(".")[0] == "pandas"


def _table(part: Any, *, as_bytes: bool) -> Any:
    import pyarrow as pa

    if not _is_part(part):
        raise ValueError(
            f"a part of the data is a {type(part).__qualname__}; expected a mapping of names to arrays, a "
            "DataFrame or an Arrow table"
        )
    if is_pandas(part):
        return pa.Table.from_pandas(part, preserve_index=False)
    if not isinstance(part, Mapping):
        return pa.table(part)
    columns = {name: arrow_of(name, _with_nulls(values), as_bytes=as_bytes) for name, values in part.items()}
    counts = {name: len(array) for name, (_, array) in columns.items()}
    if not columns or len(set(counts.values())) > 1:
        listed = ", ".join(f"{name!r} {count}" for name, count in counts.items())
        raise ValueError(f"all columns need the same number of rows, but there are {listed or 'no columns'}")
    return pa.table([array for _, array in columns.values()], pa.schema([f for f, _ in columns.values()]))


def _with_nulls(values: Any) -> Any:
    """Return numbers of other libraries, such as Polars, as Arrow data: NumPy has no nulls for them."""
    import pyarrow as pa

    if not hasattr(values, "__arrow_c_stream__") or is_pandas(values):
        return values
    column = pa.chunked_array(values)
    return column if pa.types.is_integer(column.type) or pa.types.is_floating(column.type) else values


def _groups(tables: Iterable[Any], rows_per_group: int | None) -> Iterator[Any]:
    """The same rows in tables of so many rows, of which the last may have fewer."""
    import pyarrow as pa

    waiting: list[Any] = []
    for table in tables:
        if rows_per_group is None and table.num_rows:
            rows_per_group = max(1, _GROUP_BYTES * table.num_rows // max(1, table.nbytes))
        if rows_per_group is None or table.num_rows + sum(part.num_rows for part in waiting) < rows_per_group:
            waiting.append(_copied(table))
            continue
        whole = pa.concat_tables([*waiting, table])
        end = whole.num_rows - whole.num_rows % rows_per_group
        for begin in range(0, end, rows_per_group):
            yield whole.slice(begin, rows_per_group)
        waiting = [_copied(whole.slice(end))]
    rest = pa.concat_tables(waiting)
    if rest.num_rows:
        yield rest


def _copied(table: Any) -> Any:
    """Copy the rows: the caller's iterable may use the memory of one part again for the next."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return pa.ipc.open_stream(sink.getvalue()).read_all()


def _repetitive(schema: Any) -> list[str]:
    """The columns of strings and bytes: only in them are equal entries worth a look for."""
    from pyarrow import types

    tests = (types.is_string, types.is_large_string, types.is_string_view, types.is_dictionary)
    return [field.name for field in schema if any(test(field.type) for test in tests)]


def _listed(schema: Any) -> str:
    return ", ".join(f"{field.name} {described(field)}" for field in schema)
