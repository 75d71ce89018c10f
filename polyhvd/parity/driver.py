"""How the conformance tests use a framework: the base of the classes in parity_driver.py of its folder."""

from __future__ import annotations

import abc
import functools
import importlib
import importlib.util
import math
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from polyhvd.collectives.adapter import Capability
from polyhvd.installed import frameworks

__all__ = ["BFLOAT16", "Driver"]

Array = np.ndarray[Any, Any]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

_DTYPES = ("uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "bool")
_UNSIGNED = ("uint16", "uint32", "uint64")
#: Element types of large tensors. Adapters treat all types the same way; the core's kernels do not.
_LARGE_TYPES = ("uint8", "bfloat16", "float32")
_LARGE_TYPES_OF_KERNELS = (*_DTYPES, "uint64")  # kernels of other lengths of integers are as these
_LARGE = 10_000
_OPTIONAL = {"int16": Capability.INT16, "bfloat16": Capability.BFLOAT16, "bool": Capability.BOOL}
_OPTIONAL |= dict.fromkeys(_UNSIGNED, Capability.UNSIGNED)


class Driver(abc.ABC):
    """Access to one framework, which its methods import. Tensors hold what ``from_numpy`` was given.

    Args:
        framework: the name of its folder.
    """

    form = ""  # ends the name of the driver, where a framework has several
    sizes: Sequence[int] = (2, 3)  # numbers of ranks: more of them differ only in the core
    #: Whether its tests are those of the core's kernels, too, which differ by element type.
    tests_kernels = False
    #: Whether an asynchronous allgather waits until all ranks have sent their sizes.
    gathers_wait = False
    #: What a collective raises when the ranks disagree.
    mismatch_error = "polyhvd.errors.RankMismatchError"

    #: Whether tests repeat what those of another driver have covered.
    is_thorough = False

    def __init__(self, framework: str) -> None:
        known = frameworks().get(framework)
        self.framework, self.name = framework, framework + self.form
        self.package = known.packages[0] if known else ""

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
        """The adapter's declaration."""
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
        """Return whether tensors of this type and shape are tested, in reductions or other collectives."""
        large = _LARGE_TYPES_OF_KERNELS if self.tests_kernels and reduced else _LARGE_TYPES
        return dtype.name in large or math.prod(shape) < _LARGE

    def is_installed(self) -> bool:
        """Return whether the framework is there; imports nothing."""
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
        """Return the gradients of the weighted sum of ``function(*tensors)``'s results by every tensor."""
        raise NotImplementedError(f"{self.name} has no gradients")

    @property
    def has_gradients(self) -> bool:
        """Whether the driver defines :meth:`gradients`."""
        return type(self).gradients is not Driver.gradients

    def parameter(self, array: Array) -> Any:
        """A trainable tensor, as models hold them."""
        return self.from_numpy(array)

    def broadcast_parameters(self, parameters: dict[str, Any], root: int) -> None:
        """Overwrite a model's parameters with the root's, by the framework's function."""
        self.hvd.broadcast_parameters(parameters, root_rank=root)

    def forget_errors(self) -> None:
        """Wait for what failed in a group without being read, where a later wait would raise its error."""
        return

    @abc.abstractmethod
    def unsupported(self) -> Sequence[Any]:
        """Tensors that no collective takes."""

    def argument_errors(self) -> tuple[type[BaseException], ...]:
        """Exceptions that a call may raise which is wrong by itself."""
        return (ValueError,)

    def error_type(self) -> type[BaseException]:
        """The class of ``mismatch_error``."""
        module, _, name = self.mismatch_error.rpartition(".")
        found: type[BaseException] = getattr(importlib.import_module(module), name)
        return found
