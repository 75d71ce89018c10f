"""The plugin that runs tests on ranks: what fails on any rank fails the test, and nothing is left of it."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import polyhvd.numpy as hvd
import pytest
from ranks_alive import processes_with
from stand_ins import StandIn, is_installed, stand_ins

HARNESS = Path(__file__).resolve().parent
HEAD = """
import os, signal, sys, time
import numpy as np
import polyhvd
import polyhvd.numpy as hvd
import pytest
pytestmark = pytest.mark.ranks(2, timeout_s=20)
"""
MARKED = "POLYHVD_TEST_OF_PLUGIN"

# Used as it is meant to be ---------------------------------------------------


@pytest.mark.ranks(1, 2, 3)
def test_the_body_runs_on_each_rank_of_each_number() -> None:
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("value", [3, "x", None])
def test_parameters_and_fixtures_have_the_values_of_one_process(value: object, tmp_path: Path) -> None:
    assert hvd.allgather_object((value, tmp_path, os.getppid() != 0)) == 2 * [(value, tmp_path, True)]
    (tmp_path / str(hvd.rank())).touch()


@pytest.mark.ranks(2)
class TestInAClass:
    def test_has_self(self) -> None:
        assert hvd.size() == 2
        assert isinstance(self, TestInAClass)


@pytest.mark.ranks(2)
def test_errors_are_expected_as_anywhere() -> None:
    with pytest.raises(ValueError, match="root rank 5"):
        hvd.broadcast(hvd.rank() * 1.0, 5)


@pytest.mark.ranks(2, initialized=False)
def test_a_test_may_begin_before_init() -> None:
    assert not __import__("polyhvd").is_initialized()


@pytest.mark.ranks(2)
def test_and_the_next_one_is_initialized_again() -> None:
    assert hvd.allgather_object(hvd.rank()) == [0, 1]


@pytest.mark.ranks(2, env={"POLYHVD_CYCLE_TIME": "3"}, fresh=True)
def test_ranks_may_have_an_environment_of_their_own() -> None:
    assert os.environ["POLYHVD_CYCLE_TIME"] == "3"


# What fails ------------------------------------------------------------------

Ran = subprocess.CompletedProcess


@pytest.fixture
def session(tmp_path: Path) -> Callable[..., Ran[str]]:
    """Runs pytest on a file of tests, with the plugin."""
    (tmp_path / "conftest.py").write_text(
        f"import sys\nsys.path.insert(0, {str(HARNESS)!r})\n"
        "import ranks_plugin\n"
        "def pytest_configure(config):\n    config.pluginmanager.register(ranks_plugin)\n"
    )

    def run(source: str, *options: str) -> Ran[str]:
        (tmp_path / "test_some.py").write_text(HEAD + textwrap.dedent(source))
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, str(tmp_path)],
            env={**os.environ, MARKED: str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert processes_with(MARKED, str(tmp_path)) == [], "processes are left"
        return done

    return run


def test_a_rank_that_raises_fails_the_test_with_its_traceback_and_what_the_others_did(
    session: Callable[..., Ran[str]],
) -> None:
    done = session(
        """
        def test_one_fails():
            print("printed by", hvd.rank(), flush=True)
            expected = [1, 2, 3]
            if hvd.rank() == 1:
                assert expected == [1, 2, 4]
            else:
                hvd.barrier()

        def test_all_fail():
            raise KeyError(f"of rank {hvd.rank()}")

        def test_the_next_one_passes():
            assert hvd.allgather_object(hvd.rank()) == [0, 1]
        """
    )
    out = done.stdout
    assert "2 failed, 1 passed" in out, out
    assert "rank 1 of numpy 2 failed:" in out
    assert "At index 2 diff: 3 != 4" in out, "the assertion does not explain itself"
    assert "rank 0 of numpy 2 was still at:" in out
    assert "in test_one_fails" in out.partition("was still at:")[2]
    assert "printed by 0" in out
    assert "printed by 1" in out
    assert "of rank 0" in out
    assert "of rank 1" in out


def test_a_hang_ends_with_the_stack_of_every_rank_that_hangs(session: Callable[..., Ran[str]]) -> None:
    began = time.monotonic()
    done = session(
        """
        @pytest.mark.ranks(timeout_s=1.5)
        def test_hangs():
            if hvd.rank() == 0:
                while True:
                    time.sleep(0.1)
        """
    )
    assert "1 failed" in done.stdout, done.stdout
    assert "test_hangs takes more than 1.5 s" in done.stdout
    assert "rank 0 of numpy 2 was still at:" in done.stdout
    assert "rank 1 of numpy 2 passed" in done.stdout
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("os._exit(0)", "the process ended: exit status 0"),
        ("os._exit(3)", "the process ended: exit status 3"),
        ("sys.exit(0)", "SystemExit: 0"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "the process ended: SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "the process ended: SIGSEGV"),
    ],
)
def test_a_rank_that_ends_has_not_passed(session: Callable[..., Ran[str]], end: str, told: str) -> None:
    done = session(
        f"""
        def test_ends():
            if hvd.rank() == 1:
                {end}

        def test_the_next_one_passes():
            assert hvd.allgather_object(hvd.rank()) == [0, 1]
        """
    )
    assert "1 failed, 1 passed" in done.stdout, done.stdout
    assert told in done.stdout


def test_skips_and_expected_failures_are_those_of_all_ranks(session: Callable[..., Ran[str]]) -> None:
    done = session(
        """
        def test_skipped():
            pytest.skip("not today")

        def test_expected():
            pytest.xfail("known")

        @pytest.mark.xfail(strict=True)
        def test_marked():
            assert hvd.rank() == 1

        def test_skipped_on_one():
            if hvd.rank() == 0:
                pytest.skip("of rank 0")
        """,
        "-rsxf",
    )
    assert "1 failed, 1 skipped, 2 xfailed" in done.stdout, done.stdout
    assert "not today" in done.stdout
    assert "rank 0 of numpy 2 skipped:\nof rank 0" in done.stdout
    assert "rank 1 of numpy 2 passed" in done.stdout


def test_no_test_sees_what_another_has_left(session: Callable[..., Ran[str]]) -> None:
    checks = """
        def check():
            assert "LEFT" not in os.environ
            assert hvd.counters()["pending"] == 0
            assert list(__import__("polyhvd").runtime.current.world().process_sets()) == [0]
            assert hvd.allgather_object(hvd.rank()) == [0, 1]
    """
    leaves = """
        def test_environment():
            check()
            os.environ["LEFT"] = "1"

        def test_operation():
            check()
            hvd.allreduce_async(np.ones(3), name=f"of rank {hvd.rank()} alone")

        def test_process_set():
            check()
            hvd.add_process_set([0])

        def test_world():
            check()
            hvd.shutdown()

        def test_world_of_one_rank():
            check()
            if hvd.rank() == 1:
                hvd.shutdown()

        def test_name():
            check()
            hvd.allreduce(np.ones(3 + hvd.rank() * 0), name="same")

        def test_same_name_of_another_shape():
            check()
            hvd.allreduce(np.ones(5), name="same")
    """
    forwards = session(checks + leaves)
    assert "7 passed" in forwards.stdout, forwards.stdout
    tests = ["\n        def test_" + test for test in leaves.split("def test_")[1:]]
    backwards = session(checks + "".join(reversed(tests)))
    assert "7 passed" in backwards.stdout, backwards.stdout


def test_values_that_cannot_be_sent_are_refused_by_name(session: Callable[..., Ran[str]]) -> None:
    done = session(
        """
        @pytest.fixture
        def lock():
            return __import__("threading").Lock()

        def test_lock(lock):
            pass
        """
    )
    assert "'lock' cannot be sent to ranks" in done.stdout, done.stdout


def test_arguments_that_the_marker_does_not_have_are_refused(session: Callable[..., Ran[str]]) -> None:
    done = session(
        """
        @pytest.mark.ranks(frame_work="torch")
        def test_option():
            pass
        """
    )
    assert "ranks() has no frame_work" in done.stdout, done.stdout


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_when_a_session_is_killed(tmp_path: Path, end: int) -> None:
    (tmp_path / "conftest.py").write_text(
        f"import sys\nsys.path.insert(0, {str(HARNESS)!r})\n"
        "import ranks_plugin\n"
        "def pytest_configure(config):\n    config.pluginmanager.register(ranks_plugin)\n"
    )
    (tmp_path / "test_some.py").write_text(
        HEAD + f"def test_waits():\n    open({str(tmp_path)!r} + f'/began{{hvd.rank()}}', 'w')\n"
        "    time.sleep(600)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(tmp_path)],
        env={**os.environ, MARKED: str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while len([*tmp_path.glob("began*")]) < 2:
        assert time.monotonic() < deadline, "the test does not begin"
        time.sleep(0.05)
    process.send_signal(end)
    process.wait(60)
    deadline = time.monotonic() + 10
    while processes_with(MARKED, str(tmp_path)):
        assert time.monotonic() < deadline, "ranks outlive their session"
        time.sleep(0.05)


def test_a_framework_is_imported_by_ranks_alone(session: Callable[..., Ran[str]]) -> None:
    if not is_installed("torch"):
        pytest.skip("torch is not installed")
    done = session(
        """
        import torch
        import polyhvd.torch as hvd
        pytestmark = [pytest.mark.ranks(2, framework="torch")]

        class Layer(torch.nn.Module):
            pass

        def double(x: torch.Tensor | None) -> "torch.Tensor":
            return 2 * x

        @pytest.mark.parametrize("dtype", ["int32", "float32"])
        def test_sum(dtype):
            assert isinstance(Layer(), torch.nn.Module)
            ones = torch.ones(2, dtype=getattr(torch, dtype))
            assert double(hvd.allreduce(ones, op=hvd.Sum)).tolist() == [4, 4]

        def test_controller_has_none(controller):
            assert controller == []
            assert "torch" in sys.modules

        @pytest.fixture
        def controller():
            return [name for name in sys.modules if name.split(".")[0] == "torch"]
        """
    )
    assert "3 passed" in done.stdout, done.stdout


def test_stand_ins_leave_nothing_and_are_not_taken_for_what_is_installed() -> None:
    before = set(sys.modules)
    with stand_ins("no_such_framework"):
        framework = importlib.import_module("no_such_framework.layers")
        assert isinstance(framework, StandIn)
        assert isinstance(framework.Dense(3) * 2 + 1, StandIn)
        assert not is_installed("no_such_framework")
        assert is_installed("numpy")
        sys.modules["forbidden_to_ranks"] = None  # type: ignore[assignment]
        os.environ["POLYHVD_TEST_LEFT"] = "1"
    assert set(sys.modules) == before
    assert "POLYHVD_TEST_LEFT" not in os.environ
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_framework.layers")
