"""Jobs with JAX that lose a rank, and that end while a compiled function still runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fork_servers import ForkServers
from pool import Pool, PoolSpec

from polyhvd.testing.stand_ins import is_installed

pytestmark = pytest.mark.skipif(not is_installed("jax"), reason="jax is not installed")

_LEAVES = """
import jax
import jax.numpy as jnp
import polyhvd.jax as hvd
hvd.init()
slow = jax.jit(lambda x: jnp.linalg.matrix_power(x, 40).sum() * 0 + jnp.ones(3))
total = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum))
result = total(slow(jnp.ones((600, 600)) * 1e-4))
if hvd.rank() == 1:
    print(result)
"""


@pytest.mark.parametrize(("version", "warns"), [("0.9.2", True), ("0.10.2", False)])
def test_a_version_of_jaxlib_that_crashes_is_a_warning_at_the_import(version: str, warns: bool) -> None:
    program = f"import jaxlib; jaxlib.__version__ = {version!r}; import polyhvd.jax"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (f"RuntimeWarning: jaxlib {version} can crash" in done.stderr) == warns, done.stderr


def test_a_compiled_function_ends_with_the_error_of_a_rank_that_is_lost(fork_servers: ForkServers) -> None:
    with Pool(PoolSpec("jax", (2,)), fork_servers) as pool:
        pool.start("test_jax:lose_a_rank")
        pool.settle(30.0, 20.0, lambda outcome: True)
        survivor, lost = pool.answers()
        assert survivor == ("value", "PeerLostError")
        assert lost is not None
        assert lost[0] == "end"


def test_a_rank_that_ends_does_first_what_its_compiled_functions_have_begun(tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text(_LEAVES)
    done = subprocess.run(
        [sys.executable, "-m", "polyhvd.launch", "-np", "2", sys.executable, "leaves.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "[1] [2. 2. 2.]\n"), done.stderr
    assert "Traceback" not in done.stderr
