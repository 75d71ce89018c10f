"""Where jobs come from: a file for each way in which ranks are started.

Ranks import what stands here; what starts them, from :mod:`polyhvd.launch.providers.starting` on, is for the
launcher alone.
"""

from __future__ import annotations

from polyhvd.launch.providers.local import PolyhvdrunProvider
from polyhvd.launch.providers.mpi import MpiProvider

__all__ = ["MPI", "POLYHVDRUN"]

#: One of each for the process: they know what it has met before.
POLYHVDRUN = PolyhvdrunProvider()
MPI = MpiProvider()
