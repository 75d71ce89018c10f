"""Host lists, slots, and who is blamed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from polyhvd.launch.hosts.lists import Host, HostsError, parse_hostfile, parse_hosts, place
from polyhvd.launch.job.blame import Ending, describe, exit_status, first_cause, traceback_lines
from polyhvd.rendezvous import network
from polyhvd.runtime.placement import Placement


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a:2", [Host("a", 2)]),
        ("a", [Host("a", 1)]),
        ("a:2, b.example.org:3", [Host("a", 2), Host("b.example.org", 3)]),
        ("user@10.0.0.1:4", [Host("user@10.0.0.1", 4)]),
        ("[::1]:2,[fe80::1%eth0]", [Host("::1", 2), Host("fe80::1%eth0", 1)]),
        ("a,b,a", [Host("a", 2), Host("b", 1)]),
        ("a,b,A", [Host("a", 2), Host("b", 1)]),
    ],
)
def test_host_lists_are_read(text: str, hosts: list[Host]) -> None:
    assert parse_hosts(text) == hosts


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "a:0",
        "a:2,a:2",
        "a:2,A:2",
        "a,b,a:2",
        "a:²",
        f"a:{10**12}",
        "a:-1",
        "a:b",
        ":2",
        "-oProxyCommand=evil:1",
        "a b:1",
        "a;b",
        "$(x):1",
    ],
)
def test_unusable_host_lists_are_refused(text: str) -> None:
    with pytest.raises(HostsError):
        parse_hosts(text)


def test_host_file_error_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("a slots=2\n\nb two\n")
    with pytest.raises(
        HostsError, match=re.escape(f"{path}, line 3: expected 'host slots=N', found 'b two'")
    ):
        parse_hostfile(str(path))


def test_host_file_of_another_system_is_read(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_bytes(b"\xef\xbb\xbfa slots=2\r\n# \xc3\xa9\r\nb # c\r\n")
    assert parse_hostfile(str(path)) == [Host("a", 2), Host("b", 1)]


def test_absent_host_file_is_explained(tmp_path: Path) -> None:
    with pytest.raises(HostsError, match="cannot read the host file"):
        parse_hostfile(str(tmp_path / "none"))


def test_ranks_fill_hosts_in_order() -> None:
    assert place([Host("a", 2), Host("b", 1), Host("c", 3)], 5) == [
        Placement(1, 0, 5, 0, 2, 0, 3, "0"),
        Placement(1, 1, 5, 1, 2, 0, 2, "0"),
        Placement(1, 2, 5, 0, 1, 1, 3, "1"),
        Placement(1, 3, 5, 0, 2, 2, 3, "2"),
        Placement(1, 4, 5, 1, 2, 1, 2, "2"),
    ]


def test_all_slots_are_used_without_a_number_of_ranks() -> None:
    assert len(place([Host("a", 2), Host("b", 3)])) == 5


def test_hosts_beyond_the_last_rank_stay_empty() -> None:
    assert {placement.host for placement in place([Host("a", 2), Host("b", 2)], 2)} == {"0"}


# Blame

LOST = [
    b"Traceback (most recent call last):",
    b'  File "x.py", line 1',
    b"polyhvd.errors.PeerLostError: rank 2 is gone",
]
WRONG = [b"Traceback (most recent call last):", b"  raise PeerLostError", b"ValueError: no such file"]


@pytest.mark.parametrize(
    ("endings", "blamed"),
    [
        ([Ending(0, "a", 1, LOST), Ending(2, "a", -9)], 2),
        ([Ending(0, "a", 1, LOST), Ending(1, "a", 1, WRONG), Ending(2, "a", 1, LOST)], 1),
        ([Ending(1, "a", 1, WRONG), Ending(2, "a", 3)], 1),
        ([Ending(1, "a", 1, WRONG), Ending(2, "a", -11)], 2),
        ([Ending(1, "a", 1, LOST), Ending(2, "a", 1, reason="was lost")], 2),
        ([Ending(3, "a", 1, LOST), Ending(1, "a", 1, LOST)], 3),
        ([Ending(0, "a", 1, [b"mxnet.base.MXNetError: PeerLostError: rank 2"]), Ending(1, "a", 1)], 1),
    ],
)
def test_cause_is_told_from_its_victims(endings: list[Ending], blamed: int) -> None:
    assert first_cause(endings).rank == blamed


def test_endings_are_described() -> None:
    assert describe(Ending(1, "h", 3)) == "rank 1 on h exited with status 3"
    assert describe(Ending(1, "h", -9)) == "rank 1 on h was killed by SIGKILL"
    assert describe(Ending(1, "h", -63)) == "rank 1 on h was killed by signal 63"
    assert describe(Ending(1, "h", 127, reason="was not started: no")) == "rank 1 on h was not started: no"
    assert [exit_status(Ending(0, "h", status)) for status in (3, -9, -15)] == [3, 137, 143]


def test_last_traceback_is_shown_whole() -> None:
    assert traceback_lines([b"noise", *WRONG, b"noise", *LOST]) == LOST
    assert traceback_lines([b"%d" % i for i in range(100)]) == [b"%d" % i for i in range(80, 100)]


# Addresses


def test_endpoints_are_read_and_written() -> None:
    for text, pair in (("a:1", ("a", 1)), ("[::1]:22", ("::1", 22)), ("10.0.0.1:65535", ("10.0.0.1", 65535))):
        assert network.parse_endpoint(text) == pair
        assert network.endpoint_text(*pair) == text
    for text in ("", "a", "a:", ":1", "a:b"):
        with pytest.raises(ValueError, match="is not host:port"):
            network.parse_endpoint(text)


def test_other_loopback_addresses_play_other_hosts() -> None:
    assert network.is_local("localhost")
    assert network.is_local("127.0.0.1")
    assert not network.is_local("127.0.0.2")
    assert not network.is_local("no-such-host.invalid")
    assert not network.is_local("a..b")


def test_kernel_chooses_the_address_towards_a_host() -> None:
    assert network.address_towards("127.0.0.2") == "127.0.0.1"
    assert network.address_for("a..b") == network.address_for("no-such-host.invalid")


def test_unknown_interface_error_lists_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"no network interface 'nope0' on .* \(it has: .*lo 127\.0\.0\.1"):
        network.address_of("nope0")
