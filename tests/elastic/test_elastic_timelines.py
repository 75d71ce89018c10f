"""Timelines over generations: each process goes on with its own file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from launching import Launcher

from polyhvd.observe import timeline

#: Rank 1 is lost; rank 2 becomes rank 1, and the spare is rank 2.
PROGRAM = """
import os, time
import numpy as np
import polyhvd.numpy as hvd
from polyhvd.runtime import current
state, counted = hvd.elastic.ArrayState(step=0), [0]
hvd.init()

def begun(rank):  # the file of a rank that has begun the step which is to fail
    return os.path.join(os.path.dirname(__file__), f"begun{rank}")

@hvd.elastic.run
def train(state):
    if FILE:
        hvd.start_timeline(FILE)
    generation = current.world().placement.generation
    print("process", os.environ["POLYHVD_MEMBER"], generation, hvd.rank(), flush=True)
    assert hvd.counters()["operations"] >= counted[0]  # they go on as well
    while state.step < 30:
        if state.step == 10 and hvd.rank() == 1 and generation == 1:
            while not all(map(os.path.exists, [begun(0), begun(2)])):
                time.sleep(0.001)
            os.kill(os.getpid(), 9)
        handle = hvd.allreduce_async(np.ones(4, np.float32), name="x")
        if state.step == 10 and generation == 1:
            open(begun(hvd.rank()), "w").close()
        hvd.synchronize(handle)
        state.step += 1
        counted[0] = hvd.counters()["operations"]
        state.commit()

train(state)
print("end", hvd.rank(), hvd.size(), flush=True)
LAST
"""
JOB = ("-np", "3", "--min-np", "3", "--spares", "1")


def run(launcher: Launcher, *options: str, file: str = "", last: str = "") -> list[int]:
    """The numbers of the processes: those of the first world by rank, and the newcomer's."""
    source = PROGRAM.replace("FILE", repr(file)).replace("LAST", last)
    status, out, err = launcher.run(*JOB, *options, source=source)
    assert status == 0, err
    assert sorted(re.findall(r"end .*", out)) == [f"end {rank} 3" for rank in range(3)]
    places = [tuple(map(int, found)) for found in re.findall(r"process (\d+) (\d+) (\d+)", out)]
    by_place = {(generation, rank): process for process, generation, rank in places}
    first = [by_place[1, rank] for rank in range(3)]
    assert [by_place[2, rank] for rank in range(2)] == [first[0], first[2]]
    return [*first, by_place[2, 2]]


def events_of(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text())  # a whole file
    return events


def rows_of(events: list[dict[str, Any]], pid: int) -> dict[str, int]:
    """How many operations each row of a process has."""
    events = [event for event in events if event["pid"] == pid]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    done = [names[event["tid"]] for event in events if event["name"] == "ALLREDUCE"]
    return {name: done.count(name) for name in set(done)}


def worlds_of(path: Path) -> list[tuple[int, int, int]]:
    headers = timeline.read(path).headers
    return [(header["generation"], header["rank"], header["process"]) for header in headers]


@pytest.mark.parametrize("how", ["variable", "call"])
def test_a_process_writes_one_file_in_all_its_worlds(launcher: Launcher, tmp_path: Path, how: str) -> None:
    first = tmp_path / "t.json"
    options = ("--timeline-filename", str(first)) if how == "variable" else ()
    a, b, c, newcomer = run(launcher, *options, file=str(first) if how == "call" else "")
    files = [first, *(tmp_path / f"t.{name}.json" for name in ("rank1", "rank2", f"process{newcomer}"))]
    assert sorted(tmp_path.glob("t*.json")) == sorted(files)
    assert [worlds_of(file) for file in files] == [
        [(1, 0, a), (2, 0, a)],
        [(1, 1, b)],
        [(1, 2, c), (2, 1, c)],
        [(2, 2, newcomer)],
    ]
    for file, rank in ((files[0], 0), (files[2], 2)):
        events = events_of(file)
        # Ten steps, the one that failed, and twenty in the next world: in one row.
        assert rows_of(events, rank)["allreduce.x"] == 31
        (entry,) = [event for event in events if event["name"] == "NEXT_WORLD"]
        assert entry["args"]["generation"] == 2
        steps = [event["ts"] for event in events if event["name"] == "ALLREDUCE"]
        assert sum(ts < entry["ts"] for ts in steps) == 11
    assert rows_of(events_of(files[3]), 2)["allreduce.x"] == 20

    said = timeline.merge(tmp_path / "all.json", files)
    assert sorted(line.split(":")[0] for line in said) == sorted(f"process {n}" for n in (a, b, c, newcomer))
    merged = events_of(tmp_path / "all.json")
    assert [rows_of(merged, number).get("allreduce.x") for number in (a, c, newcomer)] == [31, 31, 20]
    named = [event for event in merged if event["name"] == "process_name"]
    titles = {event["pid"]: re.sub(r"\(.*\)", "()", event["args"]["name"]) for event in named}
    assert titles[c] == f"process {c} (): rank 2, then 1"
    assert titles[newcomer] == f"process {newcomer} (): rank 2"


def test_a_timeline_that_was_stopped_stays_stopped(launcher: Launcher, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    last = f"""
hvd.stop_timeline()
hvd.start_timeline({str(tmp_path / "u.json")!r})
hvd.barrier()
hvd.shutdown()
"""
    first, _, second, newcomer = run(launcher, file=str(path), last=last)
    later = {tmp_path / f"u.process{number}.json": number for number in (first, second, newcomer)}
    assert set(tmp_path.glob("u*.json")) == set(later)
    for file in (path, *later):
        assert events_of(file)[-1]["args"]["complete"]
    assert worlds_of(tmp_path / f"u.process{second}.json") == [(2, 1, second)]


def test_merge_aligns_clocks_by_what_ranks_did_in_one_generation(tmp_path: Path) -> None:
    """Batches are counted anew in each. Process 1's machine is 5 s ahead, and was rank 0 later."""

    def header(process: int, generation: int, rank: int) -> dict[str, Any]:
        who = {"rank": rank, "generation": generation, "process": process, "host": f"h{process}", "pid": 9}
        args = {
            "header": {**who, "boot": f"boot {process}", "clock_offset_ns": 0, "clock_error_ns": 0},
            "events_dropped": 0,
        }
        return {"ph": "M", "name": "polyhvd", "pid": rank, "tid": 0, "args": args}

    def step(batch: int, second: float) -> dict[str, Any]:
        args = {"bytes": 4, "batch": batch}
        return {
            "ph": "X",
            "name": "ALLREDUCE",
            "pid": 0,
            "tid": 1,
            "ts": 1e6 * second,
            "dur": 9.0,
            "args": args,
        }

    row = {"ph": "M", "name": "thread_name", "pid": 0, "tid": 1, "args": {"name": "allreduce.x"}}
    sides = (
        [header(0, 1, 0), row, step(1, 100.0), step(2, 101.0), header(0, 2, 1), step(1, 105.0)],
        [header(1, 1, 1), row, step(1, 105.0), step(2, 106.0), header(1, 2, 0), step(1, 110.0)],
    )
    files = [tmp_path / f"{number}.json" for number in range(2)]
    for file, events in zip(files, sides, strict=True):
        file.write_text("[\n" + ",\n".join(map(json.dumps, events)) + "\n]\n")
    timeline.merge(tmp_path / "all.json", files)
    found = [event for event in events_of(tmp_path / "all.json") if event["name"] == "ALLREDUCE"]
    assert [event["ts"] for event in found] == [100e6, 101e6, 105e6] * 2
    other = tmp_path / "other.json"
    other.write_text(files[1].read_text().replace('"pid": 9', '"pid": 8'))
    with pytest.raises(timeline.TraceError, match="process 1 in different jobs"):
        timeline.merge(tmp_path / "all.json", [*files, other])
