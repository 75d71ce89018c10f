"""What a way of starting ranks has to offer: torchrun, Slurm, MPI, polyhvdrun itself.

A provider is one file. What a rank reads of its environment is a *claim*; its place in the world is the
result of meeting the others, since a claim need not be whole: a Kubernetes index tells no size, and
torchrun's environment no host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from polyhvd.config import Settings
from polyhvd.rendezvous.store import Store
from polyhvd.runtime.placement import Placement

__all__ = ["Claim", "Host", "Provider", "Slot"]


@dataclass(frozen=True)
class Claim:
    """What the environment of a process says of its place in a job; None: it does not say."""

    rank: int | None = None
    size: int | None = None
    local_rank: int | None = None
    #: Tells this job from others of its launcher's.
    job_id: str = ""
    #: How often the launcher has started the job anew.
    restart: int = 0
    #: The variables with their values, for messages.
    seen: str = ""


@dataclass(frozen=True)
class Host:
    """A host as it was named, and how many ranks it takes."""

    name: str
    slots: int


class Slot(Protocol):
    """A place in which one rank runs: a process below an agent, a Ray actor, a Spark task."""

    placement: Placement

    def start(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        """Run the rank's program; the environment is added to that of the slot."""

    def signal(self, number: int) -> None:
        """Send a signal to the rank, if it still runs."""

    def kill(self) -> None:
        """End the rank and all that it has started, at once."""

    def on_death(self, told: Callable[[int], None]) -> None:
        """Have ``told`` called once with the rank's exit status; negative: the signal that killed it."""


class Provider(Protocol):
    """A way in which ranks are started, and meet."""

    #: As users call it: "polyhvdrun", "Slurm".
    name: str

    def detect(self, environ: Mapping[str, str]) -> Claim | None:
        """Whether this process is a rank of such a job. Pure: recorded environments test it."""

    def meet(
        self, claim: Claim | None, settings: Settings, after: int, deadline: float
    ) -> tuple[Placement, Store | None]:
        """Find the job's store, and this rank's place; no store in a world of one.

        Args:
            claim: what :meth:`detect` has said.
            settings: of this process.
            after: generation of the last world that this process was to be in; 0: of none.
            deadline: by time.monotonic().

        Raises:
            ConfigError: the environment or the settings cannot work.
            HorovodInternalError: the store cannot be reached, or does not accept this rank.
            PeerLostError: other ranks did not come in time.
        """

    def hosts(self, environ: Mapping[str, str]) -> list[Host] | None:
        """The hosts of an allocation in which polyhvdrun may start ranks; None: this is none. Pure."""

    def slots(self, host: Host) -> list[Slot]:
        """Places for ranks on a host, none of which runs yet."""
