"""This process as a member of an elastic job: its seat, what it says when it asks for a place, its way back.

There is one in a process at most, made by the first ``init()``: :mod:`polyhvd.launch.providers.elastic`.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress

from polyhvd.collectives.adapter import OpKind
from polyhvd.config import Settings
from polyhvd.elastic import leaving
from polyhvd.elastic.limits import BEGUN, RESUME_STATUS, UNKNOWN
from polyhvd.elastic.pace import Pace, SlowRank
from polyhvd.elastic.places import BEGINS, PROGRESS, SAYS, STEPS, Answer, Question, Seat
from polyhvd.elastic.watch import Watch
from polyhvd.observe import tracing
from polyhvd.observe.autotune import Autotuner
from polyhvd.rendezvous.store import StoreError
from polyhvd.runtime import current
from polyhvd.runtime.prologue import Prologue
from polyhvd.runtime.world import Member, World

__all__ = ["Process", "find", "take_seat"]

_LOG = logging.getLogger("polyhvd")
_NOTICE = 1
_MEETING_S = 20.0  # others may be writing a checkpoint
_LOOK_S = 0.0001
#: An eighth of the pipe: it also has room for errors that other ranks have caused.
_PIPE_BYTES_OF_REPORT = 16


class Process:
    """See the module. All methods but those about steps run under ``current.lock``.

    Args:
        seat: the connection to the launcher.
        watch: what hears from it meanwhile.
    """

    def __init__(self, seat: Seat, watch: Watch) -> None:
        self.seat = seat
        self.watch = watch
        #: Enters the next world as ``init()`` has entered the first; None: there was none yet.
        self.rejoin: Callable[[], None] | None = None
        #: Of a process that was rank 0 of a job that is tuned.
        self.autotuner: Autotuner | None = None
        self._wired = False
        self._progressed = False
        self._failure = ""
        self._dead: list[int] = []  # members of the last world whose processes are dead
        self._pace: Pace | None = None  # in the present world, if there are others
        self._sets: list[list[int]] = []  # of the present world or the last: members of each, some of none
        self._numbers: list[int | None] = []  # of each in the present world
        self._objects: list[tuple[Member, int]] = []  # of the last world, and which of these each was
        #: What this process has counted in former worlds.
        self.counted: dict[str, int] = {}
        #: The last outermost call of an elastic function, from 1.
        self.call = 0
        #: The number of the last commit of that call's state, set before this process asks for its next
        #: place; -1: there is none.
        self.commits = -1
        self._has_progressed = False  # in any world
        self._reports = 0
        self._timeline: tracing.Carried | None = None  # of the last world, for the next one
        #: Collectives before the first elastic function.
        self.prologue = Prologue(seat.published)
        self._has_published = False
        current.on_leave(self._remember)

    def say(self, text: str) -> None:
        """Have the launcher print a line."""
        self.watch.tell(SAYS, text.encode(errors="replace"), again=True)

    def report(self, progress: bytes) -> None:
        """Tell the launcher how far the program is; it reads that when this process has ended.

        Args:
            progress: ``BEGUN`` or ``FINISHED`` of :mod:`polyhvd.elastic.limits`.
        """
        self._reports += 1
        descriptor = Settings().report_descriptor
        if descriptor < 0:
            return
        most = fcntl.fcntl(descriptor, fcntl.F_GETPIPE_SZ) // _PIPE_BYTES_OF_REPORT
        if self._reports <= most:
            with suppress(BlockingIOError):
                os.write(descriptor, (progress if self._reports < most else UNKNOWN) + b"\0")

    @property
    def is_behind(self) -> bool:
        """Whether the other ranks are in an elastic function that this process has not come to.

        The launcher has said which call the others were in when they asked for this world. No rank passes the
        first exchange of a call before all have come to it.
        """
        return self.call < self.seat.answer.call

    def begin_call(self, number: int) -> None:
        """The program has called an outermost elastic function, also where it is skipped.

        Args:
            number: of the call, from 1: programs are the same on all ranks, and so are numbers.
        """
        joins, self.call = self.is_behind, number
        self.prologue.end()
        if not self.is_behind:
            self.report(BEGUN)
            if joins:
                self.watch.tell(BEGINS, b"", again=True)
        if (world := current.find()) is not None:
            world.engine.behind = self.is_behind
            self._publish(world)

    def _publish(self, world: World) -> None:
        """Have the launcher keep what was recorded; a later rank 0 does it again where the first was lost."""
        if self.call and world.placement.rank == 0 and not self._has_published:
            self._has_published = True
            with suppress(StoreError):  # it is seen where the next place is asked for
                self.seat.publish(self.prologue.encoded())

    def next_place(self) -> Answer:
        """Wait for a place in the next world; raises SystemExit where there is none."""
        flags = self._wired, self._progressed, self._failure
        former = self.seat.answer
        question = Question(former.generation, *flags, self.call, self._sets, self._dead, self.commits)
        try:
            if self.watch.fault:
                raise StoreError(self.watch.fault)
            answer = self.seat.next_place(question, current.prepare)
        except SystemExit:
            if (timeline := self.take_timeline()) is not None:
                timeline.file.close()
            last = self.seat.answer
            if last.leaves and former.generation and self.seat.member in last.members:
                rank, size = last.members.index(self.seat.member), len(last.members)
                leaving.take_leave(leaving.Leave(rank, size, everyone=last.leaves == "all"))
            raise
        except StoreError as error:
            _LOG.error(
                "elastic: %s: status %d, run the job again, to resume from its checkpoint",
                *(error, RESUME_STATUS),
            )
            raise SystemExit(RESUME_STATUS) from None
        self._wired, self._progressed, self._failure, self._dead = False, False, "", []
        return answer

    def take_timeline(self) -> tracing.Carried | None:
        """The timeline that this process has taken along from its last world, once."""
        taken, self._timeline = self._timeline, None
        return taken

    def leave(self) -> None:
        """Leave the present world, if there is one, for the next."""
        if (world := current.find()) is not None:
            self._timeline = tracing.hand_over(world)
            self.counted = {name: value for name, value in world.counters().items() if name != "pending"}
        current.leave()

    def progress(self) -> None:
        """This process has completed a step, which the next failure does not undo."""
        if not self._has_progressed:
            self._has_progressed = True
            self.watch.tell(PROGRESS, b"")
        self._progressed = (
            True  # one reference is written; a world that ends meanwhile has progressed as well
        )

    def step(self) -> None:
        """A step may be over: the launcher is sent now and then how long they take."""
        world, pace = current.find(), self._pace
        if world is None or pace is None:
            return
        if (figure := pace.step(time.monotonic(), *world.engine.waits, world.data_wait_s)) is not None:
            self.watch.tell(STEPS, figure.encoded(), again=True)

    def slow_ranks(self) -> list[SlowRank]:
        """Who is slow in the present world, as the launcher has said last."""
        world = current.find()
        generation, ranks = self.watch.slow
        return list(ranks) if world is not None and world.placement.generation == generation else []

    def fail(self, text: str) -> None:
        """A collective has failed in the present world."""
        self._failure = text

    def is_awaited(self) -> bool:
        """Whether the world is to come to a boundary: alike on all its ranks after the same operations."""
        world = current.find()
        if world is None:
            return False
        if world.placement.rank == 0 and self.seat.has_notice():
            if world.placement.size == 1:
                return True  # at once: there may be no further operation
            world.engine.notify(_NOTICE)
        return world.engine.notice >= _NOTICE

    def meet(self, where: str) -> bool:
        """Wait until all ranks of the present world have come here, as a rank that leaves fails the others.

        A rank may have gone on, or have left for good, where the program is not the same on all ranks: it is
        not waited for longer than a while.

        Args:
            where: what this place is called; the same on all ranks.

        Returns:
            Whether all have come.

        Raises:
            HorovodInternalError: a rank was lost or has shut down.
        """
        world = current.find()
        if world is None or world.placement.size == 1:
            return True
        handle = world.engine.submit(OpKind.BARRIER, where, (), None)
        until = time.monotonic() + _MEETING_S
        while not handle.done():
            if time.monotonic() > until:
                return False
            time.sleep(_LOOK_S)
        handle.wait()
        return True

    # Process sets

    def settle(self, lists: list[list[int]], numbers: list[int]) -> tuple[list[list[int]], list[int | None]]:
        """What becomes of the process sets of ``init()`` in a world that follows another one.

        Args:
            lists: ranks of all process sets that ``init()`` was called with.
            numbers: of the objects that it was called with, from 1.

        Returns:
            The ranks of all process sets, and the number of each of those objects; None: all its members are
            lost. In the first world they are as they were.
        """
        answer = self.seat.answer
        listed = answer.sets or lists
        unique = [ranks for i, ranks in enumerate(listed) if ranks and ranks not in listed[:i]]
        self._numbers = [1 + unique.index(ranks) if ranks else None for ranks in listed]
        self._sets = [[answer.members[rank] for rank in ranks] for ranks in listed]
        places = [number - 1 for number in numbers]
        return unique, [self._numbers[place] if place < len(listed) else None for place in places]

    def entered(self, world: World, rejoin: Callable[[], None]) -> None:
        """The next world is there; objects of the last one's process sets stand for those that it has."""
        self.rejoin = rejoin
        self._wired = True
        world.engine.behind = self.is_behind
        if self.is_behind:
            _LOG.info(
                "elastic: this process joins a running job: until it comes to its elastic function, "
                "broadcasts leave its own values, and barriers return at once"
            )
        self._publish(world)
        self._pace = Pace(world.placement.generation) if world.placement.size > 1 else None
        self.watch.follow(world)
        for item, place in self._objects:
            number = self._numbers[place]
            if item.process_set_id is not None:
                continue
            item.ranks = world.engine.process_sets()[number] if number is not None else []
            if number is not None:
                world.register(item, number)
        self._objects = []

    def _remember(self, world: World) -> None:
        """Before a world ends: its dead and which process sets it has had, as members rather than ranks."""
        members = self.seat.answer.members
        self._dead = [members[rank] for rank in world.engine.dead_here]
        sets = dict(world.engine.process_sets())
        for place, number in enumerate(self._numbers):
            if number is not None and number not in sets:  # it was removed
                self._sets[place], self._numbers[place] = [], None
        for number in sorted(sets.keys() - {0, *self._numbers, *world.passing_sets}):
            self._sets.append([members[rank] for rank in sets[number]])
            self._numbers.append(number)
        places = {number: place for place, number in reversed(list(enumerate(self._numbers))) if number}
        self._objects = [(item, places[number]) for item, number in world.objects() if number in places]


_process: Process | None = None  # under current.lock


def find() -> Process | None:
    """This process as a member, or None: its job is not elastic, or ``init()`` was not called."""
    return _process


def take_seat(make: Callable[[], Seat], make_watch: Callable[[Seat], Watch]) -> Process:
    """This process as a member, which is made by the first call; raises what the functions do."""
    global _process
    if _process is None:
        seat = make()
        _process = Process(seat, make_watch(seat))
        leaving.heed(_process.watch)
    return _process
