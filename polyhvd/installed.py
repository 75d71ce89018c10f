"""Says what is missing where an import would fail in a way that nobody understands."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

__all__ = ["has_core", "is_installed", "make_mxnet_importable", "missing", "without_core"]


def has_core(folder: Path) -> bool:
    """Whether a folder of the package holds its compiled core."""
    return any(folder.glob("_core*.so"))


def without_core(folder: Path) -> ImportError:
    """The error of a folder of sources that stands in front of the package that was installed.

    A script's own folder comes first on ``sys.path``: beside a clone it finds the clone's sources.

    Args:
        folder: of the package that is being imported.
    """
    return ImportError(
        f"polyhvd was found in {folder}, which holds its sources without the compiled core. If polyhvd is "
        "installed, this folder hides it, since the script, or the current folder, lies beside it: start the "
        "program from elsewhere, or build the core here with: pip install -e .",
        name="polyhvd._core",
    )


def is_installed(package: str) -> bool:
    """Whether a package is there to be imported; imports nothing."""
    if package in sys.modules:
        return True
    spec = find_spec(package)
    return spec is not None and spec.origin is not None  # a folder that merely has the name has no file


def make_mxnet_importable() -> None:
    """Let ``import mxnet`` work with NumPy 1.24 to 1.26; call it before the first import of mxnet.

    MXNet 1.9.1 reads ``numpy.bool``, which NumPy 1.24 has removed; this sets it to ``bool``, which it was.
    ``import polyhvd.mxnet`` does so itself: programs that import it first need no call. Raises nothing.

    Example::

        import polyhvd
        polyhvd.make_mxnet_importable()
        import mxnet
    """
    import numpy as np  # a launcher needs none, and it takes longest of all

    if "bool" not in vars(np):
        np.bool = bool  # type: ignore[attr-defined]


def missing(module: str, framework: str, command: str) -> ModuleNotFoundError:
    """The error of a module whose framework is not installed.

    Args:
        module: who needs it, such as "polyhvd.torch".
        framework: its name, with the versions that are known to work.
        command: installs one of them.
    """
    return ModuleNotFoundError(
        f"{module} needs {framework}, which is not installed for {sys.executable}; install it with: {command}"
    )
