"""The properties of jobs of several frameworks that others do not have, as every rank checks them."""

from __future__ import annotations

from typing import Any

import drivers
import numpy as np
import oracle
import pytest

import polyhvd

__all__ = ["disagreement", "objects", "sparse", "unnamed"]

Array = np.ndarray[Any, Any]


def objects(name: str) -> None:
    """Objects go from any rank to all, and from all to all."""
    hvd = drivers.get(name).hvd
    rank, size = hvd.rank(), hvd.size()
    large = np.full(1 << 19, rank, np.float32)  # that travels without a copy
    for root in range(size):
        found = hvd.broadcast_object({"from": rank, "large": large}, root_rank=root)
        assert found["from"] == root
        assert found["large"][-1] == root
    assert hvd.allgather_object([rank] * rank) == [[r] * r for r in range(size)]


def unnamed(name: str) -> None:
    """Calls without a name match by their order."""
    driver = drivers.get(name)
    hvd = driver.hvd
    rank, size = hvd.rank(), hvd.size()
    for step in range(3):
        terms = [oracle.contribution(np.dtype(np.float32), (size, 3), r, step) for r in range(size)]
        x = driver.from_numpy(terms[rank])
        oracle.check("sum", driver.to_numpy(hvd.allreduce(x, op=hvd.Sum)), oracle.reduce("Sum", terms))
        gathered = driver.to_numpy(hvd.allgather(x))
        oracle.check("rows", gathered, np.concatenate(terms), exact=True)
        sent = driver.to_numpy(hvd.broadcast(x, size - 1))
        oracle.check("broadcast", sent, terms[-1], exact=True)
        parts = driver.to_numpy(hvd.alltoall(x))
        oracle.check("parts", parts, np.stack([term[rank] for term in terms]), exact=True)
        hvd.barrier()


def disagreement(name: str) -> None:
    """Ranks that disagree all hear of it, with every rank's side; the next call of that name is new."""
    driver = drivers.get(name)
    hvd = driver.hvd
    rank, size = hvd.rank(), hvd.size()
    unlike = driver.from_numpy(np.ones((2, 3 + rank), np.float32))
    with pytest.raises(driver.error_type()) as caught:
        hvd.allgather(unlike, name="w")
    assert isinstance(caught.value, polyhvd.HorovodInternalError)
    for part in ("'w'", *(f"rank {r}" for r in range(size))):
        assert part in str(caught.value)
    gathered = driver.to_numpy(hvd.allgather(driver.from_numpy(np.ones((1, 2), np.float32)), name="w"))
    oracle.check("after a disagreement", gathered, np.ones((size, 2), np.float32))


def _rows(rank: int, step: int) -> list[int]:
    """Of a sparse tensor of 50 rows: some in common, some twice, none on one rank in one step."""
    return [] if (rank + step) % 4 == 3 else [7, rank, 10 + 3 * rank + step, 7]


def _sparse(framework: str, indices: list[int], values: Array) -> Any:
    """A sparse tensor of 50 rows; of indices that come twice the values are added up."""
    dense = np.zeros((50, *values.shape[1:]), values.dtype)
    np.add.at(dense, indices, values)
    if framework == "torch":
        import torch

        places = torch.tensor([indices], dtype=torch.int64)
        return torch.sparse_coo_tensor(places, torch.from_numpy(values), dense.shape, check_invariants=True)
    if framework == "tensorflow":
        import tensorflow as tf

        return tf.IndexedSlices(tf.constant(values), tf.constant(indices, tf.int32), tf.constant(dense.shape))
    import mxnet as mx

    rows = sorted(set(indices))
    if not rows:
        return mx.nd.sparse.zeros("row_sparse", dense.shape, dtype=values.dtype)
    return mx.nd.sparse.row_sparse_array((dense[rows], rows), shape=dense.shape, dtype=values.dtype)


def _dense(framework: str, tensor: Any) -> Array:
    if framework == "torch":
        return np.asarray(tensor.to_dense().numpy())
    if framework == "tensorflow":
        import tensorflow as tf

        return np.asarray(tf.convert_to_tensor(tensor).numpy())
    return np.asarray(tensor.asnumpy())


def sparse(name: str) -> None:
    """Sums and averages of sparse tensors, each in its framework's form."""
    driver = drivers.get(name)
    hvd = driver.hvd
    rank, size = hvd.rank(), hvd.size()
    for dtype in (np.dtype(np.float32), np.dtype(np.float64)):
        for step in range(4):
            expected = np.zeros((50, 3), dtype)
            values = {}
            for r in range(size):
                values[r] = oracle.contribution(dtype, (len(_rows(r, step)), 3), r, step)
                np.add.at(expected, _rows(r, step), values[r])
            mine = _sparse(driver.framework, _rows(rank, step), values[rank].copy())
            for op, divisor in (("Sum", 1), ("Average", size)):
                what = f"sparse {op} {dtype.name}"
                if driver.framework == "torch":
                    result = hvd.synchronize(hvd.sparse_allreduce_async(mine, what, getattr(hvd, op)))
                else:
                    result = hvd.allreduce(mine, name=what, op=getattr(hvd, op))
                actual = _dense(driver.framework, result)
                near = 4 * np.finfo(dtype).eps
                np.testing.assert_allclose(actual, expected / divisor, rtol=near, atol=near, err_msg=what)
