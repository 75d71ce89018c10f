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
from polyhvd.lightning.base import fabric, layer_sync, pl
from polyhvd.lightning.fabric import FabricStrategy
from polyhvd.lightning.ranks import Ranks, names_for, process_set_of, reduction
from torchmetrics import Metric

from polyhvd.collectives.operation import process_set_id
from polyhvd.errors import InvalidArgumentError
from polyhvd.runtime import current
from polyhvd.training.naming import digest, refuse_other_names

__all__ = ["PolyhvdStrategy", "register"]

Tensor = torch.Tensor
#: Those that ``self.log()`` knows.
_METRIC_OPS = (hvd.Average, hvd.Sum, hvd.Min, hvd.Max)
_METRIC_ADVICE = "log the same metrics in the same order on every rank"


class PolyhvdStrategy(Ranks, pl.strategies.ParallelStrategy):  # type: ignore[misc]
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
        super().__init__(
            "Trainer",
            compression=compression,
            op=op,
            gradient_predivide_factor=gradient_predivide_factor,
            num_groups=num_groups,
            sparse_as_dense=sparse_as_dense,
            accelerator=accelerator,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning is to give each rank its part of the data."""
        return True

    # Models and optimizers ---------------------------------------------------

    def setup(self, trainer: Any) -> None:
        """Set up the strategy; ``Trainer(sync_batchnorm=True)`` converts to polyhvd's layers."""
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
                hvd.DistributedOptimizer(
                    optimizer, names_for([self.lightning_module], optimizer), **self._options
                )
        # In another class now, which Lightning's own wrappers have to take up.
        self.optimizers = self.optimizers

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

    # Metrics -----------------------------------------------------------------

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """A new tensor with the ranks' mean, or the reduction ``reduce_op``; other values stay as they are.

        A metric that is logged with ``sync_dist=True`` is paired by its name.

        Raises:
            RankMismatchError: the ranks have logged metrics with different names; on every rank.
        """
        if not isinstance(tensor, Tensor):
            return tensor
        process_set = process_set_of(group)
        caller = getattr(sys._getframe(1).f_locals.get("self"), "meta", None)  # Lightning passes no name
        name = getattr(caller, "name", None)
        op, value = reduction(reduce_op), tensor.detach()
        if op == hvd.Average and not value.is_floating_point():
            value = value.float()  # numbers of rows, whose mean may be no integer
        if isinstance(name, str) and value.numel() == 1 and value.is_floating_point() and op in _METRIC_OPS:
            return _reduced_metric(name, value, op, process_set)
        return hvd.allreduce(value, op=op, process_set=process_set)

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
    process_set = process_set_of(group)
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
    """Make ``strategy="polyhvd"`` work for a Trainer and a Fabric; importing polyhvd.lightning does it.

    Example::

        polyhvd.lightning.register()
        trainer = lightning.Trainer(strategy="polyhvd")
    """
    PolyhvdStrategy.register_strategies(pl.strategies.StrategyRegistry)
    FabricStrategy.register_strategies(fabric.strategies.STRATEGY_REGISTRY)
