"""What scripts ask of Horovod's build."""

from __future__ import annotations

import pytest

import polyhvd as hvd


def test_a_script_that_needs_some_transport_finds_one() -> None:
    assert hvd.gloo_built() or hvd.mpi_built(verbose=True)
    assert hvd.gloo_enabled() or hvd.mpi_enabled()


def test_what_cannot_serve_is_not_built() -> None:
    assert not any((hvd.mpi_built(), hvd.mpi_enabled(), hvd.ddl_built(), hvd.ccl_built()))
    assert not any((hvd.cuda_built(), hvd.rocm_built()))
    assert hvd.nccl_built(verbose=True) == 0
    assert isinstance(hvd.nccl_built(), int), "scripts compare it with versions"


def test_support_of_threads_is_known_after_init() -> None:
    with pytest.raises(ValueError, match="not been initialized"):
        hvd.mpi_threads_supported()
    hvd.init()
    try:
        assert hvd.mpi_threads_supported() is False
    finally:
        hvd.shutdown()
