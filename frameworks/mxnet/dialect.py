"""How the collectives are called for MXNet; ``make verbs`` makes verbs.py of it."""

from __future__ import annotations

from polyhvd.collectives.table import Dialect

__all__ = ["DIALECT"]

_GRADIENT = "Sums and averages have a gradient, where every rank runs the same backward."
_SPARSE = (
    "Of a row_sparse array only the rows that a rank has are sent; the call waits until it is computed, and "
    "for Min, Max and Product until all ranks have sent their rows."
)
_WAITS = "The call waits until all ranks' arrays are computed and the size of the result is known."

DIALECT = Dialect(
    title="MXNet",
    module="polyhvd.mxnet",
    tensor="array",
    type="NDArray",
    imports=(
        "from mxnet.ndarray import NDArray",
        "from polyhvd.mxnet.functions import functions",
    ),
    example_import="import mxnet as mx",
    ones="mx.nd.ones",
    array="mx.nd.array",
    dtypes="float16, bfloat16, float32, float64, uint8, int8, int32, int64, or bool",
    lacks=frozenset({"barrier"}),
    without=frozenset({"compression"}),
    order={
        "allreduce*": "tensor tensors average name priority prescale_factor postscale_factor process_set op",
        "allgather*": "tensor tensors name priority process_set exact_gradient",
        "broadcast*": "tensor root_rank name priority process_set exact_gradient",
        "alltoall*": "tensor splits name priority process_set",
        "reducescatter*": "tensor tensors op name priority process_set prescale_factor postscale_factor "
        "exact_gradient",
    },
    notes={
        "*": "Returns at once: MXNet's engine runs it once the arrays are ready, and reads of the results "
        "wait for it. What fails after the call has returned is raised by these reads.",
        "allreduce*": _GRADIENT,
        "allreduce": f"{_SPARSE} {_GRADIENT}",
        "allreduce_": f"{_SPARSE} The result is unknown to autograd.",
        "grouped_allreduce_": "The results are unknown to autograd.",
        "allgather*": f"{_WAITS} The result has a gradient, where every rank runs the same backward.",
        "broadcast*": "The result has a gradient, where every rank runs the same backward.",
        "broadcast_": "The result is unknown to autograd.",
        "alltoall*": "The call waits until all ranks have sent their splits, not for the data. The rows have "
        "a gradient, where every rank runs the same backward.",
        "reducescatter*": _GRADIENT,
        "join": "It waits first for everything that MXNet's engine was given, and raises what of it has "
        "failed unnoticed.",
    },
    raises={
        "InvalidArgumentError": (
            "InvalidArgumentError",
            "a bad call, such as a name that is in flight or an unknown process set; nothing was sent. It is "
            "an MXNetError, too.",
        ),
        "RankMismatchError": (
            "RankMismatchError",
            "the ranks' shapes, dtypes or arguments differ; on every rank, where the result is read. It is "
            "an MXNetError, too.",
        ),
        "HorovodInternalError": (
            "HorovodInternalError",
            "a rank was lost or has shut down, or a transfer has timed out; where the result is read. "
            "It is an MXNetError, too.",
        ),
    },
)
