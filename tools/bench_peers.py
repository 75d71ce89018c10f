"""Makes the environments of what elastic jobs and loaders of data are measured beside: ``make bench-peers``.

Ray Train, Horovod and loaders of data get virtual environments in build/peers, which see the suite's PyTorch
and are kept between runs; ``python tools/bench_peers.py ray`` makes one. Horovod is compiled, from its last
version with one change of the C++ standard, as docs/internals/measurements.md says.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.matrix import ROOT, install, run

WORK = ROOT / "build" / "peers"
RAY = ("ray[data,train]==2.60.0", "aiohttp")  # Ray Data imports fsspec's HTTP file system
HOROVOD = "horovod==0.28.1"
HOROVOD_NEEDS = ("setuptools<81", "wheel", "packaging", "cloudpickle", "psutil", "pyyaml", "cffi")
LOADERS = ("datasets==5.2.0", "litdata==0.2.76", "numpy==1.26.4")
#: MosaicML's loader, which needs other versions of what datasets needs.
STREAMING = ("mosaicml-streaming==0.13.0", "numpy==1.26.4")
PETASTORM = ("petastorm==0.13.1", "pyarrow==12.0.1", "numpy==1.26.4", "pandas<2.2", "setuptools<81")
#: Horovod's own is too old for the headers of PyTorch.
STANDARD = ("CMAKE_CXX_STANDARD 14", "CMAKE_CXX_STANDARD 20")


def environment(name: str) -> Path:
    """Make a virtual environment that sees the suite's packages; return its interpreter."""
    folder = WORK / name
    shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, "-m", "venv", folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    suite = [path for path in sys.path if Path(path).name == "site-packages"]
    lines = [f"import site; site.addsitedir({path!r})\n" for path in suite]  # with polyhvd of this checkout
    (packages / "suite.pth").write_text("".join(lines))
    return folder / "bin" / "python"


def make(name: str, *packages: str) -> None:
    """Install packages beside the suite's."""
    install(environment(name), *packages)


def make_horovod() -> None:
    """Horovod with PyTorch on gloo: two cores compile it in about ten minutes."""
    python, source = environment("horovod"), WORK / "source"
    shutil.rmtree(source, ignore_errors=True)
    run(python, "-m", "pip", "install", "-q", *HOROVOD_NEEDS)
    take = ("--no-binary", ":all:", "--no-deps", "--no-build-isolation", HOROVOD)
    run(python, "-m", "pip", "download", "-q", "-d", source, *take)
    (archive,) = source.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(source)
    (folder,) = (path for path in source.iterdir() if path.is_dir())
    for listed in (folder / "CMakeLists.txt", folder / "horovod" / "torch" / "CMakeLists.txt"):
        listed.write_text(listed.read_text().replace(*STANDARD))
    chosen = {"HOROVOD_WITH_PYTORCH": "1", "HOROVOD_WITHOUT_TENSORFLOW": "1", "HOROVOD_WITHOUT_MXNET": "1"}
    chosen |= {"HOROVOD_WITH_GLOO": "1", "HOROVOD_WITHOUT_MPI": "1"}
    chosen["MAKEFLAGS"] = os.environ.get("MAKEFLAGS", f"-j{os.cpu_count()}")
    # Compilers and packages of this environment come first.
    chosen["PATH"] = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    run(
        *(python, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", folder),
        env={**os.environ, **chosen},
    )


def make_petastorm() -> None:
    """It needs an old pyarrow, and works with nothing of the suite."""
    folder = WORK / "petastorm"
    shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, "-m", "venv", folder)
    install(folder / "bin" / "python", *PETASTORM)


MAKERS: dict[str, Callable[[], None]] = {
    "ray": partial(make, "ray", *RAY),
    "horovod": make_horovod,
    "data": partial(make, "data", *LOADERS),
    "streaming": partial(make, "streaming", *STREAMING),
    "petastorm": make_petastorm,
}


def main() -> None:
    """Make the environments named on the command line, or all that are not there."""
    names = sys.argv[1:] or [name for name in MAKERS if not (WORK / name / "made").exists()]
    if unknown := sorted(set(names) - set(MAKERS)):
        sys.exit(f"unknown peers {unknown}; known are {list(MAKERS)}")
    WORK.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in names:
        try:
            MAKERS[name]()
        except subprocess.CalledProcessError as error:
            print(f"{name}: FAILED, exit status {error.returncode}", flush=True)
            failed.append(name)
            continue
        (WORK / name / "made").touch()
    if failed:
        sys.exit(f"could not be made: {', '.join(failed)}")


if __name__ == "__main__":
    main()
