"""How ``init()`` enters a world: by the provider of this process's job.

Later worlds of an elastic job need nothing of this: :meth:`polyhvd.elastic.process.Process.rejoin`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from contextlib import nullcontext

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
from polyhvd.launch.providers.precedence import ALONE, MPI, POLYHVDRUN, PROVIDERS
from polyhvd.launch.providers.provider import Claim, Met, Provider
from polyhvd.observe import tracing
from polyhvd.runtime import current, mpi
from polyhvd.runtime.world import World

__all__ = ["enter", "last_generation"]

_LOG = logging.getLogger("polyhvd")
_PARENT = "POLYHVD_PARENT"
_WORLDS_TRIED = 5  # by an init(), in jobs that have another world to enter
_generation = 0  # of the last world that init() was to enter; under current.lock


def last_generation() -> int:
    """Generation of the last world that ``init()`` was to enter; 0: of none."""
    return _generation


def enter(settings: Settings, comm: object, sets: list[ProcessSet]) -> None:
    """Meet the other ranks for ``init()``, and make the world with them the current one.

    If that fails, some jobs have another world, which this process enters.
    """
    launched = Launched() if settings.alone else Launched.from_environment()
    identity = "" if settings.alone else _identity()
    if not settings.alone:
        _refuse_child(launched.parent, identity)
    log.configure(settings, launched.rank)
    chosen, claim = _chosen(settings, comm)
    provider = chosen.for_job(claim, settings, comm)
    for tried in range(1, _WORLDS_TRIED + 1):
        try:
            met = _meet(provider, claim, settings)
            with met.store or nullcontext():
                twice = _connect(met, settings, sets)
            break
        except HorovodInternalError as error:
            if (
                tried == _WORLDS_TRIED
                or isinstance(error, RankMismatchError)
                or not provider.may_try_again(str(error))
            ):
                raise
            _LOG.info("elastic: %s", error)
    if launched.metrics_interval_s > 0 and launched.rendezvous:
        from polyhvd.launch import reporting  # only for polyhvdrun

        reporting.begin(launched, None if met.member is None else met.member.report_metrics)
    if identity and (met.placement.size > 1 or met.member is not None):
        os.environ[_PARENT] = f"{os.getpid()}:{identity}"
    if twice is not None:  # in a world, as with Horovod: a program that catches it has its rank and size
        raise InvalidArgumentError(
            f"init(process_sets=[...]): ranks {twice} are given as two process sets; use one for both. The "
            "first is registered"
        )


def _meet(provider: Provider, claim: Claim | None, settings: Settings) -> Met:
    """Find the place of this process in the next world; see :meth:`Provider.meet`."""
    global _generation
    deadline = time.monotonic() + settings.start_timeout_s
    is_first = _generation == 0
    try:
        met = provider.meet(claim, settings, _generation, deadline)
    except HorovodInternalError:
        _generation += 1  # as on the ranks that came further, and fail later
        raise
    rank, generation = met.placement.rank, met.placement.generation
    if met.may_be_mistaken and met.placement.size == 1:
        _check_single_rank(met_by_mpi=met.by_mpi is not None)
    log.configure(settings, rank, generation if met.member is not None else 0)
    if is_first and rank == 0:
        log.report_unknown()
    return met


def _connect(met: Met, settings: Settings, sets: list[ProcessSet]) -> list[int] | None:
    """Make the world with the ranks that were met the current one.

    Returns:
        The ranks of two of the process sets, of which the second is not registered; None: they differ.
    """
    global _generation
    placement, store, member = met.placement, met.store, met.member
    for item in sets:
        bad = [rank for rank in item.ranks or [] if not 0 <= rank < placement.size]
        if member is not None and placement.generation > 1:
            bad = []  # they are the remaining ranks of the first world's
        if item is global_process_set or bad:
            raise InvalidArgumentError(f"{item}: ranks are 0 to {placement.size - 1}; found {bad or 'all'}")
    lists, settled = _settle(met.by_mpi, sets)
    twice = next((ranks for i, ranks in enumerate(lists) if ranks in lists[:i]), None)
    if twice is not None:
        lists, settled, sets = _distinct(lists, settled, sets)
    _generation = placement.generation
    if member is not None:
        lists, numbers = member.settle(lists, settled)
        member.enter(settings, placement, store, lists, zip(numbers, sets, strict=True))
        return twice
    objects = zip(settled, sets, strict=True)
    world = World(settings, placement, store, lists, objects, met_by_mpi=met.by_mpi)
    tracing.begin(world)
    current.enter(world)
    return twice


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


def _chosen(settings: Settings, comm: object) -> tuple[Provider, Claim | None]:
    """The provider that the settings or ``init(comm=...)`` request, else that of the environment."""
    requests = {provider: provider.is_requested(settings, comm) for provider in (ALONE, *PROVIDERS)}
    for provider, is_requested in requests.items():
        if is_requested:
            return provider, None
    found = choose(seen(tuple(item for item in PROVIDERS if requests[item] is None), os.environ))
    return (POLYHVDRUN, None) if found is None else (found.provider, found.claim)


def _check_single_rank(*, met_by_mpi: bool) -> None:
    """Raise ConfigError in a world of one whose process a launcher has started as one of several."""
    launch = mpi_launch()
    others = seen(PROVIDERS, os.environ) if met_by_mpi and not (launch and launch.size) else []
    for other in others:
        if other.provider is not MPI and (other.claim.rank or (other.claim.size or 1) > 1):
            raise ConfigError(
                f"init(): MPI has started only this process, but {other}. Remove the setting that requests "
                "MPI (POLYHVD_CONTROLLER, POLYHVD_BACKENDS), or set POLYHVD_ALONE=1 for a world of one rank"
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
