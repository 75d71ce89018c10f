"""Every collective on MXNet arrays against NumPy, with other data on each rank."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.ranks(framework="mxnet", timeout_s=180)


DTYPES = ("uint8", "int8", "int32", "int64", "float16", "float32", "float64")
SHAPES = ((), (1,), (7,), (0, 3), (3, 5), (2, 3, 129))


def data(np, rank, shape, dtype):
    """Values of a rank that are small, exact in every type, and differ between ranks and elements."""
    values = (np.arange(np.prod(shape, dtype=int)) * (rank + 2) + 3 * rank) % 5 + rank
    return values.reshape(shape).astype(dtype)


def reduced(np, op, hvd, shape, dtype):
    """What all ranks get, computed as the documentation says."""
    every = np.stack([data(np, r, shape, dtype).astype("float64") for r in range(hvd.size())])
    if op == hvd.Average:
        result = every.sum(0) / hvd.size()
        return (np.trunc(result) if np.dtype(dtype).kind in "iu" else result).astype(dtype)
    function = {hvd.Sum: np.sum, hvd.Min: np.min, hvd.Max: np.max, hvd.Product: np.prod}[op]
    return function(every, 0).astype(dtype)


def assert_equal(np, got, expected):
    """Element type, shape and values; halves may round once."""
    assert got.dtype == expected.dtype, (got.dtype, expected.dtype)
    assert got.shape == expected.shape, (got.shape, expected.shape)
    np.testing.assert_allclose(
        got.asnumpy().astype("float64"),
        expected.astype("float64"),
        rtol=1e-3 if got.dtype == "float16" else 1e-6,
    )


@pytest.mark.ranks(2, 3)
def test_allreduce_equals_numpy_for_every_dtype_shape_and_op(hvd, mx, np):
    hvd.init()
    for dtype in DTYPES:
        for shape in SHAPES:
            for op in (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product):
                mine = data(np, hvd.rank(), shape, dtype)
                x = mx.nd.empty(shape, dtype=dtype)
                if mine.size:
                    x[()] = mine
                expected = reduced(np, op, hvd, shape, dtype)
                if not mine.size:
                    assert hvd.allreduce(x, op=op).shape == shape
                    hvd.synchronize(hvd.allreduce_async_(x, op=op))
                    continue
                result = hvd.allreduce(x, op=op)
                assert_equal(np, result, expected)
                assert_equal(np, x, mine)
                assert hvd.allreduce_(x, op=op, name="x") is x
                assert_equal(np, x, expected)


@pytest.mark.ranks(2)
def test_bool_and_bfloat16(hvd, mx, np):
    hvd.init()
    mine = np.array([hvd.rank() == 0, True, False])
    x = mx.np.array(mine, dtype="bool")
    assert hvd.allreduce(x, op=hvd.Min).asnumpy().tolist() == [False, True, False]
    assert hvd.allreduce(x, op=hvd.Max).asnumpy().tolist() == [True, True, False]
    assert hvd.allgather(x).asnumpy().tolist() == [True, True, False, False, True, False]
    assert hvd.broadcast(x, 1).asnumpy().tolist() == [False, True, False]
    bfloat16 = np.dtype([("bfloat16", np.uint16)])
    y = mx.nd.array([1.5, -2.0 * hvd.rank()]).astype(bfloat16)
    assert hvd.allreduce(y, op=hvd.Sum).astype("float32").asnumpy().tolist() == [3.0, -2.0]


@pytest.mark.ranks(2)
def test_factors_and_the_older_average_argument(hvd, mx, np):
    hvd.init()
    x = mx.nd.array([1.0, 2.0]) * (hvd.rank() + 1)
    got = hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
    np.testing.assert_allclose(got.asnumpy(), [4.5, 9.0])
    assert hvd.allreduce(x, average=False).asnumpy().tolist() == [3.0, 6.0]
    assert hvd.allreduce(x, True).asnumpy().tolist() == [1.5, 3.0]


@pytest.mark.ranks(2)
def test_grouped_allreduce(hvd, mx, np):
    hvd.init()
    rank = hvd.rank()
    arrays = [mx.nd.ones((i + 1, 3)) * (rank + i) for i in range(5)]
    expected = [np.full((i + 1, 3), 0.5 + i) for i in range(5)]
    results = hvd.grouped_allreduce(arrays)
    handle = hvd.grouped_allreduce_async(arrays, name="again")
    for got, want in zip(results, expected, strict=True):
        np.testing.assert_array_equal(got.asnumpy(), want)
    for got, want in zip(hvd.synchronize(handle), expected, strict=True):
        np.testing.assert_array_equal(got.asnumpy(), want)
    assert arrays[1].asnumpy()[0, 0] == rank + 1
    same = hvd.grouped_allreduce_(arrays, op=hvd.Sum)
    for x, got, want in zip(arrays, same, expected, strict=True):
        assert x is got
        np.testing.assert_array_equal(x.asnumpy(), 2 * want)
    halves = mx.nd.arange(8) * (rank + 1)
    hvd.grouped_allreduce_([halves[0:4], halves[4:8]], op=hvd.Sum)  # views of one memory
    assert halves.asnumpy().tolist() == [3.0 * i for i in range(8)]


@pytest.mark.ranks(3)
def test_allgather_of_rows_that_differ(hvd, mx, np):
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    for dtype in DTYPES:
        for tail in ((), (3,), (2, 5)):
            shapes = [(r * 2 + 1, *tail) for r in range(size)]
            x = mx.nd.array(data(np, rank, shapes[rank], dtype), dtype=dtype)
            expected = np.concatenate([data(np, r, shapes[r], dtype) for r in range(size)])
            assert_equal(np, hvd.allgather(x), expected)
            assert_equal(np, hvd.synchronize(hvd.allgather_async(x, name="x")), expected)
    with mx.util.np_shape(True):
        rows = mx.np.ones((0 if rank == 0 else 2, 3)) * rank  # a rank without rows
        got = hvd.allgather(rows)
        np.testing.assert_array_equal(
            got.asnumpy(), np.repeat(np.arange(1, size), 2)[:, None] * np.ones((1, 3))
        )
        assert hvd.allgather(mx.np.ones((0, 3))).shape == (0, 3)


@pytest.mark.ranks(2)
def test_broadcast(hvd, mx, np):
    hvd.init()
    for dtype in DTYPES:
        for shape in ((), (7,), (2, 3, 5)):
            for root in range(hvd.size()):
                mine = data(np, hvd.rank(), shape, dtype)
                x = mx.nd.array(mine, dtype=dtype).reshape(shape or (1,))
                expected = data(np, root, shape, dtype).reshape(shape or (1,))
                assert_equal(np, hvd.broadcast(x, root), expected)
                assert_equal(np, hvd.synchronize(hvd.broadcast_async(x, root, name="a")), expected)
                np.testing.assert_array_equal(x.asnumpy(), mine.reshape(x.shape))
                assert hvd.broadcast_(x, root) is x
                assert_equal(np, x, expected)
                x[()] = hvd.rank()
                assert hvd.synchronize(hvd.broadcast_async_(x, root, name="b")) is x
                np.testing.assert_array_equal(x.asnumpy(), np.full(x.shape, root, dtype))


@pytest.mark.ranks(2)
def test_views_are_reduced_where_they_lie(hvd, mx, np):
    hvd.init()
    x = mx.nd.arange(24).reshape((6, 4)) * (hvd.rank() + 1)
    hvd.allreduce_(x[1:3], op=hvd.Sum)  # a view shares x's memory
    hvd.allreduce_(x[5].reshape((2, 2)), op=hvd.Sum)
    expected = np.arange(24.0).reshape(6, 4) * (hvd.rank() + 1)
    expected[[1, 2, 5]] = np.arange(24.0).reshape(6, 4)[[1, 2, 5]] * 3
    np.testing.assert_array_equal(x.asnumpy(), expected)
    y = mx.nd.arange(24).reshape((6, 4)) * (hvd.rank() + 1)
    want = np.arange(24.0).reshape(6, 4) * 3
    for key in ((slice(None), slice(1, 3)), (slice(0, 6, 2),)):  # not dense in NumPy
        np.testing.assert_array_equal(hvd.allreduce(y[key], op=hvd.Sum).asnumpy(), want[key])
    np.testing.assert_array_equal(hvd.allreduce(y.T, op=hvd.Sum).asnumpy(), want.T)


@pytest.mark.ranks(2)
def test_arrays_of_mx_np(hvd, mx, np):
    hvd.init()
    mx.npx.set_np()
    x = mx.np.arange(6).reshape(2, 3) * (hvd.rank() + 1)
    for got in (hvd.allreduce(x), hvd.broadcast(x, 0), hvd.allgather(x)):
        assert type(got) is mx.np.ndarray
    np.testing.assert_array_equal(hvd.allreduce(x).asnumpy(), np.arange(6.0).reshape(2, 3) * 1.5)
    scalar = mx.np.array(2.0 * hvd.rank())
    assert hvd.allreduce(scalar).item() == 1.0
    empty = hvd.allreduce_(mx.np.ones((0, 4)))
    assert empty.asnumpy().shape == (0, 4)


@pytest.mark.ranks(2)
def test_outputs_of_convolutions(hvd, mx, np):
    hvd.init()
    x = mx.nd.random.normal(shape=(2, 16, 20, 20))
    w = mx.nd.random.normal(shape=(32, 16, 3, 3))

    def convolution():
        return mx.nd.Convolution(x, w, no_bias=True, kernel=(3, 3), num_filter=32)

    expected = convolution().asnumpy()
    for _ in range(3):
        y = convolution()  # left in a blocked layout
        np.testing.assert_allclose(hvd.allreduce(y).asnumpy(), expected, rtol=1e-4, atol=1e-4)
        y = convolution()
        np.testing.assert_allclose(
            hvd.allreduce_(y, op=hvd.Sum).asnumpy(), 2 * expected, rtol=1e-4, atol=1e-4
        )
        y = convolution()
        np.testing.assert_allclose(hvd.allgather(y).asnumpy()[2:], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.ranks(3, initialized=False)
def test_process_sets(hvd, mx, np):
    ends = hvd.ProcessSet([0, 2])
    hvd.init(process_sets=[ends])
    if ends.included():
        x = mx.nd.ones(3) * hvd.rank()
        assert hvd.allreduce(x, process_set=ends).asnumpy().tolist() == [1.0] * 3
        assert hvd.allgather(x[0:1], process_set=ends).asnumpy().tolist() == [0.0, 2.0]
        assert hvd.broadcast(x, 2, process_set=ends).asnumpy().tolist() == [2.0] * 3
    else:
        with pytest.raises(ValueError, match="rank 1 is not in"):
            hvd.allreduce(mx.nd.ones(3), process_set=ends)
    # Unnamed calls on the set must not have shifted the names of those of the world.
    assert hvd.allreduce(mx.nd.ones(1) * hvd.rank(), op=hvd.Sum).asscalar() == 3.0


@pytest.mark.ranks(2)
def test_objects_barrier_and_exports(hvd, mx, np):
    hvd.init()
    assert hvd.broadcast_object({"epoch": hvd.rank()}, root_rank=1) == {"epoch": 1}
    assert hvd.allgather_object("x" * hvd.rank()) == ["", "x"]
    hvd.barrier()
    assert len(hvd.__all__) == len(set(hvd.__all__))
    assert all(hasattr(hvd, name) for name in hvd.__all__)


@pytest.mark.ranks(1)
def test_compression(hvd, mx, np):
    hvd.init()
    x = mx.nd.array([1.0, 1 / 3, 1000.5])
    for compressor, dtype in ((hvd.Compression.none, "float32"), (hvd.Compression.fp16, "float16")):
        sent, context = compressor.compress(x)
        assert sent.dtype == np.dtype(dtype)
        back = compressor.decompress(sent, context)
        np.testing.assert_array_equal(back.asnumpy(), x.asnumpy().astype(dtype).astype("float32"))
    whole = mx.nd.array([1, 2], dtype="int32")
    assert hvd.Compression.fp16.compress(whole)[0] is whole


@pytest.mark.ranks(2)
def test_compression_to_bfloat16_of_both_flavours_of_arrays(hvd, mx, np):
    hvd.init()
    compressor = hvd.Compression.bf16
    bfloat16 = np.dtype([("bfloat16", np.uint16)])
    values = np.array([1.0, 1 / 3, 1000.5, -1e-30, 65504.0])
    exact = np.array([1.5, -2.0, 96.0, 0.0])
    for make, flavour in ((mx.nd.array, mx.nd.NDArray), (mx.np.array, mx.np.ndarray)):
        for dtype in ("float32", "float64"):
            sent, context = compressor.compress(make(values, dtype=dtype))
            assert type(sent) is flavour
            assert np.dtype(sent.dtype) == bfloat16
            back = compressor.decompress(sent, context)
            assert type(back) is flavour
            assert np.dtype(back.dtype) == np.dtype(dtype)
            # The upper half of a float32, as MXNet rounds.
            upper = (values.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
            np.testing.assert_array_equal(back.asnumpy(), upper)
            sent, context = compressor.compress(make(exact * (hvd.rank() + 1), dtype=dtype))
            total = hvd.allreduce(sent, op=hvd.Sum)
            assert type(total) is flavour
            assert np.dtype(total.dtype) == bfloat16
            np.testing.assert_array_equal(compressor.decompress(total, context).asnumpy(), exact * 3)
        for dtype in ("float16", "int32"):  # not wider, and not floating-point
            narrow = make([1, 2], dtype=dtype)
            assert compressor.compress(narrow)[0] is narrow


@pytest.mark.ranks(1)
def test_a_world_of_one_rank(hvd, mx, np):
    hvd.init()
    x = mx.nd.arange(5)
    for got in (hvd.allreduce(x), hvd.allgather(x), hvd.broadcast(x, 0)):
        np.testing.assert_array_equal(got.asnumpy(), np.arange(5.0))
