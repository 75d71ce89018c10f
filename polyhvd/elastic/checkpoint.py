"""Checkpoints on disk: one file per version, written whole or not at all, and read without running any of it.

A file is NumPy's .npz without pickles: the arrays, and a JSON text of what else there is. This module knows
no worlds and no frameworks.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import re
import secrets
import stat
import time
import zipfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy

from polyhvd.errors import CheckpointError
from polyhvd.observe.files import FULL

__all__ = ["Folder", "TornError", "pack", "unpack"]

_LOG = logging.getLogger("polyhvd")
_FORMAT = 1
_OF_A_PACKAGE = 2  # dtype.isbuiltin of a type that NumPy does not have
_NAME = re.compile(r"checkpoint-(\d{12})\.npz")
_TORN_NAME = re.compile(r"checkpoint-(\d{12})\.torn")
_TEMPORARY = ".writing-"
_OWNER = ".job"
_NAME_BYTES_MAX = 200  # of a job
_KEPT = 2
#: If nothing was written to an unfinished file for so long, the process that has begun it was killed.
_IDLE_S = 60.0
#: Empty dicts that are more than a dict, by their names in a checkpoint.
_DICTS: dict[str, Callable[[], Any]] = {
    "Counter": Counter,
    "defaultdict int": lambda: defaultdict(int),
    "defaultdict float": lambda: defaultdict(float),
    "defaultdict list": lambda: defaultdict(list),
    "defaultdict dict": lambda: defaultdict(dict),
}
#: What reading a damaged file raises.
_DAMAGES = (
    OSError,
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    EOFError,
    NotImplementedError,
    RecursionError,
    zlib.error,
    zipfile.BadZipFile,
)
#: What reading a file may raise although it is whole: another try may succeed.
_NOT_NOW = {
    *(errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ESTALE),
    *(errno.ETIMEDOUT, errno.ECONNRESET, errno.ENOTCONN, errno.EHOSTDOWN, errno.EHOSTUNREACH),
    # Of file systems on a network whose server did not answer, or that have disconnected this host.
    *(errno.EIO, errno.EREMOTEIO, errno.ESHUTDOWN, errno.ENETDOWN, errno.ENETUNREACH, errno.EINTR),
}

Array = np.ndarray[Any, Any]


def pack(value: Any, where: str = "state") -> tuple[Any, list[Array]]:
    """Split a value into a tree for JSON and a list of arrays.

    Args:
        value: of numbers, texts, bytes, None and arrays, in dicts, lists and tuples of any depth.
        where: what it is called in messages.

    Returns:
        A tree for JSON, and the arrays that it refers to by number. They are not copied.

    Raises:
        CheckpointError: it holds something else.

    Example::

        tree, arrays = pack({"w": np.ones(3), "epoch": 2})
    """
    arrays: list[Array] = []

    def kept(array: Array) -> int:
        arrays.append(array)
        return len(arrays) - 1

    def packed(item: Any, name: str) -> Any:
        if item is None or type(item) in (bool, int, float, str):
            return item
        is_whole = not isinstance(item, np.ma.MaskedArray)  # its mask would be lost
        if isinstance(item, (np.ndarray, np.generic)) and is_whole and not item.dtype.hasobject:
            kind = "array" if isinstance(item, np.ndarray) else "scalar"
            array = np.asarray(item)
            if array.dtype.isbuiltin == _OF_A_PACKAGE:  # bfloat16 and such, of ml_dtypes
                raw = {"raw": kept(np.frombuffer(array.tobytes(), np.uint8)), "dtype": array.dtype.name}
                return {**raw, "shape": list(array.shape), "is_scalar": kind == "scalar"}
            return {kind: kept(array)}
        if isinstance(item, (bytes, bytearray)):
            return {"bytes": kept(np.frombuffer(bytes(item), np.uint8))}
        if isinstance(item, dict):
            pairs = [[packed(key, f"a key of {name}"), packed(item[key], f"{name}[{key!r}]")] for key in item]
            return {"dict": pairs, "class": _name_of(item)} if type(item) is not dict else {"dict": pairs}
        if type(item) in (list, tuple):
            items = [packed(part, f"{name}[{number}]") for number, part in enumerate(item)]
            return {type(item).__name__: items}
        raise CheckpointError(
            f"{name} is a {type(item).__module__}.{type(item).__qualname__}, which cannot be stored in "
            "a checkpoint: use numbers, texts, bytes, None and arrays, in dicts, lists and tuples"
        )

    return packed(value, where), arrays


def unpack(tree: Any, array: Callable[[int], Array]) -> Any:
    """Build the value that :func:`pack` has split.

    Args:
        tree: for JSON.
        array: returns the array of a number.

    Raises:
        CheckpointError: a package is missing.
        ValueError: it is no such tree.

    Example::

        value = unpack(*pack(value)[0], arrays.__getitem__)
    """
    if not isinstance(tree, dict):
        return tree
    kind, content = next(iter(tree.items()))
    if kind == "array":
        return array(content)
    if kind == "scalar":
        return array(content)[()]
    if kind == "bytes":
        return array(content).tobytes()
    if kind == "raw":
        made = np.frombuffer(array(content).tobytes(), _dtype_of(tree["dtype"])).reshape(tree["shape"]).copy()
        return made[()] if tree.get("is_scalar") else made
    if kind == "dict":
        made = _DICTS.get(tree.get("class", ""), dict)()
        made.update({unpack(key, array): unpack(item, array) for key, item in content})
        return made
    if kind == "list":
        return [unpack(item, array) for item in content]
    if kind == "tuple":
        return tuple(unpack(item, array) for item in content)
    raise ValueError(f"it has a {kind!r}, which this version does not know")


def _name_of(item: dict[Any, Any]) -> str:
    """The name of a dict in :data:`_DICTS`, if it has one; another is read as a plain dict."""
    factory = getattr(getattr(item, "default_factory", None), "__name__", "")
    return f"{type(item).__name__} {factory}".rstrip()


class TornError(CheckpointError):
    """A file is not whole, or is not a checkpoint."""


def _dtype_of(name: str) -> np.dtype[Any]:
    """The type of this name, whether or not the program has imported ml_dtypes yet."""
    try:
        import ml_dtypes  # seldom needed
    except ImportError:
        raise CheckpointError(
            f"the checkpoint has numbers of type {name}, which need the package ml_dtypes: "
            "python -m pip install -U ml_dtypes"
        ) from None
    return np.dtype(getattr(ml_dtypes, name, name))


class Folder:
    """Checkpoints in a folder. The newest are kept, and the others removed.

    A file gets its name when all of it is on the disk, so that one of that name is whole, whenever a process
    or machine has died. Several processes may write one at a time; equal numbers are equal checkpoints.

    Args:
        path: of the folder.

    Raises:
        CheckpointError: it is not a path.

    Attributes:
        job: identifies the job that writes here, the same on all ranks; empty: it is not compared.

    Example::

        folder = Folder("run")
        folder.make()
        folder.write(steps=100, value={"w": np.ones(3)})
    """

    def __init__(self, path: str | bytes | os.PathLike[str]) -> None:
        if not isinstance(path, (str, bytes, os.PathLike)) or not os.fspath(path):
            raise CheckpointError(f"checkpoint={path!r}: expected the path of a folder")
        self.path = Path(os.fsdecode(path))
        self.job = ""

    def make(self) -> None:
        """Make the folder if it does not exist; raises CheckpointError."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"the folder of checkpoints {str(self.path)!r} cannot be made: {error.strerror}; pass "
                "another one, or make it a folder that this user may write"
            ) from None

    def require_writable(self) -> None:
        """Raise CheckpointError if no file can be written there, before there is work to lose."""
        temporary = self.path / f"{_TEMPORARY}0-{secrets.token_hex(8)}"
        try:
            temporary.touch(exist_ok=False)
            temporary.unlink()
        except OSError as error:
            raise CheckpointError(
                f"no checkpoint can be written to {str(self.path)!r}: {error.strerror}; pass a folder in "
                "which this user may make files"
            ) from None

    def claim(self) -> None:
        """Let only this job write here, if possible: one that has claimed the folder before may not."""
        if self.owner() == self.job:
            return
        owner = self.path / _OWNER
        with contextlib.suppress(OSError):
            owner.unlink(missing_ok=True)
            with owner.open("x") as stream:  # the disk may be full
                stream.write(self.job)
        self._remove_unfinished(lambda number: True, _IDLE_S)  # an earlier job may be writing its last one

    def owner(self) -> str:
        """The name of the job that has claimed the folder last; empty: none, or it is not known."""
        with contextlib.suppress(OSError, ValueError), _opened(self.path / _OWNER) as stream:
            return stream.read(_NAME_BYTES_MAX).decode()
        return ""

    def _require_claim(self) -> None:
        owner = self.owner()
        if self.job and owner not in ("", self.job):
            raise CheckpointError(
                f"another job writes checkpoints to {str(self.path)!r}: {owner!r}, which has been "
                f"started after this one, {self.job!r}; end one of them, or pass different folders"
            )

    def numbers(self) -> list[int]:
        """The numbers of the checkpoints that there are, newest first; raises CheckpointError."""
        try:
            names = os.listdir(self.path)
        except OSError as error:
            raise CheckpointError(
                f"the folder of checkpoints {str(self.path)!r} cannot be read: {error.strerror}"
            ) from None
        found = (_NAME.fullmatch(name) for name in names)
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def file(self, number: int) -> Path:
        """The file of a checkpoint."""
        return self.path / f"checkpoint-{number:012d}.npz"

    def write(self, steps: int, value: Any) -> None:
        """Write a checkpoint, which is then on the disk as a whole.

        Args:
            steps: its number.
            value: as :func:`pack` takes it.

        Raises:
            CheckpointError: the checkpoint cannot be written, for example because the disk is full, or
                another job has claimed the folder. Earlier checkpoints stay.

        Example::

            folder.write(steps=100, value={"w": np.ones(3)})
        """
        self._require_claim()
        tree, arrays = pack(value)
        header = {"format": _FORMAT, "steps": steps, "arrays": len(arrays), "tree": tree}
        text = np.frombuffer(json.dumps(header).encode(), np.uint8)
        named = {"told": text, **{f"a{i}": array for i, array in enumerate(arrays)}}
        file = self.file(steps)
        try:
            try:
                self._write_file(file, steps, named)
            except OSError as error:
                if error.errno not in FULL or not self._make_room(steps):
                    raise
                self._write_file(file, steps, named)
        except OSError as error:
            former: list[int] = []
            with contextlib.suppress(CheckpointError):  # the folder itself is gone
                former = self.numbers()[:1]
            stays = f"{str(self.file(former[0]))!r} stays" if former else "there is no earlier one"
            start = "resumes from it" if former else "starts from the beginning"
            raise CheckpointError(
                f"the checkpoint {str(file)!r} could not be written: {error.strerror or error}; {stays}. "
                f"Make room, or pass another folder, and run the job again: it {start}"
            ) from None  # zipfile raises it again and again on its way out
        self._tidy(steps)

    def _write_file(self, file: Path, steps: int, named: dict[str, Array]) -> None:
        temporary = self.path / f"{_TEMPORARY}{steps}-{secrets.token_hex(8)}"
        try:
            with open(temporary, "xb") as stream:
                _write_arrays(stream, named)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, file)
            self._sync_names()
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()

    def _make_room(self, steps: int) -> bool:
        """On a full disk, remove unfinished files, or all checkpoints but the newest; return whether any."""
        if self._remove_unfinished(lambda number: True, _IDLE_S):
            return True
        removed = []
        with contextlib.suppress(OSError, CheckpointError):
            for number in self.numbers()[1:]:
                self.file(number).unlink()
                removed.append(str(self.file(number)))
        if removed:
            _LOG.warning(
                "the disk is full: removed %s to write the checkpoint of step %d", ", ".join(removed), steps
            )
        return bool(removed)

    def read(self, number: int) -> Any:
        """The value of a checkpoint.

        Args:
            number: one of :meth:`numbers`.

        Raises:
            TornError: the file is not whole.
            CheckpointError: it is of another format, or cannot be opened, for example for lack of permission.

        Example::

            value = folder.read(folder.numbers()[0])
        """
        file = self.file(number)
        try:
            with _opened(file) as stream, np.load(stream, allow_pickle=False) as data:
                _check_sizes(stream)
                header = json.loads(data["told"].tobytes())
                if header["format"] != _FORMAT:
                    raise CheckpointError(
                        f"the checkpoint {str(file)!r} has format {header['format']}, and this version reads "
                        f"{_FORMAT}: use the version of polyhvd that has written it"
                    )
                arrays = [data[f"a{place}"] for place in range(header["arrays"])]
            return unpack(header["tree"], arrays.__getitem__)
        except CheckpointError:
            raise
        except MemoryError:
            raise CheckpointError(
                f"the checkpoint {str(file)!r} needs more memory than is available; use a larger machine"
            ) from None
        except _DAMAGES as error:
            if isinstance(error, OSError) and error.errno in _NOT_NOW:
                raise CheckpointError(
                    f"the checkpoint {str(file)!r} cannot be read: {error}; start the job again when it can, "
                    "or move the file away if the disk is damaged"
                ) from error
            raise _torn(file, error) from error

    def torn(self) -> list[str]:
        """The files that :meth:`put_aside` has renamed; raises nothing."""
        with contextlib.suppress(OSError):
            return sorted(str(path) for path in self.path.iterdir() if _TORN_NAME.fullmatch(path.name))
        return []

    def put_aside(self, number: int) -> None:
        """Rename a damaged file, if possible, so that it is not a checkpoint any more."""
        file = self.file(number)
        with contextlib.suppress(OSError):
            os.replace(file, file.with_suffix(".torn"))

    def _sync_names(self) -> None:
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _tidy(self, steps: int) -> None:
        """Remove what is too old, and what processes that have died had begun to write."""
        for number in self.numbers()[_KEPT:]:
            with contextlib.suppress(OSError):
                self.file(number).unlink()
        self._remove_unfinished(lambda number: number < steps)

    def _remove_unfinished(self, is_chosen: Callable[[int], bool], idle_s: float = 0.0) -> int:
        """Remove files that processes have begun to write; return how many.

        Args:
            is_chosen: whether a file is removed, by the number of its checkpoint.
            idle_s: seconds for which nothing was written to it.
        """
        count = 0
        with contextlib.suppress(OSError):
            for name in os.listdir(self.path):
                number_of = re.match(rf"{re.escape(_TEMPORARY)}(\d+)-", name)
                if not number_of or not is_chosen(int(number_of[1])):
                    continue
                with contextlib.suppress(OSError):
                    file = self.path / name
                    if not idle_s or time.time() - file.stat().st_mtime >= idle_s:
                        file.unlink()
                        count += 1
        return count


def _write_arrays(stream: BinaryIO, arrays: dict[str, Array]) -> None:
    """Write arrays in the format of ``numpy.savez``, which would leave a file open if the disk is full."""
    with zipfile.ZipFile(stream, "w") as file:
        for name, array in arrays.items():
            with file.open(f"{name}.npy", "w", force_zip64=True) as entry:
                npy.write_array(entry, array, allow_pickle=False)  # type: ignore[no-untyped-call]


def _opened(file: Path) -> BinaryIO:
    """A file for reading; raises ValueError for a pipe or device, which would block."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("it is not a regular file")
    return os.fdopen(descriptor, "rb")


def _check_sizes(stream: BinaryIO) -> None:
    """Raise ValueError if the shape of an array does not match its size in the file.

    NumPy allocates the array before it notices that bytes are missing.
    """
    with zipfile.ZipFile(stream) as file:
        for item in file.infolist():
            if item.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{item.filename} is compressed")
            with file.open(item) as entry:
                version = npy.read_magic(entry)  # type: ignore[no-untyped-call]
                read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
                shape, _, dtype = read(entry)  # type: ignore[no-untyped-call]
                if math.prod(shape) * dtype.itemsize != item.file_size - entry.tell():
                    raise ValueError(f"{item.filename} has the shape {shape} and {item.file_size} bytes")


def _torn(file: Path, error: Exception) -> TornError:
    return TornError(
        f"the checkpoint {str(file)!r} cannot be read: {error}; it is damaged, or not a checkpoint"
    )
