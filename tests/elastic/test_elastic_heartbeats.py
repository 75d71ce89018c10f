"""How long a host of an elastic job may be silent: until it counts as lost, and not a moment's pause."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
from launching import Launcher, below

from polyhvd.elastic.membership import Limits
from polyhvd.launch.elastic.driven import Elastic
from polyhvd.launch.hosts.lists import Host
from polyhvd.launch.job.spec import JobSpec

JOB = str(Path(__file__).with_name("elastic_job.py"))


def test_hosts_of_elastic_jobs_may_be_silent_for_four_seconds_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for prefix in ("POLYHVD", "HOROVOD"):
        monkeypatch.delenv(f"{prefix}_HEARTBEAT_TIMEOUT_S", raising=False)
    host = Host("localhost", 2)
    elastic = Elastic(Limits(2, 1, 2), [host])
    assert JobSpec([], [host], []).heartbeat_timeout_s == 30.0
    assert JobSpec([], [host], [], elastic=elastic).heartbeat_timeout_s == 4.0
    asked = JobSpec([], [host], [], elastic=elastic, env={"POLYHVD_HEARTBEAT_TIMEOUT_S": "30"})
    assert asked.heartbeat_timeout_s == 30.0


def test_two_seconds_without_a_processor_cost_a_host_nothing(launcher: Launcher) -> None:
    argv = [*launcher.python(), JOB, str(launcher._folder)]
    launcher.start("-np", "2", "--min-np", "1", argv=argv, env={"STEPS": "150", "STEP_S": "0.02"})
    launcher.wait_for("from 0", 2)
    assert launcher.process is not None
    agents = [pid for pid in below(launcher.process.pid) if is_agent(pid)]
    assert agents
    began = time.monotonic()
    for pid in agents:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(2.0)
    for pid in agents:
        os.kill(pid, signal.SIGCONT)
    took_s = time.monotonic() - began
    status, out, err = launcher.finish()
    if took_s < 3.0:  # else this test has been without a processor itself
        assert (status, len(re.findall("end 150 .* size 2", out))) == (0, 2), err
        assert "lost" not in err


def is_agent(pid: int) -> bool:
    """Whether it is the agent of a host or what guards it."""
    try:
        return b"polyhvd-program" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
