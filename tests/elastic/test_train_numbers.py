"""What ``hvd.elastic.train`` computes where ranks are lost or leave, in programs as users write them: the
same as where none is. Gradients, passes, a rank's own, learning rates."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launching import Launcher

from polyhvd.testing.stand_ins import is_installed

JOB = str(Path(__file__).with_name("numbers_job.py"))
DEADLINE_S = 120.0  # for liveness only: frameworks take long to start on a busy machine
REPLACED = ("-np", "2", "--min-np", "2", "--spares", "1")


def run(launcher: Launcher, folder: Path, how: str, *options: str, kill: str = "") -> list[str]:
    """What all ranks tell at the end, in order."""
    folder.mkdir()
    launcher.out = launcher.err = b""
    python = launcher.python(how.split()[0])
    launcher.start(*(options or REPLACED), argv=[*python, JOB, str(folder), kill, *how.split()])
    status, out, err = launcher.finish(DEADLINE_S)
    assert status == 0, f"{out}\n{err}"
    assert not kill or (folder / "struck").exists(), out
    return sorted(re.findall(r"end .*", out))


@pytest.mark.parametrize(
    "how",
    [
        "torch zero-at-end",
        "torch two-passes",
        pytest.param("torch held-back", marks=pytest.mark.slow),
        pytest.param("torch scaler", marks=pytest.mark.slow),
        pytest.param("keras two-passes", marks=pytest.mark.slow),
        pytest.param("mxnet two-passes", marks=pytest.mark.slow),
    ],
)
def test_weights_are_those_of_a_job_that_was_not_killed(launcher: Launcher, tmp_path: Path, how: str) -> None:
    if not is_installed(how.split()[0]):
        pytest.skip(f"{how.split()[0]} is not installed")
    expected = run(launcher, tmp_path / "whole", how)
    assert len(expected) == 2
    assert run(launcher, tmp_path / "killed", how, kill="kill") == expected


@pytest.mark.parametrize("commit_every", [1, 10])
def test_who_leaves_with_notice_loses_nothing_of_its_own(
    launcher: Launcher, tmp_path: Path, commit_every: int
) -> None:
    how = f"numpy own {commit_every}"
    expected = run(launcher, tmp_path / "whole", how)
    assert expected == [f"end rank {rank} steps 20 own 20 draws 20 of 20" for rank in range(2)]
    assert run(launcher, tmp_path / "left", how, kill="leave") == expected


def test_job_that_is_resumed_by_another_number_of_ranks_adapts_to_it(
    launcher: Launcher, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    options = ("--min-np", "1")
    assert run(launcher, tmp_path / "first", f"numpy rate {folder} 1", "-np", "3", *options) == 3 * [
        "end rate 3.0"
    ]
    assert run(launcher, tmp_path / "second", f"numpy rate {folder} 2", "-np", "2", *options) == 2 * [
        "end rate 2.0"
    ]


def test_change_of_the_world_is_seen_by_all_ranks_after_the_same_step(
    launcher: Launcher, tmp_path: Path
) -> None:
    """Also where what is sent in the background has ended on one rank before others look."""
    slots = ("-H", "localhost:16", "-np", "3", "--min-np", "2", "--max-np", "3")
    ends = run(launcher, tmp_path / "left", "numpy look 30", *slots)
    assert [re.sub(r"generation \d+", "", text) for text in ends] == 2 * ["end  undone 0"]
    assert all(int(re.findall(r"generation (\d+)", text)[0]) > 5 for text in ends), ends
