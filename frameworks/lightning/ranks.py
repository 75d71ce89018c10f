"""What the strategies of a Trainer and of Fabric share: devices, hosts and collectives of polyhvd.torch."""

from __future__ import annotations

from typing import Any

import polyhvd.torch as hvd
import torch
from polyhvd.lightning.base import rank_zero
from polyhvd.lightning.environment import PolyhvdEnvironment

from polyhvd.collectives.adapter import ReduceOp
from polyhvd.errors import InvalidArgumentError
from polyhvd.training.options import Options

__all__ = ["Ranks", "names_for", "process_set_of", "reduction"]

Tensor = torch.Tensor
#: By the names of Lightning and of ``torch.distributed.ReduceOp``.
_OPS = {
    "mean": hvd.Average,
    "avg": hvd.Average,
    "sum": hvd.Sum,
    "min": hvd.Min,
    "max": hvd.Max,
    "product": hvd.Product,
}


def reduction(reduce_op: Any) -> int:
    """Return the reduction of polyhvd for one of Lightning."""
    name = "mean" if reduce_op is None else str(reduce_op).rpartition(".")[2].lower()
    if name not in _OPS:
        raise InvalidArgumentError(f"reduce_op={reduce_op!r}: expected one of {', '.join(_OPS)}")
    return _OPS[name]


def process_set_of(group: Any) -> hvd.ProcessSet:
    """Return the process set for an argument ``group`` of Lightning."""
    if group is None:
        return hvd.global_process_set
    if not isinstance(group, hvd.ProcessSet):
        raise InvalidArgumentError(
            f"group={group!r}: expected None or a hvd.ProcessSet; groups of torch.distributed are not used"
        )
    return group


class Ranks:
    """A part of a ParallelStrategy, before it among the base classes.

    Args:
        caller: the class of Lightning that has the arguments ``devices`` and ``num_nodes``, for messages.
        compression: as in :func:`polyhvd.torch.DistributedOptimizer`, like all the options.
        op: likewise.
        gradient_predivide_factor: likewise.
        num_groups: likewise.
        sparse_as_dense: likewise.
        lightning: arguments of Lightning's class.
    """

    def __init__(
        self,
        caller: str,
        *,
        compression: Any,
        op: int,
        gradient_predivide_factor: float,
        num_groups: int,
        sparse_as_dense: bool,
        **lightning: Any,
    ) -> None:
        options = Options(
            op=op,
            compression=compression,
            gradient_predivide_factor=gradient_predivide_factor,
            num_groups=num_groups,
            sparse_as_dense=sparse_as_dense,
            ops=tuple(ReduceOp),
        )
        hvd.init()
        self._caller = caller
        # Lightning's strategy, which is next among the base classes.
        super().__init__(cluster_environment=PolyhvdEnvironment(), **lightning)  # type: ignore[call-arg]
        self._options = options.changed()
        self.set_world_ranks()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Make the strategy known by name; ``horovod`` is an alias, unless that name is in use."""
        for name in ("polyhvd", "horovod"):
            if name not in strategy_registry:
                strategy_registry.register(name, cls, description="Ranks of polyhvdrun")

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Which part of the data this rank reads."""
        return {"num_replicas": hvd.size(), "rank": hvd.rank()}

    @property
    def root_device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The CPU, once for each rank of this host."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        self._parallel_devices = None
        if not devices:
            return
        kinds = sorted({device.type for device in devices})
        if kinds != ["cpu"]:
            raise InvalidArgumentError(
                f"{type(self).__name__}: {self._caller} chose {', '.join(kinds)}, and tensors have to be on "
                'the CPU; pass accelerator="cpu"'
            )
        if len(devices) not in (1, hvd.local_size()):
            raise InvalidArgumentError(
                f"{type(self).__name__}: {self._caller}(devices={len(devices)}), but the launcher has "
                f"started {hvd.local_size()} ranks on this host; leave devices out, and start "
                f"polyhvdrun -np {len(devices)}"
            )
        self._parallel_devices = [self.root_device] * hvd.local_size()

    @property
    def num_nodes(self) -> int:
        """Number of hosts."""
        return hvd.cross_size()

    @num_nodes.setter
    def num_nodes(self, number: int) -> None:
        if number not in (1, hvd.cross_size()):
            raise InvalidArgumentError(
                f"{type(self).__name__}: {self._caller}(num_nodes={number}), but the launcher has "
                f"started ranks on {hvd.cross_size()} hosts; leave num_nodes out, and list the hosts with "
                "polyhvdrun -H"
            )

    def set_world_ranks(self) -> None:
        """Let Lightning's messages and files be those of rank 0."""
        rank_zero.rank_zero_only.rank = hvd.rank()

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """The ranks' tensors, stacked: ``[...]`` to ``[ranks, ...]``; with ``sync_grads`` differentiable."""
        rows = (tensor if sync_grads else tensor.detach()).unsqueeze(0)
        # Lightning's own strategies add up the ranks' gradients.
        return hvd.allgather(rows, process_set=process_set_of(group), exact_gradient=True)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Rank ``src``'s object."""
        return hvd.broadcast_object(obj, src, name="lightning.broadcast")

    def barrier(self, name: str | None = None) -> None:
        """Return when every rank has come here."""
        hvd.barrier()


def names_for(modules: Any, optimizer: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
    """Return names of an optimizer's parameters, where one of the modules has them."""
    names = {id(parameter): name for module in modules for name, parameter in module.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [(names.get(id(p), f"parameter {i}"), p) for i, p in enumerate(parameters)]
