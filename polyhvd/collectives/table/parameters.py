"""The arguments of the collectives; a verb may have another text for one of them."""

from __future__ import annotations

from polyhvd.collectives.table.schema import Parameter

__all__ = ["PARAMETERS"]

_ROWS = (
    Parameter(
        "tensor",
        "{Given}",
        "{a_tensor} with at least one dimension. All dimensions but the first, and the dtype, are the same "
        "on every rank: {dtypes}.",
    ),
    Parameter(
        "tensors",
        "Iterable[{Given}]",
        "{tensors}, as many on every rank, in the same order; each as ``tensor`` of :func:`{single}`. Their "
        "dtypes may differ.",
    ),
    Parameter(
        "average",
        "bool | None",
        "the older form of ``op``: True is Average, False is Sum. Give one of the two at most.",
        "None",
    ),
    Parameter(
        "name",
        "str | None",
        "matches the calls of the ranks; a name can be in flight only once. Without a name, a rank's n-th "
        "call of this collective on the process set matches the n-th of the others.",
        "None",
    ),
    Parameter(
        "compression",
        "Compressor | KeyedCompressor",
        "``Compression.none``, ``.fp16`` or ``.bf16``: float32 and float64 are sent, and reduced, in that "
        "dtype, and the result is cast back. Or an object with the same two methods, or a KeyedCompressor, "
        "which keeps its state by ``name`` and so needs one.",
        "Compression.none",
    ),
    Parameter(
        "op",
        "int | None",
        "Average, Sum, Adasum, Min, Max or Product of the module; None is Average. The average of integers "
        "is truncated, and bool has none. Adasum takes only floating-point numbers.",
        "None",
    ),
    Parameter(
        "prescale_factor",
        "float",
        "multiplies each rank's {tensor} before the reduction, integers as float64.",
        "1.0",
    ),
    Parameter("postscale_factor", "float", "multiplies the result in the same way.", "1.0"),
    Parameter(
        "process_set",
        "ProcessSet",
        "the ranks that take part; all of them must make the call. Default: all ranks of the job.",
        "global_process_set",
    ),
    Parameter(
        "exact_gradient",
        "bool | None",
        "True: the gradient is that of the sum of all ranks' losses. False: divided by the number of ranks, "
        "as in Horovod. None: the environment variable ``POLYHVD_EXACT_GRADIENTS``, which is False "
        "by default. The same on every rank.",
        "None",
    ),
    Parameter(
        "priority",
        "int",
        "operations with a higher priority run first among those that are ready.",
        "0",
    ),
    Parameter("root_rank", "int", "world rank of the sender, which is a member of the process set."),
    Parameter(
        "splits",
        "Sequence[int] | {Given} | None",
        "how many rows go to each rank of the process set, in order of rank: whole numbers, at most as many "
        "in all as ``tensor`` has. None: equal parts.",
        "None",
    ),
    Parameter("handle", "Handle[R]", "the handle that an asynchronous function has returned."),
)

PARAMETERS = {row.name: row for row in _ROWS}
