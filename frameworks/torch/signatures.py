"""How optimizers are wrapped for PyTorch; ``make verbs`` makes wrappers.py of it."""

from __future__ import annotations

from polyhvd.collectives.table.options import OPTIONS
from polyhvd.collectives.table.schema import REFUSED, Parameter, Wrapper, Wrappers

__all__ = ["WRAPPERS"]

WRAPPERS = Wrappers(
    title="PyTorch",
    imports=(
        "import torch",
        "from polyhvd.torch.base import Compression",
        "from polyhvd.torch.optimizer import distribute",
    ),
    ops="tuple(ReduceOp)",
    parameters={
        **OPTIONS,
        "optimizer": Parameter(
            "optimizer", "torch.optim.Optimizer", "of ``torch.optim``, or a subclass; the same on every rank."
        ),
        "named_parameters": Parameter(
            "named_parameters",
            "Iterable[tuple[str, torch.Tensor]] | None",
            "pairs of name and parameter, for messages, and to distinguish optimizers.",
            "None",
        ),
    },
    functions=(
        Wrapper(
            "DistributedOptimizer",
            "optimizer named_parameters compression backward_passes_per_step op gradient_predivide_factor "
            "num_groups groups sparse_as_dense process_set * scale_local_gradients mapping",
            "Make an optimizer reduce gradients over the ranks; returns it, now of a subclass of its class.",
            "optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))",
            details="Reductions start during backward, as soon as a gradient is ready, and have ended when "
            "it returns: what lies between ``backward()`` and ``step()`` (clipping, ``GradScaler.unscale_``) "
            "sees the result. A gradient that only some ranks have is zero on the others; one that no rank "
            "has stays None. Optimizers with the same ``op``, ``process_set`` and "
            "``backward_passes_per_step`` may share parameters. If these differ, the newer one takes the "
            "parameters over, and the older one raises when it is used.\n\nRanks make their optimizers in "
            "the same order. Threads may use optimizers at the same time, each its own, the same ones on "
            "every rank.",
            texts={
                "op": "Average (default), Sum, Adasum, Min, Max or Product. With Adasum each rank takes its "
                "own step, with its own gradients, and the differences that the steps have made to the model "
                "are combined in ``step()``; see :class:`polyhvd.torch.adasum.AdasumOptimizer`.",
                "gradient_predivide_factor": OPTIONS["gradient_predivide_factor"].text
                + " Dense gradients only.",
                "backward_passes_per_step": "gradients of this many passes are added up, then reduced; an "
                "integer of 1 or more.",
                "num_groups": "make as many groups of neighbouring parameters; 0: none.",
                "groups": "a list of lists of parameters, or a number, which means ``num_groups``. The "
                "gradients of a group are reduced as one operation, when the last of them is ready: all or "
                "none. Parameters in no group, frozen ones and sparse gradients are reduced by themselves.",
                "sparse_as_dense": "reduce sparse gradients as dense ones, which are made sparse again "
                "before the step. Otherwise they travel as they are (COO), and cost what their nonzeros do; "
                "Average and Sum only.",
                "scale_local_gradients": "divide gradients of parameters given to ``register_local_var()`` "
                "by the number of ranks, as averages are.",
                "mapping": "of the model, by :func:`polyhvd.parity.mapping`, where ranks have different "
                "frameworks: then gradients are reduced in ``step()``, or in ``synchronize()`` before, if "
                "they are to be clipped. None: all have the same. Excludes groups, and Adasum.",
            },
            raises={**REFUSED, "NotInitializedError": "before ``init()``."},
        ),
    ),
)
