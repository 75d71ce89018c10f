"""The C interface between the core and the native adapters: plain C, and never mixed with another version."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest
from fork_servers import IMPORTS, ForkServers  # tests/harness, on the path by tests/conftest.py

HEADER = Path(__file__).resolve().parents[2] / "polyhvd/csrc/api/c_api.h"

#: A world of one whose adapter's library has another version, or none, as the first ones did.
MIXED = """
import ctypes
import polyhvd.{framework} as hvd
from polyhvd.errors import HorovodVersionMismatchError
from polyhvd.{framework} import native

class Old:
    def __init__(self, version):
        if version is not None:
            self.polyhvd_{framework}_api_version = lambda: version

    def __getattr__(self, name):
        if name.endswith("_api_version"):
            raise AttributeError(name)
        return getattr(library, name)

library = native.{library}
for version in (None, 6, 8):
    native.{library} = Old(version)
    try:
        hvd.init()
    except HorovodVersionMismatchError as error:
        expected = f"version {{version or 0}} of polyhvd's C interface, and the core has version 7"
        assert expected in str(error), error
        assert "reinstall polyhvd" in str(error), error
    else:
        raise AssertionError("nothing was raised")
    assert not hvd.is_initialized()
native.{library} = library
assert library.polyhvd_{framework}_api_version() == 7
older = (ctypes.c_uint32 * 32)(5, 48)  # a table that nobody asked the version of
assert library.polyhvd_{framework}_set_engine(ctypes.byref(older)) == 0
hvd.init()
assert hvd.size() == 1
print("passed")
"""


@pytest.mark.parametrize(("framework", "library"), [("mxnet", "_library"), ("tensorflow", "_native")])
def test_a_library_of_another_version_is_an_error(
    framework: str, library: str, fork_servers: ForkServers
) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    program = MIXED.format(framework=framework, library=library)
    python = fork_servers.python(1, IMPORTS[framework])
    run = subprocess.run([*python, "-c", program], capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.endswith("passed\n")


def test_the_test_knows_the_version() -> None:
    assert re.search(r"#define POLYHVD_C_API_VERSION 7$", HEADER.read_text(), re.MULTILINE)


@pytest.mark.parametrize("standard", ["c99", "c17"])
def test_the_header_is_plain_c(standard: str) -> None:
    program = f'#include "{HEADER}"\nint main(void) {{ return (int)sizeof(polyhvd_submission) == 0; }}\n'
    compiler = ["cc", f"-std={standard}", "-pedantic", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    run = subprocess.run([*compiler, "-x", "c", "-"], input=program, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
