"""The limits that the user of an elastic job sets. Pure."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BEGUN", "FINISHED", "PROGRESSES", "RESUME_STATUS", "UNKNOWN", "Limits"]

#: Exit status of a job or process that can resume from the last checkpoint: EX_TEMPFAIL.
RESUME_STATUS = 75

#: Written to the report pipe when an elastic function begins and ends. The launcher reads the pipe when the
#: process has ended, and the last one counts. A program that calls such functions too often for the pipe
#: writes UNKNOWN, and no more.
BEGUN, FINISHED, UNKNOWN = PROGRESSES = b"+", b"-", b"?"

#: Default cooldown of a slot from its second failure on: at first, and at most.
_COOLDOWN_S = (1.0, 60.0)
#: Default cooldown of a host that could not take part: at first, and at most.
_UNFIT_S = (5.0, 60.0)


@dataclass(frozen=True)
class Limits:
    """The limits that the user sets.

    Raises:
        ValueError: they contradict each other.
    """

    size: int  #: of the first world
    min_size: int
    max_size: int
    spares: int = 0  #: on each host, started ahead
    reset_limit: int | None = None  #: of generations after the first
    timeout_s: float = 600.0  #: with fewer than ``min_size`` members
    #: Cooldown of a slot after a failure: at first, and at most, doubled each time. None: there is none after
    #: the first failure.
    cooldown_s: tuple[float, float] | None = None
    spares_in_slots: int = 0  #: in all, started ahead in slots that the world does not use

    def __post_init__(self) -> None:
        if not 1 <= self.min_size <= self.size <= self.max_size:
            raise ValueError(
                f"--min-np {self.min_size}, -np {self.size}, --max-np {self.max_size}: "
                "expected 1 <= --min-np <= -np <= --max-np"
            )
        reset_limit = 0 if self.reset_limit is None else self.reset_limit
        if min(self.spares, self.spares_in_slots, reset_limit) < 0:
            raise ValueError("--spares and --reset-limit must not be negative")
        if not 0 <= self.timeout_s < float("inf"):
            raise ValueError(f"--elastic-timeout {self.timeout_s:g}: expected seconds, 0 or more")
        if self.cooldown_s is not None and not 0 <= self.cooldown_s[0] <= self.cooldown_s[1] < float("inf"):
            low, high = self.cooldown_s
            raise ValueError(f"--blacklist-cooldown-range {low:g} {high:g}: expected 0 <= MIN <= MAX")

    def cooldown_after(self, failures: int) -> float:
        """The cooldown of a slot after this number of failures in a row, in seconds."""
        low, high = self.cooldown_s or _COOLDOWN_S
        doublings = failures - (1 if self.cooldown_s else 2)
        return 0.0 if doublings < 0 else min(high, low * 2.0 ** min(doublings, 60))

    def host_cooldown_after(self, refusals: int) -> float:
        """The cooldown of a host that could not take part this number of times in a row, in seconds."""
        low, high = self.cooldown_s or _UNFIT_S
        return min(high, low * 2.0 ** min(refusals - 1, 60))
