"""The collectives on torch tensors: what parity with the other frameworks does not show."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import polyhvd.torch as hvd
import pytest
import torch
from polyhvd.torch.adapter import TorchAdapter
from torch_common import Tensor, assert_usable, everyones, raises, rank_tensor

from polyhvd.collectives.functions import Functions
from polyhvd.collectives.verbs import Collectives

pytestmark = pytest.mark.ranks(2, 3, framework="torch")

DTYPES = [
    getattr(torch, name)
    for name in (
        "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "bool"
    )
]  # fmt: skip
DTYPES += [getattr(torch, name) for name in ("uint16", "uint32", "uint64") if hasattr(torch, name)]


def total(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    wide = torch.int64 if str(dtype).startswith("torch.uint") else dtype  # torch adds no uint16
    return torch.stack(everyones(*shape, dtype=wide)).sum(0, dtype=wide).to(dtype)


def test_every_dtype_survives_every_form() -> None:
    for dtype in DTYPES:
        op = hvd.Max if dtype == torch.bool else hvd.Sum
        expected = total(2, 3, dtype=dtype)
        for call in (hvd.allreduce, hvd.allreduce_):
            result = call(rank_tensor(2, 3, dtype=dtype), op=op, name="r")
            assert result.dtype == dtype
            assert torch.equal(result, expected), dtype
        gathered = hvd.allgather(rank_tensor(2, 3, dtype=dtype), name="g")
        assert gathered.dtype == dtype
        assert torch.equal(gathered, torch.cat(everyones(2, 3, dtype=dtype)))
        for call in (hvd.broadcast, hvd.broadcast_):
            result = call(rank_tensor(2, 3, dtype=dtype), 1, name="b")
            assert result.dtype == dtype
            assert torch.equal(result, everyones(2, 3, dtype=dtype)[1])


def test_gathered_tensors_own_their_memory() -> None:
    for dtype in (torch.bfloat16, torch.bool, torch.float32):
        empty = hvd.allgather(torch.empty(0, 3, dtype=dtype), name="empty")
        assert empty.shape == (0, 3)
        assert empty.dtype == dtype
    one = hvd.allgather(rank_tensor(hvd.rank(), 2), name="uneven")
    rows = [rank_tensor(rank, 2, rank=rank) for rank in range(hvd.size())]
    gc.collect()
    hvd.allgather(torch.zeros(100), name="another")
    assert torch.equal(one, torch.cat(rows))
    one += 1  # and it is writable


def test_in_place_forms_return_their_argument() -> None:
    x = rank_tensor(5)
    assert hvd.allreduce_(x, op=hvd.Sum) is x
    assert torch.equal(x, total(5))
    x = rank_tensor(5)
    assert hvd.synchronize(hvd.allreduce_async_(x, op=hvd.Sum)) is x
    assert torch.equal(x, total(5))
    x = rank_tensor(5)
    assert hvd.broadcast_(x, 1) is x
    assert torch.equal(x, everyones(5)[1])
    x = rank_tensor(5)
    assert hvd.synchronize(hvd.broadcast_async_(x, 0)) is x
    assert torch.equal(x, everyones(5)[0])


def test_other_forms_leave_their_argument_alone() -> None:
    for x in (rank_tensor(4, 3), rank_tensor(3, 4).t(), torch.nn.Parameter(rank_tensor(4, 3))):
        before = x.detach().clone()
        for result in (
            hvd.allreduce(x, op=hvd.Sum),
            hvd.broadcast(x, 0),
            *hvd.grouped_allreduce([x], op=hvd.Sum),
            hvd.synchronize(hvd.allreduce_async(x)),
        ):
            assert result.data_ptr() != x.data_ptr()
        assert torch.equal(x, before)


def test_parameters_may_be_overwritten() -> None:
    p = torch.nn.Parameter(rank_tensor(4))
    hvd.broadcast_(p, 1)
    assert torch.equal(p, everyones(4)[1])
    assert p.is_leaf
    assert p.requires_grad


def test_views_are_written_through() -> None:
    base = rank_tensor(4, 6)
    expected = base.clone()
    expected[:, 1::2] = torch.stack(everyones(4, 6)).sum(0)[:, 1::2]
    view = base[:, 1::2]
    assert hvd.allreduce_(view, op=hvd.Sum) is view
    assert torch.equal(base, expected)
    base = rank_tensor(4, 6)
    handle = hvd.broadcast_async_(base.t(), 1)
    hvd.synchronize(handle)
    assert torch.equal(base, everyones(4, 6)[1])
    base = rank_tensor(4, 6)
    hvd.grouped_allreduce_([base[:, 0], base[:, 1]], op=hvd.Sum)
    assert torch.equal(base[:, :2], total(4, 6)[:, :2])
    with raises(ValueError, "share memory", "clone()"):
        hvd.allreduce_(torch.ones(1).expand(3))
    result = hvd.allreduce(torch.ones(1).expand(3), op=hvd.Sum)
    assert result.tolist() == [hvd.size()] * 3


def test_negative_views_have_their_values_not_those_of_their_memory() -> None:
    for n in (1, 3):
        z = torch.complex(rank_tensor(n), rank_tensor(n)).conj().imag
        assert z.is_neg()
        assert torch.equal(hvd.allreduce(z, op=hvd.Sum), -total(n))
        hvd.allreduce_(z, op=hvd.Sum)
        assert torch.equal(z, -total(n))
        hvd.broadcast_(z, 0)
        assert torch.equal(z, -total(n))


def test_groups_may_be_generators() -> None:
    """As in ``grouped_allreduce_(p.grad for p in model.parameters())``."""
    n = hvd.size()
    whole, mine = total(n, 2), [rank_tensor(n, 2), rank_tensor(n, 2)]
    rows = whole[hvd.rank() : hvd.rank() + 1]
    for call, want in (
        (lambda some: hvd.grouped_allreduce(some, op=hvd.Sum), whole),
        (lambda some: hvd.grouped_allreduce_async(some, op=hvd.Sum), whole),
        (hvd.grouped_allgather, torch.cat(everyones(n, 2))),
        (hvd.grouped_allgather_async, torch.cat(everyones(n, 2))),
        (lambda some: hvd.grouped_reducescatter(some, op=hvd.Sum), rows),
        (lambda some: hvd.grouped_reducescatter_async(some, op=hvd.Sum), rows),
        (lambda some: hvd.grouped_allreduce_async_(some, op=hvd.Sum), whole),
    ):
        result = call(t.clone() for t in mine)
        results = result if isinstance(result, list) else hvd.synchronize(result)
        assert len(results) == 2
        assert all(torch.equal(t, want) for t in results)
    hvd.grouped_allreduce_((t for t in mine), op=hvd.Sum)
    assert all(torch.equal(t, whole) for t in mine)


def test_groups_may_mix_dtypes() -> None:
    def some() -> list[Tensor]:
        return [
            rank_tensor(3),
            rank_tensor(2, dtype=torch.int64),
            rank_tensor(2, 2),
            rank_tensor(1, dtype=torch.bfloat16),
        ]

    expected = [total(3), total(2, dtype=torch.int64), total(2, 2), total(1, dtype=torch.bfloat16)]
    mine = some()
    for results in (
        hvd.grouped_allreduce(some(), op=hvd.Sum, name="group"),
        hvd.grouped_allreduce(some(), op=hvd.Sum),
        hvd.grouped_allreduce_(some(), op=hvd.Sum, name="group"),
        hvd.synchronize(hvd.grouped_allreduce_async(some(), op=hvd.Sum)),
        hvd.synchronize(hvd.grouped_allreduce_async_(mine, op=hvd.Sum)),
    ):
        assert [r.dtype for r in results] == [e.dtype for e in expected]
        assert all(torch.equal(r, e) for r, e in zip(results, expected, strict=True))
    assert all(torch.equal(r, e) for r, e in zip(mine, expected, strict=True))
    handle = hvd.grouped_allreduce_async(some())
    hvd.synchronize(handle)
    assert hvd.poll(handle)


def test_a_group_is_one_operation() -> None:
    before = hvd.counters()["operations"]
    dtypes = (torch.float32, torch.int64, torch.bfloat16)
    tensors = [torch.ones(2, 3, dtype=dtype) for dtype in dtypes for _ in range(3)]
    for number, call in enumerate((hvd.grouped_allreduce, hvd.grouped_allgather, hvd.grouped_reducescatter)):
        call(tensors)
        assert hvd.counters()["operations"] == before + number + 1


def test_compression_restores_the_dtype() -> None:
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        result = hvd.allreduce(rank_tensor(5), op=hvd.Sum, compression=compression)
        assert result.dtype == torch.float32
        assert torch.equal(result, total(5))
        whole = hvd.grouped_allreduce(
            [rank_tensor(5), rank_tensor(5, dtype=torch.int32)], op=hvd.Sum, compression=compression
        )
        assert [t.dtype for t in whole] == [torch.float32, torch.int32]


def test_exchanges_work_in_every_form() -> None:
    """Of every dtype, of views that are not dense, blocking and not, read by DLPack and by address."""
    slow = Functions(Collectives(TorchAdapter(by_reference=True)))
    n, rank = hvd.size(), hvd.rank()
    for dtype in DTYPES:
        for make in (lambda t: t, lambda t: t.t().contiguous().t()):
            everyone = everyones(2 * n, 3, dtype=dtype)
            mine = make(rank_tensor(2 * n, 3, dtype=dtype))
            rows = torch.cat([t[2 * rank : 2 * rank + 2] for t in everyone])
            for received in (
                hvd.alltoall(mine),
                slow.alltoall(mine),
            ):
                assert torch.equal(received, rows)
                assert received.dtype == dtype
            for received, counts in (
                hvd.alltoall(mine, splits=[2] * n),
                hvd.synchronize(hvd.alltoall_async(mine)),
                hvd.synchronize(hvd.alltoall_async(mine, torch.full((n,), 2, dtype=torch.int32))),
                slow.alltoall(mine, [2] * n),
            ):
                assert torch.equal(received, rows)
                assert counts.dtype == torch.int32
                assert counts.tolist() == [2] * n
            op = hvd.Max if dtype == torch.bool else hvd.Sum
            kept = total(2 * n, 3, dtype=dtype)[2 * rank : 2 * rank + 2]
            for part in (
                hvd.reducescatter(mine, op=op),
                hvd.synchronize(hvd.reducescatter_async(mine, op=op)),
                slow.reducescatter(mine, op=op),
                *hvd.grouped_reducescatter([mine, mine], op=op),
                *hvd.synchronize(hvd.grouped_reducescatter_async([mine], op=op)),
            ):
                assert torch.equal(part, kept)
                assert part.dtype == dtype
            for gathered in (
                *hvd.grouped_allgather([mine, mine]),
                *hvd.synchronize(hvd.grouped_allgather_async([mine])),
            ):
                assert torch.equal(gathered, torch.cat(everyone))


def test_compression_of_reducescatter_restores_the_dtype() -> None:
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        part = hvd.reducescatter(rank_tensor(hvd.size(), 2), op=hvd.Sum, compression=compression)
        assert part.dtype == torch.float32
        assert torch.equal(part, total(hvd.size(), 2)[hvd.rank() : hvd.rank() + 1])


def _sparse(rank: int, dtype: torch.dtype) -> Tensor:
    """Rank r has r nonzeros, some of them twice: rank 0 has none."""
    rows = torch.tensor([[(3 * i + rank) % 5 for i in range(rank)] * 2], dtype=torch.int64)
    return torch.sparse_coo_tensor(
        rows, torch.ones(2 * rank, 2, dtype=dtype) * (rank + 1), (7, 2), check_invariants=True
    )


def test_sparse_tensors_are_summed_and_merged() -> None:
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32):
        dense = sum(_sparse(rank, dtype).to_dense() for rank in range(hvd.size()))
        mine = _sparse(hvd.rank(), dtype)
        handle = hvd.sparse_allreduce_async(mine, "sparse", hvd.Sum)
        result = hvd.synchronize(handle)
        assert hvd.poll(handle)
        assert hvd.synchronize(handle) is result
        assert result.layout is torch.sparse_coo
        assert result.is_coalesced()
        assert result.dtype == dtype
        assert result.shape == (7, 2)
        assert torch.equal(result.to_dense(), dense)
        if dtype.is_floating_point:
            average = hvd.sparse_allreduce_async(mine, None, hvd.Average)()
            torch.testing.assert_close(average.to_dense(), dense / hvd.size())
    flat = hvd.synchronize(hvd.sparse_allreduce_async(torch.eye(3).to_sparse(), "flat", hvd.Sum))
    assert torch.equal(flat.to_dense(), torch.eye(3) * hvd.size())
    nothing = hvd.synchronize(
        hvd.sparse_allreduce_async(torch.zeros(3, 2).to_sparse(1), "nothing", hvd.Average)
    )
    assert nothing._nnz() == 0
    assert nothing.shape == (3, 2)


def test_sparse_sums_cost_what_their_nonzeros_do() -> None:
    def bytes_moved(rows: int) -> int:
        tensor = torch.sparse_coo_tensor(
            torch.tensor([[1, 5]]), torch.ones(2, 4), (rows, 4), check_invariants=True
        )
        before = hvd.counters()
        hvd.synchronize(hvd.sparse_allreduce_async(tensor, "cost", hvd.Sum))
        after = hvd.counters()
        return sum(after[key] - before[key] for key in after if "bytes" in key)

    few = bytes_moved(10)
    assert 0 < few == bytes_moved(10**9)


def test_average_can_be_asked_for_in_the_old_ways() -> None:
    x = torch.full((2,), float(hvd.rank()))
    mean = (hvd.size() - 1) / 2
    assert hvd.allreduce(x).tolist() == [mean] * 2
    assert hvd.allreduce(x, True).tolist() == [mean] * 2
    assert hvd.allreduce(x, average=False).tolist() == [mean * hvd.size()] * 2
    with raises(ValueError, "average"):
        hvd.allreduce(x, average=True, op=hvd.Sum)


def test_tensors_can_be_read_without_the_exchange_api() -> None:
    """What torch before 2.10 gets: address, shape and dtype, read in Python."""
    slow = Functions(Collectives(TorchAdapter(by_reference=True)))
    for dtype in DTYPES:
        op = hvd.Max if dtype == torch.bool else hvd.Sum
        for shape in ((2, 3), (), (0, 2)):
            expected = total(*shape, dtype=dtype)
            assert torch.equal(slow.allreduce(rank_tensor(*shape, dtype=dtype), op=op), expected)
            x = rank_tensor(*shape, dtype=dtype)
            assert slow.allreduce_(x, op=op) is x
            assert torch.equal(x, expected)
        gathered = slow.allgather(rank_tensor(2, 3, dtype=dtype))
        assert torch.equal(gathered, torch.cat(everyones(2, 3, dtype=dtype)))
    base = rank_tensor(3, 4)
    slow.broadcast_(base.t(), 1)
    assert torch.equal(base, everyones(3, 4)[1])
    with raises(TypeError, "complex64"):
        slow.allreduce(torch.ones(2, dtype=torch.complex64))


def test_handles_keep_their_tensors_and_no_longer() -> None:
    x = rank_tensor(1000)
    alive = weakref.ref(x)
    handle = hvd.allreduce_async(x, op=hvd.Sum)
    del x
    gc.collect()
    assert torch.equal(hvd.synchronize(handle), total(1000))
    assert torch.equal(hvd.synchronize(handle), total(1000)), "the result stays"
    del handle
    gc.collect()
    hvd.allreduce(torch.ones(1))
    assert alive() is None


def test_a_name_or_memory_in_flight_cannot_be_used_again() -> None:
    x, y = torch.ones(3), torch.ones(3)
    if hvd.rank() == 0:  # submits last, so the others' are in flight until then
        hvd.barrier()
    first = hvd.allreduce_async(x, name="twice")
    if hvd.rank() != 0:
        with raises(ValueError, "twice", "in flight"):
            hvd.allreduce_async(y, name="twice")
        with raises(ValueError, "overlaps"):
            hvd.allreduce_async_(x, name="other name")
        assert not hvd.poll(first)
        hvd.barrier()
    hvd.synchronize(first)
    assert hvd.poll(first)
    assert_usable()


def test_what_cannot_be_communicated_is_a_type_error() -> None:
    import numpy as np

    calls = [
        hvd.allreduce,
        hvd.allreduce_,
        hvd.allreduce_async,
        hvd.allreduce_async_,
        hvd.allgather,
        lambda x: hvd.broadcast(x, 0),
        lambda x: hvd.broadcast_(x, 0),
        lambda x: hvd.grouped_allreduce([torch.ones(2), x]),
        lambda x: hvd.grouped_allreduce_([x]),
    ]
    for value, part in (([1.0], "list"), (np.ones(2), "ndarray"), ("3", "str")):
        for call in calls:
            with raises(TypeError, "torch.Tensor", part):
                call(value)
    for call in calls:
        with raises(TypeError, "meta"):
            call(torch.ones(2, device="meta"))
        with raises(TypeError, "to_dense()"):
            call(torch.eye(2).to_sparse())
        with raises(TypeError, "complex64", "view_as_real"):
            call(torch.ones(2, dtype=torch.complex64))
        with raises(TypeError, "float8_e5m2", "cast it"):
            call(torch.ones(2).to(torch.float8_e5m2))
    assert_usable()


def test_bad_arguments_are_errors_at_once() -> None:
    x = torch.ones(2)
    with raises(ValueError, "root rank"):
        hvd.broadcast(x, hvd.size())
    with raises(ValueError, "op=6"):
        hvd.allreduce(x, op=6)
    with raises(ValueError, "scalar"):
        hvd.allgather(torch.tensor(1.0))
    with raises(ValueError, "bool"):
        hvd.allreduce(torch.ones(2, dtype=torch.bool))
    with raises(ValueError, "no tensor"):
        hvd.grouped_allreduce([])
    for tensor in (x, x.clone().requires_grad_()):
        for call in (hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter):
            with raises(ValueError, "not registered"):
                call(tensor, process_set=hvd.ProcessSet([0]))
        with raises(ValueError, "be divided equally", "pass splits"):
            hvd.alltoall(torch.cat((tensor,) * hvd.size())[1:])
        for splits, part in (
            ([1] * (hvd.size() + 1), "entries"),
            ([3] * hvd.size(), "sum to"),
            (torch.ones(hvd.size()), "whole number"),
            (torch.ones(1, hvd.size(), dtype=torch.int32), "one dimension"),
        ):
            with raises(ValueError, part):
                hvd.alltoall(tensor, splits=splits)
    with raises(ValueError, "op=Max", "sparse"):
        hvd.sparse_allreduce_async(torch.eye(2).to_sparse(), "x", hvd.Max)
    for tensor, part in ((torch.ones(2), "torch.strided"), (3, "int")):
        with raises(TypeError, "torch.sparse_coo", part):
            hvd.sparse_allreduce_async(tensor, "x", hvd.Sum)
    assert_usable()


def test_disagreements_are_errors_on_every_rank_and_the_job_goes_on() -> None:
    odd = hvd.rank() == 1
    calls: list[tuple[Any, tuple[str, ...]]] = [
        (lambda: hvd.allreduce(torch.ones(3 + odd), name="m"), ("[3]", "[4]")),
        (lambda: hvd.allreduce_(torch.ones(3 + odd), name="m"), ("[3]", "[4]")),
        (
            lambda: hvd.allreduce(torch.ones(3, dtype=torch.float64 if odd else torch.float32), name="m"),
            ("float64", "float32"),
        ),
        (lambda: hvd.allgather(torch.ones(2, 3 + odd), name="m"), ("[2, 3]", "[2, 4]")),
        (lambda: hvd.broadcast_(torch.ones(3), int(odd), name="m"), ("root",)),
        (lambda: hvd.reducescatter(torch.ones(3 + odd), name="m"), ("[3]", "[4]")),
        (lambda: hvd.alltoall(torch.ones(hvd.size(), 3 + odd), name="m"), (", 3]", ", 4]")),
        (lambda: hvd.grouped_allreduce([torch.ones(3 + odd), torch.ones(2)], name="m"), ("[3]", "[4]")),
        (
            lambda: hvd.grouped_allreduce([torch.ones(3 + odd), torch.ones(2, dtype=torch.int32)], name="m"),
            ("[3]", "[4]"),
        ),
    ]
    for call, parts in calls:
        with raises(hvd.RankMismatchError, *parts, "test_torch_ops.py"):
            call()
        assert_usable()
    handle = hvd.sparse_allreduce_async(torch.ones(3 + odd, 2).to_sparse(1), "m", hvd.Sum)
    for _ in range(2):
        with raises(hvd.RankMismatchError, "'m'", "[3, 2]", "[4, 2]"):
            hvd.synchronize(handle)
    assert_usable()


def _weights(*shape: int, rank: int | None = None) -> Tensor:
    """What each rank's loss multiplies its result with."""
    return rank_tensor(*shape, rank=rank) + 1


def _all_weights(*shape: int) -> Tensor:
    return torch.stack([_weights(*shape, rank=rank) for rank in range(hvd.size())])


def gradient_of_allreduce() -> None:
    for op, divisor in ((hvd.Sum, 1), (hvd.Average, hvd.size())):
        for name in (None, "named"):
            x = rank_tensor(3, 2).requires_grad_()
            y = hvd.allreduce(x, op=op, name=name, prescale_factor=0.5, postscale_factor=3.0)
            (y * _weights(3, 2)).sum().backward()
            torch.testing.assert_close(x.grad, _all_weights(3, 2).sum(0) * 1.5 / divisor)


def gradient_through_compression() -> None:
    x = rank_tensor(3).requires_grad_()
    (hvd.allreduce(x, compression=hvd.Compression.fp16) * _weights(3)).sum().backward()
    torch.testing.assert_close(x.grad, _all_weights(3).mean(0), rtol=1e-3, atol=1e-3)


def gradient_of_grouped_allreduce() -> None:
    x, y = rank_tensor(3).requires_grad_(), rank_tensor(2, dtype=torch.float64).requires_grad_()
    count = torch.tensor([hvd.rank()])
    a, n, b = hvd.grouped_allreduce([x, count, y], op=hvd.Sum)
    assert n.item() == sum(range(hvd.size()))
    assert not n.requires_grad
    ((a * _weights(3)).sum() + (b * _weights(2)).sum()).backward()
    torch.testing.assert_close(x.grad, _all_weights(3).sum(0))
    torch.testing.assert_close(y.grad, _all_weights(2).sum(0).double())


def gradient_of_allgather() -> None:
    rows = [rank + 1 for rank in range(hvd.size())]
    first, mine = sum(rows[: hvd.rank()]), rows[hvd.rank()]
    x = rank_tensor(mine, 2).requires_grad_()
    y = hvd.allgather(x, name="gather")
    (y * _weights(sum(rows), 2)).sum().backward()
    torch.testing.assert_close(x.grad, _all_weights(sum(rows), 2).mean(0)[first : first + mine])


def gradient_of_broadcast() -> None:
    x = rank_tensor(3).requires_grad_()
    (hvd.broadcast(x, 1) * _weights(3)).sum().backward()
    expected = _all_weights(3).mean(0)
    torch.testing.assert_close(x.grad, expected if hvd.rank() == 1 else torch.zeros(3))


def _rows(rank: int, total: int) -> slice:
    """Of a reducescatter: the first ranks get one more."""
    size, rest = divmod(total, hvd.size())
    begin = rank * size + min(rank, rest)
    return slice(begin, begin + size + (rank < rest))


def gradient_of_reducescatter() -> None:
    for total_rows in (1, 2 * hvd.size() + 1):
        mine = _rows(hvd.rank(), total_rows)
        for op, divisor in ((hvd.Sum, 1), (hvd.Average, hvd.size())):
            x = rank_tensor(total_rows, 2).requires_grad_()
            y = hvd.reducescatter(x, op=op, prescale_factor=0.5, postscale_factor=3.0)
            expected = torch.stack(everyones(total_rows, 2)).sum(0)[mine] * 1.5 / divisor
            torch.testing.assert_close(y.detach(), expected)
            (y * _weights(total_rows, 2)[mine]).sum().backward()
            weights = [
                _weights(total_rows, 2, rank=rank)[_rows(rank, total_rows)] for rank in range(hvd.size())
            ]
            torch.testing.assert_close(x.grad, torch.cat(weights) * 1.5 / divisor * hvd.size())


def gradient_of_grouped_reducescatter() -> None:
    n = 2 * hvd.size()
    x, y = rank_tensor(n).requires_grad_(), rank_tensor(n, 2, dtype=torch.float64).requires_grad_()
    a, count, b = hvd.grouped_reducescatter([x, torch.ones(n, dtype=torch.int32), y], op=hvd.Sum)
    assert count.tolist() == [hvd.size()] * 2
    assert not count.requires_grad
    ((a * (hvd.rank() + 1)).sum() + (b * (hvd.rank() + 2)).sum()).backward()
    owners = torch.arange(n) // 2
    torch.testing.assert_close(x.grad, hvd.size() * (owners + 1).float())
    torch.testing.assert_close(y.grad, hvd.size() * (owners + 2).double()[:, None].expand(n, 2))


def gradient_of_grouped_allgather() -> None:
    rows = [rank + 1 for rank in range(hvd.size())]
    first, mine = sum(rows[: hvd.rank()]), rows[hvd.rank()]
    x, y = rank_tensor(mine, 2).requires_grad_(), rank_tensor(3, dtype=torch.float64).requires_grad_()
    a, count, b = hvd.grouped_allgather([x, torch.tensor([hvd.rank()]), y], name="grouped gather")
    assert count.tolist() == list(range(hvd.size()))
    assert not count.requires_grad
    ((a * _weights(sum(rows), 2)).sum() + (b * _weights(3 * hvd.size())).sum()).backward()
    torch.testing.assert_close(x.grad, _all_weights(sum(rows), 2).mean(0)[first : first + mine])
    own = slice(3 * hvd.rank(), 3 * hvd.rank() + 3)
    torch.testing.assert_close(y.grad, _all_weights(3 * hvd.size()).double().mean(0)[own])


def gradient_of_alltoall() -> None:
    """Rank r sends r + 1 rows to each, or r + s rows to rank s and keeps two; each weighs what it gets."""
    n, rank = hvd.size(), hvd.rank()
    x = rank_tensor((rank + 1) * n, 2).requires_grad_()
    received = hvd.alltoall(x, name="equal parts")
    parts = [everyones((r + 1) * n, 2)[r][rank * (r + 1) : (rank + 1) * (r + 1)] for r in range(n)]
    assert torch.equal(received, torch.cat(parts))
    (received * (rank + 1)).sum().backward()
    owners = torch.arange(n).repeat_interleave(rank + 1)
    torch.testing.assert_close(x.grad, (owners + 1.0)[:, None].expand(len(x), 2))

    splits = [rank + s for s in range(n)]
    x = rank_tensor(sum(splits) + 2, 2).requires_grad_()
    received, counts = hvd.alltoall(x, torch.tensor(splits), name="splits")
    assert counts.tolist() == splits
    assert not counts.requires_grad
    (received * (rank + 1)).sum().backward()
    owners = torch.arange(n).repeat_interleave(torch.tensor(splits))
    expected = torch.cat((owners + 1.0, torch.zeros(2)))
    torch.testing.assert_close(x.grad, expected[:, None].expand(len(x), 2))


def gradient_of_allgather_while_a_rank_has_joined() -> None:
    if hvd.rank() == 0:
        hvd.join()
        return
    x = torch.ones(hvd.rank(), requires_grad=True)
    rows = hvd.allgather(x, name="without rank 0")
    (rows * torch.arange(1.0, len(rows) + 1)).sum().backward()
    first = sum(range(1, hvd.rank()))
    expected = torch.arange(first + 1.0, first + hvd.rank() + 1) * (hvd.size() - 1) / hvd.size()
    torch.testing.assert_close(x.grad, expected)
    hvd.join()


def test_names_of_gradients_recur() -> None:
    """From the second step on, every rank knows each operation by its number."""
    for step in range(3):
        before = hvd.counters()
        x = rank_tensor(2 * hvd.size()).requires_grad_()
        rows = hvd.reducescatter(x, name="scatter")
        y = hvd.alltoall(x, [2] * hvd.size(), name="exchange")[0] + hvd.allgather(rows, name="gather")
        hvd.broadcast(hvd.allreduce(y, name="reduce"), 0, name="cast").sum().backward()
        after = hvd.counters()
        done = {key: after[key] - before[key] for key in ("operations", "cache_hits")}
        assert done["operations"] > 8
        if step > 0:
            assert done["cache_hits"] == done["operations"]


def second_derivatives() -> None:
    x = rank_tensor(3).requires_grad_()
    (gradient,) = torch.autograd.grad((hvd.broadcast(x, 0) ** 2).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), x)
    torch.testing.assert_close(second, torch.full((3,), 2.0 / hvd.size() * (hvd.rank() == 0)))
    (gradient,) = torch.autograd.grad(
        (hvd.broadcast(x, 0, exact_gradient=True) ** 2).sum(), x, create_graph=True
    )
    (second,) = torch.autograd.grad(gradient.sum(), x)
    torch.testing.assert_close(second, torch.full((3,), 2.0 * hvd.size() * (hvd.rank() == 0)))
    x = rank_tensor(3).requires_grad_()
    y = hvd.allreduce(x**2, op=hvd.Sum)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    torch.testing.assert_close(gradient, 2 * hvd.size() * x)
    (second,) = torch.autograd.grad(gradient.sum(), x)
    torch.testing.assert_close(second, torch.full((3,), 2.0 * hvd.size()))


@pytest.mark.parametrize(
    "kind",
    [
        "allreduce",
        "grouped_allreduce",
        "allgather",
        "broadcast",
        "alltoall",
        "alltoall with splits",
        "reducescatter",
    ],
)
def test_torch_func_has_the_gradients_of_autograd(kind: str) -> None:
    call: Callable[[Tensor], Tensor] = {
        "allreduce": lambda x: hvd.allreduce(x, op=hvd.Sum),
        "grouped_allreduce": lambda x: sum(hvd.grouped_allreduce([x, 2 * x])),
        "allgather": hvd.allgather,
        "broadcast": lambda x: hvd.broadcast(x, 0),
        "alltoall": hvd.alltoall,
        "alltoall with splits": lambda x: hvd.alltoall(x, [2] * hvd.size())[0],
        "reducescatter": lambda x: hvd.reducescatter(x, op=hvd.Average),
    }[kind]

    def loss(x: Tensor) -> Tensor:
        return call(x).pow(3).sum()

    def slope(x: Tensor) -> Tensor:
        return torch.func.grad(loss)(x).square().sum()

    x = rank_tensor(2 * hvd.size())
    y = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(y), y, create_graph=True)
    torch.testing.assert_close(torch.func.grad(loss)(x), first.detach())
    (second,) = torch.autograd.grad(first.square().sum(), y)
    torch.testing.assert_close(torch.func.grad(slope)(x), second)
    (plain,) = torch.autograd.grad(call(y).sum(), y)
    torch.testing.assert_close(torch.func.grad(lambda x: call(x).sum())(x), plain)


def test_there_is_no_gradient_where_none_is_defined() -> None:
    x = rank_tensor(3).requires_grad_()
    for call in (hvd.allreduce, hvd.reducescatter):
        with raises(hvd.InvalidArgumentError, "op=Max", call.__name__, "detach()"):
            call(x, op=hvd.Max).sum().backward()
    with torch.no_grad():
        assert not hvd.allreduce(x).requires_grad
    assert not hvd.allreduce(x.detach()).requires_grad
    assert not hvd.synchronize(hvd.allreduce_async(x)).requires_grad


def test_overwriting_what_backward_needs_is_an_error() -> None:
    weight = torch.ones(3, requires_grad=True)
    for overwrite in (
        hvd.allreduce_,
        lambda x: hvd.broadcast_(x, 0),
        lambda x: hvd.synchronize(hvd.allreduce_async_(x)),
        lambda x: hvd.grouped_allreduce_([x]),
        lambda x: hvd.broadcast_parameters([x]),
    ):
        x = rank_tensor(3)
        loss = (weight * x).sum()
        overwrite(x)
        with raises(RuntimeError, "modified by an inplace operation"):
            loss.backward()


_SIGNATURES = {
    "allreduce": "tensor average=None name=None compression op=None prescale_factor=1.0 postscale_factor=1.0 "
    "process_set",
    "allreduce_": "tensor average=None name=None op=None prescale_factor=1.0 postscale_factor=1.0 "
    "process_set",
    "grouped_allreduce": "tensors average=None name=None compression op=None prescale_factor=1.0 "
    "postscale_factor=1.0 process_set",
    "allgather": "tensor name=None process_set",
    "grouped_allgather": "tensors name=None process_set",
    "alltoall": "tensor splits=None name=None process_set",
    "reducescatter": "tensor name=None compression op=0 process_set prescale_factor=1.0 postscale_factor=1.0",
    "reducescatter_async": "tensor name=None op=0 process_set prescale_factor=1.0 postscale_factor=1.0",
    "sparse_allreduce_async": "tensor name op process_set",
    "join": "device=-1",
    "broadcast": "tensor root_rank name=None process_set",
    "DistributedOptimizer": "optimizer named_parameters=None compression backward_passes_per_step=1 op=0 "
    "gradient_predivide_factor=1.0 num_groups=0 groups=None sparse_as_dense=False process_set "
    "scale_local_gradients=True mapping=None",
    "broadcast_optimizer_state": "optimizer root_rank model=None process_set",
    "SyncBatchNorm": "num_features eps=1e-05 momentum=0.1 affine=True track_running_stats=True process_set "
    "device=None dtype=None",
    "convert_sync_batchnorm": "module process_set",
    "broadcast_parameters": "params root_rank=0 process_set",
}
for _name, _like in (
    ("allreduce_async", "allreduce_"),
    ("allreduce_async_", "allreduce_"),
    ("allgather_async", "allgather"),
    ("grouped_allgather_async", "grouped_allgather"),
    ("alltoall_async", "alltoall"),
    ("broadcast_", "broadcast"),
    ("broadcast_async", "broadcast"),
    ("broadcast_async_", "broadcast"),
):
    _SIGNATURES[_name] = _SIGNATURES[_like]
for _name in ("reducescatter", "reducescatter_async"):
    _SIGNATURES[f"grouped_{_name}"] = _SIGNATURES[_name].replace("tensor", "tensors")
for _name in ("grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_"):
    _SIGNATURES[_name] = _SIGNATURES["allreduce_"].replace("tensor", "tensors")
# Beyond Horovod's, after its own.
for _name in ("allgather", "grouped_allgather", "broadcast", "reducescatter", "grouped_reducescatter"):
    _SIGNATURES[_name] += " exact_gradient=None"


@pytest.mark.ranks(2)
def test_signatures_are_those_of_horovod() -> None:
    plain = (int, float, type(None))
    for name, expected in _SIGNATURES.items():
        parameters = inspect.signature(getattr(hvd, name)).parameters.values()
        found = " ".join(
            p.name
            if p.default is p.empty or not isinstance(p.default, plain)
            else f"{p.name}={int(p.default) if p.name == 'op' and p.default is not None else p.default}"
            for p in parameters
        )
        assert found == expected, name


@pytest.mark.ranks(2)
def test_exported_names_exist_and_are_sorted() -> None:
    assert len(hvd.__all__) == len(set(hvd.__all__))
    assert all(hasattr(hvd, name) for name in hvd.__all__)
    assert set(_SIGNATURES) <= set(hvd.__all__)


@pytest.mark.parametrize(
    "case",
    [
        gradient_of_allreduce,
        gradient_through_compression,
        gradient_of_grouped_allreduce,
        gradient_of_allgather,
        gradient_of_broadcast,
        gradient_of_reducescatter,
        gradient_of_grouped_reducescatter,
        gradient_of_grouped_allgather,
        gradient_of_alltoall,
        gradient_of_allgather_while_a_rank_has_joined,
        second_derivatives,
    ],
    ids=lambda case: case.__name__,
)
def test_derivatives_are_those_of_the_sum_of_all_ranks_losses(case: Callable[[], None]) -> None:
    case()
