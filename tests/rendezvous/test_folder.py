"""A store in a folder, beyond what every store keeps to: files of others, full disks, and what is left."""

from __future__ import annotations

import errno
import os
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyhvd.rendezvous import folder, keyed
from polyhvd.rendezvous.auth import new_secret, parse_secret
from polyhvd.rendezvous.folder import FolderStore
from polyhvd.rendezvous.records import RECORD_BYTES_MAX, Record, seal, unseal
from polyhvd.rendezvous.store import GatherTimeoutError, StoreError

SECRET = parse_secret(new_secret())
ROOT = os.geteuid() == 0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "job"


def join(path: Path, rank: int = 0, secret: bytes = SECRET) -> FolderStore:
    return FolderStore(path, secret, rank)


def file_of(path: Path, scope: str, index: int = 0) -> Path:
    return path / folder._file_name(f"{scope}/{index}")


# Names


@pytest.mark.parametrize(
    "scope", ["../outside", "..", ".", "/etc/outside", "a/../../outside", "\0", "-rf", "job"]
)
def test_no_name_leaves_the_folder(path: Path, scope: str) -> None:
    with join(path) as store:
        store.put(scope, 0, b"x")
        store.put(scope, -1, b"y")
        assert store.gather(scope, 1, 5) == [b"x"]
        assert [entry.name for entry in path.parent.iterdir()] == ["job"]
        assert all(entry.is_file() and entry.parent == path for entry in path.iterdir())
        assert len(list(path.iterdir())) == 3


keys = st.text() | st.text(alphabet="aA%./-_0é")


@settings(deadline=None)
@given(keys, keys)
def test_different_keys_have_different_names_of_safe_characters(one: str, other: str) -> None:
    names = [folder._file_name(key) for key in (one, other)]
    assert (names[0] == names[1]) == (one == other)
    for name in names:
        assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-_%")
        assert len(name) <= 255
        assert name[:2] in ("v-", "h-")


# Others' files


def fifo(file: Path) -> None:
    os.mkfifo(file)


def listening(file: Path) -> None:
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(os.path.relpath(file))


def sparse(file: Path) -> None:
    with file.open("wb") as opened:
        opened.truncate(RECORD_BYTES_MAX + 1)


def of_another_key(file: Path) -> None:
    with join(file.parent, 3) as other:
        other.put("elsewhere", 0, b"true, but not here")
        os.rename(file_of(file.parent, "elsewhere"), file)


def of_another_job(file: Path) -> None:
    with join(file.parent.parent / "another") as other:
        other.put("a", 0, b"true once")
        os.rename(file_of(file.parent.parent / "another", "a"), file)


def torn(file: Path) -> None:
    of_this_job(file)
    os.truncate(file, file.stat().st_size // 2)


def longer(file: Path) -> None:
    of_this_job(file)
    with file.open("ab") as opened:
        opened.write(b"and more")


def altered(file: Path) -> None:
    of_this_job(file)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def of_this_job(file: Path) -> None:
    with join(file.parent, 3) as other:
        other.put("a", 0, b"true" * 1000)


PLANTED: list[Callable[[Path], object]] = [
    fifo,
    listening,
    sparse,
    of_another_key,
    of_another_job,
    torn,
    longer,
    altered,
    Path.touch,
    Path.mkdir,
    lambda file: file.symlink_to("/etc/passwd"),
    lambda file: file.symlink_to(file),
    lambda file: file.symlink_to("nowhere"),
    lambda file: file.write_bytes(os.urandom(5000)),
]
PLANTED_IDS = [
    *("fifo", "socket", "too long", "another key's", "another job's", "torn", "with a tail", "altered"),
    *("empty", "folder", "link", "link to itself", "link to nowhere", "noise"),
]


@pytest.mark.parametrize("plant", PLANTED, ids=PLANTED_IDS)
def test_planted_file_is_an_error_that_names_it_and_is_never_waited_for(
    path: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[Path], object]
) -> None:
    with join(path) as store:
        monkeypatch.chdir(path)
        file = file_of(path, "a")
        plant(file)
        began = time.monotonic()
        name = str(file).replace("%", "[%]")
        with pytest.raises(StoreError, match=name):
            store.gather("a", 1, 30)
        with pytest.raises(StoreError, match=name):
            store.put("a", 0, b"mine", own=True)
        store.put("a", 0, b"mine")  # somebody was first
        with pytest.raises(StoreError, match=name):
            store.forget("a", 0)
        assert time.monotonic() - began < 25
        store.put("b", 0, b"fine")
        assert store.gather("b", 1, 10) == [b"fine"]
    assert file.is_symlink() or file.exists(), "somebody else's file was removed"


@pytest.mark.parametrize("plant", [PLANTED[i] for i in (0, 1, 2, 8, 9, 10, 13)])
def test_planted_name_of_the_job_is_an_error_that_names_it(
    path: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[Path], object]
) -> None:
    path.mkdir(mode=0o700)
    monkeypatch.chdir(path)
    plant(path / "job")
    with pytest.raises(StoreError, match=str(path / "job")):
        join(path)


def test_folder_of_a_job_with_another_secret_is_refused(path: Path) -> None:
    with join(path), pytest.raises(StoreError, match="another secret"):
        join(path, 1, parse_secret(new_secret()))


@settings(deadline=None)
@given(st.integers(0, 5000), st.integers(1, 255))
def test_a_change_of_any_byte_breaks_the_seal(position: int, change: int) -> None:
    record = Record(b"value" * 10, 3, bytes(16), True)
    data = bytearray(seal(record, SECRET, "job-1", "a/0"))
    assert unseal(bytes(data), SECRET, "job-1", "a/0") == record
    data[position % len(data)] ^= change
    with pytest.raises(StoreError, match="incomplete, or no value of this job"):
        unseal(bytes(data), SECRET, "job-1", "a/0")


def test_seal_tells_where_the_job_ends_and_the_key_begins() -> None:
    data = seal(Record(b"", 0, bytes(16), False), SECRET, "job-1", "1/0")
    with pytest.raises(StoreError):
        unseal(data, SECRET, "job-11", "/0")


# The folder itself


def test_folder_and_files_are_this_user_s_alone(path: Path) -> None:
    former = os.umask(0)
    try:
        with join(path) as store:
            store.put("a", 0, b"x")
            assert stat.S_IMODE(path.stat().st_mode) == 0o700
            assert {stat.S_IMODE(entry.stat().st_mode) for entry in path.iterdir()} == {0o600}
    finally:
        os.umask(former)


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o702])
def test_folder_where_others_may_write_is_refused(path: Path, mode: int) -> None:
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(StoreError, match=f"{path}: others may write here .*mode {mode:04o}"):
        join(path)
    assert list(path.iterdir()) == []


@pytest.mark.skipif(not ROOT, reason="needs root to give a folder to another user")
def test_folder_of_another_user_is_refused(path: Path) -> None:
    path.mkdir(mode=0o700)
    os.chown(path, 65534, 65534)
    with pytest.raises(StoreError, match=r"others may write here \(owner 65534"):
        join(path)


def test_folder_that_others_may_only_read_is_good(path: Path) -> None:
    path.mkdir()
    path.chmod(0o755)
    with join(path) as store:
        assert store.gather("a", 1, 5, own=(0, b"x")) == [b"x"]


@pytest.mark.parametrize("kind", ["parent", "file", "fifo"])
def test_what_is_no_folder_is_an_error_that_names_it(path: Path, kind: str) -> None:
    target = path / "below" if kind == "parent" else path
    if kind == "file":
        path.touch()
    if kind == "fifo":
        os.mkfifo(path)
    with pytest.raises(StoreError, match=str(target)):
        join(target)


def test_relative_path_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with FolderStore("job", SECRET, 0) as store:
        monkeypatch.chdir("/")
        assert store.gather("a", 1, 5, own=(0, b"x")) == [b"x"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["job"]


def test_folder_that_was_replaced_is_an_error(path: Path) -> None:
    with join(path) as store:
        request = store.post_gather("a", 1, 30)
        path.rename(path.with_name("moved"))
        path.mkdir(mode=0o700)
        with pytest.raises(StoreError, match=f"{path}: another folder has taken its place"):
            store.take(request)


def test_nothing_but_what_was_to_stay_is_left(path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with join(path) as store, join(path, 1) as other:
        store.put("a", 0, b"stays")
        store.put("b", 0, b"goes", own=True)
        other.put("b", 0, b"loses", own=True)
        other.put("b", 1, b"goes, too", own=True)
        assert store.gather("b", 2, 5) == [b"goes", b"goes, too"]
    assert sorted(entry.name for entry in path.iterdir()) == ["job", "v-a%2f0", "v-b%2fall%202"]
    assert len(os.listdir("/proc/self/fd")) == before


def test_own_value_that_a_dead_process_left_makes_room_for_its_successor_s(path: Path) -> None:
    dead, reader = join(path, 1), join(path, 0)
    dead.put("a", 0, b"old", own=True)
    successor = join(path, 1)
    successor.put("a", 0, b"new", own=True)
    assert reader.gather("a", 1, 5) == [b"new"]
    dead.close()  # it was not dead after all, but the value is no longer its own
    assert reader.gather("a", 1, 5) == [b"new"]
    successor.close()
    with reader, pytest.raises(GatherTimeoutError):
        reader.gather("a", 1, 0.0)


def test_value_for_all_is_not_replaced_by_a_successor(path: Path) -> None:
    with join(path, 1) as first, join(path, 1) as successor:
        first.put("a", 0, b"value")
        successor.put("a", 0, b"other", own=True)
        assert successor.gather("a", 1, 5) == [b"value"]


# Trouble


def fail_with(number: int) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def test_file_system_without_hard_links_is_an_error_that_says_so(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", fail_with(errno.EPERM))
    with pytest.raises(StoreError, match=f"{path}: the file system has no hard links"):
        join(path)
    assert list(path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.EEXIST, errno.EIO])
def test_link_whose_answer_was_lost_counts(path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    link = os.link

    def lose_the_answer(*arguments: Any, **options: Any) -> None:
        link(*arguments, **options)
        fail_with(number)()

    with join(path) as store:
        with monkeypatch.context() as patch:
            patch.setattr(os, "link", lose_the_answer)
            store.put("a", 0, b"x", own=True)
        assert store.gather("a", 1, 5) == [b"x"]
    assert not file_of(path, "a").exists(), "it was not known as an own one"


@pytest.mark.parametrize("call", ["write", "close", "link"])
def test_failing_call_is_a_store_error_that_names_the_file_and_leaves_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    with join(path) as store:
        before = sorted(path.iterdir())
        with monkeypatch.context() as patch:
            close, fail = os.close, fail_with(errno.EDQUOT)
            failing = (lambda descriptor: (close(descriptor), fail())) if call == "close" else fail
            patch.setattr(os, call, failing)
            with pytest.raises(StoreError, match=r"v-a%2f0: Disk quota exceeded"):
                store.put("a", 0, b"x")
            patch.setattr(os, "close", close)
        assert sorted(path.iterdir()) == before
        store.put("a", 0, b"again")
        assert store.gather("a", 1, 5) == [b"again"]


def test_full_disk_is_an_error_that_names_the_file_and_ends_when_there_is_room(small_disk: Path) -> None:
    with join(small_disk / "job") as store:
        name = file_of(small_disk / "job", "a")
        with pytest.raises(StoreError, match=f"{name}: No space left on device"):
            store.put("a", 0, bytes(1 << 20))
        with pytest.raises(GatherTimeoutError):
            store.gather("a", 1, 0.0)
        (small_disk / "filler").write_bytes(bytes(100 << 10))
        with pytest.raises(StoreError, match=f"{name}: No space left on device"):
            store.post_gather("a", 1, 10, own=(0, bytes(40 << 10)))
        (small_disk / "filler").unlink()
        assert store.gather("a", 1, 10, own=(0, bytes(40 << 10))) == [bytes(40 << 10)]
    assert not name.exists()
    assert not list((small_disk / "job").glob("t-*")), "temporary files take the room"


def test_full_disk_at_the_beginning_is_an_error_that_names_the_folder(small_disk: Path) -> None:
    with pytest.raises(OSError, match="No space"):
        (small_disk / "filler").write_bytes(bytes(1 << 20))
    with pytest.raises(StoreError, match=f"{small_disk / 'job'}.*: No space left on device"):
        join(small_disk / "job")


# Looking


def test_looks_get_rarer_the_longer_the_waiting(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(keyed.time, "monotonic", lambda: clock[0])
    with join(path) as store:
        looks = []
        monkeypatch.setattr(store, "_refresh", lambda: looks.append(clock[0]))
        request = store.post_gather("a", 1, 60.0)
        while clock[0] < 1059.0:
            assert store.take(request) is None
            clock[0] += 0.001
        assert sum(look < 1000.5 for look in looks) > 20, "slow to see what comes soon"
        assert len(looks) < 400, "a burden to the file system"
        assert 0 < store.poll_s <= 0.25
        clock[0] = 1060.0
        with pytest.raises(GatherTimeoutError):
            store.take(request)


def test_gather_of_many_reads_each_value_twice_at_most_however_they_come(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyed, "_LOOK_LAST_S", 0.0)
    with join(path) as store:
        reads: list[str] = []
        read = store._read
        monkeypatch.setattr(store, "_read", lambda key: reads.append(key) or read(key))
        request = store.post_gather("a", 50, 60.0)
        for index in range(50):
            assert store.take(request) is None
            store.put("a", index, bytes([index]))
        assert store.take(request) == [bytes([index]) for index in range(50)]
        assert sum("all" not in key for key in reads) <= 3 * 50
