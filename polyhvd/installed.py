"""The frameworks that polyhvd has adapters for, and errors for the import of one that is not installed.

Facts about a framework that can be read without importing it are only in framework.py of its folder.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = [
    "Framework",
    "Parity",
    "advice_on",
    "frameworks",
    "has_core",
    "is_installed",
    "lazily",
    "make_mxnet_importable",
    "modules_with",
    "read_all",
    "require",
    "without_core",
]


def _computes_all(precision: str, kinds: Collection[str]) -> str:
    return ""


@dataclass(frozen=True)
class Parity:
    """Facts about a framework for ``polyhvd parity``, which are read without importing it.

    Args:
        models: what people call its models.
        packages: of the classes of its models and tensors.
        reader: the module that follows :class:`polyhvd.parity.models.Reader`; empty: parity.py of the
            framework's folder.
        session: the class of cases.py of its folder that trains cases; empty: it trains none.
        requires: what has to be installed to train them, with the least version of some, "keras>=3"; empty:
            these packages.
        made_by: the framework whose models a case makes for it; empty: cases make none; None: itself.
        cannot_compute: why not layers of these kinds in this half type on processors; empty: it can.
        migrates_as: its name in ``polyhvd parity migrate``; empty: it has no part in that.
        endings: of the names of its files of weights.
    """

    models: str
    packages: tuple[str, ...]
    reader: str = ""
    session: str = ""
    requires: tuple[str, ...] = ()
    made_by: str | None = None
    cannot_compute: Callable[[str, Collection[str]], str] = _computes_all
    migrates_as: str = ""
    endings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Framework:
    """``FRAMEWORK`` of a framework's ``framework.py``, which imports nothing but this module.

    Args:
        title: its name for people.
        packages: under which it is imported; one of them has to be there. The first has its name.
        versions: that are known to work.
        install: the command that installs one of them.
        remark: on the command, for ``polyhvd doctor``.
        distributions: its names on PyPI.
        companions: other packages that modules for it import.
        stands_on: frameworks whose adapters its adapter uses.
        place: in lists of frameworks; those with equal ones are in the order of their names.
        count_gpus: how many GPUs the imported package can use.
        ones: makes a tensor of ones for ``polyhvd bench``, of the imported package, how many elements and the
            name of their dtype. None: it has no part in that.
        finish: waits for a tensor, where a collective has not done so.
        parity: its part in ``polyhvd parity``; None: it has none.
    """

    title: str
    packages: tuple[str, ...]
    versions: str
    install: str
    remark: str = ""
    distributions: tuple[str, ...] = ()
    companions: tuple[str, ...] = ()
    stands_on: tuple[str, ...] = ()
    place: int = 100
    count_gpus: Callable[[Any], int] | None = None
    ones: Callable[[Any, int, str], Any] | None = None
    finish: Callable[[Any], None] | None = None
    parity: Parity | None = None


@cache
def frameworks() -> dict[str, Framework]:
    """All frameworks by the names of their modules, ``polyhvd.NAME``, whether they are installed or not."""
    found = {name: _read(path).FRAMEWORK for name, path in _files("framework.py").items()}
    return dict(sorted(found.items(), key=lambda pair: (pair[1].place, pair[0])))


def read_all(file: str) -> dict[str, ModuleType]:
    """The modules of this name of all frameworks that have one, without an import of the frameworks.

    Args:
        file: of their folders, which imports its framework in functions only.
    """
    found = _files(file)
    return {name: _read(found[name]) for name in frameworks() if name in found}


def _files(file: str) -> dict[str, Path]:
    """That file of every framework, in the installed package or, where that is a checkout, beside it."""
    package = Path(__file__).parent
    for folder in (package, package.parent / "frameworks"):
        if found := {path.parent.name: path for path in folder.glob(f"*/{file}")}:
            return found
    return {}


def _read(path: Path) -> ModuleType:
    """By its path: an import would import the adapter, too, and so the framework."""
    spec = spec_from_file_location(f"polyhvd.{path.parent.name}.{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def has_core(folder: Path) -> bool:
    """Return whether a folder of the package holds a compiled core that this Python can import."""
    return any((folder / f"_core{suffix}").exists() for suffix in EXTENSION_SUFFIXES)


def without_core(folder: Path) -> ImportError:
    """The error for a folder of the package that has no core, or one for another Python or platform.

    A folder without a core holds sources, and hides the installed package: a script's own folder comes first
    on ``sys.path``. A core for another Python comes from a folder that was copied, or from PYTHONPATH.

    Args:
        folder: of the package that is being imported.
    """
    if others := sorted(path.name for path in folder.glob("_core*.so")):
        here = f"{_python_of(EXTENSION_SUFFIXES[0])} ({sys.executable})"
        return ImportError(
            f"polyhvd in {folder} was built for {' and '.join(map(_python_of, others))}, and this is {here}. "
            f"Install the wheel for this Python, or the source, with: {sys.executable} -m pip install. "
            "If polyhvd is installed for it, remove the other folder from PYTHONPATH",
            name="polyhvd._core",
        )
    return ImportError(
        f"polyhvd was found in {folder}, which holds its sources without the compiled core. If polyhvd is "
        "installed, this folder hides it, since the script, or the current folder, lies beside it: start the "
        "program from elsewhere, or build the core here with: pip install -e .",
        name="polyhvd._core",
    )


def _python_of(suffix: str) -> str:
    """The Python that imports extension modules with a suffix, for people: "CPython 3.12 on aarch64"."""
    found = re.search(r"\.(\w+)-(\d)(\d+)(\w*)-(\w+)-linux", suffix)
    if found is None:
        return f"a Python whose extension modules end with {suffix}"
    name = {"cpython": "CPython"}.get(found[1], found[1])
    flavor = {"t": " (free-threaded)", "d": " (debug build)"}.get(found[4], "")
    return f"{name} {found[2]}.{found[3]}{flavor} on {found[5]}"


def is_installed(package: str) -> bool:
    """Return whether a package is there to be imported; imports nothing."""
    if package in sys.modules:
        return True
    spec = find_spec(package)
    return spec is not None and spec.origin is not None  # a folder that merely has the name has no file


def make_mxnet_importable() -> None:
    """Let ``import mxnet`` work with NumPy 1.24 to 1.26; call it before the first import of mxnet.

    MXNet 1.9.1 reads ``numpy.bool``, which NumPy 1.24 has removed; this sets it to ``bool``, which it was.
    ``import polyhvd.mxnet`` does so itself: programs that import it first need no call.

    Example::

        import polyhvd
        polyhvd.make_mxnet_importable()
        import mxnet
    """
    import numpy as np  # a launcher needs none, and it takes longest of all

    if "bool" not in vars(np):
        np.bool = bool  # type: ignore[attr-defined]


def require(module: str) -> None:
    """Raise the error of a module whose framework cannot be imported, before it imports that.

    Args:
        module: that needs it, such as "polyhvd.torch".

    Raises:
        ModuleNotFoundError: none of the framework's packages is installed.
        ImportError: a file of the user, such as torch.py beside the program, hides the framework.
    """
    name = module.rpartition(".")[2]
    framework = _facts(name)
    if not any(map(is_installed, framework.packages)):
        raise ModuleNotFoundError(
            f"{module} needs {framework.title} {framework.versions}, which is not installed for "
            f"{sys.executable}; install it with: {framework.install}"
        )
    for needed in (framework, *map(_facts, framework.stands_on), _facts("numpy")):
        for package in needed.packages:
            if hiding := _hiding_file(package):
                raise ImportError(
                    f"{hiding} hides {needed.title}: Python imports this file as {package!r}, since "
                    "its folder comes first on sys.path. Rename the file",
                    name=package,
                    path=hiding,
                )


def _facts(framework: str) -> Framework:
    facts: Framework = _read(_files("framework.py")[framework]).FRAMEWORK
    return facts


def _hiding_file(package: str) -> str | None:
    """The file beside the program that Python imports in place of a framework; None: there is none.

    Frameworks are folders. A file elsewhere, such as in PYTHONPATH, may be meant to stand for one.
    """
    module = sys.modules.get(package)
    if module is None:
        spec = find_spec(package)
        file = spec.origin if spec is not None and spec.submodule_search_locations is None else None
    else:
        file = None if hasattr(module, "__path__") else getattr(module, "__file__", None)
    program = getattr(sys.modules.get("__main__"), "__file__", None) or ""
    folders = {str(Path(program).absolute().parent) if program else "", str(Path.cwd())}
    return file if file and str(Path(file).absolute().parent) in folders else None


def modules_with(name: str) -> list[str]:
    """The modules of frameworks that have a public name, as ["polyhvd.torch"]; imports none of them.

    Args:
        name: of a function or class, such as "allreduce".
    """
    found = _files("framework.py")
    folders = {framework: found[framework].parent for framework in frameworks()}
    folders["tensorflow.keras"] = folders["tensorflow"] / "keras"
    return [f"polyhvd.{module}" for module, folder in folders.items() if name in _public_names(folder)]


def advice_on(name: str) -> str:
    """Return what to add to the error for a name that only modules of frameworks have; empty: none has it."""
    modules = modules_with(name)
    if not modules:
        return ""

    def rank(module: str) -> tuple[bool, bool]:
        packages = frameworks()[module.split(".")[1]].packages
        return not any(package in sys.modules for package in packages), not any(map(is_installed, packages))

    return (
        f". Import the module of your framework, for example: import {min(modules, key=rank)} as hvd. "
        f"{name!r} is in {', '.join(modules)}"
    )


def _public_names(folder: Path) -> set[str]:
    """The names in the lists of a framework's folder."""
    names: set[str] = set()
    for file in ("__init__.py", "verbs.py", "wrappers.py"):
        with suppress(OSError):
            text = (folder / file).read_text(encoding="utf-8")
            for listed in re.findall(r"^__all__ = \[(.*?)\]", text, re.MULTILINE | re.DOTALL):
                names.update(re.findall(r'"(\w+)"', listed))
    return names


def lazily(package: str, **places: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package that imports some of its names at their first use.

    Args:
        package: its full name.
        places: of each name, the module of the package that has it; empty: it is a module itself.
    """

    def find(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(f"{package}.{places[name] or name}")
        return getattr(module, name) if places[name] else module

    return find
