"""File systems: which files a source stands for, and reads that are repeated when they fail for a moment.

pyarrow and fsspec are imported only when they are used, since they are optional dependencies.
"""

from __future__ import annotations

import asyncio
import atexit
import glob
import logging
import os
import re
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar
from urllib.parse import unquote

from polyhvd.data import delta
from polyhvd.data.cache import token
from polyhvd.data.waiting import is_done_by, wait_for
from polyhvd.errors import DataError

__all__ = [
    "TIMEOUT_S",
    "Source",
    "Storage",
    "StoredFile",
    "Text",
    "in_threads",
    "is_unanswered",
    "listed",
    "storage_of",
]

Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_LOG = logging.getLogger("polyhvd")
_LAST_READ_S = 5.0  # how long an error waits for other listings and footers that are being read
_THREADS = 64  # for listings and footers: most of the time they wait for the file system
_FIRST_WAIT_S, _WAIT_MAX_S = 0.2, 10.0
#: How long a read of a remote file system may take, with all attempts.
TIMEOUT_S = 120.0
_SILENCE_S = 10.0  # of S3, within an attempt
#: File systems without folders, which list all files below a prefix at once.
_FLAT = ("s3", "gcs", "abfs")
#: Paths of Databricks' file system, and where its hosts have it.
_DBFS_PATH = re.compile(r"dbfs:(/|///)(?!/)")
_DBFS_MOUNT = "/dbfs"
#: Options at the end of a URI, which pyarrow takes. A "?" of a pattern is followed by other text.
_OPTIONS = re.compile(r"\?\w+=[^/?]*$")
#: Errors of S3 that another attempt does not mend.
_FINAL = re.compile(
    r"AWS Error (?:ACCESS_DENIED|INVALID_ACCESS_KEY_ID|INVALID_CLIENT_TOKEN_ID|SIGNATURE_DOES_NOT_MATCH|"
    r"NO_SUCH_BUCKET|NO_SUCH_KEY|RESOURCE_NOT_FOUND)|HTTP status 40[134]"
)
#: How names begin of files and folders that a folder as source does not stand for.
_LEFT_OUT = ("_", ".")
#: The name of the folder of nulls, in Hive.
_NULL = "__HIVE_DEFAULT_PARTITION__"

T = TypeVar("T")
R = TypeVar("R")


class Storage:
    """A file system.

    Args:
        filesystem: of ``pyarrow.fs`` or fsspec.
        prefix: of the names of files in messages, such as ``"s3://"``.
        attempts: how often a read is tried on a remote file system.
        timeout_s: how long a read may take there, with all attempts.

    Raises:
        ValueError: ``filesystem`` is not a file system.
    """

    def __init__(
        self,
        filesystem: Any,
        prefix: str | None = None,
        attempts: int = 1,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        from pyarrow import fs

        if isinstance(filesystem, fs.FileSystem):
            self.arrow = filesystem
        elif hasattr(filesystem, "protocol") and hasattr(filesystem, "ukey"):
            self.arrow = fs.PyFileSystem(fs.FSSpecHandler(filesystem))
        else:
            raise ValueError(
                f"filesystem is {filesystem!r}; expected a file system of pyarrow.fs or of fsspec"
            )
        self.is_remote = not isinstance(self.arrow, fs.LocalFileSystem)
        kind = self.arrow.type_name.removeprefix("py::").removeprefix("fsspec+")
        self.prefix = prefix if prefix is not None else f"{kind}://" if self.is_remote else ""
        handler = getattr(self.arrow, "handler", None)
        self._fsspec = handler.fs if isinstance(handler, fs.FSSpecHandler) else None
        is_fsspec = self._fsspec is not None
        self._is_flat = _lists_at_once(self._fsspec) if is_fsspec else self.arrow.type_name in _FLAT
        self._attempts = attempts if self.is_remote else 1
        self._timeout_s = timeout_s

    def name(self, path: str) -> str:
        """A file's name in messages."""
        return self.prefix + path.lstrip("/") if self.prefix else path

    def call(self, name: str, function: Callable[[], T]) -> T:
        """The result of a read, which is tried again as often as the file system allows.

        Args:
            name: of the file, for the log.
            function: reads.

        Raises:
            OSError: all attempts failed, or one did for good.
            pyarrow.ArrowException: the file is damaged.
            DataError: by the function.
        """
        import pyarrow as pa

        deadline = time.monotonic() + self._timeout_s
        for attempt in count(1):
            try:
                return within(self._timeout_s, deadline, function) if self.is_remote else function()
            except Exception as error:
                wait_s = min(_WAIT_MAX_S, _FIRST_WAIT_S * 2 ** (attempt - 1))
                is_in_time = time.monotonic() + wait_s < deadline
                if attempt < self._attempts and is_passing(error) and is_in_time:
                    _LOG.warning(
                        *("%s: attempt %d of %d failed: %s; the next one follows in %.1f s", name, attempt),
                        *(self._attempts, error, wait_s),
                    )
                    time.sleep(wait_s)
                    continue
                if isinstance(error, (OSError, pa.ArrowException, DataError)) or not self.is_remote:
                    raise
                raise OSError(f"{type(error).__name__}: {error}") from error
        raise AssertionError  # the loop returns or raises

    def state(self, path: str) -> Any:
        """A value that changes with a file: its size, and the time of its last change or other attributes.

        Raises:
            OSError: there is no such file, or it cannot be looked up.
        """
        if self._fsspec is not None:
            self._fsspec.invalidate_cache(path)
            return self._fsspec.ukey(path)
        return self._state(self.arrow.get_file_info(path))

    def version(self, path: str) -> Any:
        """A value that differs for each content that a file has had, as far as the file system shows it.

        Raises:
            OSError: there is no such file, or it cannot be looked up.
        """
        if not self.is_remote:
            found = os.stat(path)
            return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
        if self._fsspec is None:
            with self.arrow.open_input_file(path) as file:
                if etag := (file.metadata() or {}).get("ETag"):
                    return file.size(), etag
        return self.state(path)

    @cached_property
    def identity(self) -> str:
        """A text that two file systems have only if a path means the same file in both."""
        if self._fsspec is not None:
            options = (self._fsspec.storage_args, self._fsspec.storage_options)
            return token((type(self._fsspec), options))
        return token(self.arrow)

    def state_of(self, info: Any) -> Any:
        """The same, of a ``pyarrow.fs.FileInfo``; None: it does not have it."""
        return None if self._fsspec is not None else self._state(info)

    @staticmethod
    def _state(info: Any) -> tuple[int, int | None]:
        from pyarrow import fs

        if info.type == fs.FileType.NotFound:
            raise FileNotFoundError(f"{info.path} does not exist")
        return info.size, info.mtime_ns

    def size(self, state: Any) -> int | None:
        """The size of a file of a state, where the file system need not be asked."""
        return None if self._fsspec is not None else state[0]

    def files_in(self, folder: str, enters: Callable[[Sequence[str]], bool]) -> list[Any]:
        """A ``pyarrow.fs.FileInfo`` of each file in a folder. Subfolders are listed in parallel.

        Args:
            folder: its path.
            enters: whether a subfolder is listed, by the parts of its path below the folder. File systems
                that list all files at once do not ask.

        Raises:
            OSError: a folder cannot be listed; it names the folder.
        """
        from pyarrow import fs

        if self._fsspec is not None:
            self._fsspec.invalidate_cache()
        above = len(parts_of(folder))
        found, folders = [], [folder]
        while folders:
            lists = in_threads(self._list, folders)
            infos = [info for those in lists for info in those]
            found += [info for info in infos if info.is_file]
            inner = [info.path for info in infos if info.type == fs.FileType.Directory]
            folders = [] if self._is_flat else [path for path in inner if enters(parts_of(path)[above:])]
        return found

    def _list(self, folder: str) -> list[Any]:
        import pyarrow as pa
        from pyarrow import fs

        def read() -> list[Any]:
            if self._fsspec is not None and not self._is_flat:  # its find() leaves errors out
                entries = self._fsspec.ls(folder, detail=True)
                make = fs.FSSpecHandler._create_file_info
                own = folder.strip("/")
                return [make(e["name"], e) for e in entries if e["name"].strip("/") != own]
            infos: list[Any] = self.arrow.get_file_info(fs.FileSelector(folder, recursive=self._is_flat))
            return infos

        try:
            return self.call(self.name(folder), read)
        except (OSError, pa.ArrowException) as error:
            raise OSError(f"{self.name(folder)!r}: {error}") from error


def _lists_at_once(filesystem: Any) -> bool:
    """Return whether a file system of fsspec finds all files below a folder without listing each folder."""
    from fsspec.asyn import AsyncFileSystem
    from fsspec.spec import AbstractFileSystem

    kind = type(filesystem)
    return getattr(kind, "_find", kind.find) not in (AsyncFileSystem._find, AbstractFileSystem.find)


def parts_of(path: str) -> list[str]:
    """The names of the folders and the file of a path.

    Example::

        parts_of("/data//x.parquet") == ["data", "x.parquet"]
    """
    return [part for part in path.split("/") if part]


class StoredFile(NamedTuple):
    """A file.

    Args:
        storage: its file system.
        path: in this file system.
        state: what its folder's listing has shown of :meth:`Storage.state`.
    """

    storage: Storage
    path: str
    state: Any = None

    def __str__(self) -> str:
        return self.storage.name(self.path)

    @property
    def absolute(self) -> str:
        """A path that two files have only if they are the same."""
        return f"/{self}" if self.storage.is_remote else os.path.abspath(self.path)

    def call(self, function: Callable[[], T]) -> T:
        """:meth:`Storage.call` of a read of this file."""
        return self.storage.call(str(self), function)


class Text(str):
    """The value of a partition that is a string, even if it looks like an integer."""


class UnansweredError(TimeoutError):
    """A file system has not answered within the time for a read."""


def is_unanswered(error: BaseException) -> bool:
    """Return whether an error is one, or was raised from one, of a file system that does not answer."""
    return isinstance(error, UnansweredError) or isinstance(error.__cause__, UnansweredError)


def within(timeout_s: float, deadline: float, function: Callable[[], T]) -> T:
    """The result of a function that may hang in a library which has no limit itself.

    Args:
        timeout_s: the setting, for the error.
        deadline: of ``time.monotonic()``.
        function: runs in a thread, which is left behind if it hangs and does not keep the program from
            ending.

    Raises:
        UnansweredError: it did not return in time.
        Exception: that of the function.
    """
    future: Future[T] = Future()
    caller: _Caller | None = getattr(_of_thread, "caller", None)
    thread: threading.Thread | None = None
    if caller is None or caller.is_lost:
        thread = threading.Thread(target=_call, args=(function, future), name=_CALLER, daemon=True)
        thread.start()
    else:
        caller.call(function, future)
    try:
        if is_done_by(future, deadline):
            return future.result()
        raise UnansweredError(
            f"the file system has not answered within {timeout_s:g} s; check that this host can reach it, or "
            "raise read_timeout_s="
        )
    finally:
        if caller is not None and not future.done():  # also after Ctrl-C
            caller.is_lost = True
        if thread is not None and future.done():
            thread.join(_LAST_READ_S)  # it is about to end


def _call(function: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)


_CALLER = "polyhvd-remote"
#: Its attribute ``caller`` is the one that a thread has for its reads.
_of_thread = threading.local()


class _Caller:
    """The thread in which :func:`within` calls functions for the thread that uses this as a context.

    Starting a thread for each function takes longer than many a read.
    """

    def __init__(self) -> None:
        #: Whether a function has not returned in time, so that the others need another thread.
        self.is_lost = False
        self._thread: threading.Thread | None = None
        self._tasks: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()

    def __enter__(self) -> None:
        _of_thread.caller = self

    def __exit__(self, *error: object) -> None:
        _of_thread.caller = None
        self._tasks.put(None)
        if self._thread is not None and not self.is_lost:
            self._thread.join()

    def call(self, function: Callable[[], Any], future: Future[Any]) -> None:
        """Call a function when those before it have returned."""
        self._tasks.put((function, future))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=_CALLER, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            _call(*task)
            del task  # and what it refers to


def is_passing(error: Exception) -> bool:
    """Return whether another attempt may succeed: errors of networks, and those of unknown libraries."""
    import pyarrow as pa

    final = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, DataError)
    if isinstance(error, final) or _FINAL.search(str(error)):
        return False
    if isinstance(error, (OSError, asyncio.TimeoutError)):
        return True
    return not isinstance(error, pa.ArrowException) and type(error).__module__ != "builtins"


def storage_of(
    source: str | os.PathLike[str], filesystem: Any, attempts: int, timeout_s: float = TIMEOUT_S
) -> tuple[Storage, str]:
    """The file system that a path or URI belongs to, and the path in it.

    The path of a URI is taken as it is written, without decoding "%".

    Raises:
        ValueError: the URI or the file system is of no use.
        ModuleNotFoundError: a package that the file system needs is not installed.
        DataError: the file system refuses to be opened.
    """
    from pyarrow import fs

    text = os.fspath(source)
    if _DBFS_PATH.match(text) and not isinstance(source, os.PathLike):
        text = "/" + text.removeprefix("dbfs:").lstrip("/")
        if filesystem is None:
            if not os.path.isdir(_DBFS_MOUNT):
                raise ValueError(
                    f"source is {os.fspath(source)!r}, but this host has no {_DBFS_MOUNT}, where Databricks "
                    'mounts DBFS; pass filesystem=fsspec.filesystem("dbfs", instance=..., token=...)'
                )
            return Storage(fs.LocalFileSystem()), _DBFS_MOUNT + text
    is_uri = "://" in text and not isinstance(source, os.PathLike)
    if filesystem is not None:
        storage = Storage(filesystem, attempts=attempts, timeout_s=timeout_s)
        if not is_uri:
            return storage, text
        if storage._fsspec is None:
            raise ValueError(
                f"source is {text!r}; with filesystem= expected a path in it, such as "
                f"{text.partition('://')[2]!r}"
            )
        return storage, storage._fsspec._strip_protocol(text)
    if not is_uri:
        return Storage(fs.LocalFileSystem()), text
    opened = threading.Event()

    def open_it() -> tuple[Storage, str]:
        try:
            return _of_arrow(text, attempts, timeout_s) or _of_fsspec(text, attempts, timeout_s)
        finally:
            opened.set()

    if text.startswith("s3://"):
        # pyarrow ends S3 at exit, once requests have ended, and aborts the process if a thread that has also
        # waited for them makes a file system then. Python calls this before, since it is registered later.
        atexit.register(opened.wait, TIMEOUT_S)
    try:  # it may ask the service for the region
        return within(timeout_s, time.monotonic() + timeout_s, open_it)
    except OSError as error:
        raise DataError(f"the file system of {_public(text)} cannot be opened: {error}") from error
    finally:
        if opened.is_set():
            atexit.unregister(opened.wait)


def _of_arrow(uri: str, attempts: int, timeout_s: float) -> tuple[Storage, str] | None:
    """None: pyarrow does not know this kind of file system."""
    import pyarrow as pa
    from pyarrow import fs

    scheme, _, rest = uri.partition("://")
    options = _OPTIONS.search(rest)
    rest, query = (rest[: options.start()], options[0]) if options else (rest, "")
    authority, slash, path = rest.partition("/")
    marker = "path"
    try:
        filesystem, marked = fs.FileSystem.from_uri(f"{scheme}://{authority}/{marker}{query}")
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        if "Unrecognized filesystem" in str(error) or isinstance(error, pa.ArrowNotImplementedError):
            return None
        raise ValueError(f"source is {_public(uri)!r}, which pyarrow cannot use: {error}") from error
    if filesystem.type_name == "s3":
        # Without these a request that is not answered takes minutes, for which the program's end waits, too.
        make, (arguments, *others) = filesystem.__reduce__()
        silence_s = min(_SILENCE_S, timeout_s / 4)
        arguments = {**arguments, "request_timeout": silence_s, "connect_timeout": silence_s}
        filesystem = make(arguments, *others)
    base = marked.removesuffix(marker)
    if isinstance(filesystem, fs.LocalFileSystem):
        return Storage(filesystem), base + path
    host = authority.rpartition("@")[2] + "/" if base.startswith("/") else ""
    return Storage(
        filesystem, f"{scheme}://{host}", attempts, timeout_s
    ), base + path if slash else base.rstrip("/")


def _of_fsspec(uri: str, attempts: int, timeout_s: float) -> tuple[Storage, str]:
    try:
        from fsspec.core import url_to_fs
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{_public(uri)} needs fsspec, which cannot be imported ({error}); install it with: "
            "pip install 'polyhvd[data]'",
            name="fsspec",
        ) from error
    try:
        filesystem, path = url_to_fs(uri)
    except ImportError as error:
        raise ModuleNotFoundError(
            f"{_public(uri)} needs another package: {error}", name=error.name
        ) from error
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"source is {_public(uri)!r}, for which fsspec cannot make a file system: {error}; if it needs "
            "options, make the file system and pass filesystem="
        ) from error
    return Storage(filesystem, attempts=attempts, timeout_s=timeout_s), path


def _public(uri: str) -> str:
    """A URI without user, password and options."""
    scheme, _, rest = _OPTIONS.sub("", uri).partition("://")
    authority, slash, path = rest.partition("/")
    return f"{scheme}://{authority.rpartition('@')[2]}{slash}{path}"


def listed(
    source: Source,
    suffixes: Sequence[str],
    filesystem: Any = None,
    attempts: int = 1,
    timeout_s: float = TIMEOUT_S,
) -> tuple[list[tuple[StoredFile, dict[str, str | None]]], list[str]]:
    """List the files of a source.

    If a folder or pattern has several paths of a local file, because of links to it or to its folder, the
    file is listed once.

    Args:
        source: as of :class:`polyhvd.data.ParquetLoader`.
        suffixes: of the files of folders.
        filesystem: of pyarrow.fs or fsspec; None: that of the source.
        attempts: how often a read of a remote file system is tried.
        timeout_s: how long one may take, with all attempts.

    Returns:
        The files, with the values of the folders ``name=value`` that they are in; and the paths that are left
        out, because they lead to one of the files.

    Raises:
        ValueError: a file is named twice, or a URI is of no use.
        DataError: there are no files.
    """
    import pyarrow as pa

    given = [source] if isinstance(source, (str, os.PathLike)) else list(source)
    found: _Files = []
    links: list[str] = []
    for item in given:
        storage, path = storage_of(item, filesystem, attempts, timeout_s)
        name = storage.name(path)
        try:
            if storage.is_remote:
                found += _remote_files(storage, path, name, suffixes)
            else:
                found += _local_files(storage, path, name, suffixes, links)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{name!r} cannot be listed: {error}") from error
    if not found:
        raise DataError("source is an empty list; expected at least one file")
    if len(given) > 1:
        folders: dict[str, str] = {}
        counts = Counter(
            file.absolute if file.storage.is_remote else _canonical(file.path, folders) for file, _ in found
        )
        path, times = counts.most_common(1)[0]
        if times > 1:
            raise ValueError(
                f"source contains the file {path} {times} times, by its path or by links; its rows would be "
                "read that many times"
            )
    return found, links


_Files = list[tuple[StoredFile, dict[str, str | None]]]


def _local_files(storage: Storage, path: str, name: str, suffixes: Sequence[str], links: list[str]) -> _Files:
    root = Path(path)
    if (root / delta.LOG).is_dir():
        return _delta_files(storage, path)
    if root.is_dir():
        walked = _walked(str(root), str(root))
        found = {p: linked for p, linked in walked if _is_data(p.relative_to(root).parts, suffixes)}
        if not found:
            raise DataError(f"the folder {name!r} has no files that end in {', '.join(suffixes)}")
    elif root.exists() or not glob.has_magic(path):
        return [(StoredFile(storage, path), {})]
    else:
        parts = path.split("/")
        first = next(number for number, part in enumerate(parts) if glob.has_magic(part))
        above = "/".join(parts[:first]) or ("/" if first else "")
        found = {Path(p): linked for p, linked in _matching(above, parts[first:])}
        if not found:
            raise DataError(f"no file matches {name!r}")
        root = Path(above)
    return [
        (StoredFile(storage, str(p)), _partitions_in(p.relative_to(root).parts)) for p in _once(found, links)
    ]


def _once(found: dict[Path, bool], links: list[str]) -> list[Path]:
    """Return one path of each file, sorted.

    Args:
        found: paths of files, and whether there is a link in each. Without links nothing is looked up.
        links: gets the paths that are left out.
    """
    kept = sorted(path for path, linked in found.items() if not linked)
    if len(kept) < len(found):
        folders: dict[str, str] = {}
        known = {_canonical(str(path), folders) for path in kept}
        for path in sorted(found.keys() - kept):
            if (file := _canonical(str(path), folders)) in known:
                links.append(str(path))
            else:
                known.add(file)
                kept.append(path)
        kept.sort()
    return kept


def _canonical(path: str, folders: dict[str, str]) -> str:
    """Return the absolute path of a file without links; ``folders`` keeps those of folders."""
    folder, name = os.path.split(path)
    if folder not in folders:
        folders[folder] = os.path.realpath(folder)
    path = os.path.join(folders[folder], name)
    return os.path.realpath(path) if os.path.islink(path) else path


def _delta_files(storage: Storage, path: str) -> _Files:
    """The files of the current version of a Delta table, whose folders have the values of the partitions."""
    files, columns = delta.files_of(path)
    found = []
    for file in files:
        values = _partitions_in(os.path.relpath(file, os.path.abspath(path)).split(os.sep))
        if values.keys() != set(columns):
            raise DataError(
                f"the Delta table {path!r} has the partition columns {sorted(columns)}, but the folders of "
                f"{file} have {sorted(values)}; write the table again with folders name=value"
            )
        for name, value in values.items():
            if columns[name] and value is not None:
                values[name] = Text(value)
        found.append((StoredFile(storage, file), values))
    return found


def _matching(
    folder: str,
    pattern: Sequence[str],
    above: frozenset[tuple[int, int]] = frozenset(),
    *,
    linked: bool = False,
) -> Iterator[tuple[str, bool]]:
    """The files below a folder that match a pattern, as ``glob.glob`` finds them, each with whether the part
    of its path that the pattern matches has a link.

    Args:
        folder: its path; empty: the current one.
        pattern: its parts.
        above: the folders that a "**" at its beginning has entered, which a link may lead back to.
        linked: whether the pattern has led to the folder through a link.

    Raises:
        OSError: a folder that the pattern leads to cannot be read.
    """
    first, rest = pattern[0], pattern[1:]
    if not glob.has_magic(first):
        path = os.path.join(folder, first)
        if (mode := _mode(path)) and (not rest or os.path.isdir(path)):
            linked = linked or stat.S_ISLNK(mode)
            if rest:
                yield from _matching(path, rest, linked=linked)
            elif not os.path.isdir(path):
                yield path, linked
        return
    if first == "**":
        found = os.stat(folder or ".")
        if (found.st_dev, found.st_ino) in above:
            return
        above |= {(found.st_dev, found.st_ino)}
        if rest:
            yield from _matching(folder, rest, linked=linked)
    with os.scandir(folder or ".") as entries:
        names = [(entry.name, entry.is_dir(), linked or entry.is_symlink()) for entry in entries]
    for name, is_folder, is_linked in names:
        path = os.path.join(folder, name)
        is_hidden = name.startswith(".") and not first.startswith(".")
        if is_hidden or (first != "**" and not fnmatchcase(name, first)):
            continue
        if first == "**" and is_folder:
            yield from _matching(path, pattern, above, linked=is_linked)
        elif is_folder and rest:
            yield from _matching(path, rest, linked=is_linked)
        elif not is_folder and not rest:
            yield path, is_linked


def _mode(path: str) -> int:
    """Return the mode of a file, or link; 0 if there is none; raises OSError if it cannot be looked up."""
    try:
        return os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0


def _walked(root: str, folder: str) -> Iterator[tuple[Path, bool]]:
    """The files of a folder in a source, each with whether it is a link.

    Raises:
        OSError: a folder within it cannot be read, and is not left out anyway.
        DataError: a folder is a Delta table.
    """
    with os.scandir(folder) as entries:
        found = list(entries)  # whose types are known without looking up each file
    for entry in found:
        try:
            is_folder = entry.is_dir()
        except OSError:  # a link to itself
            is_folder = False
        if not is_folder:
            yield Path(entry.path), entry.is_symlink()
        elif entry.name == delta.LOG:
            raise DataError(f"{folder!r} within {root!r} is a Delta table; pass its path itself as a source")
        elif not entry.is_symlink() and not entry.name.startswith(_LEFT_OUT):
            yield from _walked(root, entry.path)


def _remote_files(storage: Storage, path: str, name: str, suffixes: Sequence[str]) -> _Files:
    from pyarrow import fs

    path = path.rstrip("/") or path
    (info,) = storage.call(name, lambda: storage.arrow.get_file_info([path]))
    if info.type == fs.FileType.Directory:
        root, pattern = path, []
    elif info.is_file or not glob.has_magic(path):
        return [(StoredFile(storage, path, storage.state_of(info) if info.is_file else None), {})]
    else:
        parts = path.split("/")
        first = next(number for number, part in enumerate(parts) if glob.has_magic(part))
        root, pattern = "/".join(parts[:first]), parts[first:]

    def enters(parts: Sequence[str]) -> bool:
        if pattern:
            return _leads_to(parts, pattern)
        return parts[-1] == delta.LOG or not parts[-1].startswith(_LEFT_OUT)

    skipped = len(parts_of(root))
    found = []
    for info in storage.files_in(root, enters):
        parts = info.path.strip("/").split("/")[skipped:]
        if not pattern and delta.LOG in parts:
            raise DataError(
                f"{name!r} is a Delta table, or has one; only tables in local folders are read as such; pass "
                "the files of its current version: deltalake.DeltaTable(uri, storage_options=...).file_uris()"
            )
        if _matches(parts, pattern) if pattern else _is_data(parts, suffixes):
            found.append((parts, StoredFile(storage, info.path, storage.state_of(info))))
    if not found and pattern:
        raise DataError(f"no file matches {name!r}")
    if not found:
        raise DataError(f"the folder {name!r} has no files that end in {', '.join(suffixes)}")
    found.sort(key=lambda item: item[0])
    return [(file, _partitions_in(parts)) for parts, file in found]


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether a path matches a pattern; names that begin with "." need such a pattern."""
    if not parts or not pattern:
        return not parts and all(part == "**" for part in pattern)
    if pattern[0] == "**" and (
        _matches(parts, pattern[1:]) or (not parts[0].startswith(".") and _matches(parts[1:], pattern))
    ):
        return True
    if parts[0].startswith(".") and not pattern[0].startswith("."):
        return False
    return pattern[0] != "**" and fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def _leads_to(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether files in a folder may match a pattern."""
    if not parts or not pattern:
        return bool(pattern)
    if parts[0].startswith(".") and not pattern[0].startswith("."):
        return pattern[0] == "**" and _leads_to(parts, pattern[1:])
    if pattern[0] == "**":
        return True
    return fnmatchcase(parts[0], pattern[0]) and _leads_to(parts[1:], pattern[1:])


def _partitions_in(parts: Sequence[str]) -> dict[str, str | None]:
    """The values of folders ``name=value``, which Hive and Spark write."""
    pairs = [part.split("=", 1) for part in parts[:-1] if "=" in part]
    return {unquote(name): None if value == _NULL else unquote(value) for name, value in pairs}


def _is_data(parts: Sequence[str], suffixes: Sequence[str]) -> bool:
    return parts[-1].endswith(tuple(suffixes)) and not any(part.startswith(_LEFT_OUT) for part in parts)


def in_threads(function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """The results of a function for each item, of many threads, which do not keep the program from ending.

    Raises:
        BaseException: that of the first item that has one. No item after it is begun then.
    """
    items = list(items)
    if len(items) < 2:
        return [function(item) for item in items]
    work = _Work(function, items)
    threads = [
        threading.Thread(target=work.run, name="polyhvd-footers", daemon=True)
        for _ in range(min(_THREADS, len(items)))
    ]
    for thread in threads:
        thread.start()
    results = work.results()
    deadline = time.monotonic() + _LAST_READ_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if isinstance(results, BaseException):
        raise results
    return results


class _Work(Generic[T, R]):
    """Items that several threads take, in order, until there are no more or one has failed."""

    def __init__(self, function: Callable[[T], R], items: Sequence[T]) -> None:
        self._function = function
        self._items = items
        self._results: dict[int, R] = {}
        self._error: BaseException | None = None
        self._begun = 0  # how many
        self._running: set[int] = set()
        self._end = len(items)  # of the items whose results are wanted: an error ends them
        self._changed = threading.Condition()

    def run(self) -> None:
        """Take items, in a thread."""
        with _Caller():
            self._take()

    def _take(self) -> None:
        while True:
            with self._changed:
                number = self._begun
                if number >= self._end:
                    return
                self._begun += 1
                self._running.add(number)
            error: BaseException | None = None
            try:
                self._results[number] = self._function(self._items[number])
            except BaseException as found:
                error = found
            with self._changed:
                self._running.remove(number)
                if error is not None and number < self._end:
                    self._end, self._error = number, error
                if self._is_done():  # or thousands of files would wake up the thread that waits
                    self._changed.notify_all()

    def results(self) -> list[R] | BaseException:
        """The results, or the error of the first item that has one."""
        try:
            with self._changed:
                wait_for(self._changed, self._is_done)
        except BaseException:  # Ctrl-C
            with self._changed:
                self._end = 0
            raise
        return self._error or [self._results[number] for number in range(self._end)]

    def _is_done(self) -> bool:
        return self._begun >= self._end and all(number >= self._end for number in self._running)
