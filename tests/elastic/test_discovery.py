"""Sources of hosts, each asked by itself: what is printed, read or returned, and what is no list of hosts."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ranks_alive import DEADLINE_S, outliving_sigkill, wait_until

from polyhvd.launch.elastic.discovery import Discovery, HostDiscoveryScript, HostsFile, discovery_of
from polyhvd.launch.hosts.lists import HostsError

MODULE = """
class Hosts:
    def find_available_hosts_and_slots(self):
        return {"a": 2, "fe80::1": 1}

class Bad:
    def __init__(self, answer=["a"]):
        self.answer = answer
    def find_available_hosts_and_slots(self):
        return self.answer

hosts, number = Hosts(), 3
none_left, no_name, half = Bad({"a": 0}), Bad({"a b": 1}), Bad({"a": 1.5})
def failing():
    raise OSError("no cluster")
"""


def script(folder: Path, text: str) -> str:
    path = folder / "hosts.sh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_script_that_never_ceases_to_print_is_ended(tmp_path: Path) -> None:
    source = HostDiscoveryScript(script(tmp_path, "exec yes a:1"), timeout_s=60)
    began = time.monotonic()
    with pytest.raises(OSError, match="more than 1048576 bytes"):
        source.find_available_hosts_and_slots()
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("echo a:1; exec sleep 60", "has not ended within"),
        ("echo a:1; sleep 60 &", "has ended, but a process that it has started still holds its output after"),
        ("exec sleep 60 >&- 2>&-", "has not ended within"),
    ],
)
def test_script_that_hangs_or_leaves_a_child_is_ended_in_time(tmp_path: Path, text: str, found: str) -> None:
    source = HostDiscoveryScript(script(tmp_path, text), timeout_s=0.5)
    began = time.monotonic()
    with pytest.raises(OSError, match=rf"{found} 0\.5 s"):
        source.find_available_hosts_and_slots()
    assert time.monotonic() - began < 30


def test_script_that_outlives_sigkill_is_given_up_and_not_run_a_second_time(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    text = f"[ -e {pid} ] && echo a:1 && exit; echo $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 600"
    source = HostDiscoveryScript(script(tmp_path, text), timeout_s=2)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(source.find_available_hosts_and_slots)
        wait_until(pid.exists, "the script runs")
        with outliving_sigkill(int(pid.read_text())):
            with pytest.raises(OSError, match="has not ended within 2 s"):
                first.result(30)
            with pytest.raises(
                OSError, match=r"is not run again before process \d+ of its last run has ended"
            ):
                source.find_available_hosts_and_slots()
    wait_until(lambda: source._killed is not None and source._killed.poll() is not None, "its end")
    assert source.find_available_hosts_and_slots() == {"a": 1}


def test_complaint_that_differs_only_in_numbers_is_made_once(tmp_path: Path) -> None:
    lines = iter(["E1128 20:01:02.1 77 no server", "E1128 20:01:03.2 78 no server", "no login", "a:1"])

    class Failing:
        def find_available_hosts_and_slots(self) -> dict[str, int]:
            if (line := next(lines)) != "a:1":
                raise OSError(line)
            discovery.close()
            found.set()
            return {"a": 1}

    found = threading.Event()
    discovery = Discovery(Failing(), interval_s=0.001)
    discovery.begin(lambda: None)
    assert found.wait(DEADLINE_S)
    assert [text.split(";")[0] for text in discovery.complaints()] == [
        "discovery of hosts: E1128 20:01:02.1 77 no server",
        "discovery of hosts: no login",
    ]


def test_file_is_read_anew_each_time(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    source = HostsFile(str(file), slots=4)
    with pytest.raises(HostsError, match="cannot read"):
        source.find_available_hosts_and_slots()
    file.write_text("a slots=2\n")
    assert source.find_available_hosts_and_slots() == {"a": 2}
    file.write_text("# gone\nb\n")
    assert source.find_available_hosts_and_slots() == {"b": 4}
    file.write_bytes(b"\xff:2\n")
    with pytest.raises(HostsError, match="cannot read"):
        source.find_available_hosts_and_slots()


def test_file_that_is_written_in_place_is_read_when_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "hosts"
    file.write_text("a\nb\n")
    source = HostsFile(str(file))
    assert source.find_available_hosts_and_slots() == {"a": 1, "b": 1}
    states = iter(["a\n", "a\nb\nc\n", "a\nb\nc\n"])
    monkeypatch.setattr(time, "sleep", lambda _: file.write_text(next(states)))
    file.write_text("")
    assert source.find_available_hosts_and_slots() == {"a": 1, "b": 1, "c": 1}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = "cluster_of_a_test"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


@pytest.mark.parametrize("name", ["Hosts", "hosts"])
def test_class_or_object_of_python_says_the_hosts(module: str, name: str) -> None:
    assert discovery_of(f"{module}:{name}", 1).find_available_hosts_and_slots() == {"a": 2, "fe80::1": 1}


@pytest.mark.parametrize("name", ["Bad", "none_left", "no_name", "half"])
def test_answer_of_python_that_is_no_list_of_hosts_is_refused(module: str, name: str) -> None:
    with pytest.raises(HostsError):
        discovery_of(f"{module}:{name}", 1).find_available_hosts_and_slots()


@pytest.mark.parametrize(
    ("name", "said"),
    [("nothing", "AttributeError"), ("number", "not callable"), ("failing", "no cluster")],
)
def test_name_of_python_that_is_no_source_of_hosts_is_refused(module: str, name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        discovery_of(f"{module}:{name}", 1)


def test_file_whose_name_reads_like_one_of_python_is_run(module: str, tmp_path: Path) -> None:
    (tmp_path / f"{module}:Hosts").write_text("")
    assert isinstance(discovery_of(f"{module}:Hosts", 1), HostDiscoveryScript)
