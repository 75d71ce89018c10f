"""What a tf.function raises, and which of polyhvd's errors that is."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import polyhvd.tensorflow as hvd
import pytest
import tensorflow as tf
from polyhvd.tensorflow import errors
from polyhvd.tensorflow.errors import as_polyhvd

import polyhvd
from polyhvd import errors as core_errors

pytestmark = pytest.mark.ranks(4, framework="tensorflow", timeout_s=400)


tf.get_logger().setLevel("ERROR")
RANK, SIZE = hvd.rank(), hvd.size()


def step(name: str) -> Callable[[], Any]:
    """A call of a graph in a graph, with two collectives that may both fail."""
    inner = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum, name=f"{name}.inner"))
    outer = tf.function(lambda x: inner(x) + hvd.allreduce(x, op=hvd.Sum, name=f"{name}.outer"))
    return lambda: outer(tf.constant(1.0))


def raised(call: Callable[[], Any]) -> BaseException:
    try:
        result = call()
    except Exception as error:
        return error
    raise AssertionError(f"nothing was raised; the result is {result}")


def expect(error: BaseException, in_graph: Any, expected: Any) -> None:
    """TensorFlow's class, and that of which :func:`as_polyhvd` says it is; both differ for no two errors."""
    assert type(error) is in_graph, repr(error)
    translated = as_polyhvd(error)
    assert type(translated) is expected, repr(translated)
    assert isinstance(translated, in_graph)
    assert translated.__cause__ is error
    assert "{{" not in str(translated), str(translated)
    assert as_polyhvd(translated) is translated


def test_a_disagreement_is_told() -> None:
    hvd.init()
    shape = [1 + RANK % 2]
    call = tf.function(lambda: hvd.allreduce(tf.ones(shape), name="shapes"))
    error = raised(call)
    expect(error, tf.errors.FailedPreconditionError, errors.FailedPreconditionError)
    assert isinstance(as_polyhvd(error), hvd.RankMismatchError)


def test_a_shutdown_is_told() -> None:
    lonely = tf.function(lambda: hvd.allreduce(tf.ones(1), name=f"lonely.{RANK}"))
    found: list[BaseException] = []
    waiting = threading.Thread(target=lambda: found.append(raised(lonely)))
    hvd.barrier()
    if RANK == SIZE - 1:
        waiting.start()
        while polyhvd.counters()["pending"] == 0:
            time.sleep(0.001)
    else:
        assert isinstance(as_polyhvd(raised(step("departed"))), hvd.PeerDepartedError)
    hvd.shutdown()
    if RANK == SIZE - 1:
        waiting.join(60)
        expect(found[0], tf.errors.AbortedError, errors.ShutdownError)
    hvd.init()


def test_a_departure_is_told() -> None:
    hvd.barrier()
    call = tf.function(lambda: hvd.allreduce(tf.ones(1), name="departed"))
    assert float(call()[0]) == 1
    hvd.barrier()
    if RANK < SIZE - 1:
        expect(raised(call), tf.errors.AbortedError, errors.PeerDepartedError)
        expect(raised(step("departed")), tf.errors.AbortedError, errors.PeerDepartedError)
    hvd.shutdown()
    expect(raised(call), tf.errors.FailedPreconditionError, errors.NotInitializedError)


@pytest.mark.ranks(initialized=False)
def test_a_transfer_that_takes_too_long_is_told() -> None:
    os.environ.update(
        POLYHVD_STALL_CHECK_TIME_SECONDS="1", POLYHVD_STALL_SHUTDOWN_TIME_SECONDS="2"
    )  # which init() reads
    hvd.init()
    if RANK == 0:
        expect(raised(step("stalled")), tf.errors.DeadlineExceededError, errors.TransferTimeoutError)
    else:
        eager = raised(lambda: hvd.allreduce(tf.ones(1), name="another"))
        assert type(eager) is errors.TransferTimeoutError, repr(eager)
    hvd.shutdown()
    for name in ("POLYHVD_STALL_CHECK_TIME_SECONDS", "POLYHVD_STALL_SHUTDOWN_TIME_SECONDS"):
        del os.environ[name]


def test_what_is_none_of_ours_stays() -> None:
    parse = tf.function(tf.strings.to_number)
    error = raised(lambda: parse(tf.constant("no number")))
    assert isinstance(error, tf.errors.InvalidArgumentError)
    assert as_polyhvd(error) is error
    other = ValueError("PeerLostError: ")
    assert as_polyhvd(other) is other


def lose_a_rank() -> None:
    hvd.barrier()
    if RANK == SIZE - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    expect(raised(step("lost")), tf.errors.AbortedError, errors.PeerLostError)


def test_every_class_of_the_core_has_one_of_tensorflow() -> None:
    mapped = errors._FROM_CORE
    assert set(core_errors.by_code().values()) | {core_errors.NotInitializedError} == set(mapped)
    for core, both in mapped.items():
        assert issubclass(both, core)
        assert set(both.__bases__) & set(errors._FROM_KERNEL), both
