"""Parquet files of remote file systems: moto's S3 server with faults, and file systems of fsspec."""

from __future__ import annotations

import logging
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from threading import Barrier
from typing import Any, ClassVar

import fsspec
import numpy as np
import pyarrow.compute as pc
import pytest
from fork_servers import IMPORTS, ForkServers  # tests/harness, on the path by tests/conftest.py
from fsspec.implementations.memory import MemoryFileSystem
from launching import DEADLINE_S, ROOT
from pyarrow import fs

from polyhvd.data import DataError, ParquetLoader, storage, write_parquet

pytest.importorskip("moto.server", reason="moto is not installed")
from s3_server import S3Server


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.close()


_numbers = count()


@pytest.fixture
def bucket(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A new bucket, of a server without faults, and repetitions that follow at once."""
    server.reset()
    monkeypatch.setattr(storage, "_FIRST_WAIT_S", 0.0)
    name = f"bucket{next(_numbers)}"
    server.filesystem().create_dir(name)
    server.requests.clear()
    return name


def alone() -> tuple[int, int]:
    return 0, 1


def loader_of(source: Any, **options: Any) -> ParquetLoader:
    return ParquetLoader(source, **{"batch_size": 4, "placement": alone, **options})


def x_of(loader: ParquetLoader) -> list[int]:
    return sorted(x for batch in loader for x in batch["x"].tolist())


def written(filesystem: Any, folder: str, files: int = 2) -> str:
    for number in range(files):
        x = np.arange(12 * number, 12 * number + 12)
        write_parquet(
            {"x": x, "y": -x}, f"{folder}/{number}.parquet", rows_per_group=4, filesystem=filesystem
        )
    return folder


def reads(*faults: str) -> Callable[[str, str, str], str | None]:
    """The first requests of data have these faults."""
    left = list(faults)
    return lambda method, path, key: left.pop(0) if left and method == "GET" and "parquet" in path else None


def polyhvd_texts(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "polyhvd"]


# Sources


def test_uri_of_s3_is_written_and_loaded(server: S3Server, bucket: str) -> None:
    for year in (2024, 2025):
        uri = server.uri(f"{bucket}/a b%20+c/year={year}/0.parquet")
        assert write_parquet({"x": np.arange(10) + 10 * (year - 2024)}, uri, rows_per_group=3) == 10
    found = server.filesystem().get_file_info(fs.FileSelector(bucket, recursive=True))
    assert sorted(info.path for info in found if info.is_file) == [
        f"{bucket}/a b%20+c/year=2024/0.parquet",
        f"{bucket}/a b%20+c/year=2025/0.parquet",
    ]
    for path in ("a b%20+c/", "a b%20+c", "*/year=*/*.parquet", "**/0.parquet", "a b%20+c/**"):
        loaders = [loader_of(server.uri(f"{bucket}/{path}"), placement=lambda r=r: (r, 3)) for r in range(3)]
        assert sorted(x for loader in loaders for x in x_of(loader)) == list(range(20))
    chosen = loader_of(
        server.uri(f"{bucket}/a b%20+c/"), filter=(pc.field("year") == 2025) & (pc.field("x") > 15)
    )
    assert x_of(chosen) == [16, 17, 18, 19]
    assert x_of(loader_of(server.uri(f"{bucket}/a b%20+c/year=2024/0.parquet"))) == list(range(10))
    assert x_of(pickle.loads(pickle.dumps(chosen))) == [16, 17, 18, 19]


def test_filesystem_of_fsspec_is_written_and_loaded() -> None:
    for filesystem, prefix in ((None, "memory://"), (fsspec.filesystem("memory"), "")):
        folder = written(filesystem, f"{prefix}some/a b%20")
        for path in (folder, f"{prefix}some/*/?.parquet", [f"{folder}/1.parquet", f"{folder}/0.parquet"]):
            assert x_of(loader_of(path, filesystem=filesystem)) == list(range(24))
        fsspec.filesystem("memory").rm("/some", recursive=True)


def test_uri_of_local_files_is_that_of_their_path(tmp_path: Path) -> None:
    folder = written(None, f"file://{tmp_path}/a b%20")
    assert (tmp_path / "a b%20" / "1.parquet").exists()
    assert x_of(loader_of(folder)) == x_of(loader_of(f"{folder}/*.parquet")) == list(range(24))
    state = loader_of(folder).state_dict()
    assert state == loader_of(tmp_path / "a b%20").state_dict()
    assert state == loader_of(tmp_path / "a b%20", filesystem=fsspec.filesystem("file")).state_dict()


def test_listing_of_a_folder_of_s3_costs_two_requests_and_a_footer_one(server: S3Server, bucket: str) -> None:
    written(server.filesystem(), f"{bucket}/train", files=5)
    server.requests.clear()
    loader = loader_of(f"{bucket}/train", filesystem=server.filesystem())
    paths = Counter(path for _, path in server.requests)
    assert {paths.pop(f"/{bucket}/train/{number}.parquet") for number in range(5)} == {1}
    assert paths.total() <= 3
    server.requests.clear()
    assert x_of(loader) == list(range(24 * 5 // 2))
    per_group = len(server.requests) / loader.groups_read
    assert per_group <= 3, "its file is opened, read, and looked up for changes"


class Gathering(fs.FileSystemHandler):
    """A local file system whose files are opened when as many threads open one as are expected."""

    def __init__(self, threads: int) -> None:
        self.local = fs.LocalFileSystem()
        self.meeting = Barrier(threads)

    def get_type_name(self) -> str:
        return "gathering"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: list[str]) -> Any:
        return self.local.get_file_info(paths)

    def get_file_info_selector(self, selector: Any) -> Any:
        if "part=" in selector.base_dir:
            self.meeting.wait(30)
        return self.local.get_file_info(selector)

    def open_input_file(self, path: str) -> Any:
        self.meeting.wait(30)
        return self.local.open_input_file(path)

    open_input_stream = open_input_file

    def _refused(self, *arguments: Any) -> Any:
        raise NotImplementedError

    create_dir = delete_dir = delete_dir_contents = delete_root_dir_contents = delete_file = _refused
    move = copy_file = open_output_stream = open_append_stream = _refused


def test_folders_and_footers_are_read_by_64_threads(tmp_path: Path) -> None:
    for number in range(64):
        write_parquet({"x": [number]}, tmp_path / f"part={number}" / "x.parquet")
    filesystem = fs.PyFileSystem(Gathering(64))
    loader = loader_of(str(tmp_path), filesystem=filesystem, columns=["x"])
    assert len(loader._files.files) == 64


def test_row_groups_of_a_remote_file_system_are_read_by_16_threads(tmp_path: Path) -> None:
    for number in range(64):
        write_parquet({"x": [number]}, tmp_path / f"{number}.parquet")
    handler = Gathering(1)
    loader = loader_of(str(tmp_path), filesystem=fs.PyFileSystem(handler))
    expected = [batch["x"].tolist() for batch in loader_of(tmp_path)]
    handler.meeting = Barrier(16)
    assert [batch["x"].tolist() for batch in loader] == expected


class _Hadoop(type):
    """Stands for ``pyarrow.fs.FileSystem``, and records what HDFS is asked for: no server can be had."""

    asked: list[str]
    root: Path

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, fs.LocalFileSystem | fs.SubTreeFileSystem | fs.PyFileSystem)

    def from_uri(cls, uri: str) -> tuple[Any, str]:
        cls.asked.append(uri)
        return fs.SubTreeFileSystem(str(cls.root), fs.LocalFileSystem()), "/path"  # as pyarrow's of HDFS


def test_uri_of_hdfs_is_opened_with_its_user_name_node_and_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for year in (2024, 2025):
        x = np.arange(10) + 10 * (year - 2024)
        write_parquet({"x": x}, tmp_path / f"logs/train/year={year}/0 %20.parquet", rows_per_group=3)
    hadoop = _Hadoop("FileSystem", (), {"asked": [], "root": tmp_path})
    monkeypatch.setattr(fs, "FileSystem", hadoop)
    base = "hdfs://someone@namenode:9000/logs"
    for path in ("train", "train/", "train/*/*.parquet", "**"):
        loader = loader_of(f"{base}/{path}?replication=2&buffer_size=65536", columns=["x"])
        assert x_of(loader) == list(range(20))
    assert set(hadoop.asked) == {"hdfs://someone@namenode:9000/path?replication=2&buffer_size=65536"}
    loader_of("hdfs:///logs/train")
    assert hadoop.asked[-1] == "hdfs:///path"
    (tmp_path / "logs/train/year=2025/0 %20.parquet").write_bytes(b"no Parquet")
    with pytest.raises(
        DataError, match=r"hdfs://namenode:9000/logs/train/year=2025/0 %20\.parquet cannot be read"
    ):
        loader_of(f"{base}/train")


# Faults


@pytest.mark.parametrize("fault", ["503", "cut", "half", "slow"])
def test_read_that_fails_is_repeated_and_logged(
    server: S3Server, bucket: str, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    folder = written(server.filesystem(), f"{bucket}/train")
    server.fault = reads(fault)
    options = {"request_timeout": 0.5} if fault == "slow" else {}
    filesystem = server.filesystem(**options)
    with caplog.at_level(logging.WARNING, "polyhvd"):
        loader = loader_of(folder, filesystem=filesystem, prefetch_bytes=0)  # one group after the other
        assert "attempt 1 of 4 failed: " in polyhvd_texts(caplog)[0]
        server.fault = reads(fault, fault, fault)
        assert x_of(loader) == list(range(24))
    texts = polyhvd_texts(caplog)
    assert len(texts) == 4
    assert all(text.startswith(f"s3://{bucket}/train/") for text in texts)
    assert "attempt 3 of 4 failed: " in texts[-1]
    assert "secret" not in "".join(texts)


#: Reads from a server that accepts connections and never answers.
HANGING = """
import sys, time
from polyhvd.data import DataError, ParquetLoader
for path in ("0.parquet", "", "*.parquet"):
    began = time.monotonic()
    try:
        ParquetLoader(sys.argv[1] % path, batch_size=2, read_timeout_s=1.0, placement=lambda: (0, 1))
    except DataError as error:
        print(time.monotonic() - began < 30, error, flush=True)
for _ in range(5):  # more threads that make a file system when the program ends, where pyarrow may abort it
    try:
        ParquetLoader(sys.argv[1] % "", batch_size=2, read_timeout_s=0.2, placement=lambda: (0, 1))
    except DataError:
        pass
"""


def test_server_that_never_answers_is_an_error_in_time_and_the_program_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        options = f"?endpoint_override=127.0.0.1:{silent.getsockname()[1]}&scheme=http&region=us-east-1"
        command = [sys.executable, "-c", HANGING, f"s3://key:secret@bucket/train/%s{options}"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert len(lines) == 3
    for line, path in zip(lines, ("0.parquet", "", "*.parquet"), strict=True):
        assert line.startswith("True "), line
        assert f"s3://bucket/train/{path}" in line
        assert "has not answered within 1 s; " in line
        assert "raise read_timeout_s=" in line


class HangingFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """Opens no file until it may go on."""

    protocol = "hanging"
    store: ClassVar[dict[str, Any]] = {}  # and not that of its base
    pseudo_dirs: ClassVar[list[str]] = [""]
    may_go_on = threading.Event()
    opened = 0

    def _open(self, *arguments: Any, **options: Any) -> Any:
        if not self.may_go_on.is_set():
            type(self).opened += 1
        self.may_go_on.wait(DEADLINE_S)
        return super()._open(*arguments, **options)


@pytest.fixture
def hanging() -> Iterator[HangingFileSystem]:
    filesystem = HangingFileSystem()
    filesystem.may_go_on.set()
    for number in range(100):
        write_parquet(
            {"x": np.arange(4)}, f"/hanging/{number:02}.parquet", rows_per_group=2, filesystem=filesystem
        )
    HangingFileSystem.opened = 0
    yield filesystem
    filesystem.may_go_on.set()
    for thread in threading.enumerate():
        if thread.name in ("polyhvd-remote", "polyhvd-footers"):
            thread.join(DEADLINE_S)


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_file_system_that_hangs_is_an_error_that_begins_no_other_file(
    hanging: HangingFileSystem, on_error: str
) -> None:
    """Each of them would take as long, one after the other in each thread."""
    hanging.may_go_on.clear()
    with pytest.raises(DataError, match=r"hanging/00.parquet cannot .* has not answered within 0.5 s"):
        loader_of("/hanging", filesystem=hanging, read_timeout_s=0.5, on_error=on_error)
    assert hanging.opened <= storage._THREADS


def test_file_system_that_hangs_in_a_loop_is_an_error_though_others_are_skipped(
    hanging: HangingFileSystem,
) -> None:
    options = {"filesystem": hanging, "read_timeout_s": 5.0, "on_error": "skip", "prefetch_bytes": 0}
    loader = loader_of(["/hanging/00.parquet"], **options)
    hanging.may_go_on.clear()
    with pytest.raises(DataError, match=r"row group ., column 'x' cannot .* has not answered within 5 s"):
        x_of(loader)


INTERRUPTED = """
import os, signal, sys, threading, time
import numpy as np
from fsspec.implementations.memory import MemoryFileSystem
from polyhvd.data import ParquetLoader, write_parquet

class Hanging(MemoryFileSystem):
    def _open(self, path, mode="rb", **options):
        if mode == "rb":
            if hangs.is_set():
                if signals:  # one for all files: another would come while the interpreter ends
                    os.kill(os.getpid(), signals.pop())
                time.sleep(3600)
        return super()._open(path, mode=mode, **options)

hangs, signals = threading.Event(), [signal.SIGINT]
for number in range(2):
    write_parquet({"x": np.arange(4)}, f"/train/{number}.parquet", filesystem=Hanging())
if "missed" in sys.argv:  # another thread takes the signal, so that it does not end a wait of the main thread
    threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
if "footers" in sys.argv:
    hangs.set()
options = {"prefetch_bytes": 0} if "rows without prefetching" in sys.argv else {}
loader = ParquetLoader(
    "/train", filesystem=Hanging(), batch_size=2, read_timeout_s=3600, placement=lambda: (0, 1), **options
)
hangs.set()
for batch in loader:
    pass
"""


@pytest.mark.parametrize("signal_is", ["seen", "missed"])
@pytest.mark.parametrize("hanging", ["footers", "rows", "rows without prefetching"])
def test_interrupt_ends_the_program_while_a_file_system_hangs(hanging: str, signal_is: str) -> None:
    command = [sys.executable, "-c", INTERRUPTED, hanging, signal_is]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert ended.returncode == -signal.SIGINT
    assert ended.stderr.rstrip().endswith("KeyboardInterrupt")


def test_server_that_hangs_in_the_middle_is_an_error_that_names_the_file(
    server: S3Server, bucket: str
) -> None:
    folder = written(server.filesystem(), f"{bucket}/train")
    filesystem = server.filesystem(request_timeout=60)
    loader = loader_of(folder, filesystem=filesystem, prefetch_bytes=0)
    for file in loader._files.files:
        file.storage._timeout_s = 1.5  # not before: a busy server may need longer for the footers
    server.fault = reads(*["slow"] * 9)
    began = time.monotonic()
    with pytest.raises(
        DataError, match=rf"s3://{bucket}/train/..parquet: row group .* within 1.5 s; .*read_ti"
    ):
        x_of(loader)
    assert time.monotonic() - began < DEADLINE_S / 2


def test_read_that_fails_in_all_attempts_is_an_error_that_names_the_file(
    server: S3Server, bucket: str
) -> None:
    folder = written(server.filesystem(), f"{bucket}/train", files=1)
    loader = loader_of(folder, filesystem=server.filesystem(), read_attempts=3, prefetch_bytes=0)
    server.fault = reads(*["503"] * 3)
    place = rf"s3://{bucket}/train/0.parquet: row group \d, column 'x', 'y' cannot be read: .*"
    with pytest.raises(DataError, match=place + "raise read_attempts="):
        x_of(loader)
    assert x_of(loader) == list(range(12)), "the fault is over"
    server.fault = reads(*["503"] * 3)
    with pytest.raises(DataError, match=f"s3://{bucket}/train/0.parquet cannot be read as a Parquet file: "):
        loader_of(folder, filesystem=server.filesystem(), read_attempts=3)


def test_file_that_vanishes_is_an_error_without_another_attempt(
    server: S3Server, bucket: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = written(server.filesystem(), f"{bucket}/train", files=1)
    loader = loader_of(folder, filesystem=server.filesystem())
    server.filesystem().delete_file(f"{folder}/0.parquet")
    with (
        caplog.at_level(logging.WARNING, "polyhvd"),
        pytest.raises(DataError, match=r"0.parquet: row .* removed"),
    ):
        x_of(loader)
    assert polyhvd_texts(caplog) == []


@pytest.mark.parametrize("system", ["s3", "memory"])
def test_file_that_is_replaced_is_not_taken_from_the_cache(
    server: S3Server, bucket: str, system: str, tmp_path: Path
) -> None:
    """Within a second, too, to which S3 rounds times; its files then differ by their ETag."""
    filesystem = server.filesystem() if system == "s3" else fsspec.filesystem("memory")
    options = {"filesystem": filesystem, "columns": ["x"], "cache": tmp_path}
    for number in range(4):
        x = np.arange(12) + 100 * number
        write_parquet({"x": x}, f"{bucket}/0.parquet", rows_per_group=4, filesystem=filesystem)
        for _ in range(2):
            assert x_of(loader_of(f"{bucket}/0.parquet", **options)) == x.tolist()
    server.requests.clear()
    loader = loader_of(f"{bucket}/0.parquet", **options)
    assert x_of(loader) == x.tolist()
    assert all(method == "HEAD" for method, _ in server.requests[-3:]), "only for the ETag"


@pytest.mark.parametrize("system", ["s3", "memory"])
def test_file_that_is_replaced_between_epochs_is_an_error(server: S3Server, bucket: str, system: str) -> None:
    filesystem = server.filesystem() if system == "s3" else fsspec.filesystem("memory")
    folder = written(filesystem, f"{bucket}/train", files=1)
    loader = loader_of(folder, filesystem=filesystem)
    assert x_of(loader) == list(range(12))
    x = np.arange(12) + 100
    write_parquet({"x": x, "y": -x}, f"{folder}/0.parquet", rows_per_group=4, filesystem=filesystem)
    with pytest.raises(DataError, match=f"{folder}/0.parquet has changed since the loader was made"):
        x_of(loader)


def test_refused_credentials_are_an_error_without_another_attempt(
    server: S3Server, bucket: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = written(server.filesystem(), f"{bucket}/train")
    server.fault = lambda method, path, key: "403" if key == "stranger" else None
    with (
        caplog.at_level(logging.WARNING, "polyhvd"),
        pytest.raises(DataError, match=f"{folder}.*ACCESS_DENIED"),
    ):
        loader_of(folder, filesystem=server.filesystem("stranger"))
    assert polyhvd_texts(caplog) == []
    assert x_of(loader_of(folder, filesystem=server.filesystem())) == list(range(24))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("{}", "the folder 's3://{}' has no files that end in .parquet"),
        ("{}/none.parquet", "s3://{}/none.parquet does not exist"),
        ("{}/*.parquet", "no file matches 's3://{}/[*].parquet'"),
        ("no-such-bucket/*.parquet", "'s3://no-such-bucket/[*].parquet' cannot be listed: .*NO_SUCH_BUCKET"),
    ],
)
def test_source_without_files_is_named_without_its_credentials(
    server: S3Server, bucket: str, path: str, message: str
) -> None:
    with pytest.raises(DataError, match=message.format(bucket)) as raised:
        loader_of(server.uri(path.format(bucket)))
    assert "secret" not in str(raised.value)
    with pytest.raises(DataError, match=message.format(bucket)):
        loader_of(path.format(bucket), filesystem=server.filesystem())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"filesystem": "s3"}, "filesystem is 's3'; expected a file system of pyarrow.fs or of fsspec"),
        ({"filesystem": fs.LocalFileSystem(), "source": "s3://a/b"}, "expected a path in it, such as 'a/b'"),
        ({"source": "github://a/b"}, "github://a/b.*make the file system and pass filesystem="),
        ({"read_attempts": 0}, "read_attempts is 0"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loader_of(**{"source": "x", **options})


#: The ranks have the same files, and different credentials. The others wait for rank 1 when it fails.
JOB = """
import sys

import polyhvd.numpy as hvd
from polyhvd.data import ParquetLoader

hvd.init()
uri = sys.argv[1].replace("key:", "stranger:") if hvd.rank() == 1 else sys.argv[1]
try:
    if hvd.rank() != 1:
        batches = list(ParquetLoader(uri, batch_size=2))
    hvd.barrier()
    if hvd.rank() == 1:
        batches = list(ParquetLoader(uri, batch_size=2))
    hvd.barrier()
    print("ended")
except hvd.HorovodInternalError as error:
    print(f"rank {hvd.rank()}: {type(error).__name__}: {error}", flush=True)
    raise
"""


@pytest.mark.parametrize("allowed", [0, 9], ids=["loader_is_made", "rows_are_read"])
def test_credentials_of_one_rank_that_fail_are_an_error_on_every_rank(
    server: S3Server, bucket: str, fork_servers: ForkServers, tmp_path: Path, allowed: int
) -> None:
    written(server.filesystem(), f"{bucket}/train", files=4)
    requests = count()

    def fault(method: str, path: str, key: str) -> str | None:
        return "403" if key == "stranger" and next(requests) >= allowed else None

    server.fault = fault
    script = tmp_path / "job.py"
    script.write_text(JOB)
    python = fork_servers.python(3, IMPORTS["numpy"])
    command = [sys.executable, "-m", "polyhvd.launch", "-np", "3", *python, str(script)]
    command.append(server.uri(f"{bucket}/train"))
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2 * DEADLINE_S)
    assert ended.returncode != 0, ended.stdout + ended.stderr
    assert "ended" not in ended.stdout
    for rank in (0, 2):
        (line,) = [line for line in ended.stdout.splitlines() if f"rank {rank}: PeerDepartedError: " in line]
        assert f"DataError: s3://{bucket}/train" in line.replace("'", "")
        assert "ACCESS_DENIED" in line


# Writing


@pytest.mark.parametrize("system", ["s3", "memory"])
def test_writing_that_fails_leaves_the_former_file(server: S3Server, bucket: str, system: str) -> None:
    filesystem = server.filesystem() if system == "s3" else fsspec.filesystem("memory")
    path = f"{bucket}/new folder/0.parquet"

    def parts(fails: bool) -> Iterator[Any]:
        yield {"x": np.arange(4)}
        if fails:
            raise KeyError("the data ends early")
        yield {"x": np.arange(4, 8)}

    with pytest.raises(KeyError, match="the data ends early"):
        write_parquet(parts(True), path, rows_per_group=2, filesystem=filesystem)
    with pytest.raises(DataError):
        loader_of(f"{bucket}/**", filesystem=filesystem)
    assert write_parquet(parts(False), path, rows_per_group=2, filesystem=filesystem) == 8
    with pytest.raises(KeyError, match="the data ends early"):
        write_parquet(parts(True), path, rows_per_group=2, filesystem=filesystem)
    assert x_of(loader_of(bucket, filesystem=filesystem)) == list(range(8))
    arrow = storage.Storage(filesystem).arrow
    found = arrow.get_file_info(fs.FileSelector(bucket, recursive=True))
    assert [info.base_name for info in found if info.is_file] == ["0.parquet"]
