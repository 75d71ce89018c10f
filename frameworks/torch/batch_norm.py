"""Batch normalization over the joined batch of all ranks. One collective forward, one backward."""

from __future__ import annotations

from typing import Any

import torch
from polyhvd.torch.compiled import is_compiling
from polyhvd.torch.derivatives import allgather_group, allreduce_group
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from polyhvd.collectives.adapter import ReduceOp
from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.errors import InvalidArgumentError
from polyhvd.runtime import current
from polyhvd.training.batch_norm import BatchArrays, BatchNormProtocol

__all__ = ["SyncBatchNorm", "convert_sync_batchnorm"]

Tensor = torch.Tensor
_HALF = (torch.float16, torch.bfloat16)
_protocol = BatchNormProtocol(BatchArrays(lambda x: x.sum(0), lambda x: x.clamp(min=1)))


def _wire_name(channels: int) -> str:
    """One for each width, so that the response cache knows them all.

    It depends on nothing that a rank has done before: some may have joined, or come later.
    """
    return f"SyncBatchNorm.{channels}"


def _wide(tensor: Tensor) -> Tensor:
    """In the dtype of statistics: float32 for half precision."""
    return tensor.float() if tensor.dtype in _HALF else tensor


def _per_channel(values: Tensor, like: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (like.dim() - 2))


def _other_dimensions(tensor: Tensor) -> list[int]:
    return [0, *range(2, tensor.dim())]


def local_statistics(x: Tensor) -> Tensor:
    """Return count, mean and sum of squared deviations of each channel of this rank's batch; ``[3, C]``."""
    wide, dimensions = _wide(x), _other_dimensions(x)
    count = x.numel() // max(x.shape[1], 1)
    if count == 0:
        return wide.new_zeros((3, x.shape[1]))
    variance, mean = torch.var_mean(wide, dimensions, correction=0)
    return torch.stack((torch.full_like(mean, count), mean, variance * count))


class _Normalize(torch.autograd.Function):
    """``(x - mean) / sqrt(variance + eps) * weight + bias``; mean and variance depend on every rank's x.

    Inputs of half precision are computed with in float32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        count: Tensor,
        eps: float,
        process_set: ProcessSet,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(variance + eps), count)
        ctx.process_set = process_set
        ctx.generation = 0 if is_compiling() else current.world().placement.generation
        ctx.bias_dtype = None if bias is None else bias.dtype
        scale, offset = (None if t is None else t.to(mean.dtype) for t in (weight, bias))
        result = torch.nn.functional.batch_norm(_wide(x), mean, variance, scale, offset, eps=eps)
        return result.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, mean, inverse, count = ctx.saved_tensors
        wide, dimensions = _wide(gradient), _other_dimensions(x)
        centred = _wide(x) - _per_channel(mean, x)
        of_output, of_product = wide.sum(dimensions), (wide * centred).sum(dimensions)
        of_weight = None if weight is None else (of_product * inverse).to(weight.dtype)
        of_bias = None if ctx.bias_dtype is None else of_output.to(ctx.bias_dtype)
        of_x = None
        if ctx.needs_input_grad[0]:
            name = f"{_wire_name(x.shape[1])}.gradient"
            scale = inverse if weight is None else inverse * weight.to(inverse.dtype)
            (total,) = allreduce_group(
                [torch.stack(_protocol.sent_backward(of_output, of_product, scale, inverse))],
                world=current.of_generation(ctx.generation, repr(name)) if ctx.generation else None,
                name=name,
                op=ReduceOp.Sum,
                prescale_factor=1.0,
                postscale_factor=1.0,
                process_set=ctx.process_set,
            )
            parts = _protocol.by_values(total[0], total[1], count.to(total.dtype))
            offset, slope = (_per_channel(part, x) for part in parts)
            of_x = (wide * _per_channel(scale, x) + offset + centred * slope).to(x.dtype)
        return of_x, of_weight, of_bias, *[None] * 5


_normalize: Any = _Normalize.apply


class SyncBatchNorm(_BatchNorm):
    """BatchNorm whose mean and variance, in training, are those of the joined batch of all ranks.

    Ranks may have batches of any size, also empty ones. Statistics have the same bits on every rank. In
    evaluation, and on ranks outside ``process_set``, it is torch's BatchNorm. Gradients of weight and bias
    are this rank's part, for DistributedOptimizer to average.

    Args:
        num_features: channels, C.
        eps: is added to the variance.
        momentum: share of the new batch in the running statistics; None: the average of all batches.
        affine: learn a weight and a bias for each channel.
        track_running_stats: keep running statistics; otherwise evaluation, too, takes those of the batch.
        process_set: the ranks whose batches are joined.
        device: of parameters and running statistics, as in torch.
        dtype: likewise.

    Shape:
        ``(N, C, *)`` to the same, in float64, float32, or half precision with statistics in float32. C and
        the dtype are the same on every rank; N and the rest may differ.

    Raises:
        InvalidArgumentError: fewer than 2 dimensions, other than C channels, or (on every rank) one value
            per channel in the joined batch.
        RankMismatchError: ranks differ in the dtype. Those that differ in the number of channels wait for
            each other, and the stall report names them.

    Example::

        net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), hvd.SyncBatchNorm(8), torch.nn.ReLU())
    """

    process_set: ProcessSet

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.process_set = process_set

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise InvalidArgumentError(
                f"SyncBatchNorm({self.num_features}): expected an input of shape (N, {self.num_features}, "
                f"...), found {tuple(input.shape)}"
            )

    def forward(self, input: Tensor) -> Tensor:
        """Normalize each channel; in training a collective of the process set."""
        self._check_input_dim(input)
        if not (self.training or self.running_mean is None) or not self.process_set.included():
            return super().forward(input)
        if not input.is_floating_point():
            raise InvalidArgumentError(f"SyncBatchNorm: expected floating-point numbers, found {input.dtype}")
        with torch.no_grad():
            row = local_statistics(input)[None]
            (table,) = allgather_group(
                [row], name=_wire_name(self.num_features), process_set=self.process_set
            )
            moments = _protocol.joined(table.double())
            count = moments.count[:1].sum()  # of every channel the same
            if not is_compiling() and count == 1:  # in a graph, values are not known
                raise InvalidArgumentError(
                    "SyncBatchNorm: the joined batch has one value per channel, expected more in training"
                )
            if self.training:
                self._track(count, moments.mean, moments.squares)
            dtype = _wide(input).dtype
            mean, variance = moments.mean.to(dtype), moments.variance.to(dtype)
        normalized: Tensor = _normalize(
            input, self.weight, self.bias, mean, variance, count, self.eps, self.process_set
        )
        return normalized

    def _track(self, count: Tensor, mean: Tensor, squares: Tensor) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        share = count.new_tensor(self.momentum or 0.0)
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(count > 0)
            if self.momentum is None:
                share = 1 / self.num_batches_tracked.to(count.dtype)
        share = torch.where(count > 0, share, 0.0)
        for running, new in ((self.running_mean, mean), (self.running_var, squares / (count - 1))):
            running.copy_(running.to(new.dtype).lerp(new, share))

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_set: ProcessSet = global_process_set
    ) -> torch.nn.Module:
        """:func:`convert_sync_batchnorm`, where torch has it."""
        return convert_sync_batchnorm(module, process_set)


def convert_sync_batchnorm(
    module: torch.nn.Module, process_set: ProcessSet = global_process_set
) -> torch.nn.Module:
    """Replace every BatchNorm of a module, torch's SyncBatchNorm included, by :class:`SyncBatchNorm`.

    Parameters and running statistics stay the same objects, so an optimizer made before goes on working.

    Args:
        module: changed in place, unless it is a BatchNorm itself.
        process_set: the ranks whose batches are joined.

    Returns:
        The module, or what replaces it.

    Raises:
        InvalidArgumentError: a lazy BatchNorm has no number of channels yet.

    Example::

        model = hvd.convert_sync_batchnorm(resnet18())
    """
    return _converted(module, process_set, {})


def _converted(module: torch.nn.Module, process_set: ProcessSet, done: dict[int, Any]) -> torch.nn.Module:
    """A module that occurs twice is replaced by one."""
    if id(module) in done:
        converted: torch.nn.Module = done[id(module)][1]
        return converted
    result = module
    if isinstance(module, _BatchNorm):
        result = _replacement(module, process_set)
    done[id(module)] = module, result  # both: an id is of a living object
    for name, child in module.named_children():
        result.add_module(name, _converted(child, process_set, done))
    return result


def _replacement(module: _BatchNorm, process_set: ProcessSet) -> SyncBatchNorm:
    if any(torch.nn.parameter.is_lazy(t) for t in (*module.parameters(), *module.buffers())):
        raise InvalidArgumentError(
            f"{type(module).__name__} has no number of channels yet; run the model once first"
        )
    result = SyncBatchNorm(
        module.num_features, module.eps, module.momentum, False, module.track_running_stats, process_set
    )
    result.affine = module.affine
    result.weight, result.bias = module.weight, module.bias
    result.running_mean, result.running_var = module.running_mean, module.running_var
    result.num_batches_tracked = module.num_batches_tracked
    result.training = module.training
    return result
