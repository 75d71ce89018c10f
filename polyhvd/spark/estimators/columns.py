"""The columns of a DataFrame that an estimator can use, and their rows as NumPy arrays."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["RefusedError", "arrays_of", "checksum", "quoted", "require_columns", "selected", "simple_type"]

_NUMBERS = ("boolean", "tinyint", "smallint", "int", "bigint", "float", "double")
_RAW = ("binary", "string")
_CURES = {
    "string": "encode it with StringIndexer, or pass a transformation_fn that returns arrays of numbers",
    "binary": "pass a transformation_fn that decodes it to arrays of numbers",
}


class RefusedError(Exception):
    """Rows cannot be used; the message is for users."""


def quoted(name: str) -> str:
    """A name of a column, with dots and other characters in it, for ``pyspark.sql.functions.col``."""
    return "`" + name.replace("`", "``") + "`"


def simple_type(data_type: Any) -> str:
    """The type of a column of Spark as Spark's SQL writes it; "vector" for one of Spark ML."""
    is_vector = type(data_type).__name__ == "VectorUDT"
    return "vector" if is_vector else str(data_type.simpleString())


def require_columns(
    schema: Any, columns: Mapping[str, Sequence[str]], *, is_transformed: bool
) -> dict[str, str]:
    """The types of the columns that an estimator or model names.

    Args:
        schema: of the DataFrame.
        columns: their names, by the parameters that name them.
        is_transformed: whether there is a ``transformation_fn``, which can take bytes and strings.

    Raises:
        ValueError: there is no such column, or none of its type can be used.
    """
    types = {entry.name: simple_type(entry.dataType) for entry in schema.fields}
    for parameter, names in columns.items():
        for name in names:
            if name not in types:
                raise ValueError(
                    f"{parameter} names the column {name!r}, which the DataFrame does not have; its columns "
                    f"are {', '.join(types)}"
                )
            found = types[name]
            element = found.removeprefix("array<").removesuffix(">")
            if found == "vector" or element in _NUMBERS or (found in _RAW and is_transformed):
                continue
            cure = _CURES.get(found, "cast it, or leave it out")
            raise ValueError(
                f"{parameter} names the column {name!r} of type {found}; expected numbers, arrays of numbers "
                f"or vectors: {cure}"
            )
    return {name: types[name] for names in columns.values() for name in names}


def selected(types: Mapping[str, str], caller: str = "") -> list[Any]:
    """Expressions of the columns, in which vectors of Spark ML are arrays.

    Args:
        types: of the columns, by name.
        caller: raises an error of Spark for nulls, which begins with this; empty: nulls stay.
    """
    from pyspark.ml.functions import vector_to_array
    from pyspark.sql import functions

    found = []
    for name, kind in types.items():
        column = functions.col(quoted(name))
        value = vector_to_array(column) if kind == "vector" else column
        if caller:
            text = f"{caller}: column {name!r} has nulls; fill them or drop their rows"
            value = functions.when(column.isNull(), functions.raise_error(text)).otherwise(value)
        found.append(value.alias(name))
    return found


def arrays_of(batch: Any, names: Sequence[str]) -> dict[str, Any]:
    """Columns of a ``pyarrow.RecordBatch``: arrays of NumPy, and of Arrow for bytes and strings.

    Raises:
        RefusedError: there are nulls, or arrays of different lengths.
    """
    return {name: _rows(name, batch.column(batch.schema.get_field_index(name))) for name in names}


def _rows(name: str, column: Any) -> Any:
    from pyarrow import types

    if column.null_count:
        raise RefusedError(f"column {name!r} has nulls; fill them or drop their rows: df.na")
    if not (types.is_list(column.type) or types.is_large_list(column.type)):
        is_raw = types.is_binary(column.type) or types.is_string(column.type)
        return column if is_raw else column.to_numpy(zero_copy_only=False)
    lengths = np.unique(np.diff(column.offsets.to_numpy()))
    if len(lengths) > 1 or not lengths.all():
        raise RefusedError(
            f"column {name!r} has arrays of different lengths ({', '.join(map(str, lengths[:4]))}); all rows "
            "need the same, which is not 0"
        )
    entries = column.flatten()
    if entries.null_count:
        raise RefusedError(f"column {name!r} has nulls in its arrays; fill them or drop their rows")
    return entries.to_numpy(zero_copy_only=False).reshape(len(column), -1)


def checksum(rows: Any) -> int:
    """A number of 64 bits that does not depend on the order of the rows.

    Args:
        rows: of a column, as of :func:`arrays_of`.
    """
    if not isinstance(rows, np.ndarray):
        return sum(zlib.crc32(row if isinstance(row, bytes) else row.encode()) for row in rows.to_pylist())
    bits: npt.NDArray[Any] = np.ascontiguousarray(rows).view(f"u{rows.dtype.itemsize}")
    return int(bits.sum(dtype=np.uint64))
