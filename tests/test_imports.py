"""What an import says where polyhvd or a framework cannot be found, or is found in the wrong place."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from polyhvd.installed import modules_with

ROOT = Path(__file__).resolve().parents[1]
(JAX,) = re.findall(r'^jax = \["(.*)"\]$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
FRAMEWORKS = {
    "torch": ("PyTorch", "pip install torch"),
    "tensorflow": ("TensorFlow", "pip install tensorflow"),
    "mxnet": ("MXNet 1.9.1", "pip install mxnet==1.9.1 'numpy<2'"),
    "jax": ("JAX", f"pip install '{JAX}'"),
    "cupy": ("CuPy", "pip install cupy-cuda12x"),
    "keras": ("Keras 3", "pip install keras tensorflow"),
    "lightning": ("Lightning 2", "pip install lightning"),
}

#: These tests link to the core in the checkout, which only an editable install has.
editable = pytest.mark.skipif(
    not list((ROOT / "polyhvd").glob("_core*.so")),
    reason="the checkout has no core: polyhvd is not installed editable",
)


def _run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A script in a folder, started from there."""
    (folder / "train.py").write_text(program)
    return subprocess.run(
        [sys.executable, "train.py"], cwd=folder, capture_output=True, text=True, timeout=60
    )


def test_a_script_in_a_clone_that_hides_the_installed_package_says_so(tmp_path: Path) -> None:
    sources = shutil.ignore_patterns("*.so", "__pycache__", "csrc")
    shutil.copytree(ROOT / "polyhvd", tmp_path / "polyhvd", ignore=sources)
    done = _run("import polyhvd.numpy", tmp_path)
    assert done.returncode == 1
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("ImportError")]
    assert f"polyhvd was found in {tmp_path / 'polyhvd'}" in error
    assert "start the program from elsewhere" in error


@pytest.mark.parametrize(
    ("core", "built_for"),
    [
        ("_core.cpython-39-x86_64-linux-gnu.so", "CPython 3.9 on x86_64"),
        ("_core.cpython-313t-aarch64-linux-gnu.so", "CPython 3.13 (free-threaded) on aarch64"),
        ("_core.old.so", "a Python whose extension modules end with _core.old.so"),
    ],
)
def test_a_package_built_for_another_python_names_both_in_one_line(
    core: str, built_for: str, tmp_path: Path
) -> None:
    sources = shutil.ignore_patterns("*.so", "__pycache__", "csrc")
    folder = shutil.copytree(ROOT / "polyhvd", tmp_path / "polyhvd", ignore=sources)
    (folder / core).touch()
    last = _run("import polyhvd.numpy", tmp_path).stderr.splitlines()[-1]
    this = f"CPython {sys.version_info[0]}.{sys.version_info[1]} on {platform.machine()} ({sys.executable})"
    assert last.startswith(
        f"ImportError: polyhvd in {folder} was built for {built_for}, and this is {this}. "
    )
    assert f"with: {sys.executable} -m pip install" in last


@editable
def test_a_script_beside_a_clone_finds_the_package_in_it(tmp_path: Path) -> None:
    (tmp_path / "polyhvd").symlink_to(ROOT)
    program = "import polyhvd, polyhvd.numpy as hvd; hvd.init(); print(hvd.size(), polyhvd.__version__)"
    done = _run(program, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("1 ")


@editable
def test_elastic_functions_need_no_package_that_only_types_do(tmp_path: Path) -> None:
    done = _run("import sys; sys.modules['typing_extensions'] = None; import polyhvd.numpy.elastic", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("module", "package", "title"), [("ray", "ray", "Ray"), ("spark", "pyspark", "PySpark")]
)
def test_a_cluster_s_package_that_is_missing_is_an_error_with_the_command_that_installs_it(
    module: str, package: str, title: str
) -> None:
    program = (
        "import importlib.util\n"
        "real = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda name, package=None: None if name == {package!r} else real(name)\n"
        f"import polyhvd.{module}\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    last = done.stderr.splitlines()[-1]
    needed = f"ModuleNotFoundError: polyhvd.{module} needs {title}, which is not installed"
    assert last.startswith(needed), done.stderr
    assert last.endswith(f"pip install 'polyhvd[{module}]'")


def test_a_library_of_the_system_that_mxnet_lacks_is_an_error_with_the_command_that_installs_it(
    tmp_path: Path,
) -> None:
    words = "libgomp.so.1: cannot open shared object file: No such file or directory"
    (tmp_path / "site" / "mxnet").mkdir(parents=True)  # as MXNet's own library fails on a slim system
    (tmp_path / "site" / "mxnet" / "__init__.py").write_text(f"raise OSError({words!r})\n")
    done = _run("import sys; sys.path.insert(0, 'site')\nimport polyhvd.mxnet\n", tmp_path)
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: MXNet cannot open a library of the system: {words}. Install it, on Debian and Ubuntu "
        "as root with: apt-get install libgomp1 libquadmath0"
    )


@pytest.mark.parametrize("module", FRAMEWORKS)
def test_a_framework_that_is_missing_is_an_error_with_the_command_that_installs_it(module: str) -> None:
    name, command = FRAMEWORKS[module]
    hidden = [module, *(["pytorch_lightning"] if module == "lightning" else [])]
    program = (
        "import importlib.util\n"
        "real = importlib.util.find_spec\n"
        f"hidden = {hidden}\n"
        "importlib.util.find_spec = lambda name, package=None: None if name in hidden else real(name)\n"
        f"import polyhvd.{module}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ModuleNotFoundError: polyhvd.{module} needs {name}"), done.stderr
    assert last.endswith(command)


HIDING = [("torch", "torch"), ("torch", "numpy"), ("numpy", "numpy"), ("mxnet", "mxnet"), ("jax", "jax")]
HIDING += [("tensorflow", "tensorflow"), ("lightning", "torch"), ("keras", "tensorflow")]


@pytest.mark.parametrize(("module", "hidden"), HIDING)
def test_a_file_beside_the_program_that_hides_a_framework_is_named(
    module: str, hidden: str, tmp_path: Path
) -> None:
    if find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    (tmp_path / f"{hidden}.py").write_text("")
    for before in ("", f"import {hidden}\n"):
        done = _run(f"{before}import polyhvd.{module}", tmp_path)
        last = done.stderr.splitlines()[-1]
        assert last.startswith(f"ImportError: {tmp_path / hidden}.py hides "), done.stderr
        assert last.endswith("Rename the file")


def test_a_file_with_the_name_of_another_framework_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")
    assert _run("import polyhvd.numpy", tmp_path).stderr == ""


@pytest.mark.parametrize(
    ("before", "name", "module", "others"),
    [
        ("numpy", "allreduce", "numpy", ["torch", "tensorflow.keras"]),
        ("numpy", "DistributedTrainer", "mxnet", []),
        ("numpy", "DistributedGradientTape", "tensorflow", []),
    ],
)
def test_a_name_that_only_frameworks_have_is_an_error_that_names_their_modules(
    before: str, name: str, module: str, others: list[str], tmp_path: Path
) -> None:
    last = _run(f"import {before}, polyhvd as hvd\nhvd.{name}", tmp_path).stderr.splitlines()[-1]
    assert last.startswith(f"AttributeError: module 'polyhvd' has no attribute '{name}'. ")
    assert f"for example: import polyhvd.{module} as hvd. " in last
    listed = last.partition(f"{name!r} is in ")[2].split(", ")
    assert set(listed) >= {f"polyhvd.{each}" for each in [module, *others]}


def test_every_public_name_of_a_framework_is_found_in_its_sources() -> None:
    program = "import polyhvd.torch as hvd; print(*set(hvd.__all__) - set(__import__('polyhvd').__all__))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    names = done.stdout.split()
    assert len(names) > 20, done.stderr
    assert [name for name in names if "polyhvd.torch" not in modules_with(name)] == []


def test_a_name_that_no_module_has_gets_no_advice(tmp_path: Path) -> None:
    last = _run("import polyhvd\npolyhvd.siez", tmp_path).stderr.splitlines()[-1]
    assert last == "AttributeError: module 'polyhvd' has no attribute 'siez'"


@editable
def test_a_folder_that_is_copied_is_a_framework_without_a_line_elsewhere(tmp_path: Path) -> None:
    package = tmp_path / "polyhvd"
    package.mkdir()
    folders = [path.parent for path in (ROOT / "frameworks").glob("*/framework.py")]
    for path in [*(ROOT / "polyhvd").iterdir(), *folders]:
        (package / path.name).symlink_to(path)
    twin = package / "twin"
    shutil.copytree(ROOT / "frameworks" / "numpy", twin, ignore=shutil.ignore_patterns("verbs.py"))
    for path in twin.glob("*.py"):
        renamed = path.read_text().replace("polyhvd.numpy", "polyhvd.twin")
        path.write_text(renamed.replace('"NumPy"', '"Twin"'))
    program = f"""
import pathlib, sys
sys.path.insert(0, {str(tmp_path)!r})
from polyhvd.bench.collectives import measured
from polyhvd.collectives.table import generator
from polyhvd.installed import frameworks
from polyhvd.observe.doctor import examine
from polyhvd.testing.stand_ins import _ADAPTERS
print(*(path.parent.name for path in generator.write(pathlib.Path({str(package)!r}))))
import polyhvd.twin as hvd
hvd.init()
print(hvd.allreduce(2.0), hvd.allreduce.__module__)
print(*(finding for finding in examine()["Frameworks"] if finding.name == "Twin"))
print("twin" in measured(), "polyhvd.twin" in _ADAPTERS, sorted(frameworks().keys() & sys.modules.keys()))
"""
    done = _run(program, tmp_path)
    assert done.returncode == 0, done.stderr
    written, reduced, found, known = done.stdout.splitlines()
    assert (written, reduced) == ("twin", "2.0 polyhvd.twin.verbs")
    assert found.startswith("[x] Twin ")
    assert known == "True True ['numpy']"  # no other framework was imported for it


@pytest.mark.skipif(find_spec("mxnet") is None, reason="mxnet is not installed")
def test_mxnet_can_be_imported_first_after_a_call() -> None:
    program = "import polyhvd; polyhvd.make_mxnet_importable(); import mxnet; print(mxnet.__version__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1.")
