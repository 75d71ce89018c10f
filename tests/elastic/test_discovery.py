"""Sources of hosts, each asked by itself: what is printed, read or returned, and what is no list of hosts."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from polyhvd.launch.elastic.discovery import HostDiscoveryScript, HostsFile, discovery_of
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
    "text", ["echo a:1; exec sleep 60", "echo a:1; sleep 60 &", "exec sleep 60 >&- 2>&-"]
)
def test_script_that_hangs_or_leaves_a_child_is_ended_in_time(tmp_path: Path, text: str) -> None:
    source = HostDiscoveryScript(script(tmp_path, text), timeout_s=0.5)
    began = time.monotonic()
    with pytest.raises(OSError, match=r"not ended within 0\.5 s"):
        source.find_available_hosts_and_slots()
    assert time.monotonic() - began < 30


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
