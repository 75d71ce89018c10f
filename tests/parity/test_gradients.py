"""Gradients of the collectives in every framework that has some, against NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import drivers
import gradients
import pytest
from depth import NIGHTLY, repeats  # tests/harness, on the path by tests/conftest.py
from gradients import CASES, Situation
from worlds import Ranks

_NAMES = [driver.name for driver in drivers.DRIVERS if driver.has_gradients]
_everywhere = pytest.mark.drivers(*_NAMES)
_SCALED = [name for name, case in CASES.items() if case.verb in ("allgather", "broadcast", "reducescatter")]


def _has_operators_in_graphs() -> bool:
    try:
        return tuple(int(part) for part in version("torch").split(".")[:2]) >= (2, 4)
    except PackageNotFoundError:
        return True  # then the driver skips


def _one_of_each_verb() -> list[Any]:
    """The cases; those that have the verb of one before them are nightly."""
    verbs = [case.verb for case in CASES.values()]
    return [
        name if verbs.index(case.verb) == position else pytest.param(name, marks=pytest.mark.nightly)
        for position, (name, case) in enumerate(CASES.items())
    ]


def _some(situations: Sequence[Any], case: str) -> list[Any]:
    """One of a few situations, another one for the next case; every night all of them."""
    first = list(CASES).index(case) % len(situations)
    return [*situations[first:], *situations[:first]][: repeats(1, len(situations))]


def _all(ranks: Ranks) -> tuple[int, ...]:
    return tuple(range(ranks.size))


def _passes(ranks: Ranks, *arguments: object) -> None:
    __tracebackhide__ = True
    assert ranks.run(gradients.check, *arguments) == [None] * ranks.size


@_everywhere
@pytest.mark.sizes(3)
@pytest.mark.parametrize("case", CASES)
def test_a_gradient_is_scaled_as_horovods_is(ranks: Ranks, case: str) -> None:
    _passes(ranks, case, Situation(_all(ranks)), False)


@_everywhere
@pytest.mark.sizes(3)
@pytest.mark.parametrize("case", _SCALED)
def test_a_gradient_is_exact_where_the_call_says_so(ranks: Ranks, case: str) -> None:
    _passes(ranks, case, Situation(_all(ranks), argument=True), True)


@_everywhere
@pytest.mark.sizes(3)
def test_gradients_are_exact_where_the_environment_says_so_and_the_call_nothing_else(ranks: Ranks) -> None:
    ranks.run(gradients.start_again, {"POLYHVD_EXACT_GRADIENTS": "1"})
    try:
        verbs = [CASES[case].verb for case in _SCALED]
        for position, case in enumerate(_SCALED):
            if verbs.index(verbs[position]) < position and not NIGHTLY:
                continue  # the setting is looked up once for each verb
            _passes(ranks, case, Situation(_all(ranks)), True)
            _passes(ranks, case, Situation(_all(ranks), argument=False), False)
    finally:
        if ranks.pool.usable:
            ranks.run(gradients.start_again, {"POLYHVD_EXACT_GRADIENTS": ""})


@_everywhere
@pytest.mark.sizes(3)
def test_a_contrastive_loss_trains_as_in_one_process_where_gradients_are_exact(ranks: Ranks) -> None:
    # Rank r has x = r + 1, z = w x, and the loss z * (z_0 + z_1 + z_2). In one process the mean of the three
    # is 12 w^2, its derivative 24. Horovod divides by 3 what comes through allgather: 6 x + 2 x on each rank.
    for exact, mean in ((True, 24.0), (False, 16.0), (None, 16.0)):
        found = ranks.run(gradients.contrast, exact)
        assert sum(found) / 3 == pytest.approx(mean)


@_everywhere
@pytest.mark.sizes(3)
@pytest.mark.parametrize("case", CASES)
def test_a_gradient_in_a_process_set_is_of_its_members(ranks: Ranks, case: str) -> None:
    _passes(ranks, case, Situation((0, 2)), False)
    if case in _SCALED:  # the others have no such argument
        _passes(ranks, case, Situation((0, 2), argument=True), True)


@pytest.mark.skipif(not _has_operators_in_graphs(), reason="PyTorch before 2.4 breaks graphs at collectives")
@pytest.mark.drivers("torch")
@pytest.mark.sizes(3)
@pytest.mark.parametrize("case", _one_of_each_verb())
def test_a_compiled_gradient_is_the_eager_one(ranks: Ranks, case: str) -> None:
    _passes(ranks, case, Situation(_all(ranks)), False, gradients.compiled)
    if case in _SCALED:  # the others have no such argument
        _passes(ranks, case, Situation(_all(ranks), argument=True), True, gradients.compiled)


@pytest.mark.skipif(not _has_operators_in_graphs(), reason="PyTorch before 2.4 breaks graphs at collectives")
@pytest.mark.drivers("torch")
@pytest.mark.sizes(3)
@pytest.mark.parametrize("case", _one_of_each_verb())
def test_a_compiled_gradient_while_a_rank_has_joined_is_that_of_the_others(ranks: Ranks, case: str) -> None:
    _passes(ranks, case, Situation(_all(ranks), joined=(0,)), False, gradients.compiled)


@_everywhere
@pytest.mark.sizes(3)
@pytest.mark.parametrize("case", CASES)
def test_a_gradient_has_the_dtype_of_its_tensor(ranks: Ranks, case: str) -> None:
    halves = ["float16", "bfloat16"]
    if ranks.driver == "mxnet":  # which has no arithmetic of bfloat16
        halves.remove("bfloat16")
    for dtype in ["float64", *_some(halves, case)]:
        _passes(ranks, case, Situation(_all(ranks), dtype=dtype), False)
    if case in _SCALED:  # a third, which float32 rounds
        _passes(ranks, case, Situation(_all(ranks), dtype="float64", argument=True), True)


@_everywhere
@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("case", CASES)
def test_a_gradient_while_a_rank_has_joined_is_that_of_the_others(ranks: Ranks, case: str) -> None:
    root = 1  # it has to be there
    may_join = [rank for rank in range(ranks.size) if CASES[case].verb != "broadcast" or rank != root]
    for joined in _some(may_join, case):
        _passes(ranks, case, Situation(_all(ranks), joined=(joined,)), False)


@_everywhere
@pytest.mark.sizes(4)
@pytest.mark.parametrize("case", CASES)
def test_a_gradient_while_two_ranks_have_joined_is_that_of_the_others(ranks: Ranks, case: str) -> None:
    situations = [Situation(_all(ranks), joined=joined) for joined in ((0, 2), (2, 3), (0, 3))]
    for situation in _some([*situations, Situation((0, 1, 3), joined=(0,))], case):
        _passes(ranks, case, situation, False)


@_everywhere
@pytest.mark.sizes(3)
@pytest.mark.parametrize("case", CASES)
def test_a_rank_that_joins_before_the_gradient_adds_nothing_to_it(ranks: Ranks, case: str) -> None:
    for joined in _some(range(ranks.size), case):
        situation = Situation(_all(ranks), joined_after=(joined,))
        if ranks.driver == "mxnet" and CASES[case].verb == "alltoall":
            failures = ranks.run(gradients.check, case, situation, False)
            assert [f is None or "a rank has joined meanwhile" in f for f in failures] == [True] * ranks.size
            assert failures.count(None) == 1
        else:
            _passes(ranks, case, situation, False)


@pytest.mark.drivers(*(name for name in _NAMES if name != "mxnet"))  # whose rows are known beforehand
@pytest.mark.sizes(4)
def test_gathered_rows_that_nobody_can_tell_apart_are_an_error_that_names_join(ranks: Ranks) -> None:
    situation = Situation(_all(ranks), joined_after=(0, 2))
    failures = ranks.run(gradients.check, "allgather", situation, False)
    for rank in (1, 3):
        assert "gradients allgather" in failures[rank]
        assert "call join() after" in failures[rank]
    _passes(ranks, "allgather", Situation(_all(ranks)), False)
