"""A host's addresses by its name; test_kubernetes.py has name servers that are silent."""

from __future__ import annotations

import pytest

from polyhvd.rendezvous.lookup import Lookup


def test_a_name_that_is_known_has_addresses_and_no_problem() -> None:
    lookup = Lookup("localhost")
    assert set(lookup.look(30)) & {"127.0.0.1", "::1"}
    assert lookup.problem == ""


@pytest.mark.parametrize("name", ["no-such-host.invalid", "a" * 300, "\udcff", "a..b"])
def test_a_name_that_is_not_known_has_a_problem_that_can_be_told(name: str) -> None:
    lookup = Lookup(name)
    assert lookup.look(60) == []
    assert lookup.problem
    assert lookup.problem != "no name server has answered yet"


def test_nobody_waits_longer_than_asked() -> None:
    lookup = Lookup("localhost")
    assert lookup.look(0.0) == [] or lookup.problem == ""
