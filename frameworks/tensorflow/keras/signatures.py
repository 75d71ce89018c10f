"""How optimizers of Keras are wrapped on TensorFlow; ``make verbs`` makes wrappers.py of it."""

from __future__ import annotations

from polyhvd.collectives.table.options import KERAS, KERAS_PARTIAL
from polyhvd.collectives.table.schema import Wrapper, Wrappers

__all__ = ["WRAPPERS"]

WRAPPERS = Wrappers(
    title="Keras on TensorFlow",
    imports=(
        "from polyhvd.tensorflow.compression import Compression",
        "from polyhvd.tensorflow.gradients import TensorflowOptions",
        "from polyhvd.tensorflow.names import do_not_convert",
        "from polyhvd.tensorflow.optimizer import distribute",
    ),
    options="TensorflowOptions",
    decorator="@do_not_convert",
    parameters=KERAS,
    functions=(
        Wrapper(
            "DistributedOptimizer",
            "optimizer name device_dense device_sparse compression sparse_as_dense gradient_predivide_factor "
            "op backward_passes_per_step average_aggregated_gradients num_groups groups process_set "
            "scale_local_gradients mapping",
            "Wrap an optimizer of Keras so that it applies gradients reduced over the ranks.",
            "model.compile(hvd.DistributedOptimizer(tf.keras.optimizers.Adam(1e-3 * hvd.size())), loss)",
        ),
        KERAS_PARTIAL,
    ),
)
