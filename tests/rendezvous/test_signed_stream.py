"""Signed streams: what the other side sends comes out, and nothing else ever does."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyhvd.rendezvous import signed_stream
from polyhvd.rendezvous.auth import SessionKeys
from polyhvd.rendezvous.signed_stream import SignedStream, TamperedError

ONE, OTHER = bytes(range(32)), bytes(range(1, 33))
payloads = st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=6)


def ends() -> tuple[SignedStream, SignedStream]:
    return SignedStream(SessionKeys(ONE, OTHER)), SignedStream(SessionKeys(OTHER, ONE))


def sealed(parts: list[bytes]) -> list[bytes]:
    sender, _ = ends()
    return [sender.seal(part) for part in parts]


def heard(stream: bytes, pieces: int = 1 << 20) -> bytes:
    """What comes out of a stream in pieces of so many bytes; with an X behind it where it was refused."""
    _, receiver = ends()
    out = b""
    try:
        for begin in range(0, len(stream), pieces):
            out += receiver.unseal(stream[begin : begin + pieces])
    except TamperedError:
        with pytest.raises(TamperedError):
            receiver.unseal(b"")  # and never again is it trusted
        return out + b"X"
    return out


@settings(deadline=None)
@given(payloads, st.integers(1, 100))
def test_what_was_sealed_comes_out_however_it_is_cut(parts: list[bytes], pieces: int) -> None:
    assert heard(b"".join(sealed(parts)), pieces) == b"".join(parts)


@settings(deadline=None)
@given(payloads, st.data())
def test_a_bit_that_is_turned_over_anywhere_is_noticed(parts: list[bytes], data: st.DataObject) -> None:
    stream = bytearray(b"".join(sealed(parts)))
    bit = data.draw(st.integers(0, 8 * len(stream) - 1))
    stream[bit // 8] ^= 1 << bit % 8
    out = heard(bytes(stream), 1)
    assert out.endswith(b"X")
    assert b"".join(parts).startswith(out[:-1])


@settings(deadline=None)
@given(payloads, st.data())
def test_messages_in_any_other_order_come_out_up_to_the_first_wrong_one(
    parts: list[bytes], data: st.DataObject
) -> None:
    order = data.draw(st.lists(st.integers(0, len(parts) - 1), max_size=8))
    messages = sealed(parts)
    right = 0
    while right < len(order) and order[right] == right:
        right += 1
    expected = b"".join(parts[:right]) + (b"X" if right < len(order) else b"")
    assert heard(b"".join(messages[number] for number in order), 1) == expected


@settings(deadline=None)
@given(payloads, st.data())
def test_of_a_stream_that_was_cut_off_whole_messages_come_out(
    parts: list[bytes], data: st.DataObject
) -> None:
    stream = b"".join(sealed(parts))
    cut = data.draw(st.integers(0, len(stream)))
    out = heard(stream[:cut])
    assert b"".join(parts).startswith(out)


@settings(deadline=None)
@given(st.binary(min_size=20, max_size=200))
def test_bytes_of_a_stranger_are_refused(stream: bytes) -> None:
    assert heard(stream) == b"X"


def test_a_message_that_is_sent_back_to_its_sender_is_refused() -> None:
    sender, _ = ends()
    with pytest.raises(TamperedError):
        sender.unseal(sender.seal(b"a question"))


def test_a_changed_length_is_refused_before_its_bytes_are_waited_for() -> None:
    (message,) = sealed([b"short"])
    with pytest.raises(TamperedError):
        ends()[1].unseal(b"\xff" + message[1:20])


def test_a_length_beyond_the_bound_is_refused_though_its_sender_knows_the_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (message,) = sealed([b"longer than that"])
    monkeypatch.setattr(signed_stream, "MESSAGE_BYTES_MAX", 10)
    assert heard(message) == b"X"


def test_much_is_sent_as_several_messages() -> None:
    much = bytes(range(256)) * (1 << 14)
    (stream,) = sealed([much])
    assert len(stream) == len(much) + 4 * (4 + 2 * 16)
    assert heard(stream, 100_000) == much
    assert sealed([b""]) == [b""]
