"""How optimizers and tapes are wrapped for TensorFlow; ``make verbs`` makes wrappers.py of it."""

from __future__ import annotations

from dataclasses import replace

from polyhvd.collectives.table.options import KERAS, KERAS_PARTIAL
from polyhvd.collectives.table.schema import Parameter, Wrapper, Wrappers

__all__ = ["WRAPPERS"]

_OPTIMIZER = (
    "optimizer name use_locking device_dense device_sparse compression sparse_as_dense "
    "backward_passes_per_step op gradient_predivide_factor average_aggregated_gradients num_groups groups "
    "process_set scale_local_gradients mapping"
)
_GRADTAPE = (
    "gradtape device_dense device_sparse compression sparse_as_dense op gradient_predivide_factor num_groups "
    "groups process_set scale_local_gradients mapping"
)
_PARTIAL = ("process_set", "process_set local_layers")
_COMPRESSION = KERAS["compression"].text.replace(
    "or its class, which may keep state for each gradient",
    "(an object, not a class), which keeps state between tapes",
)

WRAPPERS = Wrappers(
    title="TensorFlow",
    imports=(
        "import tensorflow as tf",
        "from polyhvd.tensorflow.compression import Compression",
        "from polyhvd.tensorflow.gradient_tape import distribute_tape",
        "from polyhvd.tensorflow.gradients import TensorflowOptions",
        "from polyhvd.tensorflow.names import do_not_convert",
        "from polyhvd.tensorflow.optimizer import distribute",
    ),
    options="TensorflowOptions",
    decorator="@do_not_convert",
    parameters={
        **KERAS,
        "gradtape": Parameter(
            "gradtape",
            "tf.GradientTape",
            "the tape; it may have recorded already. Both share what was recorded.",
        ),
    },
    functions=(
        Wrapper(
            "DistributedOptimizer",
            _OPTIMIZER,
            "Wrap an optimizer so that it applies gradients reduced over the ranks.",
            "model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3 * hvd.size())), loss)",
            details="The result has one more method, ``register_local_var(variable)``: the gradient of that "
            "variable stays on its rank.",
            raises={
                "InvalidArgumentError": "an argument cannot be used, or later, in a function that XLA "
                "compiles: compile the model with ``jit_compile=False``.",
            },
        ),
        replace(KERAS_PARTIAL, order=_OPTIMIZER.replace(*_PARTIAL)),
        Wrapper(
            "DistributedGradientTape",
            _GRADTAPE,
            "Wrap a ``tf.GradientTape`` so that ``gradient()`` returns gradients reduced over the ranks.",
            "with tf.GradientTape() as tape:\n"
            "    loss = compute(model, batch)\n"
            "tape = hvd.DistributedGradientTape(tape)\n"
            "gradients = tape.gradient(loss, model.trainable_variables)",
            details="The result has one more method, ``register_local_source(variable)``: the gradient of "
            "that variable stays on its rank. With loss scaling, use :func:`DistributedOptimizer` and its "
            "``register_local_var(variable)`` instead: an overflow in a local gradient of a tape makes only "
            "its rank skip the step.",
            texts={"compression": _COMPRESSION},
            calls="distribute_tape",
        ),
        Wrapper(
            "PartialDistributedGradientTape",
            _GRADTAPE.replace(*_PARTIAL),
            "A :func:`DistributedGradientTape` that leaves the gradients of some layers on their rank.",
            "tape = hvd.PartialDistributedGradientTape(tape, local_layers=model.layers[0])",
            texts={"compression": _COMPRESSION},
            calls="distribute_tape",
        ),
    ),
)
