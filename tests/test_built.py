"""What scripts ask of Horovod's build."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import polyhvd as hvd


def test_a_script_that_needs_some_transport_finds_one() -> None:
    assert hvd.gloo_built() or hvd.mpi_built(verbose=True)
    assert hvd.gloo_enabled() or hvd.mpi_enabled()


def test_what_cannot_serve_is_not_built() -> None:
    assert not any((hvd.mpi_enabled(), hvd.ddl_built(), hvd.ccl_built()))
    assert not hvd.rocm_built()


def test_cuda_and_nccl_are_built_where_their_libraries_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyhvd.runtime.gpu._CUDA", "libcuda.so.0")
    assert hvd.cuda_built() is False
    monkeypatch.setenv("POLYHVD_NCCL_LIBRARY", "libnccl.so.0")
    assert hvd.nccl_built(verbose=True) == 0
    # In another process: what is loaded here stays, and is found by later tests.
    folder = Path(__file__).resolve().parents[1] / "build" / "gpu"
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))
    monkeypatch.setenv("POLYHVD_NCCL_LIBRARY", str(folder / "libnccl.so.2"))
    found = "import polyhvd as hvd; print(hvd.cuda_built(), hvd.nccl_built())"
    for backends, printed in (("", "True 22809\n"), ("host", "True 0\n")):
        monkeypatch.setenv("POLYHVD_BACKENDS", backends)
        done = subprocess.run([sys.executable, "-c", found], capture_output=True, text=True, check=True)
        assert done.stdout == printed


def test_mpi_is_built_where_its_library_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyhvd.runtime.mpi.places", lambda settings: ["libmpi.so.0"])
    assert hvd.mpi_built() is False
    if shutil.which("mpirun"):
        monkeypatch.undo()
        assert hvd.mpi_built() is True


def test_support_of_threads_is_known_after_init() -> None:
    with pytest.raises(ValueError, match="not been initialized"):
        hvd.mpi_threads_supported()
    hvd.init()
    try:
        assert hvd.mpi_threads_supported() is False
    finally:
        hvd.shutdown()


def test_a_library_whose_path_is_no_utf8_is_looked_for_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYHVD_CONTROLLER", "mpi")
    monkeypatch.setenv("POLYHVD_MPI_LIBRARY", os.fsdecode(b"/none\xff.so"))
    done = subprocess.run(
        [sys.executable, "-c", "import polyhvd; polyhvd.init()"], capture_output=True, text=True
    )
    assert (
        r"ConfigError: MPI cannot be used, though it was asked for: /none\xff.so: cannot open" in done.stderr
    )
