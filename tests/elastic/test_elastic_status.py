"""``polyhvd status`` of elastic jobs, and the sentences that their launcher prints."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from typing import Any

from launching import DEADLINE_S, Launcher, wait_until
from test_leaving import Job
from test_membership import running

from polyhvd.elastic.membership import ExitKind, Limits, Membership
from polyhvd.launch.elastic.account import Account


def status(launcher: Launcher, *options: str) -> str:
    assert launcher.process is not None
    command = [sys.executable, "-m", "polyhvd.cli", "status", "--job", str(launcher.process.pid), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def shown(launcher: Launcher) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(status(launcher, "--json"))
    return found


def test_status_of_a_job_that_trains_and_then_waits_for_a_slot(launcher: Launcher) -> None:
    short = ("--blacklist-cooldown-range", "600", "600", "--elastic-timeout", "500")
    job = Job(launcher, "-np", "2", "--min-np", "2", *short)
    pids = job.world(1, 2)
    found = shown(launcher)
    assert (found["does"], found["sentence"]) == ("trains", "trains as generation 1, 2 ranks")
    assert (found["world"]["generation"], found["world"]["size"]) == (1, 2)
    assert [(slot["process"], slot["rank"], slot["state"]) for slot in found["slots"]] == [
        (0, 0, "training"),
        (1, 1, "training"),
    ]
    os.kill(pids[1], signal.SIGKILL)
    wait_until(lambda: shown(launcher)["slots"][0]["state"] == "arrived", "the survivor's question")
    found = shown(launcher)
    assert (found["does"], found["reason"]) == ("waits", "1 process of at least 2 is ready")
    assert found["commit"]["call"] == 1
    assert found["until"] > found["since"]
    (wait,) = found["waits"]
    assert (wait["name"], wait["why"]) == ("slot 1 of localhost", "it is not used after 1 failure")
    assert re.match(r"process 1 on localhost was killed by SIGKILL", wait["because"])
    text = status(launcher)
    assert re.search(r"^now: waits for slot 1 of localhost: it is not used after 1 failure for ", text, re.M)
    ends = r"^ends: in \d+ (s|min), unless enough slots become free \(--elastic-timeout\)$"
    assert re.search(ends, text, re.M)
    said = b"polyhvdrun: waits for slot 1 of localhost: it is not used after 1 failure"
    process, deadline = launcher.process, time.monotonic() + DEADLINE_S
    assert process is not None
    while said not in launcher.err:
        launcher._read(process, deadline)
    assert launcher.err.count(said) == 1


def test_wait_is_printed_once_when_it_has_lasted_and_others_not_at_once() -> None:
    membership = running(Limits(3, 3, 3, cooldown_s=(100.0, 100.0)), {"a": 3})
    account = Account(membership)
    assert account.look(5.0) == ""
    assert account.next_at(5.0) == float("inf"), "a job that trains has nothing to print"
    membership.ended(2, ExitKind.LOST, 10.0, why="process 2 on a was killed by SIGSEGV")
    membership.request(0, 1, 10.0, connected=True, progressed=True)
    membership.request(1, 1, 10.0, connected=True, progressed=True)
    assert account.look(10.0) == ""
    assert account.next_at(10.0) == 13.0
    assert account.look(13.0).startswith(
        "waits for slot 2 of a: it is not used after 1 failure for 97 s more"
    )
    assert account.look(14.0) == ""
    membership.ended(1, ExitKind.LOST, 15.0, why="process 1 on a was killed by SIGSEGV")
    assert account.look(15.0) == ""
    assert account.next_at(15.0) == 23.0
    assert account.look(23.0).startswith("waits for slot 1 of a: ")
    assert account.look(24.0) == ""


def test_status_does_not_take_the_sentence_from_the_user() -> None:
    membership = running(Limits(2, 2, 2, cooldown_s=(100.0, 100.0)), {"a": 2})
    account = Account(membership)
    membership.ended(1, ExitKind.LOST, 10.0)
    account.look(10.0)
    account.situation(set(), None, 13.0)
    assert account.look(13.0)


def test_healthy_start_prints_nothing_however_long_it_takes() -> None:
    membership = Membership(Limits(2, 2, 2))
    account = Account(membership)
    membership.hosts_are({"a": 2}, 0.0)
    membership.request(0, 0, 1.0)
    assert account.look(2.0) == ""
    assert account.look(100.0) == ""
    assert account.next_at(100.0) == float("inf")
