"""The columns of a DataFrame that an estimator can use, and their rows as NumPy arrays."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "Numbers",
    "RefusedError",
    "arrays_of",
    "fingerprints",
    "mixed",
    "quoted",
    "require_columns",
    "selected",
    "simple_types",
    "spark_type",
]

Numbers = npt.NDArray[np.uint64]

_NUMBERS = ("boolean", "tinyint", "smallint", "int", "bigint", "float", "double")
_RAW = ("binary", "string")
_OF_ARROW = {
    **{"bool": "boolean", "int8": "tinyint", "int16": "smallint", "int32": "int", "int64": "bigint"},
    **{"uint8": "smallint", "uint16": "int", "uint32": "bigint", "uint64": "bigint", "halffloat": "float"},
    **{"large_string": "string", "large_binary": "binary"},
}
_CURES = {
    "string": "encode it with StringIndexer, or pass a transformation_fn that returns arrays of numbers",
    "binary": "pass a transformation_fn that decodes it to arrays of numbers",
}


class RefusedError(Exception):
    """Rows cannot be used; the message is for users."""


def quoted(name: str) -> str:
    """A name of a column, with dots and other characters in it, for ``pyspark.sql.functions.col``."""
    return "`" + name.replace("`", "``") + "`"


def simple_types(schema: Any) -> dict[str, str]:
    """The types of the columns of Spark as Spark's SQL writes them; "vector" for one of Spark ML."""
    return {
        entry.name: "vector"
        if type(entry.dataType).__name__ == "VectorUDT"
        else str(entry.dataType.simpleString())
        for entry in schema.fields
    }


def spark_type(type_: Any) -> str:
    """The type of a column of a file, of Arrow, as of :func:`simple_types`."""
    text = str(type_)
    if text.startswith(("fixed_size_binary", "extension<arrow.fixed_shape_tensor")):  # of write_parquet
        return "vector"
    if text.startswith("dictionary<"):
        return spark_type(type_.value_type)
    if text.startswith(("list<", "large_list<", "fixed_size_list<")):
        element = spark_type(type_.value_type)
        return "vector" if element in (*_NUMBERS, "vector") else f"array<{element}>"
    return _OF_ARROW.get(text, text)


def require_columns(
    types: Mapping[str, str], columns: Mapping[str, Sequence[str]], *, is_transformed: bool
) -> dict[str, str]:
    """The types of the columns that an estimator or model names.

    Args:
        types: of all columns, by name, as of :func:`simple_types`.
        columns: their names, by the parameters that name them.
        is_transformed: whether there is a ``transformation_fn``, which can take bytes and strings.

    Raises:
        ValueError: there is no such column, or none of its type can be used.
    """
    for parameter, names in columns.items():
        for name in names:
            if name not in types:
                raise ValueError(
                    f"{parameter} names the column {name!r}, which does not exist; the columns are "
                    f"{', '.join(types)}"
                )
            found = types[name]
            element = found.removeprefix("array<").removesuffix(">")
            is_one = parameter in ("sample_weight_col", "validation")
            is_list = found == "vector" or (element in _NUMBERS and element != found)
            if found in _NUMBERS or (is_list and not is_one) or (found in _RAW and is_transformed):
                continue
            cure = _CURES.get(found, "cast it, or leave it out")
            expected = "numbers" if is_one else "numbers, arrays of numbers or vectors"
            raise ValueError(
                f"{parameter} names the column {name!r} of type {found}; expected {expected}: {cure}"
            )
    return {name: types[name] for names in columns.values() for name in names}


def selected(types: Mapping[str, str], caller: str = "") -> list[Any]:
    """Expressions of the columns, in which vectors of Spark ML are arrays.

    Args:
        types: of the columns, by name.
        caller: raises an error of Spark for nulls, also in arrays, which begins with this; empty: nulls stay.
    """
    from pyspark.ml.functions import vector_to_array
    from pyspark.sql import functions

    found = []
    for name, kind in types.items():
        column = functions.col(quoted(name))
        value = vector_to_array(column) if kind == "vector" else column
        if caller:
            text = f"{caller}: column {name!r} has nulls; fill them or drop their rows"
            is_null = column.isNull()
            if kind.startswith("array<"):  # pandas would make NaN of them
                is_null |= functions.exists(column, lambda entry: entry.isNull())
            value = functions.when(is_null, functions.raise_error(text)).otherwise(value)
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


def fingerprints(arrays: Mapping[str, Any]) -> Numbers:
    """A number for each row, which depends on its values in all columns.

    Args:
        arrays: as of :func:`arrays_of`, of at least one row.
    """
    total: Any = 0
    for name, column in arrays.items():
        rows = column
        if not isinstance(rows, np.ndarray):
            texts = (row if isinstance(row, bytes) else row.encode() for row in column.to_pylist())
            rows = np.array([zlib.crc32(text) for text in texts], np.uint32)
        rows = np.ascontiguousarray(rows).reshape(len(rows), -1)
        words = rows.view(f"u{min(4, rows.dtype.itemsize)}")
        draws = np.random.default_rng(zlib.crc32(name.encode()))
        factors = draws.integers(1 << 64, size=words.shape[1], dtype=np.uint64) | np.uint64(1)
        total = total + mixed(np.einsum("ij,j->i", words, factors, dtype=np.uint64, casting="unsafe"))
    return mixed(total)


def mixed(values: Numbers) -> Numbers:
    """Numbers whose bits all depend on all bits of these: the last part of SplitMix64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
