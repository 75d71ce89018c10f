"""Builds the extension modules, and generates modules of frameworks. Needs a C++20 compiler and pybind11.

Everything else (metadata, extras, tools) stands in pyproject.toml.
"""

from __future__ import annotations

import re
import subprocess
import sys
from glob import glob
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import Extension, find_packages, setup

FLAGS = [
    "-std=c++20",
    "-O3",
    "-g0",  # after Python's own -g: the library would be five times as large
    "-Wall",
    "-Wextra",
    "-Werror",
    "-fvisibility=hidden",
    # A contracted multiply-add would round vector bodies and scalar tails differently.
    "-ffp-contract=off",
    "-MMD",  # for is_stale()
]
INCLUDES = ["polyhvd/csrc", "backends"]


def core() -> Extension:
    """The operation queue and all backends; found in the process: nothing but libc."""
    return Pybind11Extension(
        "polyhvd._core",
        sorted(glob("polyhvd/csrc/*/*.cc") + glob("backends/**/*.cc", recursive=True)),
        include_dirs=INCLUDES,
        extra_compile_args=FLAGS,
        extra_link_args=["-pthread", "-ldl"],
        depends=glob("polyhvd/csrc/*/*.h") + glob("backends/**/*.h", recursive=True),
    )


def native_adapter(framework: str) -> Extension:
    """A framework's thin library: C interfaces on both sides, resolved when it is loaded."""
    folder = Path("frameworks") / framework
    return Extension(
        f"polyhvd.{framework}._native",
        sorted(str(p) for p in folder.glob("*.cc")),
        include_dirs=INCLUDES,
        extra_compile_args=FLAGS,
        extra_link_args=["-pthread", "-ldl"],
        depends=[str(p) for p in folder.glob("*.h")] + glob("polyhvd/csrc/*/*.h"),
        language="c++",
    )


class BuildExt(build_ext):  # type: ignore[misc]
    """Builds native adapters without CPython's suffix: they never call it, and fit every version."""

    def finalize_options(self) -> None:
        """Keep objects in one place, for installing in place, for wheels, and for the core's own tests."""
        self.build_temp = self.build_temp or f"build/objects/{sys.implementation.cache_tag}"
        super().finalize_options()

    def get_ext_filename(self, ext_name: str) -> str:
        """Return the path of an extension's library in the package."""
        if ext_name.rpartition(".")[2] == "_native":  # asked for with its package, and without
            return f"{ext_name.replace('.', '/')}.so"
        return str(super().get_ext_filename(ext_name))


def is_stale(made: str, source: str) -> bool:
    """Return whether an object is older than its source, one of its headers, or the flags."""
    listed = Path(made).with_suffix(".d")
    try:
        age = Path(made).stat().st_mtime
        names = listed.read_text().replace("\\\n", " ").split()[1:]
        return any(Path(name).stat().st_mtime > age for name in (source, "setup.py", *names))
    except OSError:  # a path with a space in it is none
        return True


def framework_packages() -> dict[str, str]:
    """polyhvd.torch lies in frameworks/torch, and so on; frameworks/ itself is not installed."""
    return {f"polyhvd.{name}": f"frameworks/{name.replace('.', '/')}" for name in find_packages("frameworks")}


def readme() -> str:
    """Return README.md for a package index, where links to other files of the repository lead nowhere."""

    def without_link(link: re.Match[str]) -> str:
        text, path = link.groups()
        page = re.fullmatch(r"docs/(?:guides/)?([\w-]+)\.md", path)
        if page is None:
            return text
        command = f"`polyhvd docs {page[1]}`"
        return command if text == path else f"{text} ({command})"

    links = r"\[([^]]+)\]\((?!https?:|#)([^)#]+)(?:#[^)]*)?\)"
    return re.sub(links, without_link, Path("README.md").read_text(encoding="utf-8"))


FRAMEWORKS = framework_packages()
NATIVE = sorted(p.parent.name for p in Path("frameworks").glob("*/native.cc"))

# Here and not in a command: wheels, editable installs and source distributions all have to find the files.
subprocess.run([sys.executable, "polyhvd/collectives/table/generator.py"], check=True)
ParallelCompile("MAX_JOBS", default=2, needs_recompile=is_stale).install()
setup(
    long_description=readme(),
    long_description_content_type="text/markdown",
    packages=[*find_packages(include=["polyhvd", "polyhvd.*"]), *sorted(FRAMEWORKS), "polyhvd.docs"],
    package_dir={**FRAMEWORKS, "polyhvd.docs": "docs"},  # pages for ``polyhvd docs``
    ext_modules=[core(), *(native_adapter(name) for name in NATIVE)],
    cmdclass={"build_ext": BuildExt},
)
