"""The launcher of an elastic job of months: what it keeps does not grow with its losses."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import time
from collections.abc import Iterator, Set

import pytest
from launching import wait_until

from polyhvd.elastic.limits import RESUME_STATUS
from polyhvd.elastic.membership import Limits
from polyhvd.elastic.places import (
    BEGUN_CALLS,
    LEAVE_NOTICES,
    PROGRESS,
    STEPS,
    PlaceReply,
    PlaceRequest,
    place_requests_scope,
    place_scope,
)
from polyhvd.launch.elastic.driven import Elastic
from polyhvd.launch.elastic.driver import Driver
from polyhvd.launch.hosts.lists import Host
from polyhvd.launch.job.blame import Ending
from polyhvd.launch.job.control import Request
from polyhvd.rendezvous.auth import new_secret, parse_secret
from polyhvd.rendezvous.client import Client
from polyhvd.rendezvous.server import Server
from polyhvd.runtime.placement import Placement

SECRET = parse_secret(new_secret())
HOSTS = [Host("here", 3)]


class Job:
    """Processes that are started in name alone, and speak to a real rendezvous."""

    def __init__(self, limits: Limits | None = None, hosts: list[Host] = HOSTS) -> None:
        limits = limits or Limits(3, 1, 3, cooldown_s=(0.0, 0.0))
        self.size = limits.size
        self.ends: list[tuple[str, int]] | None = None  # None: the job is not to end
        self.driver = Driver(Elastic(limits, hosts), hosts)
        self.rendezvous = Server(SECRET, observe=self.driver.observe)
        self.living: dict[int, Client] = {}
        self.now = 0.0
        self.driver.begin(self, self.now)

    def start_member(
        self, member: int, place: Placement, host: Host, number: int, *, knows_rank: bool
    ) -> None:
        deadline = time.monotonic() + 30
        self.living[member] = Client(
            self.rendezvous.endpoint, SECRET, rank=member, generation=0, deadline=deadline
        )

    def endpoint(self, number: int, numbers: Set[int]) -> str:
        return ""

    def report(self, text: str) -> None:
        pass

    def end(self, reason: str, cause: Ending | None, status: int) -> None:
        if self.ends is None:
            pytest.fail(f"the job ends: {reason}")
        self.ends.append((reason, status))

    def finish(self) -> None:
        pytest.fail("the job has finished")

    def close(self) -> None:
        for client in self.living.values():
            client.close()
        self.rendezvous.close()
        self.driver.close()

    @property
    def formed(self) -> int:
        return self.driver._membership.formed

    def ask(self, members: Set[int] | list[int]) -> None:
        """Have processes ask for the next place, as one does that has committed."""
        for member in members:
            after = self.formed if member in self.driver._membership.ranks else 0
            question = PlaceRequest(after, wired=True, progressed=True)
            self.tell(member, place_requests_scope(after), question.encoded(), own=True)

    def tell(self, member: int, scope: str, value: bytes, *, own: bool = False) -> None:
        heard = len(self.driver._received)
        self.living[member].put(scope, member, value, own=own)
        wait_until(lambda: len(self.driver._received) > heard, "what was sent")
        if own:
            self.living[member].forget(scope, member)
        self.turn()

    def turn(self) -> None:
        self.now += 1.0
        self.driver.turn(self.now)

    def lose(self, member: int) -> None:
        """A process is killed while it asks."""
        client = self.living.pop(member)
        question = PlaceRequest(self.formed, wired=True, progressed=True)
        client.put(place_requests_scope(self.formed), member, question.encoded(), own=True)
        wait_until(lambda: bool(self.driver._received), "its question")
        client.close()
        ending = Ending(member, "here", -signal.SIGKILL, [], "", [], "process")
        self.driver.on_ending(ending, frozenset(self.living), self.now)
        self.turn()

    def cycle(self) -> None:
        """One is killed, another leaves with notice, and two come in their place."""
        first, second, *_ = self.driver._membership.ranks
        self.lose(first)
        self.ask([member for member in self.driver._membership.ranks])
        self.come()
        self.tell(second, LEAVE_NOTICES, b"")
        self.ask(self.driver._membership.ranks)
        self.living.pop(second).close()
        ending = Ending(second, "here", 0, [], "", [], "process")
        self.driver.on_ending(ending, frozenset(self.living), self.now)
        self.driver._membership.hosts_are({}, self.now)  # the slot is listed anew
        self.driver._do(self.driver._membership.hosts_are({"here": 3}, self.now))
        self.come()

    def come(self) -> None:
        """Whoever was started asks for a place, and then the others do."""
        self.turn()
        self.ask(set(self.living) - set(self.driver._membership.ranks))
        self.ask(self.driver._membership.ranks)
        assert len(self.driver._membership.ranks) == self.size


@pytest.fixture
def job() -> Iterator[Job]:
    job = Job()
    yield job
    job.close()


def test_members_that_do_not_leave_after_a_shortage_are_ended_by_the_driver() -> None:
    job = Job(Limits(2, 2, 2, timeout_s=5.0))
    try:
        job.come()
        job.ends = []
        job.driver.discover({"here": 1}, job.now)
        for _ in range(60):  # none requests a place
            job.turn()
        assert [status for _, status in job.ends][:1] == [RESUME_STATUS]
    finally:
        job.close()


def test_world_of_thousands_is_formed_within_the_time_of_a_heartbeat() -> None:
    size = 2000
    reply = PlaceReply(1, list(range(size)), ["0"] * size)
    begin = time.process_time()
    for _ in range(100):
        reply.encoded()
    assert time.process_time() - begin < 0.5, "of 100 replies"


@pytest.mark.parametrize("words", [b"{", b"[" * 100_000, b"[]", b'{"after": 1e999, "generation": 1e999}'])
def test_words_of_strangers_are_ignored_and_errors_of_the_membership_are_not(job: Job, words: bytes) -> None:
    job.come()
    for scope in (place_requests_scope(1), STEPS):
        job.tell(0, scope, words)

    def mistaken(*_: object, **__: object) -> None:
        raise KeyError("a mistake")

    job.driver._membership.request = mistaken  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyError, match="a mistake"):
        job.ask([0])


@pytest.mark.parametrize("event", ["begins", "progress", "leaves", "time_is", "standing"])
def test_key_errors_of_the_membership_are_raised_by_the_driver(job: Job, event: str) -> None:
    job.come()

    def mistaken(*_: object, **__: object) -> None:
        raise KeyError("a mistake")

    def all_events() -> None:
        for scope in (BEGUN_CALLS, PROGRESS, LEAVE_NOTICES):
            job.tell(0, scope, b"")

    setattr(job.driver._membership, event, mistaken)
    with pytest.raises(KeyError, match="a mistake"):
        all_events()


def test_job_that_was_interrupted_starts_nothing_for_hosts_that_are_given_up() -> None:
    hosts = [Host(name, 1) for name in ("here", "b", "d")]
    with contextlib.closing(Job(Limits(2, 1, 2), hosts)) as job:
        job.ask([0])
        started = set(job.living)
        job.driver.stop(job.now, notice=False)
        for number in (1, 2):
            job.driver.refuse(number, [], job.now)
            job.turn()
        assert set(job.living) == started
        assert job.formed == 0


@pytest.mark.parametrize("key", ["processes", "ranks"])
def test_request_to_leave_that_has_an_infinity_is_refused(job: Job, key: str) -> None:
    job.come()
    content = {"hosts": [], "processes": [], "ranks": [], key: json.loads("[Infinity]")}
    client, launcher = socket.socketpair()
    with client, launcher:
        job.driver.obey(Request(content, launcher), 0.0)
        assert "no such host or process" in json.loads(client.recv(4096))["error"]


def things(value: object, seen: set[int]) -> int:
    """How many objects hang on one, of polyhvd's and in containers."""
    if id(value) in seen or isinstance(value, (Job, Client)):
        return 0
    seen.add(id(value))
    if isinstance(value, dict):
        inner: list[object] = [*value.keys(), *value.values()]
    elif isinstance(value, (list, tuple, set, frozenset)) or type(value).__name__ == "deque":
        inner = list(value)  # type: ignore[call-overload]
    elif type(value).__module__.startswith("polyhvd"):
        inner = list(getattr(value, "__dict__", {}).values())
    else:
        return 1
    return 1 + sum(things(item, seen) for item in inner)


def test_launcher_keeps_no_more_after_many_losses_than_after_some(job: Job) -> None:
    job.come()
    counts = []
    for _ in range(2):
        for _ in range(20):
            job.cycle()
        wait_until(lambda: not job.rendezvous._commands, "what the server is to forget on its thread")
        counts.append(things(job.driver, set()) + things(job.rendezvous._values, set()))
    assert job.formed > 80
    assert counts[1] <= counts[0] + 8, counts


@pytest.mark.parametrize(
    ("before", "later", "writers"),
    [
        ({0: 5, 1: 6}, {}, {1}),
        ({0: 6, 1: 6}, {}, {0}),
        ({0: 5}, {1: 6}, {0, 1}),
        ({0: 6}, {1: 5}, {0}),
        ({}, {0: 6, 1: 6}, {0}),
    ],
)
def test_process_with_the_newest_commit_is_asked_to_write_it_when_the_job_fails(
    job: Job, before: dict[int, int], later: dict[int, int], writers: set[int]
) -> None:
    def ask(commits: dict[int, int]) -> None:
        for member, number in commits.items():
            request = PlaceRequest(job.formed, wired=True, progressed=True, call=1, commits=number)
            job.tell(member, place_requests_scope(job.formed), request.encoded(), own=True)

    job.come()
    assert job.driver._membership.ranks == [0, 1, 2]
    ask(before)
    job.driver.on_ending(Ending(2, "here", 1, [], "", [], "process", b"+"), frozenset({0, 1}), job.now)
    job.turn()
    ask(later)
    scopes = {member: place_scope(member, job.formed) for member in (0, 1)}
    replies = {member: job.living[member].gather(scope, 1, 30.0)[0] for member, scope in scopes.items()}
    assert {member for member, reply in replies.items() if PlaceReply.decoded(reply).saves} == writers
