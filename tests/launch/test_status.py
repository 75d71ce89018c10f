"""``polyhvd status``: what a job does now, from its launcher, within a time, in characters that are safe."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from launching import RANK, Launcher, pids, wait_until
from test_control import answering

from polyhvd.elastic.standing import Decision, Doing, Wait
from polyhvd.launch.elastic import leave
from polyhvd.launch.hosts.lists import Host, place
from polyhvd.launch.job import control, status
from polyhvd.launch.job.control import Control, Request
from polyhvd.launch.job.situation import Situation, SlotSituation, answers, ending, fixed

WAITS = RANK + "os.write(1, b'pid %d\\n' % os.getpid())\nsignal.pause()\n"
#: Does not end for SIGTERM.
STAYS = RANK + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAITS.removeprefix(RANK)
HOSTS = [Host("a", 2), Host("b", 2)]


def ask(launcher: Launcher, *options: str) -> subprocess.CompletedProcess[str]:
    assert launcher.process is not None
    command = [sys.executable, "-m", "polyhvd.cli", "status", "--job", str(launcher.process.pid), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def shown(launcher: Launcher) -> dict[str, Any]:
    done = ask(launcher, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def head(**words: Any) -> bytes:
    job = {"job": 1, "elastic": True, "command": "train", "started": 0.0}
    found, *_ = answers(Situation(Decision(Doing.TRAINS, "trains")), job, 0.0, 0.0)
    return json.dumps({**found, **words}).encode() + b"\n"


def test_fixed_job_shows_its_ranks_and_prints_nothing_of_its_own(launcher: Launcher) -> None:
    launcher.start("-np", "2", source=WAITS)
    first, _ = pids(launcher.wait_for("pid ", 2))
    found = shown(launcher)
    assert (found["does"], found["sentence"], found["elastic"]) == ("runs", "runs 2 ranks", False)
    assert found["world"]["size"] == 2
    assert [(slot["rank"], slot["host"], slot["state"]) for slot in found["slots"]] == [
        (0, "localhost", "running"),
        (1, "localhost", "running"),
    ]
    assert abs(found["started"] - time.time()) < 60
    os.kill(first, signal.SIGKILL)
    assert "rank" in launcher.finish()[2]


def test_job_that_ends_shows_why_and_the_ranks_that_have_not_ended(launcher: Launcher) -> None:
    launcher.start("-np", "2", source=STAYS)
    launcher.wait_for("pid ", 2)
    launcher.signal(signal.SIGTERM)
    wait_until(lambda: shown(launcher)["does"] == "ends", "the end")
    found = shown(launcher)
    assert found["reason"] == "polyhvdrun has received SIGTERM"
    assert found["sentence"] == (
        "ends; waits for rank 0 on localhost: it has not ended; rank 1 on localhost: it has not ended"
    )


def test_launcher_that_is_stopped_is_an_error_of_one_line_within_the_time(launcher: Launcher) -> None:
    launcher.start("-np", "1", source=WAITS)
    launcher.wait_for("pid ", 1)
    launcher.signal(signal.SIGSTOP)
    done = ask(launcher, "--timeout-s", "0.5")
    launcher.signal(signal.SIGCONT)
    assert launcher.process is not None
    said = f"no answer in time from job {launcher.process.pid}; is its polyhvdrun stopped?"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"polyhvd status: {said}\n")
    assert shown(launcher)["does"] == "runs"


def test_first_of_several_hosts_shows_since_when_it_waits_for_the_others(launcher: Launcher) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    options = ["--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", endpoint]
    began = time.time()
    launcher.start(*options, argv=["true"], env={"POLYHVD_SECRET": "5e" * 32})
    assert launcher.process is not None
    job = launcher.process.pid
    wait_until(lambda: job in control.jobs(fixed=True), "the job")
    found = status.query(job, 10.0)
    assert began <= found["started"] <= time.time()
    launcher.signal(signal.SIGTERM)
    assert launcher.finish()[0] == 143


def test_job_whose_output_is_not_read_waits_for_a_reader(launcher: Launcher) -> None:
    launcher.start("-np", "1", source="while True: print('x' * 1000)\n")
    wait_until(lambda: ask(launcher, "--json").returncode == 0, "the launcher answers")
    wait_until(lambda: shown(launcher)["does"] == "waits", "a pipe that is full")
    reader = "waits for a reader of polyhvdrun's output: it has stopped reading"
    wait_until(lambda: shown(launcher)["sentence"] == reader, reader)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            [],
            "found no job of this user whose polyhvdrun runs on this host; jobs started with --mpi or "
            "--jsrun are not listed",
        ),
        ([11, 12], "choose a job with --job PID; jobs whose polyhvdrun runs here: 11, 12"),
    ],
)
def test_no_job_and_several_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], found: list[int], said: str
) -> None:
    monkeypatch.setattr(control, "jobs", lambda *, fixed: found)
    assert status.main([]) == 1
    assert capsys.readouterr().err == f"polyhvd status: {said}\n"


def test_jobs_that_are_not_elastic_are_none_for_polyhvd_leave() -> None:
    listening = Control(lambda request: None, elastic=False)
    try:
        assert os.getpid() in control.jobs(fixed=True)
        assert os.getpid() not in control.jobs()
    finally:
        listening.close()


def test_control_characters_are_not_passed_on_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    slot = {"host": "\x1b[2Jhost", "slot": 0, "state": "ready", "rank": None, "process": 1, "why": "\x07"}
    parts = json.dumps({"slots": [{**slot, "until": None}]}).encode()
    with answering(head(sentence="\x1b]0;x\x07"), parts + b"\n", b'{"end": true}\n') as job:
        assert status.main(["--job", str(job)]) == 0
        assert status.main(["--job", str(job), "--json"]) == 0
    out = capsys.readouterr().out
    assert out.replace("\n", "").isprintable()
    assert "now: \\x1b]0;x\\x07\n" in out
    assert "\\x1b[2Jhost: process 1 ready (\\x07)\n" in out


@pytest.mark.parametrize("command", [status.main, leave.main])
@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "soon"])
def test_limit_that_is_no_number_of_seconds_is_an_error_of_the_option(
    command: Callable[[list[str]], int], seconds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command(["--rank=1"] * (command is leave.main) + ["--timeout-s", seconds])
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.endswith(f"argument --timeout-s: expected a number of seconds above 0, found '{seconds}'")


def test_limit_without_an_end_is_a_long_one() -> None:
    assert control.limit_s("inf") == 1e6


@pytest.mark.parametrize("words", [{"started": None}, {"world": 3}, {"slots": [1]}, {"hosts": [{}]}])
def test_answer_without_what_is_needed_is_an_error_of_one_line(
    capsys: pytest.CaptureFixture[str], words: dict[str, Any]
) -> None:
    with answering(head(**words), b'{"end": true}\n') as job:
        assert status.main(["--job", str(job)]) == 1
    assert capsys.readouterr().err == f"polyhvd status: job {job} has sent an invalid answer\n"


def test_answer_that_breaks_off_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(head()) as job:
        assert status.main(["--job", str(job)]) == 1
    assert capsys.readouterr().err == f"polyhvd status: job {job} has ended meanwhile\n"


@pytest.fixture
def large() -> Iterator[int]:
    """A launcher in this process with a thousand slots, whose names and reasons are as long as may be."""
    slots = [SlotSituation("é" * 300, i, "cooling", why="é" * 300, until=1.0) for i in range(1000)]
    waits = tuple(Wait("é" * 300, "é" * 300, 0.0, 1.0, "é" * 300) for _ in range(1000))
    found = Situation(Decision(Doing.WAITS, "é" * 300, waits, "é" * 300), slots=slots)
    job = {"job": os.getpid(), "elastic": True, "command": "é" * 300, "started": 0.0}

    def obey(request: Request) -> None:
        request.finish(answers(found, job, 0.0, 0.0))

    listening = Control(obey)
    yield os.getpid()
    listening.close()


def test_thousand_slots_with_long_names_are_answered(large: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert status.main(["--job", str(large), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [slot["slot"] for slot in found["slots"]] == list(range(1000))
    assert (len(found["waits"]), found["waits_total"]) == (10, 1000)
    assert status.main(["--job", str(large)]) == 0
    assert len(capsys.readouterr().out) < 10_000


def test_many_hosts_are_listed_on_demand_and_those_that_need_attention_first() -> None:
    slots = [SlotSituation(f"host{i}", 0, "training", i, i) for i in range(999)]
    slots.append(SlotSituation("bad", 0, "cooling", why="it was killed", until=9.0))
    job = {"job": 1, "elastic": True, "command": "train", "started": 0.0}
    found: dict[str, Any] = {"hosts": [], "slots": []}
    for part in answers(Situation(Decision(Doing.TRAINS, "trains"), slots=slots), job, 0.0, 0.0):
        found = {**found, **part, "slots": [*found["slots"], *part.get("slots", ())]}
    few = list(status.lines(found, 5.0))
    assert few[2:4] == [
        "bad: slot 0 cooling for 4 s more (it was killed)",
        "host0: process 0 (rank 0) training",
    ]
    assert few[-1] == "980 more hosts: --all lists them"
    assert len(list(status.lines(found, 5.0, whole=True))) == 1002


def test_fixed_job_waits_for_agents_that_have_not_answered() -> None:
    found = fixed(place(HOSTS), HOSTS, {0, 1, 2, 3}, {"b": 3.0}, None)
    assert found.decision.sentence(7.0) == "waits for b: its agent has not answered for 4 s"
    assert found.decision.does is Doing.STARTS


def test_fixed_job_of_which_ranks_have_ended_waits_for_the_others() -> None:
    found = fixed(place(HOSTS), HOSTS, {1, 3}, {}, 2.0)
    assert found.decision.sentence(7.0) == (
        "runs, and 2 of 4 ranks have ended; waits for rank 1 on a: it has not ended; "
        "rank 3 on b: it has not ended"
    )
    assert [slot.state for slot in found.slots] == ["ended", "running", "ended", "running"]


def test_processes_of_an_elastic_job_that_ends_are_named_with_their_ranks() -> None:
    found = Situation(Decision(Doing.TRAINS), slots=[SlotSituation("a", 0, "training", 1, 7)])
    decision = ending(found, {7, 8}, "rank 0 on b was killed by SIGKILL", 2.0).decision
    assert [wait.name for wait in decision.waits] == ["process 7 (rank 1) on a", "process 8"]
    assert decision.reason == "rank 0 on b was killed by SIGKILL"
