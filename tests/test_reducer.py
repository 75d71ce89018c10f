"""The reducer of gradients, with an exchange that only notes what it is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from polyhvd.collectives.adapter import ReduceOp
from polyhvd.collectives.process_sets import ProcessSet
from polyhvd.errors import HorovodInternalError, InvalidArgumentError
from polyhvd.training.compression import Compressor, KeyedCompressor
from polyhvd.training.gradient_groups import KeyGroups
from polyhvd.training.options import Options
from polyhvd.training.reducer import Exchange, GradientReducer, Results, keras_layers

Array = np.ndarray[Any, Any]


class Sparse:
    """Stands for a sparse gradient."""

    def __init__(self, array: Array) -> None:
        self.array = array


class Noted(Exchange[Any]):
    """Doubles what it is given, as two ranks with the same gradients do with op=Sum."""

    def __init__(self, *, whole_steps: bool = False, failing: Sequence[str] = ()) -> None:
        self.whole_steps = whole_steps
        self.failing = failing
        self.sent: list[tuple[str, int]] = []
        self.shapes: list[tuple[int, ...]] = []
        self.requests: list[dict[str, Any]] = []
        self.waited: list[str] = []

    def start(
        self, tensors: Sequence[Any], name: str, priority: int, request: Mapping[str, Any]
    ) -> Results[Any]:
        self.sent.append((name, priority))
        self.shapes += [np.shape(tensor) for tensor in tensors]
        self.requests.append(dict(request))
        if f"start of {name}" in self.failing:
            raise InvalidArgumentError(name)

        def results() -> Sequence[Any]:
            self.waited.append(name)
            if name in self.failing:
                raise HorovodInternalError(name)
            return [2 * tensor for tensor in tensors]

        return results

    def start_sparse(
        self,
        gradients: Mapping[Any, Any],
        prefix: str,
        compression: Compressor,
        priority: int,
        request: Mapping[str, Any],
    ) -> Results[Any]:
        self.sent.append((f"{prefix}.sparse.{'.'.join(map(str, gradients))}", 0))
        return lambda: [Sparse(2 * gradient.array) for gradient in gradients.values()]

    def is_sparse(self, gradient: Any) -> bool:
        return isinstance(gradient, Sparse)

    def dense(self, gradient: Any) -> Any:
        return gradient.array if isinstance(gradient, Sparse) else gradient

    def marker(self, like: Any, mark: int) -> Any:
        return np.empty((0, mark), like.dtype)

    def put(self, key: Any, gradient: Any, reduced: Any) -> Any:
        return reduced


class Pair(ProcessSet):
    """A set of two ranks that needs no world."""

    def __init__(self, *, included: bool = True) -> None:
        self.process_set_id = 1
        self.world = None
        self.members = [0, 1]
        self.is_included = included

    def included(self) -> bool:
        return self.is_included

    def size(self) -> int:
        return 2


def reducer(exchange: Noted, **arguments: Any) -> GradientReducer[Any]:
    groups = arguments.pop("key_groups", None)
    arguments.setdefault("process_set", Pair())
    return GradientReducer(exchange, prefix="p", options=Options(**arguments), groups=groups)


def ones(*keys: int) -> dict[Any, Any]:
    return {key: np.full(2, key + 1.0) for key in keys}


def test_gradients_are_named_by_their_keys_and_the_first_ones_are_urgent() -> None:
    noted = Noted()
    found = reducer(noted).reduce(ones(0, 3))
    assert noted.sent == [("p.0", 0), ("p.3", -3)]
    assert {key: value[0] for key, value in found.items()} == {0: 2, 3: 8}


def test_a_group_is_named_by_its_first_key_where_parts_of_it_may_come() -> None:
    noted = Noted()
    reducer(noted, key_groups=KeyGroups([[4, 1], [2]])).reduce(ones(0, 1, 2, 4))
    assert noted.sent == [("p.0", 0), ("p.group.1", -1), ("p.2", -2)]


def test_a_whole_step_is_one_operation_and_groups_of_it_are_numbered() -> None:
    sources = [object() for _ in range(4)]
    noted = Noted(whole_steps=True)
    reducer(noted).reduce(ones(0, 1, 3), sources)
    reducer(noted, groups=[[sources[3], sources[0]]]).reduce(ones(0, 1, 3), sources, prefix="q")
    reducer(noted, num_groups=2).reduce(ones(0, 1, 3), sources)
    names = [name for name, _ in noted.sent]
    assert names == ["p", "q", "q.1", "p", "p.group.1"]
    with pytest.raises(InvalidArgumentError, match="has no variables"):
        reducer(noted, groups=[[sources[0]]]).reduce(ones(0))


def test_a_whole_step_differs_in_a_shape_from_one_with_gradients_of_other_variables() -> None:
    sources = [object() for _ in range(4)]
    shapes = []
    for keys in ((0, 1), (0, 2), (1, 2), (0, 1, 3)):
        noted = Noted(whole_steps=True)
        found = reducer(noted).reduce(ones(*keys), sources)
        assert {key: value[0] for key, value in found.items()} == {key: 2 * (key + 1) for key in keys}
        shapes.append(tuple(noted.shapes))
    assert shapes[0] == ((2,), (2,))
    assert len(set(shapes)) == len(shapes)


def test_groups_of_a_step_wait_until_the_first_has_shown_that_ranks_have_the_same_gradients() -> None:
    shapes = []
    for keys in ((0, 1), (0, 1, 2), (0, 2)):
        noted = Noted(whole_steps=True, failing=("p",))
        with pytest.raises(HorovodInternalError):
            reducer(noted, num_groups=3).reduce(ones(*keys))
        assert noted.sent == [("p", 0)]
        shapes.append(tuple(noted.shapes))
    assert len(set(shapes)) == len(shapes)


def test_groups_in_another_order_differ_in_the_first_operation() -> None:
    sources = [object() for _ in range(3)]
    shapes = []
    for in_order in (sources, sources[::-1]):
        noted = Noted(whole_steps=True, failing=("p",))
        with pytest.raises(HorovodInternalError):
            reducer(noted, groups=[sources[:1]]).reduce(ones(0, 1, 2), in_order)
        shapes.append(tuple(noted.shapes))
    assert shapes[0] != shapes[1]


def test_the_first_error_is_raised_and_the_others_are_waited_for() -> None:
    noted = Noted(failing=("p.1", "p.2"))
    mine = reducer(noted)
    with pytest.raises(HorovodInternalError, match=r"p\.1"):
        mine.reduce(ones(0, 1, 2, 3))
    assert noted.waited == ["p.0", "p.1", "p.2", "p.3"]
    assert not mine.finish(), "something was left behind"


def test_what_was_started_is_waited_for_where_the_next_cannot_be() -> None:
    noted = Noted(failing=("start of p.1",))
    with pytest.raises(InvalidArgumentError, match=r"p\.1"):
        reducer(noted).reduce(ones(0, 1, 2))
    assert noted.waited == ["p.0"]


def test_nothing_is_sent_if_a_compressor_fails() -> None:
    class Failing:
        @staticmethod
        def compress(tensor: Any) -> tuple[Any, Any]:
            if tensor[0] == 2:
                raise ArithmeticError("no")
            return tensor, None

        @staticmethod
        def decompress(tensor: Any, context: Any) -> Any:
            return tensor

    noted = Noted()
    with pytest.raises(ArithmeticError):
        reducer(noted, compression=Failing).reduce(ones(0, 1))
    assert not noted.sent


def test_local_gradients_are_not_sent_and_are_divided_where_others_are_averaged() -> None:
    for op, scale_local, expected in (
        (ReduceOp.Average, True, 1),
        (ReduceOp.Average, False, 2),
        (ReduceOp.Sum, True, 2),
    ):
        noted = Noted()
        mine = reducer(noted, op=op, scale_local_gradients=scale_local)
        mine.keep_local(1)
        assert mine.reduce(ones(0, 1))[1][0] == expected
        assert [name for name, _ in noted.sent] == ["p.0"]


def test_a_rank_outside_of_the_process_set_keeps_its_gradients() -> None:
    noted = Noted()
    mine = reducer(noted, process_set=Pair(included=False))
    mine.keep_local(1)
    given = ones(0, 1)
    assert mine.reduce(given) == given
    assert not noted.sent


def test_sparse_gradients_go_together_unless_they_become_dense() -> None:
    gradients = {**ones(0), 1: Sparse(np.ones(2)), 2: Sparse(np.ones(2))}
    noted = Noted()
    found = reducer(noted).reduce(gradients)
    assert [name for name, _ in noted.sent] == ["p.0", "p.sparse.1.2"]
    assert isinstance(found[1], Sparse)
    noted = Noted()
    found = reducer(noted, sparse_as_dense=True).reduce(gradients)
    assert [name for name, _ in noted.sent] == ["p.0", "p.1", "p.2"]
    np.testing.assert_array_equal(found[2], [2, 2])


def test_factors_and_the_reduction_go_with_every_operation() -> None:
    noted, members = Noted(), Pair()
    reducer(noted, gradient_predivide_factor=4.0, process_set=members).reduce(ones(0))
    expected = {
        "op": ReduceOp.Average,
        "prescale_factor": 0.25,
        "postscale_factor": 4.0,
        "process_set": members,
    }
    assert noted.requests == [expected]


def test_local_layers_are_layers() -> None:
    with pytest.raises(InvalidArgumentError, match=r"found int; variables go to register_local_var\(\)"):
        keras_layers([3], "register_local_var()")
    assert keras_layers(None, "") == []


class Rest(KeyedCompressor):
    """Sends halves and keeps the other halves."""

    def compress(self, tensor: Any, key: str) -> tuple[Any, Any]:
        wanted = tensor + self.state.get(key, lambda: np.zeros_like(tensor))
        self.state.set(key, wanted / 2)
        return wanted / 2, None

    def decompress(self, tensor: Any, context: Any, key: str) -> Any:
        return tensor


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The current world, whose generation a test can change."""
    placement = SimpleNamespace(generation=1)
    current = SimpleNamespace(world=lambda: SimpleNamespace(placement=placement))
    monkeypatch.setattr("polyhvd.training.reducer.current", current)
    return placement


def test_state_is_dropped_in_another_world(world: SimpleNamespace) -> None:
    compressor = Rest()
    mine = reducer(Noted(), compression=compressor)
    mine.reduce(ones(1))
    mine.reduce(ones(1))
    assert compressor.state_dict()["p.1"][0] == 1.5
    world.generation = 2
    mine.reduce(ones(1))
    assert compressor.state_dict()["p.1"][0] == 1.0


def test_a_variable_has_the_same_key_wherever_it_stands_in_a_step(world: SimpleNamespace) -> None:
    first, second, third = (object() for _ in range(3))
    compressor = Rest()
    mine = reducer(Noted(whole_steps=True), compression=compressor)
    mine.reduce({1: np.full(2, 4.0)}, [first, second])  # there is no gradient of the first
    mine.reduce({0: np.full(2, 4.0), 1: np.full(2, 8.0)}, [second, third], prefix="another")
    assert {key: rest[0] for key, rest in compressor.state_dict().items()} == {"p.1": 3.0, "p.2": 4.0}


def test_sparse_gradients_are_sent_as_they_are_by_a_compressor_with_state(world: SimpleNamespace) -> None:
    compressor = Rest()
    found = reducer(Noted(), compression=compressor).reduce({0: Sparse(np.ones(2))})
    np.testing.assert_array_equal(found[0].array, [2, 2])
    assert not compressor.state_dict()


def test_a_tape_takes_an_instance_and_several_tapes_the_same_one(world: SimpleNamespace) -> None:
    compressor = Rest()
    options = Options(compression=compressor, process_set=Pair())
    tapes = [
        GradientReducer(Noted(), prefix="tape", options=options, shares_compressor=True) for _ in range(2)
    ]
    for tape in tapes:
        tape.reduce(ones(1))
    assert compressor.state_dict()["tape.1"][0] == 1.5
    with pytest.raises(InvalidArgumentError, match="lost with the tape; pass an instance"):
        GradientReducer(Noted(), prefix="tape", options=Options(compression=Rest), shares_compressor=True)
