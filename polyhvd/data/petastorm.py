"""How Petastorm has written the columns of its data sets, without petastorm.

Its schema is a pickle in the metadata of a Parquet file ``_common_metadata`` beside the data: see
``petastorm/etl/dataset_metadata.py`` and ``petastorm/codecs.py`` of Petastorm 0.13.1.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from polyhvd.data import images
from polyhvd.data.storage import StoredFile
from polyhvd.errors import DataError

__all__ = ["decoders_of"]

_FILE = "_common_metadata"
_KEY = b"dataset-toolkit.unischema.v1"
_CHANNELS = {3: "RGB", 4: "RGBA"}

_Decoder = Callable[[bytes], npt.NDArray[Any]]


def decoders_of(file: StoredFile, depth: int, names: list[str]) -> dict[str, _Decoder]:
    """Functions that decode columns of bytes; empty if Petastorm has not written the data.

    Args:
        file: of the data set.
        depth: how many folders named ``key=value`` it lies in.
        names: of the columns of bytes.

    Raises:
        DataError: the metadata cannot be read, or a column was written in a way that is not known here.
        ModuleNotFoundError: there are images to decode, and Pillow is not installed.
    """
    import pyarrow as pa
    import pyarrow.parquet

    storage = file.storage
    path = "/".join([*file.path.split("/")[: -1 - depth], _FILE])

    def read() -> bytes | None:
        with storage.arrow.open_input_file(path) as opened:
            return (pyarrow.parquet.read_schema(opened).metadata or {}).get(_KEY)

    name = storage.name(path)
    try:
        pickled = storage.call(name, read)
    except (FileNotFoundError, PermissionError):  # S3 denies access to what may not be listed
        return {}
    except (OSError, pa.ArrowException) as error:
        if "ACCESS_DENIED" in str(error):
            return {}
        raise DataError(f"{name} cannot be read as Parquet: {error}") from error
    if pickled is None:
        return {}
    try:
        fields = _fields(pickled)
    except Exception as error:  # a damaged pickle raises whatever it likes
        raise DataError(
            f"{name}: the schema of Petastorm cannot be read: {error!r}; pass decode= with a function for "
            f"each of the columns {', '.join(names)}"
        ) from error
    decoders = {}
    for column in names:
        if column in fields and (decoder := _decoder(name, column, *fields[column])) is not None:
            decoders[column] = decoder
    return decoders


class _Stub(dict[Any, Any]):
    """Stands for an instance of any class in a pickle, of which nothing is imported or called."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__()
        self.arguments = arguments

    def __new__(cls, *arguments: Any) -> _Stub:
        made = super().__new__(cls)
        made.arguments = arguments  # pickle does not call __init__
        return made


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return type(name, (_Stub,), {"__module__": module})


def _fields(pickled: bytes) -> dict[str, tuple[str, tuple[int | None, ...], Any]]:
    """NumPy's name of the dtype of each column, its shape, and its codec; None: it has none."""
    schema = _Unpickler(io.BytesIO(pickled)).load()
    fields = {}
    for name, field in vars(schema)["_fields"].items():
        _, dtype, shape, codec, _ = field.arguments
        fields[name] = dtype.__name__, tuple(shape), codec
    return fields


def _decoder(
    file: str, column: str, dtype: str, shape: tuple[int | None, ...], codec: Any
) -> _Decoder | None:
    kind = type(codec).__name__
    if codec is None or kind == "ScalarCodec":
        return None
    if kind == "NdarrayCodec":
        return _array
    if kind == "CompressedNdarrayCodec":
        return _compressed_array
    is_gray = len(shape) == 2
    if kind == "CompressedImageCodec" and (dtype == "uint8" or (dtype == "uint16" and is_gray)):
        return images.decoder(None if is_gray else _CHANNELS.get(shape[-1] or 0))
    raise DataError(
        f"{file}: the column {column!r} of {dtype}{list(shape)} was written with the codec "
        f"{type(codec).__module__}.{kind}, which polyhvd cannot decode; pass decode={{{column!r}: function}} "
        "with a function that makes an array of a row's bytes, or select other columns with columns="
    )


def _array(data: bytes) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = np.load(io.BytesIO(data), allow_pickle=False)
    return array


def _compressed_array(data: bytes) -> npt.NDArray[Any]:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        array: npt.NDArray[Any] = arrays["arr"]
    return array
