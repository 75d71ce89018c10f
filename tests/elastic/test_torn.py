"""Ranks that a loss catches in the middle of an update: they go on with whole weights, and the same bits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launching import Launcher

from polyhvd.testing.stand_ins import is_installed

JOB = str(Path(__file__).with_name("torn_job.py"))
REPLACED = ("-np", "3", "--min-np", "3", "--spares", "1")
DEADLINE_S = 120.0  # for liveness only: frameworks take long to start on a busy machine


def ends(launcher: Launcher, framework: str, *options: str, kill: tuple[int, int], every: int) -> list[str]:
    argv = [*launcher.python(framework), JOB, framework, str(launcher._folder), *map(str, (*kill, every))]
    launcher.out = launcher.err = b""
    launcher.start(*options, argv=argv)
    status, out, err = launcher.finish(DEADLINE_S)
    assert status == 0, f"{out}\n{err}"
    return re.findall(r"end .*", out)


@pytest.mark.parametrize(
    ("framework", "every"), [("numpy", 4), pytest.param("torch", 3, marks=pytest.mark.slow)]
)
def test_ranks_that_were_torn_are_made_whole(launcher: Launcher, framework: str, every: int) -> None:
    if not is_installed(framework):
        pytest.skip(f"{framework} is not installed")
    undisturbed = ends(launcher, framework, "-np", "3", kill=(-1, -1), every=every)
    assert undisturbed == 3 * undisturbed[:1]
    assert undisturbed[0].endswith("steps 16 size 3")
    result = ends(launcher, framework, *REPLACED, kill=(1, 6), every=every)
    assert (launcher._folder / "killed").exists()
    assert len(list(launcher._folder.glob("torn *"))) == 2, "both that were left were in an update"
    assert result == undisturbed
