"""Timelines: what ranks write while they run, and how the files become one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import odd_json
import polyhvd.numpy as hvd
import pytest
from launching import ROOT, wait_until
from pool import Pool, Pools, PoolSpec
from ranks_alive import is_running

from polyhvd import cli
from polyhvd.data import ArrayLoader
from polyhvd.observe import timeline, tracing
from polyhvd.testing import worker

TWO = PoolSpec("numpy", (2,))
SPANS_OF_ALLREDUCE = ["NEGOTIATE_ALLREDUCE", "WAIT", "QUEUE", "ALLREDUCE", "TRANSPORT"]
STEPS = 3
LAYERS = 4


def events_of(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text())
    return events


def rows_of(events: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Spans by the name of their row."""
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            rows[names[event["tid"]]].append(event)
    return rows


def train(path: str, mark_cycles: bool = True) -> None:
    hvd.start_timeline(path, mark_cycles=mark_cycles)
    for _ in range(STEPS):
        gradients = [np.full(500 * (i + 1), hvd.rank() + i, np.float32) for i in range(LAYERS)]
        handles = [hvd.allreduce_async(g, name=f"layer.{i}.weight") for i, g in enumerate(gradients)]
        for handle in handles:
            hvd.synchronize(handle)
        hvd.allgather(np.ones((hvd.rank() + 1, 2)), name="rows")
        hvd.allreduce(np.ones(3))
    hvd.barrier()
    hvd.stop_timeline()


@pytest.fixture
def traced(pools: Pools, tmp_path: Path) -> list[Path]:
    pools.get(TWO).run(train, str(tmp_path / "trace.json"))
    return [tmp_path / "trace.json", tmp_path / "trace.rank1.json"]


def test_each_rank_writes_a_row_for_each_tensor(traced: list[Path]) -> None:
    expected = {f"allreduce.layer.{i}.weight" for i in range(LAYERS)}
    expected |= {"allgather.rows", "allreduce.noname.0", "barrier"}
    for rank, path in enumerate(traced):
        rows = rows_of(events_of(path))
        rows["barrier"] = [span for name in list(rows) if "barrier" in name for span in rows.pop(name)]
        assert set(rows) == expected
        assert {span["pid"] for spans in rows.values() for span in spans} == {rank}
        for i in range(LAYERS):
            spans = rows[f"allreduce.layer.{i}.weight"]
            assert [span["name"] for span in spans] == SPANS_OF_ALLREDUCE * STEPS
            sizes = {span["args"]["bytes"] for span in spans if span["name"] == "ALLREDUCE"}
            assert sizes == {2000 * (i + 1)}


def test_spans_of_a_row_are_in_order_and_nest(traced: list[Path]) -> None:
    for path in traced:
        for name, spans in rows_of(events_of(path)).items():
            open_until: list[int] = []
            begun = 0
            for span in spans:
                begin, length = (round(span[key] * 1000) for key in ("ts", "dur"))
                while open_until and open_until[-1] <= begin:
                    open_until.pop()
                assert begin >= begun, name
                assert all(begin + length <= end for end in open_until), f"{name}: {span} crosses another"
                open_until.append(begin + length)
                begun = begin


def test_ranks_give_the_same_numbers_to_batches(traced: list[Path]) -> None:
    def batches(path: Path) -> list[tuple[str, int, int]]:
        return sorted(
            (name, span["args"]["batch"], span["args"]["fused"])
            for name, spans in rows_of(events_of(path)).items()
            for span in spans
            if span["name"].startswith("ALL")
        )

    assert batches(traced[0]) == batches(traced[1])
    assert len(batches(traced[0])) == STEPS * (LAYERS + 2)


def test_cycles_are_marked_when_asked_for(pools: Pools, traced: list[Path], tmp_path: Path) -> None:
    marks = [event for event in events_of(traced[1]) if event["name"] == "CYCLE_START"]
    assert len(marks) >= STEPS * 3
    pools.get(TWO).run(train, str(tmp_path / "plain.json"), False)
    assert not [e for e in events_of(tmp_path / "plain.json") if e["name"] == "CYCLE_START"]


def load(path: str) -> None:
    hvd.start_timeline(path)
    for _ in ArrayLoader([np.arange(12)], batch_size=2):
        hvd.allreduce(np.ones(3), name="x")
    hvd.stop_timeline()


def test_steps_that_wait_for_data_have_spans_in_a_row_of_their_own(pools: Pools, tmp_path: Path) -> None:
    pools.get(TWO).run(load, str(tmp_path / "trace.json"))
    for name in ("trace.json", "trace.rank1.json"):
        rows = rows_of(events_of(tmp_path / name))
        # And that of an allgather, in which loaders compare their arguments.
        others = {row for row in rows if "allgather" not in row}
        assert others == {"allreduce.x", "data"}
        assert [span["name"] for span in rows["data"]] == 3 * ["WAIT_FOR_DATA"]
        steps = [span["ts"] for span in rows["allreduce.x"] if span["name"] == "NEGOTIATE_ALLREDUCE"]
        for span, step, following in zip(rows["data"], steps, [*steps[1:], float("inf")], strict=True):
            assert span["dur"] > 0
            assert span["ts"] + span["dur"] <= step < following
    assert not cli.main(["timeline", "merge", str(tmp_path / "all.json"), *map(str, tmp_path.glob("t*"))])
    assert {"allreduce.x", "data"} <= set(rows_of(events_of(tmp_path / "all.json")))


def reduce_often(path: str, count: int) -> None:
    hvd.start_timeline(path)
    tensor = np.ones(10, np.float32)
    for _ in range(count):
        hvd.allreduce(tensor, name="x")
    hvd.stop_timeline()


def test_a_timeline_keeps_within_its_size_and_counts_what_it_drops(pools: Pools, tmp_path: Path) -> None:
    limit, count = 100_000, 1000
    pool = pools.get(PoolSpec("numpy", (2,), (("POLYHVD_TIMELINE_MAX_BYTES", str(limit)),)))
    pool.run(reduce_often, str(tmp_path / "trace.json"), count)
    for name in ("trace", "trace.rank1"):
        paths = [tmp_path / f"{name}.old.json", tmp_path / f"{name}.json"]
        size = sum(path.stat().st_size for path in paths)
        assert limit / 2 < size < limit * 1.05
        old, new = ([e for e in events_of(path) if e["ph"] == "X"] for path in paths)
        assert old[-1]["ts"] <= new[0]["ts"]
        dropped = events_of(paths[1])[-1]["args"]["events_dropped"]
        assert dropped > 0
        assert dropped + len(old) + len(new) == count * len(SPANS_OF_ALLREDUCE)
        assert new[-2]["args"]["batch"] >= count  # the newest one is there


def start_twice(folder: str) -> str:
    hvd.stop_timeline()  # nothing to stop
    hvd.start_timeline(f"{folder}/one.json")
    try:
        hvd.start_timeline(f"{folder}/two.json")
    except hvd.InvalidArgumentError as error:
        hvd.allreduce(np.ones(3), name="first")
        hvd.stop_timeline()
        hvd.start_timeline(f"{folder}/one.json")
        hvd.allreduce(np.ones(3), name="second")
        hvd.stop_timeline()
        return str(error)
    return "no error"


def test_a_second_start_is_an_error_and_one_after_stop_overwrites(pools: Pools, tmp_path: Path) -> None:
    errors = pools.get(TWO).run(start_twice, str(tmp_path))
    assert "one.json" in errors[0]
    assert "stop_timeline()" in errors[0]
    assert set(rows_of(events_of(tmp_path / "one.json"))) == {"allreduce.second"}
    assert not list(tmp_path.glob("two*.json")), "a start that is refused leaves no file"


def start_nowhere(path: str) -> str:
    try:
        hvd.start_timeline(path)
    except OSError as error:
        return str(error.filename)
    return "no error"


def test_a_path_that_cannot_be_written_is_an_error_that_names_it(pools: Pools, tmp_path: Path) -> None:
    answers = pools.get(TWO).run(start_nowhere, str(tmp_path / "no folder" / "t.json"))
    assert [Path(answer).name for answer in answers] == ["t.json", "t.rank1.json"]


def test_a_folder_in_the_place_of_a_timeline_is_an_error_on_every_rank(pools: Pools, tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    assert pools.get(TWO).run(start_nowhere, str(tmp_path / "traces")) == [str(tmp_path / "traces")] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["traces"]


def test_a_path_that_is_no_utf8_serves(pools: Pools, tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"l\xe4ufe")
    odd.mkdir()
    pools.get(TWO).run(train, str(odd / os.fsdecode(b"\xff.json")))
    for name in (b"\xff.json", b"\xff.rank1.json"):
        assert "allreduce.layer.0.weight" in rows_of(events_of(odd / os.fsdecode(name)))


def test_a_fifo_in_the_place_of_a_timeline_is_an_error_and_waited_for_by_nobody(
    pools: Pools, tmp_path: Path
) -> None:
    for name in ("t.json", "t.rank1.json"):
        os.mkfifo(tmp_path / name)
    answers = pools.get(TWO).run(start_nowhere, str(tmp_path / "t.json"))
    assert [Path(answer).name for answer in answers] == ["t.json", "t.rank1.json"]


def reduce_and_wait() -> None:
    for i in range(50):
        hvd.allreduce(np.ones(10), name=f"x{i % 5}")
    worker.note("done")
    signal.pause()


@pytest.mark.parametrize("prefix", ["POLYHVD", "HOROVOD"])
def test_the_environment_starts_one_at_init_that_survives_a_kill(
    pools: Pools, tmp_path: Path, prefix: str
) -> None:
    pools.close()
    path = tmp_path / "trace.json"
    with Pool(PoolSpec("numpy", (2,), ((f"{prefix}_TIMELINE", str(path)),))) as pool:
        pool.start(reduce_and_wait)
        for rank in range(2):
            pool.note(rank)
        wait_until(lambda: "allreduce.x4" in path.read_text(), "the events are written")
        pool.signal(0, signal.SIGKILL)
        wait_until(lambda: not is_running(pool.pids[0]), "the end of rank 0")
    assert not path.read_text().rstrip().endswith("]")
    names = {event["name"] for event in timeline.read(path).events()}
    assert names >= set(SPANS_OF_ALLREDUCE)


FULL_DISK = """
import numpy as np
import polyhvd.numpy as hvd
hvd.init()
hvd.start_timeline("/dev/full")
hvd.allreduce(np.ones(3))
hvd.stop_timeline()
print("goes on")
"""


def test_a_full_disk_ends_the_timeline_and_not_the_job() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "goes on\n"
    assert "cannot write /dev/full: No space left" in done.stderr


def test_dynamic_starts_none(tmp_path: Path) -> None:
    settings = (("HOROVOD_TIMELINE", "DYNAMIC"), ("HOROVOD_TIMELINE_MARK_CYCLES", "1"))
    with Pool(PoolSpec("numpy", (1,), settings)) as pool:
        pool.run(reduce_often, str(tmp_path / "own.json"), 3)
    assert events_of(tmp_path / "own.json")
    assert not Path("DYNAMIC").exists()


# Merging -----------------------------------------------------------------------


def write_trace(path: Path, rank: int, events: list[dict[str, Any]], **header: Any) -> Path:
    own = {"rank": rank, "generation": 1, "boot": f"boot {rank}", "host": f"host{rank}", "pid": 1}
    own |= {"clock_offset_ns": 0, "size": 3}
    args = {"header": {**own, **header}, "events_dropped": 0}
    head = {"ph": "M", "name": "polyhvd", "pid": rank, "tid": 0, "args": args}
    row = {"ph": "M", "name": "thread_name", "pid": rank, "tid": 1, "args": {"name": "allreduce.x"}}
    lines = [json.dumps(event) for event in [head, row, *events]]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    return path


def allreduce(rank: int, batch: int, ts: float, dur: float) -> dict[str, Any]:
    args = {"state": "done", "bytes": 4, "batch": batch, "fused": 1}
    return {"ph": "X", "name": "ALLREDUCE", "pid": rank, "tid": 1, "ts": ts, "dur": dur, "args": args}


def spans_by_rank(path: Path) -> dict[int, list[dict[str, Any]]]:
    spans: dict[int, list[dict[str, Any]]] = {}
    for event in events_of(path):
        if event["name"] == "ALLREDUCE":
            spans.setdefault(event["pid"], []).append(event)
    return spans


def test_merge_finds_a_clock_that_is_ahead_and_drifts(tmp_path: Path) -> None:
    """Rank 1 is 3 s ahead, and 1 us more for each s; both are in each batch at the same time."""
    starts = [1e6 * second for second in range(100, 160)]
    files = [
        write_trace(tmp_path / "0.json", 0, [allreduce(0, i, t, 10.0) for i, t in enumerate(starts, 1)]),
        write_trace(
            tmp_path / "1.json",
            1,
            [allreduce(1, i, t + 3e6 + t / 1e6, 10.0) for i, t in enumerate(starts, 1)],
        ),
    ]
    timeline.merge(tmp_path / "all.json", files)
    spans = spans_by_rank(tmp_path / "all.json")
    assert [span["ts"] for span in spans[0]] == starts
    for span, start in zip(spans[1], starts, strict=True):
        assert abs(span["ts"] - start) <= 10.0  # a stretch of 10 s has one offset


def test_merge_of_real_files_puts_a_shifted_clock_right(pools: Pools, tmp_path: Path) -> None:
    pools.get(TWO).run(reduce_often, str(tmp_path / "t.json"), 200)
    shifted = tmp_path / "t.rank1.json"
    events = events_of(shifted)
    for event in events:
        if "ts" in event:
            event["ts"] += 5e6
        if event["name"] == "polyhvd":
            event["args"]["header"]["boot"] = "another machine"
    shifted.write_text("[\n" + ",\n".join(map(json.dumps, events)) + "\n]\n")
    assert (
        cli.main(["timeline", "merge", *map(str, [tmp_path / "all.json", tmp_path / "t.json", shifted])]) == 0
    )
    spans = spans_by_rank(tmp_path / "all.json")
    assert len(spans[0]) == len(spans[1]) == 200
    for a, b in zip(spans[0], spans[1], strict=True):
        assert a["args"]["batch"] == b["args"]["batch"]
        assert a["ts"] < b["ts"] + b["dur"]
        assert b["ts"] < a["ts"] + a["dur"]


def test_merge_without_a_common_allreduce_takes_what_init_has_measured(tmp_path: Path) -> None:
    files = [
        write_trace(tmp_path / "0.json", 0, [allreduce(0, 1, 100.0, 10.0)]),
        write_trace(tmp_path / "1.json", 1, [allreduce(1, 2, 2100.0, 10.0)], clock_offset_ns=2_000_000),
        write_trace(tmp_path / "2.json", 2, [allreduce(2, 3, 2100.0, 10.0)], boot="boot 0"),
    ]
    timeline.merge(tmp_path / "all.json", files)
    spans = spans_by_rank(tmp_path / "all.json")
    assert [spans[rank][0]["ts"] for rank in range(3)] == [100.0, 100.0, 2100.0]


def test_merge_takes_both_halves_of_a_rank_into_the_same_rows(tmp_path: Path) -> None:
    halves = [
        write_trace(tmp_path / "0.old.json", 0, [allreduce(0, 1, 100.0, 10.0)]),
        write_trace(tmp_path / "0.json", 0, [allreduce(0, 2, 200.0, 10.0)]),
    ]
    timeline.merge(tmp_path / "all.json", halves)
    rows = rows_of(events_of(tmp_path / "all.json"))
    assert [span["args"]["batch"] for span in rows["allreduce.x"]] == [1, 2]


def test_merge_names_the_file_that_it_cannot_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write_trace(tmp_path / "good.json", 0, [])
    foreign = tmp_path / "foreign.json"
    foreign.write_text('[\n{"ph": "X", "name": "other"}\n]\n')
    garbled = tmp_path / "garbled.json"
    garbled.write_text("[\n{nothing\n]\n")
    other_job = write_trace(tmp_path / "other.json", 0, [], pid=2)
    smaller_job = write_trace(tmp_path / "smaller.json", 1, [], size=2)
    for bad in (foreign, garbled, other_job, smaller_job, tmp_path / "absent.json"):
        assert cli.main(["timeline", "merge", str(tmp_path / "out.json"), str(good), str(bad)]) == 1
        assert bad.name in capsys.readouterr().err
    linked = tmp_path / "linked.json"
    linked.hardlink_to(good)
    before = [path.read_text() for path in (good, linked, other_job)]
    for out in (good, linked, other_job):
        assert cli.main(["timeline", "merge", str(out), str(good)]) == 1
        assert f"{out.name}: expected the name of the merged file" in capsys.readouterr().err
    assert [path.read_text() for path in (good, linked, other_job)] == before
    for _ in range(2):  # an earlier result is replaced
        assert cli.main(["timeline", "merge", str(tmp_path / "out.json"), str(good)]) == 0


def test_merge_refuses_values_of_wrong_types_with_one_line(tmp_path: Path) -> None:
    refusals = []
    odd, other = tmp_path / "0.json", write_trace(tmp_path / "1.json", 1, [allreduce(1, 1, 5.0, 1.0)])
    for text in odd_json.variants(write_trace(odd, 0, [allreduce(0, 1, 5.0, 1.0)])):
        odd.write_text(text)
        try:
            timeline.merge(tmp_path / "out.json", [odd, other])
        except timeline.TraceError as error:
            refusals.append(str(error).splitlines())
    assert {len(lines) for lines in refusals} == {1}


# Clocks ------------------------------------------------------------------------


def test_an_offset_is_the_middle_of_its_tightest_bounds() -> None:
    # This clock is 1000 ahead. Once this rank was late by 300, once the other one by 50.
    late_here = (1400, 1420, 100, 420)
    late_there = (1500, 1570, 550, 570)
    assert tracing.clock_offset([late_here, late_there]) == (1000, 20)
    assert tracing.clock_offset([late_there]) == (975, 45)


def header(path: str) -> dict[str, Any]:
    hvd.start_timeline(path)
    hvd.stop_timeline()
    own = Path(tracing.path_of_rank(Path(path), hvd.rank()))
    return timeline.read(own).header


def test_the_offset_between_hosts_is_measured_within_its_error(pools: Pools, tmp_path: Path) -> None:
    """Both hosts are this machine, so the true offset is none."""
    headers = pools.get(PoolSpec("numpy", (1, 1))).run(header, str(tmp_path / "t.json"))
    assert headers[0]["clock_error_ns"] == 0
    assert headers[1]["clock_error_ns"] > 0
    assert abs(headers[1]["clock_offset_ns"]) <= headers[1]["clock_error_ns"]
