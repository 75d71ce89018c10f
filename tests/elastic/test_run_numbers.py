"""What ``hvd.elastic.run`` computes where ranks are lost or leave, in programs as users write them: the
same as where none is, and without a step undone where none is lost."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launching import Launcher

from polyhvd.testing.stand_ins import is_installed

JOB = str(Path(__file__).with_name("run_job.py"))
DEADLINE_S = 120.0  # for liveness only: frameworks take long to start on a busy machine
REPLACED = ("-H", "localhost:4", "-np", "3", "--min-np", "2", "--max-np", "3", "--spares", "1")
SHRINKS = ("-np", "2", "--min-np", "1")


def run(launcher: Launcher, folder: Path, how: str, strike: str, options: tuple[str, ...]) -> set[str]:
    """What all ranks tell at the end."""
    launcher.start(*options, argv=[*launcher.python(how.split()[0]), JOB, str(folder), strike, *how.split()])
    status, out, err = launcher.finish(DEADLINE_S)
    assert status == 0, f"{out}\n{err}"
    assert (folder / "struck").exists(), out
    return set(re.findall(r"end .*", out))


@pytest.mark.parametrize("how", ["numpy late", "numpy set"])
def test_rank_that_leaves_with_notice_undoes_nothing(launcher: Launcher, tmp_path: Path, how: str) -> None:
    ends = run(launcher, tmp_path, how, "leave", REPLACED)
    assert ends == {"end w [60.0, 60.0, 60.0] undone 0"}


def test_step_in_which_a_rank_was_lost_is_not_committed(launcher: Launcher, tmp_path: Path) -> None:
    """Though the program has caught the error, as loops do that pass over batches which cannot be used."""
    ends = run(launcher, tmp_path, "numpy skip", "kill", ("-np", "3", "--min-np", "2"))
    assert {text.partition(" undone")[0] for text in ends} == {"end w [60.0, 60.0, 60.0]"}


@pytest.mark.slow
@pytest.mark.parametrize("strike", ["leave", "kill"])
def test_epoch_of_keras_that_ends_with_a_change_is_not_begun_again(
    launcher: Launcher, tmp_path: Path, strike: str
) -> None:
    if not is_installed("keras"):
        pytest.skip("keras is not installed")
    assert run(launcher, tmp_path, "keras fit", strike, SHRINKS) == {"end w [-10.0]"}


@pytest.mark.slow
@pytest.mark.parametrize("strike", ["leave", "kill"])
def test_batches_of_lightning_that_wait_for_an_update_are_made_again(
    launcher: Launcher, tmp_path: Path, strike: str
) -> None:
    if not is_installed("lightning"):
        pytest.skip("lightning is not installed")
    assert run(launcher, tmp_path, "lightning 2", strike, SHRINKS) == {"end never counted []"}
