"""The strategy of Lightning Fabric: a program's own training loop on the ranks of polyhvdrun."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import polyhvd.torch as hvd
import torch
from polyhvd.lightning.base import fabric
from polyhvd.lightning.ranks import Ranks, names_for, process_set_of, reduction

__all__ = ["FabricStrategy"]

Tensor = torch.Tensor


class FabricStrategy(Ranks, fabric.strategies.ParallelStrategy):  # type: ignore[misc]
    """Trains a model of a Fabric on all ranks of polyhvdrun; each reads its part of the data.

    Give it to a Fabric in a script that polyhvdrun starts: Lightning starts no processes. ``fabric.setup()``
    gives models the weights of rank 0 and makes optimizers :func:`polyhvd.torch.DistributedOptimizer`,
    ``fabric.setup_dataloaders()`` shards the data, and ``fabric.save()`` writes on rank 0.

    Args:
        compression: as in :func:`polyhvd.torch.DistributedOptimizer`.
        op: likewise.
        gradient_predivide_factor: likewise.
        num_groups: likewise.
        sparse_as_dense: likewise.
        accelerator: as in Lightning's strategies.
        checkpoint_io: likewise.
        precision: likewise.

    Raises:
        InvalidArgumentError: an argument cannot be used; or the Fabric has another number of devices or nodes
            than the launcher, or an accelerator other than the CPU.

    Example::

        fabric = lightning.Fabric(strategy="polyhvd", accelerator="cpu")
        fabric.launch()
        model, optimizer = fabric.setup(model, optimizer)
    """

    def __init__(
        self,
        *,
        compression: Any = hvd.Compression.none,
        op: int = hvd.Average,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        sparse_as_dense: bool = False,
        accelerator: Any = None,
        checkpoint_io: Any = None,
        precision: Any = None,
    ) -> None:
        super().__init__(
            "Fabric",
            compression=compression,
            op=op,
            gradient_predivide_factor=gradient_predivide_factor,
            num_groups=num_groups,
            sparse_as_dense=sparse_as_dense,
            accelerator=accelerator,
            checkpoint_io=checkpoint_io,
            precision=precision,
        )
        self._backward_sync_control = _NoSync()
        self._modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def _set_world_ranks(self) -> None:
        self.num_nodes = self._num_nodes  # as given to the Fabric, to be checked

    def module_to_device(self, module: torch.nn.Module) -> None:
        """Move a model to the CPU."""
        module.to(self.root_device)

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Give a model the weights of rank 0."""
        hvd.broadcast_parameters([*module.named_parameters(), *module.named_buffers()], root_rank=0)
        self._modules.add(module)
        return module

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Make an optimizer reduce gradients, unless the program has done so."""
        if not hasattr(optimizer, "no_sync"):
            hvd.DistributedOptimizer(optimizer, names_for(self._modules, optimizer), **self._options)
        self._backward_sync_control.optimizers.add(optimizer)
        return optimizer

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the ranks' mean, or the reduction ``reduce_op``; other values stay as they are."""
        if not isinstance(tensor, Tensor):
            return tensor
        return hvd.allreduce(tensor.detach(), op=reduction(reduce_op), process_set=process_set_of(group))


class _NoSync:
    """Implements ``fabric.no_backward_sync(model)``."""

    def __init__(self) -> None:
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()

    @contextlib.contextmanager
    def no_backward_sync(self, module: torch.nn.Module, enabled: bool = True) -> Iterator[None]:
        """Accumulate: gradients of the model's parameters within are not reduced.

        Args:
            module: the model.
            enabled: False: they are reduced.
        """
        own = {id(parameter) for parameter in module.parameters()}
        with contextlib.ExitStack() as stack:
            for optimizer in self.optimizers if enabled else ():
                if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
                    stack.enter_context(optimizer.no_sync())
            yield
