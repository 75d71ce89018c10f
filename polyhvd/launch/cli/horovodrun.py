"""horovodrun's options here: opposites, those without effect, and the table of all.

``python -m polyhvd.launch.cli.horovodrun`` prints the table of ``polyhvd docs migrating-from-horovod``.
"""

from __future__ import annotations

import argparse

__all__ = [
    "FROM_ELSEWHERE",
    "OPPOSITES",
    "REMARKS",
    "WITHOUT_EFFECT",
    "add_to",
    "table",
]

#: Options that set a variable of the ranks to the opposite of what another one does, or to the same.
OPPOSITES = {
    "--no-autotune": ("AUTOTUNE", "0"),
    "--no-timeline-mark-cycles": ("TIMELINE_MARK_CYCLES", "0"),
    "--no-hierarchical-allreduce": ("HIERARCHICAL_ALLREDUCE", "0"),
    "--no-mpi-threads-disable": ("MPI_THREADS_DISABLE", "0"),
    "--stall-check": ("STALL_CHECK_DISABLE", "0"),
    "--log-with-timestamp": ("LOG_HIDE_TIME", "0"),
    "--no-log-hide-timestamp": ("LOG_HIDE_TIME", "0"),
    "--log-without-timestamp": ("LOG_HIDE_TIME", "1"),
}

#: Options that are taken and do nothing: how many words follow each, and why.
WITHOUT_EFFECT = {
    "--disable-cache": (0, "polyhvd caches nothing between jobs."),
    "--num-nccl-streams": (1, "NCCL runs on one stream."),
    "--hierarchical-allgather": (0, "Hosts always gather in shared memory first."),
    "--no-hierarchical-allgather": (0, "Hosts always gather in shared memory first."),
    "--torus-allreduce": (0, "Not implemented; NCCL chooses its algorithms."),
    "--no-torus-allreduce": (0, "Not implemented."),
}

#: What differs from horovodrun in an option that works, by its first name.
REMARKS = {
    "-np": "Default: all slots of the hosts.",
    "-H": "A host that is listed twice with a number of slots is an error.",
    "-hostfile": "Also accepts lines `host` and `host:N`. Repeated lines of a host without a number add up.",
    "--slots-per-host": "Slots of hosts that `-H` or the file lists without a number.",
    "--network-interface": "Also accepts a network (10.0.0.0/16) or an IPv4 or IPv6 address.",
    "--start-timeout": "Or `HOROVOD_START_TIMEOUT`, or `POLYHVD_START_TIMEOUT`.",
    "--config-file": "Needs PyYAML. Unknown keys are ignored, with a warning. All options of the command "
    "line take precedence over the file, also those before `--config-file`.",
    "-v": "Without a command, `-v` means `--version`, as in horovodrun.",
    "-cb": "Prints what is available on this host. Nothing is chosen at build time.",
    "--output-filename": "A full disk does not end the job.",
    "-prefix-timestamp": "The time is in ISO 8601, with milliseconds.",
    "--mpi": "See [mpi.md](mpi.md).",
    "--mpi-args": "Only with `--mpi`; otherwise a warning is printed.",
    "--gloo": "The default. Gloo is not used.",
    "--binding-args": "Only with `--mpi` and `--jsrun`; otherwise ranks are not bound, and a warning is "
    "printed.",
    "--jsrun": "See [launcher.md](launcher.md#lsf).",
    "--hierarchical-allreduce": "For tensors on GPUs. On CPUs, allreduce is always hierarchical.",
    "--timeline-filename": "One file for each rank.",
    "--gloo-timeout-seconds": "Maximum time of a transfer that ranks have agreed on.",
    "--tcp": "Sets `NCCL_IB_DISABLE=1`, as in horovodrun. With `--mpi`, choose MPI's transport with "
    "`--mpi-args`.",
    "--min-np": "See [elastic.md](elastic.md).",
    "--max-np": "Default: the number of ranks, `-np`.",
    "--reset-limit": "Counts all changes of the world, as in horovodrun.",
    "--host-discovery-script": "Run every second. A line that begins with `#` is a comment.",
    "--elastic-timeout": "The job then ends with status 75: it can be run again.",
    "--blacklist-cooldown-range": "Applies to a slot, not to its host. Doubled with each failure in a row.",
}

#: Options that horovodrun does not have, by their first name, and where they are known from.
FROM_ELSEWHERE = {
    "-x": "mpirun",
    "-m": "torchrun",
    "--max-restarts": "torchrun",
    "--tee": "torchrun",
    "--nnodes": "torchrun",
    "--node-rank": "torchrun",
    "--rdzv-endpoint": "torchrun",
    "--nproc-per-node": "torchrun",
    "--sagemaker": "new",
    "--heartbeat-timeout-s": "new",
    "--dry-run": "new",
    "--print-completion": "new",
    "--huge-pages": "new",
    "--no-tag": "new",
    "--metrics-port": "new",
    "--metrics-address": "new",
    "--keep-going": "new",
    "--term-grace-s": "new",
    "--ssh-option": "new",
    "--remote-python": "new",
    "--no-host-checks": "new",
    "--reproducible": "new",
    "--spares": "new",
    "--on-state-lost": "new",
    "--on-exception": "new",
    "--slow-rank-policy": "new",
    "--slow-rank-factor": "new",
}


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add these options to a parser, hidden from its help."""
    for option, (words, _) in WITHOUT_EFFECT.items():
        if words:
            parser.add_argument(option, dest="_without_effect", help=argparse.SUPPRESS)
        else:
            parser.add_argument(
                option, action="store_const", const=True, dest="_without_effect", help=argparse.SUPPRESS
            )


def _row(action: argparse.Action) -> str:
    first = action.option_strings[0]
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    if first in WITHOUT_EFFECT:
        return f"| {names} | no effect | {WITHOUT_EFFECT[first][1]} |"
    origin = FROM_ELSEWHERE.get(first)
    verdict = "works" if origin is None else "new" if origin == "new" else f"works, from {origin}"
    meaning = "" if origin is None or not action.help else f"{action.help[0].upper()}{action.help[1:]}."
    return f"| {names} | {verdict} | {REMARKS.get(first, meaning)} |".replace("|  |", "| |")


def table(parser: argparse.ArgumentParser) -> list[str]:
    """Every option of a parser, with what it does here, as lines of Markdown."""
    actions = [action for action in parser._actions if action.option_strings and action.dest != "help"]
    return ["| option | here | remarks |", "|---|---|---|", *map(_row, actions)]


if __name__ == "__main__":
    from polyhvd.launch.cli.options import make_parser

    print("\n".join(table(make_parser())))
