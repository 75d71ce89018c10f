"""Runs marked tests: sends them to their ranks, and makes one report of what comes back."""

from __future__ import annotations

import importlib.util
import pickle
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from polyhvd.testing import session
from polyhvd.testing.marks import asked_for
from polyhvd.testing.pool import Pool, Pools, PoolSpec, RankFailure
from polyhvd.testing.session import Outcome, Setup, TestCall
from polyhvd.testing.stand_ins import is_installed
from polyhvd.testing.worlds import World, key_of

__all__ = ["Runner"]

_GRACE_S = 3.0  # for the other ranks, when one has failed
_CLEAN_S = 10.0  # for ranks of which one has failed to come together
_Place = tuple[str, tuple[Any, ...]]
_WorldOf = Callable[[pytest.Item], World | None]
#: Options that are only for pytest's process, with what the ranks have in their place.
_OF_ONE_PROCESS: dict[str, Any] = {
    **{"capture": "no", "collectonly": False, "maxfail": 0, "usepdb": False, "trace": False},
    **{"keyword": "", "markexpr": "", "deselect": None, "lf": False, "failedfirst": False, "newfirst": False},
    **{
        "stepwise": False,
        "stepwise_skip": False,
        "stepwise_reset": False,
        "cacheclear": False,
        "cacheshow": None,
    },
    **{"xmlpath": None, "log_file": None, "durations": None, "setupshow": False, "setuponly": False},
    **{"setupplan": False, "showfixtures": False, "show_fixtures_per_test": False, "markers": False},
    **{"help": False, "version": 0, "debug": None, "pastebin": None, "ignore": None, "ignore_glob": None},
    # Of other plugins: distribution of tests, coverage, random order, reruns and time limits.
    **{"dist": "no", "numprocesses": None, "tx": [], "looponfail": False, "cov_source": [], "reruns": None},
    **{"random_order_bucket": None, "timeout": None, "htmlpath": None, "json_report": False},
}


class Runner:
    """The ranks of a session, and what becomes of its tests on them."""

    def __init__(self, config: pytest.Config, pools: Pools) -> None:
        self._config: Any = config
        self._pools = pools
        self._next: dict[pytest.Item, _Place | None] | None = None
        self._paths: dict[World, dict[str, None]] = {}  # in the order of their tests

    def protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None, world: World, world_of: _WorldOf
    ) -> None:
        """Run a test and log its reports, as pytest does.

        Args:
            item: the test.
            nextitem: the one that follows.
            world: where it is to run.
            world_of: says where others are.
        """
        __tracebackhide__ = True
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        began = time.time()
        try:
            reports = self._reports(item, world, world_of)
        except (pytest.fail.Exception, RankFailure) as failure:
            reports = [_report(item, "call", "failed", str(failure), began)]
        for report in reports:
            if report.when == "call":
                report.start, report.stop, report.duration = began, time.time(), time.time() - began
            item.ihook.pytest_runtest_logreport(report=report)
        item.session._setupstate.teardown_exact(nextitem)  # of tests before this one
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def _reports(self, item: pytest.Item, world: World, world_of: _WorldOf) -> list[pytest.TestReport]:
        __tracebackhide__ = True
        mark = item.get_closest_marker("skip")
        missing = not is_installed(world.framework)
        if importlib.util.find_spec(f"polyhvd.{world.framework}") is None:
            raise RankFailure(f"ranks(framework={world.framework!r}): there is no polyhvd.{world.framework}")
        if mark is not None or missing:
            reason = f"{world.framework} is not installed"
            if mark is not None:
                reason = mark.kwargs.get("reason") or (mark.args[0] if mark.args else "unconditional skip")
            place = (str(item.path), (item.location[1] or 0) + 1, f"Skipped: {reason}")
            return [_report(item, "setup", "skipped", place), _report(item, "teardown", "passed", None)]
        _, options = asked_for(item)
        call = TestCall(
            str(item.path),
            key_of(item),
            item.nodeid,
            self._folder(item),
            options["initialized"],
            self._next_of(item, world_of) if not world.fresh else None,
        )
        timeout_s = options["timeout_s"] or self._config.getoption("polyhvd_timeout")
        spec = PoolSpec(world.framework, (world.size,), world.env)
        if not world.fresh:
            return self._run(item, self._pools.get(spec), call, world, timeout_s)
        with self._pools.new(spec) as pool:
            reports = self._run(item, pool, call, world, timeout_s)
            pool.close()
        return reports

    def _next_of(self, item: pytest.Item, world_of: _WorldOf) -> _Place | None:
        """The next test on the same ranks; None: it is the last."""
        if self._next is None:
            self._next, following = {}, dict[World, _Place]()
            for other in reversed(item.session.items):
                world = world_of(other)
                if world is not None:
                    self._next[other] = following.get(world)
                    following[world] = (str(other.path), key_of(other))
            for other in item.session.items:
                world = world_of(other)
                if world is not None:
                    self._paths.setdefault(world, {})[str(other.path)] = None
        return self._next.get(item)

    def _folder(self, item: pytest.Item) -> Path | None:
        if not {"tmp_path", "tmpdir"} & set(getattr(item, "fixturenames", ())):
            return None
        name = "".join(letter if letter.isalnum() else "_" for letter in item.name)[:30]
        folder: Path = self._config._tmp_path_factory.mktemp(name, numbered=True)
        return folder

    def _prepare(self, pool: Pool, call: TestCall, world: World) -> None:
        """Begin the ranks' sessions, with all files that have tests for them."""
        if pool.is_prepared:
            return
        options = {**vars(self._config.option), **_OF_ONE_PROCESS}
        plugins = [name for name in options.get("plugins") or [] if name not in ("pytester", "no:terminal")]
        options["plugins"] = [*plugins, "no:terminal"]
        if not self._config.pluginmanager.is_blocked("polyhvd.testing.plugin"):
            options["plugins"].append("polyhvd.testing.plugin")
        basetemp = self._config._tmp_path_factory.mktemp("ranks", numbered=True)
        plain = {name: value for name, value in options.items() if _is_plain(value)}
        paths = [call.path] if world.fresh else list({**self._paths.get(world, {}), call.path: None})
        arguments = [str(argument) for argument in self._config.args]
        pool.run(session.begin, Setup(plain, arguments, world, basetemp, paths))
        pool.is_prepared = True

    def _run(
        self, item: pytest.Item, pool: Pool, call: TestCall, world: World, timeout_s: float
    ) -> list[pytest.TestReport]:
        """Run a test on all ranks; skip, or fail, as they do."""
        __tracebackhide__ = True
        logs = pool.log_sizes()
        try:
            self._prepare(pool, call, world)
            logs = pool.log_sizes()
            pool.start(session.run, call)
            in_time = pool.settle(timeout_s, _GRACE_S, lambda outcome: outcome.kind in ("passed", "xpassed"))
        except RankFailure:
            raise
        except BaseException:  # Ctrl-C, or a time limit of another plugin
            pool.kill()
            raise
        answers = pool.answers()
        kinds = [_kind(answer) for answer in answers]
        agreed = _agreed(kinds)
        if agreed is None:
            when = "call"
            failed = [
                a[1].when for a in answers if a is not None and a[0] == "value" and a[1].kind == "failed"
            ]
            if failed and all(phase == failed[0] for phase in failed):
                when = failed[0]
            text = _told(pool, call, answers, timeout_s if not in_time else None)
            reports = [
                _report(item, phase, "failed" if phase == when else "passed", text if phase == when else None)
                for phase in (("setup", "call", "teardown") if when != "setup" else ("setup", "teardown"))
            ]
        else:
            answer = answers[agreed]
            assert answer is not None
            reports = [self._restored(item, serialized) for serialized in answer[1].reports]
            if not reports:  # the file itself was skipped
                place = (call.path, 1, f"Skipped: {answer[1].text}")
                reports = [_report(item, "setup", "skipped", place)]
        sections = [(f"rank {r}", text) for r, text in enumerate(pool.printed_since(logs)) if text]
        for report in reports:
            report.sections = _logged(answers, report.when or "")
            if report.when == "call" or (report.when == "setup" and not report.passed):
                report.sections += sections
        if self._config.option.capture == "no":
            for title, text in sections:
                print(f"\n--- {title} printed:\n{text}")
        self._settle(pool, answers, [kinds[agreed]] if agreed is not None else kinds)
        return reports

    def _settle(self, pool: Pool, answers: Sequence[tuple[str, Any] | None], kinds: Sequence[str]) -> None:
        """Let the next test have the ranks only if they are as they were."""
        __tracebackhide__ = True
        if any(a is None or a[0] != "value" or (a[1].kind == "failed" and not a[1].reports) for a in answers):
            pool.kill()
            return
        is_good = "failed" not in kinds
        try:
            found = pool.run(session.leaves_the_world_clean, deadline_s=60.0 if is_good else _CLEAN_S)
        except RankFailure:
            if is_good:
                raise
            return
        if all(found) or found == [None] * pool.size:
            return
        if is_good:
            pool.close()
        else:
            pool.kill()

    def _restored(self, item: pytest.Item, serialized: dict[str, Any]) -> pytest.TestReport:
        report = self._config.hook.pytest_report_from_serializable(config=self._config, data=serialized)
        report.nodeid, report.location = item.nodeid, item.location
        found: pytest.TestReport = report
        return found


def _report(
    item: pytest.Item, when: Any, outcome: Any, longrepr: Any, began: float = 0.0
) -> pytest.TestReport:
    duration = time.time() - began if began else 0.0
    words: dict[str, Any] = {word: 1 for word in item.keywords}
    return pytest.TestReport(item.nodeid, item.location, words, outcome, longrepr, when, duration=duration)


def _agreed(kinds: Sequence[str]) -> int | None:
    """A rank whose outcome is the test's; None: the test has failed.

    A failure that is expected may come from some ranks only, and leave others waiting.
    """
    if len(set(kinds)) == 1 and kinds[0] in ("passed", "skipped", "xfailed", "xpassed"):
        return 0
    if "xfailed" in kinds and set(kinds) <= {"xfailed", "xpassed", "passed", "running"}:
        return kinds.index("xfailed")
    return None


def _kind(answer: tuple[str, Any] | None) -> str:
    if answer is None:
        return "running"
    return str(answer[1].kind) if answer[0] == "value" else "ended"


def _told(
    pool: Pool, call: TestCall, answers: Sequence[tuple[str, Any] | None], timeout_s: float | None
) -> str:
    """A report on a test that has not passed everywhere: a line, then each rank, failures first."""
    stacks = pool.stacks() if None in answers else {}
    died: list[str] = []  # what a rank raises whose peer has died is not a cause
    failed: list[str] = []
    others: list[str] = []
    late = f"{call.key[-2]} takes more than {timeout_s:g} s" if timeout_s is not None else ""
    brief, cause = "", ""
    for rank, answer in enumerate(answers):
        title = f"rank {rank} of {pool.spec}"
        if answer is None:
            others.append(f"--- {title} was still at:\n{_of_the_test(stacks.get(rank, ''))}")
        elif answer[0] != "value":
            died.append(f"--- {title}: {answer[1]}")
            cause = cause or f"rank {rank}: {str(answer[1]).strip().splitlines()[-1]}"
        else:
            outcome: Outcome = answer[1]
            shown = f"--- {title} {outcome.kind}{':' if outcome.text else ''}\n{outcome.text}".rstrip()
            (failed if outcome.kind == "failed" else others).append(shown)
            if outcome.kind == "failed":
                brief = brief or f"rank {rank}: {outcome.brief or outcome.text.strip().splitlines()[-1]}"
    kinds = ", ".join(f"rank {rank} {_kind(answer)}" for rank, answer in enumerate(answers))
    first = late or cause or brief or f"the ranks do not agree: {kinds}"
    return "\n".join([first, *died, *failed, *others])


def _of_the_test(stacks: str) -> str:
    """The stacks of a rank, without what is below a test and without polyhvd's own threads."""
    below = ("/_pytest/", "/pluggy/", "/polyhvd/testing/", 'File "<string>"')
    threads = [part for part in stacks.strip().split("\n\n") if "/mailbox_thread.py" not in part]
    lines = [line for line in "\n\n".join(threads).splitlines() if not any(part in line for part in below)]
    return "\n".join(lines) if any(line.startswith("  File") for line in lines) else stacks


def _logged(answers: Sequence[tuple[str, Any] | None], when: str) -> list[tuple[str, str]]:
    """The log records of the ranks in this phase, as pytest has captured them."""
    sections = []
    for rank, answer in enumerate(answers):
        if answer is None or answer[0] != "value":
            continue
        for report in answer[1].reports:
            if report.get("when") == when:
                sections += [(f"rank {rank}: {title}", text) for title, text in report.get("sections", ())]
    return sections


def _is_plain(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True
