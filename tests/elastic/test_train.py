"""``hvd.elastic.train`` in jobs that are killed: every row counts once, and the weights are those of a job
that was not, where the worlds have had the same sizes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path

import pytest
from fork_servers import ForkServers
from launching import Launcher, wait_until

from polyhvd.launch.elastic.driven import RESUME_STATUS
from polyhvd.testing.stand_ins import is_installed

JOB = str(Path(__file__).with_name("train_job.py"))
DEADLINE_S = 120.0  # for liveness only: frameworks take long to start on a busy machine
#: Lost ranks are replaced before anybody goes on, so that the worlds are all of one size.
REPLACED = ("-np", "3", "--min-np", "3", "--spares", "1")
#: They are not.
SLOTS_REST = ("-np", "3", "--min-np", "2", "--blacklist-cooldown-range", "600", "600")
#: Rank 0 commits a step and dies. These of ranks 1 and 2 do not commit that step, because it fails there.
LATE: list[tuple[int, ...]] = [(), (1,), (2,), (1, 2)]


def run(
    launcher: Launcher,
    *options: str,
    kills: tuple[str, ...] = (),
    how: str = "once",
    framework: str = "numpy",
    data: str = "arrays",
) -> tuple[int, list[str], str]:
    """The status, what ranks have printed, and what the job has printed."""
    folder = launcher._folder
    launcher.out = launcher.err = b""
    command = [*launcher.python(framework), JOB, framework, str(folder), *kills]
    launcher.start(*options, argv=command, env={"TRAIN": how, "TRAIN_DATA": data})
    status, out, err = launcher.finish(DEADLINE_S)
    for kill in kills:
        assert (folder / f"killed {kill}").exists(), f"nobody was at {kill}:\n{out}\n{err}"
    return status, re.findall(r"end .*", out), f"{out}\n{err}"


def last_commit(folder: Path, rank: int) -> int:
    """The number of steps in the last commit of a rank of the first world."""
    files = folder.glob(f"commit of generation 1 rank {rank} steps *")
    return max(int(file.name.split()[-1]) for file in files)


def checkpoints(launcher: Launcher) -> list[str]:
    return sorted(path.name for path in (launcher._folder / "checkpoints").glob("c*"))


@pytest.fixture(scope="module")
def end(tmp_path_factory: pytest.TempPathFactory, fork_servers: ForkServers) -> str:
    """What three ranks tell that nobody has killed."""
    launcher = Launcher(tmp_path_factory.mktemp("undisturbed"), fork_servers)
    status, ends, said = run(launcher, "-np", "3")
    assert (status, ends) == (0, 3 * ends[:1]), said
    assert ends[0].endswith("counts [2.0] steps 18 size 3")
    return ends[0]


@pytest.mark.parametrize(
    ("kills", "how"),
    [
        (("before:1:4", "after:0:11"), "once"),
        (("commit:0:1", "commit:2:9"), "once"),  # the ninth step ends an epoch
        (("before:0:6", "after:2:8"), "once commit_every 4"),
        (("write:0:9", "commit:1:18"), "checkpoint commit_every 5"),
        (("before:2:0", "before:1:0"), "once"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "-".join(value),
)
def test_weights_are_those_of_a_job_that_was_not_killed(
    launcher: Launcher, end: str, kills: tuple[str, ...], how: str
) -> None:
    status, ends, said = run(launcher, *REPLACED, kills=kills, how=how)
    assert (status, ends) == (0, 3 * [end]), said
    assert "polyhvdrun: the training continues from the commit of step " in said


@pytest.mark.parametrize("kills", [("before:1:4",), ("after:0:4",), ("commit:2:9",)], ids="-".join)
def test_every_row_counts_once_when_the_world_shrinks(launcher: Launcher, kills: tuple[str, ...]) -> None:
    status, ends, said = run(launcher, *SLOTS_REST, kills=kills)
    assert (status, ends) == (0, 2 * ends[:1]), said
    assert re.fullmatch(r"end \w+ counts \[2\.0\] steps 2\d size 2", ends[0])


def test_rows_of_parquet_files_are_trained_on_once_over_kills_and_restarts(launcher: Launcher) -> None:
    status, ends, said = run(launcher, "-np", "3", data="parquet")
    assert (status, ends) == (0, 3 * ends[:1]), said
    assert ends[0].endswith("counts [2.0] steps 18 size 3")
    undisturbed = ends[0]
    status, ends, said = run(launcher, *REPLACED, kills=("before:1:4", "commit:0:9"), data="parquet")
    assert (status, ends) == (0, 3 * [undisturbed]), said
    options = ("-np", "3", "--min-np", "3", *SLOTS_REST[4:], "--elastic-timeout", "6")
    status, ends, said = run(launcher, *options, kills=("committed:1:7",), how="checkpoint", data="parquet")
    assert (status, ends) == (RESUME_STATUS, []), said
    status, ends, said = run(launcher, "-np", "2", how="checkpoint", data="parquet")
    assert (status, ends) == (0, 2 * ends[:1]), said
    assert re.fullmatch(r"end \w+ counts \[2\.0\] steps 2\d size 2", ends[0])


def test_job_that_has_too_few_ranks_says_resume_me_and_resumes_where_it_was(
    launcher: Launcher, end: str
) -> None:
    options = ("-np", "3", "--min-np", "3", *SLOTS_REST[4:], "--elastic-timeout", "6")
    log = ("-x", "POLYHVD_LOG_LEVEL=info")
    status, ends, said = run(launcher, *options, *log, kills=("committed:1:7",), how="checkpoint")
    assert (status, ends) == (RESUME_STATUS, []), said
    assert "run the job again, to resume from its checkpoint" in said
    assert said.count("checkpoint of step 7 written, since too few ranks are left") == 1, said
    assert checkpoints(launcher)[-1] == "checkpoint-000000000007.npz"
    status, ends, said = run(launcher, "-np", "3", how="checkpoint")
    assert (status, ends) == (0, 3 * [end]), said


def test_the_rank_that_is_left_of_two_writes_checkpoints(launcher: Launcher) -> None:
    options = ("-np", "2", "--min-np", "1", *SLOTS_REST[4:])
    status, ends, said = run(
        launcher, *options, kills=("committed:1:7",), how="checkpoint checkpoint_every 4"
    )
    assert (status, len(ends)) == (0, 1), said
    assert "size 1" in ends[0]


@pytest.mark.parametrize("kill", ["sync:2:0", "sync:0:7"], ids=["receives", "has_read_it"])
def test_loss_while_a_checkpoint_is_taken_up_leads_back_to_it(
    launcher: Launcher, end: str, kill: str
) -> None:
    options = ("-np", "3", "--min-np", "3", *SLOTS_REST[4:], "--elastic-timeout", "4")
    status, ends, said = run(launcher, *options, kills=("committed:1:7",), how="checkpoint")
    assert (status, ends) == (RESUME_STATUS, []), said
    status, ends, said = run(launcher, *REPLACED, kills=(kill,), how="checkpoint")
    assert (status, ends) == (0, 3 * [end]), said


def test_job_of_another_size_resumes_from_the_former_checkpoint_where_the_last_is_torn(
    launcher: Launcher,
) -> None:
    status, ends, said = run(launcher, "-np", "3", how="checkpoint checkpoint_every 4")
    assert status == 0, said
    assert checkpoints(launcher) == ["checkpoint-000000000016.npz", "checkpoint-000000000018.npz"]
    torn = launcher._folder / "checkpoints" / "checkpoint-000000000018.npz"
    torn.write_bytes(torn.read_bytes()[:-100])
    status, ends, said = run(launcher, "-np", "2", how="checkpoint")
    assert (status, ends) == (0, 2 * ends[:1]), said
    assert re.fullmatch(r"end \w+ counts \[2\.0\] steps 19 size 2", ends[0])  # 11 rows were left: 8 and 3
    assert "checkpoint-000000000018.npz' cannot be read" in said
    assert "checkpoint-000000000018.torn" in checkpoints(launcher)


def test_job_whose_checkpoints_are_all_damaged_never_starts_from_step_0(launcher: Launcher) -> None:
    status, ends, said = run(launcher, "-np", "2", how="checkpoint checkpoint_every 4")
    assert status == 0, said
    for name in checkpoints(launcher):
        (launcher._folder / "checkpoints" / name).write_bytes(b"damaged")
    for _ in range(2):
        status, ends, said = run(launcher, "-np", "2", how="checkpoint")
        assert (status, ends) == (1, []), said
        assert "there is none to resume from. Restore one of " in said
        assert len(re.findall(r"checkpoint-0+\d+\.torn", said)) >= 2, said
        assert said.count("Traceback") == said.count("[0] Traceback") == 2, said  # the second one repeats it
    for name in checkpoints(launcher):
        (launcher._folder / "checkpoints" / name).unlink()
    status, ends, said = run(launcher, "-np", "2", how="checkpoint")
    assert status == 0, said


def test_folder_that_cannot_be_made_is_printed_by_one_rank(launcher: Launcher) -> None:
    (launcher._folder / "checkpoints").write_text("")
    status, ends, said = run(launcher, "-np", "3", how="checkpoint")
    assert (status, ends) == (1, []), said
    assert said.count("Traceback") == said.count("[0] Traceback") == 2, said  # the second one repeats it


@pytest.mark.parametrize("first", [0, 1])
def test_state_that_cannot_be_in_a_checkpoint_is_printed_by_one_rank(launcher: Launcher, first: int) -> None:
    source = (
        "import numpy as np, polyhvd.numpy as hvd\n"
        "from polyhvd.data import ArrayLoader\n"
        "hvd.init()\n"
        f"state = hvd.elastic.ArrayState(x=object() if hvd.rank() >= {first} else 0)\n"
        f"folder = {str(launcher._folder / 'checkpoints')!r}\n"
        "loader = ArrayLoader([np.ones(8)], batch_size=1)\n"
        "hvd.elastic.train(id, state, loader, epochs=1, checkpoint=folder)\n"
    )
    status, _, said = launcher.run("-np", "3", "--min-np", "2", source=source)
    assert (status, "state['state']['x'] is a builtins.object" in said) == (1, True), said
    assert said.count("Traceback") == said.count(f"[{first}] Traceback") > 0, said


@pytest.mark.parametrize(
    ("framework", "late"),
    [
        *(("numpy", late) for late in LATE),
        *(
            pytest.param(name, late, marks=pytest.mark.slow if late else pytest.mark.nightly)
            for name in ("torch", "tensorflow", "keras", "mxnet")
            for late in LATE[:2]
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(("late", *map(str, value))),
)
def test_newest_commit_is_written_when_all_are_told_to_leave_and_rank_0_has_just_died(
    launcher: Launcher, request: pytest.FixtureRequest, framework: str, late: tuple[int, ...]
) -> None:
    if not is_installed(framework):
        pytest.skip(f"{framework} is not installed")
    folder, kill = launcher._folder, "committed:0:6"
    lates = [f"late:{rank}:5" for rank in late]
    command = [*launcher.python(framework), JOB, framework, str(folder)]
    # There is no other process in its place: the world does not go on.
    options = ("-np", "3", "--min-np", "3", *SLOTS_REST[4:])
    launcher.start(*options, argv=[*command, kill, *lates], env={"TRAIN": "checkpoint"})
    wait_until((folder / f"killed {kill}").exists, "rank 0's death", DEADLINE_S)
    launcher.signal(signal.SIGTERM)
    status, out, err = launcher.finish(DEADLINE_S)
    assert status == 128 + signal.SIGTERM, f"{out}\n{err}"
    commits = {rank: last_commit(folder, rank) for rank in (1, 2)}
    assert commits == {rank: 5 if rank in late else 6 for rank in (1, 2)}, f"{out}\n{err}"
    # On a slow machine a rank that has waited for some seconds also writes its own commit.
    assert checkpoints(launcher)[-1] == f"checkpoint-{max(commits.values()):012d}.npz", f"{out}\n{err}"
    status, ends, said = run(launcher, "-np", "3", how="checkpoint", framework=framework)
    assert status == 0, said
    assert len(ends) == 3, said
    assert len(set(ends)) == 1, said
    assert ends[0].endswith("counts [2.0] steps 18 size 3"), said
    assert framework != "numpy" or ends[0] == request.getfixturevalue("end"), said


@pytest.mark.parametrize("late", [(), (0,), (2,)], ids=lambda late: "-".join(("late", *map(str, late))))
def test_newest_commit_is_written_when_an_exception_of_a_rank_ends_the_job(
    launcher: Launcher, end: str, late: tuple[int, ...]
) -> None:
    kills = ("raise:1:6", *(f"late:{rank}:5" for rank in late))
    status, ends, said = run(launcher, "-np", "3", "--min-np", "2", kills=kills, how="checkpoint")
    assert (status, ends) == (1, []), said
    assert "LookupError: there is no row 6" in said
    written = checkpoints(launcher)
    assert written[-1] == "checkpoint-000000000006.npz", said
    assert late or len(written) == 1, said
    status, ends, said = run(launcher, "-np", "3", "--min-np", "3", how="checkpoint")
    assert (status, ends) == (0, 3 * [end]), said
    assert len(re.findall(r"polyhvdrun: resumed from \S+-000000000006\.npz, step 6\n", said)) == 1, said


def ranks_of(argument: str) -> list[int]:
    """The processes with this argument, but for the launcher."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            if argument.encode() in words and b"polyhvd.launch" not in words:
                found.append(int(process.name))
    return sorted(found)


@pytest.mark.parametrize(
    "framework",
    [
        "numpy",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("torch", "tensorflow", "keras", "mxnet")),
    ],
)
def test_example_goes_on_when_a_rank_is_killed_by_hand(launcher: Launcher, framework: str) -> None:
    if not is_installed(framework):
        pytest.skip(f"{framework} is not installed")
    name = {"torch": "pytorch", "mxnet": "gluon"}.get(framework, framework)
    example = str(Path(__file__).resolve().parents[2] / "examples" / f"elastic_{name}.py")
    folder = launcher._folder / "checkpoints"
    command = [*launcher.python(framework), example, "--epochs", "12", "--checkpoint", str(folder)]
    launcher.start("-np", "2", "--min-np", "2", "--spares", "1", argv=command)
    process = launcher.process
    assert process is not None
    deadline = time.monotonic() + DEADLINE_S
    while not folder.is_dir() or not any(folder.glob("checkpoint-*.npz")):
        assert process.poll() is None, launcher.finish()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(ranks_of(str(folder))[0], signal.SIGKILL)  # or its proxy, without which it is killed at once
    status, out, err = launcher.finish(DEADLINE_S)
    assert status == 0, err
    assert "the job continues" in err
    (accuracy,) = re.findall(r"test accuracy ([\d.]+)", out)
    assert float(accuracy) > 0.85


@pytest.mark.parametrize(("most", "status"), [("3", 1), ("2", 0)])
def test_global_batch_of_fewer_rows_than_max_np_is_refused_before_the_first_step(
    launcher: Launcher, most: str, status: int
) -> None:
    program = (
        "import numpy as np, polyhvd.numpy as hvd\n"
        "from polyhvd.data import ArrayLoader\n"
        "hvd.init()\n"
        "state = hvd.elastic.ArrayState(w=np.zeros(2))\n"
        "loader = ArrayLoader([np.zeros(8)], global_batch_size=2)\n"
        "hvd.elastic.train(lambda batch: print('step'), state, loader, epochs=1)\n"
    )
    options = ("-np", "2", "--min-np", "1", "--max-np", most)
    found, out, err = launcher.run(*options, argv=[*launcher.python(), "-c", program])
    assert found == status, err
    said = "global_batch_size=2 is too few for the 3 ranks that --max-np allows: a rank would have no row"
    assert (said in err) == (status == 1) == ("step" not in out)
