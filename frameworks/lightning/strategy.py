"""The strategy: what a Trainer asks of its ranks, answered by polyhvd.torch."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import polyhvd.torch as hvd
import torch
from polyhvd.lightning import elastic
from polyhvd.lightning.base import layer_sync, pl, rank_zero
from polyhvd.lightning.environment import PolyhvdEnvironment
from torchmetrics import Metric

from polyhvd.collectives.adapter import ReduceOp
from polyhvd.collectives.operation import process_set_id
from polyhvd.errors import InvalidArgumentError
from polyhvd.runtime import current
from polyhvd.training.naming import digest, refuse_other_names
from polyhvd.training.options import Options

__all__ = ["PolyhvdStrategy", "register"]

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
#: Those that ``self.log()`` knows.
_METRIC_OPS = (hvd.Average, hvd.Sum, hvd.Min, hvd.Max)
_METRIC_ADVICE = "log the same metrics in the same order on every rank"


def _op(reduce_op: Any) -> int:
    name = "mean" if reduce_op is None else str(reduce_op).rpartition(".")[2].lower()
    if name not in _OPS:
        raise InvalidArgumentError(f"reduce_op={reduce_op!r}: expected one of {', '.join(_OPS)}")
    return _OPS[name]


def _process_set(group: Any) -> hvd.ProcessSet:
    if group is None:
        return hvd.global_process_set
    if not isinstance(group, hvd.ProcessSet):
        raise InvalidArgumentError(
            f"group={group!r}: expected None or a hvd.ProcessSet; groups of torch.distributed are not used"
        )
    return group


class PolyhvdStrategy(pl.strategies.ParallelStrategy):  # type: ignore[misc]
    """Trains one model on all ranks of polyhvdrun; each has its part of every batch.

    Give it to a Trainer in a script that polyhvdrun starts: Lightning starts no processes. In a script that
    was started by itself there is one rank. Optimizers become :func:`polyhvd.torch.DistributedOptimizer`.
    Models and optimizers begin with what rank 0 has. Metrics that are logged with ``sync_dist=True``, and
    torchmetrics that are attributes of the model, are those of all ranks. Files are written by rank 0.

    Args:
        compression: as in :func:`polyhvd.torch.DistributedOptimizer`.
        op: likewise.
        gradient_predivide_factor: likewise.
        num_groups: likewise.
        sparse_as_dense: likewise.
        accelerator: as in Lightning's strategies.
        checkpoint_io: likewise.
        precision_plugin: likewise.

    Raises:
        InvalidArgumentError: an argument cannot be used; or the Trainer has another number of devices
            or nodes than the launcher, or an accelerator other than the CPU.

    Example::

        trainer = lightning.Trainer(strategy=PolyhvdStrategy(compression=hvd.Compression.fp16))
    """

    strategy_name = "polyhvd"

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
        precision_plugin: Any = None,
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
        super().__init__(
            accelerator=accelerator,
            cluster_environment=PolyhvdEnvironment(),
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._options = options.changed()
        self.set_world_ranks()

    # What Lightning asks before it begins ------------------------------------

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Make the strategy known by name; ``horovod`` is an alias, unless that name is in use."""
        for name in ("polyhvd", "horovod"):
            if name not in strategy_registry:
                strategy_registry.register(name, cls, description="Ranks of polyhvdrun")

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning is to give each rank its part of the data."""
        return True

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Which part that is."""
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
                f"PolyhvdStrategy: the Trainer chose {', '.join(kinds)}, and tensors have to be on the CPU; "
                'pass accelerator="cpu"'
            )
        if len(devices) not in (1, hvd.local_size()):
            raise InvalidArgumentError(
                f"PolyhvdStrategy: Trainer(devices={len(devices)}), but the launcher has started "
                f"{hvd.local_size()} ranks on this host; leave devices out, and start "
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
                f"PolyhvdStrategy: Trainer(num_nodes={number}), but the launcher has started ranks on "
                f"{hvd.cross_size()} hosts; leave num_nodes out, and list the hosts with polyhvdrun -H"
            )

    def set_world_ranks(self) -> None:
        """Let Lightning's messages and files be those of rank 0."""
        rank_zero.rank_zero_only.rank = hvd.rank()

    # Models and optimizers ---------------------------------------------------

    def setup(self, trainer: Any) -> None:
        """As in Lightning; ``Trainer(sync_batchnorm=True)`` converts to polyhvd's layers."""
        if trainer.state.fn == pl.trainer.states.TrainerFn.FITTING and self._layer_sync is not None:
            if type(self._layer_sync) is layer_sync.TorchSyncBatchNorm:
                self.model = hvd.convert_sync_batchnorm(self.model)
            else:
                self.model = self._layer_sync.apply(self.model)
        super().setup(trainer)
        for name, module in self.lightning_module.named_modules():
            if isinstance(module, Metric):
                _join_ranks(name, module)

    def model_to_device(self) -> None:
        """Models are on the CPU."""
        self.model.to(self.root_device)

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        hvd.broadcast_parameters([*model.named_parameters(), *model.named_buffers()], root_rank=0)
        return model

    def setup_optimizers(self, trainer: Any) -> None:
        """Make the model's optimizers, and let them reduce."""
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            if not hasattr(optimizer, "no_sync"):  # as one that the program has wrapped itself
                hvd.DistributedOptimizer(optimizer, self._names_for(optimizer), **self._options)
        # In another class now, which Lightning's own wrappers have to take up.
        self.optimizers = self.optimizers

    def _names_for(self, optimizer: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
        """Names of the optimizer's parameters, where the model has them."""
        names = {id(parameter): name for name, parameter in self.lightning_module.named_parameters()}
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return [(names.get(id(p), f"parameter {i}"), p) for i, p in enumerate(parameters)]

    def on_train_start(self) -> None:
        """Optimizers, restored from a checkpoint or not, begin with what rank 0 has."""
        for optimizer in self.optimizers:
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate: gradients within are not reduced."""
        with contextlib.ExitStack() as stack:
            for optimizer in self.optimizers:
                stack.enter_context(optimizer.no_sync())
            yield

    # Exchanges ---------------------------------------------------------------

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """A new tensor with the ranks' mean, or the reduction ``reduce_op``; other values stay as they are.

        A metric that is logged with ``sync_dist=True`` is paired by its name.

        Raises:
            RankMismatchError: the ranks have logged metrics with different names; on every rank.
        """
        if not isinstance(tensor, Tensor):
            return tensor
        process_set = _process_set(group)
        caller = getattr(sys._getframe(1).f_locals.get("self"), "meta", None)  # Lightning passes no name
        name = getattr(caller, "name", None)
        op, value = _op(reduce_op), tensor.detach()
        if isinstance(name, str) and value.numel() == 1 and value.is_floating_point() and op in _METRIC_OPS:
            return _reduced_metric(name, value, op, process_set)
        return hvd.allreduce(value, op=op, process_set=process_set)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """The ranks' tensors, stacked: ``[...]`` to ``[ranks, ...]``; with ``sync_grads`` differentiable."""
        rows = (tensor if sync_grads else tensor.detach()).unsqueeze(0)
        # Lightning's own strategies add up the ranks' gradients.
        return hvd.allgather(rows, process_set=_process_set(group), exact_gradient=True)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Rank ``src``'s object."""
        return hvd.broadcast_object(obj, src, name="lightning.broadcast")

    def barrier(self, name: str | None = None) -> None:
        """Return when every rank has come here."""
        hvd.barrier()

    # Checkpoints -------------------------------------------------------------

    def load_checkpoint(self, checkpoint_path: Any, **kwargs: Any) -> Any:
        """The content of a file, or the commit of an elastic job that the path stands for."""
        kept = elastic.kept_as(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, **kwargs) if kept is None else kept

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore optimizers; a checkpoint of another strategy serves as well."""
        states = checkpoint["optimizer_states"]
        if len(states) != len(self.optimizers):
            raise InvalidArgumentError(
                f"the checkpoint has the states of {len(states)} optimizers, and the model has "
                f"{len(self.optimizers)}; resume with the configure_optimizers() that it was written with"
            )
        super().load_optimizer_state_dict(checkpoint)


@functools.lru_cache(maxsize=1024)
def _code(name: str) -> tuple[float, float]:
    """Two numbers for a name, whose sums over all ranks are exact in float64."""
    number = digest([name])
    return float(int.from_bytes(number[:4], "big")), float(int.from_bytes(number[4:8], "big"))


def _reduced_metric(name: str, value: Tensor, op: int, process_set: hvd.ProcessSet) -> Tensor:
    """Reduce one number together with a code of its name, in one allreduce."""
    code, is_sum = _code(name), op in (hvd.Average, hvd.Sum)
    # All codes are the same if and only if the largest one is minus the largest of their negatives.
    sent = (value.item(), *code) if is_sum else (value.item(), *code, -code[0], -code[1])
    row = torch.tensor(sent, dtype=torch.float64)
    result, *codes = hvd.allreduce(row, op=hvd.Sum if is_sum else op, process_set=process_set).tolist()
    ranks = process_set.size()
    expected = [ranks * each for each in code] if is_sum else [-each for each in codes[2:]]
    if codes[:2] != expected:
        world, number = process_set.world or current.world(), process_set_id(process_set)
        refuse_other_names(world, number, "log(sync_dist=True)", [name], _METRIC_ADVICE)
    return value.new_full(value.shape, result / ranks if op == hvd.Average else result)


def _gather(name: str, tensor: Tensor, group: Any = None) -> list[Tensor]:
    """The ranks' tensors, of any shapes, for the metric of torchmetrics of that name."""
    process_set = _process_set(group)
    gathered = hvd.allgather_object((name, tensor), "torchmetrics", process_set)
    if {other for other, _ in gathered} != {name}:
        world, number = process_set.world or current.world(), process_set_id(process_set)
        refuse_other_names(world, number, "torchmetrics", [name], _METRIC_ADVICE)
    return [tensor for _, tensor in gathered]


def _has_peers() -> bool:
    return hvd.is_initialized() and hvd.size() > 1


def _join_ranks(name: str, metric: Metric) -> None:
    """Make a metric gather over polyhvd's ranks, unless the program has set how it gathers."""
    if metric.dist_sync_fn is None:
        metric.dist_sync_fn = functools.partial(_gather, name)
        metric.distributed_available_fn = _has_peers


def register() -> None:
    """Make ``Trainer(strategy="polyhvd")`` work; importing polyhvd.lightning does it.

    Example::

        polyhvd.lightning.register()
        trainer = lightning.Trainer(strategy="polyhvd")
    """
    PolyhvdStrategy.register_strategies(pl.strategies.StrategyRegistry)
