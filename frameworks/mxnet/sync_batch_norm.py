"""Batch normalization over the samples of all ranks.

A custom operator of MXNet, so that it works in hybridized networks and outside: one collective in
forward and one in backward, each pushed into MXNet's engine. Nothing waits.
"""

from __future__ import annotations

import itertools
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.gluon import Block, nn
from mxnet.ndarray import NDArray
from polyhvd.mxnet import native

from polyhvd import context
from polyhvd.adapter import OpKind
from polyhvd.api import process_set_id
from polyhvd.calls import Call
from polyhvd.errors import InvalidArgumentError
from polyhvd.process_sets import ProcessSet, global_process_set

__all__ = ["SyncBatchNorm"]

_OPERATOR = "polyhvd_sync_batch_norm"

# Rows of what forward keeps for backward, each with an entry for every channel.
_MEAN, _INVERSE, _COUNT = 0, 1, 2


def _summed(name: str, process_set: int, rows: list[NDArray]) -> NDArray:
    """The sums of some vectors over the ranks, in float64, end to end."""
    total = mx.nd.concat(*[row.astype("float64") for row in rows], dim=0)
    arrays = (total,)
    native.push(Call(OpKind.ALLREDUCE, name, process_set=process_set), arrays, arrays)  # in place
    return total


class _Operator(mx.operator.CustomOp):  # type: ignore[misc]
    """The operator at one place of a network. It keeps nothing between its calls."""

    def __init__(self, options: dict[str, Any], dims: int) -> None:
        super().__init__()
        self._name: str = options["wire_name"]
        self._process_set = int(options["process_set"])
        self._axis = int(options["axis"]) % dims
        self._epsilon = float(options["eps"])
        self._momentum = float(options["momentum"])
        self._has_scale = options["fix_gamma"] == "False"
        self._uses_moving = options["use_global_stats"] == "True"
        self._broadcast = [1] * dims
        self._broadcast[self._axis] = -1

    def _sum(self, array: NDArray) -> NDArray:
        """Over all but the channels."""
        return mx.nd.sum(array, axis=self._axis, exclude=True)

    def _wide(self, vector: NDArray, like: NDArray) -> NDArray:
        """A value for each channel, to be combined with an array of samples."""
        return vector.astype(like.dtype).reshape(self._broadcast)

    def _over_ranks(self, x: NDArray) -> tuple[NDArray, NDArray, NDArray]:
        """Mean and variance of each channel, and the number of values that they are of.

        Mean and sum of squared deviations (M2) of the own samples are found in two passes. They are
        combined over the ranks as in Chan, Golub and LeVeque, "Algorithms for computing the sample
        variance" (1983), by the sums of the values and their squares; these are float64, so that
        what they cancel is not missed. A rank may have any number of samples.
        """
        channels = x.shape[self._axis]
        count = x.size // channels
        mean = self._sum(x) / count
        squares = self._sum(mx.nd.square(mx.nd.broadcast_sub(x, self._wide(mean, x))))
        mean = mean.astype("float64")
        parts = [
            mx.nd.full((1,), count, dtype="float64"),
            mean * count,
            squares.astype("float64") + mean * mean * count,
        ]
        total = _summed(f"{self._name}.forward", self._process_set, parts)
        number, sums, squares = (
            total.slice_axis(0, begin, begin + length)
            for begin, length in ((0, 1), (1, channels), (1 + channels, channels))
        )
        mean = mx.nd.broadcast_div(sums, number)
        variance = mx.nd.maximum(mx.nd.broadcast_div(squares, number) - mean * mean, 0)
        return mean, variance, mx.nd.broadcast_mul(number, mx.nd.ones_like(mean))

    def forward(self, is_train: bool, req: list[str], in_data: Any, out_data: Any, aux: Any) -> None:
        """Normalize; in training move the moving statistics too."""
        x, gamma, beta = (array.as_nd_ndarray() for array in in_data)
        moving_mean, moving_variance = (array.as_nd_ndarray() for array in aux)
        x = _precise(x)
        if is_train and not self._uses_moving:
            mean, variance, count = self._over_ranks(x)
            for moving, now in ((moving_mean, mean), (moving_variance, variance)):
                moving[:] = moving * self._momentum + now.astype(moving.dtype) * (1 - self._momentum)
        else:
            mean, variance = (moving.astype("float64") for moving in (moving_mean, moving_variance))
            count = mx.nd.zeros_like(mean)
        inverse = 1 / mx.nd.sqrt(variance + self._epsilon)
        factor = inverse * gamma.astype("float64") if self._has_scale else inverse
        y = mx.nd.broadcast_sub(x, self._wide(mean, x))
        y = mx.nd.broadcast_add(mx.nd.broadcast_mul(y, self._wide(factor, x)), self._wide(beta, x))
        _assign(out_data[0], req[0], y)
        _assign(out_data[1], req[1], mx.nd.stack(mean, inverse, count))

    def backward(
        self, req: list[str], out_grad: Any, in_data: Any, out_data: Any, in_grad: Any, aux: Any
    ) -> None:
        """The derivative of the sum of all ranks' losses; of gamma and beta, of this rank's loss."""
        x, gamma, _ = (array.as_nd_ndarray() for array in in_data)
        x = _precise(x)
        dy = out_grad[0].as_nd_ndarray().astype(x.dtype)
        kept = out_data[1].as_nd_ndarray()
        mean, inverse, count = (kept[row] for row in (_MEAN, _INVERSE, _COUNT))
        normal = mx.nd.broadcast_mul(mx.nd.broadcast_sub(x, self._wide(mean, x)), self._wide(inverse, x))
        d_beta, d_gamma = self._sum(dy), self._sum(dy * normal)
        dx = dy
        if count.asnumpy()[0]:  # there already: it was computed by forward
            total = _summed(f"{self._name}.backward", self._process_set, [d_beta, d_gamma])
            of_dy, of_product = (part / count for part in total.reshape((2, -1)))
            dx = mx.nd.broadcast_sub(dx, self._wide(of_dy, x))
            dx = dx - mx.nd.broadcast_mul(normal, self._wide(of_product, x))
        factor = inverse * gamma.astype("float64") if self._has_scale else inverse
        _assign(in_grad[0], req[0], mx.nd.broadcast_mul(dx, self._wide(factor, x)))
        _assign(in_grad[1], req[1], d_gamma if self._has_scale else mx.nd.zeros_like(d_gamma))
        _assign(in_grad[2], req[2], d_beta)


def _precise(x: NDArray) -> NDArray:
    """In an element type that sums can be taken in."""
    return x if x.dtype in (np.float32, np.float64) else x.astype("float32")


def _assign(target: Any, request: str, value: NDArray) -> None:
    target = target.as_nd_ndarray()
    value = value.astype(target.dtype, copy=False)
    if request == "add":
        mx.nd.elemwise_add(target, value, out=target)
    elif request != "null":
        value.copyto(target)


@mx.operator.register(_OPERATOR)
class _Properties(mx.operator.CustomOpProp):  # type: ignore[misc]
    """What MXNet has to know of the operator before it runs."""

    def __init__(self, **options: str) -> None:
        super().__init__(need_top_grad=True)
        self._options = options

    def list_arguments(self) -> list[str]:
        return ["data", "gamma", "beta"]

    def list_outputs(self) -> list[str]:
        return ["output", "statistics"]

    def list_auxiliary_states(self) -> list[str]:
        return ["moving_mean", "moving_var"]

    def infer_shape(self, in_shape: list[list[int]]) -> tuple[Any, Any, Any]:
        data = in_shape[0]
        channels = [data[int(self._options["axis"])]]
        return [data, channels, channels], [data, [3, *channels]], [channels, channels]

    def infer_type(self, in_type: list[Any]) -> tuple[Any, Any, Any]:
        data = in_type[0]
        parameter = np.float64 if data == np.float64 else np.float32
        return [data, parameter, parameter], [data, np.float64], [parameter, parameter]

    def declare_backward_dependency(
        self, out_grad: list[int], in_data: list[int], out_data: list[int]
    ) -> list[int]:
        return [out_grad[0], in_data[0], in_data[1], out_data[1]]

    def create_operator(self, ctx: Any, shapes: list[list[int]], dtypes: list[Any]) -> _Operator:
        return _Operator(self._options, len(shapes[0]))


class SyncBatchNorm(nn.BatchNorm):  # type: ignore[misc]
    """A :class:`mxnet.gluon.nn.BatchNorm` whose statistics in training are those of all ranks' samples.

    With n ranks it does what ``BatchNorm`` does in one process with the joined batch: outputs, moving
    statistics and gradients; ranks may have different numbers of samples. Outside of training, and with
    ``use_global_stats``, it is ``BatchNorm``. Its parameters are those of ``BatchNorm``: either loads
    what the other has saved. It may be hybridized, alone or in a network. One small allreduce in
    forward and one in backward: sums in float64, of float16 arrays in float32.

    Layers of the ranks meet in the order in which they are first used.

    Args:
        in_channels: size of axis 1, the channels; 0: found at the first use.
        momentum, epsilon, center, scale, use_global_stats: as of ``BatchNorm``.
        beta_initializer, gamma_initializer, running_mean_initializer, running_variance_initializer: likewise.
        process_set: the ranks whose samples are normalized together.
        axis: of the channels.

    Raises:
        InvalidArgumentError: in training on a rank that is not in the process set.
        NotInitializedError: in training before ``init()``.

    Example::

        net.add(nn.Conv2D(16, 3), hvd.SyncBatchNorm(), nn.Activation("relu"))
        hvd.SyncBatchNorm.convert(mx.gluon.model_zoo.vision.resnet18_v1())
    """

    _numbers = itertools.count()
    _process_set: ProcessSet = global_process_set
    _number: int | None = None  # of the layer, the same on all ranks

    def __init__(
        self,
        in_channels: int = 0,
        momentum: float = 0.9,
        epsilon: float = 1e-5,
        center: bool = True,
        scale: bool = True,
        use_global_stats: bool = False,
        beta_initializer: Any = "zeros",
        gamma_initializer: Any = "ones",
        running_mean_initializer: Any = "zeros",
        running_variance_initializer: Any = "ones",
        process_set: ProcessSet = global_process_set,
        *,
        axis: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            axis=axis,
            momentum=momentum,
            epsilon=epsilon,
            center=center,
            scale=scale,
            use_global_stats=use_global_stats,
            beta_initializer=beta_initializer,
            gamma_initializer=gamma_initializer,
            running_mean_initializer=running_mean_initializer,
            running_variance_initializer=running_variance_initializer,
            in_channels=in_channels,
            **kwargs,
        )
        self._process_set = process_set

    def _alias(self) -> str:
        return "batchnorm"  # so that parameters have the same names

    @classmethod
    def convert(cls, net: Block, process_set: ProcessSet = global_process_set) -> Block:
        """Make every ``BatchNorm`` in a network one of these, and return the network.

        Parameters stay, initialised or not. Networks made of symbols cannot be changed.
        """

        def change(block: Block) -> None:
            if type(block) is nn.BatchNorm:
                block.__class__ = cls
                block._process_set = process_set
            if isinstance(block, mx.gluon.HybridBlock):
                block._clear_cached_op()

        net.apply(change)
        return net

    def hybrid_forward(
        self, F: Any, x: Any, gamma: Any, beta: Any, running_mean: Any, running_var: Any
    ) -> Any:
        """Normalize ``x``, of any shape with the channels in their axis."""
        if mx.autograd.is_training():
            context.engine()
            if not self._process_set.included():
                raise InvalidArgumentError(
                    f"{self.name}: rank {context.config().rank} is not in {self._process_set}; train the "
                    "layer on its members only"
                )
        if self._number is None:
            self._number = next(SyncBatchNorm._numbers)
        is_np = mx.util.is_np_array()
        arrays = (x, gamma, beta, running_mean, running_var)
        operator = mx.nd.Custom if F is mx.nd or (is_np and F is mx.np) else mx.sym.Custom
        y = operator(
            *[array.as_nd_ndarray() for array in arrays] if is_np else arrays,
            op_type=_OPERATOR,
            wire_name=f"SyncBatchNorm.{self._number}",
            process_set=process_set_id(self._process_set),
            **self._kwargs,
        )[0]
        return y.as_np_ndarray() if is_np else y
