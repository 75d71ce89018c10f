"""How ``init()`` enters a world: by the provider whose job this process belongs to.

Apart from :mod:`polyhvd.launch.init`, which ``import polyhvd`` needs: this has all ways to meet, and is
imported by the first ``init()``.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
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
from polyhvd.launch.providers.local import meet_as
from polyhvd.launch.providers.precedence import MPI, POLYHVDRUN, PROVIDERS
from polyhvd.launch.providers.provider import Provider
from polyhvd.observe import tracing
from polyhvd.observe.autotune import Autotuner
from polyhvd.rendezvous.store import Store
from polyhvd.runtime import current, mpi
from polyhvd.runtime.placement import Placement
from polyhvd.runtime.world import World

if TYPE_CHECKING:
    from polyhvd.elastic.process import Process

__all__ = ["enter", "enter_first"]

_LOG = logging.getLogger("polyhvd")
_PARENT = "POLYHVD_PARENT"
#: By the first init() of a process of an elastic job: others may die while they meet.
_WORLDS_TRIED = 5
_generation = 0  # of the last world that this process was to be in; under current.lock


def enter_first(settings: Settings, comm: object, sets: list[ProcessSet]) -> None:
    """:func:`enter` for ``init()``: in an elastic job, ask for the next world a few times if one fails."""
    for _ in range(_WORLDS_TRIED - 1):
        try:
            return enter(settings, comm, sets)
        except HorovodInternalError as error:
            member = None if settings.alone or Launched.from_environment().member is None else _member()
            if member is None or member.seat.answer.generation == 0 or isinstance(error, RankMismatchError):
                raise
            _LOG.info("elastic: %s", error)
            member.fail(str(error))
    return enter(settings, comm, sets)


def enter(settings: Settings, comm: object, sets: list[ProcessSet]) -> None:
    """Meet the other ranks, and make the world with them the current one."""
    global _generation
    launched = Launched() if settings.alone else Launched.from_environment()
    identity = ""
    if not settings.alone:
        identity = _identity()
        _refuse_child(launched.parent, identity)
    log.configure(settings, launched.rank)
    MPI.forget()  # what is left of an init() that failed: the others had to hear of it
    is_first = _generation == 0
    try:
        placement, store = _meet(settings, comm)
    except HorovodInternalError:
        _generation += 1  # as on the ranks that came further, and fail later
        raise
    job = MPI.job
    log.configure(settings, placement.rank)
    if is_first and placement.rank == 0:
        log.report_unknown()
    try:
        for item in sets:
            bad = [rank for rank in item.ranks or [] if not 0 <= rank < placement.size]
            if launched.member is not None and placement.generation > 1:
                bad = []  # they are what is left of those of the first world
            if item is global_process_set or bad:
                raise InvalidArgumentError(
                    f"{item}: ranks are 0 to {placement.size - 1}; found {bad or 'all'}"
                )
        lists, settled = _settle(job, sets)
        twice = next((ranks for i, ranks in enumerate(lists) if ranks in lists[:i]), None)
        if twice is not None:
            lists, settled, sets = _distinct(lists, settled, sets)
        numbers: list[int | None] = list(settled)
        member = None if launched.member is None else _member()
        if member is not None:
            lists, numbers = member.settle(lists, settled)
        _generation = placement.generation
        world = World.connect(settings, placement, store, lists, met_by_mpi=job)
    finally:
        if store is not None:
            store.close()
    try:
        world.member = launched.member
        world.counted = {} if member is None else member.counted
        tracing.begin(world, None if member is None else member.take_timeline())
        if settings.steps_per_sample(placement.rank, placement.size) > 0:
            world.on_sample(_autotuner(settings, world, member).observe)
    except BaseException:
        world.close()
        raise
    for number, item in zip(numbers, sets, strict=True):
        item.ranks = lists[number - 1] if number else []
        if number:
            world.register(item, number)
    if member is not None:
        member.entered(world, lambda: _enter_next(settings))
    current.enter(world)
    if identity and placement.size > 1:
        os.environ[_PARENT] = f"{os.getpid()}:{identity}"
    if twice is not None:  # in a world, as with Horovod: a program that catches it has its rank and size
        raise InvalidArgumentError(
            f"init(process_sets=[...]): ranks {twice} are given as two process sets; use one for both. The "
            "first is registered"
        )


def _identity() -> str:
    """Tells ranks and jobs apart; empty where no launcher has started this process."""
    try:
        found = seen(PROVIDERS, os.environ)
    except ConfigError:
        return ""
    return hashlib.blake2b(str(found[0]).encode(), digest_size=8).hexdigest() if found else ""


def _refuse_child(parent: str, identity: str) -> None:
    """Raise UnsupportedError in a child of a rank, which has the rank's variables but is no rank."""
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


def _autotuner(settings: Settings, world: World, member: Process | None) -> Autotuner:
    """Rank 0's, which goes on from one world of an elastic job to the next as long as that is like it."""
    tune = world.engine.tune
    kept = None if member is None else member.autotuner
    if kept is not None:
        if kept.go_on(world.hosts, tune):
            return kept
        kept.close()
    made = Autotuner(settings, world.hosts, tune, appends=world.placement.generation > 1)
    if member is not None:
        member.autotuner = made
    return made


def _member() -> Process | None:
    from polyhvd.elastic import process  # no other job needs it

    return process.find()


def _enter_next(settings: Settings) -> None:
    """Leave the world for the next one of an elastic job, as ``init()`` has entered it."""
    from polyhvd.elastic.process import leave_for_next  # no other job needs it

    with current.lock:
        leave_for_next()
        enter(settings, None, [])


def _meet(settings: Settings, comm: object) -> tuple[Placement, Store | None]:
    """This rank's place among those of its job, and where they meet, by the provider whose job it is."""
    if settings.alone and comm is None:
        return meet_as(Launched(), _generation, 0.0)
    ranks = None if comm is None or mpi.is_communicator(comm) else mpi.checked_ranks(comm)
    deadline = time.monotonic() + settings.start_timeout_s
    asked = mpi.is_asked_for(settings, comm, launched=True)  # by the settings, or by comm
    found = [] if asked else seen(_candidates(settings), os.environ)
    chosen = choose(found)
    by_mpi = asked or (
        chosen is not None and chosen.provider is MPI and mpi.is_asked_for(settings, comm, launched=False)
    )
    if by_mpi:
        MPI.world = (comm if ranks is None else None, ranks)
        met = MPI.meet(MPI.detect(os.environ), settings, _generation, deadline)
    elif ranks is not None:
        raise InvalidArgumentError(
            f"init(comm={comm!r}): a list of ranks needs a job that MPI has started; use a ProcessSet"
        )
    elif chosen is None or chosen.provider is MPI:
        met = POLYHVDRUN.meet(None, settings, _generation, deadline)
    else:
        return chosen.provider.meet(chosen.claim, settings, _generation, deadline)
    if comm is None and met[0].size == 1:
        _refuse_to_be_alone(met_by_mpi=by_mpi)
    return met


def _candidates(settings: Settings) -> tuple[Provider, ...]:
    """The providers that may start the ranks of this process's job, as the settings go."""
    return tuple(item for item in PROVIDERS if item is not MPI or settings.controller != "gloo")


def _refuse_to_be_alone(*, met_by_mpi: bool) -> None:
    """Raise ConfigError in a world of one whose process a launcher has started as one of several."""
    launch = mpi_launch()
    others = [] if launch is not None and launch.size else seen(PROVIDERS, os.environ)
    for other in others:
        if other.provider is not MPI and (other.claim.rank or (other.claim.size or 1) > 1):
            raise ConfigError(
                f"init(): this process is alone for MPI, but {other}. Leave out what asks for MPI "
                "(POLYHVD_CONTROLLER, POLYHVD_BACKENDS), or set POLYHVD_ALONE=1 for a world of one rank"
            )
    foreign = foreign_launch(os.environ, met_by_mpi=met_by_mpi)
    if foreign is None:
        return
    said = f"init(): {foreign}"
    if not foreign.certain:
        _LOG.warning("%s; it goes on as a world of one. If there are others, %s", said, foreign.cure)
        return
    raise ConfigError(
        f"{said}, and polyhvd cannot join the others: it would train alone. Instead, {foreign.cure}. "
        "For a world of one rank on purpose set POLYHVD_ALONE=1"
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
        ranks = item.ranks or next(iter(choices), None)  # another's, where this rank is no member
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
