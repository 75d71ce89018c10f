"""Chooses the job of this process if several launchers have set variables.

Pure, but for what providers remember: a mapping of environment variables in, a provider and its claim out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from polyhvd.config import ConfigError
from polyhvd.launch.providers.provider import Claim, Provider

__all__ = ["Seen", "choose", "explain", "seen"]


@dataclass(frozen=True)
class Seen:
    """A provider that takes this process for a rank of its jobs, and why."""

    provider: Provider
    claim: Claim

    def __str__(self) -> str:
        claim = self.claim
        place = "a rank" if claim.rank is None else f"rank {claim.rank}"
        number = "an unknown number" if claim.size is None else str(claim.size)
        return f"{self.provider.name} gives {place} of {number} ({claim.seen})"


def seen(providers: tuple[Provider, ...], environ: Mapping[str, str]) -> list[Seen]:
    """The providers whose variables are set, in their order; raises ConfigError."""
    found = []
    for provider in providers:
        claim = provider.detect(environ)
        if claim is not None:
            found.append(Seen(provider, claim))
            if provider.within >= {other.name for other in providers} - {provider.name}:
                break  # it has started this process, whatever else there is to see
    return found


def choose(found: list[Seen]) -> Seen | None:
    """The first, which is the nearest to this process.

    Raises:
        ConfigError: another one gives another place, and cannot have started the first one's launcher.
    """
    for other in found[1:]:
        first = found[0]
        if other.provider.name not in first.provider.within and _disagree(first.claim, other.claim):
            raise ConfigError(
                f"init(): variables contradict each other: {first}, but {other}. Unset those that are not "
                "of this job, or set POLYHVD_ALONE=1 for a world of one rank"
            )
    return found[0] if found else None


def explain(found: list[Seen]) -> list[str]:
    """The decision of :func:`choose`, in lines for users."""
    try:
        choose(found)
    except ConfigError as error:
        return [str(error)]
    if not found:
        return ["no launcher's variables: init() makes a world of one rank"]
    others = [f"seen as well, and not used: {other}" for other in found[1:]]
    return [f"init() joins: {found[0]}", *others]


def _disagree(one: Claim, other: Claim) -> bool:
    pairs = ((one.rank, other.rank), (one.size, other.size))
    return any(mine is not None and its is not None and mine != its for mine, its in pairs)
