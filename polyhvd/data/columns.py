"""Columns of Arrow tables as NumPy arrays whose first axis is that of the rows, and back.

pyarrow is imported only when it is used, since it is an optional dependency.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from polyhvd.data import images

__all__ = [
    "Column",
    "NullsError",
    "array_of",
    "arrow_of",
    "columns_of",
    "described",
    "require_pyarrow",
    "require_unmasked",
]

#: In the metadata of a field of type FixedSizeBinary: the shape of a row as a JSON list, and NumPy's name
#: of its dtype.
_SHAPE, _DTYPE = b"shape", b"dtype"
_KINDS_OF_BYTES = "biufcmM"


class NullsError(ValueError):
    """A column has nulls, and nothing that replaces them.

    Args:
        count: how many.
        row: of the first.
    """

    def __init__(self, count: int, row: int) -> None:
        super().__init__(count, row)
        self.count = count
        self.row = row

    def __str__(self) -> str:
        return f"{self.count} null{'s, the first' * (self.count > 1)} in row {self.row}"


def require_pyarrow(user: str) -> None:
    """Raise the error of a missing pyarrow.

    Args:
        user: the class or function that needs it.

    Raises:
        ModuleNotFoundError: pyarrow is not installed.
    """
    try:
        import pyarrow.parquet  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{user} needs pyarrow, which cannot be imported ({error}); install it with: "
            "pip install 'polyhvd[data]'",
            name="pyarrow",
        ) from error


def columns_of(
    schema: Any,
    fill_null: Any = None,
    decode: Any = None,
    pad: Mapping[str, Any] | None = None,
) -> list[Column]:
    """The columns of an Arrow schema.

    Args:
        schema: of the selected columns.
        fill_null, decode, pad: as of :class:`polyhvd.data.ParquetLoader`.

    Raises:
        ValueError: as :class:`Column`, or an argument names no column, or lists are not in ``pad``.
        ModuleNotFoundError: there are images to decode, and Pillow is not installed.
    """
    if not isinstance(fill_null, Mapping):
        fill_null = dict.fromkeys(schema.names, fill_null)
    if decode is not None and not isinstance(decode, Mapping):
        if isinstance(decode, (str, bytes)):
            raise ValueError(f"decode is {decode!r}; expected a list of names, or a mapping from names")
        decode = dict.fromkeys(decode)
    if pad is not None and not isinstance(pad, Mapping):
        raise ValueError(f"pad is {pad!r}; expected a mapping from names of columns to values")
    decode, pad, names = decode or {}, pad or {}, set(schema.names)
    for argument, named in {"fill_null": fill_null, "decode": decode, "pad": pad}.items():
        if unknown := [name for name in named if name not in names]:
            raise ValueError(
                f"{argument} names the column {unknown[0]!r}, but the selected columns are "
                f"{', '.join(schema.names)}"
            )
    columns = []
    for field in schema:
        column = Column(field, fill_null.get(field.name))
        if field.name in decode:
            column.decode_with(decode[field.name])
        if field.name in pad:
            column.pad_with(pad[field.name])
        elif column.is_ragged:
            raise ValueError(
                f"column {field.name!r} has rows of different lengths ({field.type}); pass "
                f"pad={{{field.name!r}: 0}} to pad them with zeros, pad={{{field.name!r}: None}} to get an "
                "array of objects, or select other columns with columns="
            )
        columns.append(column)
    return columns


class Column:
    """A column of numbers, tensors, lists, strings or bytes, and how it becomes an array.

    Args:
        field: of an Arrow schema.
        fill_null: replaces nulls; None: they are an error. A null list becomes an empty one.

    Raises:
        ValueError: no array can be made of the column's type, or ``fill_null`` does not fit it.

    Example::

        Column(table.schema.field("x")).decode(table["x"])
    """

    def __init__(self, field: Any, fill_null: Any = None) -> None:
        import pyarrow as pa

        self.name: str = field.name
        self._type = field.type
        self._axes: tuple[int, ...] = ()  # of a tensor that is stored with its axes in another order
        self._bytes_dtype: np.dtype[Any] | None = None  # of elements that are stored as bytes
        self._entries: Column | None = None  # of lists of different lengths
        self._padding: Any = None
        #: Makes an array of a row of bytes; None: they stay bytes.
        self.decoder: Callable[[bytes], Any] | None = None
        type_ = field.type
        shape: list[int] = []
        if isinstance(type_, pa.FixedShapeTensorType):
            shape = list(type_.shape)
            if type_.permutation:
                self._axes = (0, *(1 + axis for axis in type_.permutation))
            type_ = type_.value_type
        while pa.types.is_fixed_size_list(type_):
            shape.append(type_.list_size)
            type_ = type_.value_type
        if pa.types.is_dictionary(type_):
            type_ = type_.value_type
        if (pa.types.is_list(type_) or pa.types.is_large_list(type_)) and not shape:
            self._entries = Column(pa.field(self.name, type_.value_type), fill_null)
        if pa.types.is_fixed_size_binary(type_) and not shape:
            self._bytes_dtype, shape = _form_of_bytes(field, type_.byte_width)
        elif (not _is_plain(type_) and not self.is_ragged) or (self._entries and self._entries.is_ragged):
            raise ValueError(
                f"column {self.name!r} has the type {field.type}, which cannot be made an array; select "
                "other columns with columns="
            )
        self._stored_shape = tuple(shape)
        self._fill: Any = None  # as an entry of an array
        self._fill_scalar: Any = None  # as one of Arrow's
        self._plain_type = type_  # of elements
        if fill_null is not None and not self.is_ragged:
            self._fill_scalar, self._fill = self._element(fill_null, "fill_null")
        empty = self.decode(pa.chunked_array([], field.type))
        self.dtype: np.dtype[Any] = empty.dtype
        self.shape: tuple[int, ...] = empty.shape[1:]  # of a row

    @property
    def is_ragged(self) -> bool:
        """Whether rows are lists of different lengths."""
        return self._entries is not None

    @property
    def is_bytes(self) -> bool:
        """Whether rows are bytes of different lengths."""
        return _is_bytes(self._type)

    def decode_with(self, how: str | Callable[[bytes], Any] | None) -> None:
        """Have the bytes of rows decoded, as ``decode`` of :class:`polyhvd.data.ParquetLoader` says.

        Raises:
            ValueError: rows are not bytes, or ``how`` is of no use.
            ModuleNotFoundError: Pillow is needed, and is not installed.
        """
        if not self.is_bytes:
            raise ValueError(
                f"decode names the column {self.name!r} of type {self._type}; expected one of bytes"
            )
        if how is not None and how not in images.MODES and not callable(how):
            raise ValueError(
                f"decode={{{self.name!r}: {how!r}}}: expected one of {', '.join(images.MODES)}, a function "
                "of bytes, or None"
            )
        self.decoder = how if callable(how) else images.decoder(how)

    def pad_with(self, value: Any) -> None:
        """Have :meth:`padded` extend lists with a value; None: it leaves them as they are.

        Raises:
            ValueError: rows are not lists of different lengths, or the value does not fit their elements.
        """
        if self._entries is None:
            raise ValueError(
                f"pad names the column {self.name!r} of type {self._type}; expected one of lists of "
                "different lengths"
            )
        if value is not None:
            _, self._padding = self._entries._element(value, "pad")

    def padded(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The rows of a batch in one array, where lists are to be padded; others as they are."""
        if self._entries is None or self._padding is None:
            return rows
        longest = max(map(len, rows), default=0)
        shape = (len(rows), longest, *self._entries.shape)
        whole = np.full(shape, self._padding, self._entries.dtype)
        for row, values in zip(whole, rows, strict=True):
            row[: len(values)] = values
        return whole

    @property
    def row_bytes(self) -> int | None:
        """Bytes of a row; None: rows have different sizes."""
        return None if self.dtype.hasobject else self.dtype.itemsize * math.prod(self.shape)

    @property
    def value_bytes(self) -> int:
        """Bytes of each value of a list; 0: rows are not lists."""
        return 0 if self._entries is None else self._entries.dtype.itemsize

    @property
    def form(self) -> tuple[Any, ...]:
        """The properties that columns of several files must share."""
        return self._type, self._bytes_dtype, self.dtype, self.shape

    def decode(self, chunks: Any) -> npt.NDArray[Any]:
        """The rows of a ``pyarrow.ChunkedArray``. The array is read-only where it uses Arrow's memory.

        Raises:
            NullsError: there are nulls, and no ``fill_null``.
        """
        import pyarrow as pa

        parts: list[npt.NDArray[Any]] = []
        for chunk in chunks.chunks or [pa.nulls(0, chunks.type)]:
            try:
                parts.append(self._decode(chunk))
            except NullsError as error:
                raise NullsError(chunks.null_count or error.count, sum(map(len, parts)) + error.row) from None
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _decode(self, array: Any) -> npt.NDArray[Any]:
        import pyarrow as pa

        rows = len(array)
        if self._entries is not None:
            return self._lists(array, self._entries)
        if isinstance(array, pa.ExtensionArray):
            array = array.storage
        missing: npt.NDArray[np.bool_] | None = None
        while pa.types.is_fixed_size_list(array.type):
            missing = self._missing(array, missing, rows)
            size = array.type.list_size
            missing = None if missing is None else missing.repeat(size)
            array = array.values.slice(array.offset * size, len(array) * size)
        if pa.types.is_dictionary(array.type):
            array = _dictionary_decoded(array)
        missing = self._missing(array, missing, rows)
        if self._bytes_dtype is not None:
            values = self._of_bytes(array)
        else:
            is_view = pa.types.is_string_view(array.type) or pa.types.is_binary_view(array.type)
            if array.null_count and not is_view:  # of which Arrow fills none
                array = array.fill_null(self._fill_scalar)
            values = array.to_numpy(zero_copy_only=False)
        if missing is not None:
            values = values.copy()
            values[missing] = self._fill
        values = values.reshape(rows, *self._stored_shape)
        return values.transpose(self._axes) if self._axes else values

    def _lists(self, array: Any, entries: Column) -> npt.NDArray[Any]:
        """An array of objects, each an array of a row's entries."""
        import pyarrow as pa

        nulls: npt.NDArray[np.bool_] = array.is_null().to_numpy(zero_copy_only=False)
        if nulls.any() and entries._fill is None:
            raise NullsError(array.null_count, int(nulls.argmax()))
        offsets = array.offsets.to_numpy()
        first, last = (int(offsets[0]), int(offsets[-1])) if len(offsets) else (0, 0)
        try:
            values = entries.decode(pa.chunked_array([array.values.slice(first, last - first)]))
        except NullsError as error:
            row = int(np.searchsorted(offsets, first + error.row, side="right")) - 1
            raise NullsError(error.count, row) from None
        lists = np.empty(len(array), object)
        for row, is_null in enumerate(nulls):
            begin, end = offsets[row] - first, offsets[row + 1] - first
            lists[row] = values[begin : begin if is_null else end]
        return lists

    def _element(self, value: Any, argument: str) -> tuple[Any, Any]:
        """A value as an element of the column: Arrow's, unless it is a part of bytes, and NumPy's."""
        import pyarrow as pa

        try:
            if self._bytes_dtype is not None:
                element = np.asarray(value).astype(self._bytes_dtype)
                if element.dtype.kind in "biu" and not np.array_equal(element, value):
                    raise ValueError(f"{element.dtype.name} cannot hold it")
                return None, element
            scalar = pa.scalar(value, self._plain_type)
            if pa.types.is_integer(self._plain_type) and scalar.as_py() != value:
                raise ValueError("it is not an integer")
            return scalar, pa.array([scalar]).to_numpy(zero_copy_only=False)[0]
        except (TypeError, ValueError, OverflowError, pa.ArrowException) as error:
            raise ValueError(
                f"{argument}={value!r} does not fit column {self.name!r} of type {self._type}: {error}"
            ) from error

    def _missing(
        self, array: Any, within: npt.NDArray[np.bool_] | None, rows: int
    ) -> npt.NDArray[np.bool_] | None:
        """Which entries are null, or in a list that is; None: none of them."""
        if array.null_count == 0:
            return within
        nulls: npt.NDArray[np.bool_] = array.is_null().to_numpy(zero_copy_only=False)
        if self._fill is None:
            raise NullsError(array.null_count, int(nulls.argmax()) * rows // len(array))
        return nulls if within is None else within | nulls

    def _of_bytes(self, array: Any) -> npt.NDArray[Any]:
        rows, width, dtype = len(array), array.type.byte_width, self._bytes_dtype
        assert dtype is not None
        if rows == 0 or width == 0:
            return np.empty((rows, *self._stored_shape), dtype.newbyteorder("="))
        count = rows * width // dtype.itemsize
        values = np.frombuffer(array.buffers()[1], dtype, count, array.offset * width)
        return values.reshape(rows, *self._stored_shape).astype(dtype.newbyteorder("="), copy=False)


def require_unmasked(named: str, values: Any) -> None:
    """Raise ValueError if values are an array with masked entries, whose mask a conversion would drop."""
    if isinstance(values, np.ma.MaskedArray) and bool(np.any(values.mask)):
        raise ValueError(
            f"{named} has masked entries, which are not values; fill them with .filled(), or leave out "
            "their rows"
        )


def array_of(named: str, values: Any) -> npt.NDArray[Any]:
    """Return values as an array of NumPy.

    Args:
        named: what they are, for the error.
        values: an array, or what can be made one.

    Raises:
        ValueError: rows have different shapes; there are masked entries; or an integer of a list would be
            rounded: NumPy makes float64 of integers of which only some are above 2**63.
    """
    for value in values if isinstance(values, (list, tuple)) else [values]:
        require_unmasked(named, value)
    try:
        array: npt.NDArray[Any] = np.asarray(values)
    except ValueError as error:
        raise ValueError(
            f"{named} has rows of different shapes ({error}); pass lists of different lengths as "
            "pyarrow.array(lists)"
        ) from error
    if array.dtype == np.float64 and isinstance(values, (list, tuple)):
        for value in _integers_in(values):
            if int(float(value)) != value:
                raise ValueError(
                    f"{named} has the integer {value}, which float64 would round, and other values for which "
                    "NumPy selects float64; pass an array whose dtype suits all of them, such as np.uint64"
                )
    return array


def _dictionary_decoded(array: Any) -> Any:
    import pyarrow as pa

    type_ = array.dictionary.type
    if not (pa.types.is_string_view(type_) or pa.types.is_binary_view(type_)):
        return array.dictionary_decode()
    # Arrow selects no entries of views.
    plain = pa.large_string() if pa.types.is_string_view(type_) else pa.large_binary()
    return pa.DictionaryArray.from_arrays(array.indices, array.dictionary.cast(plain)).dictionary_decode()


def _integers_in(values: Iterable[Any]) -> Iterator[Any]:
    """The integers of nested lists."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _integers_in(value)
        elif isinstance(value, (int, np.integer)):
            yield value


def arrow_of(name: str, values: Any, *, as_bytes: bool) -> tuple[Any, Any]:
    """A field of an Arrow schema and the Arrow array of it, of an array with one row in each entry.

    Args:
        name: of the column.
        values: an array, or what can be made one; or an Arrow array, in one piece or several, which is taken
            as it is.
        as_bytes: whether rows that are arrays become FixedSizeBinary, and not ``arrow.fixed_shape_tensor``.

    Raises:
        ValueError: Arrow has no type for it.
    """
    import pyarrow as pa

    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        return pa.field(name, values.type), values
    array = array_of(f"column {name!r}", values)
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    if array.ndim == 0:
        raise ValueError(f"column {name!r} is a single value; expected an array with an entry for each row")
    try:
        if array.ndim == 1:
            # NumPy's bytes and strings lose zeros at their end, and Arrow's conversion all after a zero.
            if array.dtype.kind in "SU":
                array = np.asarray(values, object)
            column = pa.array(array if array.dtype.kind != "O" else array.tolist())
            return pa.field(name, column.type), column
        shape, size = array.shape[1:], math.prod(array.shape[1:])
        if array.dtype.kind not in _KINDS_OF_BYTES or size == 0:
            raise ValueError("rows that are arrays have to have numbers")
        if as_bytes:
            array = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
            type_ = pa.binary(size * array.itemsize)
            column = pa.FixedSizeBinaryArray.from_buffers(type_, len(array), [None, pa.py_buffer(array)])
            form = {_SHAPE: json.dumps(shape), _DTYPE: array.dtype.name}
            return pa.field(name, type_, metadata=form), column
        elements = pa.array(array.reshape(-1))
        storage = pa.FixedSizeListArray.from_arrays(elements, size)
        column = pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(elements.type, shape), storage)
        return pa.field(name, column.type), column
    except (ValueError, TypeError, OverflowError, pa.ArrowException) as error:
        raise ValueError(
            f"column {name!r} of dtype {array.dtype} and shape {array.shape} cannot be written: {error}"
        ) from error


def described(field: Any) -> str:
    """The type of a field of an Arrow schema, with shape and dtype of rows that are stored as bytes."""
    form = {key.decode(): (field.metadata or {}).get(key, b"").decode() for key in (_SHAPE, _DTYPE)}
    return f"{field.type} with the metadata {form}" if any(form.values()) else str(field.type)


def _form_of_bytes(field: Any, width: int) -> tuple[np.dtype[Any], list[int]]:
    """dtype of the elements and shape of the rows of a column of FixedSizeBinary of so many bytes."""
    metadata = field.metadata or {}
    if _SHAPE not in metadata and _DTYPE not in metadata:
        return np.dtype(np.uint8), [width]
    try:
        name = metadata[_DTYPE].decode()
        dtype = np.dtype(name) if name.startswith(">") else np.dtype(name).newbyteorder("<")
        shape = [int(size) for size in json.loads(metadata[_SHAPE])]
        fits = dtype.kind in _KINDS_OF_BYTES and dtype.itemsize * math.prod(shape) == width
    except (KeyError, TypeError, ValueError):
        fits = False
    if not fits:
        raise ValueError(
            f"column {field.name!r} has rows of {width} bytes and the metadata {metadata}; expected a shape "
            'and a dtype of as many bytes, such as {"shape": "[28, 28]", "dtype": "uint8"}'
        )
    return dtype, shape


def _is_bytes(type_: Any) -> bool:
    from pyarrow import types

    return any(test(type_) for test in (types.is_binary, types.is_large_binary, types.is_binary_view))


def _is_plain(type_: Any) -> bool:
    """Return whether entries of a type are numbers, points in time, strings, bytes or decimals."""
    from pyarrow import types

    return any(
        test(type_)
        for test in (
            *(types.is_boolean, types.is_integer, types.is_floating, types.is_decimal),
            *(types.is_timestamp, types.is_date, types.is_duration),
            *(types.is_string, types.is_large_string, types.is_string_view),
            *(types.is_binary, types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary),
        )
    )
