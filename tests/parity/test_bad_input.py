"""Bad calls: the ranks disagree, or one of them asks for what cannot be. The job goes on after each."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import drivers
import numpy as np
import oracle
import pytest
from drivers import Driver
from worlds import Ranks

from polyhvd.collectives.adapter import Capability

pytestmark = pytest.mark.sizes(2, 3)

_SIDE = re.compile(r"ranks? ([\d, -]+) sent (.*?) \(([\w./-]+\.py:\d+)\)")


def _assert_usable(driver: Driver) -> None:
    hvd = driver.hvd
    ones = driver.from_numpy(np.ones(3, np.float32))
    result = driver.call(lambda x: hvd.allreduce(x, name="usable", op=hvd.Sum), ones)
    oracle.check("afterwards", driver.to_numpy(result), np.full(3, hvd.size(), np.float32))


def _error_of(driver: Driver, call: Callable[..., Any], *tensors: Any) -> Exception:
    """What a call raises, at once or where its result is read."""
    try:
        result = driver.to_numpy(driver.call(call, *tensors))
    except Exception as error:
        return error
    raise AssertionError(f"returned {result!r}")


def _disagreements(driver: Driver) -> dict[str, tuple[Callable[..., Any], Callable[..., Any], str]]:
    """Calls of most ranks and of the odd one, each on its own line, and what the message names."""
    hvd = driver.hvd
    return {
        "shape": (
            lambda x: hvd.allreduce(x["4"], name="bad shape"),
            lambda x: hvd.allreduce(x["2x2"], name="bad shape"),
            "[2, 2]",
        ),
        "dtype": (
            lambda x: hvd.allreduce(x["4"], name="bad dtype"),
            lambda x: hvd.allreduce(x["4 ints"], name="bad dtype"),
            "int32",
        ),
        "op": (
            lambda x: hvd.allreduce(x["4"], name="bad op", op=hvd.Sum),
            lambda x: hvd.allreduce(x["4"], name="bad op", op=hvd.Max),
            "Max",
        ),
        "scale": (
            lambda x: hvd.allreduce(x["4"], name="bad scale", op=hvd.Sum),
            lambda x: hvd.allreduce(x["4"], name="bad scale", op=hvd.Sum, prescale_factor=0.5),
            "0.5",
        ),
        "root": (
            lambda x: hvd.broadcast(x["4"], 0, name="bad root"),
            lambda x: hvd.broadcast(x["4"], 1, name="bad root"),
            "root rank 1",
        ),
        "broadcast shape": (
            lambda x: hvd.broadcast(x["4"], 0, name="bad broadcast"),
            lambda x: hvd.broadcast(x["2x2"], 0, name="bad broadcast"),
            "[2, 2]",
        ),
        "kind": (
            lambda x: hvd.allreduce(x["4"], name="bad kind"),
            lambda x: hvd.broadcast(x["4"], 0, name="bad kind"),
            "broadcast",
        ),
        "columns": (
            lambda x: hvd.allgather(x["2x2"], name="bad columns"),
            lambda x: hvd.allgather(x["2x3"], name="bad columns"),
            "3]",
        ),
        "dimensions": (
            lambda x: hvd.allgather(x["2x2"], name="bad dimensions"),
            lambda x: hvd.allgather(x["4"], name="bad dimensions"),
            "[4]",
        ),
        "exchange": (
            lambda x: hvd.alltoall(x["4x2"], splits=[1] * hvd.size(), name="bad exchange")[0],
            lambda x: hvd.alltoall(x["4x3"], splits=[1] * hvd.size(), name="bad exchange")[0],
            "[*, 3]",
        ),
        "scatter": (
            lambda x: hvd.reducescatter(x["4x2"], name="bad scatter"),
            lambda x: hvd.reducescatter(x["4x3"], name="bad scatter"),
            "[4, 3]",
        ),
        "scatter op": (
            lambda x: hvd.reducescatter(x["4"], name="bad scatter op", op=hvd.Sum),
            lambda x: hvd.reducescatter(x["4"], name="bad scatter op", op=hvd.Max),
            "Max",
        ),
        "group": (
            lambda x: hvd.grouped_allreduce([x["4"], x["2x2"]], name="bad group")[0],
            lambda x: hvd.grouped_allreduce([x["4"], x["2x3"]], name="bad group")[0],
            "[2, 3]",
        ),
        "group dtype": (
            lambda x: hvd.grouped_allreduce([x["4"], x["4"]], name="bad group dtype", op=hvd.Sum)[0],
            lambda x: hvd.grouped_allreduce([x["4"], x["4 ints"]], name="bad group dtype", op=hvd.Sum)[0],
            "int32 [4]",
        ),
    }


_TENSORS = {
    "4": np.ones(4, np.float32),
    "4 ints": np.ones(4, np.int32),
    "2x2": np.ones((2, 2), np.float32),
    "2x3": np.ones((2, 3), np.float32),
    "4x2": np.ones((4, 2), np.float32),
    "4x3": np.ones((4, 3), np.float32),
}


def disagree(name: str, what: str) -> tuple[str, str]:
    """The error's message, and where this rank made the call."""
    driver = drivers.get(name)
    odd = driver.hvd.rank() == driver.hvd.size() - 1
    usual_call, odd_call, _ = _disagreements(driver)[what]
    call = odd_call if odd else usual_call
    tensors = {key: driver.from_numpy(value) for key, value in _TENSORS.items()}
    error = _error_of(
        driver, lambda *values: call(dict(zip(tensors, values, strict=True))), *tensors.values()
    )
    assert isinstance(error, driver.error_type()), f"{type(error).__mro__}: {error}"
    driver.forget_errors()
    _assert_usable(driver)
    return str(error), f"test_bad_input.py:{call.__code__.co_firstlineno}"


def _ranks_in(text: str) -> list[int]:
    found = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        found += list(range(int(first), int(last or first) + 1))
    return found


_WHATS = ["shape", "dtype", "op", "scale", "root", "broadcast shape", "kind", "columns", "dimensions"]
_WHATS += ["exchange", "scatter", "scatter op", "group", "group dtype"]


@pytest.mark.parametrize("what", _WHATS)
def test_disagreement_raises_the_same_on_every_rank_and_names_every_side(ranks: Ranks, what: str) -> None:
    answers = ranks.run(disagree, what)
    for rank, (message, where) in enumerate(answers):
        sides = {r: (side, at) for group, side, at in _SIDE.findall(message) for r in _ranks_in(group)}
        assert sorted(sides) == list(range(ranks.size)), f"not every rank's side in: {message}"
        assert sides[rank][1] == where, f"rank {rank} called at {where}; the message: {message}"
        odd = {r for r, (side, _) in sides.items() if side == sides[ranks.size - 1][0]}
        assert odd == {ranks.size - 1}, f"the odd rank looks like others in: {message}"


def name_the_odd_side(name: str, what: str) -> tuple[str, str]:
    return disagree(name, what)[0], _disagreements(drivers.get(name))[what][2]


@pytest.mark.parametrize("what", _WHATS)
def test_disagreement_says_what_the_odd_rank_has_sent(ranks: Ranks, what: str) -> None:
    for message, wanted in ranks.run(name_the_odd_side, what):
        assert wanted in message
        assert f"'bad {what.removesuffix(' shape')}'" in message


def _is_rejected(driver: Driver, call: Callable[..., Any], *tensors: Any) -> str:
    """The message of a call that is wrong by itself."""
    error = _error_of(driver, call, *tensors)
    assert isinstance(error, driver.argument_errors()), f"{type(error).__mro__}: {error}"
    return str(error)


def use_bad_roots(name: str) -> None:
    driver = drivers.get(name)
    hvd = driver.hvd
    for root in (hvd.size(), -1, 1 << 20):
        tensor = driver.from_numpy(np.ones(4, np.float32))
        message = _is_rejected(
            driver, lambda x, root=root: hvd.broadcast(x, root, name="no such root"), tensor
        )
        assert str(root) in message, message
    _assert_usable(driver)


def test_a_root_that_does_not_exist_is_rejected(ranks: Ranks) -> None:
    ranks.run(use_bad_roots)


def use_bad_splits(name: str) -> None:
    driver = drivers.get(name)
    hvd = driver.hvd
    size = hvd.size()
    cases = {
        "more than the first dimension": [3] * size,
        "one for each": [1] * (size + 1),
        "from 0": [-1] + [1] * (size - 1),
    }
    for wanted, splits in cases.items():
        tensor = driver.from_numpy(np.ones((size + 1, 2), np.float32))
        message = _is_rejected(
            driver, lambda x, splits=splits: hvd.alltoall(x, splits=splits, name="bad splits")[0], tensor
        )
        assert wanted in message, message
    message = _is_rejected(driver, lambda x: hvd.alltoall(x, name="bad splits"), tensor)
    assert "be divided equally" in message, message
    for splits in ([0.5] * size, [[1] * size], 1.5):
        with pytest.raises((*driver.argument_errors(), TypeError)):
            driver.to_numpy(hvd.alltoall(tensor, splits=splits, name="bad splits")[0])
    _assert_usable(driver)


def test_splits_that_do_not_fit_are_rejected(ranks: Ranks) -> None:
    ranks.run(use_bad_splits)


def use_bad_sets(name: str) -> None:
    hvd = drivers.get(name).hvd
    size = hvd.size()
    added = hvd.add_process_set([0])
    for ranks, wanted in (
        ([0], f"already is process set {added.process_set_id};"),
        ([size], "world"),
        (range(size), "already are process set 0;"),
    ):
        with pytest.raises(ValueError, match=wanted):
            hvd.add_process_set(list(ranks))
    with pytest.raises(hvd.RankMismatchError if hasattr(hvd, "RankMismatchError") else Exception) as caught:
        hvd.add_process_set([1] if hvd.rank() == 0 else [0, 1])
    assert "Mismatched process sets" in str(caught.value)
    assert "rank 0 sent ranks [1]" in str(caught.value)
    hvd.remove_process_set(added)
    with pytest.raises(ValueError, match="not registered"):
        hvd.barrier(process_set=added)
    _assert_usable(drivers.get(name))


def test_process_sets_that_cannot_be_are_rejected(ranks: Ranks) -> None:
    ranks.run(use_bad_sets)


def gather_scalars(name: str) -> None:
    driver = drivers.get(name)
    scalar = driver.from_numpy(np.array(1.0, np.float32))
    message = _is_rejected(driver, lambda x: driver.hvd.allgather(x, name="scalar"), scalar)
    assert "scalar" in message, message
    _assert_usable(driver)


def test_a_scalar_cannot_be_gathered(ranks: Ranks) -> None:
    ranks.needs(Capability.EMPTY)  # frameworks without have no scalars either
    ranks.run(gather_scalars)


def send_no_tensor(name: str) -> None:
    driver = drivers.get(name)
    hvd = driver.hvd
    for thing in (object(), None, "text"):
        for call in (hvd.allreduce, hvd.allgather, lambda x, name: hvd.broadcast(x, 0, name=name)):
            with pytest.raises((TypeError, ValueError)):
                call(thing, name="no tensor")
    _assert_usable(driver)


def test_what_is_no_tensor_is_rejected(ranks: Ranks) -> None:
    ranks.run(send_no_tensor)


def send_unsupported(name: str) -> None:
    driver = drivers.get(name)
    hvd = driver.hvd
    for tensor in driver.unsupported():
        for call in (hvd.allreduce, hvd.allgather, lambda x, name: hvd.broadcast(x, 0, name=name)):
            try:
                driver.to_numpy(call(tensor, name="unsupported"))
            except driver.argument_errors():
                continue
            raise AssertionError(f"{tensor!r} was accepted")
    _assert_usable(driver)


def test_an_element_type_that_is_not_supported_is_rejected(ranks: Ranks) -> None:
    ranks.run(send_unsupported)


def submit_twice(name: str) -> None:
    driver = drivers.get(name)
    hvd = driver.hvd
    tensor, other = (driver.from_numpy(np.ones(4, np.float32)) for _ in range(2))
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(tensor, name="twice", op=hvd.Sum)
        with pytest.raises(ValueError, match="in flight"):
            hvd.allreduce_async(other, name="twice", op=hvd.Sum)
        hvd.barrier()
    else:
        hvd.barrier()  # so that the first operation of rank 0 has to wait
        handle = hvd.allreduce_async(tensor, name="twice", op=hvd.Sum)
    result = driver.to_numpy(hvd.synchronize(handle))
    oracle.check("the first one", result, np.full(4, hvd.size(), np.float32))
    _assert_usable(driver)


@pytest.mark.drivers("numpy", "torch")  # engines of the others keep calls of one name in order
def test_a_name_that_is_in_flight_is_rejected(ranks: Ranks) -> None:
    ranks.run(submit_twice)


def call_without_init(name: str) -> None:
    driver = drivers.get(name)
    hvd = driver.hvd
    tensor = driver.from_numpy(np.ones(4, np.float32))
    hvd.shutdown()
    calls = [
        lambda: hvd.allreduce(tensor, name="early"),
        lambda: hvd.allgather(tensor, name="early"),
        lambda: hvd.broadcast(tensor, 0, name="early"),
        lambda: hvd.broadcast_object(1, 0),
        lambda: hvd.allgather_object(1),
        hvd.barrier,
        hvd.rank,
        hvd.size,
        hvd.local_rank,
        hvd.local_size,
        hvd.counters,
    ]
    try:
        for call in calls:
            with pytest.raises(ValueError, match=r"has not been initialized; use hvd\.init\(\)"):
                call()
    finally:
        hvd.init()
    _assert_usable(driver)


def test_a_call_before_init_says_so(ranks: Ranks) -> None:
    ranks.run(call_without_init)


def pass_bad_ops(name: str) -> None:
    driver = drivers.get(name)
    hvd = driver.hvd
    tensor = driver.from_numpy(np.ones(4, np.float32))
    with pytest.raises(ValueError, match="op"):
        hvd.allreduce(tensor, name="bad op", op=17)
    with pytest.raises(ValueError, match="op"):
        hvd.allreduce(tensor, name="bad op", op=hvd.Sum, average=True)
    _assert_usable(driver)


def test_an_op_that_does_not_exist_is_rejected(ranks: Ranks) -> None:
    ranks.run(pass_bad_ops)


def catch_bad_calls(name: str) -> None:
    """As scripts for Horovod do, which meet one class or the other there."""
    driver = drivers.get(name)
    hvd = driver.hvd
    tensor = driver.from_numpy(np.ones(4, np.float32))
    scalar = driver.from_numpy(np.ones((), np.float32))
    calls = [
        lambda: hvd.allreduce(tensor, name="bad", op=17),
        lambda: hvd.broadcast(tensor, hvd.size(), name="bad"),
        lambda: hvd.allgather(scalar, name="bad"),
        lambda: hvd.allreduce(tensor, name="bad", process_set=hvd.ProcessSet([0])),
    ]
    for call in calls:
        for kind in (ValueError, RuntimeError, hvd.InvalidArgumentError):
            with pytest.raises(kind):
                driver.to_numpy(call())
    _assert_usable(driver)


def test_a_bad_call_is_a_value_error_and_a_runtime_error(ranks: Ranks) -> None:
    ranks.run(catch_bad_calls)


def reuse_memory_in_flight(name: str) -> None:
    driver = drivers.get(name)
    hvd = driver.hvd
    tensor = driver.from_numpy(np.ones(4, np.float32))
    if hvd.rank() == 0:
        handle = hvd.allreduce_async_(tensor, name="memory", op=hvd.Sum)
        with pytest.raises(ValueError, match="overlaps"):
            hvd.allreduce_async_(tensor, name="the same memory", op=hvd.Sum)
        hvd.barrier()
    else:
        hvd.barrier()
        handle = hvd.allreduce_async_(tensor, name="memory", op=hvd.Sum)
    oracle.check("memory", driver.to_numpy(hvd.synchronize(handle)), np.full(4, hvd.size(), np.float32))
    _assert_usable(driver)


@pytest.mark.drivers("numpy", "torch")
def test_an_output_that_overlaps_one_in_flight_is_rejected(ranks: Ranks) -> None:
    ranks.run(reuse_memory_in_flight)


def overwrite_read_only(name: str) -> None:
    driver = drivers.get(name)
    tensor = driver.from_numpy(np.ones(4, np.float32))
    tensor.flags.writeable = False
    for call in (driver.hvd.allreduce_, lambda x: driver.hvd.broadcast_(x, 0)):
        with pytest.raises(ValueError, match="read-only"):
            call(tensor)
    _assert_usable(driver)


@pytest.mark.drivers("numpy")
def test_a_read_only_array_cannot_be_reduced_in_place(ranks: Ranks) -> None:
    ranks.run(overwrite_read_only)


def disagree_under_a_name_with_controls(name: str) -> None:
    driver = drivers.get(name)
    hvd, root = driver.hvd, int(driver.hvd.rank() == 0)
    tensor = driver.from_numpy(np.ones(4, np.float32))
    error = _error_of(driver, lambda x: hvd.broadcast(x, root, name="a\x1b[31m\x9bb\u00e9"), tensor)
    assert r"a\x1b[31m\x9bb\u00e9" in str(error).replace("\u00e9", r"\u00e9"), repr(error)
    assert not set("\x1b\x9b") & set(str(error)), repr(error)
    _assert_usable(driver)


def test_names_in_errors_have_no_escape_sequences(ranks: Ranks) -> None:
    ranks.run(disagree_under_a_name_with_controls)
