"""Checkpoints on disk: whole or not there, and nothing in them is run."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pickle
import resource
import signal
import subprocess
import sys
import zipfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NoReturn

import ml_dtypes
import numpy as np
import pytest

from polyhvd.elastic import checkpoint
from polyhvd.elastic.checkpoint import Folder, TornError, pack
from polyhvd.errors import CheckpointError

VALUE = {
    "w": np.arange(6.0).reshape(2, 3),
    "half": np.float16([1, np.nan]),
    "none": np.empty((0, 4), np.int8),
    0: [1, -2.5, float("inf"), "é", None, True],
    "nested": {"t": (1, (np.float32(2), b"\0\xff")), (1, "a"): 2**70},
}


def test_value_is_what_was_written(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "a" / "b")
    folder.make()
    folder.write(12, VALUE)
    assert folder.numbers() == [12]
    found = folder.read(12)
    assert list(found) == list(VALUE)
    for name in ("w", "half", "none"):
        np.testing.assert_array_equal(found[name], VALUE[name], strict=True)
    assert found[0] == VALUE[0]
    assert found["nested"][(1, "a")] == 2**70
    assert found["nested"]["t"] == (1, (2.0, b"\0\xff"))
    assert found["nested"]["t"][1][0].dtype == np.float32


def test_dicts_come_back_as_what_they_were(tmp_path: Path) -> None:
    value = {"seen": Counter(a=2), "rows": defaultdict(list, b=[1]), "plain": {}}
    folder = Folder(tmp_path)
    folder.write(1, {**value, "own": defaultdict(lambda: 7, c=4)})
    found = folder.read(1)
    assert found.pop("own") == {"c": 4}
    assert (found, [*map(type, found.values())]) == (value, [Counter, defaultdict, dict])
    found["seen"]["new"] += 1
    found["rows"]["new"].append(1)


def test_types_that_numpy_does_not_have_are_what_was_written(tmp_path: Path) -> None:
    numbers = np.arange(6).reshape(2, 3)
    kinds = [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]
    value = {
        "arrays": [numbers.astype(kind) for kind in kinds],
        "none": np.empty((0, 3), ml_dtypes.bfloat16),
        "zero": np.array(0, ml_dtypes.bfloat16),
        "bytes": np.full(2, b"ab", "V4"),
    }
    folder = Folder(tmp_path)
    folder.write(1, {**value, "scalar": ml_dtypes.bfloat16(1.5)})
    found = folder.read(1)
    scalar = found.pop("scalar")
    assert (type(scalar), scalar) == (ml_dtypes.bfloat16, 1.5)
    assert list(found) == list(value)
    pairs = [
        *zip(found.pop("arrays"), value.pop("arrays"), strict=True),
        *((found[k], value[k]) for k in value),
    ]
    for mine, written in pairs:
        np.testing.assert_array_equal(mine, written, strict=True)


def test_types_of_a_package_are_read_before_the_program_has_imported_it(tmp_path: Path) -> None:
    Folder(tmp_path).write(1, {"w": np.ones(2, ml_dtypes.bfloat16)})
    source = (
        "import sys\n"
        "from polyhvd.elastic.checkpoint import Folder\n"
        "from polyhvd.errors import CheckpointError\n"
        "print('ml_dtypes' in sys.modules)\n"
        "print(Folder(sys.argv[1]).read(1)['w'].dtype)\n"
        "sys.modules['ml_dtypes'] = None\n"
        "try: Folder(sys.argv[1]).read(1)\n"
        "except CheckpointError as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", source, tmp_path], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines() == [
        "False",
        "bfloat16",
        "CheckpointError the checkpoint has numbers of type bfloat16, which need the package ml_dtypes: "
        "python -m pip install -U ml_dtypes",
    ], done.stderr


def test_two_are_kept_and_what_the_dead_have_begun_is_removed(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    (tmp_path / ".writing-3-0123").write_bytes(b"half")
    (tmp_path / "mine.txt").write_text("of the user")
    for steps in (1, 2, 10, 9999999):
        folder.write(steps, {"steps": steps})
    assert folder.numbers() == [9999999, 10]
    assert sorted(path.name for path in tmp_path.iterdir())[-1] == "mine.txt"
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    "value", [object(), {"a": [lambda: 1]}, {1, 2}, np.array([None]), np.ma.array([1.0], mask=[True])]
)
def test_what_would_need_a_pickle_is_refused_with_its_name(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"^state\['x'\].* is a .*, which cannot be stored in"):
        pack({"x": value})


@pytest.mark.parametrize("kept", [0, 10, 0.5, 0.99])
def test_torn_file_is_an_error_that_names_it(tmp_path: Path, kept: float) -> None:
    folder = Folder(tmp_path)
    folder.write(1, {"w": np.arange(10000.0)})
    whole = folder.file(1).read_bytes()
    folder.file(1).write_bytes(whole[: int(kept * len(whole)) if kept < 1 else int(kept)])
    with pytest.raises(TornError, match=r"checkpoint-000000000001\.npz' cannot be read"):
        folder.read(1)


def with_member(path: Path, name: str, content: bytes, kind: int = zipfile.ZIP_STORED) -> None:
    """Rewrite a checkpoint with one of its arrays replaced."""
    with zipfile.ZipFile(path) as file:
        members = {item.filename: file.read(item) for item in file.infolist()}
    with zipfile.ZipFile(path, "w", kind) as file:
        for other, former in members.items():
            file.writestr(other, content if other == name else former)


def damaged(folder: Folder, how: str) -> None:
    """Damage checkpoint 1 of a folder in a way that its checksums do not show."""
    file = folder.file(1)
    if how == "fifo":
        file.unlink()
        os.mkfifo(file)
    elif how == "folder":
        file.unlink()
        file.mkdir()
    elif how == "shape":
        header = (
            b"{'descr': '<f8', 'fortran_order': False, 'shape': (1099511627776, 64), }".ljust(117) + b"\n"
        )
        with_member(file, "a0.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    elif how == "compressed":
        with zipfile.ZipFile(file) as former:
            told = former.read("told.npy")
        with_member(file, "told.npy", told, zipfile.ZIP_DEFLATED)
    else:
        text = np.frombuffer(b"[" * 100_000, np.uint8)
        told = io.BytesIO()
        np.save(told, text)
        with_member(file, "told.npy", told.getvalue())


@pytest.mark.parametrize("how", ["fifo", "folder", "shape", "compressed", "nested"])
def test_file_that_would_block_or_exhaust_the_process_is_torn(tmp_path: Path, how: str) -> None:
    folder = Folder(tmp_path)
    folder.write(1, {"w": np.arange(1000.0)})
    damaged(folder, how)
    with pytest.raises(TornError, match=r"checkpoint-000000000001\.npz' cannot be read"):
        folder.read(1)
    assert folder.torn() == []
    folder.put_aside(1)
    assert folder.torn() == [str(folder.file(1).with_suffix(".torn"))]
    assert folder.numbers() == []


def test_byte_that_has_changed_is_found(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.write(1, {"w": np.arange(10000.0)})
    whole = bytearray(folder.file(1).read_bytes())
    whole[len(whole) // 2] ^= 1
    folder.file(1).write_bytes(whole)
    with pytest.raises(TornError, match="CRC"):
        folder.read(1)


def test_pickle_in_a_file_is_not_run(tmp_path: Path) -> None:
    class Bad:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "run",)

    folder = Folder(tmp_path)
    folder.file(1).write_bytes(pickle.dumps(Bad()))
    with pytest.raises(TornError):
        folder.read(1)
    with open(folder.file(2), "wb") as stream:
        np.savez(stream, told=np.array([Bad()], dtype=object))
    with pytest.raises(TornError):
        folder.read(2)
    assert not (tmp_path / "run").exists()


def test_newer_format_is_not_taken_for_a_torn_file(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.write(1, {})
    with np.load(folder.file(1)) as data:
        told = data["told"].tobytes().replace(b'"format": 1', b'"format": 9')
    with open(folder.file(1), "wb") as stream:
        np.savez(stream, told=np.frombuffer(told, np.uint8))
    with pytest.raises(CheckpointError, match="format 9, and this version reads 1") as found:
        folder.read(1)
    assert not isinstance(found.value, TornError)


def test_full_disk_is_an_error_and_the_former_stays(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.write(1, VALUE)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    former = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(
            CheckpointError, match=r"could not be written: .*000000000001\.npz' stays"
        ) as found:
            folder.write(2, {"w": np.zeros(1_000_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, former)
    assert found.value.__suppress_context__  # one traceback, not five
    assert [path.name for path in tmp_path.iterdir()] == [folder.file(1).name]
    assert zipfile.ZipFile(folder.file(1)).testzip() is None


def test_name_of_the_job_may_be_a_pipe_or_damaged(tmp_path: Path) -> None:
    first, second = Folder(tmp_path), Folder(tmp_path)
    first.job, second.job = "first", "second"
    os.mkfifo(tmp_path / ".job")
    first.write(1, {})
    for text in (b"\xff", b""):
        first.claim()
        with pytest.raises(CheckpointError, match=r"another job writes .*: 'first', which has"):
            second.write(2, {})
        (tmp_path / ".job").write_bytes(text)
        second.write(2, {})
    assert sorted(path.name for path in tmp_path.iterdir())[0] == ".job"
    assert len(list(tmp_path.iterdir())) == 3


def test_job_removes_what_killed_jobs_have_begun_to_write(tmp_path: Path) -> None:
    left, written = tmp_path / ".writing-1010-0123", tmp_path / ".writing-1011-0123"
    for file in (left, written):
        file.write_bytes(b"half")
    os.utime(left, (0, 0))
    folder = Folder(tmp_path)
    folder.job = "first"
    folder.claim()
    assert not left.exists()
    assert written.exists(), "an earlier job may be writing it"
    os.utime(written, (0, 0))
    folder.claim()
    assert written.exists(), "another rank of this job may write it"


def test_file_that_cannot_be_read_now_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path)
    folder.write(1, {"w": np.ones(3)})

    def fail(*_: object) -> NoReturn:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(checkpoint, "_opened", fail)
    with pytest.raises(CheckpointError, match=r"cannot be read: .* start the job again when it can") as found:
        folder.read(1)
    assert not isinstance(found.value, TornError)


def test_job_that_starts_on_a_full_disk_is_not_taken_for_an_earlier_one(small_disk: Path) -> None:
    first, second = Folder(small_disk), Folder(small_disk)
    first.job, second.job = "first", "second"
    first.claim()
    filler = small_disk / "filler"
    with contextlib.suppress(OSError):
        filler.write_bytes(bytes(1 << 20))
    second.claim()
    filler.unlink()
    second.write(1, {})
    assert second.numbers() == [1]


def test_full_disk_costs_earlier_checkpoints_before_it_is_an_error(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Folder(small_disk)
    for steps in range(1, 5):
        folder.write(steps, {"w": np.full(6_000, float(steps))})  # two of them fit
    assert folder.numbers() == [4, 3]
    assert folder.read(4)["w"][0] == 4
    removed = [record.getMessage() for record in caplog.records]
    assert removed == [
        f"the disk is full: removed {folder.file(steps - 2)} to write the checkpoint of step {steps}"
        for steps in (3, 4)
    ]
    with pytest.raises(CheckpointError, match=r"000004\.npz' stays\. .* it resumes from it"):
        folder.write(5, {"w": np.zeros(12_000)})
    assert [path.name for path in small_disk.iterdir()] == [folder.file(4).name]
    folder.file(4).unlink()
    with pytest.raises(CheckpointError, match=r"no earlier one\. .* it starts from the beginning"):
        folder.write(5, {"w": np.zeros(20_000)})


def test_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be made"):
        Folder(tmp_path / "file" / "sub").make()


def test_folder_that_is_removed_is_an_error_that_names_the_checkpoint(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "gone")
    with pytest.raises(
        CheckpointError, match=r"checkpoint-000000000003\.npz' could not be written: No such file"
    ):
        folder.write(3, 1)
