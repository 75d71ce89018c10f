"""Where the data, checkpoints and logs of training on Spark lie: a folder of any file system of fsspec."""

from __future__ import annotations

import abc
import contextlib
import errno
import os
import posixpath
import uuid
from typing import Any, NamedTuple

from polyhvd.errors import DataError
from polyhvd.launch.job.function import in_a_line

__all__ = ["DBFSLocalStore", "FilesystemStore", "HDFSStore", "LocalStore", "Place", "Store"]

#: File systems that show a file when it is whole.
_WHOLE = frozenset(("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl"))
_HDFS = ("hdfs://", "webhdfs://", "viewfs://")


class Store(abc.ABC):
    """The places of the data and of the results of training; the methods are Horovod's.

    Example::

        store = polyhvd.spark.Store.create("s3://bucket/experiments")
        store.write(store.get_checkpoint_path("run-1"), data)
    """

    @staticmethod
    def create(prefix_path: str, *args: Any, **kwargs: Any) -> Store:
        """Make the store that a prefix calls for.

        Args:
            prefix_path: a folder; ``dbfs:/`` and ``/dbfs/`` are Databricks', ``hdfs://`` is Hadoop's, and
                others are those of fsspec, or local ones.
            args: further positional arguments of the class.
            kwargs: further keyword arguments of the class.

        Raises:
            DataError: the file system cannot be opened.
        """
        if DBFSLocalStore.matches(prefix_path):
            return DBFSLocalStore(prefix_path, *args, **kwargs)
        if prefix_path.startswith(_HDFS):
            return HDFSStore(prefix_path, *args, **kwargs)
        return FilesystemStore(prefix_path, *args, **kwargs)

    @abc.abstractmethod
    def get_train_data_path(self, idx: int | None = None) -> str:
        """The folder of the training data; with ``idx``, that of a data set of several."""

    @abc.abstractmethod
    def get_val_data_path(self, idx: int | None = None) -> str:
        """The same of the validation data."""

    @abc.abstractmethod
    def get_test_data_path(self, idx: int | None = None) -> str:
        """The same of the test data."""

    @abc.abstractmethod
    def saving_runs(self) -> bool:
        """Return whether checkpoints and logs of runs are kept."""

    @abc.abstractmethod
    def get_runs_path(self) -> str:
        """The folder of all runs."""

    @abc.abstractmethod
    def get_run_path(self, run_id: str) -> str:
        """The folder of a run."""

    @abc.abstractmethod
    def get_checkpoint_path(self, run_id: str) -> str | None:
        """The file of a run's checkpoint; None: runs are not kept."""

    @abc.abstractmethod
    def get_logs_path(self, run_id: str) -> str | None:
        """The folder of a run's logs; None: runs are not kept."""

    @abc.abstractmethod
    def get_checkpoint_filename(self) -> str:
        """The name of a run's checkpoint in its folder."""

    @abc.abstractmethod
    def get_logs_subdir(self) -> str:
        """The name of a run's logs in its folder."""

    @abc.abstractmethod
    def exists(self, path: str) -> bool:
        """Return whether there is a file or folder.

        Raises:
            DataError: the file system reports another error than a missing file.
        """

    @abc.abstractmethod
    def read(self, path: str) -> bytes:
        """The bytes of a file.

        Raises:
            DataError: it cannot be read.
        """

    @abc.abstractmethod
    def write(self, path: str, data: bytes) -> None:
        """Write a file, which others see whole or not at all.

        Raises:
            DataError: it cannot be written. :meth:`read` returns the former content. On file systems that
                cannot replace a file, such as Hadoop's, it may then lie beside the path.
        """

    def write_text(self, path: str, text: str) -> None:
        """The same of a text, in UTF-8."""
        self.write(path, text.encode())

    @abc.abstractmethod
    def is_parquet_dataset(self, path: str) -> bool:
        """Return whether a path is a file of Parquet, or a folder that has such."""

    @abc.abstractmethod
    def get_parquet_dataset(self, path: str) -> Any:
        """The ``pyarrow.parquet.ParquetDataset`` of a path.

        Raises:
            DataError: it is none.
        """


class Place(NamedTuple):
    """The location of a file or folder, for :class:`polyhvd.data.ParquetLoader` and ``write_parquet``.

    Args:
        path: in the file system.
        filesystem: of fsspec; None: the local one.
    """

    path: str
    filesystem: Any


class FilesystemStore(Store):
    """A store in a file system of fsspec.

    Args:
        prefix_path: the folder that has all others, as a URL or a local path.
        train_path: in place of ``prefix/intermediate_train_data``.
        val_path: in place of ``prefix/intermediate_val_data``.
        test_path: in place of ``prefix/intermediate_test_data``.
        runs_path: in place of ``prefix/runs``.
        save_runs: whether checkpoints and logs are kept.
        storage_options: of the file system, for fsspec.

    Raises:
        DataError: the file system cannot be opened.
        ValueError: a path is in another file system than the prefix.
    """

    def __init__(
        self,
        prefix_path: str,
        train_path: str | None = None,
        val_path: str | None = None,
        test_path: str | None = None,
        runs_path: str | None = None,
        save_runs: bool = True,
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        try:
            from fsspec.core import url_to_fs

            self._filesystem, _ = url_to_fs(prefix_path, **(storage_options or {}))
        except Exception as error:  # of packages that are missing, and of their options
            raise DataError(f"the file system of {prefix_path!r} cannot be opened: {error}") from error
        self._known = {*self._protocols(), _protocol_of(prefix_path)}
        self.prefix_path = self._absolute(prefix_path)
        self._save_runs = save_runs
        self._train_path = self._absolute(train_path or self._below("intermediate_train_data"))
        self._val_path = self._absolute(val_path or self._below("intermediate_val_data"))
        self._test_path = self._absolute(test_path or self._below("intermediate_test_data"))
        self._runs_path = self._absolute(runs_path or self._below("runs"))

    @property
    def fs(self) -> Any:
        """The file system, of fsspec."""
        return self._filesystem

    def _below(self, name: str) -> str:
        return posixpath.join(self.prefix_path, name)

    def _absolute(self, path: str) -> str:
        """The path on every executor, each of which has its own working directory."""
        protocol = _protocol_of(path)
        if protocol and protocol not in self._known:  # it would become the name of a folder
            known = ", ".join(sorted(filter(None, self._known)))
            raise ValueError(
                f"{type(self).__name__}: {path!r} is not in the file system of the prefix ({known}); "
                "expected all paths in one file system"
            )
        is_local = "file" in self._protocols() and not protocol
        return os.path.abspath(os.path.expanduser(path)) if is_local else path

    def get_train_data_path(self, idx: int | None = None) -> str:
        """Implement :meth:`Store.get_train_data_path`."""
        return _numbered(self._train_path, idx)

    def get_val_data_path(self, idx: int | None = None) -> str:
        """Implement :meth:`Store.get_val_data_path`."""
        return _numbered(self._val_path, idx)

    def get_test_data_path(self, idx: int | None = None) -> str:
        """Implement :meth:`Store.get_test_data_path`."""
        return _numbered(self._test_path, idx)

    def saving_runs(self) -> bool:
        """Implement :meth:`Store.saving_runs`."""
        return self._save_runs

    def get_runs_path(self) -> str:
        """Implement :meth:`Store.get_runs_path`."""
        return self._runs_path

    def get_run_path(self, run_id: str) -> str:
        """Implement :meth:`Store.get_run_path`."""
        return posixpath.join(self._runs_path, run_id)

    def get_checkpoint_path(self, run_id: str) -> str | None:
        """Implement :meth:`Store.get_checkpoint_path`."""
        return self._of_run(run_id, self.get_checkpoint_filename())

    def get_logs_path(self, run_id: str) -> str | None:
        """Implement :meth:`Store.get_logs_path`."""
        return self._of_run(run_id, self.get_logs_subdir())

    def _of_run(self, run_id: str, name: str) -> str | None:
        return posixpath.join(self.get_run_path(run_id), name) if self._save_runs else None

    def get_checkpoint_filename(self) -> str:
        """Implement :meth:`Store.get_checkpoint_filename`."""
        return "checkpoint"

    def get_logs_subdir(self) -> str:
        """Implement :meth:`Store.get_logs_subdir`."""
        return "logs"

    def exists(self, path: str) -> bool:
        """Implement :meth:`Store.exists`."""
        self._filesystem.invalidate_cache()
        try:
            return self._is_there(self._found(path))
        except Exception as error:  # of file systems
            raise DataError(f"cannot check whether {path!r} exists: {in_a_line(error)}") from error

    def _is_there(self, path: str) -> bool:
        """Return whether there is a file or folder; fsspec's own ``exists`` returns False after any error."""
        try:
            self._filesystem.info(path)
        except OSError as error:
            # The errors of smb:// are not FileNotFoundErrors.
            if not isinstance(error, FileNotFoundError) and error.errno not in (errno.ENOENT, errno.ENOTDIR):
                raise
            return False
        return True

    def read(self, path: str) -> bytes:
        """Implement :meth:`Store.read`."""
        self._filesystem.invalidate_cache()
        try:
            return bytes(self._filesystem.cat_file(self._found(path)))
        except Exception as error:  # of file systems
            raise DataError(f"{path!r} cannot be read: {in_a_line(error)}") from error

    def write(self, path: str, data: bytes) -> None:
        """Implement :meth:`Store.write`."""
        folder, name = posixpath.split(path)
        kinds = self._protocols()
        written = path if kinds & _WHOLE else posixpath.join(folder, f".{name}.{uuid.uuid4().hex}")
        try:
            try:
                self._filesystem.makedirs(folder, exist_ok=True)
                self._filesystem.pipe_file(written, data)
                if "file" in kinds:
                    local = self._filesystem._strip_protocol
                    with open(local(written), "rb") as file:
                        os.fsync(file.fileno())  # else a host that crashes can lose both contents
                    os.replace(local(written), local(path))
                elif written != path:
                    self._replace(path, written)
            except BaseException:
                if written != path:
                    with contextlib.suppress(Exception):
                        self._filesystem.rm_file(written)
                raise
        except Exception as error:  # of file systems
            raise DataError(f"{path!r} cannot be written: {in_a_line(error)}") from error

    def _replace(self, path: str, written: str) -> None:
        """Move a file to a path, which may be another's: Hadoop's does not replace that one.

        Whatever ends this, the former content is whole until the other one is at the path.
        """
        former = self._former(path)
        if self._is_there(path):
            if self._is_there(former):
                self._filesystem.rm_file(former)  # which the last write has left
            self._filesystem.mv(path, former)
        self._filesystem.mv(written, path)
        with contextlib.suppress(Exception):  # the next write removes it
            self._filesystem.rm_file(former)

    @staticmethod
    def _former(path: str) -> str:
        folder, name = posixpath.split(path)
        return posixpath.join(folder, f".{name}.former")

    def _found(self, path: str) -> str:
        """Return the path of a file's content: an interrupted write may have left it beside the path."""
        if self._protocols() & (_WHOLE | {"file"}) or self._is_there(path):
            return path
        former = self._former(path)
        return former if self._is_there(former) else path

    def locate(self, path: str) -> Place:
        """The place of a path of this store."""
        return Place(
            self._filesystem._strip_protocol(path), None if "file" in self._protocols() else self._filesystem
        )

    def remove(self, path: str) -> None:
        """Remove a file or folder, if there is one.

        Raises:
            DataError: it cannot be removed.
        """
        self._filesystem.invalidate_cache()
        try:
            for found in (self._former(path), path):
                if self._is_there(found):
                    self._filesystem.rm(found, recursive=True)
        except Exception as error:  # of file systems
            raise DataError(f"{path!r} cannot be removed: {in_a_line(error)}") from error

    def _protocols(self) -> set[str]:
        protocol = self._filesystem.protocol
        return {protocol} if isinstance(protocol, str) else set(protocol)

    def is_parquet_dataset(self, path: str) -> bool:
        """Implement :meth:`Store.is_parquet_dataset`."""
        try:
            return bool(self.get_parquet_dataset(path).files)
        except DataError:
            return False

    def get_parquet_dataset(self, path: str) -> Any:
        """Implement :meth:`Store.get_parquet_dataset`."""
        import pyarrow.parquet as pq

        self._filesystem.invalidate_cache()
        try:
            found = pq.ParquetDataset(self._filesystem._strip_protocol(path), filesystem=self._filesystem)
            _ = found.schema
            return found
        except Exception as error:  # of file systems and of pyarrow
            raise DataError(f"{path!r} is not a data set of Parquet: {in_a_line(error)}") from error


class LocalStore(FilesystemStore):
    """A store in a folder that all executors see under the same path, such as one of NFS."""


class HDFSStore(FilesystemStore):
    """A store in Hadoop's file system.

    Args:
        prefix_path: a URL ``hdfs://host:port/path``, or a path with ``host``.
        host: of the name node; None: that of the URL, or of Hadoop's configuration.
        port: likewise.
        user: by whose name to read and write; None: this process's.
        kerb_ticket: the path of the ticket cache of Kerberos.
        driver: has no effect: pyarrow has one.
        extra_conf: of Hadoop.
        options: the other arguments of :class:`FilesystemStore`.

    Raises:
        DataError: the file system cannot be opened, such as without libhdfs.
    """

    def __init__(
        self,
        prefix_path: str,
        host: str | None = None,
        port: int | None = None,
        user: str | None = None,
        kerb_ticket: str | None = None,
        driver: str = "libhdfs",
        extra_conf: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        url = prefix_path if "://" in prefix_path else f"hdfs://{prefix_path}"
        given: dict[str, Any] = {"host": host, "port": port, "user": user}
        given.update(kerb_ticket=kerb_ticket, extra_conf=extra_conf)
        chosen = {name: value for name, value in given.items() if value is not None}
        storage = {**chosen, **(options.pop("storage_options", None) or {})}
        super().__init__(url, storage_options=storage, **options)


class DBFSLocalStore(FilesystemStore):
    """A store in Databricks' file system, by its local folder ``/dbfs``.

    Args:
        prefix_path: ``dbfs:/path``, ``/dbfs/path`` or ``file:///dbfs/path``.
        options: the other arguments of :class:`FilesystemStore`.
    """

    def __init__(self, prefix_path: str, *args: Any, **options: Any) -> None:
        super().__init__(self.normalize_path(prefix_path), *args, **options)

    def _absolute(self, path: str) -> str:
        return super()._absolute(self.normalize_path(path))

    @staticmethod
    def matches(path: str) -> bool:
        """Return whether a path is one of Databricks' file system."""
        return path.startswith(("dbfs:/", "/dbfs/", "file:///dbfs/"))

    @staticmethod
    def normalize_path(path: str) -> str:
        """The local path.

        Example::

            DBFSLocalStore.normalize_path("dbfs:/tmp/x")  # "/dbfs/tmp/x"
        """
        if path.startswith("dbfs:/"):
            return "/dbfs/" + path.removeprefix("dbfs:").lstrip("/")
        return path.removeprefix("file://")


def _numbered(path: str, idx: int | None) -> str:
    return path if idx is None else f"{path}.{idx}"


def _protocol_of(path: str) -> str:
    name, colon, _ = path.partition("/")[0].partition(":")
    return name if colon else ""
