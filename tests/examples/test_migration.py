"""polyhvd parity migrate, and the examples of docs/moving-from-mxnet.md, as its reader runs them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from fork_servers import SETTINGS  # tests/harness, on the path by tests/conftest.py

from polyhvd import cli
from polyhvd.testing.stand_ins import is_installed

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
MODEL = """
import os, signal
import numpy as np

def example_inputs():
    return np.random.default_rng(0).normal(size=(4, 1, 6, 6)).astype("float32")

def torch_model():
    from torch import nn
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 5))

def gluon_model(activation="relu", units=5):
    from mxnet.gluon import nn
    net = nn.HybridSequential()
    net.add(nn.Conv2D(3, 3), nn.BatchNorm(), nn.Activation(activation), nn.Flatten(), nn.Dense(units))
    return net
"""


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, **SETTINGS},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def migrate(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = str(Path(sys.executable).with_name("polyhvd"))
    return run(command, "parity", "migrate", *arguments, cwd=cwd)


@pytest.fixture(scope="module")
def needs_both() -> None:
    for package in ("mxnet", "torch"):
        if not is_installed(package):
            pytest.skip(f"{package} is not installed")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, needs_both: None) -> Path:
    """A folder with a model file, and weights of PyTorch that are not as a new model's."""
    folder = tmp_path_factory.mktemp("original")
    (folder / "model.py").write_text(MODEL)
    source = """
        import torch
        from model import torch_model
        torch.manual_seed(3)
        state = torch_model().state_dict()
        torch.save({name: value + torch.rand_like(value.float()) for name, value in state.items()}, "a.pt")
    """
    done = run("-c", "import sys; sys.path.insert(0, '')\n" + textwrap.dedent(source), cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def trained(tmp_path: Path, original: Path) -> Path:
    """A copy of that folder."""
    return shutil.copytree(original, tmp_path, dirs_exist_ok=True)


def test_weights_come_over_and_back_again(trained: Path) -> None:
    (trained / "polyhvd").mkdir()  # as the sources in a clone, which do not hide the installed package
    (trained / "polyhvd" / "__init__.py").write_text("raise ImportError")
    there = migrate("a.pt", "b.params", "--model", "model.py", "--verbose", cwd=trained)
    assert there.returncode == 0, there.stderr
    assert "b.params: 8 weights" in there.stdout
    assert "0.weight -> " in there.stdout
    assert "the largest output is the same in 100.0% of rows" in there.stdout
    np.save(trained / "x.npy", np.ones((2, 1, 6, 6), "float32"))
    back = migrate("b.params", "c.pt", "--model", "model.py", "--inputs", "x.npy", cwd=trained)
    assert back.returncode == 0, back.stderr
    assert "on inputs 2x1x6x6" in back.stdout
    check = """
        import torch
        a, c = torch.load("a.pt"), torch.load("c.pt")
        assert all(torch.equal(a[name], c[name]) for name in a if "num_batches" not in name)
    """
    assert run("-c", textwrap.dedent(check), cwd=trained).returncode == 0
    assert not [path for path in trained.iterdir() if path.name.startswith(".polyhvd")]


def test_files_that_others_have_written_are_read(trained: Path) -> None:
    source = """
        import torch
        from model import torch_model
        model = torch_model()
        torch.save({f"module.{name}": value for name, value in torch.load("a.pt").items()}, "parallel.pt")
        torch.save(model, "whole.pt")
    """
    done = run("-c", "import sys; sys.path.insert(0, '')\n" + textwrap.dedent(source), cwd=trained)
    assert done.returncode == 0, done.stderr
    done = migrate("parallel.pt", "b.params", "--model", "model.py", cwd=trained)
    assert done.returncode == 0, done.stderr
    done = migrate("whole.pt", "c.params", "--model", "model.py", cwd=trained)
    assert (done.returncode, "expected a state dict, found objects" in done.stderr) == (3, True), done.stderr
    export = """
        import polyhvd
        polyhvd.make_mxnet_importable()
        import mxnet as mx
        from model import example_inputs, gluon_model
        gluon_model().collect_params()  # so that names count on
        net = gluon_model()
        net.load_parameters("b.params")
        net.hybridize()
        net(mx.nd.array(example_inputs()))
        net.export("old")
    """
    done = run("-c", "import sys; sys.path.insert(0, '')\n" + textwrap.dedent(export), cwd=trained)
    assert done.returncode == 0, done.stderr
    done = migrate("old-0000.params", "c.pt", "--model", "model.py", cwd=trained)
    assert (done.returncode, "make the model as in the program" in done.stderr) == (3, True), done.stderr
    again = export.replace("gluon_model().collect_params()  #", "#")
    done = run("-c", "import sys; sys.path.insert(0, '')\n" + textwrap.dedent(again), cwd=trained)
    assert done.returncode == 0, done.stderr
    done = migrate("old-0000.params", "c.pt", "--model", "model.py", cwd=trained)
    assert done.returncode == 0, done.stderr
    assert "c.pt: 8 weights" in done.stdout


def test_a_target_that_cannot_be_written_is_told_in_a_line(trained: Path) -> None:
    done = migrate("a.pt", "/proc/b.params", "--model", "model.py", cwd=trained)
    assert done.returncode == 2
    assert "TARGET /proc/b.params: cannot be written" in done.stderr
    assert "Traceback" not in done.stderr


TWO_INPUTS = """
import numpy as np

def example_inputs():
    random = np.random.default_rng(0)
    return [random.integers(0, 9, (4, 6)).astype("int32"), random.normal(size=(4, 6, 3)).astype("float32")]

def torch_model():
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.qkv, self.out = nn.Embedding(9, 8), nn.Linear(11, 24), nn.Linear(8, 2)

        def forward(self, words, extra):
            q, k, v = self.qkv(torch.cat([self.words(words), extra], 2)).chunk(3, 2)
            return self.out(torch.softmax(q @ k.transpose(1, 2), 2) @ v)

    return Model()

def gluon_model():
    from mxnet import gluon, nd
    from mxnet.gluon import nn

    class Model(gluon.Block):
        def __init__(self):
            super().__init__()
            with self.name_scope():
                self.words = nn.Embedding(9, 8)
                self.q, self.k, self.v = (nn.Dense(8, flatten=False) for _ in range(3))
                self.out = nn.Dense(2, flatten=False)

        def forward(self, words, extra):
            x = nd.concat(self.words(words), extra, dim=2)
            scores = nd.softmax(nd.batch_dot(self.q(x), self.k(x), transpose_b=True))
            return self.out(nd.batch_dot(scores, self.v(x)))

    return Model()

def convert(weights):
    made = {}
    for name, array in weights.items():
        if name == "qkv.weight":
            biases = np.split(weights["qkv.bias"], 3)
            for part, kernel, bias in zip("qkv", np.split(array, 3), biases):
                made |= {part + ".weight": kernel, part + ".bias": bias}
        elif name != "qkv.bias":
            made[name] = array
    return made
"""


def test_a_model_with_two_inputs_and_fused_projections_comes_over(tmp_path: Path, needs_both: None) -> None:
    (tmp_path / "two.py").write_text(TWO_INPUTS)
    source = "import torch, two; torch.save(two.torch_model().state_dict(), 'a.pt')"
    assert run("-c", f"import sys; sys.path.insert(0, ''); {source}", cwd=tmp_path).returncode == 0
    done = migrate("a.pt", "b.params", "--model", "two.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "b.params: 9 weights" in done.stdout
    assert "on inputs 4x6, 4x6x3 differ by" in done.stdout
    np.savez(tmp_path / "x.npz", np.ones((1, 6), "int32"))
    done = migrate("a.pt", "b.params", "--model", "two.py", "--inputs", "x.npz", cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert "does not take inputs of int32 1x6" in done.stderr


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        (('activation="relu"', 'activation="sigmoid"'), 1, "so the models compute something else"),
        (
            (
                "nn.Flatten(), nn.Dense",
                "nn.HybridLambda(lambda F, x: F.transpose(x, (0, 2, 3, 1))), nn.Dense",
            ),
            1,
            "dense0_weight' / '4.weight' is given the same numbers as in torch, in another order",
        ),
        (("units=5", "units=7"), 3, "the models do not match: at weight 6"),
        (("def gluon_model", "def other"), 2, "has no function gluon_model(); expected one that returns"),
        (
            ("    from torch import nn\n", "    os.kill(os.getpid(), signal.SIGKILL)\n"),
            4,
            "ended with SIGKILL",
        ),
    ],
    ids=["activation", "order", "units", "function", "killed"],
)
def test_models_that_do_not_match_are_told_in_a_line_and_nothing_is_written(
    trained: Path, change: tuple[str, str], status: int, message: str
) -> None:
    (trained / "model.py").write_text(MODEL.replace(*change))
    (trained / "b.params").write_text("as it was")
    done = migrate("a.pt", "b.params", "--model", "model.py", cwd=trained)
    assert done.returncode == status, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert (trained / "b.params").read_text() == "as it was"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["a.onnx", "b.pt", "--model", "model.py"],
            "a.onnx: unknown kind of file; expected a name that ends in",
        ),
        (["a.pt", "b.params", "--model", "model.py"], "SOURCE a.pt: there is no such file"),
        (["here.pt", "b.params", "--model", "no.py"], "--model no.py: there is no such file"),
        (["here.pt", "no/b.params", "--model", "model.py"], "TARGET no/b.params: there is no folder"),
        (["here.pt", "b.params", "--model", "model.py", "--inputs", "x.npy"], "--inputs x.npy"),
        (["here.pt", "b.params", "--model", "model.py", "--inputs", "here.pt"], "--inputs here.pt"),
    ],
)
def test_calls_that_cannot_be_carried_out_are_refused_at_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.pt").touch()
    (tmp_path / "model.py").touch()
    assert cli.main(["parity", "migrate", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_reader_goes_from_gluon_to_pytorch_and_keras(tmp_path: Path, needs_both: None) -> None:
    if not is_installed("tensorflow"):
        pytest.skip("tensorflow is not installed")
    if not FASHION_MNIST.exists():
        pytest.skip("the Debian package dataset-fashion-mnist is not installed")
    few = ("--images", "24", "--batch-size", "8")
    began = run(str(EXAMPLES / "migration_gluon.py"), *few, "--save", "gluon.params", cwd=tmp_path)
    assert began.returncode == 0, began.stderr
    for target in ("torch.pt", "keras.weights.h5"):
        model = str(EXAMPLES / "migration_model.py")
        moved = migrate("gluon.params", target, "--model", model, cwd=tmp_path)
        assert moved.returncode == 0, moved.stderr
        assert f"{target}: 102 weights, 11184970 numbers of gluon.params" in moved.stdout
    command = ["-m", "polyhvd.launch"]
    for name, start in (("gluon", "gluon.params"), ("torch", "torch.pt"), ("keras", "keras.weights.h5")):
        command += [":"] if name != "gluon" else []
        command += [
            "-np",
            "1",
            sys.executable,
            str(EXAMPLES / f"migration_{name}.py"),
            *few,
            "--start",
            start,
        ]
    done = run(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test accuracy of gluon.params in Gluon" in done.stdout
    assert "3 ranks" in done.stdout
