"""The core's MACs are those of Python's hashlib, and its signed frames those of the rendezvous."""

from __future__ import annotations

import hashlib
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_ranks import units

from polyhvd.rendezvous.auth import SessionKeys
from polyhvd.rendezvous.signed_stream import SignedStream, TamperedError

keys = st.binary(min_size=32, max_size=32)
payloads = st.lists(st.binary(min_size=1, max_size=300), max_size=6)


@settings(deadline=None)
@given(keys, st.binary(min_size=1, max_size=600), st.data())
def test_a_tag_is_hashlib_s(key: bytes, message: bytes, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(message)))
    expected = hashlib.blake2b(message, key=key, digest_size=16).digest()
    assert units.tag_of(key, message[:cut], message[cut:]) == expected


@settings(deadline=None)
@given(keys, payloads)
def test_frames_of_the_core_and_of_the_rendezvous_are_the_same(key: bytes, parts: list[bytes]) -> None:
    stream = SignedStream(SessionKeys(key, key))
    signed = b"".join(stream.seal(part) for part in parts)
    assert units.sign(key, parts) == signed
    assert units.check_signed(key, signed) == (parts, False)
    assert stream.unseal(signed) == b"".join(parts)


@settings(deadline=None)
@given(keys, payloads.filter(bool), st.data())
def test_what_either_refuses_the_other_refuses(key: bytes, parts: list[bytes], data: st.DataObject) -> None:
    """Streams are cut into pieces, of which some are changed, left out, doubled or exchanged."""
    signed = units.sign(key, parts)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(signed)), max_size=4)) | {0, len(signed)})
    pieces = [signed[begin:end] for begin, end in pairwise(cuts)]
    changed = b"".join(data.draw(st.lists(st.sampled_from(pieces), max_size=6)))
    found, refused = units.check_signed(key, changed)
    receiver = SignedStream(SessionKeys(key, key))
    out, tampered = b"", False
    for begin in range(len(changed)):
        try:
            out += receiver.unseal(changed[begin : begin + 1])
        except TamperedError:
            tampered = True
            break
    assert (b"".join(found), refused) == (out, tampered)
    assert parts[: len(found)] == found
