"""The names that the elastic module of every framework offers: ``from polyhvd.elastic.exports import *``."""

from __future__ import annotations

from polyhvd.elastic.leaving import on_leave
from polyhvd.elastic.slow import slow_ranks
from polyhvd.elastic.state import ObjectState, State
from polyhvd.errors import CheckpointError, HorovodInternalError, HostsUpdatedInterrupt

__all__ = [
    "CheckpointError",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "on_leave",
    "slow_ranks",
]
