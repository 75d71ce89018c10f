"""The frameworks under test, each described by what differs: how NumPy goes in and comes out.

Nothing here imports a framework until a driver is used, by a rank of its pool.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import importlib
import importlib.util
import math
from collections.abc import Callable, Sequence
from typing import Any

import depth  # tests/harness, on the path by tests/conftest.py
import gpu
import ml_dtypes
import numpy as np

import polyhvd
from polyhvd.collectives.adapter import Capability

__all__ = ["BFLOAT16", "DRIVERS", "Driver", "capabilities", "counters", "get"]

Array = np.ndarray[Any, Any]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

_DTYPES = ("uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "bool")
_UNSIGNED = ("uint16", "uint32", "uint64")
#: Element types of large tensors. Adapters treat all types the same way; the core's kernels do not.
_LARGE_TYPES = ("uint8", "bfloat16", "float32")
_LARGE_TYPES_OF_KERNELS = (*_DTYPES, "uint64")  # kernels of other lengths of integers are as these
_LARGE = 10_000
_TYPES_OF_GRAPHS = ("uint8", "int32", "bfloat16", "float32", "float64", "bool")
_OPTIONAL = {"int16": Capability.INT16, "bfloat16": Capability.BFLOAT16, "bool": Capability.BOOL}
_OPTIONAL |= dict.fromkeys(_UNSIGNED, Capability.UNSIGNED)


class Driver(abc.ABC):
    """A way into one framework. Tensors hold what ``from_numpy`` was given."""

    name = ""
    framework = ""  # polyhvd.<framework>
    package = ""  # that must be installed
    sizes: Sequence[int] = (2, 3)  # numbers of ranks: what more of them have of their own is the core's
    #: Whether its tests are those of the core's kernels, too, which differ by element type.
    tests_kernels = False
    #: Whether an asynchronous allgather waits until all ranks have told their sizes.
    gathers_wait = False
    #: What a collective raises when the ranks disagree.
    mismatch_error = "polyhvd.errors.RankMismatchError"

    @functools.cached_property
    def hvd(self) -> Any:
        """The framework's module of polyhvd."""
        return importlib.import_module("polyhvd." + self.framework)

    @property
    def settings(self) -> tuple[tuple[str, str], ...]:
        """Environment that its ranks need."""
        return ()

    @property
    def capabilities(self) -> frozenset[Capability]:
        """What the adapter declares."""
        module = importlib.import_module(f"polyhvd.{self.framework}.adapter")
        (adapter,) = (vars(module)[name] for name in module.__all__ if name.endswith("Adapter"))
        declared: frozenset[Capability] = adapter.capabilities
        return declared

    @property
    def dtypes(self) -> list[np.dtype[Any]]:
        """Element types that the framework can communicate."""
        return [
            BFLOAT16 if name == "bfloat16" else np.dtype(name)
            for name in (*_DTYPES, *_UNSIGNED)
            if name not in _OPTIONAL or _OPTIONAL[name] in self.capabilities
        ]

    def covers(self, dtype: np.dtype[Any], shape: Sequence[int], *, reduced: bool) -> bool:
        """Whether tensors of this type and shape are tested, in a reduction or in what only moves bytes."""
        large = _LARGE_TYPES_OF_KERNELS if self.tests_kernels and reduced else _LARGE_TYPES
        return dtype.name in large or math.prod(shape) < _LARGE

    def is_installed(self) -> bool:
        """Whether the framework is there; imports nothing."""
        spec = importlib.util.find_spec(self.package)
        # A folder of tests passes for a package that has no file.
        return spec is not None and spec.origin is not None

    @abc.abstractmethod
    def from_numpy(self, array: Array) -> Any:
        """A new tensor with these values."""

    @abc.abstractmethod
    def to_numpy(self, tensor: Any) -> Array:
        """The values of a tensor, when they are there."""

    def transposed(self, tensor: Any) -> Any:
        """A view of a tensor with its dimensions reversed, not dense in memory; see NON_CONTIGUOUS."""
        raise TypeError(f"{self.name} has no tensors that are not dense")

    def call(self, function: Callable[..., Any], *tensors: Any) -> Any:
        """``function(*tensors)``, in a compiled graph where that is what the driver tests."""
        return function(*tensors)

    def gradients(
        self, function: Callable[..., Sequence[Any]], arrays: Sequence[Array], weights: Sequence[Array]
    ) -> list[Array]:
        """Of the sum of the results of ``function(*tensors)``, each weighted, by every tensor."""
        raise NotImplementedError(f"{self.name} has no gradients")

    @property
    def has_gradients(self) -> bool:
        """Whether the driver says how they are computed."""
        return type(self).gradients is not Driver.gradients

    def parameter(self, array: Array) -> Any:
        """A trainable tensor, as models hold them."""
        return self.from_numpy(array)

    def broadcast_parameters(self, parameters: dict[str, Any], root: int) -> None:
        """The framework's way to overwrite a model's parameters with the root's."""
        self.hvd.broadcast_parameters(parameters, root_rank=root)

    def forget_errors(self) -> None:
        """Wait for what failed in a group without being read, where a later wait would raise its error."""
        return

    @abc.abstractmethod
    def unsupported(self) -> Sequence[Any]:
        """Tensors that no collective takes."""

    def argument_errors(self) -> tuple[type[BaseException], ...]:
        """What a call that is wrong by itself may raise."""
        return (ValueError,)

    def error_type(self) -> type[BaseException]:
        """The class of ``mismatch_error``."""
        module, _, name = self.mismatch_error.rpartition(".")
        found: type[BaseException] = getattr(importlib.import_module(module), name)
        return found


class _NumPy(Driver):
    name = framework = package = "numpy"
    sizes = (1, 2, 3, 4)
    tests_kernels = True

    def from_numpy(self, array: Array) -> Any:
        return array.copy()

    def to_numpy(self, tensor: Any) -> Array:
        assert isinstance(tensor, np.ndarray), type(tensor)
        return tensor

    def transposed(self, tensor: Any) -> Any:
        return tensor.transpose()

    def unsupported(self) -> Sequence[Any]:
        big_endian = np.ones(4, np.dtype(np.float32).newbyteorder(">"))
        names = ("complex64", "datetime64[s]", "object", "U3")
        return [big_endian, *(np.zeros(4, name) for name in names)]


class _CuPy(Driver):
    """On a GPU if there is one, else on the tests' stand-ins for CUDA, NCCL and CuPy.

    In reproducible mode, which gives the bits of the CPUs; how NCCL adds is tests/gpu's.
    """

    name = framework = package = "cupy"

    @property
    def settings(self) -> tuple[tuple[str, str], ...]:
        return (*gpu.settings(), ("POLYHVD_REPRODUCIBLE", "1"))

    def is_installed(self) -> bool:
        return gpu.is_there() or gpu.stand_ins_are_built()

    def from_numpy(self, array: Array) -> Any:
        import cupy

        return cupy.array(array)

    def to_numpy(self, tensor: Any) -> Array:
        import cupy

        if isinstance(tensor, np.ndarray) and tensor.dtype == np.int32:
            return tensor  # the rows that an alltoall has received are the CPU's
        assert isinstance(tensor, cupy.ndarray), type(tensor)
        values: Array = cupy.asnumpy(tensor)
        return values

    def transposed(self, tensor: Any) -> Any:
        return tensor.transpose()

    def unsupported(self) -> Sequence[Any]:
        return [self.from_numpy(np.zeros(4, "complex64"))]


class _Torch(Driver):
    name = framework = package = "torch"

    def from_numpy(self, array: Array) -> Any:
        import torch

        if array.dtype == BFLOAT16:
            return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
        return torch.from_numpy(array.copy())

    def to_numpy(self, tensor: Any) -> Array:
        import torch

        assert isinstance(tensor, torch.Tensor), type(tensor)
        tensor = tensor.detach()
        if tensor.dtype == torch.bfloat16:
            bits: Array = tensor.contiguous().view(torch.int16).numpy()
            return bits.view(BFLOAT16)
        values: Array = tensor.numpy()
        return values

    def transposed(self, tensor: Any) -> Any:
        return tensor.permute(*reversed(range(tensor.dim())))

    def gradients(
        self, function: Callable[..., Sequence[Any]], arrays: Sequence[Array], weights: Sequence[Array]
    ) -> list[Array]:
        tensors = [self.from_numpy(array).requires_grad_() for array in arrays]
        results = self.call(function, *tensors)
        sums = [(r * self.from_numpy(w)).sum() for r, w in zip(results, weights, strict=True)]
        sum(sums).backward()  # type: ignore[union-attr]
        return [self.to_numpy(tensor.grad) for tensor in tensors]

    def parameter(self, array: Array) -> Any:
        import torch

        return torch.nn.Parameter(self.from_numpy(array))

    def unsupported(self) -> Sequence[Any]:
        import torch

        return [torch.ones(4, dtype=torch.complex64), torch.ones(4).to_sparse()]


class _MXNet(Driver):
    name = framework = package = "mxnet"
    gathers_wait = True
    mismatch_error = "mxnet.base.MXNetError"

    #: As MXNet spells it.
    _BFLOAT16 = np.dtype([("bfloat16", np.uint16)])

    def from_numpy(self, array: Array) -> Any:
        import mxnet as mx

        mx.util.set_np_shape(True)  # scalars and dimensions of 0 mean what they mean in NumPy
        if array.dtype == BFLOAT16:
            array = array.view(self._BFLOAT16)
        return mx.nd.array(array, dtype=array.dtype)

    def to_numpy(self, tensor: Any) -> Array:
        import mxnet as mx

        assert isinstance(tensor, mx.nd.NDArray), type(tensor)
        values: Array = tensor.asnumpy()
        return values.view(BFLOAT16) if values.dtype == self._BFLOAT16 else values

    def gradients(
        self, function: Callable[..., Sequence[Any]], arrays: Sequence[Array], weights: Sequence[Array]
    ) -> list[Array]:
        import mxnet as mx

        tensors, factors = [self.from_numpy(a) for a in arrays], [self.from_numpy(w) for w in weights]
        for tensor in tensors:
            tensor.attach_grad()
        with mx.autograd.record():
            results = function(*tensors)
            sums = [(r * w).sum().astype("float32") for r, w in zip(results, factors, strict=True)]
            loss = mx.nd.add_n(*sums)
        loss.backward()
        return [self.to_numpy(tensor.grad) for tensor in tensors]

    def forget_errors(self) -> None:
        import mxnet as mx

        with contextlib.suppress(mx.base.MXNetError):
            mx.nd.waitall()

    def unsupported(self) -> Sequence[Any]:
        import mxnet as mx

        return [mx.nd.ones((3, 4)).tostype("csr")]

    def argument_errors(self) -> tuple[type[BaseException], ...]:
        return (ValueError, self.error_type())


class _TensorFlow(Driver):
    name = framework = package = "tensorflow"
    mismatch_error = "tensorflow.errors.FailedPreconditionError"

    def from_numpy(self, array: Array) -> Any:
        import tensorflow as tf

        if array.dtype == BFLOAT16:  # older releases know another bfloat16 than ml_dtypes'
            return tf.cast(tf.constant(array.astype(np.float32)), tf.bfloat16)
        return tf.constant(array)

    def to_numpy(self, tensor: Any) -> Array:
        import tensorflow as tf

        if tensor.dtype == tf.bfloat16:
            return np.asarray(tf.cast(tensor, tf.float32).numpy()).astype(BFLOAT16)
        values: Array = np.asarray(tensor.numpy())
        return values

    def gradients(
        self, function: Callable[..., Sequence[Any]], arrays: Sequence[Array], weights: Sequence[Array]
    ) -> list[Array]:
        import tensorflow as tf

        factors = [self.from_numpy(w) for w in weights]

        def of_sum(*tensors: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(tensors)
                results = function(*tensors)
                sums = [tf.reduce_sum(r * w) for r, w in zip(results, factors, strict=True)]
                loss = tf.add_n([tf.cast(each, tf.float64) for each in sums])
            return tape.gradient(loss, tensors)

        found = self.call(of_sum, *map(self.from_numpy, arrays))
        return [self.to_numpy(gradient) for gradient in found]

    def parameter(self, array: Array) -> Any:
        import tensorflow as tf

        return tf.Variable(array)

    def broadcast_parameters(self, parameters: dict[str, Any], root: int) -> None:
        # Horovod's signature: a list, matched by position.
        self.hvd.broadcast_variables([parameters[key] for key in sorted(parameters)], root_rank=root)

    def unsupported(self) -> Sequence[Any]:
        import tensorflow as tf

        return [tf.ones(4, tf.complex64), tf.constant(["text"])]

    def argument_errors(self) -> tuple[type[BaseException], ...]:
        import tensorflow as tf

        return (ValueError, tf.errors.InvalidArgumentError)


class _TensorFlowFunction(_TensorFlow):
    name = "tensorflow-function"

    @property
    def dtypes(self) -> list[np.dtype[Any]]:
        # Graphs call the operations that eager tensors have been tested with.
        return [dtype for dtype in super().dtypes if depth.NIGHTLY or dtype.name in _TYPES_OF_GRAPHS]

    @property
    def capabilities(self) -> frozenset[Capability]:
        # In a graph every collective is asynchronous, and none has a handle.
        return super().capabilities - {Capability.ASYNC}

    def call(self, function: Callable[..., Any], *tensors: Any) -> Any:
        import tensorflow as tf

        return tf.function(function, autograph=False)(*tensors)


class _Jax(Driver):
    name = framework = package = "jax"

    @property
    def settings(self) -> tuple[tuple[str, str], ...]:
        return (("JAX_ENABLE_X64", "1"),)

    def from_numpy(self, array: Array) -> Any:
        import jax.numpy as jnp

        return jnp.array(array)

    def to_numpy(self, tensor: Any) -> Array:
        import jax

        assert isinstance(tensor, jax.Array), type(tensor)
        return np.asarray(tensor)

    def gradients(
        self, function: Callable[..., Sequence[Any]], arrays: Sequence[Array], weights: Sequence[Array]
    ) -> list[Array]:
        import jax

        _, backward = jax.vjp(lambda *tensors: self.call(function, *tensors), *map(self.from_numpy, arrays))
        return [np.asarray(gradient) for gradient in backward([self.from_numpy(w) for w in weights])]

    def broadcast_parameters(self, parameters: dict[str, Any], root: int) -> None:
        parameters.update(self.hvd.broadcast_parameters(parameters, root_rank=root))

    def unsupported(self) -> Sequence[Any]:
        import jax
        import jax.numpy as jnp

        return [jnp.ones(4, "complex64"), jnp.ones(4, "float8_e4m3fn"), jax.random.split(jax.random.key(0))]


class _Device(Driver):
    """Arrays on a GPU, for tests of the backends that serve it: no framework has a part in it."""

    name = "device"
    tests_kernels = True

    @functools.cached_property
    def hvd(self) -> Any:
        return importlib.import_module("device_collectives")

    @property
    def capabilities(self) -> frozenset[Capability]:
        declared: frozenset[Capability] = self.hvd.DeviceAdapter.capabilities
        return declared

    def from_numpy(self, array: Array) -> Any:
        from device_arrays import DeviceArray

        return DeviceArray.from_numpy(array)

    def to_numpy(self, tensor: Any) -> Array:
        # The rows that an alltoall has received are the CPU's.
        values: Array = tensor if isinstance(tensor, np.ndarray) else tensor.to_numpy()
        return values

    def unsupported(self) -> Sequence[Any]:
        return [self.from_numpy(np.zeros(4, "complex64"))]


DRIVERS: Sequence[Driver] = (
    *(_NumPy(), _CuPy(), _Torch(), _MXNet(), _TensorFlow(), _TensorFlowFunction()),
    _Jax(),
)
_DEVICE = _Device()


def get(name: str) -> Driver:
    """The driver of this name; of "torch+mxnet", on a rank, its own one."""
    if "+" not in name:
        return next(driver for driver in (*DRIVERS, _DEVICE) if driver.name == name)
    each = [get(part) for part in name.split("+")]
    return _among_others(each[polyhvd.rank()]) if polyhvd.is_initialized() else _Mixed(name, each)


#: What ranks of any frameworks have in common, and of the element types one of each kind.
_COMMON_CAPABILITIES = frozenset({Capability.ASYNC, Capability.EMPTY})
_COMMON_DTYPES = ("int32", "float16", "float32", "float64", "bool")


def _among_others(driver: Driver) -> Driver:
    """A driver that declares what all frameworks can."""
    attributes = {
        "capabilities": _COMMON_CAPABILITIES,
        "dtypes": [np.dtype(name) for name in _COMMON_DTYPES],
        "tests_kernels": False,  # all ranks have the same cases
    }
    mixed: Driver = type("Mixed", (type(driver),), attributes)()
    return mixed


class _Mixed(Driver):
    """For the tests' process: a world each of whose ranks has another driver."""

    def __init__(self, name: str, each: Sequence[Driver]) -> None:
        self.name, self.framework = name, "+".join(driver.framework for driver in each)
        self.sizes, self._each = (len(each),), each
        self.package = " or ".join(driver.package for driver in each if not driver.is_installed())

    def is_installed(self) -> bool:
        return all(driver.is_installed() for driver in self._each)

    def from_numpy(self, array: Array) -> Any:
        raise TypeError("a rank's driver makes tensors")

    def to_numpy(self, tensor: Any) -> Array:
        raise TypeError("a rank's driver reads tensors")

    def unsupported(self) -> Sequence[Any]:
        raise TypeError("a rank's driver knows what it cannot")


def capabilities(name: str) -> frozenset[Capability]:
    """What the adapter of a driver declares; asked on a rank."""
    return get(name).capabilities


def counters(name: str) -> dict[str, int]:
    """Counters of the engine; asked on a rank."""
    found: dict[str, int] = get(name).hvd.counters()
    return found
