"""A plugin of pytest: a test that is marked with ``ranks`` runs on every rank of a job.

    @pytest.mark.ranks(2, 3, framework="torch")
    def test_sums(dtype: str) -> None:
        x = torch.ones(4, dtype=getattr(torch, dtype)) * hvd.rank()
        assert hvd.allreduce(x, op=hvd.Sum).sum() == ...

The ranks are processes that stay from test to test, after ``hvd.init()``. Values of parameters and fixtures
are made once, in pytest's process, and sent to all ranks, so they must be plain; what is not derives from
:class:`rank_side.OnRank`. A test passes if it passes on every rank. Process sets that it leaves are removed;
if it leaves operations behind, or fails, the next test gets other processes.

The marker's arguments, of which those nearest to the test count:
    numbers: of ranks; the test runs once for each.
    framework: whose ``polyhvd.NAME`` the ranks import, "numpy" by default. Where ``pytestmark`` of a module
        names one, pytest's process has stand-ins for frameworks while it imports the module.
    timeout_s: for the body on all ranks, 60 by default.
    env: environment of the ranks, on top.
    fresh: True for processes of this test alone, which must end in good order.
    initialized: False for a test that begins before ``hvd.init()``.

If a module has a function ``set_up_on_rank``, every rank calls it before each of the tests
that begin after ``hvd.init()``.
"""

from __future__ import annotations

import ast
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import rank_side
from fork_servers import ForkServers
from pool import Pool, Pools, PoolSpec, RankFailure
from rank_side import Outcome, TestCall
from stand_ins import is_installed, stand_ins

__all__ = ["World"]

_OPTIONS = {"framework": "numpy", "timeout_s": 60.0, "env": {}, "fresh": False, "initialized": True}
_GRACE_S = 3.0  # for the other ranks, when one has failed


@dataclass(frozen=True)
class World:
    """The job that a test asks for."""

    framework: str
    size: int
    env: tuple[tuple[str, str], ...] = ()
    fresh: bool = False

    @property
    def order(self) -> tuple[object, ...]:
        """Sorts tests so that those of the same processes follow each other."""
        return ("ranks", self.framework, self.size, self.env, self.fresh)

    @property
    def spec(self) -> PoolSpec:
        """The processes."""
        return PoolSpec(self.framework, (self.size,), self.env)

    def __str__(self) -> str:
        return f"{self.size} ranks"


class _Module(pytest.Module):
    """A module that is imported with stand-ins for frameworks."""

    framework = ""

    def _getobj(self) -> Any:
        with stand_ins(self.framework):
            return super()._getobj()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ranks(*numbers, framework, ...): run on every rank of a job")


def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> pytest.Module | None:
    framework = _framework_of(module_path)
    if framework == "numpy":
        return None
    module: _Module = _Module.from_parent(parent, path=module_path)
    module.framework = framework
    return module


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker("ranks") is None:
        return
    numbers, options = _asked_for(metafunc.definition)
    env = tuple(sorted(options["env"].items()))
    worlds = [World(options["framework"], number, env, options["fresh"]) for number in numbers]
    metafunc.fixturenames.append("world")
    metafunc.parametrize("world", worlds, ids=str)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    world = getattr(pyfuncitem, "callspec", None) and pyfuncitem.callspec.params.get("world")
    if not isinstance(world, World):
        return None
    __tracebackhide__ = True
    if not is_installed(world.framework):
        pytest.skip(f"{world.framework} is not installed")
    _, options = _asked_for(pyfuncitem)
    call = TestCall(
        str(pyfuncitem.path),
        pyfuncitem.module.__name__,
        ".".join(_names(pyfuncitem)),
        {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames},
        world.framework,
        options["initialized"],
    )
    _check_plain(call)
    try:
        if world.fresh:
            with Pool(world.spec, pyfuncitem._request.getfixturevalue("fork_servers")) as pool:
                _run(pyfuncitem, pool, call, options["timeout_s"])
                pool.close()
        else:
            pools: Pools = pyfuncitem._request.getfixturevalue("pools")
            _run(pyfuncitem, pools.get(world.spec), call, options["timeout_s"])
    except RankFailure as failure:
        pytest.fail(str(failure), pytrace=False)
    return True


def _run(item: pytest.Function, pool: Pool, call: TestCall, timeout_s: float) -> None:
    """Run a test on all ranks; skip, or fail, as they do."""
    __tracebackhide__ = True
    logs = pool.log_sizes()
    pool.start(rank_side.run, call)
    try:
        in_time = pool.settle(timeout_s, _GRACE_S, lambda outcome: outcome.kind == "passed")
    except BaseException:  # Ctrl-C
        pool.kill()
        raise
    answers = pool.answers()
    kinds = {_kind(answer) for answer in answers}
    failure = (
        ""
        if len(kinds) == 1 and kinds <= {"passed", "skipped", "xfailed"}
        else "\n".join(_told(pool, call, answers, timeout_s if not in_time else None))
    )
    for rank, text in enumerate(pool.printed_since(logs)):
        if text:
            item.add_report_section("call", f"rank {rank}", text)
    if failure:
        pool.kill()
        pytest.fail(failure, pytrace=False)
    if not world_is_clean(pool, call):
        pool.close()
    if kinds == {"skipped"}:
        pytest.skip(answers[0][1].text)
    if kinds == {"xfailed"}:
        pytest.xfail(answers[0][1].text)


def world_is_clean(pool: Pool, call: TestCall) -> bool:
    """Whether the next test may have the ranks of this one."""
    found = pool.run(rank_side.leaves_the_world_clean)
    return all(found) or found == [None] * pool.size


def _kind(answer: tuple[str, Any] | None) -> str:
    if answer is None:
        return "running"
    return str(answer[1].kind) if answer[0] == "value" else "ended"


def _told(
    pool: Pool, call: TestCall, answers: Sequence[tuple[str, Any] | None], timeout_s: float | None
) -> Iterator[str]:
    """What came of a test that has not passed everywhere, rank by rank."""
    if timeout_s is not None:
        yield f"{call.function} takes more than {timeout_s:g} s"
    stacks = pool.stacks() if None in answers else {}
    for rank, answer in enumerate(answers):
        title = f"rank {rank} of {pool.spec}"
        if answer is None:
            yield f"--- {title} was still at:\n{stacks.get(rank, '')}"
        elif answer[0] != "value":
            yield f"--- {title}: {answer[1]}"
        else:
            outcome: Outcome = answer[1]
            yield f"--- {title} {outcome.kind}{':' if outcome.text else ''}\n{outcome.text}".rstrip()


def _check_plain(call: TestCall) -> None:
    for name, value in call.values.items():
        try:
            pickle.dumps(value)
        except Exception as error:
            pytest.fail(f"{name!r} cannot be sent to ranks: {error}", pytrace=False)


def _asked_for(item: Any) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Numbers of ranks and options of a test: each of the nearest mark that has it."""
    numbers: tuple[int, ...] = ()
    options: dict[str, Any] = {}
    for mark in item.iter_markers("ranks"):
        numbers = numbers or mark.args
        options = {**mark.kwargs, **options}
    unknown = sorted(set(options) - set(_OPTIONS))
    assert not unknown, f"{item.nodeid}: ranks() has no {', '.join(unknown)}"
    assert numbers, f"{item.nodeid}: on how many ranks?"
    return numbers, {**_OPTIONS, **options}


def _names(item: pytest.Function) -> list[str]:
    classes = [node.name for node in item.listchain() if isinstance(node, pytest.Class)]
    return [*classes, item.originalname]


def _framework_of(path: Path) -> str:
    """What ``pytestmark`` of a module names, which is not imported yet."""
    for statement in reversed(ast.parse(path.read_bytes()).body):
        if not isinstance(statement, ast.Assign) or ast.unparse(statement.targets[0]) != "pytestmark":
            continue
        for node in ast.walk(statement.value):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "ranks"
            ):
                found = {word.arg: ast.unparse(word.value) for word in node.keywords}
                return str(ast.literal_eval(found.get("framework", "'numpy'")))
    return "numpy"


@pytest.fixture(scope="session")
def fork_servers() -> Iterator[ForkServers]:
    """Servers in whose forks ranks begin with their framework imported."""
    servers = ForkServers()
    yield servers
    servers.close()


@pytest.fixture(scope="session")
def pools(fork_servers: ForkServers) -> Iterator[Pools]:
    """The ranks that stay from test to test."""
    pools = Pools(fork_servers)
    yield pools
    pools.close()
