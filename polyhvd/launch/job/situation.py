"""The state of a job at one time, as ``polyhvd status`` shows it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from polyhvd.elastic.standing import Decision, Doing, Wait, counted
from polyhvd.launch.hosts.lists import Host
from polyhvd.runtime.placement import Placement

__all__ = ["HostSituation", "Situation", "SlotSituation", "WorldSituation", "answers", "ending", "fixed"]

#: In one answer: items, those that the job waits for, and characters of a text. A line has a limit, see
#: control.py, and a character takes up to six bytes of it.
_ITEMS_MAX, _WAITS_MAX, _TEXT_MAX, _SENTENCE_MAX = 20, 10, 200, 1000


@dataclass(frozen=True)
class WorldSituation:
    """The present generation."""

    generation: int
    size: int
    since: float


@dataclass(frozen=True)
class SlotSituation:
    """A slot of an elastic job, or a rank of another one."""

    host: str
    slot: int
    state: str  #: of :class:`polyhvd.elastic.standing.SlotState`; or "starting", "running", "ended"
    rank: int | None = None
    process: int | None = None  #: as an elastic job numbers them
    why: str = ""
    until: float | None = None  #: when the state ends by itself

    @property
    def name(self) -> str:
        """Its name in messages."""
        rank = "" if self.rank is None else f"rank {self.rank}"
        if self.process is None:
            return f"{rank or f'slot {self.slot}'} on {self.host}"
        return f"process {self.process}{f' ({rank})' if rank else ''} on {self.host}"


@dataclass(frozen=True)
class HostSituation:
    """A host that is not used now."""

    host: str
    state: str  #: "unfit" or "left"
    why: str = ""
    until: float | None = None  #: when it is tried again


@dataclass(frozen=True)
class Situation:
    """See the module. Times are those of ``time.monotonic()``."""

    decision: Decision
    since: float | None = None  #: when the job began to do that, if this is known
    world: WorldSituation | None = None
    slots: Sequence[SlotSituation] = ()
    hosts: Sequence[HostSituation] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)  #: more values of the answer


def fixed(
    placements: Sequence[Placement],
    hosts: Sequence[Host],
    running: Set[int],
    late: Mapping[str, float],
    since: float | None,
) -> Situation:
    """The situation of a job that is not elastic.

    Args:
        placements: of its ranks.
        hosts: that these name by number.
        running: the ranks that have not ended.
        late: the hosts whose agents have not answered, and since when.
        since: when the ranks were started; None: they were not.
    """
    slots = []
    for place in placements:
        host = hosts[int(place.host)].name
        state = "starting" if host in late or since is None else "running"
        state = state if place.rank in running else "ended"
        slots.append(SlotSituation(host, place.local_rank, state, place.rank))
    size, ended = len(placements), len(placements) - len(running)
    if late or since is None:
        waits = tuple(Wait(host, "its agent has not answered", began) for host, began in late.items())
        return Situation(Decision(Doing.STARTS, "" if waits else "starts", waits), None, None, slots)
    what = f"runs {counted(size, 'rank')}"
    waits = ()
    if ended:
        what = f"runs, and {ended} of {counted(size, 'rank')} {'has' if ended == 1 else 'have'} ended"
        waits = tuple(Wait(slot.name, "it has not ended") for slot in slots if slot.state == "running")
    return Situation(Decision(Doing.RUNS, what, waits), since, WorldSituation(1, size, since), slots)


def ending(found: Situation, running: Set[int], reason: str, since: float | None) -> Situation:
    """The situation of a job whose processes are ended.

    Args:
        found: what it would be otherwise.
        running: the ranks, or processes of an elastic job, that have not ended.
        reason: why they are ended.
        since: when that began, if this is known.
    """
    names = {slot.rank if slot.process is None else slot.process: slot.name for slot in found.slots}
    waits = tuple(
        Wait(names.get(number, f"process {number}"), "it has not ended") for number in sorted(running)
    )
    return replace(found, decision=Decision(Doing.ENDS, "ends", waits, reason), since=since)


def answers(found: Situation, job: Mapping[str, Any], now: float, wall: float) -> list[dict[str, Any]]:
    """The messages that carry a situation: a head, its lists in parts, and an end.

    Args:
        found: the situation.
        job: what is known of the job besides.
        now: the time by ``time.monotonic()``.
        wall: the same by ``time.time()``, as times are sent.
    """

    def sent(item: Any) -> dict[str, Any]:
        return {name: _sent(name, value, wall - now) for name, value in asdict(item).items()}

    decision = found.decision
    head = {
        **{name: _sent(name, value, wall - now) for name, value in job.items()},
        "does": decision.does.value,
        "sentence": decision.sentence(now)[:_SENTENCE_MAX],
        "since": _sent("since", found.since, wall - now),
        "reason": decision.reason[:_TEXT_MAX],
        "until": _sent("until", decision.until, wall - now),
        "waits": [sent(wait) for wait in decision.waits[:_WAITS_MAX]],
        "waits_total": len(decision.waits),
        "world": None if found.world is None else sent(found.world),
        **found.facts,
    }
    parts = [
        {name: [sent(item) for item in items[first : first + _ITEMS_MAX]]}
        for name, items in (("slots", found.slots), ("hosts", found.hosts))
        for first in range(0, len(items), _ITEMS_MAX)
    ]
    return [head, *parts, {"end": True}]


def _sent(name: str, value: Any, offset_s: float) -> Any:
    if isinstance(value, str):
        return value[:_TEXT_MAX]
    is_time = name in ("since", "until", "started") and value is not None
    return round(value + offset_s, 3) if is_time else value
