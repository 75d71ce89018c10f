"""Builds wheels for several versions of CPython and several platforms on one x86-64 machine.

``python tools/wheels.py`` builds all of them into dist/ and checks each one; ``--python 3.12 --platform
aarch64`` builds some. setup.py does the work, as for any other wheel. This tool gives it Zig's compiler,
which has the C library of every platform, and the sysconfig of the Python that the wheel is for.

The headers of each Python version are taken from the first of these that has them: the folders in
PYTHON_HEADERS, an installed Python of that version, and Debian's package. Versions without headers are
reported and left out, and the exit status is then 1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "wheels"
VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
BYTES_MAX = 3_000_000
#: The folders of sources that do not depend on Python: compiled once for each platform.
SHARED = (
    "backends",
    "frameworks",
    *(f"polyhvd/csrc/{name}" for name in ("api", "control", "engine", "observe")),
)
#: Prints the instruction set that kernels of the extension in a file use here.
_IMPORT = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("polyhvd._core", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(module.INSTRUCTION_SET)
"""
#: Debian's releases with a package of headers.
_DEBIAN = {"3.11": "bookworm", "3.13": "trixie", "3.14": "forky"}


@dataclass(frozen=True)
class Platform:
    """A machine type, and the oldest C library that its wheels run with."""

    machine: str
    glibc: tuple[int, int]

    @property
    def tag(self) -> str:
        """Platform tag of the wheels, such as "manylinux_2_17_x86_64"."""
        return f"manylinux_{self.glibc[0]}_{self.glibc[1]}_{self.machine}"

    @property
    def target(self) -> str:
        """Zig's name of it, such as "x86_64-linux-gnu.2.17"."""
        return f"{self.machine}-linux-gnu.{self.glibc[0]}.{self.glibc[1]}"


PLATFORMS = (Platform("x86_64", (2, 17)), Platform("aarch64", (2, 28)))


@dataclass(frozen=True)
class Wheel:
    """A wheel to be built.

    Args:
        python: version of CPython, such as "3.12".
        platform: where it runs.
        headers: folder with Python.h of that version.
    """

    python: str
    platform: Platform
    headers: Path

    @property
    def tag(self) -> str:
        """Python tag and ABI tag, such as "cp312"."""
        return f"cp{self.python.replace('.', '')}"

    @property
    def folder(self) -> Path:
        """The folder in which it is built."""
        return WORK / self.platform.machine / self.tag

    def settings(self, compiler: str) -> dict[str, object]:
        """Return the answers of the target's sysconfig, as far as a build reads them.

        Args:
            compiler: the command that compiles C++ for the platform.
        """
        soabi = f"cpython-{self.python.replace('.', '')}-{self.platform.machine}-linux-gnu"
        # Without symbols: the library has one fifth of the size. Exporting only what Python and the adapters
        # look up keeps the C++ library inside apart from the one that a framework has loaded.
        link = f"{compiler} -shared -s -Wl,--version-script={WORK / 'exports'}"
        return {
            "VERSION": self.python,
            "SOABI": soabi,
            "EXT_SUFFIX": f".{soabi}.so",
            "SHLIB_SUFFIX": ".so",
            "INCLUDEPY": str(self.headers),
            "CONFINCLUDEPY": str(self.headers),
            "CC": compiler,
            "CXX": compiler,
            # As system headers: pyconfig.h redefines macros if a header of the C library came first.
            "CFLAGS": f"-DNDEBUG -isystem {self.headers}",
            "CCSHARED": "-fPIC",
            "LDSHARED": link,
            "LDCXXSHARED": link,
            "AR": "false",
            "ARFLAGS": "rcs",
            "Py_DEBUG": 0,
            "Py_GIL_DISABLED": 0,
            "Py_ENABLE_SHARED": 0,
            "SIZEOF_VOID_P": 8,
        }


def version_of(headers: Path) -> str | None:
    """The version of Python that a folder has the headers of, such as "3.12"; None: it has none."""
    try:
        text = (headers / "patchlevel.h").read_text()
    except OSError:
        return None
    found = [
        re.search(rf"^#define PY_{part}_VERSION\s+(\d+)", text, re.MULTILINE) for part in ("MAJOR", "MINOR")
    ]
    if not all(found) or not (headers / "Python.h").exists():
        return None
    return ".".join(match[1] for match in found if match)


def is_usual_build(headers: Path) -> bool:
    """Return whether the headers are of a usual build of CPython, neither debug nor free-threaded."""
    defined = r"^#define (Py_GIL_DISABLED|Py_DEBUG|Py_TRACE_REFS)\b"
    try:
        return not re.search(defined, (headers / "pyconfig.h").read_text(), re.MULTILINE)
    except OSError:
        return False


def find_headers(version: str, given: list[Path]) -> Path | None:
    """A folder with Python.h of a version of Python; None: this machine has none."""
    for folder in (*_below(given), *_installed(version)):
        if version_of(folder) == version and is_usual_build(folder):
            return folder
    return _debian_headers(version)


def _below(given: list[Path]) -> Iterator[Path]:
    for folder in given:
        yield from (found.parent for found in sorted(folder.rglob("Python.h")))


def _programs(version: str) -> Iterator[str]:
    """The installed Pythons of a version."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    programs = [shutil.which(f"python{version}"), *map(str, pyenv.glob(f"{version}.*/bin/python{version}"))]
    for program in filter(None, programs):
        if subprocess.run([program, "-c", ""], capture_output=True).returncode == 0:  # a shim may fail
            yield program


def _installed(version: str) -> Iterator[Path]:
    print_include = "import sysconfig; print(sysconfig.get_paths()['include'])"
    for program in _programs(version):
        done = subprocess.run([program, "-c", print_include], capture_output=True, text=True, check=True)
        yield Path(done.stdout.strip())
    yield Path("/usr/include") / f"python{version}"


def _debian_headers(version: str) -> Path | None:
    """Return the headers of Debian's package, which is downloaded but not installed.

    Both platforms have the same files but for pyconfig.h, in which no macro differs that Python.h reads.
    """
    folder = WORK / "headers" / version
    if not folder.exists() and version in _DEBIAN and shutil.which("apt-get") and _mirror():
        package = f"libpython{version}-dev"
        state = WORK / "apt"
        (state / "lists" / "partial").mkdir(parents=True, exist_ok=True)
        (state / "sources").write_text(
            "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] "
            f"{_mirror()} {_DEBIAN[version]} main\n"
        )
        options = [f"Dir::State={state}", f"Dir::Cache={state}", f"Dir::Etc::SourceList={state / 'sources'}"]
        options += ["Dir::Etc::SourceParts=/dev/null", "APT::Sandbox::User=root"]
        apt = ["apt-get", "-qq", *(word for option in options for word in ("-o", option))]
        with tempfile.TemporaryDirectory(dir=state) as into:
            for command in ([*apt, "update"], [*apt, "download", package]):
                if subprocess.run(command, cwd=into).returncode:
                    return None
            (archive,) = Path(into).glob("*.deb")
            subprocess.run(["dpkg-deb", "-x", archive, into], check=True)
            include = Path(into, "usr", "include")
            (config,) = include.glob(f"*/python{version}/pyconfig.h")
            shutil.copy(config, include / f"python{version}" / "pyconfig.h")
            folder.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(include / f"python{version}", folder)
    return folder if version_of(folder) == version else None


def _mirror() -> str | None:
    """Return the mirror of Debian that this machine's apt uses."""
    for file in (Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))):
        if file.is_file() and (
            found := re.search(r"^[^#\n]*?(https?://\S+/debian)/?(\s|$)", file.read_text(), re.MULTILINE)
        ):
            return found[1]
    return None


def compiler_for(platform: Platform) -> str:
    """A command that compiles C++ for a platform, with ccache where that is installed."""
    import ziglang

    zig = Path(ziglang.__file__).with_name("zig")
    script = WORK / platform.machine / "clang++"
    script.parent.mkdir(parents=True, exist_ok=True)
    text = f'#!/bin/sh\nexec "{zig}" c++ -target {platform.target} "$@"\n'
    if not script.exists() or script.read_text() != text:
        script.write_text(text)
        script.chmod(0o755)
    cache = shutil.which("ccache")
    if cache:
        os.environ["CCACHE_COMPILERTYPE"] = "clang"
        os.environ["CCACHE_COMPILERCHECK"] = f"string:{zig.stat().st_size} {platform.target}"
    return f"{cache} {script}" if cache else str(script)


def prepare(wheel: Wheel, compiler: str) -> dict[str, str]:
    """Write the files that setup.py reads; the environment in which it builds the wheel."""
    objects = wheel.folder / "objects"
    for name in SHARED:
        link, shared = objects / name, wheel.platform.machine
        (WORK / shared / "objects" / name).mkdir(parents=True, exist_ok=True)
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(WORK / shared / "objects" / name)
    (WORK / "exports").write_text("{ global: PyInit_*; polyhvd_*; local: *; };\n")
    values = {**sysconfig.get_config_vars(), **wheel.settings(compiler)}
    constants = {name: value for name, value in values.items() if isinstance(value, str | int)}
    (wheel.folder / "_sysconfigdata_polyhvd.py").write_text(f"build_time_vars = {constants!r}\n")
    config = wheel.folder / "build.cfg"
    config.write_text(
        f"[build]\nbuild_base = {wheel.folder}\nbuild_lib = {wheel.folder / 'lib'}\n"
        f"[build_ext]\nbuild_temp = {objects}\n"
        f"[bdist_wheel]\nplat_name = {wheel.platform.tag}\nbdist_dir = {wheel.folder / 'unpacked'}\n"
    )
    shutil.rmtree(wheel.folder / "lib", ignore_errors=True)  # or a removed module would stay in the wheel
    return {
        **{
            name: value
            for name, value in os.environ.items()
            if name not in ("CC", "CXX", "CFLAGS", "LDFLAGS")
        },
        "_PYTHON_SYSCONFIGDATA_NAME": "_sysconfigdata_polyhvd",
        "_PYTHON_HOST_PLATFORM": f"linux-{wheel.platform.machine}",
        "PYTHONPATH": str(wheel.folder),
        "DIST_EXTRA_CONFIG": str(config),
        "SOURCE_DATE_EPOCH": commit_time(),
    }


def commit_time() -> str:
    """Seconds since 1970 of the last commit: the time of all files in the wheels."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    show = ["git", "log", "-1", "--format=%ct"]
    return given or subprocess.run(show, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def build(wheel: Wheel, into: Path) -> Path:
    """Build and check it, then move it into a folder; the path of the file."""
    environment = prepare(wheel, compiler_for(wheel.platform))
    program = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    into.mkdir(parents=True, exist_ok=True)
    made = wheel.folder / "dist"
    shutil.rmtree(made, ignore_errors=True)
    log = wheel.folder / "log"
    with log.open("w") as file:
        done = subprocess.run(
            [sys.executable, "-c", program, made],
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    if done.returncode:
        sys.stderr.write(log.read_text()[-5000:])
        raise SystemExit(
            f"wheels: setup.py failed for CPython {wheel.python} on {wheel.platform.tag}; see {log}"
        )
    path = made / log.read_text().split()[-1]
    check(path, wheel)
    return Path(shutil.move(path, into / path.name))


def check(path: Path, wheel: Wheel) -> None:
    """Raise SystemExit if the wheel is not what its name says, is too large, or has what an index refuses."""
    expected = f"-{wheel.tag}-{wheel.tag}-{wheel.platform.tag}.whl"
    if not path.name.endswith(expected):
        raise SystemExit(f"wheels: the name of {path.name} should end with {expected}")
    size = path.stat().st_size
    if size >= BYTES_MAX:
        raise SystemExit(f"wheels: {path.name} has {size} bytes; the limit is {BYTES_MAX}")
    found = json.loads(_run("auditwheel", "show", "--json", path))
    if not fits(found, wheel.platform):
        raise SystemExit(
            f"wheels: {path.name} runs only on {found['overall_tag']} and newer. It needs these libraries "
            f"and versions of symbols: {found['external_libs']}, {found['versioned_symbols']}"
        )
    check_unwinder(path)
    _run("check_wheel_contents", path)
    _run("twine", "check", "--strict", path)
    if wheel.platform.machine == os.uname().machine:
        check_import(path, wheel)


def check_unwinder(path: Path) -> None:
    """Raise SystemExit if exceptions of MXNet would crash in our library; see unwinding.cc there."""
    with zipfile.ZipFile(path) as archive:
        if b"libgcc_s.so.1" not in archive.read("polyhvd/mxnet/_native.so"):
            raise SystemExit(
                f"wheels: polyhvd/mxnet/_native.so in {path.name} does not call the unwinder of libgcc_s, so "
                "exceptions of MXNet would end the process; link frameworks/mxnet/unwinding.cc"
            )


def check_import(path: Path, wheel: Wheel) -> None:
    """Raise SystemExit if the extension cannot be imported, or does not use the processor's AVX2.

    Nothing is checked without an installed Python of the wheel's version.
    """
    for program in _programs(wheel.python):
        with tempfile.TemporaryDirectory() as folder:
            with zipfile.ZipFile(path) as archive:
                (name,) = (
                    name for name in archive.namelist() if re.fullmatch(r"polyhvd/_core\..*\.so", name)
                )
                extension = archive.extract(name, folder)
            done = subprocess.run([program, "-Ic", _IMPORT, extension], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"wheels: {program} cannot import {path.name}:\n{done.stderr}")
        has_avx2 = " avx2 " in Path("/proc/cpuinfo").read_text()
        if has_avx2 and done.stdout.split() == ["baseline"]:
            raise SystemExit(f"wheels: {path.name} does not use AVX2, which this machine's processor has")
        return


def fits(found: dict[str, Any], platform: Platform) -> bool:
    """Return whether a wheel runs on a platform.

    Args:
        found: what ``auditwheel show --json`` prints of the wheel.
    """
    tag = re.fullmatch(r"manylinux_(\d+)_(\d+)_(\w+)", str(found["overall_tag"]))
    if tag is None or tag[3] != platform.machine or any(found["external_libs"].values()):
        return False
    return (int(tag[1]), int(tag[2])) <= platform.glibc


def _run(module: str, *words: object) -> str:
    command = [sys.executable, "-m", module, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"wheels: {' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> int:
    """Build and check the wheels that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", nargs="+", choices=VERSIONS, default=VERSIONS, help="default: all")
    machines = [platform.machine for platform in PLATFORMS]
    parser.add_argument("--platform", nargs="+", choices=machines, default=machines, help="default: both")
    parser.add_argument(
        "--into", type=Path, default=ROOT / "dist", help="folder for the wheels (default: dist)"
    )
    options = parser.parse_args()
    given = [Path(name) for name in os.environ.get("PYTHON_HEADERS", "").split(os.pathsep) if name]
    headers = {version: find_headers(version, given) for version in options.python}
    for platform in (each for each in PLATFORMS if each.machine in options.platform):
        for version, folder in headers.items():
            if folder is None:
                continue
            began = time.monotonic()
            wheel = Wheel(version, platform, folder)
            path = build(wheel, options.into.resolve())
            size = path.stat().st_size / 1e6
            print(f"{path.name}  {size:.2f} MB  {time.monotonic() - began:.0f} s  ({folder})", flush=True)
    missing = [version for version, folder in headers.items() if folder is None]
    if missing:
        print(
            f"wheels: not built for CPython {', '.join(missing)}: their headers were not found. Install "
            "these versions, or set PYTHON_HEADERS to folders that contain their Python.h",
            file=sys.stderr,
        )
    return int(bool(missing))


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except KeyboardInterrupt:
        print("wheels: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
