"""A store in a folder of a file system that all hosts share.

Each value is a separate file, written under a temporary name and then linked to its final one: the first
writer wins, and no reader sees half a value, over NFS too. There are no locks. Whoever makes the folder
removes it; a rank that is killed leaves its own values, and perhaps a temporary file, behind.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import stat
import string
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from polyhvd.rendezvous.keyed import KeyedStore
from polyhvd.rendezvous.records import RECORD_BYTES_MAX, Record, seal, unseal
from polyhvd.rendezvous.store import StoreError, job_name

__all__ = ["FolderStore"]

_READ_BYTES = 1 << 20
_NAME_CHARS_MAX = 200  # of the 255 that file systems allow
_SAFE = frozenset(f"{string.ascii_lowercase}{string.digits}-_".encode())
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OWNER_ONLY = 0o700
_NO_HARD_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP)
_JOB = "job"  # the name of the file that identifies the job of a folder


class FolderStore(KeyedStore):
    """One rank's access to values that are files of a folder.

    The folder is made, with mode 0700, where it is not there yet; the one above it has to be. The file
    system needs hard links, as local ones, NFS, Lustre and GPFS have them. A mount that waits for its server
    forever (``hard``) makes every method wait, too.

    Args:
        path: of the folder, which belongs only to this job. It may differ from host to host.
        secret: the job's.
        rank: this process's, or ``auth.NO_RANK``.
        address: of this host, as the other ranks reach it; empty: not known.

    Raises:
        StoreError: the folder cannot be made, or used, or others than its owner may write there.
    """

    def __init__(self, path: str | os.PathLike[str], secret: bytes, rank: int, *, address: str = "") -> None:
        self._folder = _Folder(os.path.abspath(os.fspath(path)))
        try:
            place = self._agree_on_place(secret)
        except BaseException:
            self._folder.close()
            raise
        super().__init__(secret, rank, job=job_name(place, secret), address=address)

    def _agree_on_place(self, secret: bytes) -> str:
        """A random word that the first rank leaves: paths differ between hosts and are used again."""
        word = secrets.token_bytes(16)
        if not self._folder.create(_JOB, seal(Record(word, 0, bytes(16), False), secret, "", _JOB)):
            self._folder.refresh()  # another rank was first
        data = self._folder.read(_JOB)
        try:
            return unseal(data or b"", secret, "", _JOB).value.hex()
        except StoreError:
            raise StoreError(
                f"{self._folder.name(_JOB)} is of a job with another secret, or damaged; "
                "give each job a separate folder"
            ) from None

    def _create(self, key: str, data: bytes) -> bool:
        return self._folder.create(_file_name(key), data)

    def _replace(self, key: str, data: bytes) -> None:
        self._folder.replace(_file_name(key), data)

    def _read(self, key: str) -> bytes | None:
        return self._folder.read(_file_name(key))

    def _remove(self, key: str) -> None:
        self._folder.remove(_file_name(key))

    def _refresh(self) -> None:
        self._folder.refresh()

    def _release(self) -> None:
        self._folder.close()

    def _place(self, key: str) -> str:
        return self._folder.name(_file_name(key))


class _Folder:
    """An open folder. Its methods turn every OSError into a StoreError that names the file."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptor = -1
        try:
            with suppress(FileExistsError):
                os.mkdir(path, _OWNER_ONLY)
            self._descriptor = self._open()
            self._check_private()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError) and not isinstance(error, StoreError):
                raise self._error("", error) from error
            raise

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def name(self, file: str) -> str:
        return os.path.join(self._path, file)

    def create(self, file: str, data: bytes) -> bool:
        """Write a file unless there is one of this name; whether it was written."""
        with self._temporary(file, data) as temporary:
            return self._link(temporary, file)

    def replace(self, file: str, data: bytes) -> None:
        """Write a file in the place of one of this name."""
        with self._temporary(file, data) as temporary:
            os.rename(temporary, file, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)

    def read(self, file: str) -> bytes | None:
        """A file's bytes; None where there is none."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO is not waited for
        try:
            descriptor = os.open(file, flags, dir_fd=self._descriptor)
            try:
                return self._contents(file, descriptor)
            finally:
                os.close(descriptor)
        except StoreError:
            raise
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno == errno.ESTALE:  # removed on another host in this very moment
                return None
            raise self._error(file, error) from error

    def remove(self, file: str) -> None:
        """Remove a file, if there is one."""
        try:
            with suppress(FileNotFoundError):
                os.unlink(file, dir_fd=self._descriptor)
        except OSError as error:
            raise self._error(file, error) from error

    def refresh(self) -> None:
        """See what other hosts have done, and that the folder is still there.

        NFS remembers which names were absent, for up to a minute; opening the folder by its path asks the
        server whether it has changed since.
        """
        try:
            descriptor = self._open()
            try:
                same = os.path.samestat(os.fstat(descriptor), os.fstat(self._descriptor))
            finally:
                os.close(descriptor)
        except OSError as error:
            raise self._error("", error) from error
        if not same:
            raise StoreError(f"{self._path}: another folder has taken its place")

    def _open(self) -> int:
        return os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def _check_private(self) -> None:
        """Values are sealed, but other users with write access could remove them and stop the job."""
        folder = os.fstat(self._descriptor)
        if folder.st_uid == os.geteuid() and not folder.st_mode & _OTHERS_WRITE:
            return
        # A file server may map owners and modes. A new file shows how.
        temporary = f"t-{secrets.token_hex(16)}"
        try:
            self._write(temporary, b"")
            mine = os.stat(temporary, dir_fd=self._descriptor, follow_symlinks=False)
        finally:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=self._descriptor)
        keeps_modes = not mine.st_mode & _OTHERS_WRITE
        if folder.st_uid != mine.st_uid or (folder.st_mode & _OTHERS_WRITE and keeps_modes):
            raise StoreError(
                f"{self._path}: others may write here (owner {folder.st_uid}, mode "
                f"{stat.S_IMODE(folder.st_mode):04o}); name a folder of this user's with mode 0700, or one "
                "that is not there yet"
            )

    def _write(self, file: str, data: bytes) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(file, flags, 0o600, dir_fd=self._descriptor)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        finally:
            os.close(descriptor)  # NFS sends the bytes now, and reports now whether there was room

    @contextmanager
    def _temporary(self, file: str, data: bytes) -> Iterator[str]:
        """A new file for the block, under a temporary name."""
        temporary = f"t-{secrets.token_hex(16)}"
        try:
            try:
                self._write(temporary, data)
                yield temporary
            finally:
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=self._descriptor)
        except StoreError:
            raise
        except OSError as error:
            raise self._error(file, error) from error

    def _link(self, temporary: str, file: str) -> bool:
        folder = self._descriptor
        try:
            os.link(temporary, file, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
        except OSError as error:
            # The server's answer to a first, successful try may have been lost.
            if os.stat(temporary, dir_fd=folder, follow_symlinks=False).st_nlink == 2:
                return True
            if isinstance(error, FileExistsError):
                return False
            if error.errno in _NO_HARD_LINKS:
                raise StoreError(
                    f"{self._path}: the file system has no hard links, which a store needs"
                ) from None
            raise
        return True

    def _contents(self, file: str, descriptor: int) -> bytes:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise StoreError(f"{self.name(file)} is not a regular file")
        if found.st_size > RECORD_BYTES_MAX:
            raise StoreError(f"{self.name(file)} is too long for a value: {found.st_size} bytes")
        data = bytearray()
        while len(data) < found.st_size:
            part = os.read(descriptor, min(_READ_BYTES, found.st_size - len(data)))
            if not part:
                break  # truncated: the seal will not fit
            data += part
        return bytes(data)

    def _error(self, file: str, error: OSError) -> StoreError:
        return StoreError(f"{self.name(file) if file else self._path}: {error.strerror or error}")


def _file_name(key: str) -> str:
    """A name without dots, slashes and capitals, for file systems that know no difference.

    Different keys have different names: what is not safe is written as the number of its byte.
    """
    data = key.encode("utf-8", "surrogatepass")
    name = "".join(chr(byte) if byte in _SAFE else f"%{byte:02x}" for byte in data)
    return f"v-{name}" if len(name) <= _NAME_CHARS_MAX else f"h-{hashlib.sha256(data).hexdigest()}"
