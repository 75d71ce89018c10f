"""Several programs in one job."""

from __future__ import annotations

import sys

import pytest
from launching import RANK, Launcher

from polyhvd.launch.hosts.lists import Host, HostsError
from polyhvd.launch.job.programs import Part, lay_out

SHOW = "import os, sys; print(sys.argv[1:], os.environ['POLYHVD_RANK'], os.environ.get('MINE'), flush=True)"


def hosts_of(*parts: Part) -> list[str]:
    hosts, placements, _ = lay_out(parts)
    return [hosts[int(item.host)].name for item in placements]


def test_a_program_without_hosts_takes_what_the_first_has_left() -> None:
    first = Part(["a"], 1, [Host("x", 2), Host("y", 2)])
    assert hosts_of(first, Part(["b"], 3)) == ["x", "x", "y", "y"]


def test_a_program_may_have_hosts_of_its_own() -> None:
    parts = [Part(["a"], 1, [Host("x", 1)]), Part(["b"], 2, [Host("y", 1), Host("x", 1)])]
    assert hosts_of(*parts) == ["x", "y", "x"]
    hosts, placements, programs = lay_out(parts)
    assert hosts == [Host("x", 2), Host("y", 1)]
    assert [(item.local_rank, item.local_size, item.cross_rank) for item in placements] == [
        *((0, 2, 0), (0, 1, 1), (1, 2, 0))
    ]
    assert [program.ranks for program in programs] == [range(1), range(1, 3)]


def test_more_ranks_than_slots_name_the_program() -> None:
    with pytest.raises(HostsError, match=r"program 2 \(b\): 3 ranks were requested, but 1 slots are left"):
        lay_out([Part(["a"], 1, [Host("x", 2)]), Part(["b"], 3)])


def test_each_rank_runs_its_program_with_its_variables(launcher: Launcher) -> None:
    show = launcher.script(SHOW)
    words = [sys.executable, show, "a b", "$HOME", ":".join("xy"), ":", "-np", "2", "-x", "MINE=2"]
    words += ["--", sys.executable, show, ":", "-np"]
    status, out, err = launcher.run("-np", "1", "-x", "MINE=it's", argv=words)
    assert (status, err) == (0, "")
    assert sorted(out.splitlines()) == [
        "[0] ['a b', '$HOME', 'x:y'] 0 it's",
        "[1] [':', '-np'] 1 2",
        "[2] [':', '-np'] 2 2",
    ]


def test_programs_are_one_world_and_a_failure_ends_all(launcher: Launcher) -> None:
    meet = "import numpy, polyhvd.numpy as hvd\nhvd.init()\n"
    add = launcher.script(RANK + meet + "print(hvd.allreduce(numpy.ones(1), op=hvd.Sum)[0])\nsys.exit(5)\n")
    other = launcher.script(RANK + meet + "hvd.allreduce(numpy.ones(1), op=hvd.Sum)\ntime.sleep(600)\n")
    words = [sys.executable, other, ":", "-np", "2", "-H", "127.0.0.1:2", sys.executable, add]
    status, out, err = launcher.run("-np", "1", "-H", "localhost:1", argv=words)
    assert status == 5
    assert sorted(out.splitlines()) == ["[1] 3.0", "[2] 3.0"]
    assert "exited with status 5" in err


def test_a_program_that_is_not_there_is_named(launcher: Launcher) -> None:
    status, _, err = launcher.run("-np", "1", argv=["sleep", "600", ":", "-np", "1", "/no/such/program"])
    assert status == 127
    assert "rank 1 on localhost exited with status 127" in err
    assert "/no/such/program: not found" in err or "No such file" in err
