"""Autotuning: the search, what it logs and keeps, and a real job that tunes itself."""

from __future__ import annotations

import csv
import itertools
import json
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyhvd import cli
from polyhvd.config import ConfigError, Settings
from polyhvd.launch import run
from polyhvd.observe import autotune
from polyhvd.observe.autotune import GRID, Autotuner, Search

SIZES = tuple(len(values) for values in GRID.values())


def smooth(point: tuple[int, ...]) -> float:
    """One peak, broad."""
    peak = (6, 2, 3, 5)
    return 10 - sum(((p - q) / n) ** 2 for p, q, n in zip(point, peak, SIZES, strict=True)) * 8


def saturating(point: tuple[int, ...]) -> float:
    """Faster with more fusion up to a point; the window costs; chunks barely matter."""
    return 5 * (1 - 2.0 ** -point[0]) - 0.4 * point[1] + 0.05 * point[2]


def ridge(point: tuple[int, ...]) -> float:
    """Two values that have to go together, and one that has a cliff."""
    return 6 - abs(point[0] / 8 - point[3] / 7) * 4 - (2 if point[2] == 0 else 0)


@pytest.mark.parametrize(
    "speed",
    [
        pytest.param(smooth, marks=pytest.mark.nightly),
        pytest.param(saturating, marks=pytest.mark.nightly),
        ridge,
    ],
)
def test_search_comes_within_five_percent_of_the_best_of_the_grid(
    speed: Callable[[tuple[int, ...]], float],
) -> None:
    best = max(speed(point) for point in itertools.product(*map(range, SIZES)))
    found = []
    for seed in range(2):
        random = np.random.default_rng(seed)
        search = Search(SIZES, (7, 4, 4, 5), noise=0.8)
        for _ in range(40):
            point = search.next_point()
            search.add(point, speed(point) * (1 + 0.02 * random.standard_normal()))
        found.append(speed(search.best()))
    assert np.median(found) >= 0.95 * best


def test_search_is_the_same_every_time() -> None:
    def asked() -> list[tuple[int, ...]]:
        search, points = Search(SIZES, (0, 0, 0, 0), noise=0.8), []
        for _ in range(10):
            points.append(search.next_point())
            search.add(points[-1], smooth(points[-1]))
        return points

    assert asked() == asked()
    assert all(0 <= i < n for point in asked() for i, n in zip(point, SIZES, strict=True))


@dataclass
class Sample:
    bytes: int = 1_000_000
    seconds: float = 0.01
    steps: int = 10
    fingerprint: int = 0xABC


def tuner(tmp_path: Path, **changes: Any) -> tuple[Autotuner, list[Any]]:
    tuned: list[Any] = []
    settings = Settings(
        autotune=True,
        **{"autotune_log": str(tmp_path / "log.csv"), "autotune_samples_max": 6, **changes},
    )
    return Autotuner(settings, ["a", "a"], tuned.append), tuned


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_log_and_commands_tell_what_was_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine, tuned = tuner(tmp_path)
    for i in range(9):
        assert not mine.done
        mine.observe(Sample(seconds=0.01 + 0.001 * i))
    assert mine.done
    assert len(tuned) == 10  # at first, after each sample, and the best after the last
    logged = rows(tmp_path / "log.csv")
    assert [row["phase"] for row in logged] == ["warm-up"] * 3 + ["sample"] * 6 + ["best"]
    assert {name: int(logged[-1][name]) for name in GRID} == {name: getattr(tuned[-1], name) for name in GRID}
    assert float(logged[3]["bytes_per_second"]) == pytest.approx(1e6 / 0.013, rel=1e-6)

    assert cli.main(["autotune", str(tmp_path / "log.csv"), "--plot", str(tmp_path / "log.png")]) == 0
    said = capsys.readouterr().out
    assert "fastest of 6: 0.077 GB/s" in said
    assert "chosen: " in said
    assert (tmp_path / "log.png").read_bytes().startswith(b"\x89PNG")


def test_next_world_of_the_same_shape_goes_on(tmp_path: Path) -> None:
    mine, tuned = tuner(tmp_path, autotune_warmup_samples=1)
    for _ in range(3):
        mine.observe(Sample())
    later: list[Any] = []
    assert mine.go_on(["b", "b"], later.append)
    assert later == [tuned[-1]]  # the sample that was under way begins anew
    for _ in range(4):
        mine.observe(Sample())
    assert mine.done
    last: list[Any] = []
    assert mine.go_on(["b", "b"], last.append)
    assert last == [later[-1]]  # what was found stays
    assert not mine.go_on(["a", "b"], last.append)
    assert not mine.go_on(["a", "a", "a"], last.append)
    assert len(last) == 1


def test_log_of_a_lost_rank_0_is_not_overwritten(tmp_path: Path) -> None:
    mine, _ = tuner(tmp_path)
    mine.observe(Sample())
    mine.close()
    settings = Settings(autotune=True, autotune_log=str(tmp_path / "log.csv"))
    again = Autotuner(settings, ["a"], lambda tuning: None, appends=True)
    again.observe(Sample())
    again.close()
    assert [row["phase"] for row in rows(tmp_path / "log.csv")] == ["warm-up", "warm-up"]


def test_result_is_kept_for_jobs_of_the_same_shape(tmp_path: Path) -> None:
    cache = tmp_path / "found.json"
    first, tuned = tuner(tmp_path, autotune_cache=str(cache), autotune_warmup_samples=1)
    for _ in range(7):
        first.observe(Sample())
    assert first.done

    again, tuned_again = tuner(tmp_path, autotune_cache=str(cache))
    again.observe(Sample())
    assert again.done
    assert tuned_again[1:] == [tuned[-1]]

    other, _ = tuner(tmp_path, autotune_cache=str(cache))
    other.observe(Sample(fingerprint=1))
    assert not other.done


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"x": 3}', '{"x": {"cycle_us": "a"}}', '{"x": {"fusion_bytes_max": 1e999}}', 20_000 * "["],
    ids=["empty", "list", "number", "text", "infinite", "nested"],
)
def test_spoilt_cache_is_reported_and_not_used(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "found.json"
    cache.write_text(text)
    mine, _ = tuner(tmp_path, autotune_cache=str(cache))
    with caplog.at_level(logging.WARNING, "polyhvd"):
        mine.observe(Sample())
    assert not mine.done
    assert str(cache) in caplog.text


def test_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'polyhvd\[autotune\]'"):
        tuner(tmp_path)


HEADS = "phase,fusion_bytes_max,cycle_us,chunk_bytes,direct_bytes_max,steps,bytes,seconds,bytes_per_second\n"
SAMPLE = "sample,1048576,100,8192,4096,1,1000,1.0,1000\n"


@pytest.mark.parametrize(
    "text",
    [
        b"a,b\n1,2\n",
        b"\xff\xfe\x00\n",
        b"x" * 200_000 + b"\n",
        f"{HEADS}sample,1048576,100\n".encode(),
        f"{HEADS}{SAMPLE.replace('8192', chr(27) + '[31m')}".encode(),
    ],
    ids=["columns", "no text", "long line", "short line", "control characters"],
)
def test_other_files_are_not_logs(text: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.csv").write_bytes(text)
    assert cli.main(["autotune", str(tmp_path / "x.csv")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "x.csv is not a log of POLYHVD_AUTOTUNE_LOG: " in line
    assert line.isprintable()


def test_a_line_that_a_full_disk_has_cut_off_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(f"{HEADS}{SAMPLE}{SAMPLE[:-2]}")
    assert "fastest of 1: " in autotune.summary(tmp_path / "log.csv")[1]


def train_until_tuned() -> tuple[bool, dict[str, int], int]:
    """Whether all sums were right, what the rank works with in the end, and steps."""
    import time

    import polyhvd.numpy as hvd

    from polyhvd.observe.autotune import GRID
    from polyhvd.runtime import current

    hvd.init()
    sizes = [10, 5000, 30, 70_000, 900]
    right, steps, ending = True, 0, time.monotonic() + 60
    expected = sum(range(1, hvd.size() + 1))
    left = -1
    while left != 0:
        gradients = [np.full(n, hvd.rank() + 1, np.float32) for n in sizes]
        handles = [hvd.allreduce_async_(g, name=f"g{i}", op=hvd.Sum) for i, g in enumerate(gradients)]
        for handle in handles:
            hvd.synchronize(handle)
        right = right and all((g == expected).all() for g in gradients)
        steps += 1
        # Rank 0 knows when it is over; some steps later all have heard of it.
        attendant = current.world()._mailbox_thread
        done = attendant.on_sample is not None and attendant.on_sample.__self__.done
        stop = hvd.broadcast_object((done or time.monotonic() > ending) if hvd.rank() == 0 else None, 0)
        if stop and left < 0:
            left = 5
        left -= left > 0
    tuning = current.world().engine.tuning
    result = right, {name: getattr(tuning, name) for name in GRID}, steps
    hvd.shutdown()
    return result


@pytest.mark.parametrize(
    "hosts", [pytest.param("localhost:2", marks=pytest.mark.nightly), "localhost:1,127.0.0.1:2"]
)
def test_job_tunes_itself(tmp_path: Path, hosts: str) -> None:
    cache = tmp_path / "found.json"
    environment = {
        "POLYHVD_AUTOTUNE": "1",
        "HOROVOD_AUTOTUNE_LOG": str(tmp_path / "log.csv"),
        "POLYHVD_AUTOTUNE_CACHE": str(cache),
        "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "3",
        "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "8",
    }
    results = run(train_until_tuned, hosts=hosts, env=environment)
    best = rows(tmp_path / "log.csv")[-1]
    assert best["phase"] == "best"
    expected = {name: int(best[name]) for name in GRID}
    for right, tuning, _ in results:
        assert right
        assert tuning == expected
    assert list(json.loads(cache.read_text()).values()) == [expected]

    steps = results[0][2]
    results = run(train_until_tuned, hosts=hosts, env=environment)
    assert [row["phase"] for row in rows(tmp_path / "log.csv")] == ["saved"]
    assert [line[:8] for line in autotune.summary(tmp_path / "log.csv")] == ["chosen: "]
    assert [tuning for _, tuning, _ in results] == [expected] * len(results)
    assert results[0][2] < steps


def test_log_that_cannot_be_written_is_an_error_of_init(tmp_path: Path) -> None:
    def start() -> None:
        import polyhvd.numpy as hvd

        hvd.init()

    with pytest.raises(FileNotFoundError, match=r"missing/log\.csv"):
        run(
            start,
            np=2,
            env={"POLYHVD_AUTOTUNE": "1", "POLYHVD_AUTOTUNE_LOG": str(tmp_path / "missing" / "log.csv")},
        )


def test_a_log_on_a_full_disk_is_warned_of_once_and_tuning_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "polyhvd"):
        mine, tuned = tuner(tmp_path, autotune_log="/dev/full")
        for i in range(9):
            mine.observe(Sample(seconds=0.01 + 0.001 * i))
    assert mine.done
    assert len(tuned) == 10
    (said,) = [text for text in caplog.messages if "/dev/full" in text]
    assert "No space left on device" in said


def test_a_full_disk_leaves_no_file_of_autotuning(full: Path, caplog: pytest.LogCaptureFixture) -> None:
    log, cache = full / "log.csv", full / "found.json"
    with caplog.at_level(logging.WARNING, "polyhvd"):
        mine, _ = tuner(full, autotune_log=str(log), autotune_cache=str(cache))
        for i in range(9):
            mine.observe(Sample(seconds=0.01 + 0.001 * i))
    assert mine.done
    assert [path.name for path in full.iterdir()] == ["filling"]
    assert str(log) in caplog.text
    assert "the result cannot be saved" in caplog.text


def test_a_fifo_in_the_place_of_the_log_is_an_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log.csv")
    with pytest.raises(OSError, match=r"log\.csv"):
        tuner(tmp_path)


def test_plot_needs_matplotlib_and_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuner(tmp_path)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "matplotlib", None)
        with pytest.raises(ValueError, match=r"polyhvd\[autotune\]"):
            autotune.plot(tmp_path / "log.csv", tmp_path / "x.png")
    with pytest.raises(ValueError, match="no samples yet"):
        autotune.plot(tmp_path / "log.csv", tmp_path / "x.png")
    assert "no samples yet" in autotune.summary(tmp_path / "log.csv")[0]
