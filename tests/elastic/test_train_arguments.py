"""``hvd.elastic.train`` on one rank: what it refuses, and data without rows."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import polyhvd.numpy as hvd
import pytest

from polyhvd.data import ArrayLoader
from polyhvd.elastic import checkpoint
from polyhvd.elastic.leaving import Leave, run_callbacks
from polyhvd.errors import CheckpointError

pytestmark = pytest.mark.ranks(1, framework="numpy")


def loader(rows: int = 10, **options: Any) -> ArrayLoader:
    return ArrayLoader([np.zeros(rows)], batch_size=2, **options)


def state(**kwargs: Any) -> Any:
    return hvd.elastic.ArrayState(w=np.zeros(2), **kwargs)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"step": 3}, r"train\(step=3\): expected a function of one batch"),
        ({"state": 5}, r"train\(state=5\): expected a state of hvd\.elastic"),
        ({"data": [1]}, r"train\(data=list\): it has no position in its data"),
        ({"epochs": -1}, r"train\(epochs=-1\): expected an integer of at least 0"),
        ({"epochs": True}, r"train\(epochs=True\): expected an integer"),
        ({"commit_every": 0}, r"train\(commit_every=0\): expected an integer of at least 1"),
        ({"checkpoint_every": 2}, r"checkpoint_every=2\) without checkpoint="),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_argument_that_cannot_be_used_is_refused(arguments: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"step": id, "state": state(), "data": loader(), "epochs": 1, **arguments}
    with pytest.raises(hvd.InvalidArgumentError, match=said):
        hvd.elastic.train(given.pop("step"), given.pop("state"), given.pop("data"), **given)


def test_step_that_commits_is_refused_and_afterwards_the_state_is_the_user_s_again() -> None:
    mine = state()
    with pytest.raises(hvd.InvalidArgumentError, match=r"leave it to elastic\.train\(\)"):
        hvd.elastic.train(lambda batch: mine.commit(), mine, loader(), epochs=1, progress=False)
    mine.commit()


def test_attribute_that_no_checkpoint_can_keep_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(hvd.elastic.CheckpointError, match=r"state\['state'\]\['x'\] is a builtins\.object"):
        hvd.elastic.train(pytest.fail, state(x=object()), loader(), epochs=1, checkpoint=tmp_path)


def test_folder_in_which_no_file_can_be_made_is_refused_before_the_first_step() -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint can be written to '/proc/self': .*; pass a"):
        hvd.elastic.train(pytest.fail, state(), loader(), epochs=1, checkpoint="/proc/self")
    hvd.elastic.train(pytest.fail, state(), loader(), epochs=0, checkpoint="/proc/self")


def test_job_with_the_folder_of_a_later_one_is_an_error_and_the_later_one_goes_on(tmp_path: Path) -> None:
    program = (
        "import sys; import numpy as np; import polyhvd.numpy as hvd; from polyhvd.data import ArrayLoader\n"
        "hvd.init(); state = hvd.elastic.ArrayState(w=np.zeros(2))\n"
        "loader = ArrayLoader([np.zeros(10)], batch_size=2)\n"
        "hvd.elastic.train(id, state, loader, epochs=1, checkpoint=sys.argv[1])\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("POLYHVD")}

    def step(batch: Any) -> None:
        if not tmp_path.joinpath("checkpoint-000000000005.npz").exists():
            subprocess.run([sys.executable, "-c", program, tmp_path], check=True, env=environment)

    with pytest.raises(CheckpointError, match=r"another job .* started after this one, .*; end one"):
        hvd.elastic.train(step, state(), loader(8), epochs=1, checkpoint=tmp_path, progress=False)
    assert [path.name for path in tmp_path.glob("c*")] == ["checkpoint-000000000005.npz"]


def test_epochs_without_a_step_end_all_the_same() -> None:
    ended: list[int] = []
    for data in (loader(0), loader(1, last="drop")):
        hvd.elastic.train(pytest.fail, state(), data, epochs=2, on_epoch_end=ended.append, progress=False)
    assert ended == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("rank", "everyone", "written"), [(0, True, True), (1, True, False), (0, False, False)]
)
@pytest.mark.parametrize("has_folder", [True, False])
def test_only_the_first_of_ranks_that_all_leave_writes(
    tmp_path: Path, has_folder: bool, rank: int, everyone: bool, written: bool
) -> None:
    found: list[list[str]] = []

    def step(batch: Any) -> None:
        run_callbacks(Leave(rank, 2, everyone))
        found.append(sorted(path.name for path in tmp_path.iterdir()))

    folder = {"checkpoint": tmp_path, "checkpoint_every": 100} if has_folder else {}
    hvd.elastic.train(step, state(), loader(4), epochs=1, progress=False, **folder)
    second = ["checkpoint-000000000001.npz"] if written and has_folder else []
    assert [name for name in found[1] if "000000000001" in name] == second


@pytest.mark.parametrize("other", ["attribute", "rows"])
def test_checkpoint_of_another_program_is_refused_and_stays(tmp_path: Path, other: str) -> None:
    hvd.elastic.train(id, state(), loader(), epochs=1, checkpoint=tmp_path, progress=False)
    kept = sorted(tmp_path.glob("c*"))
    changed = state(v=1) if other == "attribute" else state()
    data = loader(12) if other == "rows" else loader()
    with pytest.raises(hvd.elastic.CheckpointError, match="does not fit this program"):
        hvd.elastic.train(id, changed, data, epochs=1, checkpoint=tmp_path, progress=False)
    assert sorted(tmp_path.glob("c*")) == kept


def of_two_epochs(folder: Path) -> list[Path]:
    """Train for two epochs; the checkpoints, the newest one first."""
    first = state(count=0)

    def step(batch: Any) -> None:
        first.count += 1

    hvd.elastic.train(step, first, loader(), epochs=2, checkpoint=folder, progress=False)
    return sorted(folder.glob("*.npz"), reverse=True)


def refuse_renames(*arguments: Any) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_damaged_checkpoint_that_cannot_be_renamed_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest, former = of_two_epochs(tmp_path)
    newest.write_bytes(newest.read_bytes()[:-100])
    steps = []
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint.os, "replace", refuse_renames)
        with pytest.raises(CheckpointError, match="Read-only"):  # to write: the last step of all
            hvd.elastic.train(steps.append, state(count=0), loader(), epochs=2, checkpoint=tmp_path)
        assert len(steps) == 5
        former.write_bytes(former.read_bytes()[:-100])
        with pytest.raises(
            CheckpointError, match=f"none to resume from. Restore one of {re.escape(str(former))}, "
        ):
            hvd.elastic.train(pytest.fail, state(count=0), loader(), epochs=2, checkpoint=tmp_path)
    assert newest.exists()


def test_checkpoint_that_cannot_be_opened_now_keeps_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest, _ = of_two_epochs(tmp_path)

    def refuse(file: Path) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "_opened", refuse)
        with pytest.raises(
            CheckpointError, match=f"{re.escape(str(newest))}' cannot be read: .*Too many open"
        ):
            hvd.elastic.train(pytest.fail, state(count=0), loader(), epochs=2, checkpoint=tmp_path)
    again = state(count=0)
    hvd.elastic.train(pytest.fail, again, loader(), epochs=2, checkpoint=tmp_path, progress=False)
    assert again.count == 10


def test_training_that_has_ended_makes_no_step_when_it_is_started_again(tmp_path: Path) -> None:
    first = state(count=0)

    def step(batch: Any) -> None:
        first.count += 1

    hvd.elastic.train(step, first, loader(), epochs=2, checkpoint=tmp_path, progress=False)
    second = state(count=0)
    hvd.elastic.train(pytest.fail, second, loader(), epochs=2, checkpoint=tmp_path, progress=False)
    assert second.count == 10


def test_second_training_in_a_folder_keeps_changes_that_were_made_after_the_first(tmp_path: Path) -> None:
    def train(mine: Any, data: ArrayLoader, epochs: int) -> None:
        def step(batch: Any) -> None:
            mine.count += 1

        hvd.elastic.train(step, mine, data, epochs=epochs, checkpoint=tmp_path, progress=False)

    first, data = state(rate=1.0, count=0), loader()
    train(first, data, 1)
    first.rate = 0.5
    train(first, data, 2)
    assert (first.rate, first.count) == (0.5, 10)
    assert sorted(path.name for path in tmp_path.glob("c*")) == [
        "checkpoint-000000000005.npz",
        "checkpoint-000000000010.npz",
    ]
    second, data = state(rate=1.0, count=0), loader()  # of a process that was started again
    train(second, data, 1)
    assert (second.rate, second.count) == (0.5, 10)
    second.rate = 0.25
    train(second, data, 3)
    assert (second.rate, second.count) == (0.25, 15)


def test_step_that_moves_the_position_itself_is_refused() -> None:
    data = loader()
    with pytest.raises(hvd.InvalidArgumentError, match=r"advance\(\): leave it to elastic\.train\(\)"):
        hvd.elastic.train(lambda batch: data.advance(), state(), data, epochs=1, progress=False)
    next(iter(data))
    data.advance()
    assert data.cursor == 2


@pytest.mark.parametrize("folder", ["", b"", 3])
def test_folder_that_is_none_is_refused(folder: Any) -> None:
    with pytest.raises(hvd.elastic.CheckpointError, match=r"checkpoint=.*: expected the path of a folder"):
        hvd.elastic.train(pytest.fail, state(), loader(), epochs=1, checkpoint=folder)


def test_folder_may_be_of_bytes(tmp_path: Path) -> None:
    folder = bytes(tmp_path / "run") + b"\xff"
    hvd.elastic.train(lambda batch: None, state(), loader(), epochs=1, checkpoint=folder, progress=False)
    assert [name for name in os.listdir(folder) if name.endswith(b".npz")] == [b"checkpoint-000000000005.npz"]


def test_progress_has_the_part_of_the_time_in_which_steps_waited_for_data(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class SlowLoader(ArrayLoader):
        def _load(self, *args: Any) -> Any:
            time.sleep(0.01)
            return super()._load(*args)

    slow = SlowLoader([np.zeros(10)], batch_size=2)
    hvd.elastic.train(lambda batch: time.sleep(0.01), state(), slow, epochs=1)
    line = capsys.readouterr().err.strip()
    assert re.fullmatch(r"epoch 1/1: 5 steps, [\d.]+ s, 1 rank, waiting for data \d\d%", line), line
