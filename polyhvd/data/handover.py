"""Objects that go from one process to another in shared memory.

The memory is an anonymous file (``memfd_create``) whose descriptor is sent with the message: it has no name
and is not in /dev/shm, and the system frees it with the last process that has it, however that ends.
"""

from __future__ import annotations

import errno
import mmap
import os
import pickle
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

__all__ = ["UnreadableError", "receive", "send"]

#: Number of the message, bytes of the memory, parts in it.
_HEADER = struct.Struct("<qqq")
_LENGTH = struct.Struct("<q")
_REFUSED_S = 0.005
_ALIGNMENT = 64  # of arrays, for vector instructions


class UnreadableError(Exception):
    """A message has arrived, and its object cannot be made of it.

    Args:
        number: of the message.
        reason: the error.
    """

    def __init__(self, number: int, reason: Exception) -> None:
        super().__init__(number, reason)
        self.number = number
        self.reason = reason


def send(
    connection: socket.socket, number: int, value: Any, dumps: Callable[..., bytes] = pickle.dumps
) -> None:
    """Send an object; the bytes of arrays in it are copied once.

    Args:
        connection: of type ``SOCK_SEQPACKET``.
        number: of the message.
        value: can be pickled. A buffer in it is handed over as shared memory, not as pickled bytes.
        dumps: ``pickle.dumps``, or that of cloudpickle.

    Raises:
        OSError: the other process has ended, or there is no memory.
        Exception: the object cannot be pickled; nothing was sent.
    """
    buffers: list[pickle.PickleBuffer] = []
    body = dumps(value, protocol=5, buffer_callback=buffers.append)
    parts = [memoryview(body), *(buffer.raw() for buffer in buffers)]
    memory = os.memfd_create("polyhvd-data", os.MFD_CLOEXEC)
    try:
        for part in parts:
            size = os.lseek(memory, -os.lseek(memory, 0, os.SEEK_CUR) % _ALIGNMENT, os.SEEK_CUR)
            while part:
                written = os.write(memory, part)
                part, size = part[written:], size + written
        lengths = b"".join(_LENGTH.pack(part.nbytes) for part in parts)
        size += os.write(memory, lengths)
        header = _HEADER.pack(number, size, len(parts))
        while True:
            try:
                socket.send_fds(connection, [header], [memory])
                return
            except OSError as error:  # too many descriptors of this user were sent and not yet received
                if error.errno != errno.ETOOMANYREFS:
                    raise
            time.sleep(_REFUSED_S)
    finally:
        os.close(memory)


def receive(connection: socket.socket) -> tuple[int, Any, int]:
    """The number of a message, the object, and the bytes of its memory.

    Arrays of the object lie in the shared memory, which is freed with the last of them. The sender does not
    use it any more.

    Raises:
        EOFError: the other process has ended.
        UnreadableError: the object cannot be unpickled, or this process has too many open files or no memory.
    """
    header, descriptors, _, _ = socket.recv_fds(connection, _HEADER.size, 1)
    if not header:
        raise EOFError("the other process has ended")
    number, size, count = _HEADER.unpack(header)
    if not descriptors:
        text = "this process has too many open files (ulimit -n) to receive another one"
        raise UnreadableError(number, RuntimeError(text))
    (memory,) = descriptors
    try:
        view = memoryview(mmap.mmap(memory, size))
    except OSError as error:
        raise UnreadableError(number, error) from error
    finally:
        os.close(memory)
    parts, end = [], 0
    for (length,) in _LENGTH.iter_unpack(view[size - count * _LENGTH.size :]):
        begin = end + -end % _ALIGNMENT
        end = begin + length
        parts.append(view[begin:end])
    try:
        return number, pickle.loads(parts[0], buffers=parts[1:]), size
    except Exception as error:
        text = f"an object from another process cannot be unpickled, which workers= needs: {error!r}"
        raise UnreadableError(number, TypeError(text)) from error
