"""What can happen to an elastic job, in every framework: the same losses, the same answers.

Rows are counted, and where worlds have had the same sizes the weights have the bits of a training that
nothing has happened to, which the job makes itself, afterwards.
"""

from __future__ import annotations

import re

import pytest
import test_train
from launching import Launcher

from polyhvd.launch.elastic.driven import RESUME_STATUS
from polyhvd.testing.stand_ins import is_installed

REST = ("--blacklist-cooldown-range", "600", "600")  # lost ranks are not replaced

OTHERS = ("torch", "tensorflow", "keras", "mxnet")  # in which the jobs are slow to start
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in OTHERS]
NIGHTLY = [pytest.param(name, marks=pytest.mark.nightly) for name in OTHERS]
in_every_framework = pytest.mark.parametrize("framework", ["numpy", *SLOW])
#: Where the other frameworks have no code of their own that another test does not run.
in_numpy_and_nightly_in_others = pytest.mark.parametrize("framework", ["numpy", *NIGHTLY])


def run(
    launcher: Launcher, framework: str, how: str, *options: str, kills: tuple[str, ...] = ()
) -> tuple[int, list[str], str]:
    """The status, what ranks have printed at the end of trainings, and what the job has printed."""
    if not is_installed(framework):
        pytest.skip(f"{framework} is not installed")
    return test_train.run(launcher, *options, kills=kills, how=how, framework=framework)


@in_every_framework
def test_losses_at_every_point_leave_the_bits_of_a_training_without(
    launcher: Launcher, framework: str
) -> None:
    kills = (
        "before:2:0",  # in the first step
        "join:hello",  # a newcomer, while it joins
        "commit:2:3",  # when half of the state was copied
        "set:1:6",  # in a collective of a process set
        "sync:1:6",  # while the state is sent: within the recovery from that
        "after:0:9",  # rank 0, when its weights are new and others may not be
    )
    status, ends, said = run(launcher, framework, "twice", *test_train.REPLACED, kills=kills)
    assert (status, ends) == (0, 6 * ends[:1]), said
    assert ends[0].endswith("counts [2.0] steps 18 size 3")
    assert f"after the loss of {len(kills)} processes" in said


@in_numpy_and_nightly_in_others
def test_one_goes_on_when_all_others_are_lost(launcher: Launcher, framework: str) -> None:
    kills = ("others:1:6",)
    status, ends, said = run(launcher, framework, "once", "-np", "3", "--min-np", "1", *REST, kills=kills)
    assert (status, len(ends)) == (0, 1), said
    assert re.search(r"counts \[2\.0\] steps \d+ size 1$", ends[0])


@pytest.mark.parametrize(
    ("framework", "how"),
    [
        ("numpy", "hosts"),
        ("numpy", "hosts commit_every 50"),  # ranks hear of it between two commits
        *(pytest.param(name, "hosts", marks=pytest.mark.slow) for name in OTHERS),
    ],
)
def test_hosts_come_and_go(launcher: Launcher, framework: str, how: str) -> None:
    hosts = launcher._folder / "hosts"
    hosts.write_text("localhost:2\n")
    options = ("-np", "2", "--min-np", "2", "--max-np", "3", "--hostfile", str(hosts))
    status, ends, said = run(launcher, framework, how, *options)
    assert (status, ends) == (0, 2 * ends[:1]), said
    assert re.search(r"counts \[20\.0\] steps \d+ size 2$", ends[0])
    assert "3 ranks" in said
    assert "loss" not in said


@in_every_framework
def test_too_few_ranks_end_the_job_which_resumes_with_the_same_bits(
    launcher: Launcher, framework: str
) -> None:
    options = ("-np", "2", "--min-np", "2", *REST, "--elastic-timeout", "5")
    status, ends, said = run(launcher, framework, "checkpoint", *options, kills=("after:0:6",))
    assert (status, ends) == (RESUME_STATUS, []), said
    assert "run the job again, to resume from its checkpoint" in said
    status, ends, said = run(launcher, framework, "resumes", "-np", "2")
    assert (status, ends) == (0, 4 * ends[:1]), said
    assert ends[0].endswith("counts [2.0] steps 28 size 2")


@in_numpy_and_nightly_in_others
@pytest.mark.parametrize(
    ("how", "text"),
    [("fail", "LookupError: .*there is no row 4"), ("disagree", r"RankMismatchError.*uneven")],
)
def test_errors_of_the_program_are_not_retried(
    launcher: Launcher, framework: str, how: str, text: str
) -> None:
    status, ends, said = run(launcher, framework, how, "-np", "2", "--min-np", "1", "--spares", "0")
    assert (status, ends) == (1, []), said
    assert re.search(text, said), said
    assert "generation 2" not in said
