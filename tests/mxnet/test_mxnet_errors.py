"""What goes wrong: bad calls at once, disagreement at the next read and in synchronize()."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.ranks(framework="mxnet", timeout_s=180)


@pytest.mark.ranks(1, initialized=False)
def test_a_call_before_init(hvd, mx, np):
    x = mx.nd.ones(3)
    calls = (lambda: hvd.allreduce(x), lambda: hvd.allgather(x), lambda: hvd.broadcast_(x, 0), hvd.rank)
    for call in calls:
        with pytest.raises(ValueError, match=r"has not been initialized; use hvd.init\(\)"):
            call()


@pytest.mark.ranks(2)
def test_bad_calls_raise_at_once_and_name_the_operation(hvd, mx, np):
    hvd.init()
    x = mx.nd.ones(3)
    sparse = mx.nd.sparse.row_sparse_array((np.ones((1, 2)), [0]), shape=(3, 2))
    with mx.util.np_shape(True):
        scalar = mx.np.array(1.0)
    fixed = mx.nd.ones(3)
    fixed.writable = False
    cases = (
        ("sparse", lambda: hvd.allgather(sparse, name="mine")),
        ("sparse", lambda: hvd.grouped_allreduce([x, sparse], name="mine")),
        ("scalar", lambda: hvd.allgather(scalar, name="mine")),
        ("read-only", lambda: hvd.allreduce_(fixed, name="mine")),
        ("average of bool", lambda: hvd.allreduce(mx.np.array([True], dtype="bool"), name="mine")),
        ("root rank 7", lambda: hvd.broadcast(x, 7, name="mine")),
        ("root rank -1", lambda: hvd.broadcast_(x, -1, name="mine")),
        ("no array", lambda: hvd.grouped_allreduce([], name="mine")),
    )
    for what, call in cases:
        with pytest.raises(hvd.InvalidArgumentError) as caught:
            call()
        assert what in str(caught.value)
        assert "mine" in str(caught.value)
    with pytest.raises(TypeError, match="expected an MXNet array, found ndarray"):
        hvd.allreduce(np.ones(3))
    with pytest.raises(TypeError, match="'mine': expected an MXNet array, found list"):
        hvd.allreduce_([1.0], name="mine")
    with pytest.raises(TypeError, match="float"):
        hvd.allreduce_(x, name="mine", priority=1.5)
    hvd.allreduce_(x, name="mine", priority=np.int64(-(2**40)))  # as low as MXNet counts
    with pytest.raises(ValueError, match="exclude each other"):
        hvd.allreduce(x, average=True, op=hvd.Sum)
    with pytest.raises(ValueError, match="not registered"):
        hvd.allreduce(x, process_set=hvd.ProcessSet([0]))
    assert hvd.allreduce(x, name="mine").asnumpy().tolist() == [1.0] * 3  # the job goes on


@pytest.mark.ranks(2)
def test_disagreement_shows_at_the_next_read_on_every_rank(hvd, mx, np):
    hvd.init()
    rank = hvd.rank()
    calls = {
        "shape": lambda: hvd.allreduce(mx.nd.ones(3 + rank), name="w"),
        "data types": lambda: hvd.allreduce_(mx.nd.ones(3, dtype=("float32", "float16")[rank]), name="w"),
        "root": lambda: hvd.broadcast(mx.nd.ones(3), rank, name="w"),
        "reduction": lambda: hvd.allreduce(mx.nd.ones(3), name="w", op=(hvd.Sum, hvd.Max)[rank]),
        "tensor": lambda: hvd.allgather(mx.nd.ones((2, 3 + rank)), name="w"),  # which waits for sizes
    }
    for what, call in calls.items():
        read = call if what == "tensor" else call().asnumpy
        with pytest.raises(mx.base.MXNetError) as caught:
            read()
        text = str(caught.value)
        assert what in text.lower(), text
        for part in ("'w'", "rank 0", "rank 1", "test_mxnet_errors.py:"):
            assert part in text, text
        # The same name serves again, on all ranks.
        assert hvd.allreduce(mx.nd.ones(2), name="w").asnumpy().tolist() == [1.0, 1.0]


@pytest.mark.ranks(2)
def test_synchronize_raises_each_time(hvd, mx, np):
    hvd.init()
    handle = hvd.allreduce_async(mx.nd.ones(3 + hvd.rank()), name="w")
    for _ in range(2):
        with pytest.raises(hvd.RankMismatchError, match="Mismatched") as caught:
            hvd.synchronize(handle)
        assert isinstance(caught.value, mx.base.MXNetError)
    assert hvd.poll(handle)
    # An operation on an array that holds an error is skipped, and has that error.
    x = mx.nd.ones(3 + hvd.rank())
    hvd.allreduce_(x, name="v")
    skipped = hvd.allreduce_async_(x, name="after")
    for _ in range(2):
        with pytest.raises(mx.base.MXNetError, match="'v'"):
            hvd.synchronize(skipped)
    assert hvd.poll(skipped)
    assert hvd.allreduce(mx.nd.ones(2), name="after").asnumpy().tolist() == [1.0, 1.0]


@pytest.mark.ranks(2)
def test_an_error_of_an_operator_passes_through_a_collective(hvd, mx, np):
    hvd.init()
    x = mx.nd.random.normal(0, -1, (2, 2))  # fails in the engine
    handle = hvd.allreduce_async(x, name="x")
    with pytest.raises(mx.base.MXNetError):
        hvd.synchronize(handle)
    assert hvd.poll(handle)
    assert hvd.allreduce(mx.nd.ones(2), name="x").asnumpy().tolist() == [1.0, 1.0]
    x = mx.nd.random.normal(0, -1, (2, 2))
    with pytest.raises(mx.base.MXNetError, match="scale parameter"):  # by the call, which waits for sizes
        hvd.allgather(x, name="x")
    for i in range(8):  # the error is gone from all that the operator has used
        assert hvd.allgather(mx.nd.ones(2) * i, name="x").asnumpy().tolist() == [i] * 4


@pytest.mark.ranks(2)
def test_a_rank_that_leaves_fails_what_waits_for_it(hvd, mx, np):
    hvd.init()
    x = mx.nd.ones(4)
    hvd.allreduce(x).asnumpy()
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(x, name="alone")
        with pytest.raises(hvd.HorovodInternalError, match="rank 1"):
            hvd.synchronize(handle)
        with pytest.raises(mx.base.MXNetError, match="rank 1"):
            hvd.allreduce(x, name="later").asnumpy()
    else:
        hvd.shutdown()
