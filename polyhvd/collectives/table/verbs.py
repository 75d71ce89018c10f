"""The collectives and their forms."""

from __future__ import annotations

from dataclasses import replace

from polyhvd.collectives.table.parameters import PARAMETERS
from polyhvd.collectives.table.schema import Family, Parameter, Verb

__all__ = ["FAMILIES", "RAISES", "VERBS"]

#: Name and text of each error that a collective raises.
RAISES = {
    "NotInitializedError": "before ``init()``, or after ``shutdown()``.",
    "InvalidArgumentError": "a bad call, such as a name that is in flight or an unknown process set; nothing "
    "was sent.",
    "TypeError": "an argument is not {a_tensor}, or its dtype cannot be sent.",
    "RankMismatchError": "shapes, dtypes or arguments differ between ranks; raised on every rank, and the "
    "job continues.",
    "HorovodInternalError": "a rank was lost or has shut down, or a transfer has timed out.",
}
_ALL = (
    "NotInitializedError",
    "InvalidArgumentError",
    "TypeError",
    "RankMismatchError",
    "HorovodInternalError",
)

_SCATTER_PARAMETERS = (
    Parameter(
        "op",
        "int",
        "Average, Sum, Min, Max or Product of the module. The average of integers is truncated, and bool has "
        "none. Adasum is not supported, since it needs whole {tensors}.",
        "ReduceOp.Average",
    ),
    replace(
        PARAMETERS["exact_gradient"],
        text=PARAMETERS["exact_gradient"].text.replace("divided", "multiplied"),
    ),
)

FAMILIES = {
    family.name: family
    for family in (
        Family(
            "allreduce",
            (
                *("tensor", "tensors", "average", "name", "compression", "op"),
                *("prescale_factor", "postscale_factor", "process_set", "priority"),
            ),
            "All ranks get the same result, bit by bit.",
            _ALL,
        ),
        Family(
            "allgather",
            ("tensor", "tensors", "name", "process_set", "exact_gradient", "priority"),
            "The first dimension may differ between ranks, and may be 0. That of the result is their sum.",
            _ALL,
        ),
        Family(
            "broadcast",
            ("tensor", "root_rank", "name", "process_set", "exact_gradient", "priority"),
            "",
            _ALL,
        ),
        Family(
            "alltoall",
            ("tensor", "splits", "name", "process_set", "priority"),
            "Each rank sends consecutive rows of its {tensor} to the ranks in turn, and gets what they have "
            "sent to it, in order of rank.",
            _ALL,
        ),
        Family(
            "reducescatter",
            (
                *("tensor", "tensors", "name", "compression", "op", "process_set"),
                *("prescale_factor", "postscale_factor", "exact_gradient", "priority"),
            ),
            "Rows are assigned in order of rank; if they do not divide evenly, the first ranks get one more.",
            _ALL,
            _SCATTER_PARAMETERS,
        ),
        Family("handles", ("handle",)),
        Family("barrier", ("process_set",), "", (*_ALL[:2], _ALL[-1])),
        Family("join", (), "", (_ALL[0], _ALL[-1])),
    )
}

_NUMBERS = (
    "{a_tensor} of any shape, which may be empty, or a number, which stands for {a_tensor} without "
    "dimensions; shape and dtype are the same on every rank: {dtypes}."
)
_OVERWRITTEN = (
    "{a_tensor} of any shape, which is overwritten; shape and dtype are the same on every rank: {dtypes}."
)
_SCATTERED = "{a_tensor} with at least one dimension; shape and dtype are the same on every rank: {dtypes}."
_GRADIENT = ("exact_gradient",)
_NEW = ("compression",)
_HANDLE = "A handle for ``poll()`` and ``synchronize()``, which returns {what}, or raises the error."
_LEAVE_ALONE = "Do not use the {tensor} until ``synchronize()`` has returned."

_ALLREDUCE = (
    Verb(
        "allreduce",
        "allreduce",
        "Reduce {a_tensor}, or a number, elementwise over the ranks into a new {tensor}.",
        "{Tensor}",
        "A new {tensor} of the same shape and dtype.",
        "mean = hvd.allreduce({array}([1.0, 2.0]))\n"
        "total = hvd.allreduce({array}([1.0, 2.0]), op=hvd.Sum)  # [1.0 * hvd.size(), 2.0 * hvd.size()]",
        without=("tensors",),
        texts={"tensor": _NUMBERS},
    ),
    Verb(
        "allreduce_",
        "allreduce",
        "Reduce {a_tensor} elementwise over the ranks, in place.",
        "{Tensor}",
        "``tensor`` itself.",
        "gradient = {ones}((3,))\nhvd.allreduce_(gradient, op=hvd.Sum)  # every element is hvd.size()",
        without=("tensors", *_NEW),
        texts={"tensor": _OVERWRITTEN},
    ),
    Verb(
        "allreduce_async",
        "allreduce",
        "Start :func:`allreduce`, and return at once.",
        "Handle[{Tensor}]",
        _HANDLE.replace("{what}", "the new {tensor}"),
        "handle = hvd.allreduce_async({ones}((3,)), op=hvd.Sum)\n"
        "total = hvd.synchronize(handle)  # every element is hvd.size()",
        details=_LEAVE_ALONE,
        without=("tensors", *_NEW),
        texts={"tensor": _NUMBERS},
    ),
    Verb(
        "allreduce_async_",
        "allreduce",
        "Start :func:`allreduce_`, and return at once.",
        "Handle[{Tensor}]",
        _HANDLE.replace("{what}", "``tensor``"),
        "gradient = {ones}((3,))\n"
        "handle = hvd.allreduce_async_(gradient, op=hvd.Sum)\n"
        "hvd.synchronize(handle)  # now every element of gradient is hvd.size()",
        details=_LEAVE_ALONE,
        without=("tensors", *_NEW),
        texts={"tensor": _OVERWRITTEN},
    ),
    Verb(
        "grouped_allreduce",
        "allreduce",
        "Reduce several {tensors} over the ranks into new ones, as one operation: all or none.",
        "list[{Tensor}]",
        "New {tensors} in the order of ``tensors``, of the same shapes and dtypes.",
        "weight, bias = hvd.grouped_allreduce([{ones}((2, 3)), {ones}((3,))])",
        without=("tensor",),
    ),
    Verb(
        "grouped_allreduce_",
        "allreduce",
        "Reduce several {tensors} over the ranks in place, as one operation: all or none.",
        "list[{Tensor}]",
        "The {tensors} themselves.",
        "gradients = [{ones}((2, 3)), {ones}((3,))]\nhvd.grouped_allreduce_(gradients, op=hvd.Sum)",
        without=("tensor", *_NEW),
    ),
    Verb(
        "grouped_allreduce_async",
        "allreduce",
        "Start :func:`grouped_allreduce`, and return at once.",
        "Handle[list[{Tensor}]]",
        _HANDLE.replace("{what}", "the list of new {tensors}"),
        "handle = hvd.grouped_allreduce_async([{ones}((2, 3)), {ones}((3,))])\n"
        "weight, bias = hvd.synchronize(handle)",
        details=_LEAVE_ALONE.replace("{tensor}", "{tensors}"),
        without=("tensor", *_NEW),
    ),
    Verb(
        "grouped_allreduce_async_",
        "allreduce",
        "Start :func:`grouped_allreduce_`, and return at once.",
        "Handle[list[{Tensor}]]",
        _HANDLE.replace("{what}", "the list of the {tensors} themselves"),
        "gradients = [{ones}((2, 3)), {ones}((3,))]\n"
        "handle = hvd.grouped_allreduce_async_(gradients, op=hvd.Sum)\n"
        "hvd.synchronize(handle)",
        details=_LEAVE_ALONE.replace("{tensor}", "{tensors}"),
        without=("tensor", *_NEW),
    ),
)

_ALLGATHER = (
    Verb(
        "allgather",
        "allgather",
        "Concatenate the ranks' {tensors} along the first dimension, in order of rank, on every rank.",
        "{Tensor}",
        "A new {tensor} with the rows of all ranks.",
        "rows = hvd.allgather({ones}((2, 3)))  # of shape (2 * hvd.size(), 3)",
        without=("tensors",),
    ),
    Verb(
        "allgather_async",
        "allgather",
        "Start :func:`allgather`, and return at once.",
        "Handle[{Tensor}]",
        _HANDLE.replace("{what}", "the new {tensor}"),
        "handle = hvd.allgather_async({ones}((2, 3)))\n"
        "rows = hvd.synchronize(handle)  # of shape (2 * hvd.size(), 3)",
        details=_LEAVE_ALONE,
        without=("tensors",),
    ),
    Verb(
        "grouped_allgather",
        "allgather",
        "Gather several {tensors}, as one operation: all or none; see :func:`allgather`.",
        "list[{Tensor}]",
        "New {tensors} in the order of ``tensors``, each with the rows of all ranks.",
        "images, labels = hvd.grouped_allgather([{ones}((2, 3)), {ones}((2,))])",
        without=("tensor",),
    ),
    Verb(
        "grouped_allgather_async",
        "allgather",
        "Start :func:`grouped_allgather`, and return at once.",
        "Handle[list[{Tensor}]]",
        _HANDLE.replace("{what}", "the list of new {tensors}"),
        "handle = hvd.grouped_allgather_async([{ones}((2, 3)), {ones}((2,))])\n"
        "images, labels = hvd.synchronize(handle)",
        details=_LEAVE_ALONE.replace("{tensor}", "{tensors}"),
        without=("tensor",),
    ),
)

_BROADCAST = (
    Verb(
        "broadcast",
        "broadcast",
        "Return a copy of the root's {tensor}, or number, on every rank.",
        "{Tensor}",
        "A new {tensor}, on the root as well.",
        "weights = hvd.broadcast({ones}((3,)), root_rank=0)",
        texts={"tensor": _NUMBERS + " Only the values on the root matter."},
    ),
    Verb(
        "broadcast_",
        "broadcast",
        "Overwrite {a_tensor} with the root's, on every rank.",
        "{Tensor}",
        "``tensor`` itself.",
        "weights = {ones}((3,))\nhvd.broadcast_(weights, root_rank=0)",
        without=_GRADIENT,
        texts={"tensor": _OVERWRITTEN + " The {tensor} of the root is only read."},
    ),
    Verb(
        "broadcast_async",
        "broadcast",
        "Start :func:`broadcast`, and return at once.",
        "Handle[{Tensor}]",
        _HANDLE.replace("{what}", "the new {tensor}"),
        "handle = hvd.broadcast_async({ones}((3,)), root_rank=0)\nweights = hvd.synchronize(handle)",
        details=_LEAVE_ALONE,
        texts={"tensor": _NUMBERS + " Only the values on the root matter."},
    ),
    Verb(
        "broadcast_async_",
        "broadcast",
        "Start :func:`broadcast_`, and return at once.",
        "Handle[{Tensor}]",
        _HANDLE.replace("{what}", "``tensor``"),
        "weights = {ones}((3,))\n"
        "handle = hvd.broadcast_async_(weights, root_rank=0)\n"
        "hvd.synchronize(handle)",
        details=_LEAVE_ALONE,
        without=_GRADIENT,
        texts={"tensor": _OVERWRITTEN + " The {tensor} of the root is only read."},
    ),
)

_ALLTOALL = (
    Verb(
        "alltoall",
        "alltoall",
        "Exchange rows with all ranks.",
        "{Tensor} | tuple[{Tensor}, {Tensor}]",
        "A new {tensor} with the received rows. With ``splits`` a tuple of it and of how many rows came from "
        "each rank, as int32.",
        "rows = {ones}((2 * hvd.size(), 3))\n"
        "received, counts = hvd.alltoall(rows, splits=[2] * hvd.size())  # two rows for each rank",
        overloads=(
            "splits",
            (("None", "{Tensor}"), ("Sequence[int] | {Given}", "tuple[{Tensor}, {Tensor}]")),
        ),
    ),
    Verb(
        "alltoall_async",
        "alltoall",
        "Start :func:`alltoall`, and return at once.",
        "Handle[tuple[{Tensor}, {Tensor}]]",
        _HANDLE.replace(
            "{what}",
            "the tuple of the received rows and of how many came from each rank, also without ``splits``,",
        ),
        "handle = hvd.alltoall_async({ones}((2 * hvd.size(), 3)))\n"
        "received, counts = hvd.synchronize(handle)",
        details=_LEAVE_ALONE,
    ),
)

_REDUCESCATTER = (
    Verb(
        "reducescatter",
        "reducescatter",
        "Reduce {a_tensor} elementwise over the ranks, and return this rank's part of the rows.",
        "{Tensor}",
        "A new {tensor} with this rank's rows of the result.",
        "rows = hvd.reducescatter({ones}((2 * hvd.size(), 3)), op=hvd.Sum)  # of shape (2, 3)",
        without=("tensors",),
        texts={"tensor": _SCATTERED},
    ),
    Verb(
        "reducescatter_async",
        "reducescatter",
        "Start :func:`reducescatter`, and return at once.",
        "Handle[{Tensor}]",
        _HANDLE.replace("{what}", "the new {tensor}"),
        "handle = hvd.reducescatter_async({ones}((2 * hvd.size(), 3)), op=hvd.Sum)\n"
        "rows = hvd.synchronize(handle)  # of shape (2, 3)",
        details=_LEAVE_ALONE,
        without=("tensors", *_NEW),
        texts={"tensor": _SCATTERED},
    ),
    Verb(
        "grouped_reducescatter",
        "reducescatter",
        "Reduce several {tensors} and return this rank's rows, as one operation: all or none.",
        "list[{Tensor}]",
        "New {tensors} in the order of ``tensors``, each with this rank's rows of the result.",
        "pair = [{ones}((2 * hvd.size(), 3)), {ones}((hvd.size(),))]\n"
        "first, second = hvd.grouped_reducescatter(pair)",
        without=("tensor",),
    ),
    Verb(
        "grouped_reducescatter_async",
        "reducescatter",
        "Start :func:`grouped_reducescatter`, and return at once.",
        "Handle[list[{Tensor}]]",
        _HANDLE.replace("{what}", "the list of new {tensors}"),
        "pair = [{ones}((2 * hvd.size(), 3)), {ones}((hvd.size(),))]\n"
        "handle = hvd.grouped_reducescatter_async(pair)\n"
        "first, second = hvd.synchronize(handle)",
        details=_LEAVE_ALONE.replace("{tensor}", "{tensors}"),
        without=("tensor", *_NEW),
    ),
)

_HANDLES = (
    Verb(
        "poll",
        "handles",
        "Return whether :func:`synchronize` would return without waiting.",
        "bool",
        "True when the operation has ended, also with an error.",
        "handle = hvd.allreduce_async({ones}((3,)))\nis_done = hvd.poll(handle)\nhvd.synchronize(handle)",
    ),
    Verb(
        "synchronize",
        "handles",
        "Wait for an operation that an asynchronous function has started, and return its result.",
        "R",
        "The result of the same function without ``_async``; for ``alltoall_async`` always the tuple. "
        "A second call returns the same result.",
        "handle = hvd.allreduce_async({ones}((3,)))\nmean = hvd.synchronize(handle)",
        raises=(_ALL[-2], _ALL[-1]),
    ),
)

_WITHOUT_TENSORS = (
    Verb(
        "barrier",
        "barrier",
        "Return when every rank of the process set has called it.",
        "None",
        "",
        "hvd.barrier()",
    ),
    Verb(
        "join",
        "join",
        "Declare that this rank has run out of data, and return when all ranks have.",
        "int",
        "The rank that joined last: it has seen the most data.",
        "for batch in batches:  # as many as this rank has\n    train(batch)\nlast = hvd.join()",
        details="Meanwhile it takes part in the operations of the others: with zeros in sums and averages, "
        "which still divide by the number of ranks, with neutral elements in other reductions, and without "
        "rows in allgather and alltoall. It cannot be the root of a broadcast, nor start an operation. "
        "For process sets that others have added meanwhile, call ``process_set_of()`` afterwards.",
    ),
)

VERBS = {
    verb.name: verb
    for rows in (_ALLREDUCE, _ALLGATHER, _BROADCAST, _ALLTOALL, _REDUCESCATTER, _HANDLES, _WITHOUT_TENSORS)
    for verb in rows
}
