"""How a rank finds its place in the job that has started it: torchrun's, Slurm's, MPI's, polyhvdrun's own.

A provider is one file. What a rank reads of its environment is a *claim*; its place in the world is the
result of meeting the others, since a claim need not be whole: a Kubernetes index comes without a size, and
torchrun's environment without a host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from polyhvd.config import ConfigError, Settings
from polyhvd.errors import InvalidArgumentError
from polyhvd.rendezvous.store import Store
from polyhvd.runtime.placement import Placement

if TYPE_CHECKING:
    from polyhvd.elastic.process import Process
    from polyhvd.runtime.mpi import MpiJob

__all__ = ["Claim", "Met", "Provider", "number", "readable", "shown"]


@dataclass(frozen=True)
class Claim:
    """The place of a process in a job according to its environment; None: not given there."""

    rank: int | None = None
    size: int | None = None
    local_rank: int | None = None
    #: Identifies this job among those of its launcher.
    job_id: str = ""
    #: How often the launcher has restarted the job.
    restart: int = 0
    #: The variables with their values, for messages.
    seen: str = ""
    #: Whether all ranks are on one host.
    one_host: bool = False
    #: The host of rank 0, by its name or address.
    root: str = ""


class Met(NamedTuple):
    """The place of this process in its next world, and where it meets the other ranks."""

    placement: Placement
    #: None in a world of one.
    store: Store | None
    #: How MPI knows the ranks, if they have met through it.
    by_mpi: MpiJob | None = None
    #: This process in its elastic job.
    member: Process | None = None
    #: Whether a world of one rank may be a mistake.
    may_be_mistaken: bool = False


class Provider(ABC):
    """A kind of job, as its ranks see it."""

    #: As users call it: "polyhvdrun", "Slurm".
    name = ""
    #: Names of others whose processes may start such a job, so that its ranks inherit their variables.
    within: frozenset[str] = frozenset()

    def is_requested(self, settings: Settings, comm: object) -> bool | None:
        """Return whether settings or ``init(comm=...)`` request such a job, whatever the environment says.

        False: they exclude it. None: the environment decides.
        """
        return None

    @abstractmethod
    def detect(self, environ: Mapping[str, str]) -> Claim | None:
        """Return the claim of this provider if this process is a rank of such a job, else None.

        Pure, so that recorded environments test it.

        Raises:
            ConfigError: it is one, and its variables cannot be read.
        """

    def for_job(self, claim: Claim | None, settings: Settings, comm: object) -> Provider:
        """The provider of this process's job, for all attempts of an ``init()`` to enter it.

        Args:
            claim: the result of :meth:`detect`; None: it was not asked.
            settings: of this process.
            comm: as ``init()`` takes it.

        Raises:
            ConfigError: the environment cannot work.
            InvalidArgumentError: such a job does not accept ``comm``.
        """
        if comm is not None:
            raise InvalidArgumentError(
                f"init(comm={comm!r}): a list of ranks needs a job that MPI has started; use a ProcessSet"
            )
        return self

    @abstractmethod
    def meet(self, claim: Claim | None, settings: Settings, after: int, deadline: float) -> Met:
        """Find the job's store, and this rank's place; no store in a world of one.

        Args:
            claim: the result of :meth:`detect`.
            settings: of this process.
            after: generation of the last world that this process was to be in; 0: of none.
            deadline: by time.monotonic().

        Raises:
            ConfigError: the environment or the settings cannot work.
            HorovodInternalError: the store cannot be reached, or does not accept this rank.
            PeerLostError: other ranks did not connect in time.
            RankMismatchError: ranks have different sizes.
        """

    def may_try_again(self, reason: str) -> bool:
        """Return whether there is another world to enter, after a rank was lost in the attempt to enter one.

        Args:
            reason: of the failure.
        """
        return False


def number(environ: Mapping[str, str], name: str) -> int | None:
    """A variable that holds a number; None where it is not there, or holds something else."""
    text = environ.get(name, "")
    # Python refuses to read more than 4300 digits.
    return int(text) if text.isascii() and text.isdigit() and len(text) < 4300 else None


def readable(environ: Mapping[str, str], *names: str) -> None:
    """Raise ConfigError for one of a launcher's own variables that is set, and is not a number.

    Otherwise the process would train as a world of one rank.
    """
    for name in names:
        if environ.get(name) and number(environ, name) is None:
            raise ConfigError(f"init(): {name}={environ[name]!r}: must be a number, 0 or more")


def shown(environ: Mapping[str, str], *names: str) -> str:
    """Return the variables that are set, with their values, for messages."""
    return ", ".join(f"{name}={environ[name]}" for name in names if name in environ)
