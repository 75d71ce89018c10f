"""The flight recorder: when ranks write their last operations down, and what is made of the files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import odd_json
import polyhvd.numpy as hvd
import pytest
from flight_ranks import reduce_until_it_fails
from launching import ROOT, wait_until
from pool import Pool
from ranks_alive import wait_until_asleep

from polyhvd import cli
from polyhvd.observe import flight
from polyhvd.testing import worker


def dumps_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("polyhvd-flight.rank*.json"))


def loaded(folder: Path, count: int) -> list[flight.Dump]:
    """Wait for so many dumps; each is whole as soon as it has its name."""
    wait_until(lambda: len(dumps_in(folder)) == count, f"{count} dumps")
    return flight.load(dumps_in(folder))


def differences(dumps: list[flight.Dump]) -> list[str]:
    lines = flight.explain(dumps)
    start = next(i for i, line in enumerate(lines) if not line.startswith("Written by "))
    return [line.strip() for line in lines[start : lines.index("")]]


def test_survivors_of_a_killed_rank_write_their_last_operations(
    start: Callable[..., Pool], tmp_path: Path
) -> None:
    pool = start(3)
    pool.start(reduce_until_it_fails)
    for rank in range(3):
        pool.note(rank)
    pool.signal(1, signal.SIGKILL)
    assert [pool.answer(rank) for rank in (0, 2)] == ["PeerLostError"] * 2
    dumps = loaded(tmp_path, 2)
    assert [dump.rank for dump in dumps] == [0, 2]
    for dump in dumps:
        assert "rank 1 " in dump.reason
        assert dump.pid == pool.pids[dump.rank]
        assert dump.last_done is not None
        assert dump.last_done.batch >= 21
    text = "\n".join(flight.explain(dumps))
    assert "rank 1: no file" in text


def skip_one(skipper: int, skipped: str) -> None:
    for step in range(3):
        for name in ("first", "second", "third"):
            if step == 2 and name == skipped and hvd.rank() == skipper:
                continue
            if step == 2 and name == skipped:
                worker.note("asks")
            if step == 2 and name == "third" and hvd.rank() == skipper:
                worker.note("is past it")
            hvd.allreduce(np.ones(10, np.float32), name=name)


def test_a_rank_that_skips_an_operation_is_named_with_it(
    start: Callable[..., Pool], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = start(3)
    pool.start(skip_one, 1, "second")
    for rank in range(3):
        pool.note(rank)
        wait_until_asleep(pool.pids[rank])
        pool.signal(rank, signal.SIGUSR2)
    loaded(tmp_path, 3)
    assert cli.main(["flight", *map(str, dumps_in(tmp_path))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["Written by ranks 0, 1, 2 because: SIGUSR2", "The first difference:"]
    first = lines[2]
    # The second operation of the second step was batch 5, as all are alone.
    assert "allreduce 'second'" in first
    assert "submitted by ranks 0, 2; not by rank 1, which last ran it in batch 5" in first
    last = lines[lines.index("") - 1]
    assert "allreduce 'third'" in last
    assert "submitted by rank 1; not by ranks 0, 2" in last


def reduce_once(name: str) -> float:
    return float(hvd.allreduce(np.full(4, hvd.rank() + 1.0), name=name)[0])


def test_sigusr2_is_heard_in_a_blocking_call_which_goes_on(
    start: Callable[..., Pool], tmp_path: Path
) -> None:
    pool = start(2)
    pool.start(reduce_once, "late", ranks=[0])
    wait_until_asleep(pool.pids[0])
    pool.signal(0, signal.SIGUSR2)
    (dump,) = loaded(tmp_path, 1)
    assert dump.reason == "SIGUSR2"
    pending = [record for record in dump.records if record.pending]
    assert [(record.name, record.state) for record in pending] == [("late", "announced")]
    pool.start(reduce_once, "late", ranks=[1])
    assert [pool.answer(rank) for rank in range(2)] == [1.5, 1.5]


UNKNOWN = "nothing is known about ranks without a file"


def test_jobs_that_share_a_folder_are_compared_separately(
    start: Callable[..., Pool], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for size in (2, 3):
        pool = start(size)
        pool.start(reduce_once, f"of {size}", ranks=[0])
        wait_until_asleep(pool.pids[0])
        pool.signal(0, signal.SIGUSR2)
        loaded(tmp_path, size - 1)
    assert cli.main(["flight", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "The files are of 2 jobs, which are compared separately. The latest is last."
    assert len([line for line in lines if line.startswith("job-") and ", files written at 20" in line]) == 2
    for size in (2, 3):
        assert f"  allreduce 'of {size}': submitted by rank 0; {UNKNOWN}" in lines
    assert len([line for line in lines if line.startswith(("rank 1: no file", "ranks 1, 2: no file"))]) == 2


def compute() -> None:
    worker.note("computing")
    signal.pause()


def test_sigusr2_is_heard_while_the_program_is_elsewhere(start: Callable[..., Pool], tmp_path: Path) -> None:
    pool = start(2)
    pool.run(reduce_once, "x")
    pool.start(compute, ranks=[1])
    pool.note(1)
    pool.signal(1, signal.SIGUSR2)
    (dump,) = loaded(tmp_path, 1)
    assert dump.last_done is not None
    assert dump.last_done.name == "x"


def test_a_stall_is_written_by_the_ranks_that_wait(start: Callable[..., Pool], tmp_path: Path) -> None:
    pool = start(3, POLYHVD_STALL_CHECK_TIME_SECONDS="1")
    pool.start(reduce_once, "stalled", ranks=[0, 2])
    dumps = loaded(tmp_path, 2)
    assert [dump.rank for dump in dumps] == [0, 2]
    assert all("waits" in dump.reason for dump in dumps)
    pool.start(reduce_once, "stalled", ranks=[1])
    assert [pool.answer(rank) for rank in range(3)] == [2.0] * 3


def test_nothing_is_written_when_it_is_turned_off(start: Callable[..., Pool], tmp_path: Path) -> None:
    pool = start(2, POLYHVD_FLIGHT_RECORDER="0")
    pool.start(reduce_until_it_fails)
    for rank in range(2):
        pool.note(rank)
    pool.signal(1, signal.SIGKILL)
    assert pool.answer(0) == "PeerLostError"
    assert not dumps_in(tmp_path)


def disagree() -> str:
    try:
        hvd.allreduce(np.ones(hvd.rank() + 1), name="x")
    except hvd.RankMismatchError:
        return "mismatch"
    raise AssertionError("shapes differ")


def test_neither_a_disagreement_nor_a_good_end_is_written(start: Callable[..., Pool], tmp_path: Path) -> None:
    pool = start(2)
    assert pool.run(disagree) == ["mismatch"] * 2
    pool.close()
    assert not dumps_in(tmp_path)


OWN_HANDLER = """
import os, signal
import polyhvd.numpy as hvd

def usr2_is_caught():
    masks = [line for line in open("/proc/self/status") if line.startswith("SigCgt")]
    return bool(int(masks[0].split()[1], 16) >> (signal.SIGUSR2 - 1) & 1)

hvd.init()
print(usr2_is_caught())
hvd.shutdown()
print(usr2_is_caught())
signal.signal(signal.SIGUSR2, lambda *_: print("mine"))
hvd.init()
os.kill(os.getpid(), signal.SIGUSR2)
hvd.shutdown()
os.kill(os.getpid(), signal.SIGUSR2)
"""


def test_a_handler_of_the_program_stays_and_ours_goes_at_shutdown(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OWN_HANDLER],
        cwd=ROOT,
        env={**os.environ, "POLYHVD_FLIGHT_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == ["True", "False", "mine", "mine"], done.stderr
    assert not dumps_in(tmp_path)


FORK = """
import os, signal
import polyhvd.numpy as hvd
hvd.init()
child = os.fork()
if child == 0:
    os.kill(os.getpid(), signal.SIGUSR2)
    os._exit(0)
print(os.WTERMSIG(os.waitpid(child, 0)[1]))
"""


def test_the_signal_to_a_forked_child_is_not_the_ranks(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORK],
        cwd=ROOT,
        env={**os.environ, "POLYHVD_FLIGHT_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == [str(int(signal.SIGUSR2))], done.stderr
    assert not dumps_in(tmp_path)


def test_without_files_the_command_reads_those_of_the_latest_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLYHVD_FLIGHT_DIR", str(tmp_path))
    assert cli.main(["flight"]) == 1
    assert f"no job of this user has written files to {tmp_path}" in capsys.readouterr().err
    for age_s, job in ((5, "job-old"), (1, "job-new"), (9, "job-first")):
        folder = tmp_path / f"polyhvd-flight-{os.geteuid()}" / job
        folder.mkdir(parents=True)
        dump = write_dump(folder, 0, 2, [record(1, job, state="announced")])
        written = time.time() - age_s
        os.utime(dump.rename(folder / "polyhvd-flight.rank0.1.json"), (written, written))
    foreign = tmp_path / f"polyhvd-flight-{os.geteuid()}" / "linked"
    foreign.mkdir()
    (foreign / "polyhvd-flight.rank0.2.json").symlink_to("/etc/passwd")
    assert cli.main(["flight"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["Written by rank 0 because: a test", "The first difference:"]
    assert "'job-new'" in lines[2]
    assert lines[-1].endswith(f"{tmp_path}/polyhvd-flight-{os.geteuid()}/job-new")


# Reading -----------------------------------------------------------------------


def record(sequence: int, name: str, batch: int = 0, state: str = "done", **fields: Any) -> dict[str, Any]:
    own = {"sequence": sequence, "state": state, "kind": "allreduce", "name": name, "process_set": 0}
    return {**own, **({"batch": batch} if batch else {}), "submitted_ns": sequence, **fields}


def write_dump(
    folder: Path, rank: int, size: int, records: list[dict[str, Any]], unix_s: int = 0, **header: Any
) -> Path:
    path = folder / f"{rank}.{unix_s}.json"
    first = {"flight": {"size": size, "host": "h", **header}, "reason": "a test", "rank": rank, "pid": 1}
    lines = [{**first, "now_ns": 10**9, "unix_s": unix_s}, *records]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_an_agreed_operation_that_one_rank_has_not_finished_comes_first(tmp_path: Path) -> None:
    both = [record(1, "a", 1), record(2, "b", 2)]
    asked = record(4, "d", state="announced")
    ahead = write_dump(tmp_path, 0, 2, [*both, record(3, "c", 3), asked])
    behind = write_dump(tmp_path, 1, 2, [*both, record(3, "c", 3, "running")])
    found = differences(flight.load([behind, ahead]))
    assert found[1] == "batch 3, allreduce 'c': rank 0 finished it; rank 1: running"
    assert "'d'" in found[3]


def test_batches_that_a_ring_has_lost_are_no_difference(tmp_path: Path) -> None:
    long = write_dump(tmp_path, 0, 2, [record(i, "x", i) for i in range(1, 9)])
    short = write_dump(tmp_path, 1, 2, [record(i, "x", i) for i in range(5, 9)])
    assert differences(flight.load([long, short])) == [
        "The ranks ran the same operations, and wait for none that other ranks have not submitted."
    ]


def test_only_members_of_a_process_set_are_missed(tmp_path: Path) -> None:
    def in_set(*records: dict[str, Any]) -> list[dict[str, Any]]:
        return [{**item, "process_set": 1} for item in records]

    files = [
        write_dump(tmp_path, 0, 3, in_set(record(1, "x", 1), record(2, "y", state="announced"))),
        write_dump(tmp_path, 1, 3, in_set(record(1, "x", 1))),
        write_dump(tmp_path, 2, 3, [record(1, "z", state="announced")]),
    ]
    found = differences(flight.load(files))
    (in_set_1,) = [line for line in found if "process set 1" in line]
    assert in_set_1.endswith("submitted by rank 0; not by rank 1, which never ran it")


def test_each_operation_is_read_a_few_times_however_many_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rings have 4096 operations, and a large model has hundreds that wait for a rank."""
    names = [f"layer.{i}" for i in range(50)]
    done = [record(i, name, i, process_set=1) for i, name in enumerate(names, 1)]
    waiting = [record(50 + i, name, state="announced", process_set=1) for i, name in enumerate(names, 1)]
    records = [[*done, *waiting], [*done, *waiting], done]
    dumps = flight.load([write_dump(tmp_path, rank, 3, each) for rank, each in enumerate(records)])
    key_of, keys = flight.Record.key, []

    def counted(self: flight.Record) -> tuple[int, str, str]:
        keys.append(key_of.__get__(self))
        return keys[-1]

    monkeypatch.setattr(flight.Record, "key", property(counted))
    found = differences(dumps)
    assert found[1] == (
        "allreduce 'layer.0' of process set 1: submitted by ranks 0, 1; not by rank 2, which last ran it in "
        "batch 1"
    )
    assert len(keys) < 4 * sum(map(len, records))


def test_the_newest_dump_of_a_rank_counts(tmp_path: Path) -> None:
    old = write_dump(tmp_path, 0, 1, [record(1, "old", 1)], unix_s=1)
    new = write_dump(tmp_path, 0, 1, [record(1, "new", 1)], unix_s=2)
    for files in ([old, new], [new, old]):
        (dump,) = flight.load(files)
        assert dump.records[0].name == "new"


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_of_an_earlier_world_of_an_elastic_job_are_not_compared(tmp_path: Path, size: int) -> None:
    """Ranks 0 and 1 of the new world wait for none; a file of the old one has another rank 2 of 3."""
    steps = [record(step, "a", step) for step in range(1, 4)]
    old = write_dump(tmp_path, 2, 3, [record(1, "b", 1)], unix_s=1, generation=1)
    new = [write_dump(tmp_path, rank, size, steps, unix_s=2, generation=2) for rank in range(2)]
    dumps = flight.load([old, *new])
    assert differences(dumps) == [
        "The ranks ran the same operations, and wait for none that other ranks have not submitted."
    ]
    lines = flight.explain(dumps)
    assert [line[:15] for line in lines if line.startswith("rank 2")] == ["rank 2: no file"] * (size - 2)
    assert lines[-1].endswith(f"compared. Those of other generations: {old}")


def test_of_several_jobs_the_latest_is_last(tmp_path: Path) -> None:
    times = {"b": 5, "a": 9, "c": 2}
    files = [write_dump(tmp_path, 0, 1, [], unix_s, job=job) for job, unix_s in times.items()]
    lines = flight.explain(flight.load(files))
    assert [line.partition(",")[0] for line in lines if "files written at" in line] == ["c", "b", "a"]


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write_dump(tmp_path, 0, 2, [])
    contents = {"empty": "", "text": "no json", "foreign": "{}", "list": "[1]"}
    bad = [tmp_path / name for name in contents]
    for path in bad:
        path.write_text(contents[path.name])
    os.mkfifo(tmp_path / "fifo")
    for path in [*bad, tmp_path / "absent", tmp_path / "fifo", write_dump(tmp_path, 1, 3, [])]:
        assert cli.main(["flight", str(good), str(path)]) == 1
        assert path.name in capsys.readouterr().err


def test_a_dump_with_values_of_wrong_types_is_refused_with_one_line(tmp_path: Path) -> None:
    refusals = []
    good = write_dump(tmp_path, 1, 2, [record(1, "a", 1)])
    odd = write_dump(tmp_path, 0, 2, [record(1, "a", 1), record(2, "b", state="announced")])
    for text in odd_json.variants(odd):
        odd.write_text(text)
        try:
            flight.explain(flight.load([odd, good]))
        except flight.FlightError as error:
            refusals.append(str(error).splitlines())
    assert {len(lines) for lines in refusals} == {1}


def test_a_dump_that_was_cut_between_two_operations_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_dump(tmp_path, 0, 1, [record(1, "a", 1), record(2, "b", 2)])
    header, *rest = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps({**json.loads(header), "records": 3}), *rest]) + "\n")
    assert cli.main(["flight", str(path)]) == 1
    assert "found 2 of 3 operations" in capsys.readouterr().err


def test_names_in_dumps_are_printed_without_escape_sequences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["flight", str(write_dump(tmp_path, 0, 2, [record(1, "a\x1b[31m", 1)]))]) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert r"a\x1b[31m" in printed
