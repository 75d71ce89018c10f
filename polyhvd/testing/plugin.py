"""The plugin of pytest: a test that is marked with ``ranks`` runs on every rank of a job.

Loaded by every pytest where polyhvd is installed, so it imports what runs tests when the first one is marked.
``polyhvd docs testing`` describes marked tests. On the ranks, the plugin leaves tests as they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from polyhvd.testing.marks import asked_for, framework_of, is_whole_module
from polyhvd.testing.worlds import World

if TYPE_CHECKING:
    from polyhvd.testing.pool import Pools
    from polyhvd.testing.running import Runner

__all__ = ["pools_of", "world_of"]

_WORLD: pytest.StashKey[World] = pytest.StashKey()
_POOLS: pytest.StashKey[Pools] = pytest.StashKey()
_RUNNER: pytest.StashKey[Runner] = pytest.StashKey()
_NUMBER = "polyhvd_np"  # the parameter of tests on several numbers of ranks


class Hooks:
    """Settings that a conftest may make for the ranks."""

    @pytest.hookspec(firstresult=True)
    def pytest_polyhvd_pools(self, config: pytest.Config) -> Pools | None:
        """The pools that marked tests run in, which the plugin closes at the end of the session."""


class _Module(pytest.Module):
    """A module whose tests all run on ranks: pytest's process imports no framework for it."""

    framework = ""

    def _getobj(self) -> Any:
        from polyhvd.testing.stand_ins import stand_ins

        try:
            with stand_ins(self.framework):
                return super()._getobj()  # type: ignore[no-untyped-call]
        except (self.CollectError, pytest.skip.Exception):  # it cannot do without its framework
            return super()._getobj()  # type: ignore[no-untyped-call]


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Offer the hook."""
    pluginmanager.add_hookspecs(Hooks)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("polyhvd", "tests on the ranks of a job")
    group.addoption(
        "--polyhvd-np",
        type=_number,
        metavar="N",
        help="run tests that are not marked with ranks on N ranks, too",
    )
    group.addoption(
        "--polyhvd-framework",
        metavar="NAME",
        help="whose polyhvd.NAME the ranks import where neither marker nor module says so",
    )
    group.addoption(
        "--polyhvd-timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="for a test on all ranks, where the marker does not say so; 60 by default",
    )


def _number(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        import argparse

        raise argparse.ArgumentTypeError(f"expected a number of ranks of 1 or more, found {text!r}")
    return int(text)


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line(
        "markers",
        "ranks(*numbers, framework=None, timeout_s=60, env={}, fresh=False, initialized=True): "
        "run the test on every rank of a job of polyhvd, once for each of the numbers",
    )


def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> pytest.Module | None:
    """Import stand-ins for frameworks where every test of the module runs on ranks."""
    config = parent.config
    if World.KEY in config.stash or not is_whole_module(module_path, bool(config.getoption("polyhvd_np"))):
        return None
    framework = framework_of(module_path, config)
    if framework == "numpy":
        return None
    module: _Module = _Module.from_parent(parent, path=module_path)
    module.framework = framework
    return module


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test on each number of ranks that its marker names."""
    try:
        numbers, _ = asked_for(metafunc.definition)
    except pytest.UsageError as error:  # pytest would print it below a traceback
        raise pytest.Collector.CollectError(str(error)) from None
    if len(numbers) > 1:
        metafunc.fixturenames.append(_NUMBER)
        metafunc.parametrize(_NUMBER, numbers, ids=[f"np{number}" for number in numbers])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Find out which tests run on ranks."""
    if World.KEY in config.stash:
        return
    for item in items:
        numbers, options = asked_for(item)
        if not numbers:
            continue
        callspec = getattr(item, "callspec", None)
        number = callspec.params.get(_NUMBER) if callspec is not None else None
        if number is None:
            if len(numbers) > 1:
                raise pytest.UsageError(f"{item.nodeid}: such a test runs on one number of ranks only")
            number = numbers[0]
        framework = options["framework"] or framework_of(item.path, config)
        env = tuple(sorted(options["env"].items()))
        item.stash[_WORLD] = World(framework, number, env, options["fresh"])


def world_of(item: pytest.Item) -> World | None:
    """The job that a test runs in; None: it runs in pytest's process.

    Args:
        item: of a session whose tests have been collected.
    """
    return item.stash.get(_WORLD, None)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a marked test on its ranks."""
    world = item.stash.get(_WORLD, None)
    if world is None:
        return None
    config: Any = item.config
    if _RUNNER not in config.stash:
        from polyhvd.testing.running import Runner

        config.stash[_RUNNER] = Runner(config, pools_of(config))
    config.stash[_RUNNER].protocol(item, nextitem, world, world_of)
    return True


def pools_of(config: pytest.Config) -> Pools:
    """The pools of a session, which last as long as it does."""
    if _POOLS not in config.stash:
        from polyhvd.testing.pool import Pools

        config.stash[_POOLS] = config.hook.pytest_polyhvd_pools(config=config) or Pools()
    return config.stash[_POOLS]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """End the ranks; those that do not end in good order fail the session."""
    pools = session.config.stash.get(_POOLS, None)
    if pools is None:
        return
    from polyhvd.testing.pool import RankFailure

    try:
        pools.close()
    except RankFailure as failure:
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
        reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line(f"\npolyhvd: {failure}", red=True)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the ranks of a session that was given up."""
    pools = config.stash.get(_POOLS, None)
    if pools is not None:
        pools.kill()


@pytest.fixture
def rank() -> int:
    """The number of the rank that the test runs on; for tests that are marked with ``ranks``."""
    pytest.fail("the fixture 'rank' has a value on ranks only: mark the test with ranks(2)", pytrace=False)


@pytest.fixture
def world() -> World:
    """The job that the test runs in, a polyhvd.testing.World; for tests that are marked with ``ranks``."""
    pytest.fail("the fixture 'world' has a value on ranks only: mark the test with ranks(2)", pytrace=False)
