"""Names that every adapter has beside its own operations: ``from polyhvd.exports import *``."""

from __future__ import annotations

from polyhvd import *
from polyhvd import capabilities, errors

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "counters",
    "cross_rank",
    "cross_size",
    "global_process_set",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "metrics",
    "process_set_of",
    "rank",
    "remove_process_set",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
__all__ += capabilities.__all__
__all__ += errors.__all__
