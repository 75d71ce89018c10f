"""The agent by itself: what it says, in which order, and to whom it listens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyhvd.launch.job import agent
from polyhvd.launch.job.agent_program import agent_source, reader

AGENT = [sys.executable, "-I", "-S", "-c", agent_source().decode()]
JOB = {"argv": [], "cwd": "/", "env": {}, "unset": [], "ranks": [(0, {})]}


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 255), st.integers(-1, 99), st.binary(max_size=99))), st.data())
def test_frames_are_found_wherever_the_stream_is_cut(
    frames: list[tuple[int, int, bytes]], data: st.DataObject
) -> None:
    stream = b"".join(agent.frame(*frame) for frame in frames)
    cut = data.draw(st.integers(0, len(stream)))
    inbox = bytearray(stream[:cut])
    found = agent.split_frames(inbox)
    inbox += stream[cut:]
    assert found + agent.split_frames(inbox) == frames
    assert not inbox


def test_impossible_frame_is_refused() -> None:
    with pytest.raises(ValueError, match="a frame of 4294967295 bytes"):
        agent.split_frames(bytearray(agent.FRAME.pack(1, 0, 0xFFFFFFFF)))


@pytest.fixture
def pipes() -> Iterator[tuple[int, int, int, int]]:
    inlet, job = os.pipe()
    frames, outlet = os.pipe()
    yield inlet, job, frames, outlet
    for descriptor in (inlet, job, frames, outlet):
        os.close(descriptor)


def test_everything_a_rank_wrote_comes_before_its_exit(pipes: tuple[int, int, int, int]) -> None:
    inlet, _, frames, outlet = pipes
    for descriptor in (inlet, outlet, frames):
        os.set_blocking(descriptor, False)
    subject = agent.Agent(inlet, outlet)
    source = "import os; os.write(1, b'o' * 9000); os.write(2, b'e' * 9000); os._exit(7)"
    subject._start({**JOB, "argv": [sys.executable, "-c", source]})
    (pid,) = subject._ranks
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nothing has been read
    subject._reap()
    data = bytearray(os.read(frames, 1 << 20))
    assert data.startswith(agent.MAGIC)
    del data[: len(agent.MAGIC)]
    found = agent.split_frames(data)
    assert [kind for kind, _, _ in found] == [agent.STARTED, agent.STDOUT, agent.STDERR, agent.EXITED]
    assert [len(payload) for _, _, payload in found[1:3]] == [9000, 9000]
    assert agent.parse_status(found[3][2]) == (7, "")


def run_agent(*stdin: bytes) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(AGENT, input=b"".join(stdin), capture_output=True, timeout=30)


def test_agent_without_a_job_ends_with_its_input() -> None:
    result = run_agent()
    assert (result.returncode, result.stdout, result.stderr) == (0, agent.MAGIC, b"")


def test_agent_kills_its_ranks_when_its_input_ends() -> None:
    source = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
    job = json.dumps({**JOB, "argv": [sys.executable, "-c", source]}).encode()
    result = run_agent(agent.frame(agent.JOB, -1, job))
    assert (result.returncode, result.stderr) == (0, b"")


def test_rank_variables_of_an_outer_job_are_removed() -> None:
    # Also the standard streams: ranks read nothing, and cannot write into the agent's frames.
    source = "import os, sys; print(os.environ.get('OUTER'), repr(sys.stdin.read()))"
    job = json.dumps({**JOB, "argv": [sys.executable, "-c", source], "unset": ["OUTER"]}).encode()
    with subprocess.Popen(
        AGENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "OUTER": "1"}
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(agent.frame(agent.JOB, -1, job))
        process.stdin.flush()
        data = bytearray(process.stdout.read())
    found = agent.split_frames(data[len(agent.MAGIC) :])
    assert b"".join(payload for kind, _, payload in found if kind == agent.STDOUT) == b"None ''\n"


def test_agent_s_source_needs_nothing_but_the_standard_library() -> None:
    source = agent_source()
    command = [sys.executable, "-I", "-S", "-c", reader(len(source))]
    result = subprocess.run(command, input=source, cwd="/", capture_output=True, timeout=30)
    assert (result.returncode, result.stdout, result.stderr) == (0, agent.MAGIC, b"")
