"""MXNet's engine orders collectives with everything else that touches their arrays."""

from __future__ import annotations

import threading
import time

import pytest
from depth import repeats  # tests/harness, on the path by tests/conftest.py

pytestmark = pytest.mark.ranks(framework="mxnet", timeout_s=180)


def slow_ones(mx, shape):
    """Ones that take the engine a while to compute: powers of two, which no order of adding rounds."""
    a = mx.nd.ones((512, 512)) / 512
    for _ in range(12):
        a = mx.nd.dot(a, a)
    return mx.nd.broadcast_to(a[0, 0:1] * 512, shape)


@pytest.mark.ranks(2)
def test_reads_and_writes_around_a_collective_keep_program_order(hvd, mx, np):
    hvd.init()
    rank = hvd.rank()
    for _ in range(repeats(6, 20)):
        x = slow_ones(mx, (64,)) * (rank + 1) if rank == 0 else mx.nd.ones(64) * (rank + 1)
        y = hvd.allreduce(x, op=hvd.Sum)  # reads x ...
        x[:] = 100  # ... before this write
        z = y + 1  # waits for y
        hvd.allreduce_(y, op=hvd.Sum)  # after the read for z
        y *= 2
        np.testing.assert_allclose(x.asnumpy(), np.full(64, 100.0))
        np.testing.assert_allclose(z.asnumpy(), np.full(64, 4.0))
        np.testing.assert_allclose(y.asnumpy(), np.full(64, 12.0))


@pytest.mark.ranks(2)
def test_gradients_are_reduced_after_backward(hvd, mx, np):
    hvd.init()
    w = mx.nd.array([1.0, 2.0]) * (hvd.rank() + 1)
    w.attach_grad()
    with mx.autograd.record():
        loss = (w * w * 3).sum()
    loss.backward()
    hvd.allreduce_(w.grad)
    w -= w.grad
    np.testing.assert_allclose(w.asnumpy(), np.array([1.0, 2.0]) * (hvd.rank() + 1 - 9))


@pytest.mark.ranks(2)
def test_operations_of_one_name_meet_in_program_order(hvd, mx, np):
    hvd.init()
    for _ in range(repeats(4, 10)):
        # The first is late on rank 0, the second on rank 1: engines reach them in other orders.
        first = slow_ones(mx, (8,)) if hvd.rank() == 0 else mx.nd.ones(8)
        second = slow_ones(mx, (8,)) * 10 if hvd.rank() == 1 else mx.nd.ones(8) * 10
        a = hvd.allreduce(first, name="same", op=hvd.Sum)
        b = hvd.allreduce(second, name="same", op=hvd.Sum)
        np.testing.assert_allclose(a.asnumpy(), np.full(8, 2.0))
        np.testing.assert_allclose(b.asnumpy(), np.full(8, 20.0))


@pytest.mark.ranks(2)
def test_a_handle_that_is_done_waits_for_no_later_operation(hvd, mx, np):
    hvd.init()
    x, y = mx.nd.ones(4), mx.nd.ones(4)
    first = hvd.allreduce_async_(x, name="first", op=hvd.Sum)
    if hvd.rank() == 0:
        while not hvd.poll(first):
            time.sleep(0.001)
        second = hvd.allreduce_async_(x, name="second", op=hvd.Sum)
        assert hvd.synchronize(first) is x  # rank 1 has not started the second, and waits for the other
        hvd.allreduce_(y, name="other").wait_to_read()
    else:
        hvd.synchronize(first)
        hvd.allreduce_(y, name="other").wait_to_read()
        second = hvd.allreduce_async_(x, name="second", op=hvd.Sum)
    assert hvd.synchronize(second).asnumpy().tolist() == [4.0] * 4


@pytest.mark.ranks(2)
def test_any_number_of_unnamed_calls_may_be_in_flight(hvd, mx, np):
    hvd.init()
    first = slow_ones(mx, (4,)) if hvd.rank() == 0 else mx.nd.ones(4)
    results = [hvd.allreduce(first, op=hvd.Sum)]
    count = 1000  # all at once
    for i in range(1, count):
        results.append(hvd.allreduce(mx.nd.ones(4) * i * (hvd.rank() + 1), op=hvd.Sum))
    np.testing.assert_allclose(results[0].asnumpy(), np.full(4, 2.0))
    for i in range(1, count):
        assert results[i].asnumpy().tolist() == [3.0 * i] * 4
    # From its second step on, all calls of a regular program are known.
    hits = 0
    for step in range(21):
        for n in (2, 3, 4):
            hvd.allreduce(mx.nd.ones(n))
        if step == 0:
            mx.nd.waitall()
            hvd.barrier()
            hits = hvd.counters()["cache_hits"]
    mx.nd.waitall()
    assert hvd.counters()["cache_hits"] - hits == 60


@pytest.mark.ranks(2)
def test_calls_return_before_the_other_ranks_come(hvd, mx, np, tmp_path):
    hvd.init()
    flag = tmp_path / "rank 0 has called"
    x = mx.nd.ones(4) * hvd.rank()
    if hvd.rank() == 0:
        y = hvd.allreduce(x)
        handle = hvd.broadcast_async_(x, 0)
        assert not hvd.poll(handle)
        other = mx.nd.ones(3) + 1  # MXNet's engine is free for other work
        assert other.asnumpy().tolist() == [2.0] * 3
        flag.touch()
    else:
        while not flag.exists():
            time.sleep(0.01)
        y = hvd.allreduce(x)
        handle = hvd.broadcast_async_(x, 0)
    assert y.asnumpy().tolist() == [0.5] * 4
    assert hvd.synchronize(handle) is x
    assert hvd.poll(handle)
    assert hvd.synchronize(handle) is x
    assert x.asnumpy().tolist() == [0.0] * 4


@pytest.mark.ranks(2)
def test_named_calls_in_any_order_and_more_than_engine_threads(hvd, mx, np):
    hvd.init()
    order = range(200) if hvd.rank() == 0 else reversed(range(200))
    arrays = [mx.nd.ones(16) * (i + hvd.rank()) for i in range(200)]
    for i in order:
        hvd.allreduce_(arrays[i], name=f"array{i}", priority=i if hvd.rank() else -i)
    for i, x in enumerate(arrays):
        assert x.asnumpy().tolist() == [i + 0.5] * 16


@pytest.mark.ranks(2)
def test_arrays_and_handles_that_are_dropped_live_until_done(hvd, mx, np):
    hvd.init()
    for _ in range(repeats(10, 30)):
        x = slow_ones(mx, (20000,)) * hvd.rank()
        hvd.allreduce_(x)
        y = hvd.allreduce(x, op=hvd.Sum)
        hvd.allgather(x[:10])
        hvd.allreduce_async(x)
        del x
        junk = [mx.nd.ones(20000) * -1 for _ in range(5)]  # would take the memory
        np.testing.assert_allclose(y.asnumpy(), np.full(20000, 1.0))
        del y, junk
    mx.nd.waitall()


@pytest.mark.ranks(2)
def test_calls_from_several_python_threads(hvd, mx, np):
    hvd.init()
    failures = []

    def work(number):
        try:
            for i in range(50):
                x = mx.nd.ones(100) * (number + i + hvd.rank())
                got = hvd.allreduce(x, name=f"thread{number}", op=hvd.Sum).asnumpy()
                np.testing.assert_array_equal(got, np.full(100, 2.0 * (number + i) + 1))
        except Exception as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures, failures


@pytest.mark.ranks(2, env={"POLYHVD_SHUTDOWN_DRAIN_SECONDS": "0.2"})
def test_init_after_shutdown(hvd, mx, np):
    for i in range(5):
        hvd.init()
        x = mx.nd.ones(4) * hvd.rank()
        # These shift the names of a rank; with a new engine they begin again.
        alone = hvd.allreduce(x) if hvd.rank() == 0 else hvd.broadcast(x, 1, name="alone")
        hvd.shutdown()
        with pytest.raises(mx.base.MXNetError, match="shut down"):
            alone.wait_to_read()
        hvd.init()
        got = hvd.allreduce(mx.nd.ones(4) * (hvd.rank() + i), op=hvd.Sum)
        assert got.asnumpy().tolist() == [2.0 * i + 1] * 4
        hvd.barrier()
        hvd.shutdown()


@pytest.mark.ranks(2, env={"POLYHVD_SHUTDOWN_DRAIN_SECONDS": "0.2"})
def test_shutdown_fails_what_is_pending_and_leaves_mxnet_alive(hvd, mx, np):
    hvd.init()
    if hvd.rank() == 0:
        x = mx.nd.ones(4)
        handle = hvd.allreduce_async_(x)
        late = slow_ones(mx, (4,))
        hvd.allreduce_(late)  # reaches the engine of MXNet only after the shutdown
        time.sleep(0.05)
        hvd.shutdown()
        for read in (x.asnumpy, late.asnumpy):
            with pytest.raises(mx.base.MXNetError, match="shut down"):
                read()
        with pytest.raises(hvd.HorovodInternalError, match="shut down"):
            hvd.synchronize(handle)
        with pytest.raises(ValueError, match="init"):
            hvd.allreduce(x)
        assert (mx.nd.ones(2) + 1).asnumpy().tolist() == [2.0, 2.0]


@pytest.mark.ranks(2)
def test_shutdown_lets_what_mxnet_holds_finish(hvd, mx, np):
    hvd.init()
    late = slow_ones(mx, (4,)) * (hvd.rank() + 1)
    hvd.allreduce_(late, op=hvd.Sum)  # MXNet holds it for as long as it computes the array
    hvd.shutdown()
    assert late.asnumpy().tolist() == [3.0] * 4


@pytest.mark.ranks(2, fresh=True)
def test_a_process_ends_with_operations_pending(hvd, mx, np):
    hvd.init()
    hvd.allreduce(mx.nd.ones(4), name=f"of rank {hvd.rank()} alone")
    hvd.allreduce(slow_ones(mx, (4,)), name=f"late, of rank {hvd.rank()} alone")
