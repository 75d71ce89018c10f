"""How ``init()`` enters a world: by the provider of this process's job.

Apart from :mod:`polyhvd.launch.init`, which ``import polyhvd`` needs: this has all ways to meet, and is
imported by the first ``init()``.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from polyhvd import log
from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.config import ConfigError, Launched, Settings, mpi_launch
from polyhvd.errors import (
    HorovodInternalError,
    InvalidArgumentError,
    RankMismatchError,
    UnsupportedError,
)
from polyhvd.launch.providers.choice import choose, seen
from polyhvd.launch.providers.foreign import foreign_launch
from polyhvd.launch.providers.mpi import MpiProvider
from polyhvd.launch.providers.precedence import ALONE, MPI, POLYHVDRUN, PROVIDERS, RAY
from polyhvd.launch.providers.provider import Claim, Met, Provider
from polyhvd.observe import autotune, tracing
from polyhvd.runtime import current, mpi
from polyhvd.runtime.world import World

if TYPE_CHECKING:
    from polyhvd.elastic.process import Process

__all__ = ["enter", "last_generation"]

_LOG = logging.getLogger("polyhvd")
_PARENT = "POLYHVD_PARENT"
#: By the first init() of a process of an elastic job: others may die while they meet.
_WORLDS_TRIED = 5
_generation = 0  # of the last world that init() was to enter; under current.lock


@dataclass(frozen=True)
class _Entry:
    """How this process enters a world, as ``init()`` finds it."""

    settings: Settings
    provider: Provider
    claim: Claim | None
    is_elastic: bool
    #: Identifies rank and job; empty if no launcher has started this process.
    identity: str
    #: Whether a world of one rank may be a mistake: of the settings, or of how this process was started.
    may_be_mistaken: bool = False

    def meet(self) -> Met:
        """Find the place of this process in the next world; see :meth:`Provider.meet`."""
        global _generation
        deadline = time.monotonic() + self.settings.start_timeout_s
        try:
            return self.provider.meet(self.claim, self.settings, _generation, deadline)
        except HorovodInternalError:
            _generation += 1  # as on the ranks that came further, and fail later
            raise

    def member(self) -> Process | None:
        """This process in its elastic job, once it has met the launcher; None in other jobs."""
        if not self.is_elastic:
            return None
        from polyhvd.elastic import process  # no other job needs it

        return process.find()

    def connect(
        self, met: Met, lists: list[list[int]], objects: Iterable[tuple[int | None, ProcessSet]]
    ) -> None:
        """Make the world with the ranks that were met the current one.

        Args:
            met: as of :meth:`meet`.
            lists: ranks of all process sets.
            objects: that stand for process sets; see :meth:`World.connect`.
        """
        global _generation
        settings, (placement, store, job) = self.settings, met
        _generation = placement.generation
        member = self.member()
        if member is not None:
            member.enter(settings, placement, store, lists, objects)
        else:
            world = World.connect(settings, placement, store, lists, objects, met_by_mpi=job)
            try:
                tracing.begin(world)
                if settings.steps_per_sample(placement.rank, placement.size) > 0:
                    autotune.begin(world)
            except BaseException:
                world.close()
                raise
            current.enter(world)
        if (launched := Launched.from_environment()).metrics_interval_s > 0 and launched.rendezvous:
            from polyhvd.launch import reporting  # only for polyhvdrun

            reporting.begin(launched, None if member is None else member.report_metrics)
        if self.identity and (placement.size > 1 or self.is_elastic):
            os.environ[_PARENT] = f"{os.getpid()}:{self.identity}"


def last_generation() -> int:
    """Generation of the last world that ``init()`` was to enter; 0: of none."""
    return _generation


def enter(settings: Settings, comm: object, sets: list[ProcessSet]) -> None:
    """Meet the other ranks for ``init()``, and make the world with them the current one.

    In an elastic job a place in the next world is requested a few times if one fails.
    """
    entry = _find_entry(settings, comm)
    for tried in range(1, _WORLDS_TRIED + 1):
        try:
            return _enter(entry, sets)
        except HorovodInternalError as error:
            member = entry.member()
            if (
                tried == _WORLDS_TRIED
                or member is None
                or member.launcher.reply.generation == 0
                or isinstance(error, RankMismatchError)
            ):
                raise
            _LOG.info("elastic: %s", error)
            member.fail(str(error))


def _enter(entry: _Entry, sets: list[ProcessSet]) -> None:
    is_first = _generation == 0
    met = entry.meet()
    placement, job = met.placement, met.by_mpi
    with met.store or nullcontext():
        if entry.may_be_mistaken and placement.size == 1:
            _check_single_rank(met_by_mpi=job is not None)
        log.configure(entry.settings, placement.rank, placement.generation if entry.is_elastic else 0)
        if is_first and placement.rank == 0:
            log.report_unknown()
        for item in sets:
            bad = [rank for rank in item.ranks or [] if not 0 <= rank < placement.size]
            if entry.is_elastic and placement.generation > 1:
                bad = []  # they are the remaining ranks of the first world's
            if item is global_process_set or bad:
                raise InvalidArgumentError(
                    f"{item}: ranks are 0 to {placement.size - 1}; found {bad or 'all'}"
                )
        lists, settled = _settle(job, sets)
        twice = next((ranks for i, ranks in enumerate(lists) if ranks in lists[:i]), None)
        if twice is not None:
            lists, settled, sets = _distinct(lists, settled, sets)
        numbers: list[int | None] = list(settled)
        if (member := entry.member()) is not None:
            lists, numbers = member.settle(lists, settled)
        entry.connect(met, lists, zip(numbers, sets, strict=True))
    if twice is not None:  # in a world, as with Horovod: a program that catches it has its rank and size
        raise InvalidArgumentError(
            f"init(process_sets=[...]): ranks {twice} are given as two process sets; use one for both. The "
            "first is registered"
        )


def _identity() -> str:
    """Identifies rank and job; empty if no launcher has started this process."""
    try:
        found = seen(PROVIDERS, os.environ)
    except ConfigError:
        return ""
    return hashlib.blake2b(str(found[0]).encode(), digest_size=8).hexdigest() if found else ""


def _refuse_child(parent: str, identity: str) -> None:
    """Raise UnsupportedError in a child of a rank, which has the rank's variables but is not a rank."""
    child, (process, _, job) = current.child_of(), parent.partition(":")
    if not child and job and job == identity and process != str(os.getpid()):
        place = seen(PROVIDERS, os.environ)[0].claim.rank
        child = f"this is a child of {'a rank' if place is None else f'rank {place}'} (process {process})"
    if child:
        raise UnsupportedError(
            f"init(): {child}, so it cannot be a rank itself. For a world of one rank in it, set "
            "POLYHVD_ALONE=1 in its environment; if it is here because a spawned child imports this module, "
            "call init() under if __name__ == '__main__'"
        )


def _find_entry(settings: Settings, comm: object) -> _Entry:
    """How this process enters a world, from its environment, the settings and ``init(comm=...)``."""
    launched = Launched() if settings.alone else Launched.from_environment()
    identity = ""
    if not settings.alone:
        identity = _identity()
        _refuse_child(launched.parent, identity)
    log.configure(settings, launched.rank)

    if settings.alone and comm is None:
        return _Entry(settings, ALONE, None, False, identity)
    ranks = None if comm is None or mpi.is_communicator(comm) else mpi.checked_ranks(comm)
    asked = mpi.is_asked_for(settings, comm, launched=True)  # by the settings, or by comm
    chosen = choose([] if asked else seen(_candidates(settings), os.environ))
    if asked or (
        chosen is not None and chosen.provider is MPI and mpi.is_asked_for(settings, comm, launched=False)
    ):
        provider = MpiProvider(comm if ranks is None else None, ranks)
        return _Entry(settings, provider, None, False, identity, comm is None)
    if ranks is not None:
        raise InvalidArgumentError(
            f"init(comm={comm!r}): a list of ranks needs a job that MPI has started; use a ProcessSet"
        )
    if chosen is None or chosen.provider in (MPI, POLYHVDRUN):
        if launched.member is None:
            return _Entry(settings, POLYHVDRUN, None, False, identity, may_be_mistaken=True)
        from polyhvd.launch.providers.elastic import MemberProvider  # no other job needs it

        return _Entry(settings, MemberProvider(launched), None, True, identity)
    if chosen.provider is RAY and RAY.elastic is not None:
        return _Entry(settings, RAY.elastic, None, True, identity)
    return _Entry(settings, chosen.provider, chosen.claim, False, identity)


def _candidates(settings: Settings) -> tuple[Provider, ...]:
    """The providers that may start the ranks of this process's job, as the settings go."""
    return tuple(item for item in PROVIDERS if item is not MPI or settings.controller != "gloo")


def _check_single_rank(*, met_by_mpi: bool) -> None:
    """Raise ConfigError in a world of one whose process a launcher has started as one of several."""
    launch = mpi_launch()
    others = [] if launch is not None and launch.size else seen(PROVIDERS, os.environ)
    for other in others:
        if other.provider is not MPI and (other.claim.rank or (other.claim.size or 1) > 1):
            raise ConfigError(
                f"init(): MPI has started only this process, but {other}. Leave out what asks for MPI "
                "(POLYHVD_CONTROLLER, POLYHVD_BACKENDS), or set POLYHVD_ALONE=1 for a world of one rank"
            )
    foreign = foreign_launch(os.environ, met_by_mpi=met_by_mpi)
    if foreign is None:
        return
    text = f"init(): {foreign}"
    if not foreign.certain:
        _LOG.warning("%s; it continues as a world of one. If there are other ranks, %s", text, foreign.cure)
        return
    raise ConfigError(
        f"{text}, and polyhvd cannot join the others: it would train alone. Instead, {foreign.cure}. "
        "For a world of one rank on purpose, set POLYHVD_ALONE=1"
    )


def _settle(job: mpi.MpiJob | None, sets: list[ProcessSet]) -> tuple[list[list[int]], list[int]]:
    """The ranks of all process sets that there will be, and for each of ``sets`` its number."""
    named: list[list[list[int]]] = [[] for _ in sets]
    mine = [None if item.members is None else mpi.ranks_in(job, item.members) for item in sets]
    if job is not None:
        named = job.resolve(mine)
    for item, ranks in zip(sets, mine, strict=True):
        item.ranks = item.ranks if ranks is None else ranks
    lists: list[list[int]] = []
    numbers = []
    for item, choices in zip(sets, named, strict=True):
        ranks = item.ranks or next(iter(choices), None)  # another's, where this rank is not a member
        if not ranks:
            raise InvalidArgumentError(f"{item} has no members")
        item.ranks = ranks
        choices = choices if ranks in choices else [ranks]
        numbers.append(1 + len(lists) + choices.index(ranks))
        lists += choices
    return lists, numbers


def _distinct(
    lists: list[list[int]], numbers: list[int], sets: list[ProcessSet]
) -> tuple[list[list[int]], list[int], list[ProcessSet]]:
    """The first process set of each list of ranks, as :func:`_settle` returns them with ``sets``."""
    distinct = [ranks for i, ranks in enumerate(lists) if ranks not in lists[:i]]
    first: dict[int, ProcessSet] = {}
    for number, item in zip(numbers, sets, strict=True):
        first.setdefault(1 + distinct.index(lists[number - 1]), item)
    return distinct, list(first), list(first.values())
