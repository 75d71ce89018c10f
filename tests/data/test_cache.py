"""The cache of row groups: what it holds, and what it survives."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem
from launching import DEADLINE_S, ROOT

from polyhvd.data import ParquetLoader, write_parquet
from polyhvd.data.cache import DiskStore
from polyhvd.data.memory_cache import MemoryStore

KEYS = [f"{number:064x}" for number in range(40)]
_numbers = count()


class Counted(LocalFileSystem):
    """A file system like a remote one, which counts how often files are opened."""

    protocol = "counted"
    cachable = False
    opened = 0

    def ukey(self, path: str) -> str:
        return str(os.stat(path).st_mtime_ns)

    def _open(self, path: str, *arguments: Any, **options: Any) -> Any:
        self.opened += 1
        return super()._open(path, *arguments, **options)


def alone() -> tuple[int, int]:
    return 0, 1


def loader_of(source: Any, **options: Any) -> ParquetLoader:
    return ParquetLoader(str(source), **{"batch_size": 4, "placement": alone, **options})


def x_of(loader: ParquetLoader) -> list[int]:
    return sorted(x for batch in loader for x in batch["x"].tolist())


def written(path: Path, first: int = 0) -> Path:
    x = np.arange(first, first + 40)
    write_parquet({"x": x, "y": -x}, path, rows_per_group=8)
    return path


def python(text: str, *arguments: Any, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", text, *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options
    )


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture
def name() -> str:
    """The name of a cache in memory that nothing else uses."""
    return f"polyhvd-test-{os.getpid()}-{next(_numbers)}"


# With loaders


@pytest.mark.parametrize("where", ["memory", "folder"])
def test_later_epochs_and_other_loaders_read_no_file(tmp_path: Path, where: str) -> None:
    path = written(tmp_path / "0.parquet")
    cache = where if where == "memory" else tmp_path / "cache"
    filesystem = Counted()
    uncached = loader_of(path, filesystem=filesystem)
    loader = loader_of(path, filesystem=filesystem, cache=cache)
    assert x_of(loader) == list(range(40))
    loader.load_state_dict(uncached.state_dict())
    first = [batch["x"].tolist() for epoch in (uncached, uncached) for batch in epoch]
    opened = filesystem.opened
    assert [batch["x"].tolist() for epoch in (loader, loader) for batch in epoch] == first
    assert filesystem.opened == opened
    assert x_of(loader_of(path, filesystem=filesystem, cache=cache)) == list(range(40))
    assert filesystem.opened == opened + 1, "only for the footer"
    copy = pickle.loads(pickle.dumps(loader_of(path, cache=cache)))
    assert x_of(copy) == list(range(40))


@pytest.mark.parametrize("where", ["memory", "folder"])
def test_file_replaced_by_one_of_the_same_size_and_time_is_read(tmp_path: Path, where: str) -> None:
    cache = where if where == "memory" else tmp_path / "cache"
    path = written(tmp_path / "0.parquet", 300)
    found = path.stat()
    assert x_of(loader_of(path, cache=cache)) == list(range(300, 340))
    written(path, 400)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (found.st_size, found.st_mtime_ns)
    assert x_of(loader_of(path, cache=cache)) == list(range(400, 440))


def test_columns_and_filters_have_entries_that_are_not_mixed_up(tmp_path: Path) -> None:
    import pyarrow.compute as pc

    path = written(tmp_path / "0.parquet")
    cached = {"cache": tmp_path / "cache"}
    many = [*range(40, 1000), 7]
    for _ in range(2):
        assert x_of(loader_of(path, **cached)) == list(range(40))
        assert x_of(loader_of(path, columns=["x"], **cached)) == list(range(40))
        for filter, expected in (
            (pc.field("x") < 8, list(range(8))),
            (pc.field("x") >= 32, list(range(32, 40))),
            (pc.field("x").isin(many), [7]),
            (pc.field("x").isin([*many[:-1], 6]), [6]),
        ):
            assert x_of(loader_of(path, filter=filter, **cached)) == expected


def test_disk_that_is_full_is_reported_once_and_the_files_are_read(tmp_path: Path) -> None:
    text = """
import resource, signal, sys, pathlib
from polyhvd.data import ParquetLoader
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
loader = ParquetLoader(sys.argv[1], batch_size=4, cache=pathlib.Path(sys.argv[2]), placement=lambda: (0, 1))
resource.setrlimit(resource.RLIMIT_FSIZE, (400, 400))  # an error in the middle of a write, as of a full disk
print(sorted(x for batch in loader for x in batch["x"].tolist()) == list(range(40)))
"""
    path = written(tmp_path / "0.parquet")
    with python(text, path, tmp_path / "cache", stderr=subprocess.PIPE) as process:
        out, err = process.communicate(timeout=DEADLINE_S)
    assert out == "True\n", err
    assert err.count("cannot be used, files are read instead: ") == 1
    assert sorted(os.listdir(tmp_path / "cache")) == ["lock"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": "ram"}, "cache is 'ram'; expected 'memory', 'disk', a pathlib.Path"),
        ({"cache": "disk", "cache_bytes": 0}, "cache_bytes is 0"),
        ({"cache_bytes": 1}, "cache_bytes is 1, but cache is None"),
        ({"cache": Path("/proc/none")}, "the folder /proc/none cannot be used"),
    ],
)
def test_bad_arguments_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loader_of(written(tmp_path / "0.parquet"), **options)


# On disk


def test_files_are_for_this_user_only(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "a" / "cache", 1 << 20)
    store.put(KEYS[0], memoryview(b"data"))
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "a").rglob("*")}
    assert modes == {"cache": 0o700, "lock": 0o600, KEYS[0]: 0o600}
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for folder in ("open", "link"):
        with pytest.raises(ValueError, match="other users cannot write to"):
            DiskStore(tmp_path / folder, 1)


@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
def test_damaged_entry_is_removed(tmp_path: Path, damage: str) -> None:
    store = DiskStore(tmp_path, 1 << 20)
    store.put(KEYS[0], memoryview(b"some data"))
    assert bytes(store.get(KEYS[0]) or b"") == b"some data"
    path = tmp_path / KEYS[0]
    content = path.read_bytes()
    path.write_bytes({"cut": content[:-1], "flip": content[:-1] + b"b", "empty": b""}[damage])
    assert store.get(KEYS[0]) is None
    assert not path.exists()


def test_least_recently_used_entries_make_room(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 10 * 1064)
    for number, key in enumerate(KEYS[:10]):
        store.put(key, memoryview(bytes(1000)))
        os.utime(tmp_path / key, ns=(number, number))
    assert store.get(KEYS[0]) is not None
    store.put(KEYS[10], memoryview(bytes(1000)))
    assert {path.name for path in tmp_path.iterdir()} == {"lock", KEYS[0], *KEYS[2:11]}
    store.put(KEYS[11], memoryview(bytes(10 * 1064)))
    assert store.get(KEYS[11]) is None, "it is larger than the cache"
    assert store.get(KEYS[0]) is not None


WRITER = """
import os, pathlib, random, sys
from polyhvd.data.cache import DiskStore
folder, keys = pathlib.Path(sys.argv[1]), sys.argv[2:]
store = DiskStore(folder, 20000)
print("ready", flush=True)
while True:
    key = random.choice(keys)
    data = bytes([int(key, 16)]) * (1000 + 50 * int(key, 16))
    found = store.get(key)
    assert found is None or found == data, key
    store.put(key, memoryview(data))
"""


def test_processes_that_are_killed_while_they_write_leave_a_sound_cache(tmp_path: Path) -> None:
    most = 0
    for _ in range(4):
        writers = [python(WRITER, tmp_path, *KEYS, stderr=subprocess.PIPE) for _ in range(2)]
        assert [line_of(writer) for writer in writers] == ["ready", "ready"]
        for _ in range(100):
            sizes = []
            for item in os.scandir(tmp_path):
                with suppress(FileNotFoundError):
                    sizes.append(item.stat().st_size)
            most = max(most, sum(sizes))
        for writer in writers:
            assert writer.poll() is None, writer.communicate()[1]
            writer.kill()
            writer.communicate()
    # A listing that is not of one moment may have an entry that was removed and one that took its place.
    assert most <= 20000 + 2 * 3064
    DiskStore(tmp_path, 20000)
    assert all(len(path.name) == 64 or path.name == "lock" for path in tmp_path.iterdir())
    assert sum(path.stat().st_size for path in tmp_path.iterdir() if path.name != "lock") <= 20000


def test_what_a_killed_writer_has_left_is_removed_and_that_of_a_live_one_is_not(tmp_path: Path) -> None:
    text = """
import fcntl, pathlib, sys
from polyhvd.data import cache
def stopped(*_):
    print("writing", flush=True)
    sys.stdin.read()
store = cache.DiskStore(pathlib.Path(sys.argv[1]), 10000)
cache.zlib.crc32 = stopped  # between making and filling the file
store.put(sys.argv[2], memoryview(bytes(2000)))
"""
    with python(text, tmp_path, KEYS[0]) as process:
        assert line_of(process) == "writing"
        DiskStore(tmp_path, 10000)
        (part,) = tmp_path.glob("*.part")
        assert part.stat().st_size == 2064, "it is counted"
        process.kill()
    DiskStore(tmp_path, 10000)
    assert not part.exists()


def test_lock_that_another_process_keeps_is_an_error_after_seconds_and_then_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskStore(tmp_path, 10000)
    text = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, 2); print('locked', flush=True); input()"
    with python(text, tmp_path / "lock") as process:
        assert line_of(process) == "locked"
        with pytest.raises(TimeoutError, match="another process holds"):
            store.put(KEYS[0], memoryview(b"data"))
        store.put(KEYS[0], memoryview(b"data"))  # at once, without another attempt
        assert DiskStore(tmp_path, 10000).get(KEYS[0]) is None
        process.kill()
    assert store.get(KEYS[0]) is None
    monkeypatch.setattr(store, "_paused_until", time.monotonic())  # later
    store.put(KEYS[0], memoryview(b"data"))
    assert store.get(KEYS[0]) is not None


def test_process_that_is_forked_while_the_lock_is_held_does_not_keep_it(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 10000)
    with store._locked():
        child = os.fork()  # as another thread may
        if child == 0:
            signal.pause()
    try:
        store.put(KEYS[0], memoryview(b"data"))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert store.get(KEYS[0]) is not None


# In memory

HOLDER = """
import sys
import threading
from polyhvd.data.memory_cache import MemoryStore
store = MemoryStore(10000, sys.argv[1])
store.put(sys.argv[2], memoryview(b"of another process"))
print("ready", flush=True)
sys.stdin.read()
"""


def test_processes_share_the_memory_and_survive_the_one_that_has_it(name: str) -> None:
    with python(HOLDER, name, KEYS[0]) as process:
        assert line_of(process) == "ready"
        stores = [MemoryStore(10000, name) for _ in range(2)]
        for store in stores:
            assert bytes(store.get(KEYS[0]) or b"") == b"of another process"
        stores[0].put(KEYS[1], memoryview(b"of this process"))
        assert bytes(stores[1].get(KEYS[1]) or b"") == b"of this process"
        process.kill()
        process.wait()
    for store in stores:
        assert store.get(KEYS[0]) is None
    stores[0].put(KEYS[2], memoryview(b"after it"))
    assert bytes(stores[1].get(KEYS[2]) or b"") == b"after it"


def test_process_that_has_the_memory_and_is_stopped_costs_a_limited_time(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polyhvd.data.memory_cache._TIMEOUT_S", 0.2)
    with python(HOLDER, name, KEYS[0]) as process:
        assert line_of(process) == "ready"
        process.send_signal(signal.SIGSTOP)
        store = MemoryStore(10000, name)
        with pytest.raises(TimeoutError):
            store.get(KEYS[0])
        assert store.get(KEYS[0]) is None, "at once, without another attempt"
        process.kill()


def test_memory_is_bounded_and_drops_what_was_not_used_for_longest(name: str) -> None:
    store = MemoryStore(3000, name)
    for key in KEYS[:3]:
        store.put(key, memoryview(bytes(1000)))
    store.get(KEYS[0])
    store.put(KEYS[3], memoryview(bytes(1000)))
    assert [key for key in KEYS[:4] if store.get(key) is not None] == [KEYS[0], *KEYS[2:4]]
    store.put(KEYS[4], memoryview(bytes(3001)))
    assert store.get(KEYS[4]) is None


def test_forked_child_uses_the_cache_of_its_parent(name: str) -> None:
    store = MemoryStore(3000, name)
    store.put(KEYS[0], memoryview(b"of the parent"))
    child = os.fork()
    if child == 0:
        found = store.get(KEYS[0])
        store.put(KEYS[1], memoryview(b"of the child"))
        os._exit(0 if found is not None and bytes(found) == b"of the parent" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert bytes(store.get(KEYS[1]) or b"") == b"of the child"


def test_forked_child_leaves_the_connections_of_its_parent_when_it_ends(name: str) -> None:
    program = """
import os, sys
from polyhvd.data.memory_cache import MemoryStore
stores = [MemoryStore(3000, sys.argv[1]) for _ in range(2)]
for store in stores:
    store.put("0" * 64, memoryview(b"data"))
held = list(stores[1]._held)
child = os.fork()
if child == 0:
    sys.exit()
os.waitpid(child, 0)
print(bytes(stores[1].get("0" * 64)), stores[1]._held == held)
"""
    with python(program, name) as process:
        assert line_of(process) == "b'data' True"


def test_process_that_does_not_listen_yet_is_waited_for(name: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        timer = threading.Timer(0.05, listener.close)
        timer.start()
        assert MemoryStore(3000, name).get(KEYS[0]) is None
        timer.join()


def test_no_thread_is_left_of_a_cache_that_is_no_longer_used(name: str) -> None:
    store = MemoryStore(3000, name)
    store.put(KEYS[0], memoryview(b"data"))
    other = MemoryStore(3000, name)
    assert other.get(KEYS[0]) is not None
    del store
    assert other.get(KEYS[0]) is None, "the cache ended with its loader, and this one begins another"
    (server,) = other._held
    del other
    assert not server._thread.is_alive()  # type: ignore[union-attr]


def test_warning_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(tmp_path / "0.parquet")
    loader = loader_of(path, cache=tmp_path / "cache")
    (tmp_path / "cache" / "lock").unlink()
    (tmp_path / "cache" / "lock").mkdir()
    with caplog.at_level(logging.WARNING, "polyhvd"):
        assert x_of(loader) == list(range(40))
    assert [record.name for record in caplog.records] == ["polyhvd"]
