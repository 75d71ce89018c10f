"""The options of ``polyhvdrun`` for elastic jobs. Imported only for such jobs."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from polyhvd.config import ConfigError
from polyhvd.elastic.membership import Limits
from polyhvd.elastic.pace import FACTOR
from polyhvd.launch.cli.options import is_one_of_several
from polyhvd.launch.elastic.discovery import Discovery, HostsFile, discovery_of
from polyhvd.launch.elastic.driven import Elastic
from polyhvd.launch.hosts.lists import Host
from polyhvd.rendezvous import network

__all__ = ["elastic_of"]

_TIMEOUT_S = 600.0


def elastic_of(programs: Sequence[argparse.Namespace], hosts: list[Host] | None) -> Elastic:
    """The limits, the hosts and their discovery.

    Args:
        programs: the options.
        hosts: that they name; None: they name none.

    Raises:
        ValueError: the options contradict each other, or the script cannot be used.
        OSError: the script fails.
    """
    options = programs[0]
    _refuse_others(programs)
    if options.host_discovery_script is not None and hosts is not None:
        raise ValueError("--host-discovery-script lists the hosts; leave out -H and --hostfile")
    discovery = None
    if options.host_discovery_script is not None:
        source = discovery_of(options.host_discovery_script, options.slots_per_host or 1)
        discovery = Discovery(source, look_up=network.look_up)
        try:
            found = discovery.look()
        except (ValueError, OSError):
            raise
        except Exception as error:  # of the user's own
            text = f"--host-discovery-script {options.host_discovery_script}: {type(error).__name__}: {error}"
            raise ValueError(text) from error
        hosts = [Host(name, slots) for name, slots in found.items()]
    elif options.hostfile is not None:
        source = HostsFile(options.hostfile, options.slots_per_host or 1)
        discovery = Discovery(source, look_up=network.look_up)
        discovery.look()
    size = options.num_proc or options.min_np or sum(host.slots for host in hosts or ())
    if not size:
        raise ValueError("an elastic job needs -np or --min-np, the number of ranks to begin with")
    if hosts is None:
        hosts = [Host("localhost", options.slots_per_host or size)]
    limits = Limits(
        size=size,
        min_size=options.min_np or size,
        max_size=options.max_np or size,
        spares=options.spares or 0,
        reset_limit=options.reset_limit,
        timeout_s=_timeout_s(options),
        cooldown_s=tuple(options.blacklist_cooldown_range) if options.blacklist_cooldown_range else None,
    )
    if options.slow_rank_policy == "evict" and not limits.spares:
        raise ValueError("--slow-rank-policy evict needs --spares N: a spare takes the place of a slow rank")
    slots = sum(host.slots for host in hosts)
    if discovery is None and slots < limits.min_size:
        raise ValueError(f"--min-np {limits.min_size}: the hosts have {slots} slots")
    return Elastic(
        limits,
        hosts,
        discovery,
        slow_factor=options.slow_rank_factor or FACTOR,
        evicts_slow=options.slow_rank_policy == "evict",
        on_state_lost=options.on_state_lost or "fail",
        replaces_failed=options.on_exception == "replace",
    )


def _refuse_others(programs: Sequence[argparse.Namespace]) -> None:
    options = programs[0]
    refused = {
        "several programs": len(programs) > 1,
        "--mpi": options.mpi,
        "--keep-going": options.keep_going,
        "--jsrun": options.jsrun,
        "several hosts without ssh (--nnodes)": is_one_of_several(options),
    }
    for name, given in refused.items():
        if given:
            raise ValueError(
                f"{name}: not supported in an elastic job; leave out --min-np and the other elastic options"
            )


def _timeout_s(options: argparse.Namespace) -> float:
    if options.elastic_timeout is not None:
        return float(options.elastic_timeout)
    for name in ("POLYHVD_ELASTIC_TIMEOUT", "HOROVOD_ELASTIC_TIMEOUT"):
        if text := os.environ.get(name):
            try:
                return float(text)
            except ValueError:
                raise ConfigError(f"{name}={text!r}: expected seconds") from None
    return _TIMEOUT_S
