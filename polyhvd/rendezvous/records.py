"""A value as it lies in a store that others may write to: with its writer, sealed with the secret.

The seal covers the job and the key, so that a value that is torn, forged, or was put under another name
is found out. It hides nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass

from polyhvd.rendezvous.store import VALUE_BYTES_MAX, StoreError

__all__ = ["RECORD_BYTES_MAX", "Record", "seal", "unseal"]

_MAGIC = b"polyval\x01"  # the last byte is the version of this format
_HEADER = struct.Struct("!8s16si?")
_SEAL_BYTES = hashlib.sha256().digest_size
_PURPOSE = b"polyhvd: a value in a store"  # no other proof of this secret begins so

#: The most that a record takes.
RECORD_BYTES_MAX = _HEADER.size + _SEAL_BYTES + VALUE_BYTES_MAX


@dataclass(frozen=True)
class Record:
    """A value and its writer."""

    value: bytes
    rank: int
    writer: bytes  # 16 bytes, different for each process of one rank
    own: bool  # goes when its writer closes the store


def seal(record: Record, secret: bytes, job: str, key: str) -> bytes:
    """The record's bytes under a key of a job."""
    header = _HEADER.pack(_MAGIC, record.writer, record.rank, record.own)
    return b"".join((header, _seal(secret, job, key, header, record.value), record.value))


def unseal(data: bytes, secret: bytes, job: str, key: str) -> Record:
    """Read what :func:`seal` has made.

    Raises:
        StoreError: the bytes are incomplete, or were not sealed with this secret for this job and key.
    """
    value = data[_HEADER.size + _SEAL_BYTES :]
    found = data[_HEADER.size : _HEADER.size + _SEAL_BYTES]
    if not hmac.compare_digest(found, _seal(secret, job, key, data[: _HEADER.size], value)):
        raise StoreError("is incomplete, or no value of this job")
    magic, writer, rank, own = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise StoreError("was written by another version")
    return Record(value, rank, writer, own)


def _seal(secret: bytes, job: str, key: str, header: bytes, value: bytes) -> bytes:
    digest = hmac.new(secret, _PURPOSE, hashlib.sha256)
    for text in (job, key):
        data = text.encode("utf-8", "surrogatepass")
        digest.update(struct.pack("!I", len(data)) + data)
    digest.update(header)
    digest.update(value)
    return digest.digest()
