"""Stand-ins for frameworks while pytest's process imports tests that only ranks run.

An import of TensorFlow takes seconds, and no process has two frameworks. A test module may name what a
framework has where it defines functions, classes and constants; what is computed with it there is a stand-in.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from polyhvd.installed import frameworks

__all__ = ["StandIn", "is_installed", "stand_ins"]

#: NumPy is in every process.
_FRAMEWORKS = {name: framework for name, framework in frameworks().items() if name != "numpy"}
_PACKAGES = {name for each in _FRAMEWORKS.values() for name in (*each.packages, *each.companions)}
_ADAPTERS = tuple(f"polyhvd.{name}" for name in _FRAMEWORKS)


class StandIn(ModuleType):
    """Has any attribute, can be called and subclassed; nothing comes of it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"{self.__name__} is a stand-in, which has no {name}")
        return StandIn(f"{self.__name__}.{name}")

    def __call__(self, *_: Any, **__: Any) -> Any:  # noqa: D102
        return StandIn(f"{self.__name__}()")

    def __getitem__(self, _: Any) -> Any:
        return StandIn(f"{self.__name__}[]")

    def __index__(self) -> int:
        return 0

    def _computed(self, *_: Any) -> Any:
        return StandIn(f"computed with {self.__name__}")

    __or__ = __ror__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _computed
    __mod__ = __rmod__ = __truediv__ = __rtruediv__ = __lt__ = __le__ = __gt__ = __ge__ = _computed

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return ()


class _Finder(MetaPathFinder, Loader):
    def __init__(self, framework: str) -> None:
        self._framework = framework

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        package = name.partition(".")[0]
        if name.startswith((*_ADAPTERS, f"polyhvd.{self._framework}")) or package == self._framework:
            return ModuleSpec(name, self, is_package=True)
        if package in _PACKAGES and is_installed(package):
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def is_installed(package: str) -> bool:
    """Return whether a package is there; imports nothing, and takes no folder of tests or stand-in for it."""
    finders = [f for f in sys.meta_path if not isinstance(f, _Finder) and hasattr(f, "find_spec")]
    specs = [finder.find_spec(package, None) for finder in finders]
    return any(spec is not None and spec.origin is not None for spec in specs)


@contextlib.contextmanager
def stand_ins(framework: str) -> Iterator[None]:
    """Import stand-ins in the place of frameworks, and of this one even if it is not installed."""
    before, environment = set(sys.modules), dict(os.environ)
    finder = _Finder(framework)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        os.environ.clear()
        os.environ.update(environment)  # which a module may change for its ranks
        for name in set(sys.modules) - before:
            module = sys.modules[name]
            if module is None:  # forbidden, for its ranks
                del sys.modules[name]
            elif isinstance(module, StandIn):
                del sys.modules[name]
                parent, _, child = name.rpartition(".")
                if parent in sys.modules and vars(sys.modules[parent]).get(child) is module:
                    delattr(sys.modules[parent], child)
            elif any(isinstance(value, StandIn) for value in getattr(module, "__dict__", {}).values()):
                del sys.modules[name]
