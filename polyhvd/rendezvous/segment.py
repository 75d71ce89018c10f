"""Memory that the ranks of a host share: a sealed memfd, passed over a Unix socket.

It has no name, so nothing is left of it after a crash, and no size limit of /dev/shm applies.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct

__all__ = ["make_segment", "receive_segment", "send_segment"]

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_INT = struct.Struct("i")
_HERE, _NONE = b"M", b"-"


def make_segment(size: int) -> int:
    """A zeroed memfd of ``size`` bytes that cannot be resized any more; raises OSError."""
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    descriptor = os.memfd_create("polyhvd", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def send_segment(connection: socket.socket, descriptor: int) -> None:
    """Pass a descriptor to the other end; -1 if there is none. Raises OSError."""
    if descriptor < 0:
        connection.send(_NONE, socket.MSG_NOSIGNAL)
    else:
        socket.send_fds(connection, [_HERE], [descriptor], socket.MSG_NOSIGNAL)


def receive_segment(connection: socket.socket, size: int) -> int | None:
    """The descriptor that the other end passes, or None while it has not; raises OSError.

    ``connection`` is non-blocking; exactly the one byte that carries the descriptor is read.
    """
    space = socket.CMSG_LEN(_INT.size)
    try:  # not socket.recv_fds, which ignores its flags
        data, ancillary, _, _ = connection.recvmsg(1, space, socket.MSG_CMSG_CLOEXEC)
    except BlockingIOError:
        return None
    descriptors = [
        int(_INT.unpack(rights)[0])
        for level, kind, rights in ancillary
        if (level, kind, len(rights)) == (socket.SOL_SOCKET, socket.SCM_RIGHTS, _INT.size)
    ]
    try:
        if not descriptors:
            raise OSError("the host's first rank closed the connection" if not data else "it made no memory")
        found = os.fstat(descriptors[0]).st_size
        seals = fcntl.fcntl(descriptors[0], fcntl.F_GET_SEALS)
        if found != size or seals & _SEALS != _SEALS:
            raise OSError(
                f"the shared memory has {found} bytes and seals {seals}, expected {size} and {_SEALS}"
            )
    except OSError:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return descriptors[0]
