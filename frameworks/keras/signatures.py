"""How optimizers of Keras are wrapped; ``make verbs`` makes wrappers.py of it."""

from __future__ import annotations

from dataclasses import replace

from polyhvd.collectives.table.options import KERAS, KERAS_PARTIAL
from polyhvd.collectives.table.schema import Wrapper, Wrappers

__all__ = ["WRAPPERS"]

WRAPPERS = Wrappers(
    title="Keras",
    imports=("from polyhvd.keras.backend import on",),
    options="on.Options",
    parameters={
        **KERAS,
        "optimizer": replace(KERAS["optimizer"], text="of Keras. The result shares its state."),
        "compression": replace(KERAS["compression"], default="on.Compression.none"),
        "sparse_as_dense": replace(
            KERAS["sparse_as_dense"],
            text="reduce sparse gradients (of embeddings) as dense ones. On PyTorch all gradients are dense.",
        ),
    },
    functions=(
        Wrapper(
            "DistributedOptimizer",
            "optimizer name device_dense device_sparse compression sparse_as_dense gradient_predivide_factor "
            "op num_groups groups * backward_passes_per_step average_aggregated_gradients process_set "
            "scale_local_gradients mapping",
            "Wrap an optimizer of Keras so that it applies gradients reduced over the ranks.",
            "model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3 * hvd.size())), loss)",
            details="They are reduced when the optimizer is called, in one operation unless there are "
            "groups; on PyTorch where they lie: what the caller has passed may hold averages afterwards. The "
            "result has one more method, ``register_local_var(variable)``: the gradient of that variable "
            "stays on its rank.",
            calls="on.distribute",
        ),
        replace(KERAS_PARTIAL, calls="on.distribute"),
    ),
)
