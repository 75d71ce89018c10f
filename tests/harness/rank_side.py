"""What a rank does with a test: imports its module as pytest would, calls its function, tells the outcome."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import pytest

import polyhvd
from polyhvd.runtime import current

__all__ = ["Imported", "OnRank", "Outcome", "TestCall", "leaves_the_world_clean", "run"]


@dataclass(frozen=True)
class Outcome:
    """What came of a test on one rank: ``passed``, ``skipped``, ``xfailed`` or ``failed``, and why."""

    kind: str
    text: str = ""


@runtime_checkable
class OnRank(Protocol):
    """The value of a fixture that each rank makes for itself."""

    def on_rank(self) -> Any:
        """The value, made on the rank that is to have it."""


@dataclass(frozen=True)
class Imported:
    """A module as the value of a fixture, which the ranks import and pytest's process does not."""

    name: str

    def on_rank(self) -> Any:
        """The module."""
        return importlib.import_module(self.name)


@dataclass(frozen=True)
class TestCall:
    """A test with the values of its arguments."""

    __test__ = False

    path: str
    module: str
    function: str  # with the class, if it has one: "TestReductions.test_sum"
    values: Mapping[str, Any]
    framework: str
    initialized: bool  # whether the test begins after hvd.init()


def run(call: TestCall) -> Outcome:
    """Run a test on this rank."""
    environment = dict(os.environ)
    try:
        _prepare(Path(call.path).parent)
        importlib.import_module(f"polyhvd.{call.framework}").init()
        module = importlib.import_module(call.module)
        if not call.initialized:
            polyhvd.shutdown()
        elif hasattr(module, "set_up_on_rank"):
            module.set_up_on_rank()
        function = _function(module, call.function)
        values = {k: v.on_rank() if isinstance(v, OnRank) else v for k, v in call.values.items()}
        function(**values)
    except pytest.skip.Exception as skipped:
        return Outcome("skipped", str(skipped))
    except pytest.xfail.Exception as failed:
        return Outcome("xfailed", str(failed))
    except BaseException as error:  # sys.exit() and Ctrl-C, too, are no way to pass
        frames = error.__traceback__.tb_next if error.__traceback__ else None
        return Outcome("failed", "".join(traceback.format_exception(type(error), error, frames)))
    finally:
        os.environ.clear()
        os.environ.update(environment)
        sys.stdout.flush()
        sys.stderr.flush()
    return Outcome("passed")


def leaves_the_world_clean() -> bool | None:
    """Whether the next test may have this world, without its process sets; None: the test has closed it.

    To be called on all ranks together, when a test has passed on all of them.
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


def _function(module: Any, name: str) -> Any:
    *classes, function = name.split(".")
    if not classes:
        return getattr(module, function)
    return getattr(attrgetter(".".join(classes))(module)(), function)


@functools.cache
def _prepare(folder: Path) -> None:
    """Let assertions of this folder's modules explain themselves."""
    _hook().mark_rewrite(*(path.stem for path in folder.glob("*.py") if path.stem not in sys.modules))


@functools.cache
def _hook() -> Any:
    from _pytest.assertion import util
    from _pytest.config import _prepareconfig

    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    # Without a file of settings and its folders, whose conftests are for pytest's process alone.
    config = _prepareconfig(["--noconftest", "-c", os.devnull, "--rootdir", "/", "-p", "no:cacheprovider"])

    def explain(operator: str, left: Any, right: Any) -> str | None:
        explanations = config.hook.pytest_assertrepr_compare(
            config=config, op=operator, left=left, right=right
        )
        for lines in filter(None, explanations):
            return "\n~".join(line.replace("\n", "\\n") for line in lines).replace("%", "%%")
        return None

    util._reprcompare = explain
    return next(finder for finder in sys.meta_path if type(finder).__name__ == "AssertionRewritingHook")
