"""``polyhvdrun --sagemaker`` in every container of a job, and ``--nnodes`` on every host: no MPI, no ssh."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import netns
import pytest
from containers import Containers
from joining import ROOT, SECRET, WORK, environment, free_port
from launching import DEADLINE_S, RANK, assert_gone, below, is_running, pids, wait_until

from polyhvd.launch.job import control
from polyhvd.launch.job.agent import HELLO, frame
from polyhvd.launch.providers.arriving import ArrivedAgent, ranks_secret
from polyhvd.rendezvous.auth import SessionKeys
from polyhvd.rendezvous.signed_stream import SignedStream

QUICK = ["--start-timeout", "20"]
SAVING = RANK + (
    "def save(*_):\n"
    "  open(os.environ['SAGEMAKER_BASE_DIR'] + f'/checkpoints/saved{rank}', 'w').close()\n"
    "  os._exit(0)\n"
    "signal.signal(signal.SIGTERM, save)\n"
    "os.write(1, b'pid %d\\n' % os.getpid())\n"
    "while True: time.sleep(0.05)\n"
)


@pytest.fixture
def containers(tmp_path: Path) -> Iterator[Callable[..., Containers]]:
    made = []

    def make(count: int, **resources: object) -> Containers:
        made.append(Containers(tmp_path / str(len(made)), count, **resources))
        return made[-1]

    yield make
    for item in made:
        item.end()


def test_three_containers_train_together_and_end_together(containers: Callable[..., Containers]) -> None:
    job = containers(3)
    job.config(job.bases[0], "hyperparameters.json").write_text(
        json.dumps({"lr": "0.1", "sagemaker_program": '"train.py"', "name": '"a b"'})
    )
    source = (
        "import sys, time\n"
        + WORK
        + "from polyhvd.sagemaker import model_dir\n"
        + "print(sys.argv[1:], os.environ['SM_CHANNEL_TRAINING'])\n"
        + "if folder := model_dir(): open(folder + '/model', 'w').close()\n"
        + "if hvd.rank() < 5: time.sleep(1)\n"  # the last container is done first
    )
    ended = job.start(source, "--nproc-per-node", "2", *QUICK).finish()
    assert [status for status, _, _ in ended] == [0, 0, 0], ended
    out = ended[0][1]
    places = [f"[{rank}] place {rank} 6 {rank % 2} 2 {rank // 2} 3 sum 21.0" for rank in range(6)]
    assert sorted(line for line in out.splitlines() if "place" in line) == places
    assert out.count("['--lr', '0.1', '--name', 'a b']") == 6
    assert out.count(f"{job.bases[2]}/input/data/training") == 2
    assert [path.name for base in job.bases for path in (base / "model").iterdir()] == ["model"]
    assert not any((base / "output/failure").exists() for base in job.bases)


def test_failure_is_told_by_every_container(containers: Callable[..., Containers]) -> None:
    job = containers(3)
    source = RANK + (
        "import polyhvd.numpy as hvd\n"
        "hvd.init()\n"
        "for i in range(40): exec(f'def f{i}(): return f{i + 1}()')\n"  # more lines than fit
        "def f40(): raise ValueError('bad data')\n"
        "if hvd.rank() == 1: f0()\n"
        "hvd.barrier()\n"
    )
    ended = job.start(source, *QUICK).finish()
    assert [status for status, _, _ in ended] == [1, 1, 1]
    for text in job.failures():
        assert len(text) <= 1024
        assert text.startswith(f"rank 1 on {job.hosts[1]} exited with status 1\n")
        assert text.endswith("ValueError: bad data")


@pytest.mark.parametrize("stopped", [[1], [0, 1]], ids=["second", "both"])
def test_sigterm_to_any_container_has_all_save_checkpoints(
    containers: Callable[..., Containers], stopped: list[int]
) -> None:
    job = containers(2).start(SAVING, *QUICK)
    ranks = pids(job.wait_for(b"pid ", 2))
    for number in stopped:
        job.processes[number].send_signal(signal.SIGTERM)
    assert [status for status, _, _ in job.finish()] == [143, 143]
    assert [path.name for base in job.bases for path in (base / "checkpoints").iterdir()] == [
        "saved0",
        "saved1",
    ]
    assert_gone(ranks)


@pytest.mark.parametrize("victim", [0, 1])
def test_kill_9_of_a_container_s_polyhvdrun_leaves_nothing_anywhere(
    containers: Callable[..., Containers], victim: int
) -> None:
    job = containers(2).start(SAVING, *QUICK)
    ranks = pids(job.wait_for(b"pid ", 2))
    everyone = [pid for process in job.processes for pid in below(process.pid)]
    job.processes[victim].kill()
    ended = job.finish()
    assert ended[1 - victim][0] == 1
    reason = "is gone before the end of the job" if victim == 0 else f"rank 1 on {job.hosts[1]} was lost"
    assert reason in ended[1 - victim][2]
    assert reason in (job.bases[1 - victim] / "output/failure").read_text()
    assert_gone([*ranks, *everyone])


def test_stopped_polyhvdrun_is_given_up_by_the_other(containers: Callable[..., Containers]) -> None:
    job = containers(2).start(SAVING, *QUICK, "--heartbeat-timeout-s", "3")
    ranks = pids(job.wait_for(b"pid ", 2))
    job.processes[0].send_signal(signal.SIGSTOP)
    wait_until(lambda: job.processes[1].poll() is not None, "the end of the other")
    assert_gone(ranks)
    job.processes[0].send_signal(signal.SIGCONT)
    ended = job.finish()
    assert [status for status, _, _ in ended] == [1, 1]
    assert "nothing was received from" in ended[1][2]


def test_full_disk_below_the_failure_is_told_and_changes_no_status(
    containers: Callable[..., Containers],
) -> None:
    job = containers(1)
    (job.bases[0] / "output/failure").symlink_to("/dev/full")
    ((status, _, err),) = job.start("raise SystemExit(3)", *QUICK).finish()
    assert status == 3
    assert "cannot write SageMaker's file of the failure: [Errno 28] No space left on device" in err


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("{", "is not JSON"),
        ("[]", "is not an object in JSON"),
        ('{"current_host": "a"}', "'hosts' must be a list of names; found null"),
        ('{"hosts": ["a", "b"]}', "'current_host' must be one of ['a', 'b']; found null"),
        ('{"hosts": ["a", "b"], "current_host": "c"}', 'found "c"'),
        ('{"hosts": ["a", "a", "b"], "current_host": "a"}', "'hosts' must name each host once"),
        (None, "No such file or directory"),
    ],
)
def test_unusable_resourceconfig_is_a_line(
    containers: Callable[..., Containers], config: str | None, expected: str
) -> None:
    job = containers(1)
    path = job.config(job.bases[0], "resourceconfig.json")
    path.unlink()
    if config is not None:
        path.write_text(config)
    ((status, _, err),) = job.start("pass").finish()
    assert (status, len(err.splitlines())) == (2, 1)
    assert str(path) in err
    assert expected in err
    assert expected in job.failures()[0]


def test_missing_secret_is_a_line_that_says_where_it_goes(containers: Callable[..., Containers]) -> None:
    ended = containers(2).start("pass", POLYHVD_SECRET="").finish()
    for status, _, err in ended:
        assert (status, len(err.splitlines())) == (2, 1)
        assert 'in the estimator: environment={"POLYHVD_SECRET": secrets.token_hex(32)}' in err


def test_other_secret_ends_a_container_at_once_and_the_first_names_it(
    containers: Callable[..., Containers],
) -> None:
    job = containers(2).start("pass", "--start-timeout", "6", only=range(1))
    job.start("pass", only=range(1, 2), POLYHVD_SECRET="ab" * 32)
    assert job.processes[1].wait(DEADLINE_S) == 1
    (first, _, first_err), (_, _, err) = job.finish()
    assert "has another secret: POLYHVD_SECRET" in err
    assert first == 1
    warning, end = first_err.splitlines()  # the warning while it waits
    assert f"calls as {job.hosts[1]}, and has another secret: POLYHVD_SECRET" in warning
    assert (
        f"{job.hosts[1]} (it has connected, but not proved that it has the secret): did not connect in time"
        in end
    )


def test_a_first_container_that_never_comes_is_named(containers: Callable[..., Containers]) -> None:
    job = containers(2)
    ((status, _, err),) = job.start("pass", "--start-timeout", "1", only=range(1, 2)).finish()
    assert status == 1
    assert f"the first host did not answer at {job.hosts[0]}:16420: Connection refused" in err


def test_program_without_a_distribution_is_a_rank_in_each_container(
    containers: Callable[..., Containers],
) -> None:
    ended = containers(3).start_alone(WORK, POLYHVD_SECRET=SECRET).finish()
    assert [status for status, _, _ in ended] == [0, 0, 0], ended
    assert [out for _, out, _ in ended] == [f"place {rank} 3 {rank} 3 0 1 sum 6.0\n" for rank in range(3)]


def test_program_without_a_distribution_is_told_of_gpus_that_no_rank_uses(
    containers: Callable[..., Containers],
) -> None:
    ended = containers(2).start_alone(WORK, POLYHVD_SECRET=SECRET, SM_NUM_GPUS="4").finish()
    assert ["which has 4 GPUs; `polyhvdrun --sagemaker" in err for _, _, err in ended] == [True, False]


@pytest.mark.parametrize(
    ("config", "secret", "expected"),
    [
        (None, "", "ConfigError: init(): the ranks that SageMaker has started"),
        ("{", SECRET, "is not JSON"),
        ('{"hosts": ["a", "b"], "current_host": "c"}', SECRET, "'current_host' must be one of"),
    ],
)
def test_program_without_a_distribution_never_trains_alone_by_mistake(
    containers: Callable[..., Containers], config: str | None, secret: str, expected: str
) -> None:
    job = containers(2)
    if config is not None:
        for base in job.bases:
            job.config(base, "resourceconfig.json").write_text(config)
    for status, _, err in job.start_alone(WORK, POLYHVD_SECRET=secret).finish():
        assert status == 1
        assert expected in err.splitlines()[-1]
        assert config is not None or "in the estimator: environment={" in err.splitlines()[-1]


def test_strangers_at_the_port_do_not_matter(containers: Callable[..., Containers]) -> None:
    job = containers(2).start(WORK, *QUICK, only=range(1))
    strangers: list[socket.socket] = []

    def connected() -> bool:
        try:
            strangers.append(socket.create_connection((job.hosts[0], 16420)))
        except OSError:
            return False
        return True

    wait_until(connected, "the port")
    garbage = [b"GET / HTTP/1.0\r\n\r\n", os.urandom(4096), frame(HELLO, -1, b'{"slots": 1}'), b"polyhvd\x02"]
    for data in garbage * 8:
        connected()
        strangers[-1].sendall(data)
    ended = job.start(WORK, *QUICK, only=range(1, 2)).finish()
    assert [status for status, _, _ in ended] == [0, 0], ended
    for stranger in strangers:
        stranger.close()


def test_no_secret_is_sent_to_another_host() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
    agent = ArrivedAgent(here, SignedStream(SessionKeys(bytes(32), bytes(32))), "a", 1, "nonce")
    env = {"POLYHVD_SECRET": ranks_secret(b"shared", "nonce"), "POLYHVD_HOST_ID": "1"}
    agent.start({"env": {**agent.environment, **env}, "ranks": [(1, {"POLYHVD_RANK": "1"})]})
    sent = there.recv(1 << 16)
    assert b"POLYHVD_RANK" in sent
    assert b"nonce" in sent
    assert b"SECRET" not in sent
    assert env["POLYHVD_SECRET"].encode() not in sent
    agent.conclude({})
    there.close()


def nodes(
    *options: list[str], source: str, tmp_path: Path, **variables: str
) -> list[subprocess.Popen[bytes]]:
    (tmp_path / "train.py").write_text(source)
    started = []
    for words in options:
        command = [sys.executable, "-m", "polyhvd.launch", *words, sys.executable, str(tmp_path / "train.py")]
        env = environment(**{"POLYHVD_SECRET": SECRET, **variables})
        started.append(
            subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        )
    return started


def test_nodes_meet_at_an_endpoint(tmp_path: Path) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    common = ["--nnodes", "2", "--rdzv-endpoint", endpoint, *QUICK]
    options = [[*common, "--node-rank", "1", "--nproc-per-node", "2"], [*common, "--node-rank", "0"]]
    second, first = nodes(*options, source=WORK, tmp_path=tmp_path)
    out, err = first.communicate(timeout=DEADLINE_S)
    assert (first.returncode, second.wait(DEADLINE_S)) == (0, 0), (err, second.communicate())
    assert sorted(out.decode().splitlines())[2] == "[2] place 2 3 1 2 0 1 sum 6.0"
    second.communicate()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--nnodes", "2"], "--node-rank: must be 0 to 1"),
        (
            ["--nnodes", "2", "--node-rank", "2"],
            "--node-rank: must be 0 to 1, another one on each host; found 2",
        ),
        (["--node-rank", "0"], "--nnodes: the number of hosts must be 1 or more; found None"),
        (["--nnodes", "2", "--node-rank", "0"], "--rdzv-endpoint: name host 0"),
        (["--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "a:b"], "'a:b' is not HOST or HOST:PORT"),
        (["--sagemaker", "-H", "a:1"], "-H is for one polyhvdrun that starts the ranks of all hosts"),
        (["--sagemaker", "--nnodes", "2"], "--nnodes: --sagemaker sets it; leave it out"),
        (["--nnodes", "1", "--nproc-per-node", "0"], "--nproc-per-node 0: must be 1 or more"),
    ],
)
def test_unusable_options_are_explained(tmp_path: Path, options: list[str], expected: str) -> None:
    (process,) = nodes(options, source="", tmp_path=tmp_path)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 2
    assert expected in err.decode()


def test_first_node_that_waits_for_the_others_shows_them_as_its_status(tmp_path: Path) -> None:
    endpoint = ["--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    (first,) = nodes(["--nnodes", "3", "--node-rank", "0", *endpoint], source="", tmp_path=tmp_path)
    with first:
        wait_until(lambda: first.pid in control.jobs(fixed=True), "a launcher that answers")
        heard: list[dict[str, Any]] = []
        control.request(first.pid, {"status": True}, heard.append)
        first.terminate()
    assert heard[0]["does"] == "starts"
    absent = [f"node {number}: its polyhvdrun has not connected" for number in (1, 2)]
    assert re.sub(r" for \d+ s", "", heard[0]["sentence"]) == f"waits for {'; '.join(absent)}"


def test_first_node_whose_port_is_in_use_names_the_option(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        options = ["--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", f"127.0.0.1:{port}"]
        (first,) = nodes(options, source="", tmp_path=tmp_path)
        _, err = first.communicate(timeout=DEADLINE_S)
    assert first.returncode == 1
    assert f"another process listens on port {port} of this host; pass another port" in err.decode()


def test_nodes_that_disagree_on_their_number_are_told(tmp_path: Path) -> None:
    endpoint = ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--start-timeout", "6"]
    options = [["--nnodes", str(2 + k), "--node-rank", str(k), *endpoint] for k in (0, 1)]
    first, second = nodes(*options, source="", tmp_path=tmp_path)
    _, err = second.communicate(timeout=DEADLINE_S)
    assert second.returncode == 1
    assert b"refuses this host: hosts: it has 3, the first host 2" in err
    first.communicate(timeout=DEADLINE_S)
    assert first.returncode == 1


@pytest.mark.skipif(not netns.available(), reason="needs root and iproute2")
def test_nodes_of_two_hosts_that_are_cut_off_both_end(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SAVING)
    (tmp_path / "checkpoints").mkdir()
    with netns.two_hosts() as hosts:
        common = ["--nnodes", "2", "--rdzv-endpoint", hosts[0].address, "--heartbeat-timeout-s", "3", *QUICK]
        env = environment(POLYHVD_SECRET=SECRET, SAGEMAKER_BASE_DIR=str(tmp_path))
        processes = [
            host.popen(
                *(sys.executable, "-m", "polyhvd.launch", *common, "--node-rank", str(number)),
                *(sys.executable, str(tmp_path / "train.py")),
                cwd=ROOT,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for number, host in enumerate(hosts)
        ]
        stream = processes[0].stdout
        assert stream is not None
        seen = b""
        while seen.count(b"pid ") < 2:
            data = os.read(stream.fileno(), 4096)
            assert data, processes[0].communicate()
            seen += data
        hosts[0].link("down")
        errors = [process.communicate(timeout=DEADLINE_S)[1] for process in processes]
        assert [process.returncode for process in processes] == [1, 1], errors
        assert all(b"nothing was received from" in err for err in errors)
        assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["saved0", "saved1"]
        assert not any(map(is_running, pids(seen)))
