"""What the ranks do in test_torch_ops.py."""

from __future__ import annotations

import gc
import inspect
import weakref
from typing import Any

import polyhvd.torch as hvd
import torch
from polyhvd.torch.adapter import TorchAdapter
from torch_common import Tensor, assert_usable, everyones, raises, rank_tensor

from polyhvd.api import Collectives

DTYPES = [
    getattr(torch, name)
    for name in (
        "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "bool"
    )
]  # fmt: skip


def total(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.stack(everyones(*shape, dtype=dtype)).sum(0, dtype=dtype)


# Results ---------------------------------------------------------------------


def dtypes_survive_every_form() -> None:
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


def gathered_tensors_own_their_memory() -> None:
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


def in_place_forms_return_their_argument() -> None:
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


def other_forms_leave_their_argument_alone() -> None:
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


def parameters_may_be_overwritten() -> None:
    p = torch.nn.Parameter(rank_tensor(4))
    hvd.broadcast_(p, 1)
    assert torch.equal(p, everyones(4)[1])
    assert p.is_leaf
    assert p.requires_grad


def views_are_written_through() -> None:
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


def negative_views_have_their_values() -> None:
    for n in (1, 3):
        z = torch.complex(rank_tensor(n), rank_tensor(n)).conj().imag
        assert z.is_neg()
        assert torch.equal(hvd.allreduce(z, op=hvd.Sum), -total(n))
        hvd.allreduce_(z, op=hvd.Sum)
        assert torch.equal(z, -total(n))
        hvd.broadcast_(z, 0)
        assert torch.equal(z, -total(n))


def groups_of_mixed_dtypes() -> None:
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


def groups_through_the_async_form_are_one_operation() -> None:
    before = hvd.counters()["operations"]
    hvd.grouped_allreduce([torch.ones(2) for _ in range(7)])
    assert hvd.counters()["operations"] == before + 1


def compression_restores_the_dtype() -> None:
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        result = hvd.allreduce(rank_tensor(5), op=hvd.Sum, compression=compression)
        assert result.dtype == torch.float32
        assert torch.equal(result, total(5))
        whole = hvd.grouped_allreduce(
            [rank_tensor(5), rank_tensor(5, dtype=torch.int32)], op=hvd.Sum, compression=compression
        )
        assert [t.dtype for t in whole] == [torch.float32, torch.int32]


def old_ways_to_ask_for_an_average() -> None:
    x = torch.full((2,), float(hvd.rank()))
    mean = (hvd.size() - 1) / 2
    assert hvd.allreduce(x).tolist() == [mean] * 2
    assert hvd.allreduce(x, True).tolist() == [mean] * 2
    assert hvd.allreduce(x, average=False).tolist() == [mean * hvd.size()] * 2
    with raises(ValueError, "average"):
        hvd.allreduce(x, average=True, op=hvd.Sum)


def tensors_without_the_exchange_api() -> None:
    """What torch before 2.10 gets: address, shape and dtype, read in Python."""
    slow = Collectives(TorchAdapter(by_reference=True))
    for dtype in DTYPES:
        op = hvd.Max if dtype == torch.bool else hvd.Sum
        for shape in ((2, 3), (), (0, 2)):
            expected = total(*shape, dtype=dtype)
            assert torch.equal(slow.allreduce(rank_tensor(*shape, dtype=dtype), op=op), expected)
            x = rank_tensor(*shape, dtype=dtype)
            assert slow.allreduce(x, op=op, in_place=True) is x
            assert torch.equal(x, expected)
        gathered = slow.allgather(rank_tensor(2, 3, dtype=dtype))
        assert torch.equal(gathered, torch.cat(everyones(2, 3, dtype=dtype)))
    base = rank_tensor(3, 4)
    slow.broadcast(base.t(), 1, in_place=True)
    assert torch.equal(base, everyones(3, 4)[1])
    with raises(TypeError, "complex64"):
        slow.allreduce(torch.ones(2, dtype=torch.complex64))


# Handles ---------------------------------------------------------------------


def handles_keep_their_tensors() -> None:
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


def names_in_flight_are_an_error() -> None:
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


# Bad input -------------------------------------------------------------------


def what_is_no_tensor_is_named() -> None:
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
    for value, part in (([1.0], "list"), (np.ones(2), "ndarray"), (3, "int")):
        for call in calls:
            with raises(TypeError, "torch.Tensor", part):
                call(value)
    for call in calls:
        with raises(TypeError, "meta"):
            call(torch.ones(2, device="meta"))
        with raises(TypeError, "to_dense()"):
            call(torch.eye(2).to_sparse())
        with raises(TypeError, "cast it"):
            call(torch.ones(2, dtype=torch.complex64))
    assert_usable()


def bad_arguments_are_errors_at_once() -> None:
    x = torch.ones(2)
    with raises(ValueError, "root rank"):
        hvd.broadcast(x, hvd.size())
    with raises(ValueError, "op=2"):
        hvd.allreduce(x, op=2)
    with raises(ValueError, "scalar"):
        hvd.allgather(torch.tensor(1.0))
    with raises(ValueError, "bool"):
        hvd.allreduce(torch.ones(2, dtype=torch.bool))
    with raises(ValueError, "no tensor"):
        hvd.grouped_allreduce([])
    with raises(ValueError, "not registered"):
        hvd.allreduce(x, process_set=hvd.ProcessSet([0]))
    assert_usable()


def disagreements_are_errors_on_every_rank() -> None:
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
        (lambda: hvd.grouped_allreduce([torch.ones(3 + odd), torch.ones(2)], name="m"), ("[3]", "[4]")),
        (
            lambda: hvd.grouped_allreduce([torch.ones(3 + odd), torch.ones(2, dtype=torch.int32)], name="m"),
            ("[3]", "[4]"),
        ),
    ]
    for call, parts in calls:
        with raises(hvd.RankMismatchError, *parts, "torch_ops_cases.py"):
            call()
        assert_usable()


# Autograd --------------------------------------------------------------------


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
    torch.testing.assert_close(x.grad, _all_weights(sum(rows), 2).sum(0)[first : first + mine])


def gradient_of_broadcast() -> None:
    x = rank_tensor(3).requires_grad_()
    (hvd.broadcast(x, 1) * _weights(3)).sum().backward()
    expected = _all_weights(3).sum(0)
    torch.testing.assert_close(x.grad, expected if hvd.rank() == 1 else torch.zeros(3))


def second_derivatives() -> None:
    x = rank_tensor(3).requires_grad_()
    y = hvd.allreduce(x**2, op=hvd.Sum)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    torch.testing.assert_close(gradient, 2 * hvd.size() * x)
    (second,) = torch.autograd.grad(gradient.sum(), x)
    torch.testing.assert_close(second, torch.full((3,), 2.0 * hvd.size()))


def no_gradient_where_there_is_none() -> None:
    x = rank_tensor(3).requires_grad_()
    with raises(NotImplementedError, "Max"):
        hvd.allreduce(x, op=hvd.Max).sum().backward()
    with torch.no_grad():
        assert not hvd.allreduce(x).requires_grad
    assert not hvd.allreduce(x.detach()).requires_grad
    assert not hvd.synchronize(hvd.allreduce_async(x)).requires_grad


def overwriting_what_backward_needs_is_an_error() -> None:
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


# The interface ---------------------------------------------------------------

_SIGNATURES = {
    "allreduce": "tensor average=None name=None compression op=None prescale_factor=1.0 postscale_factor=1.0 "
    "process_set",
    "allreduce_": "tensor average=None name=None op=None prescale_factor=1.0 postscale_factor=1.0 "
    "process_set",
    "grouped_allreduce": "tensors average=None name=None compression op=None prescale_factor=1.0 "
    "postscale_factor=1.0 process_set",
    "allgather": "tensor name=None process_set",
    "broadcast": "tensor root_rank name=None process_set",
    "DistributedOptimizer": "optimizer named_parameters=None compression backward_passes_per_step=1 op=0 "
    "gradient_predivide_factor=1.0 num_groups=0 groups=None sparse_as_dense=False process_set",
    "broadcast_optimizer_state": "optimizer root_rank model=None",
    "broadcast_parameters": "params root_rank=0 process_set",
}
for _name, _like in (
    ("allreduce_async", "allreduce_"),
    ("allreduce_async_", "allreduce_"),
    ("allgather_async", "allgather"),
    ("broadcast_", "broadcast"),
    ("broadcast_async", "broadcast"),
    ("broadcast_async_", "broadcast"),
):
    _SIGNATURES[_name] = _SIGNATURES[_like]
for _name in ("grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_"):
    _SIGNATURES[_name] = _SIGNATURES["allreduce_"].replace("tensor", "tensors")


def signatures_are_those_of_horovod() -> None:
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


def exported_names_exist_and_are_sorted() -> None:
    assert list(hvd.__all__) == sorted(hvd.__all__)
    assert all(hasattr(hvd, name) for name in hvd.__all__)
    assert set(_SIGNATURES) <= set(hvd.__all__)
