"""The examples: each trains to the same accuracy on 1, 2 and 4 ranks."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from fork_servers import IMPORTS, SETTINGS, ForkServers  # tests/harness, on the path by tests/conftest.py

from polyhvd.testing.stand_ins import is_installed

ROOT = Path(__file__).resolve().parents[2]
FRAMEWORKS = {"mxnet": "mxnet", "pytorch": "torch", "lightning": "torch", "tensorflow": "tensorflow"}
#: Those that are killed, move a model, read files or need transformers, Ray or Spark have separate tests. One
#: framework's follow each other, since its fork servers may end when others are needed.
EXAMPLES = sorted(
    (
        path.name
        for path in (ROOT / "examples").glob("*.py")
        if path.name != "common.py"
        and not path.name.startswith(("elastic_", "hugging_", "migration_", "parquet_", "ray_", "spark_"))
    ),
    key=lambda name: ([*FRAMEWORKS, name.split("_")[0]].index(name.split("_")[0]), name),
)
#: Those of one job, each on a rank.
MIXED = ("mixed_gluon.py", "mixed_torch.py")
TIMEOUT_S = 120.0
LAST_LINE = re.compile(r"\[0\] test accuracy ([\d.]+), (\d+) ranks?, (\d+) images/s")
#: What takes the NumPy example longest to import.
DATA = ("sklearn.datasets", "rich.progress")
#: Enough for the accuracy below: fewer than the examples' own number, and more than Lightning's needs.
EPOCHS = ("--epochs", "10")
Run = Callable[..., list[str]]


@pytest.fixture
def run(fork_servers: ForkServers) -> Run:
    """``run(example, ranks, *arguments)`` runs one to its end and returns its lines of standard output."""

    def run(example: str, ranks: int, *arguments: str) -> list[str]:
        framework = FRAMEWORKS.get(example.split("_")[0])
        if framework:
            python = fork_servers.python(ranks, IMPORTS[framework])
        elif example.startswith("numpy"):
            python = fork_servers.python(ranks, [*IMPORTS["numpy"], *DATA])
        else:
            python = [sys.executable]
        return run_by(python, example, ranks, *arguments)

    return run


def run_by(python: Sequence[str], example: str, ranks: int, *arguments: str) -> list[str]:
    """The lines of standard output of an example whose ranks this interpreter runs."""
    script = str(ROOT / "examples" / example)
    command = [sys.executable, "-m", "polyhvd.launch", "-np", str(ranks), *python, script]
    done = subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
        env={**os.environ, **SETTINGS},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout.splitlines()


def result(lines: list[str]) -> tuple[float, int, int]:
    """Accuracy, ranks and images per second of the last line."""
    found = LAST_LINE.fullmatch(lines[-1])
    assert found, lines[-1]
    return float(found[1]), int(found[2]), int(found[3])


@pytest.fixture
def common() -> ModuleType:
    spec = importlib.util.spec_from_file_location("common", ROOT / "examples" / "common.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_there_are_examples_for_every_framework() -> None:
    shown = "".join((ROOT / "examples" / name).read_text() for name in EXAMPLES)
    frameworks = {path.parent.name for path in (ROOT / "frameworks").glob("*/__init__.py")}
    missing = [name for name in frameworks - {"cupy"} if f".{name} as hvd" not in shown]
    assert not missing, "CuPy's are NumPy's"


@pytest.mark.parametrize(
    ("example", "ranks"),
    # Worlds of other sizes stand in each framework's own tests.
    [
        *((example, 2) for example in EXAMPLES if example not in (*MIXED, "lightning_digits.py")),
        pytest.param("lightning_digits.py", 2, marks=pytest.mark.slow),
        *(("numpy_logistic.py", ranks) for ranks in (1, 4)),
        pytest.param("pytorch_digits.py", 1, marks=pytest.mark.nightly),
        pytest.param("mxnet_gluon_digits.py", 4, marks=pytest.mark.nightly),
    ],
)
def test_example_trains_on_any_number_of_ranks(run: Run, example: str, ranks: int) -> None:
    skip_unless_installed(example)
    check_training(run(example, ranks, *EPOCHS), ranks)


@pytest.mark.parametrize(
    ("name", "framework"),
    [
        pytest.param("gluon", "mxnet", marks=pytest.mark.slow),
        pytest.param("keras", "tensorflow", marks=pytest.mark.slow),
        ("torch", "torch"),
    ],
)
def test_example_trains_on_parquet_files(fork_servers: ForkServers, name: str, framework: str) -> None:
    if not is_installed(framework):
        pytest.skip(f"{framework} is not installed")
    python = fork_servers.python(2, IMPORTS[framework])
    check_training(run_by(python, f"parquet_{name}.py", 2, *EPOCHS), 2)


@pytest.mark.nightly
@pytest.mark.parametrize("example", [example for example in EXAMPLES if example not in MIXED])
def test_example_trains_as_a_user_runs_it(example: str) -> None:
    skip_unless_installed(example)
    check_training(run_by([sys.executable], example, 2), 2)


def skip_unless_installed(example: str) -> None:
    imports = {"lightning": "lightning", "pytorch": "torch"}
    package = imports.get(example.split("_")[0], example.split("_")[0])
    if not is_installed(package):
        pytest.skip(f"{package} is not installed")


def check_training(lines: list[str], ranks: int) -> None:
    accuracy, ranks_told, images_per_s = result(lines)
    assert accuracy > 0.95
    assert ranks_told == ranks
    assert images_per_s > 0
    assert all(line.startswith("[0] ") for line in lines), "only rank 0 prints"
    assert sum("epoch" in line for line in lines) == len(lines) - 1, "a line per epoch and the last one"


@pytest.mark.slow
def test_two_frameworks_train_one_model_in_one_job() -> None:
    for package in ("mxnet", "torch"):
        if not is_installed(package):
            pytest.skip(f"{package} is not installed")
    command = [sys.executable, "-m", "polyhvd.launch"]
    for position, example in enumerate(MIXED):
        command += [":"] if position else []
        command += ["-np", "1", sys.executable, str(ROOT / "examples" / example)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **SETTINGS},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    accuracy, ranks, _ = result(done.stdout.splitlines())
    assert accuracy > 0.95
    assert ranks == 2


def test_plot_is_a_png(run: Run, tmp_path: Path) -> None:
    plot = tmp_path / "loss.png"
    run("numpy_logistic.py", 2, "--epochs", "3", "--plot", str(plot))
    assert plot.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]


@pytest.mark.slow
def test_gluon_trains_on_fashion_mnist(run: Run, common: ModuleType) -> None:
    if not common.FASHION_MNIST.exists():
        pytest.skip("the Debian package dataset-fashion-mnist is not installed")
    lines = run("mxnet_gluon_digits.py", 2, "--data", "fashion-mnist", "--epochs", "1", "--batch-size", "64")
    accuracy, _, _ = result(lines)
    assert accuracy > 0.8


def test_missing_fashion_mnist_is_told_with_the_command_that_installs_it(
    common: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "FASHION_MNIST", tmp_path)
    with pytest.raises(SystemExit, match="apt-get install dataset-fashion-mnist"):
        common.load("fashion-mnist")


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_shards_are_distinct_and_equally_long(common: ModuleType, size: int) -> None:
    train, _ = common.load("digits")
    numbered = common.Images(train.pixels, np.arange(len(train)))
    shards = [numbered.shard(rank, size).labels for rank in range(size)]
    assert {len(shard) for shard in shards} == {len(train) // size}
    assert len(np.unique(np.concatenate(shards))) == len(train) // size * size


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_uneven_shards_cover_all_test_images(common: ModuleType, size: int) -> None:
    _, test = common.load("digits")
    numbered = common.Images(test.pixels, np.arange(len(test)))
    shards = [numbered.shard(rank, size, even=False).labels for rank in range(size)]
    assert sorted(np.concatenate(shards)) == list(range(len(test)))
