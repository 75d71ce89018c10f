"""``polyhvd bench``, and the benchmarks of this repository as far as they are not about time."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for benchmarks, which is not installed

import netns  # noqa: E402  tests/harness, on the path by tests/conftest.py
from launching import wait_until  # noqa: E402

from benchmarks import elastic, elastic_hosts, elastic_peers, launch, on_ray, on_spark, parity, turns  # noqa: E402
from benchmarks.elastic_events import JobError, Log  # noqa: E402
from benchmarks.interleave import Effort, interleaved  # noqa: E402
from benchmarks.launchers import RENDEZVOUS, SECRET  # noqa: E402
from benchmarks.peers import ENTRIES  # noqa: E402
from benchmarks.peers.base import Reducer  # noqa: E402
from benchmarks.workloads import Workload, resnet50_elements, single  # noqa: E402
from benchmarks.worlds import World, here  # noqa: E402

MB = 1 << 20


def run(*argv: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *argv],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def bench(*options: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    command = ("polyhvd.launch", "-np", str(ranks), sys.executable, "-m", "polyhvd.cli", "bench")
    return run(*command, *options)


def test_bench_measures_every_collective_in_the_form_of_nccl_tests(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    sizes = ("--min-bytes", "24", "--max-bytes", "24K", "--factor", "1024", "--iterations", "3")
    done = bench(*sizes, "--redop", "max", "--json", str(path), ranks=3)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines
    assert all(line.startswith("[0]") for line in lines), "rank 0 alone speaks"
    rows = json.loads(path.read_text())["rows"]
    assert [(row["op"], row["bytes"], row["count"]) for row in rows] == [
        (op, size, size // 4)
        for op in ("allreduce", "allgather", "broadcast", "reducescatter", "alltoall")
        for size in (24, 24 << 10)
    ]
    factors = {
        "allreduce": 4 / 3,
        "allgather": 2 / 3,
        "broadcast": 1,
        "reducescatter": 2 / 3,
        "alltoall": 2 / 3,
    }
    for row in rows:
        assert row["algbw_gb_per_s"] == pytest.approx(row["bytes"] / row["time_us"] / 1e3)
        assert row["busbw_gb_per_s"] == pytest.approx(row["algbw_gb_per_s"] * factors[row["op"]])
        assert row["iterations"] == 3
        assert row["redop"] == ("max" if row["op"] in ("allreduce", "reducescatter") else "none")
    printed = [line.split() for line in lines if len(line.split()) == 12 and "#" not in line]
    assert [words[1] for words in printed] == [str(row["bytes"]) for row in rows]


def test_json_on_standard_output_is_all_that_is_printed() -> None:
    done = run("polyhvd.bench", "--op", "allreduce", "--max-bytes", "1K", "--iterations", "2", "--json", "-")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ranks"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--op", "allsum"), "'allsum' is not one of all, allreduce, allgather"),
        (("--dtype", "float33"), "--dtype float33: numpy does not have it"),
        (("--min-bytes", "1M", "--max-bytes", "1K"), "--max-bytes is less than --min-bytes"),
    ],
)
def test_a_wrong_argument_is_said_once(options: tuple[str, ...], message: str) -> None:
    done = bench(*options)
    assert done.returncode == 2
    assert done.stdout == ""
    own, _, quoted = done.stderr.partition("polyhvdrun: ")  # which repeats what the failed rank said last
    assert own.count(message) == 1, done.stderr
    assert "[1]" not in done.stderr
    assert "Traceback" not in done.stderr
    assert "rank 0" in quoted


@pytest.mark.skipif(not netns.available(), reason="needs root and iproute2")
def test_between_hosts_the_limit_is_the_measured_link() -> None:
    with netns.two_hosts() as hosts:
        server = hosts[0].popen(
            *(sys.executable, "-c", RENDEZVOUS, hosts[0].address, SECRET),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert server.stdout is not None
        common = {"POLYHVD_RENDEZVOUS": server.stdout.readline().decode().strip(), "POLYHVD_SECRET": SECRET}
        options = ("--op", "allreduce,broadcast", "--max-bytes", "1K", "--iterations", "2", "--json", "-")
        ranks = [
            host.popen(
                *(sys.executable, "-m", "polyhvd.bench", *options),
                cwd=ROOT,
                env={
                    **os.environ,
                    **common,
                    "POLYHVD_RANK": str(r),
                    "POLYHVD_SIZE": "2",
                    "POLYHVD_HOST_ID": str(r),
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for r, host in enumerate(hosts)
        ]
        outputs = [rank.communicate(timeout=60) for rank in ranks]
        server.communicate()
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert outputs[1] == (b"", b"")
    found = json.loads(outputs[0][0])
    assert found["link_gb_per_s"] > 0
    for row in found["rows"]:
        assert row["part_of_limit"] == pytest.approx(row["busbw_gb_per_s"] / found["link_gb_per_s"])


def test_peers_take_turns_and_leave_tables_figures_and_plots(tmp_path: Path) -> None:
    bare = tmp_path / "python"  # which has nothing installed
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    options = ("--quick", "--rounds", "2", "--max-mb", "1", "--only", "allreduce", "--horovod", str(bare))
    done = run("benchmarks", *options, "--peers", "numpy,floor,horovod", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (part,) = json.loads((tmp_path / "bench.json").read_text())["parts"]
    assert [column["label"] for column in part["columns"]] == ["1 KB", "64 KB", "1 MB"]
    for column in part["columns"]:
        assert sorted(column["peers"]) == ["floor", "numpy"], done.stderr
        for sample in column["peers"].values():
            assert len(sample["blocks"]) == 2
            assert 0 < sample["p10_ms"] <= sample["median_ms"] <= sample["p90_ms"]
            assert sample["calls"] >= 6
    page = (tmp_path / "bench.md").read_text()
    assert "polyhvd.numpy" in page
    assert "times as long as" in page
    assert f"- without Horovod on gloo: {bare} cannot import horovod.torch (ModuleNotFoundError" in page
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    assert (tmp_path / "allreduce.png").read_bytes().startswith(b"\x89PNG")


def test_ranks_that_use_cpu_while_idle_are_stopped_between_orders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENTRIES, "floor", dataclasses.replace(ENTRIES["floor"], restless=True))

    def stopped() -> bool:
        states = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in world.pids]
        return states == ["T", "T"]

    world = World("floor", 2, here(), tmp_path)
    try:
        wait_until(stopped, "both ranks were stopped")
        workload = single(1024, "blocking")
        assert world.order("prepare", workload) == [True, True]
        assert len(world.measure(workload, 3).seconds) == 3
        wait_until(stopped, "both ranks were stopped")
    finally:
        world.close()
    assert [process.returncode for process in world.launcher.processes] == [0, 0]


def test_a_rank_that_has_ended_is_named_and_the_others_are_measured(tmp_path: Path) -> None:
    gone, there = (World("floor", 2, here(), tmp_path / name) for name in ("gone", "there"))
    try:
        os.kill(gone.pids[1], signal.SIGKILL)
        said: list[str] = []
        effort = Effort(rounds=1, rounds_max=1, block_s=0.01)
        columns = [single(1024, "blocking"), single(2048, "blocking")]
        results = interleaved({"gone": gone, "there": there}, columns, effort, said.append)
    finally:
        gone.close()
        there.close()
    assert [(workload, list(samples)) for workload, samples in results] == [(c, ["there"]) for c in columns]
    assert len(said) == 2
    assert all(f"{gone.label}: rank 1 has ended" in line for line in said), said


needs_horovod = pytest.mark.skipif(
    "BENCH_HOROVOD" not in os.environ, reason="BENCH_HOROVOD names no Python with Horovod"
)


@needs_horovod
def test_horovod_does_every_workload_of_pytorch(tmp_path: Path) -> None:
    options = ("--quick", "--rounds", "1", "--max-mb", "1", "--only", "async,gradients,steps")
    done = run("benchmarks", *options, "--peers", "horovod,horovod-mpi", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    parts = json.loads((tmp_path / "bench.json").read_text())["parts"]
    found = [(column["path"], sorted(column["peers"])) for part in parts for column in part["columns"]]
    both = ["horovod", "horovod-mpi"]
    assert found == [(path, both) for path in ("async",) * 3 + ("separate", "grouped", "step", "step")]


def test_a_peer_with_wrong_sums_is_not_timed() -> None:
    class Forgetful(Reducer):
        rank, size = 0, 2

        def make(self, elements: int, dtype: str, value: int) -> Any:
            return [float(value)] * elements

        def fill(self, tensor: Any, value: int) -> Any:
            return tensor

        def ends(self, tensor: Any) -> tuple[float, float]:
            return tensor[0], tensor[-1]

        def paths(self) -> Any:
            return {"blocking": lambda tensors, name: tensors}

    with pytest.raises(ArithmeticError, match=r"is \(1.0, 1.0\) at its ends, expected 3.0"):
        Forgetful().call(Workload("1 KB", "blocking", (256,)))


def test_gradients_are_those_of_resnet50() -> None:
    sizes = resnet50_elements()
    assert len(sizes) == 161
    assert sum(sizes) == 25_557_032  # parameters, as published with its weights


def test_a_rank_holds_little_beyond_its_tensors_and_does_not_grow() -> None:
    done = run("benchmarks.memory", "--steps", "300", "--json")
    assert done.returncode == 0, done.stderr
    for rank in json.loads(done.stdout):
        assert rank["big model"]["all"] < 16, rank
        assert rank["growth over 300 steps"]["all"] < 0.25, rank


def test_losses_are_read_from_what_the_ranks_have_noted() -> None:
    def event(at: float, name: str, pid: int, **more: int) -> dict[str, object]:
        return {"at": at, "event": name, "pid": pid, **more}

    events = [
        *(event(1.0, "step", pid, size=3, step=1) for pid in (1, 2, 3)),
        event(2.0, "kill", 3),
        event(2.010, "error", 2),
        event(2.012, "error", 1),
        *(event(2.1 + pid / 1000, "step", pid, size=3, step=1) for pid in (1, 2, 4)),
        event(5.0, "interrupt", 2),
        event(5.0, "interrupt", 1),
        *(event(5.1 + pid / 1000, "step", pid, size=3, step=2) for pid in (1, 2, 5)),
        event(9.0, "error", 1),  # another has come to the end of the job first
    ]
    found = elastic.losses_of(list(reversed(events)), ranks_after=3)
    assert found.errors == pytest.approx([12.0])
    assert found.steps == pytest.approx([92.0])  # process 4, at 2.104
    assert found.pauses == pytest.approx([102.0])
    assert elastic.losses_of(events[:6], ranks_after=3).steps == []  # the job has ended


def noted(folder: Path, *events: tuple[float, str, int, dict[str, int]]) -> Log:
    """A job that has noted these, of processes whose numbers no process can have."""
    lines = [
        json.dumps({"at": at, "event": name, "pid": (1 << 22) + pid, **more})
        for at, name, pid, more in events
    ]
    (folder / "events").write_text("".join(f"{line}\n" for line in lines))
    log = Log(folder, ["sleep", "60"])
    log.read()
    return log


def steps(at: float, step: int, world: int, *pids: int) -> list[tuple[float, str, int, dict[str, int]]]:
    return [(at + pid / 1000, "step", pid, {"step": step, "world": world, "size": len(pids)}) for pid in pids]


def test_cost_of_a_loss_is_that_of_those_that_stay(tmp_path: Path) -> None:
    log = noted(
        tmp_path,
        *steps(1.0, 7, 1, 1, 2, 3),
        (2.010, "error", 1, {}),
        (2.020, "error", 2, {}),
        (9.000, "error", 3, {}),  # of a host whose cable is cut: it hears later
        *steps(2.1, 5, 2, 1, 2),
        *steps(3.0, 6, 3, 1, 2, 4),
    )
    try:
        (former, *_) = log.worlds()
        loss = log.after(former, 2.0)
        assert [loss.error, loss.step] == pytest.approx([20.0, 102.0])
        assert (loss.pause, loss.steps_lost) == (0.0, 2)
        assert [world.number for world in log.worlds()] == [1, 2, 3]
    finally:
        log.close()


def test_pause_is_from_the_interrupt_and_a_step_that_is_made_again_is_lost(tmp_path: Path) -> None:
    events = (*steps(1.0, 7, 1, 1, 2, 3), *((2.0, "interrupt", pid, {}) for pid in (1, 2, 3)))
    for again in (0, 1):
        log = noted(tmp_path, *events, *steps(2.05, 8 - again, 2, 1, 2))
        try:
            loss = log.after(next(log.worlds()), 1.5)
        finally:
            log.close()
        assert loss.pause == pytest.approx(52.0)
        assert (loss.error, loss.steps_lost) == (0.0, again)


def test_world_that_is_not_whole_does_not_count_and_a_job_that_ends_is_told(tmp_path: Path) -> None:
    log = noted(tmp_path, *steps(1.0, 1, 1, 1, 2), *steps(2.0, 1, 2, 1, 2)[:1])
    try:
        (former,) = log.worlds()
        log.process.kill()
        with pytest.raises(JobError, match=r"next world did not come: the job ended with -9"):
            log.after(former, 1.5)
    finally:
        log.close()


def test_peers_that_are_not_installed_are_said_and_the_others_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic_peers, "ENVIRONMENTS", ROOT / "build" / "no such peers")
    lacking = tuple(
        peer for peer in elastic_peers.PEERS if "torchrun" not in peer.label and not peer.several_hosts
    )
    monkeypatch.setattr(elastic_peers, "PEERS", lacking)
    found = list(elastic_peers.rows(3))
    assert [values for _, values, _ in found] == [[], []]
    assert all("make bench-peers" in note for _, _, note in found)


@pytest.mark.slow
@pytest.mark.skipif(not netns.available(), reason="needs root and iproute2")
def test_events_on_several_hosts_are_measured() -> None:
    with elastic_hosts.hosts() as among:
        found = elastic_hosts.job(among, "numpy", 1, dict.fromkeys(elastic_hosts.KINDS, 1))
    assert all(len(losses) == 1 for losses in found.values())
    assert found["notice"][0].steps_lost == 0
    assert found["notice"][0].error == 0
    assert found["cable"][0].error > 1000  # it is the heartbeat's time


def test_pauses_are_those_of_ranks_that_stay_and_a_lost_step_is_an_error() -> None:
    def course(step: int) -> list[dict[str, object]]:
        return [
            *({"at": 1.0, "event": "step", "pid": pid, "step": 7} for pid in (1, 2, 3)),
            *({"at": 1.1, "event": "interrupt", "pid": pid} for pid in (1, 2, 3)),
            {"at": 1.11, "event": "left", "pid": 2},
            *({"at": 1.1 + pid / 100, "event": "step", "pid": pid, "step": step} for pid in (1, 3)),
            *({"at": 1.2, "event": "step", "pid": pid, "step": step + 1} for pid in (1, 3)),
            *({"at": 1.3, "event": "interrupt", "pid": pid} for pid in (1, 3)),
            {"at": 1.35, "event": "step", "pid": 3, "step": step + 2},
        ]

    assert elastic.pauses_of(course(8)) == pytest.approx([30.0, 50.0])
    with pytest.raises(RuntimeError, match="after step 7 and an interrupt came step 9"):
        elastic.pauses_of(course(9))


def test_what_polyhvdrun_adds_is_told_of_each_turn() -> None:
    pair = launch.starts(2)
    assert len(pair.added) == 2
    assert pair.added[1] == pair.polyhvdrun[1] - pair.bare[1]
    assert launch.row("added", [150.0, 100.0]) == "| added | 125 | 88 to 162 | 100 to 150 | 2 |"


def test_entering_is_timed_from_the_last_import() -> None:
    assert launch.entry_ms("times 1.0 2.5\nother\ntimes 2.0 2.25\n") == pytest.approx(500.0)


def test_watching_is_measured_on_the_catalogue_s_network_too() -> None:
    from polyhvd.parity.catalogue import CASES

    dense = [layer.options for layer in CASES["mlp"].build("torch") if layer.kind == "dense"]
    sizes = tuple([*(options["inputs"] for options in dense), dense[-1]["units"]])
    assert parity.NETWORKS["-".join(map(str, sizes))] == sizes
    assert [model.name for model in parity.MODELS["tensorflow"]] == ["Keras"]
    found = {"framework": "Keras", "network": "n", "batch": 32}
    found["ms"] = {"alone": 2.0, "hooks": 2.1, "watch": 3.0}
    assert parity.line(found) == "| Keras | n | 32 | 2.000 | 2.100 | 3.000 | 1.50 |"


@pytest.mark.slow
def test_readers_of_data_are_measured_in_turns(tmp_path: Path) -> None:
    program = (
        "from pathlib import Path; from benchmarks import data; "
        f"data.main(Path({str(tmp_path)!r}), quick=True, "
        "readers=['polyhvd', 'floor', 'polyhvd, 2 workers', 'decoding'], costs=[])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "data.json").read_text())
    assert [part["size"] for part in found] == [1, 2, 1, 2]
    for part in found:
        assert len(part["rows_s"]) == 2
        assert all(len(speeds) == 2 and min(speeds) > 0 for speeds in part["rows_s"].values())
    assert "| polyhvd | " in (tmp_path / "data.md").read_text()


def test_jobs_on_an_engine_take_turns_with_their_peers() -> None:
    calls: list[str] = []

    def measured(name: str, seconds: float) -> float:
        calls.append(name)
        return seconds

    found = turns.in_turns(lambda: measured("mine", 2.0), lambda: measured("its", 4.0), 2)
    assert found == ([2.0, 2.0], [4.0, 4.0])
    assert calls == ["its", "mine", "mine", "its", "its", "mine"]  # the first two do not count
    assert turns.paired("start", "s", *found) == "| start, s | 2 | 4 | 0.50 | 2 |"


@pytest.mark.nightly
@pytest.mark.skipif(
    not Path(on_spark.python_of()).exists(),
    reason="tools/matrix.py --prepare spark-estimators installs Spark",
)
def test_starts_of_jobs_on_spark_are_measured(tmp_path: Path) -> None:
    assert on_spark.main(tmp_path, quick=True) == 0
    assert (
        "| from `run` to the first step, beside TorchDistributor, s | " in (tmp_path / "spark.md").read_text()
    )


@pytest.mark.nightly
@pytest.mark.skipif(
    not Path(on_ray.python_of()).exists(), reason="tools/bench_peers.py ray installs Ray Train"
)
def test_jobs_on_ray_are_measured(tmp_path: Path) -> None:
    assert on_ray.main(tmp_path, quick=True) == 0
    report = (tmp_path / "ray.md").read_text()
    assert "not measured" not in report
    assert "| from the executor to the first step, beside TorchTrainer, s | " in report
    assert all(label in report for label in on_ray.LOSSES)
