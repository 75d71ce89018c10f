"""The frameworks under test: the drivers of their folders, and those that need what is here.

Nothing here imports a framework until a driver is used, by a rank of its pool.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import depth  # tests/harness, on the path by tests/conftest.py
import gpu
import numpy as np

import polyhvd
from polyhvd.collectives.adapter import Capability
from polyhvd.installed import read_all
from polyhvd.parity.driver import BFLOAT16, Driver

__all__ = ["BFLOAT16", "DRIVERS", "Driver", "capabilities", "counters", "get"]

Array = np.ndarray[Any, Any]
Driver.is_thorough = depth.NIGHTLY


class _CuPy(Driver):
    """On a GPU if there is one, else on the tests' stand-ins for CUDA, NCCL and CuPy.

    In reproducible mode, which gives the bits of the CPUs; how NCCL adds is tests/gpu's.
    """

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


class _Device(Driver):
    """Arrays on a GPU, for tests of the backends that serve it: no framework has a part in it."""

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


_CLASSES = {name: module.DRIVERS for name, module in read_all("parity_driver.py").items()}
#: NumPy's come first: other tests have used its ranks.
_CLASSES = {"numpy": _CLASSES["numpy"], "cupy": (_CuPy,), **_CLASSES}
DRIVERS: Sequence[Driver] = [driver(name) for name, classes in _CLASSES.items() for driver in classes]
_DEVICE = _Device("device")


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
    mixed: Driver = type("Mixed", (type(driver),), attributes)(driver.framework)
    return mixed


class _Mixed(Driver):
    """For the tests' process: a world each of whose ranks has another driver."""

    def __init__(self, name: str, each: Sequence[Driver]) -> None:
        super().__init__("+".join(driver.framework for driver in each))
        self.name = name
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
