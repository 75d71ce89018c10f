"""A rank's session of pytest: it collects the files of the tests that it is sent, and runs these.

So a test finds on a rank what it finds anywhere: its conftests, fixtures and plugins, and assertions that
explain themselves.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import polyhvd
from polyhvd.runtime import current
from polyhvd.testing.worlds import World, key_of

__all__ = ["Outcome", "Setup", "TestCall", "begin", "end", "leaves_the_world_clean", "run"]


@dataclass(frozen=True)
class Setup:
    """The session that the ranks' are made like."""

    options: Mapping[str, Any]
    arguments: Sequence[str]
    world: World
    basetemp: Path  # each rank has a folder in it
    paths: Sequence[str]  # the files of the tests that will be sent


@dataclass(frozen=True)
class TestCall:
    """A test, by its place in its file."""

    __test__ = False

    path: str
    key: tuple[Any, ...]
    nodeid: str
    tmp_path: Path | None  # of all ranks, if the test asks for it
    initialized: bool  # whether the test begins after hvd.init()
    following: tuple[str, tuple[Any, ...]] | None  # file and key of these ranks' next test


@dataclass(frozen=True)
class Outcome:
    """The outcome of a test on one rank: ``passed``, ``skipped``, ``xfailed``, ``xpassed`` or ``failed``."""

    kind: str
    text: str = ""
    when: str = "call"  # of what failed: "setup", "call" or "teardown"
    #: As pytest serializes them; of a test that was not run to its end there are none.
    reports: list[dict[str, Any]] = field(default_factory=list)
    brief: str = ""  # what has failed, in a line


class _OnRanks:
    """The plugin of the ranks' sessions."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.shared: Path | None = None
        self.refused: dict[str, pytest.CollectReport] = {}  # files that were not collected
        self.reports: list[pytest.TestReport] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports.append(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self.refused[report.nodeid] = report

    @pytest.fixture
    def tmp_path(self) -> Path:
        """A folder of this test that all ranks share."""
        assert self.shared is not None
        return self.shared

    @pytest.fixture(scope="session")
    def rank(self) -> int:
        """The number of this rank."""
        return self._world.rank

    @pytest.fixture(scope="session")
    def world(self) -> World:
        """The job that the test runs in."""
        return self._world


class _Session:
    """The state that a rank keeps from test to test."""

    def __init__(self, setup: Setup) -> None:
        rank = current.world().placement.rank
        basetemp = setup.basetemp / f"rank{rank}"
        self.world = World(setup.world.framework, setup.world.size, setup.world.env, setup.world.fresh, rank)
        options = {**setup.options, "basetemp": str(basetemp)}
        config: Any = pytest.Config.fromdictargs(options, list(setup.arguments))
        self.config = config
        self.config.workerinput = {"workerid": f"rank{rank}", "workercount": setup.world.size}
        self.config.stash[World.KEY] = self.world
        self.plugin = _OnRanks(self.world)
        self.config.pluginmanager.register(self.plugin, "polyhvd-on-ranks")
        self.session: Any = pytest.Session.from_config(self.config)
        self.config._do_configure()
        self.config.hook.pytest_sessionstart(session=self.session)
        found = self.session.perform_collect(list(setup.paths))
        self.items = {(str(item.path), key_of(item)): item for item in found}

    def item(self, call: TestCall) -> pytest.Item:
        """The test, as it was collected here.

        Raises:
            CollectError: the file cannot be imported here, or has no such test.
            skip.Exception: the file skips itself.
        """
        refused = self.plugin.refused.get(call.nodeid.partition("::")[0])
        if refused is not None and refused.skipped:
            pytest.skip(_reason(refused))
        if refused is not None:
            raise pytest.Collector.CollectError(refused.longreprtext)
        try:
            return self.items[call.path, call.key]
        except KeyError:
            raise pytest.Collector.CollectError(
                f"{call.nodeid}: pytest's process has this test, and the ranks have not: what a module or a "
                "conftest collects, and with which parameters, must be the same in all processes"
            ) from None

    def close(self) -> None:
        """Finish fixtures that have been kept, and the session."""
        self.session._setupstate.teardown_exact(None)
        self.config.hook.pytest_sessionfinish(session=self.session, exitstatus=0)
        self.config.hook.pytest_unconfigure(config=self.config)


_session: _Session | None = None


def begin(setup: Setup) -> None:
    """Begin the session of this rank, which is like the one that it serves."""
    global _session
    with _kept_environment():
        _session = _Session(setup)


def end() -> None:
    """End it in good order: fixtures that outlive a test are finished."""
    global _session
    ended, _session = _session, None
    if ended is not None:
        ended.close()


def run(call: TestCall) -> Outcome:
    """Run a test on this rank."""
    assert _session is not None, "begin() comes first"
    with _kept_environment():
        try:
            importlib.import_module(f"polyhvd.{_session.world.framework}").init()
            item = _session.item(call)
            if not call.initialized:
                polyhvd.shutdown()
            elif hasattr(getattr(item, "module", None), "set_up_on_rank"):
                item.module.set_up_on_rank()  # type: ignore[attr-defined]
            _session.plugin.shared = call.tmp_path
            return _run(_session, item, call)
        except pytest.skip.Exception as skipped:
            return Outcome("skipped", str(skipped))
        except pytest.Collector.CollectError as error:
            return Outcome("failed", str(error), "setup")
        except BaseException as error:  # sys.exit() and Ctrl-C, too, are no way to pass
            return Outcome("failed", "".join(traceback.format_exception(error)))
        finally:
            sys.stdout.flush()
            sys.stderr.flush()


def _run(session: _Session, item: pytest.Item, call: TestCall) -> Outcome:
    """Set up, call and tear down, as pytest does; what outlives the test waits for the next of its file."""
    following = session.items.get(call.following) if call.following else None
    reports = session.plugin.reports
    reports.clear()
    item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
    serialized = [
        session.config.hook.pytest_report_to_serializable(config=session.config, report=r) for r in reports
    ]
    for report in reports:
        if report.failed:
            strict = report.when == "call" and report.longreprtext.startswith("[XPASS(strict)]")
            kind, text = "xpassed" if strict else "failed", report.longreprtext
            return Outcome(kind, text, report.when or "call", serialized, _brief(report))
    for report in reports:
        if hasattr(report, "wasxfail"):
            return Outcome("xfailed" if report.skipped else "xpassed", report.wasxfail, "call", serialized)
        if report.skipped:
            return Outcome("skipped", _reason(report), "call", serialized)
    return Outcome("passed", reports=serialized)


def _brief(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = str(crash.message if crash is not None else report.longreprtext).strip().splitlines()
    return lines[0] if lines else ""


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    place = report.longrepr
    return (str(place[2]) if isinstance(place, tuple) else str(place)).removeprefix("Skipped: ")


def leaves_the_world_clean() -> bool | None:
    """Return whether the next test may use this world, after removing its process sets; None if it is closed.

    Call it on all ranks when a test has ended on all of them.
    """
    world = current.find()
    if world is None:
        return None
    try:
        polyhvd.barrier()
        if world.engine.counters()["pending"]:
            return False
        for number, ranks in sorted(world.engine.process_sets().items()):
            if number != 0:
                polyhvd.remove_process_set(world.registered_as(number, polyhvd.ProcessSet(ranks)))
    except polyhvd.HorovodInternalError:
        return False
    return True


@contextlib.contextmanager
def _kept_environment() -> Iterator[None]:
    environment = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
