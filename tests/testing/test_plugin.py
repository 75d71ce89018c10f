"""The plugin that runs tests on ranks: what fails on any rank fails the test, and nothing is left of it."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import polyhvd.numpy as hvd
import pytest
import tomllib
from ranks_alive import processes_with, wait_until

from polyhvd.testing.stand_ins import StandIn, is_installed, stand_ins

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
HEAD = """
import os, signal, sys, time
import numpy as np
import polyhvd
import polyhvd.numpy as hvd
import pytest
pytestmark = pytest.mark.ranks(2, timeout_s=20)
"""
#: Wherever the package is installed, its metadata name the plugin, and -p is not needed.
PYTEST = [sys.executable, "-m", "pytest", "-p", "polyhvd.testing.plugin"]
MARKED = "POLYHVD_TEST_OF_PLUGIN"

# Used as it is meant to be ---------------------------------------------------


@pytest.mark.ranks(1, 2, 3)
def test_the_body_runs_on_each_rank_of_each_number() -> None:
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("value", [3, "x", None])
def test_parameters_are_the_same_on_all_ranks_and_so_is_tmp_path(value: object, tmp_path: Path) -> None:
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

    def run(source: str, *options: str, conftest: str = "", head: str = HEAD) -> Ran[str]:
        (tmp_path / "test_some.py").write_text(head + textwrap.dedent(source))
        (tmp_path / "conftest.py").write_text(textwrap.dedent(conftest))
        (tmp_path / "pytest.ini").touch()
        done = subprocess.run(
            [*PYTEST, *options, str(tmp_path)],
            cwd=tmp_path,
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
        @pytest.mark.ranks(timeout_s=4)
        def test_hangs():
            if hvd.rank() == 0:
                while True:
                    time.sleep(0.1)
        """
    )
    assert "1 failed" in done.stdout, done.stdout
    assert "test_hangs takes more than 4 s" in done.stdout
    assert "rank 0 of numpy 2 was still at:" in done.stdout
    assert "rank 1 of numpy 2 passed" in done.stdout
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("end", "message"),
    [
        ("os._exit(0)", "the process ended: exit status 0"),
        ("os._exit(3)", "the process ended: exit status 3"),
        ("sys.exit(0)", "SystemExit: 0"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "the process ended: SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "the process ended: SIGSEGV"),
    ],
)
def test_a_rank_that_ends_has_not_passed(session: Callable[..., Ran[str]], end: str, message: str) -> None:
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
    assert message in done.stdout


def test_a_rank_that_has_died_is_told_before_those_that_missed_it(session: Callable[..., Ran[str]]) -> None:
    done = session(
        """
        def test_ends():
            if hvd.rank() == 1:
                os._exit(7)
            hvd.barrier()
        """
    )
    assert "rank 1: the process ended: exit status 7" in done.stdout.splitlines(), done.stdout


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


def test_arguments_that_the_marker_does_not_have_are_refused(session: Callable[..., Ran[str]]) -> None:
    done = session(
        """
        @pytest.mark.ranks(frame_work="torch")
        def test_option():
            pass
        """
    )
    assert "ranks() has no frame_work" in done.stdout, done.stdout
    assert "in _hookexec" not in done.stdout, done.stdout  # a line, not pytest's own traceback


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_when_a_session_is_killed(tmp_path: Path, end: int) -> None:
    (tmp_path / "test_some.py").write_text(
        HEAD + f"def test_waits():\n    open({str(tmp_path)!r} + f'/began{{hvd.rank()}}', 'w')\n"
        "    time.sleep(600)\n"
    )
    process = subprocess.Popen(
        [*PYTEST, str(tmp_path)],
        env={**os.environ, MARKED: str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_until(lambda: len([*tmp_path.glob("began*")]) == 2, "the test to begin", 60)
    process.send_signal(end)
    process.wait(60)
    wait_until(lambda: not processes_with(MARKED, str(tmp_path)), "the end of the ranks", 30)


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

        @pytest.fixture(scope="module")
        def layer():
            return torch.nn.Linear(2, 1)

        def test_fixtures_are_made_on_ranks(layer):
            assert layer(torch.ones(3, 2)).shape == (3, 1)
        """,
        conftest="""
        import sys
        def pytest_sessionfinish(session):
            if not hasattr(session.config, "workerinput"):
                print("imported:", "torch" in sys.modules)
        """,
    )
    assert "3 passed" in done.stdout, done.stdout
    assert "imported: False" in done.stdout


def test_a_users_folder_of_tests_runs_on_ranks(session: Callable[..., Ran[str]], tmp_path: Path) -> None:
    """Conftests, fixtures of every scope, parameters, capture and marks are as anywhere."""
    done = session(
        """
        import logging
        import unittest

        made = []

        class Kind:
            pass

        @pytest.fixture(scope="module")
        def once(rank):
            made.append(rank)
            yield hvd.allreduce(np.ones(1), op=hvd.Sum)[0]
            open(f"finished{rank}", "a").write("x")

        def test_a(once, rank, world, of_conftest, tmp_path, monkeypatch, capsys, caplog):
            assert (once, made, of_conftest) == (2, [rank], f"conftest {rank}")
            assert (rank, world.rank, world.size, world.framework) == (hvd.rank(), rank, 2, "numpy")
            assert len(set(hvd.allgather_object(tmp_path))) == 1
            monkeypatch.setenv("HERE", "1")
            print("captured")
            assert capsys.readouterr().out == "captured\\n"
            logging.getLogger("some").warning("of rank %d", rank)
            assert caplog.messages == [f"of rank {rank}"]

        @pytest.mark.parametrize("kind", [Kind, np.float32, lambda: 0, 1.5])
        def test_b(kind, once, rank):
            assert made == [rank]
            assert "HERE" not in os.environ

        @pytest.mark.skipif("os.environ.get('POLYHVD_RANK')", reason="not on ranks")
        def test_c():
            raise AssertionError

        def test_needs_an_option(request):
            assert request.config.getoption("--mine") == "7"

        class TestUnit(unittest.TestCase):
            def setUp(self):
                self.rank = hvd.rank()

            def test_d(self):
                self.assertEqual(self.rank, hvd.rank())

        @pytest.mark.ranks(3)
        def test_e(world):
            assert world.size == hvd.size() == 3

        def test_fails_in_setup(request):
            request.getfixturevalue("nothing")

        def test_unserved(rank):
            print("of", rank)
            raise KeyError("both")
        """,
        *("--mine", "7", "-k", "not nobody", "--junitxml", "out.xml"),
        conftest="""
        import pytest

        def pytest_addoption(parser):
            parser.addoption("--mine")

        @pytest.fixture
        def of_conftest(rank):
            return f"conftest {rank}"
        """,
    )
    out = done.stdout
    assert "2 failed, 8 passed, 1 skipped" in out, out + done.stderr
    assert "not on ranks" in out or "skipped" in out
    assert "fixture 'nothing' not found" in out
    assert "rank 0: KeyError: 'both'" in out
    assert [(tmp_path / f"finished{rank}").read_text() for rank in (0, 1)] == ["x", "x"]
    assert 'tests="11"' in (tmp_path / "out.xml").read_text()


def test_ranks_stay_warm_after_a_failure_and_are_replaced_when_one_was_killed(
    session: Callable[..., Ran[str]],
) -> None:
    done = session(
        """
        from pathlib import Path

        def note(rank):
            mine = Path(f"pid{rank}")
            before, now = mine.read_text() if mine.exists() else "", str(os.getpid())
            mine.write_text(now)
            return before == now

        def test_fails(rank):
            note(rank)
            assert 1 == 2

        def test_the_same_ranks_serve(rank):
            assert note(rank)

        @pytest.mark.ranks(1)
        def test_between_them():
            from polyhvd.testing.processes import is_running

            pid = int(Path("pid1").read_text())
            os.kill(pid, signal.SIGKILL)
            while is_running(pid):
                time.sleep(0.01)

        def test_others_serve(rank):
            assert not note(rank)
            assert hvd.allgather_object(rank) == [0, 1]
        """
    )
    assert "1 failed, 3 passed" in done.stdout, done.stdout
    assert "rank 0: assert 1 == 2" in done.stdout


def test_options_put_plain_tests_on_ranks_and_the_last_failures_run_again(
    session: Callable[..., Ran[str]], tmp_path: Path
) -> None:
    plain = """
        import polyhvd.numpy as hvd

        def test_passes(rank):
            assert hvd.size() == 2

        def test_fails():
            assert hvd.rank() == 5
        """
    head = "import pytest\n"
    done = session(plain, "--polyhvd-np", "2", "-x", head=head)
    assert "1 failed, 1 passed" in done.stdout, done.stdout
    again = session(plain, "--polyhvd-np", "2", "--lf", head=head)
    assert "rerun previous 1 failure" in again.stdout, again.stdout
    assert "1 failed in " in again.stdout
    alone = session(plain, "-k", "passes", head=head)
    assert "mark the test with ranks(2)" in alone.stdout
    for number in ("0", "many"):
        refused = session(plain, "--polyhvd-np", number, head=head)
        assert "expected a number of ranks of 1 or more" in refused.stderr
    two = session(plain, "--polyhvd-np", "2", head=head + "import polyhvd.torch\n")
    assert "imports polyhvd.numpy and polyhvd.torch: a process has one framework" in two.stdout + two.stderr


def test_the_examples_of_the_documentation_run(session: Callable[..., Ran[str]], tmp_path: Path) -> None:
    text = (ROOT / "docs" / "testing.md").read_text()
    files = re.findall(r"```python\n# (test_\w+\.py)\n(.*?)```", text, re.DOTALL)
    assert len(files) == 2
    for name, source in files:
        if "torch" not in name or is_installed("torch"):
            (tmp_path / name).write_text(source)
    done = session("def test_here(): pass", "-v", head="")
    assert "[np3-float64] PASSED" in done.stdout
    assert " failed" not in done.stdout
    assert f"{6 if is_installed('torch') else 5} passed" in done.stdout, done.stdout


def test_it_is_found_in_the_metadata_and_costs_nothing_where_no_test_is_marked(tmp_path: Path) -> None:
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
    folder = tmp_path / "site" / "polyhvd-0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: polyhvd\nVersion: 0\n")
    (folder / "entry_points.txt").write_text(
        "[pytest11]\n" + "".join(f"{name} = {module}\n" for name, module in points.items())
    )
    (tmp_path / "test_plain.py").write_text(
        textwrap.dedent(
            """
            import sys

            def test_plain(pytestconfig):
                assert pytestconfig.pluginmanager.has_plugin("polyhvd.testing.plugin")
                heavy = {"numpy", "multiprocessing", "polyhvd.testing.pool", "polyhvd.testing.running"}
                assert not heavy & set(sys.modules)
            """
        )
    )
    (tmp_path / "pytest.ini").touch()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:_hypothesis_pytestplugin"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "1 passed" in done.stdout, done.stdout


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
