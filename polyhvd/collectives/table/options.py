"""The options of distributed optimizers and tapes: their types, their defaults, their documentation.

:class:`polyhvd.training.options.Options` checks them. A framework's ``signatures.py`` has the texts that
differ.
"""

from __future__ import annotations

from polyhvd.collectives.table.schema import Parameter, Wrapper

__all__ = ["KERAS", "KERAS_PARTIAL", "OPTIONS"]

_ROWS = (
    Parameter("op", "int", "Average, Sum or Adasum; None is Average.", "ReduceOp.Average"),
    Parameter(
        "compression",
        "Compressor",
        "of the gradients on the wire: ``Compression.none``, ``.fp16``, ``.bf16``, one of your own with "
        "``compress()`` and ``decompress()``, or a :class:`polyhvd.training.compression.KeyedCompressor` or "
        "its class, which may keep state for each gradient. None: the gradients as they are.",
        "Compression.none",
    ),
    Parameter(
        "backward_passes_per_step",
        "int",
        "how many calls make a step; an integer of 1 or more. Gradients are added up on the rank; every n-th "
        "call reduces and applies the sum. The other calls change neither variables nor ``iterations``. "
        "Gradients left at the end of an epoch count for the next one. All ranks must make as many calls. "
        "Keras 3's own ``gradient_accumulation_steps`` reduces in each call, and averages. If both are set, "
        "their product is the number of calls in a step.",
        "1",
    ),
    Parameter(
        "average_aggregated_gradients",
        "bool",
        "divide the sum of several passes by their number.",
        "False",
    ),
    Parameter(
        "gradient_predivide_factor",
        "float",
        "splits the division of an average around the sum: gradients are divided by it before, and by the "
        "number of ranks over it afterwards. Finite and above 0; other than 1 with Average only.",
        "1.0",
    ),
    Parameter("num_groups", "int", "the same as a number for ``groups``.", "0"),
    Parameter(
        "groups",
        "Any",
        "how to split the gradients of a step into operations: into this many, or one for each list of "
        "variables and one for each variable in none; None or 0: one for all.",
        "None",
    ),
    Parameter(
        "sparse_as_dense",
        "bool",
        "reduce tf.IndexedSlices (of embeddings) as dense tensors; else their rows are gathered, and come "
        "back with each index once.",
        "False",
    ),
    Parameter(
        "process_set",
        "ProcessSet",
        "the ranks that take part. Other ranks keep their own gradients.",
        "global_process_set",
    ),
    Parameter(
        "scale_local_gradients",
        "bool",
        "divide gradients that stay on their rank by the number of ranks, as averages are.",
        "True",
    ),
    Parameter(
        "mapping",
        "Any",
        "of the model, by :func:`polyhvd.parity.mapping`, where ranks have different frameworks; None: all "
        "have the same. Excludes groups, and Adasum.",
        "None",
    ),
)
_DEVICE = (
    "accepted for compatibility with Horovod; collectives run on the host, and another device is refused."
)
_OF_KERAS = (
    Parameter("optimizer", "Any", "of Keras 3, Keras 2 or tf.compat.v1. The result shares its state."),
    Parameter(
        "name",
        "str | None",
        "begins the names of the operations; the default is the optimizer's class.",
        "None",
    ),
    Parameter("use_locking", "bool", "accepted for compatibility with Horovod.", "False", is_passed=False),
    Parameter("device_dense", "str", _DEVICE, '""'),
    Parameter("device_sparse", "str", _DEVICE, '""'),
    Parameter(
        "local_layers",
        "Any",
        "a layer of Keras, or a list of them, whose gradients stay on their rank; they need not be built "
        "yet.",
        "None",
    ),
)

OPTIONS = {row.name: row for row in _ROWS}
#: With what optimizers of Keras take besides.
KERAS = {**OPTIONS, **{row.name: row for row in _OF_KERAS}}
#: Of every module for Keras.
KERAS_PARTIAL = Wrapper(
    "PartialDistributedOptimizer",
    "optimizer name device_dense device_sparse compression sparse_as_dense gradient_predivide_factor op "
    "groups process_set local_layers scale_local_gradients backward_passes_per_step "
    "average_aggregated_gradients mapping",
    "A :func:`DistributedOptimizer` that leaves the gradients of some layers on their rank.",
    "optimizer = hvd.PartialDistributedOptimizer(optimizer, local_layers=[model.layers[0]])",
    details="Such layers are to be left out of broadcasts as well: see ``local_variables`` of "
    "``BroadcastGlobalVariablesCallback``.",
    raises={"InvalidArgumentError": "as :func:`DistributedOptimizer`, or ``local_layers`` are not layers."},
)
