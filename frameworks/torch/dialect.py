"""How the collectives are called for PyTorch; ``make verbs`` makes verbs.py of it."""

from __future__ import annotations

from polyhvd.collectives.table import Dialect, Parameter

__all__ = ["DIALECT"]

_DIFFERENTIABLE = (
    "Differentiable for Average and Sum, also twice, where every rank runs the same backward: tensors "
    "require gradients on every rank or on none. May be called in ``torch.compile``."
)
_COPIES = (
    "Differentiable, also twice, where every rank runs the same backward: tensors require gradients on every "
    "rank or on none. May be called in ``torch.compile``."
)
_IN_PLACE = (
    "Not differentiable: backward through the old values of the tensor is refused. May be called in "
    "``torch.compile``."
)

DIALECT = Dialect(
    title="PyTorch",
    module="polyhvd.torch",
    tensor="tensor",
    type="torch.Tensor",
    imports=("import torch", "from polyhvd.torch.functions import Compression, functions"),
    example_import="import torch",
    ones="torch.ones",
    array="torch.tensor",
    dtypes="float16, bfloat16, float32, float64, integers of 8 to 64 bits, or bool; on a CPU or a GPU",
    lacks=frozenset({"barrier"}),
    without=frozenset({"priority"}),
    async_without=frozenset({"exact_gradient"}),
    parameters=(
        Parameter(
            "device",
            "int",
            "accepted for compatibility with Horovod. The zeros in place of this rank's tensors are on the "
            "kind of device that the others use; for GPUs, on the one that this rank has used.",
            "-1",
            is_passed=False,
        ),
    ),
    order={"join": "device"},
    notes={
        "allreduce*": _DIFFERENTIABLE,
        "allreduce_": _IN_PLACE,
        "grouped_allreduce_": _IN_PLACE,
        "allgather*": _COPIES,
        "broadcast*": _COPIES,
        "broadcast_": _IN_PLACE,
        "alltoall*": _COPIES,
        "reducescatter*": _DIFFERENTIABLE,
        "*_async": "The result is unknown to autograd.",
    },
)
