"""TensorFlowState on ranks: commits of variables, and what other ranks receive of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import polyhvd.tensorflow as hvd
import pytest
import tensorflow as tf

from polyhvd.elastic import variables as kept
from polyhvd.errors import HorovodInternalError

pytestmark = pytest.mark.ranks(2, 3, framework="tensorflow")

TYPES = ["float32", "float64", "float16", "bfloat16", "int32", "int64", "bool"]


def make(base: float) -> Any:
    """Variables of many types and shapes, among them a large and an empty one and a scalar."""
    many = [tf.Variable(tf.cast(tf.fill([2, 3], base), name)) for name in TYPES]
    many += [tf.Variable(tf.fill([1 << 20], base)), tf.Variable(tf.zeros([0, 4])), tf.Variable(base)]
    return hvd.elastic.TensorFlowState(many, step=base)


def values(state: Any) -> Any:
    return [variable.numpy().tolist() for variable in state.variables]


def test_restore_goes_back_to_the_last_of_three_commits() -> None:
    state = make(1.0)
    for number in (2.0, 3.0, 4.0):
        for variable in state.variables:
            variable.assign(tf.cast(tf.fill(variable.shape, number), variable.dtype))
        state.commit()
    expected = values(state)
    for _ in range(2):
        for variable in state.variables[:1] + state.variables[-3:]:
            variable.assign_add(tf.ones_like(variable))  # in the variable's memory
        assert values(state) != expected
        state.restore()
        assert values(state) == expected


def test_restore_assigns_to_variables_that_have_other_values_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    state = make(1.0)
    state.commit()
    expected = values(state)
    state.variables.append(tf.Variable(7.0))  # no commit has it
    for number in (0, 1):
        state.variables[number].assign_add(tf.ones_like(state.variables[number]))
    names = []
    assign = type(state.variables[0]).assign

    def noted(variable: Any, *arguments: Any, **options: Any) -> Any:
        names.append(next(i for i, other in enumerate(state.variables) if other is variable))
        return assign(variable, *arguments, **options)

    monkeypatch.setattr(type(state.variables[0]), "assign", noted)
    state.restore()
    assert {0, 1} <= set(names) <= {0, 1, 3}  # NumPy has no bfloat16 that could be compared in memory
    assert values(state) == [*expected, 7.0]


def test_first_sync_gives_all_ranks_the_values_of_rank_0_which_are_their_commit() -> None:
    state = make(1.0 + hvd.rank())
    state.sync()
    expected = values(make(1.0))
    assert values(state) == expected
    state.variables[-1].assign(9.0)
    state.restore()
    assert values(state) == expected
    assert state.step == 1.0


def test_tensor_that_was_read_before_a_sync_keeps_its_value() -> None:
    state = make(1.0 + hvd.rank())
    before = [variable.read_value() for variable in state.variables]
    expected = values(state)
    state.sync()
    assert [np.asarray(tensor).tolist() for tensor in before] == expected


def test_rank_with_the_newest_commit_tells_the_others_and_what_is_not_synchronized_becomes_alike() -> None:
    state = make(1.0)
    state.sync()
    last = hvd.size() - 1
    state.variables[0].assign_add(tf.fill([2, 3], float(hvd.rank())))  # as a moving mean is, of each rank
    if hvd.rank() == last:
        state.commit()
        state.variables[1].assign_add(tf.ones([2, 3], tf.float64))
    state.sync()
    for _ in range(2):
        assert state.variables[0].numpy().tolist() == 2 * [3 * [1.0 + last]]
        assert state.variables[1].numpy().tolist() == 2 * [3 * [2.0]]
        state.variables[1].assign_add(tf.ones([2, 3], tf.float64))
        state.restore()


@pytest.mark.ranks(3, framework="tensorflow")
def test_variables_are_sent_to_who_lacks_them_alone() -> None:
    state = make(1.0)
    state.sync()
    if hvd.rank() > 0:
        state.variables[1].assign(tf.fill([2, 3], tf.constant(5.0, tf.float64)))
        state.variables[0].assign(tf.fill([2, 3], float(hvd.rank())))  # what differs was not sent
        state.commit()
        state.restore()
    state.sync()
    for _ in range(2):
        assert state.variables[0].numpy().tolist() == 2 * [3 * [max(1.0, hvd.rank())]]
        assert state.variables[1].numpy().tolist() == 2 * [3 * [5.0]]
        state.variables[1].assign_add(tf.ones([2, 3], tf.float64))
        state.restore()


def test_rank_that_has_fewer_variables_is_an_error_on_every_rank() -> None:
    state = hvd.elastic.TensorFlowState([tf.Variable(1.0)] * (2 if hvd.rank() else 1))
    with pytest.raises(
        hvd.InvalidArgumentError, match=r"variables of 2 variables.*make variables before the"
    ):
        state.sync()


def test_ranks_that_need_nothing_may_have_made_more_variables() -> None:
    state = hvd.elastic.TensorFlowState([tf.Variable(hvd.rank() + 1.0)])
    state.sync()
    if hvd.rank() == 0:
        state.variables.append(tf.Variable(7.0))  # in a step that failed before the others had come so far
    state.restore()
    state.sync()
    assert values(state) == ([1.0, 7.0] if hvd.rank() == 0 else [1.0])


@pytest.mark.parametrize("left", [False, True])
def test_sync_that_fails_half_way_leaves_the_commit_as_it_was(
    left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = make(1.0 + hvd.rank())
    state.sync()
    if left:  # a world between two commits
        state.commit()
        state._boundary = (1, 1)
        state.sync()
    for variable in state.variables:
        variable.assign(tf.cast(tf.fill(variable.shape, 2.0), variable.dtype))
    state.commit()
    expected = values(state)
    if hvd.rank() == 0:
        state.variables[-1].assign(5.0)
        state._commits += 1

    def lost(*arguments: Any) -> None:
        receive(*arguments)
        raise HorovodInternalError("a rank was lost")

    receive = kept.receive
    monkeypatch.setattr(kept, "receive", lost)
    handler = state._handlers["variables"]
    if hvd.rank() == 0:
        handler.sync_from(0, among=hvd.global_process_set)
    else:
        with pytest.raises(HorovodInternalError):
            handler.sync_from(0, among=hvd.global_process_set)
    state.restore()
    assert values(state) == expected
