"""What polyhvd says about a host."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import polyhvd
from polyhvd.observe.doctor import Finding, examine


def find(name: str) -> Finding:
    return next(item for items in examine().values() for item in items if item.name == name)


def test_what_is_installed_is_listed_with_its_version_and_place() -> None:
    found = find("NumPy")
    assert (found.found, found.version) == (True, np.__version__)
    assert found.path in np.__file__
    assert find("shared memory").found
    assert find("TCP").found


def test_what_is_missing_has_a_reason_and_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyhvd.runtime.mpi.places", lambda settings: ["libmpi.so.0"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    mpi, torch = find("MPI"), find("PyTorch")
    assert (mpi.found, torch.found) == (False, False)
    assert "libmpi.so.0" in mpi.note
    assert "install openmpi-bin" in mpi.note
    assert torch.note == "not installed in this Python; pip install torch"


def test_libraries_of_gpus_are_listed_with_version_or_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyhvd.runtime.gpu._CUDA", "libcuda.so.0")
    monkeypatch.setenv("POLYHVD_NCCL_LIBRARY", "libnccl.so.0")
    cuda, nccl = find("CUDA driver"), find("NCCL")
    assert (cuda.found, nccl.found) == (False, False)
    assert "libcuda.so.0" in cuda.note
    assert "install NVIDIA's driver" in cuda.note
    assert "libnccl.so.0" in nccl.note
    assert "pip install nvidia-nccl-cu12" in nccl.note
    # In another process: what is loaded here stays, and is found by later tests.
    folder = Path(__file__).resolve().parents[1] / "build" / "gpu"
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))
    monkeypatch.setenv("POLYHVD_NCCL_LIBRARY", str(folder / "libnccl.so.2"))
    command = [sys.executable, "-m", "polyhvd.cli", "doctor"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "[x] CUDA driver          12.4  libcuda.so.1" in printed
    assert f"[x] NCCL                 2.28.9  {folder / 'libnccl.so.2'}" in printed


def test_a_bad_setting_does_not_stop_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYHVD_GLOO_IFACE", "no-such-interface")
    assert "there is no network interface 'no-such-interface'" in find("TCP").note


@pytest.mark.parametrize("command", [["polyhvd.cli", "doctor"], ["polyhvd.launch", "--check"]])
def test_both_commands_print_what_the_function_prints(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=True)
    polyhvd.doctor()
    lines = [done.stdout.splitlines(), capsys.readouterr().out.splitlines()]
    # Others use memory meanwhile.
    steady = [[line for line in text if " free" not in line] for text in lines]
    assert steady[0] == steady[1]
    assert "No problems on this host." in done.stdout
    assert f"NumPy                {importlib.metadata.version('numpy')}" in done.stdout


def run(*options: str, limit: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """The command, below a shell that sets a limit."""
    command = [sys.executable, "-m", "polyhvd.cli", "doctor", *options]
    shell = ["sh", "-c", f'{limit}\nexec "$@"', "sh", *command]
    return subprocess.run(shell, capture_output=True, text=True, env={**os.environ, **variables})


def test_a_limit_that_is_too_low_is_a_problem_with_its_cure() -> None:
    done = run(limit="ulimit -n 256")
    assert done.returncode == 1
    assert re.search(r"open files  only 256 may be open; ulimit -n 1024 or more", done.stdout)
    assert run().returncode == 0


def test_variables_that_contradict_each_other_are_a_problem() -> None:
    step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_JOB_ID": "7"}
    done = run(**step, RANK="1", WORLD_SIZE="2", MASTER_ADDR="h")
    assert done.returncode == 1
    assert "launcher" in done.stdout.partition("Problems: 1")[2]


def test_json_of_this_host_has_what_the_text_has() -> None:
    done = run("--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["schema"], report["healthy"], report["problems"]) == (0, 1, True, [])
    (host,) = report["hosts"]
    assert host["python"]["path"] == sys.executable
    assert host["packages"]["NumPy"] == np.__version__
    assert host["cores"]["usable"] == len(os.sched_getaffinity(0))
    assert {item["name"] for item in report["findings"]} >= {"NumPy", "MPI", "shared memory"}
    assert report["launcher"]
