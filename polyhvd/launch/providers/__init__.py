"""Where jobs come from: a file for each way in which ranks are started."""

from __future__ import annotations

from polyhvd.launch.providers.local import PolyhvdrunProvider
from polyhvd.launch.providers.mpi import MpiProvider

__all__ = ["MPI", "POLYHVDRUN"]

#: One of each for the process: they know what it has met before.
POLYHVDRUN = PolyhvdrunProvider()
MPI = MpiProvider()
