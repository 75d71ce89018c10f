"""Copies of row groups on this host, on disk or in memory, which its ranks and jobs share.

A store maps keys to bytes and never holds more than it may. Whatever fails in a store is logged once, and the
rows are then read from the file. Keys contain the version of the file, so that a file that was replaced has
other keys.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import pickle
import re
import secrets
import stat
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np

from polyhvd.data.memory_cache import PAUSE_S, MemoryStore, Store
from polyhvd.data.order import at_least

__all__ = ["Cache", "DiskStore", "cache_of", "token"]

_LOG = logging.getLogger("polyhvd")
_HEADER = Struct("<8sIQ44x")  # the payload is aligned as Arrow wants it
_MAGIC = b"polyhvd1"
_ENTRY = re.compile(r"[0-9a-f]{64}")
_PART = re.compile(r"[0-9a-f]{64}\.[0-9a-f]{16}\.part")
_LOCK_S = 2.0  # another process holds the lock for milliseconds, unless it was stopped
#: When the cache is full, so much of it is freed at once: looking for the oldest entries takes a listing.
_FREED = 0.1


def token(value: Any) -> str:
    """A text that is equal for equal values, also in other processes; for values that cannot be pickled it
    is different in each call."""
    try:
        return hashlib.sha256(pickle.dumps(value)).hexdigest()
    except Exception:
        return secrets.token_hex(32)


class DiskStore(Store):
    """Files in a folder that several processes use.

    An entry is written under another name, moved when it is complete, and has a checksum. Writers hold a lock
    of the file that they write, so that what a killed process has left is found and removed. The file
    "lock" has the bytes of all entries; they are counted before they are written.

    Args:
        folder: is made if it is missing, for this user only.
        bytes_max: of all files in it.

    Raises:
        OSError: the folder cannot be made or written.
        ValueError: other users can write to the folder.
    """

    def __init__(self, folder: Path, bytes_max: int) -> None:
        self._folder = folder
        self._bytes_max = bytes_max
        self._paused_until = 0.0
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise ValueError(
                f"cache: {folder} has to be a folder that belongs to this user and that other users cannot "
                f"write to; found the mode {stat.filemode(found.st_mode)} and the owner {found.st_uid}; pass "
                "another folder as cache=pathlib.Path(...)"
            )
        with suppress(TimeoutError), self._locked() as total:  # the ranks of a host do it one by one
            _write_number(total, self._sweep(bytes_max))

    def get(self, key: str) -> memoryview | None:
        """The bytes of a key; an entry that is damaged is removed."""
        path = self._folder / key
        try:
            with open(path, "rb") as file:
                content = np.fromfile(file, np.uint8)
                with suppress(OSError):
                    os.utime(file.fileno())  # the time of the last use
        except FileNotFoundError:
            return None
        data = memoryview(content)  # type: ignore[arg-type]
        if len(data) >= _HEADER.size:
            magic, checksum, length = _HEADER.unpack(data[: _HEADER.size])
            data = data[_HEADER.size :]
            if magic == _MAGIC and length == len(data) and zlib.crc32(data) == checksum:
                return data
        with suppress(OSError):
            path.unlink()
        return None

    def put(self, key: str, data: memoryview) -> None:
        """Write an entry, unless there is one already, it is larger than the cache, or another process has
        kept the lock for too long within the last :data:`PAUSE_S`."""
        size = _HEADER.size + len(data)
        path = self._folder / key
        if size > self._bytes_max or path.exists() or time.monotonic() < self._paused_until:
            return
        part = self._folder / f"{key}.{secrets.token_hex(8)}.part"
        with self._locked() as total:
            used = _read_number(total)
            if used is None or used + size > self._bytes_max:
                used = self._sweep(self._bytes_max - max(size, int(_FREED * self._bytes_max)))
            _write_number(total, used + size)
            file = open(part, "xb", opener=_private)  # noqa: SIM115
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            with file:
                file.truncate(size)  # others count it as it will be
                file.write(_HEADER.pack(_MAGIC, zlib.crc32(data), len(data)))
                file.write(data)
                file.flush()
                os.rename(part, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(part)
            raise

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """The descriptor of the file "lock", while no other process has it."""
        lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            deadline = time.monotonic() + _LOCK_S
            while True:
                with suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                if time.monotonic() > deadline:
                    self._paused_until = time.monotonic() + PAUSE_S
                    raise TimeoutError(f"another process holds {self._folder / 'lock'} for {_LOCK_S:.0f} s")
                time.sleep(0.005)
            try:
                yield lock
            finally:  # closing is not enough: a process that was forked meanwhile has the descriptor, too
                fcntl.flock(lock, fcntl.LOCK_UN)
        finally:
            os.close(lock)

    def _sweep(self, bytes_max: int) -> int:
        """Remove what killed writers have left and the entries that were not used for longest.

        Args:
            bytes_max: that may stay.

        Returns:
            The bytes that have stayed.
        """
        entries, total = [], 0
        for item in os.scandir(self._folder):
            is_part = _PART.fullmatch(item.name) is not None
            if not is_part and not _ENTRY.fullmatch(item.name):
                continue
            with suppress(OSError):
                if is_part and _is_left(item.path):
                    os.unlink(item.path)
                    continue
                found = item.stat(follow_symlinks=False)
                total += found.st_size
                if not is_part:
                    entries.append((found.st_mtime_ns, found.st_size, item.path))
        for _, size, path in sorted(entries):
            if total <= bytes_max:
                break
            with suppress(OSError):
                os.unlink(path)
            total -= size
        return total


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _is_left(path: str) -> bool:
    """Return whether no process writes a file any more."""
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _read_number(descriptor: int) -> int | None:
    """None: a writer was killed before it had written it."""
    text = os.pread(descriptor, 32, 0)
    return int(text) if text.strip().isdigit() else None


def _write_number(descriptor: int, number: int) -> None:
    os.pwrite(descriptor, b"%-32d" % number, 0)


class Cache:
    """Arrow tables in a store. It can be pickled; the copy uses the same store.

    Args:
        where: "memory", "disk", or a folder.
        bytes_max: of all entries.

    Raises:
        OSError, ValueError: as of :class:`DiskStore`.
    """

    def __init__(self, where: str | Path, bytes_max: int) -> None:
        self._options = (where, bytes_max)
        self._store: Store
        if where == "memory":
            self._store = MemoryStore(bytes_max)
        else:
            folder = where if isinstance(where, Path) else usual_folder()
            self._store = DiskStore(folder, bytes_max)
        self._has_failed = False

    def __reduce__(self) -> Any:
        return Cache, self._options

    def get(self, key: str) -> Any:
        """A ``pyarrow.Table``; None: it is not in the cache."""
        import pyarrow as pa

        try:
            data = self._store.get(key)
        except OSError as error:
            self._report(error)
            return None
        if data is None:
            return None
        with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
            return reader.read_all()

    def put(self, key: str, table: Any) -> None:
        """Keep a table, if there is room for it."""
        import pyarrow as pa

        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        try:
            self._store.put(key, memoryview(sink.getvalue()))
        except OSError as error:
            self._report(error)

    def _report(self, error: OSError) -> None:
        if not self._has_failed:
            self._has_failed = True
            _LOG.warning(
                "data: the cache %r cannot be used, files are read instead: %s", self._options[0], error
            )


def usual_folder() -> Path:
    """The folder of ``cache="disk"``: on a disk of this host, for this user."""
    return Path(tempfile.gettempdir(), f"polyhvd-data-cache-{os.geteuid()}")


def cache_of(where: Any, bytes_max: Any) -> Cache | None:
    """The cache that arguments of a loader ask for.

    Args:
        where: None, "memory", "disk", or a path of a folder.
        bytes_max: of all entries; None: 1 GiB of memory, 16 GiB of disk.

    Raises:
        ValueError: an argument is out of range, or the folder cannot be used.
    """
    if where is None:
        if bytes_max is not None:
            raise ValueError(f"cache_bytes is {bytes_max!r}, but cache is None; expected both, or only cache")
        return None
    if isinstance(where, os.PathLike):
        where = Path(where)
    elif where not in ("memory", "disk"):
        raise ValueError(
            f"cache is {where!r}; expected 'memory', 'disk', a pathlib.Path of a folder, or None for no cache"
        )
    if bytes_max is None:
        bytes_max = (1 if where == "memory" else 16) << 30
    at_least(1, "cache_bytes", bytes_max)
    try:
        return Cache(where, bytes_max)
    except OSError as error:
        folder = usual_folder() if where == "disk" else where
        raise ValueError(
            f"cache: the folder {folder} cannot be used: {error}; pass another as cache=pathlib.Path(...)"
        ) from error
