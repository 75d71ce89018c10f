"""The mutual challenge that opens every connection of a job.

Both sides prove that they know the job's secret before any other byte is parsed. The messages have
fixed sizes and carry no length, so an unauthenticated peer cannot cause any allocation. Nothing is
encrypted. From the handshake both sides have the keys of a session, one for each direction, that no
other connection has; with them they sign what follows, see :mod:`polyhvd.rendezvous.signed_stream`.

::

    caller                                answerer
    hello: magic, greeting, nonce  ----->
                                   <-----   magic, nonce, proof of the answerer
    proof of the caller            ----->

The machines here do no input or output; :mod:`polyhvd.rendezvous.handshakes` drives them.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
import struct
import time
from dataclasses import dataclass, field

__all__ = [
    "NO_RANK",
    "OTHER_SECRET",
    "REFUSAL",
    "Answerer",
    "AuthError",
    "Caller",
    "Greeting",
    "SessionKeys",
    "derive_secret",
    "new_secret",
    "parse_secret",
    "prove",
]

#: Stands where a rank would: for the store's server, and for a launcher.
NO_RANK = -1
#: In place of a caller's proof, to an answerer that does not know the secret: so it learns of that, too.
REFUSAL = bytes(32)
#: The text of an AuthError about a peer that speaks this protocol, and does not know the secret.
OTHER_SECRET = "the peer does not have this job's secret"

_NAME = b"polyhvd"
_MAGIC = _NAME + b"\x02"  # the last byte is the version of this protocol
_SECRET_BYTES_MIN = 16
_GREETING = struct.Struct("!16sQii")
_HELLO = struct.Struct(f"!8s{_GREETING.size}s32s")
_ANSWER = struct.Struct("!8s32s32s")
_PROOF_BYTES = 32
_SIDES = (b"caller", b"answerer")


class AuthError(OSError):
    """The peer did not prove that it belongs to this job."""


@dataclass(frozen=True)
class Greeting:
    """The purpose of a connection: signed by both sides, so that a stale or crossed one fails."""

    purpose: str  # ASCII, at most 16 characters
    generation: int
    source: int  # rank of the side that connects
    target: int  # rank of the side that accepts

    def pack(self) -> bytes:
        """The greeting in its fixed size."""
        return _GREETING.pack(self.purpose.encode("ascii"), self.generation, self.source, self.target)

    @classmethod
    def unpack(cls, data: bytes) -> Greeting:
        """Read a greeting; raises :class:`AuthError` where it is not one."""
        purpose, generation, source, target = _GREETING.unpack(data)
        try:
            text = purpose.rstrip(b"\0").decode("ascii")
        except UnicodeDecodeError:
            raise AuthError("the peer speaks another protocol") from None
        return cls(text, generation, source, target)


@dataclass(frozen=True)
class SessionKeys:
    """The keys with which one side of a connection signs, and checks the signatures of the other."""

    send: bytes = field(repr=False)
    receive: bytes = field(repr=False)


def new_secret() -> str:
    """A fresh secret for one job, in hexadecimal."""
    return secrets.token_hex(32)


def parse_secret(text: str) -> bytes:
    """The secret's bytes; raises ValueError unless it is hexadecimal and long enough."""
    try:
        secret = bytes.fromhex(text.strip())
    except ValueError:
        raise ValueError("the job's secret must be hexadecimal") from None
    if len(secret) < _SECRET_BYTES_MIN:
        raise ValueError(f"the job's secret must have at least {_SECRET_BYTES_MIN} bytes")
    return secret


def derive_secret(secret: bytes, purpose: str) -> bytes:
    """A separate secret for ``purpose``, which does not reveal ``secret``: one user's jobs differ."""
    return hmac.new(secret, purpose.encode(), hashlib.sha256).digest()


def _proof(secret: bytes, role: bytes, hello: bytes, nonce: bytes) -> bytes:
    return hmac.new(secret, role + hello + nonce, hashlib.sha256).digest()


def _session_key(secret: bytes, direction: bytes, hello: bytes, nonce: bytes) -> bytes:
    return _proof(secret, b"session key of what the " + direction + b" sends", hello, nonce)


def _check_magic(magic: bytes) -> None:
    if magic == _MAGIC:
        return
    if magic.startswith(_NAME):
        raise AuthError(
            "the peer speaks another version of polyhvd's protocol; install one version everywhere"
        )
    raise AuthError("the peer speaks another protocol")


class Caller:
    """The connecting side. Send ``hello``, then feed ``receive`` with exactly ``wanted`` bytes."""

    def __init__(self, secret: bytes, greeting: Greeting) -> None:
        self.greeting = greeting
        self.wanted = _ANSWER.size
        self.hello = _HELLO.pack(_MAGIC, greeting.pack(), secrets.token_bytes(32))
        self._secret = secret
        self._nonce = b""  # the answerer's

    def receive(self, data: bytes) -> bytes:
        """Check the answer and return what to send; ``wanted`` is 0 afterwards."""
        magic, nonce, proof = _ANSWER.unpack(data)
        _check_magic(magic)
        if not hmac.compare_digest(proof, _proof(self._secret, b"answer", self.hello, nonce)):
            raise AuthError(OTHER_SECRET)
        self.wanted = 0
        self._nonce = nonce
        return _proof(self._secret, b"call", self.hello, nonce)

    def keys(self) -> SessionKeys:
        """The session's, once ``wanted`` is 0."""
        if self.wanted:
            raise RuntimeError("the handshake is not over")
        own, other = (_session_key(self._secret, side, self.hello, self._nonce) for side in _SIDES)
        return SessionKeys(send=own, receive=other)


class Answerer:
    """The accepting side. Feed ``receive`` with exactly ``wanted`` bytes until that is 0.

    ``greeting`` is known after the first message but proved only after the last. Whoever drives this
    looks at it before sending the answer.
    """

    def __init__(self, secret: bytes) -> None:
        self.greeting: Greeting | None = None
        self.wanted = _HELLO.size
        self._secret = secret
        self._hello = b""
        self._nonce = secrets.token_bytes(32)

    def receive(self, data: bytes) -> bytes:
        """Take the next message and return what to send; raises :class:`AuthError`."""
        if self.greeting is None:
            return self._greet(data)
        if not hmac.compare_digest(data, _proof(self._secret, b"call", self._hello, self._nonce)):
            raise AuthError(OTHER_SECRET)
        self.wanted = 0
        return b""

    def keys(self) -> SessionKeys:
        """The session's, once ``wanted`` is 0."""
        if self.wanted:
            raise RuntimeError("the handshake is not over")
        other, own = (_session_key(self._secret, side, self._hello, self._nonce) for side in _SIDES)
        return SessionKeys(send=own, receive=other)

    def _greet(self, data: bytes) -> bytes:
        magic, greeting, _ = _HELLO.unpack(data)
        _check_magic(magic)
        self.greeting = Greeting.unpack(greeting)
        self._hello = data
        self.wanted = _PROOF_BYTES
        return _ANSWER.pack(_MAGIC, self._nonce, _proof(self._secret, b"answer", data, self._nonce))


def prove(connection: socket.socket, secret: bytes, greeting: Greeting, deadline: float) -> SessionKeys:
    """Run the caller's side on a connected socket, until ``deadline`` (time.monotonic) at most.

    Returns the keys with which what follows is to be signed. Raises AuthError for a peer of another job, and
    another OSError where a new try may help.
    """
    caller = Caller(secret, greeting)
    _set_deadline(connection, deadline)
    connection.sendall(caller.hello)
    answer = b""
    while len(answer) < caller.wanted:
        _set_deadline(connection, deadline)
        part = connection.recv(caller.wanted - len(answer))
        if not part:
            raise ConnectionError("the peer closed the connection: another job, generation or protocol")
        answer += part
    try:
        proof = caller.receive(answer)
    except AuthError as error:
        if str(error) == OTHER_SECRET:
            with contextlib.suppress(OSError):
                connection.send(REFUSAL, socket.MSG_NOSIGNAL)
        raise
    connection.sendall(proof)
    return caller.keys()


def _set_deadline(connection: socket.socket, deadline: float) -> None:
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0:
        raise TimeoutError("the peer did not answer in time")
    connection.settimeout(remaining_s)
