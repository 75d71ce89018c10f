"""Batch normalization over the samples of all ranks.

Samples are touched by MXNet's own operators. A custom operator, which works in hybridized networks and
outside, makes of their sums on this rank what normalizes them: one collective in forward and one in
backward, each pushed into MXNet's engine. Nothing waits.
"""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
from mxnet.gluon import Block, nn
from mxnet.ndarray import NDArray
from polyhvd.mxnet import native
from polyhvd.mxnet.errors import InvalidArgumentError

from polyhvd.collectives.adapter import OpKind
from polyhvd.collectives.numbering import ObjectNumbers
from polyhvd.collectives.operation import Call
from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.collectives.verbs import process_set_id
from polyhvd.runtime import current
from polyhvd.training.batch_norm import BatchArrays, BatchNormProtocol, Moments

__all__ = ["SyncBatchNorm"]

_OPERATOR = "polyhvd_sync_batch_norm"
_numbers = ObjectNumbers()  # of layers

# Rows of what forward keeps for backward, each with an entry for every channel.
_OFFSET, _INVERSE, _COUNT, _GENERATION = 0, 1, 2, 3


_protocol = BatchNormProtocol(BatchArrays(lambda x: mx.nd.sum(x, axis=0), lambda x: mx.nd.maximum(x, 1)))


def _summed(name: str, process_set: int, array: NDArray, generation: int) -> NDArray:
    """The sum of an array over the ranks, in place; lost in another generation."""
    arrays = (array,)
    call = Call(current.world(), OpKind.ALLREDUCE, name, process_set=process_set, generation=generation)
    native.push(call, arrays, arrays)
    return array


def _gathered(name: str, process_set: int, own: NDArray, generation: int) -> NDArray:
    """The ranks' arrays, in a table of zeros to which each adds its own: a gathering would wait for sizes."""
    world = current.world()
    rank, all_ranks = world.placement.rank, list(range(world.placement.size))
    members = world.process_sets().get(process_set, all_ranks)
    table = mx.nd.zeros((len(members), *own.shape), dtype="float64")
    table[members.index(rank) if rank in members else 0] = own  # a set of a world that has ended fails below
    return _summed(name, process_set, table, generation)


class _Operator(mx.operator.CustomOp):  # type: ignore[misc]
    """From sums over this rank's samples to the factor and the bias that normalize them.

    Inputs, with x the samples, as many values as there are channels: a shift k, sum(x - k), sum((x - k)^2);
    then the shape of x, gamma and beta. Outputs: factor and bias, such that (x - k) * factor + bias is
    normal; and what backward needs. Only of small vectors: MXNet 1.9.1 passes memory to a custom operator
    that it has freed where an array has a layout of oneDNN, as convolutions leave it.

    It keeps nothing between its calls.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self._name: str = options["wire_name"]
        self._process_set = int(options["process_set"])
        self._generation = int(options["generation"])
        self._axis = int(options["axis"])
        self._epsilon = float(options["eps"])
        self._momentum = float(options["momentum"])
        self._has_scale = options["fix_gamma"] == "False"

    def _over_ranks(
        self, shift: NDArray, sums: NDArray, squares: NDArray, count: float, generation: int
    ) -> Moments:
        """The moments of each channel over all ranks; a rank may have any number of samples, also none."""
        counts = mx.nd.full(shift.shape, count, dtype="float64")
        mean, deviations = _protocol.corrected(counts, shift * min(count, 1), sums, squares)
        parts = mx.nd.stack(counts, mean, mx.nd.maximum(deviations, 0))
        return _protocol.joined(_gathered(f"{self._name}.forward", self._process_set, parts, generation))

    def forward(self, is_train: bool, req: list[str], in_data: Any, out_data: Any, aux: Any) -> None:
        """Find the statistics; in training those of all ranks, which then move the moving ones."""
        shift, sums, squares, shape, gamma, beta = _doubles(in_data)
        generation = 0
        if is_train:
            generation = self._generation or current.world().placement.generation
            sizes = shape.asnumpy()  # there already, as all inputs are
            own = sizes.prod() / sizes[self._axis]
            count, mean, _, variance = self._over_ranks(shift, sums, squares, own, generation)
            for moving, now in zip(aux, (mean, variance), strict=True):
                moving = moving.as_nd_ndarray()
                moved = moving * self._momentum + now.astype(moving.dtype) * (1 - self._momentum)
                moving[:] = mx.nd.where(count, moved, moving)  # as it was if no rank has samples
        else:
            mean, variance = _doubles(aux)
            count = mx.nd.zeros_like(mean)
        inverse = 1 / mx.nd.sqrt(variance + self._epsilon)
        offset = mean - shift
        factor = inverse * gamma if self._has_scale else inverse
        _assign(out_data[0], req[0], factor)
        _assign(out_data[1], req[1], beta - offset * factor)
        kept = mx.nd.stack(offset, inverse, count, mx.nd.zeros_like(count) + generation)
        _assign(out_data[2], req[2], kept)

    def backward(
        self, req: list[str], out_grad: Any, in_data: Any, out_data: Any, in_grad: Any, aux: Any
    ) -> None:
        """The derivative of the sum of all ranks' losses; of gamma and beta, of this rank's loss."""
        d_factor, d_bias = _doubles(out_grad[:2])
        gamma = _doubles(in_data)[4]
        kept = out_data[2].as_nd_ndarray()
        offset, inverse, count = (kept[row] for row in (_OFFSET, _INVERSE, _COUNT))
        factor = inverse * gamma if self._has_scale else inverse
        d_factor = d_factor - offset * d_bias
        nothing = mx.nd.zeros_like(offset)
        d_sums, d_squares = nothing, nothing
        any_count, generation = kept[_COUNT:, 0].asnumpy().tolist()
        if any_count:  # not moving statistics
            parts = mx.nd.stack(*_protocol.sent_backward(d_bias, d_factor, factor, inverse))
            total = _summed(f"{self._name}.backward", self._process_set, parts, int(generation))
            start, slope = _protocol.by_values(total[0], total[1], count)
            d_sums = start - offset * slope  # slope * (x - mean), with x - k
            d_squares = slope / 2
        d_gamma = d_factor * inverse if self._has_scale else nothing
        for position, value in ((0, nothing), (1, d_sums), (2, d_squares), (4, d_gamma), (5, d_bias)):
            _assign(in_grad[position], req[position], value)
        if req[3] != "null":
            in_grad[3].as_nd_ndarray()[:] = 0


def _doubles(arrays: Any) -> list[NDArray]:
    """Return the arrays as vectors of float64."""
    return [array.as_nd_ndarray().reshape((-1,)).astype("float64") for array in arrays]


def _assign(target: Any, request: str, value: NDArray) -> None:
    target = target.as_nd_ndarray()
    value = value.astype(target.dtype, copy=False).reshape(target.shape)
    if request == "add":
        mx.nd.elemwise_add(target, value, out=target)
    elif request != "null":
        value.copyto(target)


class _Nothing(mx.autograd.Function):  # type: ignore[misc]
    """An array without elements, whose derivative comes by the operator all the same."""

    def forward(self, normalized: NDArray, empty: NDArray) -> NDArray:
        """Like the second."""
        self._shapes = normalized.shape, empty.shape
        return mx.nd.zeros(empty.shape, dtype=empty.dtype)

    def backward(self, gradient: NDArray) -> tuple[NDArray, NDArray]:
        """Zeros."""
        with mx.util.np_shape(True):  # this is another thread
            first, second = (mx.nd.zeros(shape, dtype=gradient.dtype) for shape in self._shapes)
        return first, second


@mx.operator.register(_OPERATOR)
class _Properties(mx.operator.CustomOpProp):  # type: ignore[misc]
    """The properties of the operator that MXNet needs before it runs."""

    def __init__(self, **options: str) -> None:
        super().__init__(need_top_grad=True)
        self._options = options

    def list_arguments(self) -> list[str]:
        return ["shift", "sums", "squares", "shape", "gamma", "beta"]

    def list_outputs(self) -> list[str]:
        return ["factor", "bias", "statistics"]

    def list_auxiliary_states(self) -> list[str]:
        return ["moving_mean", "moving_var"]

    def infer_shape(self, in_shape: list[list[int]]) -> tuple[Any, Any, Any]:
        wide = in_shape[0]  # ones, but for the channels
        channels = [wide[int(self._options["axis"])]]
        inputs = [wide, wide, wide, [len(wide)], channels, channels]
        return inputs, [wide, wide, [4, *channels]], [channels, channels]

    def infer_type(self, in_type: list[Any]) -> tuple[Any, Any, Any]:
        kind = in_type[0]
        return [kind, kind, kind, np.int64, kind, kind], [kind, kind, np.float64], [kind, kind]

    def declare_backward_dependency(
        self, out_grad: list[int], in_data: list[int], out_data: list[int]
    ) -> list[int]:
        return [out_grad[0], out_grad[1], *in_data, out_data[2]]

    def create_operator(self, ctx: Any, shapes: list[list[int]], dtypes: list[Any]) -> _Operator:
        return _Operator(self._options)


class SyncBatchNorm(nn.BatchNorm):  # type: ignore[misc]
    """A :class:`mxnet.gluon.nn.BatchNorm` whose statistics in training are those of all ranks' samples.

    With n ranks it does what ``BatchNorm`` does in one process with the joined batch: outputs, moving
    statistics and gradients; ranks may have different numbers of samples, also none, unless the layer is
    hybridized. Outside of training, and with ``use_global_stats``, it is ``BatchNorm``. Its parameters are
    those of ``BatchNorm``: either loads what the other has saved. It may be hybridized, by itself or in a
    network. One small allreduce in forward and one in backward: sums in float64, of float16 arrays in
    float32. A hybridized network takes sums of its samples outside of training too, for nothing; to deploy
    it, load its parameters into one of ``BatchNorm``.

    Layers of the ranks meet in the order in which they are first used in training, or hybridized.

    Args:
        in_channels: size of axis 1, the channels; 0: found at the first use.
        momentum: as of ``BatchNorm``.
        epsilon: as of ``BatchNorm``.
        center: as of ``BatchNorm``.
        scale: as of ``BatchNorm``.
        use_global_stats: as of ``BatchNorm``.
        beta_initializer: as of ``BatchNorm``.
        gamma_initializer: as of ``BatchNorm``.
        running_mean_initializer: as of ``BatchNorm``.
        running_variance_initializer: as of ``BatchNorm``.
        process_set: the ranks whose samples are normalized together.
        axis: of the channels.

    Raises:
        InvalidArgumentError: in training on a rank that is not in the process set.
        NotInitializedError: in training before ``init()``.

    Example::

        net.add(nn.Conv2D(16, 3), hvd.SyncBatchNorm(), nn.Activation("relu"))
        hvd.SyncBatchNorm.convert(mx.gluon.model_zoo.vision.resnet18_v1())
    """

    _process_set: ProcessSet = global_process_set
    _dtype: Any = "float32"  # of the samples, as long as they are symbols

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

    def cast(self, dtype: Any) -> None:
        """Take samples of another element type; parameters of float16 layers are float32."""
        super().cast(dtype)
        self._dtype = dtype

    def _alias(self) -> str:
        return "batchnorm"  # so that parameters have the same names

    @classmethod
    def convert(cls, net: Block, process_set: ProcessSet = global_process_set) -> Block:
        """Make every ``BatchNorm`` in a network one of these, and return the network.

        Parameters stay, initialised or not. Convert before ``cast()``. Networks made of symbols cannot be
        changed.
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
            current.world()
            if not self._process_set.included():
                raise InvalidArgumentError(
                    f"{self.name}: rank {current.world().placement.rank} is not in {self._process_set}; "
                    "train the layer on its members only"
                )
        arrays = (x, gamma, beta, running_mean, running_var)
        if self._kwargs["use_global_stats"]:
            return super().hybrid_forward(F, *arrays)
        is_np = mx.util.is_np_array()
        if is_np:
            arrays = tuple(array.as_nd_ndarray() for array in arrays)
        if isinstance(arrays[0], NDArray) and arrays[0].size == 0:
            y = self._of_nothing(*arrays)
        else:
            y = self._normalized(mx.nd if isinstance(arrays[0], NDArray) else mx.sym, *arrays)
        return y.as_np_ndarray() if is_np else y

    def _wire_name(self, F: Any) -> str:
        """Return the layer's name, the same on all ranks: several layers may be in flight, in any order."""
        if F is mx.nd and not mx.autograd.is_training():
            return "none"  # evaluation exchanges nothing: a single rank may do it
        return f"SyncBatchNorm.{_numbers.of(self, self._process_set)}"

    def _generation(self, F: Any) -> int:
        """Return the generation of the world of a call; 0: a symbol belongs to the world in which it runs."""
        return current.world().placement.generation if F is mx.nd and mx.autograd.is_training() else 0

    def _of_nothing(self, x: Any, *others: Any) -> Any:
        """Take part without samples. MXNet 1.9.1 crashes in the derivative of a sum over an empty axis."""
        if not mx.autograd.is_training():
            return x
        stand_in = mx.nd.zeros([max(length, 1) for length in x.shape], dtype=x.dtype)
        shape = {"shape": mx.nd.array(x.shape, dtype="int64")}
        y = self._normalized(mx.nd, stand_in, *others, **shape)
        return _Nothing()(y, x)

    def _normalized(
        self, F: Any, x: Any, gamma: Any, beta: Any, mean: Any, variance: Any, shape: Any = None
    ) -> Any:
        precise = self.gamma.dtype
        wanted = x.dtype if F is mx.nd else self._dtype
        over = {"axis": self._kwargs["axis"], "exclude": True, "keepdims": True}
        shape = F.shape_array(x) if shape is None else shape  # has the number of samples
        if np.dtype(wanted) != np.dtype(precise):
            x = F.cast(x, dtype=precise)
        # Around the mean of this rank, sums keep their digits.
        shift = F.BlockGrad(F.mean(x, **over))
        x = F.broadcast_sub(x, shift)
        factor, bias, _ = F.Custom(
            shift,
            F.sum(x, **over),
            F.sum(F.square(x), **over),
            shape,
            gamma,
            beta,
            mean,
            variance,
            op_type=_OPERATOR,
            wire_name=self._wire_name(F),
            process_set=process_set_id(self._process_set),
            generation=self._generation(F),
            **self._kwargs,
        )
        y = F.broadcast_add(F.broadcast_mul(x, factor), bias)
        return y if np.dtype(wanted) == np.dtype(precise) else F.cast(y, dtype=wanted)
