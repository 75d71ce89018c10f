"""horovodrun's options that polyhvdrun knows for the sake of scripts: others, and refusals.

Those that mean the same in both stand in :mod:`polyhvd.launch.cli`; docs/migrating-from-horovod.md lists all.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

__all__ = ["NOT_YET", "TURNED_OFF", "WITHOUT_EFFECT", "add_to"]

#: Options that set a variable of the ranks to the opposite of what another one does.
TURNED_OFF = {
    "--no-autotune": ("AUTOTUNE", "0"),
    "--no-timeline-mark-cycles": ("TIMELINE_MARK_CYCLES", "0"),
    "--no-hierarchical-allreduce": ("HIERARCHICAL_ALLREDUCE", "0"),
    "--no-mpi-threads-disable": ("MPI_THREADS_DISABLE", "0"),
    "--stall-check": ("STALL_CHECK_DISABLE", "0"),
    "--log-with-timestamp": ("LOG_HIDE_TIME", "0"),
    "--no-log-hide-timestamp": ("LOG_HIDE_TIME", "0"),
    "--log-without-timestamp": ("LOG_HIDE_TIME", "1"),
}

#: Options that are taken and do nothing, and how many words follow each.
WITHOUT_EFFECT = {
    "--gloo": 0,
    "--use-gloo": 0,
    "--disable-cache": 0,
    "--tcp": 0,
    "--num-nccl-streams": 1,
    "--hierarchical-allgather": 0,
    "--no-hierarchical-allgather": 0,
    "--torus-allreduce": 0,
    "--no-torus-allreduce": 0,
}

_NO_ELASTIC = "there are no elastic jobs yet"
#: Options that are refused, and why.
NOT_YET = {
    "--config-file": "settings are options or environment variables",
    "--prefix-output-with-timestamp": "lines begin with their rank alone",
    "-prefix-timestamp": "lines begin with their rank alone",
    "--binding-args": "ranks are not bound to cores; see --thread-affinity for the engine's threads",
    "--jsrun": "start the job with jsrun itself and MPI, or with polyhvdrun -H",
    "--min-np": _NO_ELASTIC,
    "--min-num-proc": _NO_ELASTIC,
    "--max-np": _NO_ELASTIC,
    "--max-num-proc": _NO_ELASTIC,
    "--slots-per-host": _NO_ELASTIC,
    "--host-discovery-script": _NO_ELASTIC,
    "--elastic-timeout": _NO_ELASTIC,
    "--reset-limit": _NO_ELASTIC,
    "--blacklist-cooldown-range": _NO_ELASTIC,
}


class _Refuse(argparse.Action):
    """Ends the program with the reason why there is no such option."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        parser.error(f"{option_string} of horovodrun is not here: {NOT_YET[option_string or '']}")


def add_to(parser: argparse.ArgumentParser) -> None:
    """Have a parser know these options; its help says nothing of them."""
    for option, (variable, value) in TURNED_OFF.items():
        parser.add_argument(option, action="store_const", const=value, dest=variable, help=argparse.SUPPRESS)
    for option, words in WITHOUT_EFFECT.items():
        if words:
            parser.add_argument(option, dest="_without_effect", help=argparse.SUPPRESS)
        else:
            parser.add_argument(option, action="store_true", dest="_without_effect", help=argparse.SUPPRESS)
    for option in NOT_YET:
        parser.add_argument(option, action=_Refuse, nargs="?", help=argparse.SUPPRESS)
