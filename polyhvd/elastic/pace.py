"""Measures the ranks' own time per step and finds slow ranks. Pure: no socket and no clock.

A training step takes equally long on all ranks, since they wait for each other. A slow rank is the one that
waits least. Each member computes the median of its last steps (:class:`Pace`), and the launcher compares the
members of a world (:class:`SlowMemberDetector`).
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median, median_low

__all__ = ["FACTOR", "Figure", "Pace", "SlowMember", "SlowMemberDetector", "SlowRank"]

#: A rank is slow if it takes longer than the typical one by this factor, unless the user sets another one ...
FACTOR = 1.5
#: ... and by this time; less is scheduling noise.
_EXCESS_S = 0.010
#: A slow rank stays slow until it is below this part of both thresholds.
_RELIEF = 0.8
#: A rank is reported as slow, or as no longer slow, after it has been so for this long.
_PATIENCE_S = 3.0
#: The median of so many steps counts; up to nine steps with a pause do not change it.
_STEPS = 20
#: With long steps, this number is enough if they take this long together.
_STEPS_LONG, _LONG_S = 5, 60.0
#: Interval between two figures of a member.
_SEND_INTERVAL_S = 1.0
#: Relative change of a figure after which slow ranks are published again.
_CHANGE = 0.2


@dataclass(frozen=True)
class Figure:
    """A member's report about its last steps."""

    generation: int
    own_s: float  #: of a step, in which it has not waited for others; the median
    step_s: float  #: of a whole step, likewise
    data_s: float = 0.0  #: of own_s, in which it has waited for its data; likewise

    def encoded(self) -> bytes:
        """Return it as bytes for the store."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decoded(cls, data: bytes) -> Figure:
        """Read what a member has written; raises ValueError, TypeError or KeyError."""
        values = json.loads(data)
        return cls(
            int(values["generation"]),
            float(values["own_s"]),
            float(values["step_s"]),
            float(values["data_s"]),
        )


class Pace:
    """A member's own time in its last steps of a world.

    Args:
        generation: of the world.
    """

    def __init__(self, generation: int) -> None:
        self._generation = generation
        self._steps: deque[tuple[float, float, float]] = deque(maxlen=_STEPS)  # Figure's times, of each
        self._began: tuple[float, float, float] | None = None
        self._agreed = 0
        self._sent_at = 0.0

    def step(self, now: float, waited_s: float, agreed: int, data_s: float = 0.0) -> Figure | None:
        """A step may be over.

        Args:
            now: the time.
            waited_s: how long this rank has waited for others in this world.
            agreed: how many operations it has had with them. Where there was none since the last step, this
                is the same one.
            data_s: how long it has waited for its data in this world.

        Returns:
            The figure to send to the launcher, or None if it is not time yet.
        """
        if agreed == self._agreed:
            return None
        if self._began is not None:
            whole = now - self._began[0]
            own = max(0.0, whole - (waited_s - self._began[1]))
            self._steps.append((own, whole, data_s - self._began[2]))
        self._began, self._agreed = (now, waited_s, data_s), agreed
        if now < self._sent_at + _SEND_INTERVAL_S or not self._are_enough():
            return None
        self._sent_at = now
        return Figure(self._generation, *map(median, zip(*self._steps, strict=True)))

    def _are_enough(self) -> bool:
        if len(self._steps) == _STEPS:
            return True
        return len(self._steps) >= _STEPS_LONG and sum(whole for _, whole, _ in self._steps) >= _LONG_S


@dataclass(frozen=True)
class SlowMember:
    """A member that the others wait for in every step."""

    member: int
    own_s: float  #: of a step
    typical_s: float  #: what a step takes the others
    since: float  #: when it was first found
    data_s: float = 0.0  #: of own_s, in which it waits for its data


@dataclass(frozen=True)
class SlowRank:
    """A rank that the others wait for in every step."""

    rank: int
    host: str  #: as the launcher calls it
    own_s: float  #: what a step takes it by itself, in seconds
    typical_s: float  #: what a step takes the others
    since: float  #: when it was first found to be slow, as of ``time.time()``
    data_s: float = 0.0  #: of own_s, in which it waits for its data

    @property
    def factor(self) -> float:
        """How many times as long it takes as others."""
        return self.own_s / self.typical_s if self.typical_s > 0 else float("inf")

    @property
    def waits_for_data(self) -> bool:
        """Whether waiting for data is at least half of what it takes longer than others."""
        return self.data_s >= (self.own_s - self.typical_s) / 2

    def __str__(self) -> str:
        own_ms, typical_ms, data_ms = 1e3 * self.own_s, 1e3 * self.typical_s, 1e3 * self.data_s
        by_data = f", of which it waits {data_ms:.0f} ms for data" if self.waits_for_data else ""
        return (
            f"rank {self.rank} on {self.host} is slow: its part of each step takes {own_ms:.0f} ms{by_data}; "
            f"that of the other ranks, which wait for it, takes {typical_ms:.0f} ms"
        )


class SlowMemberDetector:
    """Finds the slow members of the present world.

    Args:
        factor: how much longer than the typical member a slow one takes.

    Example::

        detector = SlowMemberDetector(factor=1.5)
        detector.begin(1, (0, 1))
        detector.add(0, Figure(1, 0.010, 0.060), now=5.0)
        detector.add(1, Figure(1, 0.058, 0.060), now=5.1)
        detector.add(1, Figure(1, 0.058, 0.060), now=8.1)
        detector.slow  # [SlowMember(1, 0.058, 0.010, 5.1)]
    """

    def __init__(self, factor: float = FACTOR) -> None:
        self._factor = factor
        self._generation = 0
        self._figures: dict[int, Figure | None] = {}
        self._doubts: dict[int, float] = {}  # since when members are not what they were found to be
        #: Members that are slow, the slowest first.
        self.slow: list[SlowMember] = []

    def begin(self, generation: int, members: Sequence[int]) -> None:
        """A world is formed; nothing is known of it yet."""
        self._generation = generation
        self._figures = dict.fromkeys(members)
        self._doubts = {}
        self.slow = []

    @property
    def step_s(self) -> float | None:
        """How long a step of this world takes, as members have reported it; None: none has."""
        reported = [figure.step_s for figure in self._figures.values() if figure is not None]
        return median(reported) if reported else None

    def add(self, member: int, figure: Figure, now: float) -> bool:
        """Add the figure of a member; return whether :attr:`slow` has changed and is to be sent again."""
        if figure.generation != self._generation or member not in self._figures:
            return False
        self._figures[member] = figure
        known = {number: figure for number, figure in self._figures.items() if figure is not None}
        if len(known) < len(self._figures):
            return False
        former = {item.member: item for item in self.slow}
        # Of two, the faster one is typical; so it is where half of the ranks are slow.
        typical_s = median_low(figure.own_s for figure in known.values())
        found = []
        for number, figure in known.items():
            since = former[number].since if number in former else None
            excess_s, part = figure.own_s - typical_s, 1.0 if since is None else _RELIEF
            is_over = excess_s > part * _EXCESS_S and excess_s > part * (self._factor - 1.0) * typical_s
            if is_over is (since is not None):
                self._doubts.pop(number, None)
            elif now >= (began := self._doubts.setdefault(number, now)) + _PATIENCE_S:
                del self._doubts[number]
                since = began if is_over else None
            if since is not None:
                found.append(SlowMember(number, figure.own_s, typical_s, since, figure.data_s))
        found.sort(key=lambda item: -item.own_s)
        is_news = former.keys() != {item.member for item in found} or any(
            abs(item.own_s - former[item.member].own_s) > _CHANGE * former[item.member].own_s
            for item in found
        )
        if is_news:
            self.slow = found
        return is_news
