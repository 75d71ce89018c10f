"""States on ranks, without a launcher's driver: what is committed, restored and sent."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import polyhvd.numpy as hvd
import pytest

from polyhvd.elastic import process
from polyhvd.elastic.state import Handler, HandlersState
from polyhvd.runtime import current

pytestmark = pytest.mark.ranks(1, 3, framework="numpy")


def make(**kwargs: Any) -> Any:
    return hvd.elastic.ArrayState(w=np.arange(4.0), nested={"a": [np.ones(2), "x"]}, step=0, **kwargs)


def test_restore_goes_back_to_the_commit_and_arrays_keep_their_memory() -> None:
    state = make()
    w, inner = state.w, state.nested["a"][0]
    state.sync()
    state.w += 1
    state.nested["a"][0][:] = 7
    state.step = 3
    state.commit()
    state.w[:] = -1
    state.nested["a"][0][:] = -1
    state.nested["a"].append("y")
    state.step = 4
    state.restore()
    assert state.w is w
    assert state.nested["a"][0] is inner
    assert w.tolist() == [1, 2, 3, 4]
    assert state.nested["a"][0].tolist() == [7, 7]
    assert len(state.nested["a"]) == 2
    assert state.step == 3


def test_commit_is_not_changed_by_what_follows_it() -> None:
    state = make()
    state.commit()
    for _ in range(3):
        state.w += 1
        state.restore()
        assert state.w.tolist() == [0, 1, 2, 3]


class Weights(Handler):
    """Keeps a list."""

    def save(self) -> None:
        self._saved = self.value.copy()

    def restore(self) -> None:
        self.value[:] = self._saved


@pytest.mark.parametrize("kind", ["objects", "arrays", "handlers"])
def test_attribute_that_cannot_be_copied_is_named_and_the_last_commit_stays(kind: str) -> None:
    makers = {
        "objects": lambda **kept: hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, **kept),
        "arrays": hvd.elastic.ArrayState,
        "handlers": lambda **kept: HandlersState({"weights": Weights([1])}, **kept),
    }
    state: Any = makers[kind](step=1, lock=None)
    state.step, state.lock = 2, threading.Lock()
    if kind == "handlers":
        state.weights[0] = 2
    with pytest.raises(hvd.InvalidArgumentError, match=r"'lock', a _thread\.lock, cannot be copied"):
        state.save()
    state.restore()
    assert (state.step, state.lock) == (1, None)
    assert kind != "handlers" or state.weights == [1]


def test_first_sync_tells_rank_0_s_values() -> None:
    state = make(own=hvd.rank())
    state.w += hvd.rank()
    state.sync()
    assert (state.w.tolist(), state.own) == ([0, 1, 2, 3], 0)
    state.w[:] = 9
    state.restore()  # what was sent is a commit
    assert state.w.tolist() == [0, 1, 2, 3]


def test_states_with_other_attributes_are_an_error_on_every_rank_that_names_them() -> None:
    more = {"foo": 1} if hvd.rank() == 1 else {}
    state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=hvd.rank(), **more)
    if hvd.size() == 1:
        state.sync()
        return
    said = r"rank 1's state has the attributes \['foo', 'step'\], and rank 0's \['step'\]"
    with pytest.raises(hvd.InvalidArgumentError, match=said):
        state.sync()


def test_sync_tells_the_newest_commit_whoever_has_it() -> None:
    state = make()
    state.sync()
    newest = hvd.size() - 1
    for step in range(2 if hvd.rank() == newest else 1):
        state.step = 10 * hvd.rank() + step
        state.w[:] = state.step
        state.commit()
    state.w[:] = -5
    state.restore()
    state.sync()
    expected = 10 * newest + 1
    assert (state.step, state.w.tolist()) == (expected, 4 * [expected])
    assert state._commits == 2
    before = hvd.counters()["operations"]
    state.restore()
    state.sync()  # all are at that commit: only what is not an array is sent
    assert hvd.counters()["operations"] - before < 8


def leave_a_world_between_two_commits(state: Any, generation: int) -> int:
    """Take a step that is in no commit, and sync as after a boundary; returns of how many operations."""
    state.sync()
    state.commit()
    state.w += 7
    state._boundary = generation, 1
    before = hvd.counters()["operations"]
    state.sync()
    return int(hvd.counters()["operations"] - before)


def test_ranks_that_leave_a_world_after_the_same_step_tell_no_arrays_and_lose_nothing() -> None:
    state = make()
    assert leave_a_world_between_two_commits(state, 3) < 8
    assert (state.w.tolist(), state._boundary) == ([7, 8, 9, 10], None)
    state.w[:] = -1
    state.restore()  # where the next world begins is a commit
    assert state.w.tolist() == [7, 8, 9, 10]


def test_who_was_in_another_world_is_told_all_of_the_newest_commit_s_rank() -> None:
    state = make()
    newest = hvd.size() - 1
    state._commits = 5 if hvd.rank() == newest else 0
    state.w += 100 * hvd.rank()
    state._boundary = (3, 1) if hvd.rank() == newest else None  # a newcomer, or one that has failed
    state.sync()
    assert state.w.tolist() == [100 * newest + i for i in range(4)]


@pytest.mark.parametrize("at", ["commit", "boundary"])
@pytest.mark.ranks(3, 4, framework="numpy")
def test_arrays_are_sent_to_who_lacks_them_alone(at: str) -> None:
    newcomers = range(2, hvd.size())
    state = make()
    state.sync()
    if hvd.rank() not in newcomers:
        state.step = 9
        state.commit()
        state.w[:] = 10 + hvd.rank()  # what differs between ranks tells that it was not sent
        state._is_commit = at == "commit"
        state._boundary = (3, 1) if at == "boundary" else None
    sets = current.world().engine.process_sets()
    state.sync()
    assert state.step == 9
    assert state.w.tolist() == 4 * [10 if hvd.rank() in newcomers else 10 + hvd.rank()]
    hvd.barrier()
    hvd.barrier()  # what was removed before the first one is gone before the second
    assert current.world().engine.process_sets() == sets
    added = hvd.add_process_set([0, *newcomers])  # the ranks that have exchanged them are no set any more
    assert hvd.remove_process_set(added)


@pytest.mark.ranks(3, framework="numpy")
def test_sync_uses_a_process_set_that_is_there_and_leaves_it() -> None:
    pair = hvd.add_process_set([0, 2])
    state = make()
    state.sync()
    if hvd.rank() < 2:
        state.w += 1
        state.commit()
        state._is_commit = True
    state.sync()
    assert state.w.tolist() == [1, 2, 3, 4]
    if pair.included():
        assert hvd.allreduce(np.ones(1), op=hvd.Sum, process_set=pair).tolist() == [2]
    assert hvd.remove_process_set(pair)


@pytest.mark.parametrize("how", ["callback", "reset", "on_reset"])
def test_sync_keeps_values_that_were_adapted_to_the_new_world(how: str) -> None:
    sizes = iter([3, 2])

    def adapt(state: Any) -> None:
        size = next(sizes)
        state.rate *= size / state.size
        state.size = size

    class Resetting(hvd.elastic.ArrayState):
        def reset(self) -> None:
            adapt(self)

    class Adapting(hvd.elastic.ArrayState):
        def on_reset(self) -> None:
            super().on_reset()
            adapt(self)

    makers = {"callback": hvd.elastic.ArrayState, "reset": Resetting, "on_reset": Adapting}
    state = makers[how](rate=np.array([0.4]), size=4)
    if how == "callback":
        state.register_reset_callbacks([lambda: adapt(state)])
    state.commit()
    for number, rate in ((1, 0.3), (2, 0.2)):  # the second loss comes before a commit
        state.restore()
        state.on_reset()
        state.sync()
        assert state.rate == pytest.approx(rate)
        assert state._commits == number, "a rank that was lost before it had these values has an older commit"


def test_values_that_a_reset_callback_changes_on_one_rank_reach_all() -> None:
    state = hvd.elastic.ArrayState(rate=np.array([0.4]))
    state.register_reset_callbacks([lambda: state.rate.__imul__(0.5) if hvd.rank() == 0 else None])
    state.commit()
    state.restore()
    state.on_reset()
    state.sync()
    assert state.rate == pytest.approx(0.2)


def test_newcomer_gets_arrays_of_other_shapes_than_its_own() -> None:
    state = make()
    if hvd.rank() == 0:
        state.w = np.full((2, 3), 5.0, np.float32)
        state._commits = 4
    state.sync()
    assert (state.w.shape, state.w.dtype, state.w.tolist()) == ((2, 3), np.float32, 2 * [3 * [5.0]])


def test_attribute_that_cannot_be_pickled_is_an_error_on_every_rank() -> None:
    state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0)
    state.step = (i for i in range(3))
    with pytest.raises((hvd.InvalidArgumentError, TypeError), match="generator"):
        state.sync()
    hvd.barrier()


def test_run_calls_the_function_and_passes_what_it_raises_and_returns() -> None:
    state = make()

    @hvd.elastic.run
    def train(state: Any, factor: int, *, plus: int = 0) -> int:
        """Train."""
        if factor < 0:
            raise KeyError(factor)
        return factor * 2 + plus

    assert train(state, 3, plus=1) == 7
    assert train.__doc__ == "Train."
    with pytest.raises(KeyError, match="-1"):
        train(state, -1)


def test_interrupt_is_raised_by_the_same_commit_on_all_ranks_and_undoes_nothing() -> None:
    calls = []
    state = make()
    state.register_reset_callbacks([lambda: calls.append("reset")])

    def train(state: Any) -> str:
        calls.append(state.step)
        if state.step == 0:
            state.step = 5
            raise hvd.HostsUpdatedInterrupt(skip_sync=False)
        return "done"

    assert hvd.elastic.run_fn(train, lambda: calls.append("rewire"))(state) == "done"
    assert calls == [0, "rewire", "reset", 5]


class Awaited:
    """A member whose world is to come to a boundary."""

    launcher = SimpleNamespace(reply=SimpleNamespace(generation=1))

    def step(self) -> None: ...

    def progress(self) -> None: ...

    def is_awaited(self) -> bool:
        return True

    def meet(self, where: str) -> bool:
        return True


def leave_world(state: Any, checks: int = 1) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "find", Unawaited)
        for _ in range(checks - 1):
            state.check_host_updates()
        patch.setattr(process, "find", Awaited)
        with pytest.raises(hvd.HostsUpdatedInterrupt):
            state.check_host_updates()


class Unawaited(Awaited):
    """A member whose world goes on."""

    def is_awaited(self) -> bool:
        return False


class Devices:
    """An engine whose devices have made the results of collectives when they have been asked so often."""

    def __init__(self, results: np.ndarray[Any, Any], *, polls: int, fails: bool = False) -> None:
        self.has_lost_results = False
        self._results, self._polls, self._fails = results, polls, fails

    @property
    def are_devices_done(self) -> bool:
        self._polls -= 1
        if self._polls == 0 and self._fails:
            self.has_lost_results = True
        elif self._polls == 0:
            self._results[:] = 7
        return self._polls <= 0 and not self._fails


def commit_with(state: Any, engine: Devices) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "find", Unawaited)
        world = SimpleNamespace(engine=engine, placement=current.world().placement)
        patch.setattr(current, "find", lambda: world)
        state._commit()


@pytest.mark.parametrize("polls", [1, 4])
def test_a_commit_copies_what_devices_make_of_collectives(polls: int) -> None:
    state = make()
    commit_with(state, Devices(state.w, polls=polls))
    state.w[:] = -1
    state.restore()
    assert state.w.tolist() == [7, 7, 7, 7]


def test_a_commit_does_not_wait_for_devices_whose_world_has_failed_and_keeps_the_last_one() -> None:
    state = make()
    state.commit()
    state.w[:] = -1
    with pytest.raises(hvd.HorovodInternalError, match="the step is incomplete"):
        commit_with(state, Devices(state.w, polls=3, fails=True))
    state.restore()
    assert state.w.tolist() == [0, 1, 2, 3]


def test_ranks_that_left_at_one_step_send_no_arrays_and_have_it_as_their_commit() -> None:
    state = make()
    state.sync()
    state.step = 3
    state.w[:] = hvd.rank()  # what differs between ranks tells that it was not sent
    leave_world(state)
    before = hvd.counters()["operations"]
    state.sync()
    assert hvd.counters()["operations"] - before < 8
    state.w[:] = -1
    state.restore()
    assert (state.step, state.w.tolist()) == (3, 4 * [hvd.rank()])


def test_ranks_that_left_at_different_steps_get_one_rank_s_values() -> None:
    for leaves in (
        lambda state: leave_world(state, 1 + hvd.rank()),
        lambda state: (leave_world(state), state.sync()),  # that boundary is passed
    ):
        state = make()
        state.sync()
        leaves(state)
        state.w[:] = hvd.rank()
        state.sync()
        assert state.w.tolist() == [0, 0, 0, 0]


def test_arrays_of_every_dtype_are_kept_and_told() -> None:
    kinds = {
        "complex": np.full(3, 1j),
        "time": np.array(["2026-01-01"], "datetime64[s]"),
        "text": np.array(["a", "bc"]),
        "long": np.full(2, 1, np.longdouble),
        "swapped": np.arange(3, dtype=">f4"),
        "records": np.zeros(2, [("a", "i4")]),
    }
    expected = {name: array.copy() for name, array in kinds.items()}
    if hvd.rank() > 0:
        kinds = {name: np.zeros_like(array) for name, array in kinds.items()}
    state = hvd.elastic.ArrayState(**kinds)
    state.sync()
    for name in kinds:
        setattr(state, name, None)
    state.restore()
    for name, array in expected.items():
        found = getattr(state, name)
        assert (found.dtype, found.tolist()) == (array.dtype, array.tolist()), name


def test_arrays_that_share_memory_are_told() -> None:
    whole = np.arange(6.0) + hvd.rank()
    state = hvd.elastic.ArrayState(whole=whole, same=whole, part=whole[2:4], every=whole[::2])
    state.sync()
    assert whole.tolist() == [0, 1, 2, 3, 4, 5]
    whole += 1
    state.commit()
    whole[:] = -1
    state.restore()
    assert whole.tolist() == [1, 2, 3, 4, 5, 6]
    assert state.part.tolist() == [3, 4]


def test_arrays_are_told_in_the_order_of_their_memory() -> None:
    """Sums of the same elements in another order are others, by their last bits."""
    values = np.random.default_rng(1).normal(size=(50, 70)).astype(np.float32)
    state = hvd.elastic.ArrayState(w=np.zeros((50, 70), np.float32), own=np.zeros((70, 50)).T)
    if hvd.rank() == 0:
        state.w = np.asfortranarray(values)
    state.sync()
    assert np.array_equal(state.w, values)
    assert hvd.allgather_object(float(state.w.sum())) == hvd.size() * [float(state.w.sum())]
    for _ in range(2):
        assert np.isfortran(state.w)
        assert np.isfortran(state.own)
        state.w = np.ascontiguousarray(state.w)
        state.restore()


def test_array_that_is_read_only_is_told() -> None:
    fixed = np.full(3, hvd.rank() + 1.0)
    fixed.flags.writeable = False
    state = hvd.elastic.ArrayState(fixed=fixed, other=np.zeros(2))
    state.sync()
    state.restore()
    assert state.fixed.tolist() == [1, 1, 1]
    assert fixed.tolist() == 3 * [hvd.rank() + 1.0]


def test_copies_of_a_commit_are_never_what_the_next_one_overwrites() -> None:
    state = make()
    for generation in (3, 4):
        leave_a_world_between_two_commits(state, generation)
        for _ in range(3):
            assert not any(np.shares_memory(a, b) for a in state._copies for b in state._spare)
            state.commit()


def test_what_is_told_between_two_commits_is_another_commit() -> None:
    """One that fails before the others' values have come has the old values, under the old number."""
    state = make()
    state.sync()
    state.commit()
    before = state._commits
    leave_a_world_between_two_commits(state, 3)
    assert state._commits == before + 3  # there is a sync and a commit before
    state.restore()
    state.sync()
    assert state._commits == before + 3


def test_values_that_only_one_rank_has_saved_since_the_commit_are_sent_to_all() -> None:
    state = make()
    state.sync()
    state.commit()
    if hvd.rank() == hvd.size() - 1:  # the step has failed on the others
        state.w += 1
        state.save()
    state.restore()
    state.sync()
    assert hvd.allgather_object(state.w.tolist()) == hvd.size() * [state.w.tolist()]


def test_step_after_a_restore_by_the_program_is_kept_when_the_world_changes() -> None:
    state = make()
    state.sync()
    state.commit()
    state.restore()  # by the program, for example after a loss of nan
    state.w[:] = 5
    leave_world(state)
    state.sync()
    state.w[:] = -1
    state.restore()
    assert state.w.tolist() == [5, 5, 5, 5]
