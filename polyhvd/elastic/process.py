"""This process as a member of an elastic job: its connection, its place requests, and how it joins again.

There is one in a process at most, made by the first ``init()``: :mod:`polyhvd.launch.providers.elastic`. From
then on :meth:`Process.rejoin` enters each next world.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress

from polyhvd import log
from polyhvd.collectives.adapter import OpKind
from polyhvd.config import Launched, Settings
from polyhvd.elastic import leaving
from polyhvd.elastic.limits import BEGUN, RESUME_STATUS, UNKNOWN
from polyhvd.elastic.pace import Pace, SlowRank
from polyhvd.elastic.places import (
    BEGUN_CALLS,
    MESSAGES,
    PROGRESS,
    STEPS,
    LauncherConnection,
    PlaceReply,
    PlaceRequest,
)
from polyhvd.elastic.watch import LauncherWatch
from polyhvd.errors import HorovodInternalError
from polyhvd.observe import autotune, tracing
from polyhvd.rendezvous.client import Client
from polyhvd.rendezvous.store import Store, StoreError, job_name
from polyhvd.runtime import current
from polyhvd.runtime.metrics import SCOPE
from polyhvd.runtime.placement import Placement
from polyhvd.runtime.prologue import Prologue
from polyhvd.runtime.world import Member, World

__all__ = ["Process", "become_member", "find"]

_LOG = logging.getLogger("polyhvd")
_NOTICE = 1
_MEETING_S = 20.0  # others may be writing a checkpoint
_LOOK_S = 0.0001
#: An eighth of the pipe: it also has room for errors that other ranks have caused.
_PIPE_BYTES_OF_REPORT = 16


class Process:
    """See the module. All methods but those about steps run under ``current.lock``.

    Args:
        launched: the launcher's variables of this process.
        secret: the job's.
        launcher: the connection to the launcher.
        watch: the thread that receives from the launcher while the program runs.
    """

    def __init__(
        self, launched: Launched, secret: bytes, launcher: LauncherConnection, watch: LauncherWatch
    ) -> None:
        self._launched, self._secret = launched, secret
        #: Identifies the job over all generations, wherever their members meet.
        self.job = job_name("elastic", secret)
        self._settings = Settings()  # of the last init() that has entered a world
        self.launcher = launcher
        self.watch = watch
        #: Of a process that was rank 0 of a job that is tuned.
        self._autotuner: autotune.Autotuner | None = None
        self._connected = False
        self._progressed = False
        self._failure = ""
        self._dead: list[int] = []  # members of the last world whose processes are dead
        self._pace: Pace | None = None  # in the present world, if there are others
        #: The number of worlds that this process has been in.
        self.worlds = 0
        self._sets: list[list[int]] = []  # of the present world or the last: members of each, some of none
        self._numbers: list[int | None] = []  # of each in the present world
        self._objects: list[tuple[Member, int]] = []  # of the last world, and which of these each was
        self._counted: dict[str, int] = {}  # by this process in former worlds
        #: The last outermost call of an elastic function, from 1.
        self.call = 0
        #: The number of the last commit of that call's state, set before this process asks for its next
        #: place; -1: there is none.
        self.commits = -1
        self._has_progressed = False  # in any world
        self._reports = 0
        #: How far the program is, as :meth:`report` takes it.
        self.progress_made = b""
        self._timeline: tracing.Carried | None = None  # of the last world, for the next one
        #: Collectives before the first elastic function.
        self.prologue = Prologue(launcher.published)
        self._has_published = False
        current.on_leave(self._remember)

    def send_message(self, text: str) -> None:
        """Send a line for the launcher to print."""
        self.watch.send(MESSAGES, text.encode(errors="replace"), again=True)

    def report_metrics(self, report: bytes) -> None:
        """Send this process's metrics to the launcher; never waits.

        Args:
            report: as :func:`polyhvd.launch.reporting.report_of` makes it.
        """
        self.watch.send(SCOPE, report, again=True)

    def report(self, progress: bytes) -> None:
        """Record how far the program is; the launcher reads it when this process has ended.

        Args:
            progress: ``BEGUN`` or ``FINISHED`` of :mod:`polyhvd.elastic.limits`.
        """
        self._reports += 1
        self.progress_made = progress
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

        The launcher's reply has the call that the others were in when they requested a place. No rank passes
        the first exchange of a call before all ranks are in it.
        """
        return self.call < self.launcher.reply.call

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
                self.watch.send(BEGUN_CALLS, b"", again=True)
        if (world := current.find()) is not None:
            world.engine.behind = self.is_behind
            self._publish(world)

    def _publish(self, world: World) -> None:
        """Send the recorded results to the launcher; a later rank 0 does so again if the first was lost."""
        if self.call and world.placement.rank == 0 and not self._has_published:
            self._has_published = True
            with suppress(StoreError):  # the next place request fails, too
                self.launcher.publish(self.prologue.encoded())

    def next_place(self) -> PlaceReply:
        """Wait for a place in the next world; raises SystemExit where there is none."""
        flags = self._connected, self._progressed, self._failure
        former = self.launcher.reply
        request = PlaceRequest(former.generation, *flags, self.call, self._sets, self._dead, self.commits)
        try:
            if self.watch.fault:
                raise StoreError(self.watch.fault)
            reply = self.launcher.next_place(request, current.prepare)
        except SystemExit:
            if (timeline := self.take_timeline()) is not None:
                timeline.file.close()
            last = self.launcher.reply
            if last.leaves and former.generation and self.launcher.member in last.members:
                rank, size = last.members.index(self.launcher.member), len(last.members)
                leaving.run_callbacks(leaving.Leave(rank, size, everyone=last.leaves == "all"))
            raise
        except StoreError as error:
            _LOG.error(
                "elastic: %s: status %d, run the job again, to resume from its checkpoint",
                *(error, RESUME_STATUS),
            )
            raise SystemExit(RESUME_STATUS) from None
        self._connected, self._progressed, self._failure, self._dead = False, False, "", []
        return reply

    def take_timeline(self) -> tracing.Carried | None:
        """Return the timeline of the last world, which this process carries to the next one, once."""
        taken, self._timeline = self._timeline, None
        return taken

    def leave(self) -> None:
        """Leave the present world, if there is one, for the next."""
        if (world := current.find()) is not None:
            self._timeline = tracing.hand_over(world)
            counted = {name: value for name, value in world.counters().items() if name != "pending"}
            self._counted = {**counted, "world_changes": self.worlds}
        current.leave()

    def join(self, settings: Settings) -> tuple[Placement, Store | None]:
        """Wait for a place in the next world, and connect to the store in which its ranks meet.

        Args:
            settings: of this process.

        Returns:
            The place, and the store; None in a world of one.

        Raises:
            HorovodInternalError: the store cannot be reached.
            SystemExit: the job is over, or does not need this process any more; or the launcher is gone.
        """
        reply = self.next_place()
        placement = reply.placement(self.launcher.member)
        if placement.size == 1:
            return placement, None
        try:
            store = Client(
                reply.rendezvous or self._launched.rendezvous,
                self._secret,
                rank=placement.rank,
                generation=placement.generation,
                deadline=time.monotonic() + settings.start_timeout_s,
            )
        except StoreError as error:
            raise _unreachable(self.launcher.member, error) from None
        store.job = self.job
        return placement, store

    def enter(
        self,
        settings: Settings,
        placement: Placement,
        store: Store | None,
        lists: Sequence[Sequence[int]],
        objects: Iterable[tuple[int | None, Member]] = (),
    ) -> None:
        """Connect the next world, and make it the current one.

        Args:
            settings: of this process.
            placement, store: as of :meth:`join`.
            lists: ranks of all process sets.
            objects: that stand for process sets; see :class:`World`.
        """
        world = World(
            settings,
            placement,
            store,
            lists,
            objects,
            member=self.launcher.member,
            counted=self._counted,
            prologue=self.prologue,
        )
        self._autotuner = tracing.begin(world, self.take_timeline(), self._autotuner)
        self._settings = settings
        self._entered(world)
        current.enter(world)

    def rejoin(self) -> None:
        """Leave the world, if there is one, and enter the next one of the job."""
        with current.lock:
            self.leave()
            placement, store = self.join(self._settings)
            with store or nullcontext():
                log.configure(self._settings, placement.rank, placement.generation)
                self.enter(self._settings, placement, store, self.settle([], [])[0])

    def progress(self) -> None:
        """Record that this process has completed a step that the next failure does not undo."""
        if not self._has_progressed:
            self._has_progressed = True
            self.watch.send(PROGRESS, b"")
        self._progressed = (
            True  # one reference is written; a world that ends meanwhile has progressed as well
        )

    def step(self) -> None:
        """A step may be over: send the launcher the step time if it is due."""
        world, pace = current.find(), self._pace
        if world is None or pace is None:
            return
        if (figure := pace.step(time.monotonic(), *world.engine.waits, world.data_wait_s)) is not None:
            self.watch.send(STEPS, figure.encoded(), again=True)

    @property
    def state_lost(self) -> str:
        """The value of ``--on-state-lost`` if the state was lost and this world has not committed since."""
        return "" if self._progressed else self.launcher.reply.state_lost

    def slow_ranks(self) -> list[SlowRank]:
        """The slow ranks of the present world, as the launcher has last reported them."""
        world = current.find()
        generation, ranks = self.watch.slow
        return list(ranks) if world is not None and world.placement.generation == generation else []

    def fail(self, text: str) -> None:
        """A collective has failed in the present world."""
        self._failure = text

    def is_awaited(self) -> bool:
        """Return whether the world must stop at a boundary; equal on all ranks after the same operations."""
        world = current.find()
        if world is None:
            return False
        if world.placement.rank == 0 and self.launcher.has_notice():
            if world.placement.size == 1:
                return True  # at once: there may be no further operation
            world.engine.notify(_NOTICE)
        return world.engine.notice >= _NOTICE

    def meet(self, where: str) -> bool:
        """Wait until all ranks of the present world are here, since a rank that leaves fails the others.

        If ranks run different programs, one of them may have continued or left. So the wait has a limit.

        Args:
            where: name of the barrier; the same on all ranks.

        Returns:
            Whether all ranks have arrived.

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
        """The process sets of ``init()`` in a world that follows another one.

        Args:
            lists: ranks of all process sets that ``init()`` was called with.
            numbers: of the objects that it was called with, from 1.

        Returns:
            The ranks of all process sets, and the number of each of those objects; None: all its members are
            lost. In the first world they are as they were.
        """
        reply = self.launcher.reply
        listed = reply.sets or lists
        unique = [ranks for i, ranks in enumerate(listed) if ranks and ranks not in listed[:i]]
        self._numbers = [1 + unique.index(ranks) if ranks else None for ranks in listed]
        self._sets = [[reply.members[rank] for rank in ranks] for ranks in listed]
        places = [number - 1 for number in numbers]
        return unique, [self._numbers[place] if place < len(listed) else None for place in places]

    def _entered(self, world: World) -> None:
        """The next world is connected: assign the last world's process set objects to its process sets."""
        self._connected = True
        self.worlds += 1
        world.engine.behind = self.is_behind
        if self.is_behind:
            _LOG.info(
                "elastic: this process joins a running job: until it reaches its elastic function, "
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
        """Before a world ends, record its dead ranks and its process sets as member numbers."""
        members = self.launcher.reply.members
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


def become_member(launched: Launched, secret: bytes, deadline: float) -> Process:
    """This process as a member; the first call makes it.

    Args:
        launched: the launcher's variables of this process.
        secret: the job's.
        deadline: to have reached the launcher, by time.monotonic().

    Raises:
        HorovodInternalError: the launcher cannot be reached.
    """
    global _process
    if _process is None:
        member, silence_s = launched.member or 0, launched.launcher_timeout_s

        def connected() -> Client:
            return Client(launched.rendezvous, secret, rank=member, generation=0, deadline=deadline)

        try:
            store = connected()
            store.probe(silence_s)
            launcher = LauncherConnection(store, member)
            watching = connected()
            watching.give_up_after(silence_s)
        except StoreError as error:
            raise _unreachable(member, error) from None
        watch = LauncherWatch(watching, launcher, silence_s)
        _process = Process(launched, secret, launcher, watch)
        leaving.handle_sigterm(watch)
    return _process


def _unreachable(member: int, error: StoreError) -> HorovodInternalError:
    return HorovodInternalError(f"process {member} of this elastic job: {error}")
