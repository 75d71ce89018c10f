"""Ranks that have nothing but another launcher's variables: they meet, or say in a line why not."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from fork_servers import IMPORTS, ForkServers
from joining import SECRET, WORK, Job, environment, free_port
from launching import wait_until

from polyhvd import HorovodInternalError
from polyhvd.config import Settings
from polyhvd.launch.providers.meeting import MeetingProvider
from polyhvd.launch.providers.provider import Claim
from polyhvd.launch.providers.torchrun import TorchrunProvider, TorchVariablesProvider
from polyhvd.rendezvous.client import ConnectedStore
from polyhvd.rendezvous.meeting_points import UnixMeetingPoint
from polyhvd.rendezvous.store import Store
from polyhvd.testing.processes import state_of

FAILING = "import sys; sys.exit(7)"
QUICK = {"POLYHVD_START_TIMEOUT": "2.5"}


@pytest.fixture(autouse=True)
def forks(fork_servers: ForkServers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks begin with NumPy and polyhvd imported."""
    monkeypatch.setattr(Job, "python", fork_servers.python(2, IMPORTS["numpy"]))


@pytest.fixture
def hand() -> dict[str, str]:
    """torch.distributed's variables, as a script sets them: of a job that nobody else has."""
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}


def last_line(error: str) -> str:
    return error.strip().splitlines()[-1]


def places(outputs: list[tuple[int, str, str]]) -> list[str]:
    """What the ranks have printed, in order."""
    assert all(status == 0 for status, _, _ in outputs), outputs
    return sorted(line for _, out, _ in outputs for line in out.splitlines() if line.startswith("place"))


def wait_until_rank_0_waits(provider: MeetingProvider, variables: dict[str, str]) -> Claim:
    """The claim of rank 1 with these variables, when rank 0 waits where they would meet."""
    claim = provider.detect(variables)
    assert claim is not None
    point = provider.meeting_point(claim, Settings(), b"")
    assert isinstance(point, UnixMeetingPoint)
    wait_until(lambda: bool(point._places(1)), "rank 0")
    return claim


def test_variables_by_hand_are_enough_on_one_host(hand: dict[str, str]) -> None:
    with Job() as job:
        for rank in "01":
            job.rank(**hand, RANK=rank)
        assert places(job.finish()) == ["place 0 2 0 2 0 1 sum 3.0", "place 1 2 1 2 0 1 sum 3.0"]


def test_ranks_with_many_open_files_meet(hand: dict[str, str]) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2048:
        pytest.skip("needs 2,048 open files, and the hard limit (ulimit -Hn) is lower")
    many = (
        "import os, resource\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "while os.open('/dev/null', os.O_RDONLY) < 1024: pass\n"
    )
    with Job() as job:
        for rank in "01":
            job.rank(many + WORK, **hand, RANK=rank, **QUICK)
        assert places(job.finish()) == ["place 0 2 0 2 0 1 sum 3.0", "place 1 2 1 2 0 1 sum 3.0"]


def test_ranks_meet_again_after_shutdown(hand: dict[str, str]) -> None:
    source = WORK + "hvd.shutdown()\nhvd.init()\n" + WORK.partition("hvd.init()\n")[2] + "hvd.shutdown()\n"
    with Job() as job:
        for rank in "01":
            job.rank(source, **hand, RANK=rank)
        assert len(places(job.finish())) == 4


def test_torch_distributed_may_listen_on_the_master_port_itself(hand: dict[str, str]) -> None:
    source = (
        "import socket, time\nimport os\nlistener = None\nif os.environ['RANK'] == '0':\n"
        "    listener = socket.create_server(('127.0.0.1', int(os.environ['MASTER_PORT'])))\n" + WORK
    )
    hand["POLYHVD_SECRET"] = SECRET
    with Job() as job:
        for rank in "01":
            job.rank(source, **hand, RANK=rank, LOCAL_WORLD_SIZE="1")  # as if on several hosts
        assert len(places(job.finish())) == 2


def test_two_jobs_at_once_keep_apart(hand: dict[str, str]) -> None:
    with Job() as job:
        for name in ("a", "b"):
            for rank in "01":
                own = {**hand, "TORCHELASTIC_RUN_ID": name, "LOCAL_WORLD_SIZE": "2"}
                job.rank(WORK, **own, RANK=rank)
        assert len(places(job.finish())) == 4


def test_what_an_earlier_incarnation_has_left_running_is_not_met(hand: dict[str, str]) -> None:
    own = {**hand, "TORCHELASTIC_RUN_ID": "a", "LOCAL_WORLD_SIZE": "2", "RANK": "0"}
    with Job() as old, Job() as job:
        old.rank(**own, TORCHELASTIC_RESTART_COUNT="0")  # its rank 1 is gone
        wait_until_rank_0_waits(TorchrunProvider(), {**own, "RANK": "1", "TORCHELASTIC_RESTART_COUNT": "0"})
        for rank in "01":
            job.rank(**{**own, "RANK": rank}, TORCHELASTIC_RESTART_COUNT="1")
        assert len(places(job.finish())) == 2


def test_sizes_that_differ_are_told_on_both_sides(hand: dict[str, str]) -> None:
    with Job() as job:
        job.rank(**hand, RANK="0")
        job.rank(**{**hand, "WORLD_SIZE": "3"}, RANK="1")
        outputs = job.finish()
    for status, _, error in outputs:
        assert status == 1
        assert "size must be the same on all ranks: rank 1 has 3, rank 0 2" in last_line(error)


def test_a_rank_that_dies_before_meeting_is_named(hand: dict[str, str]) -> None:
    with Job() as job:
        job.rank(**hand, **QUICK, RANK="0")
        job.rank(FAILING, **hand, RANK="1")
        (status, _, error), _ = job.finish()
    assert status == 1
    assert "rank 0 waited 2.5 s for ranks [1] (of 2): they have not called init()" in last_line(error)


def test_rank_0_that_dies_before_meeting_is_named(hand: dict[str, str]) -> None:
    with Job() as job:
        job.rank(FAILING, **hand, RANK="0")
        job.rank(**hand, **QUICK, RANK="1")
        _, (status, _, error) = job.finish()
    assert status == 1
    assert "rank 1 waited 2.5 s for rank 0 on this host: it has not called init()" in last_line(error)


@pytest.mark.parametrize("stage", ["secret", "place"])
def test_rank_0_that_is_stopped_while_ranks_meet_does_not_outlast_their_time(
    hand: dict[str, str], monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    post_gather = ConnectedStore.post_gather

    def post(store: ConnectedStore, scope: str, *arguments: Any, **options: Any) -> int:
        if scope.endswith(stage):
            os.kill(job.processes[0].pid, signal.SIGSTOP)
            wait_until(lambda: state_of(job.processes[0].pid) == "T", "a stop")
        return post_gather(store, scope, *arguments, **options)

    monkeypatch.setattr(ConnectedStore, "post_gather", post)
    monkeypatch.setattr(Job, "python", [sys.executable])
    provider = TorchVariablesProvider()
    with Job() as job:
        job.rank(**{**hand, "WORLD_SIZE": "3"}, RANK="0")
        claim = wait_until_rank_0_waits(provider, {**hand, "WORLD_SIZE": "3", "RANK": "1"})
        began = time.monotonic()
        with pytest.raises(HorovodInternalError, match=r"rank 0.* does not answer: it is stopped"):
            provider.meet(claim, Settings(start_timeout_s=5.0), 0, began + 5)
        assert time.monotonic() - began < 30


def test_the_second_of_two_that_are_one_rank_is_told(
    hand: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    post_gather = ConnectedStore.post_gather
    placed = threading.Semaphore(0)

    def post(store: ConnectedStore, scope: str, *arguments: Any, **options: Any) -> int:
        number = post_gather(store, scope, *arguments, **options)
        if scope.endswith("/place"):
            placed.release()
        return number

    monkeypatch.setattr(ConnectedStore, "post_gather", post)
    provider = TorchVariablesProvider()
    errors: list[str] = []
    stores: list[Store] = []

    def meet(rank: int) -> None:
        claim = provider.detect({**hand, "WORLD_SIZE": "3", "RANK": str(rank)})
        try:
            store = provider.meet(claim, Settings(), 0, time.monotonic() + 20).store
        except Exception as error:
            errors.append(str(error))
        else:
            assert store is not None
            stores.append(store)  # rank 0 serves the others for as long as it has its own

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in (0, 1, 1, 2)]
    for thread in threads[:3]:
        thread.start()
    for _ in range(3):  # rank 2 would complete the world without the second rank 1
        assert placed.acquire(timeout=20)
    threads[3].start()
    for thread in threads:
        thread.join(30)
    for store in stores:
        store.close()
    assert any("another process of this job is rank 1, too" in error for error in errors), errors


def test_another_secret_is_told_in_a_line_on_both_sides(hand: dict[str, str]) -> None:
    several = {**hand, "LOCAL_WORLD_SIZE": "1", "POLYHVD_START_TIMEOUT": "5"}
    with Job() as job:
        job.rank(**several, RANK="0", POLYHVD_SECRET=SECRET)
        job.rank(**several, RANK="1", POLYHVD_SECRET="00" * 32)
        (status, _, error), (other_status, _, other) = job.finish()
    assert (status, other_status) == (1, 1)
    assert "for ranks [1] (of 2): processes that call as ranks [1] have another secret" in last_line(error)
    assert "calls as rank 1, and does not have this job's secret" in error
    assert "does not have this job's secret; POLYHVD_SECRET" in last_line(other)


@pytest.mark.parametrize(
    ("mode", "user", "why"),
    [
        (0o620, 0, "other users may write to it (mode 620); chmod 600 it"),
        (0o602, 0, "other users may write to it (mode 602); chmod 600 it"),
        (0o600, 65534, "user 65534 owns it, and this process is of user 0; use a file of this user's"),
    ],
)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_secret_s_file_on_which_another_user_decides_is_refused(
    hand: dict[str, str], tmp_path: Path, mode: int, user: int, why: str
) -> None:
    path = tmp_path / "secret"
    path.write_text(SECRET)
    path.chmod(mode)
    os.chown(path, user, -1)
    with Job() as job:
        job.rank(RANK="0", POLYHVD_SECRET_FILE=str(path), **hand)
        ((status, _, error),) = job.finish()
    assert status == 1
    assert f"ConfigError: POLYHVD_SECRET_FILE={path}: {why}" in last_line(error)


def test_a_network_that_is_trusted_is_warned_of(hand: dict[str, str]) -> None:
    with Job() as job:
        for rank in "01":
            job.rank(**hand, RANK=rank, LOCAL_WORLD_SIZE="1", POLYHVD_TRUST_NETWORK="1")
        outputs = job.finish()
    assert len(places(outputs)) == 2
    assert ["POLYHVD_TRUST_NETWORK=1" in error for _, _, error in outputs] == [True, False]


def test_workers_of_a_cluster_meet_and_its_evaluator_is_alone() -> None:
    port = free_port()
    kinds = ("worker", "chief", "evaluator")
    hosts = {kind: [f"localhost:{port + number}"] for number, kind in enumerate(kinds)}
    with Job() as job:
        for kind in ("chief", "worker", "evaluator"):
            job.rank(TF_CONFIG=json.dumps({"cluster": hosts, "task": {"type": kind, "index": 0}}))
        assert places(job.finish()) == [
            "place 0 1 0 1 0 1 sum 1.0",
            "place 0 2 0 2 0 1 sum 3.0",
            "place 1 2 1 2 0 1 sum 3.0",
        ]


def test_the_doctor_says_whose_rank_this_is(hand: dict[str, str]) -> None:
    slurm = {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    with Job() as job:
        argv = [sys.executable, "-m", "polyhvd.cli", "doctor"]
        job.start(argv, environment(**hand, RANK="1", TORCHELASTIC_RUN_ID="x", **slurm))
        job.start(argv, environment(**hand, RANK="1", **slurm))
        (_, nested, _), (_, contradiction, _) = job.finish()
    assert "init() joins: torchrun gives rank 1 of 2 (RANK=1, WORLD_SIZE=2" in nested
    assert "not used: srun gives rank 0 of 1" in nested
    assert "variables contradict each other" in contradiction


@pytest.mark.parametrize("kind", ["pipe", "endless"])
def test_a_secret_s_file_without_an_end_or_a_beginning_is_a_line(
    hand: dict[str, str], tmp_path: Path, kind: str
) -> None:
    path = Path("/dev/zero")
    if kind == "pipe":
        path = tmp_path / "pipe"
        os.mkfifo(path)
    with Job() as job:
        job.rank(RANK="0", POLYHVD_SECRET_FILE=str(path), **hand)
        ((status, _, error),) = job.finish()
    assert status == 1
    assert f"ConfigError: POLYHVD_SECRET_FILE={path}: the job's secret must " in last_line(error)


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o440, False), (0o644, True)])
def test_a_secret_that_everybody_can_read_is_warned_of(
    hand: dict[str, str], tmp_path: Path, mode: int, warned: bool
) -> None:
    path = tmp_path / "secret"
    path.write_text(SECRET)
    path.chmod(mode)
    with Job() as job:
        for rank in range(2):
            job.rank(RANK=str(rank), POLYHVD_SECRET_FILE=str(path), **hand)
        ended = job.finish()
    assert [status for status, _, _ in ended] == [0, 0]
    said = f"POLYHVD_SECRET_FILE={path}: every user of this host can read it (mode {mode:o})"
    assert [said in error for _, _, error in ended] == [warned, False]
