"""Ranks without engines: the coordinator, its relays and every rank's replica, one call at a time.

What a rank does here is what ``OpQueue`` and ``Controller`` do, and each step of it is a method, so
that a test decides in which order steps and messages happen.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Call", "Event", "Rank", "World", "units"]

_ROOT = Path(__file__).resolve().parents[2]
_FOLDER = _ROOT / "build" / "core" / "python"


def _load() -> Any:
    make = ["make", "-s", f"PY={sys.executable}", "units"]
    subprocess.run(make, cwd=_ROOT, check=True, stdout=subprocess.DEVNULL)
    sys.path.insert(0, str(_FOLDER))
    import polyhvd_units

    return polyhvd_units


units = _load()
Key = tuple[int, str]


@dataclass(eq=False)
class Call:
    """One operation that one rank has asked for."""

    request: Any
    announced: bool = False
    announced_as: int | None = None
    agreed: bool = False
    outcome: Event | None = None

    @property
    def key(self) -> Key:
        return self.request.process_set, self.request.name


@dataclass(eq=False)
class Event:
    """One entry of the common order, and what it has met on each rank: a call, or a stand-in."""

    key: Key
    agreement: Any = None
    error: Any = None
    message: str = ""
    calls: dict[int, Call | None] = field(default_factory=dict)


class Rank:
    """The control plane of one rank, taken apart."""

    def __init__(self, world: World, rank: int, parent: Rank | None) -> None:
        self.world = world
        self.rank = rank
        self.parent = parent
        self.children: list[Rank] = []
        self.subtree = [rank]
        self.sets = units.ProcessSets(world.size)
        self.cache = units.ResponseCache()
        self.coordinator: Any = None
        self.relay: Any = None
        self.in_flight: dict[Key, Call] = {}
        self.unannounced: list[Call] = []
        self.work: deque[list[tuple[Event, Call | None]]] = deque()
        self.to_parent: deque[bytes] = deque()
        self.decisions: deque[int] = deque()
        self.applied = 0
        self.joined = False
        self.departed = False
        #: Of calls without a name, the last turn of each kind on each process set.
        self.turns: Counter[tuple[int, Any]] = Counter()

    # What the program does

    def may_submit(self, process_set: int, name: str) -> bool:
        if self.departed or self.joined or self.sets.position(process_set, self.rank) is None:
            return False
        return (process_set, name) not in self.in_flight

    def submit(self, request: Any) -> Call:
        assert self.may_submit(request.process_set, request.name)
        request.rank = self.rank
        call = Call(request)
        self.in_flight[call.key] = call
        self.unannounced.append(call)
        self.joined = request.kind == units.OpKind.JOIN
        return call

    def may_submit_unnamed(self, process_set: int) -> bool:
        present = self.sets.position(process_set, self.rank) is not None
        return present and not self.departed and not self.joined

    def submit_unnamed(self, request: Any) -> Call:
        """Submit a call without a name; its turn, and so its name, follow from the order alone."""
        line = (request.process_set, request.kind)
        self.turns[line] += 1
        request.turn = self.turns[line]
        request.name = units.name_of_turn(request.kind, request.turn)
        return self.submit(request)

    def may_depart(self) -> bool:
        """In good order: nothing is announced. Who leads others is another story."""
        busy = self.work or any(call.announced for call in self.in_flight.values())
        return self.rank > 0 and not self.children and not self.departed and not busy

    def depart(self) -> None:
        self.departed = True
        self.in_flight.clear()
        self.unannounced.clear()
        self.decisions.clear()
        self._accept(_report(departures=self.subtree), self.subtree)

    # Steps of Controller::progress

    def steps(self) -> Iterator[Any]:
        """What could happen here now."""
        if self.to_parent:
            yield self.deliver
        if self.departed:
            return
        if self.unannounced:
            yield self.announce
        if self.coordinator is not None:
            yield self.decide
        if self.relay is not None:
            yield self.report_up
        if self.decisions:
            yield self.apply_next
        if self.work:
            yield self.execute

    def announce(self) -> bool:
        hits, requests = [], []
        for call in self.unannounced:
            position = self.sets.position(call.request.process_set, self.rank)
            call.announced_as = self.cache.find(call.request, -1 if position is None else position)
            call.announced = True
            if call.announced_as is None:
                requests.append(call.request)
            else:
                hits.append((call.announced_as, call.request.turn))
        self.unannounced.clear()
        self._accept(_report(hits=hits, requests=requests), [self.rank])
        return True

    def deliver(self) -> bool:
        payload = self.to_parent.popleft()
        assert self.parent is not None
        self.parent._accept(payload, self.subtree)
        if self.rank in units.departures_of(payload):
            self.parent.children.remove(self)
        return True

    def report_up(self) -> bool:
        payload = self.relay.take_report(self.world.now, self.world.patience)
        if payload is not None:
            self.to_parent.append(payload)
        return payload is not None

    def decide(self) -> bool:
        payload = self.coordinator.take_decision()
        if payload is None:
            return False
        self.world.order.append((units.decode_decision(payload), {}))
        self.decisions.append(len(self.world.order) - 1)
        return self.apply_next()

    def apply_next(self) -> bool:
        number = self.decisions.popleft()
        assert number == self.applied, "a decision is missing"
        self.applied += 1
        for child in self.children:
            child.decisions.append(number)
        self._apply(*self.world.order[number])
        return True

    def execute(self) -> bool:
        for event, call in self.work.popleft():
            if call is None:
                continue
            assert call.outcome is None, "an operation ran twice"
            call.outcome = event
            assert self.in_flight.pop(call.key) is call
            if call.request.kind == units.OpKind.JOIN:
                self.joined = False
        return True

    def _accept(self, payload: bytes, ranks: list[int]) -> None:
        sender = units.Subtree(self.sets, ranks)
        if self.coordinator is not None:
            self.coordinator.add(payload, sender, self.world.now)
        elif self.relay is not None and not self.departed:
            self.relay.add(payload, sender, self.cache, self.world.now)
        else:
            self.to_parent.append(payload)

    def _apply(self, decision: Any, events: dict[Any, Event]) -> None:
        for definition in decision.definitions:
            self.cache.define(definition)
        answers, again = [], []
        for rank, number, turn in decision.resends:
            if rank == self.rank:
                again += self._in_full(number, turn)
                answers.append((rank, number, turn))
        for place, (process_set, name, code, message, kind, turn) in enumerate(decision.refusals):
            event = events.setdefault(("refusal", place), Event((process_set, name), None, code, message))
            self._refuse(event, kind, turn)
        for place, batch in enumerate(decision.batches):
            self._run(place, batch, events)
        for number in decision.evictions:
            if self.relay is not None:
                self.relay.withdraw(number)
            self.cache.evict(number)
        assert len(self.cache) <= self.world.cache_capacity, "the cache is over its capacity"
        if answers:
            self._accept(_report(requests=again, answers=answers), [self.rank])

    def _in_full(self, number: int, turn: int) -> list[Any]:
        for call in self.in_flight.values():
            if call.request.turn != turn:
                continue
            if call.announced and not call.agreed and call.announced_as == number:
                call.announced_as = None
                return [call.request]
        return []

    def _refuse(self, event: Event, kind: Any, turn: int) -> None:
        if self.relay is not None and event.error == units.ErrorCode.PEER_DEPARTED:
            self.relay.doom(event.key[0])
        if self.relay is not None and turn:
            self.relay.end_turn(event.key[0], kind, turn)
        call = self.in_flight.get(event.key)
        if call is None or not call.announced or call.agreed:
            self._pass_over(event.key[0], kind, turn)
            return
        call.agreed = True
        event.calls[self.rank] = call
        self.work.append([(event, call)])

    def _pass_over(self, process_set: int, kind: Any, turn: int) -> None:
        if turn and self.joined and process_set in self.sets.ids():
            self.turns[process_set, kind] = max(self.turns[process_set, kind], turn)

    def _run(self, place: int, batch: list[tuple[int, int]], events: dict[Any, Event]) -> None:
        work = []
        for number, turn in batch:
            agreement = self.cache.get(number)
            assert agreement is not None, f"a batch names {number}, which was never defined"
            name = units.name_of_turn(agreement.kind, turn) if turn else agreement.name
            key = (agreement.process_set, name)
            event = events.setdefault((place, number, turn), Event(key, agreement))
            if self.relay is not None and turn:
                self.relay.end_turn(agreement.process_set, agreement.kind, turn)
            if self.sets.position(agreement.process_set, self.rank) is None:
                continue
            call = self.in_flight.get(key)
            if call is None or not call.announced or call.agreed:
                assert self.joined, f"rank {self.rank} has not asked for {key}"
                self._pass_over(agreement.process_set, agreement.kind, turn)
                call = None
            else:
                call.agreed = True
            event.calls[self.rank] = call
            self._change_sets(agreement)
            work.append((event, call))
        if work:
            self.work.append(work)

    def _change_sets(self, agreement: Any) -> None:
        if agreement.kind == units.OpKind.ADD_PROCESS_SET:
            self.sets.add([shape[0] for shape in agreement.shapes])
        elif agreement.kind == units.OpKind.REMOVE_PROCESS_SET:
            if agreement.root in self.sets.ids():
                self.sets.remove(agreement.root)
            if self.relay is not None:
                self.relay.remove(agreement.root)
            for line in [line for line in self.turns if line[0] == agreement.root]:
                del self.turns[line]
        elif agreement.kind == units.OpKind.JOIN and self.relay is not None:
            self.relay.end_join()


class World:
    """Ranks in a tree, as ``parents`` says (that of rank 0 is not used)."""

    def __init__(
        self, parents: list[int], *, cache_capacity: int, fusion_bytes_max: int, patience: float
    ) -> None:
        self.size = len(parents)
        self.cache_capacity = cache_capacity
        self.patience = patience
        self.now = 0.0
        #: Every decision, and the events that it has made, by their place in it.
        self.order: list[tuple[Any, dict[Any, Event]]] = []
        self.ranks: list[Rank] = []
        for number, parent in enumerate(parents):
            self.ranks.append(Rank(self, number, self.ranks[parent] if number else None))
        for rank in reversed(self.ranks):
            rank.subtree.sort()
            if rank.parent is not None:
                rank.parent.children.insert(0, rank)
                rank.parent.subtree += rank.subtree
            if rank.rank == 0:
                rank.coordinator = units.Coordinator(rank.sets, cache_capacity, fusion_bytes_max)
            elif rank.children:
                rank.relay = units.Relay(rank.sets, rank.subtree)

    def steps(self) -> list[Any]:
        return [step for rank in self.ranks for step in rank.steps()]

    def drain(self) -> None:
        """Do everything that can be done, as if hours passed."""
        self.now += 1e6
        while any([step() for step in self.steps()]):
            self.now += 1e6

    def events(self) -> Iterator[Event]:
        for _, events in self.order:
            yield from events.values()


def _report(
    hits: list[tuple[int, int]] | None = None,
    requests: list[Any] | None = None,
    departures: list[int] | None = None,
    answers: list[tuple[int, int, int]] | None = None,
) -> bytes:
    payload: bytes = units.encode_report(hits or [], requests or [], departures or [], answers or [])
    return payload
