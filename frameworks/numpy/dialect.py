"""How the collectives are called for NumPy; ``make verbs`` makes verbs.py of it."""

from __future__ import annotations

from polyhvd.collectives.table import Dialect

__all__ = ["DIALECT"]

DIALECT = Dialect(
    title="NumPy",
    module="polyhvd.numpy",
    tensor="array",
    type="Array",
    imports=(
        "from polyhvd.numpy.adapter import Array",
        "from polyhvd.numpy.functions import Compression, functions",
    ),
    example_import="import numpy as np",
    ones="np.ones",
    array="np.array",
    dtypes="float16, bfloat16 of ml_dtypes, float32, float64, integers of 8 to 64 bits, or bool",
    lacks=frozenset({"barrier", "join"}),
    without=frozenset({"exact_gradient", "priority"}),
    notes={
        "*": "{Tensor}s of any strides are taken; those that are dense in row-major order, where they lie."
    },
)
