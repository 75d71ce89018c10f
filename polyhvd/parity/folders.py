"""Folders for the files of a command, removed however the command ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["NoRoomError", "WorkFolder", "is_full", "work_folder"]

_OWNER = "owner"
#: Waits until no process holds the folder, and removes it: a process killed with -9 cannot.
_HEIR = (
    "import fcntl, shutil, sys\n"
    "fcntl.flock(0, fcntl.LOCK_EX)\n"
    "shutil.rmtree(sys.argv[1], ignore_errors=True)\n"
)
#: What a file of results takes.
_ROOM = 64 * 1024


class NoRoomError(OSError):
    """There is not enough room for files; as text, in one line, where."""


@dataclass(frozen=True)
class WorkFolder:
    """A folder that is removed when all processes that hold it have ended.

    Args:
        path: of the folder.
        held_by: a descriptor; processes that inherit it hold the folder as well.
    """

    path: Path
    held_by: int


def _no_room(folder: str) -> NoRoomError:
    return NoRoomError(
        f"no room in TMPDIR, which is {folder}: free some of it, or set TMPDIR to a folder with more"
    )


def is_full(folder: Path) -> bool:
    """Return whether the file system of a folder has no room for results."""
    state = os.statvfs(folder)
    return state.f_bavail * state.f_frsize < _ROOM or (state.f_files > 0 and state.f_favail == 0)


@contextlib.contextmanager
def work_folder(prefix: str, parent: Path | None = None) -> Iterator[WorkFolder]:
    """A folder for as long as the block runs.

    If this process is killed, a separate process removes the folder as soon as all processes that inherited
    ``held_by`` have ended. If that process was killed too, the folder is removed when the next one with this
    prefix is made.

    Args:
        prefix: of its name.
        parent: the folder in which it is made; None: where temporary files go.

    Raises:
        NoRoomError: there is not enough room for it, or what the block wrote found none.
    """
    try:
        place = str(parent or tempfile.gettempdir())
    except FileNotFoundError:  # which tries to write
        raise NoRoomError(
            "no room in TMPDIR, nor in any other folder for temporary files: set TMPDIR to one with room"
        ) from None
    path: Path | None = None
    with contextlib.ExitStack() as stack:
        try:
            _sweep(Path(place), prefix)
            path = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
            stack.callback(shutil.rmtree, path, ignore_errors=True)
            unlocked = path / f"{_OWNER}.new"
            owner = os.open(unlocked, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, owner)
            fcntl.flock(owner, fcntl.LOCK_EX)
            unlocked.rename(path / _OWNER)  # no process can find it unlocked
            heir = _heir(path)
            try:
                yield WorkFolder(path, owner)
            finally:
                heir.kill()  # this process removes the folder
                heir.wait()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise _no_room(place) from None


def _heir(path: Path) -> subprocess.Popen[bytes]:
    with (path / _OWNER).open("rb") as file:  # a second open: it does not share the lock that is held
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _HEIR, str(path)],
            stdin=file,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # signals to this process's group do not reach it
        )


def _sweep(parent: Path, prefix: str) -> None:
    """Remove folders whose owner was killed together with the process that would have removed them."""
    for path in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            state = path.lstat()
            if not path.is_dir() or path.is_symlink() or state.st_uid != os.geteuid():
                continue
            if _is_abandoned(path):
                shutil.rmtree(path, ignore_errors=True)


def _is_abandoned(path: Path) -> bool:
    owner = os.open(path / _OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(owner)
    return True
