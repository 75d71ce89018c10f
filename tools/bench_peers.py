"""Makes the environments of what elastic jobs are measured beside: ``make bench-peers``.

Ray Train and Horovod each get a virtual environment in build/peers, which sees the suite's PyTorch and is
kept between runs; ``python tools/bench_peers.py ray`` makes one. Horovod is compiled, from its last version
with one change of the C++ standard, as docs/performance.md says.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.matrix import ROOT, run, show_suite_packages

WORK = ROOT / "build" / "peers"
RAY = "ray[train]==2.60.0"
HOROVOD = "horovod==0.28.1"
HOROVOD_NEEDS = ("setuptools<81", "wheel", "packaging", "cloudpickle", "psutil", "pyyaml", "cffi")
#: Horovod's own is too old for the headers of PyTorch.
STANDARD = ("CMAKE_CXX_STANDARD 14", "CMAKE_CXX_STANDARD 20")


def environment(name: str) -> Path:
    """A virtual environment that sees the suite's packages, made anew; returns its interpreter."""
    folder = WORK / name
    shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, "-m", "venv", folder)
    show_suite_packages(folder)
    return folder / "bin" / "python"


def make_ray() -> None:
    """Ray Train, as it comes."""
    run(environment("ray"), "-m", "pip", "install", "-q", "--no-compile", RAY)


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


MAKERS: dict[str, Callable[[], None]] = {"ray": make_ray, "horovod": make_horovod}


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
