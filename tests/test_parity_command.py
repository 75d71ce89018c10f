"""``polyhvd parity`` as users run it: its reports, its exit statuses, and that nothing of it stays."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from fork_servers import IMPORTS, SETTINGS, ForkServers  # tests/harness, on the path by tests/conftest.py

from polyhvd.parity import command, layers, running
from polyhvd.parity.case import Case, Optimizer
from polyhvd.parity.catalogue import CASES
from polyhvd.parity.judging import Verdict, judge
from polyhvd.parity.report import Report
from polyhvd.parity.report.documents import as_json, as_junit
from polyhvd.parity.report.page import as_html
from polyhvd.parity.runs import Order, Run
from polyhvd.parity.statuses import STATUSES
from polyhvd.testing.stand_ins import is_installed

ROOT = Path(__file__).resolve().parents[1]

CASE = """
import numpy as np
from polyhvd.parity import layers

def build(framework):
    return [layers.dense(4, 6), layers.activation("tanh"), layers.dense(6, 3)]

def batch(framework, step):
    inputs = np.random.default_rng(step).standard_normal((12, 4))
    return inputs, inputs[:, :3].argmax(axis=1)
"""


@dataclass
class Command:
    """``polyhvd parity``, run by an interpreter that runs its ranks too."""

    python: str = sys.executable

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run it to its end."""
        code = f"import sys; sys.executable = {self.python!r}; from polyhvd.cli import main; sys.exit(main())"
        return subprocess.run(
            [self.python, "-c", code, "parity", *words],
            cwd=ROOT,
            env={**os.environ, **SETTINGS},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
        )


def forked(request: pytest.FixtureRequest, framework: str) -> Command:
    """The command and its ranks in forks of processes that have imported a framework."""
    if not is_installed(framework):
        pytest.skip(f"needs {framework}, which is not installed")
    servers: ForkServers = request.getfixturevalue("fork_servers")
    python = shlex.join(servers.python(2, IMPORTS[framework]))
    path = request.getfixturevalue("tmp_path_factory").mktemp("python") / "python"
    # The process that removes the folder of a run has options, which no fork takes.
    path.write_text(f"""#!/bin/sh\n[ "$1" = -I ] && exec {sys.executable} "$@"\nexec {python} "$@"\n""")
    path.chmod(0o755)
    return Command(str(path))


@pytest.fixture
def parity(request: pytest.FixtureRequest) -> Command:
    """``polyhvd parity`` with NumPy."""
    return forked(request, "numpy")


@pytest.fixture
def parity_with_torch(request: pytest.FixtureRequest) -> Command:
    return forked(request, "torch")


@pytest.fixture
def parity_with_mxnet(request: pytest.FixtureRequest) -> Command:
    return forked(request, "mxnet")


def write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


# As users run it -------------------------------------------------------------------


def test_a_case_of_the_catalogue_agrees_and_all_reports_say_so(tmp_path: Path) -> None:
    files = {name: tmp_path / f"report.{name}" for name in ("json", "junit", "html")}
    options = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    done = Command()("mlp", "--frameworks", "numpy", "--steps", "4", "--np", "3", *options)
    assert done.returncode == 0, done.stderr
    assert "mlp: all 3 comparisons agree over 4 steps" in done.stdout
    assert re.search(r"^numpy: 3 ranks against 1 rank +\S+ +\S+ +agree$", done.stdout, re.MULTILINE)

    report = json.loads(files["json"].read_text())
    assert report["schema"] == {"name": "polyhvd.parity", "version": 3}
    assert (report["status"], report["outcome"], report["ranks"], report["steps"]) == (0, "agree", 3, 4)
    assert [check["agree"] for check in report["checks"]] == [True] * 3
    assert {mode: len(losses) for mode, losses in report["losses"]["numpy"].items()} == {
        "plain": 4,
        "one": 4,
        "all": 4,
    }
    suite = ElementTree.parse(files["junit"]).getroot().find("testsuite")
    assert suite is not None
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("3", "0", "0")
    assert len(suite.findall("testcase")) == 3
    assert "All agree" in files["html"].read_text()


def test_names_that_are_not_utf_8_are_reported_in_any_encoding(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "polyhvd", "parity", b"b\xff.py", "--html", "-"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "LANG": "C"}
    done = subprocess.run(
        [*words, "--junit", b"\xff.xml"], cwd=tmp_path, env=environment, capture_output=True, timeout=60
    )
    assert done.returncode == STATUSES["bad-case"], done.stderr
    assert done.stderr == b""
    assert b"<dd>b\\udcff.py</dd>" in done.stdout
    assert 'charset="utf-8"' in done.stdout.decode()
    assert b"there is no such file" in Path(os.fsdecode(bytes(tmp_path) + b"/\xff.xml")).read_bytes()


def test_the_case_in_the_documentation_agrees(parity: Command, tmp_path: Path) -> None:
    document = (ROOT / "docs" / "parity.md").read_text()
    (example,) = re.findall(r"```python\n# case: mycase.py\n(.*?)```", document, re.DOTALL)
    done = parity(write(tmp_path, "mycase.py", example), "--frameworks", "numpy", "--steps", "3")
    assert done.returncode == 0, done.stderr


def test_the_documentation_has_every_status() -> None:
    document = (ROOT / "docs" / "parity.md").read_text()
    report = dict(re.findall(r"^\| (\d+) \| `([\w-]+)` \|", document, re.MULTILINE))
    assert report == {str(status): name for name, status in STATUSES.items()}


@pytest.mark.slow
def test_two_frameworks_that_differ_are_told_apart_by_layer_step_and_kind(tmp_path: Path) -> None:
    text = CASE.replace(
        "    return [layers",
        "    if framework == 'torch':\n"
        "        from torch import nn\n"
        "        return nn.Sequential(nn.Linear(4, 6), nn.Hardtanh(), nn.Linear(6, 3))\n"
        "    return [layers",
    )
    case, out = write(tmp_path, "mine.py", text), tmp_path / "report.json"
    done = Command()(case, "--frameworks", "numpy,torch", "--steps", "3", "--json", str(out))
    assert done.returncode == STATUSES["differ"], done.stderr
    differing = [check for check in json.loads(out.read_text())["checks"] if not check["agree"]]
    assert [check["name"] for check in differing] == [
        "torch against numpy: one process, without polyhvd",
        "torch against numpy: 2 ranks",
    ]
    first = differing[0]["first"]
    assert (first["step"], first["layer"], first["kind"]) == (0, 0, "activation")
    assert first["names"] == ["0.kernel", "0.weight"]
    assert "step 0, layer 0, activation" in done.stdout


@pytest.mark.slow
def test_a_framework_that_the_case_has_no_model_for_is_left_out(tmp_path: Path) -> None:
    text = CASE.replace(
        "    return [layers", "    if framework == 'torch':\n        return None\n    return [layers"
    )
    case, out = write(tmp_path, "mine.py", text), tmp_path / "report.json"
    done = Command()(case, "--frameworks", "torch,numpy", "--steps", "2", "--json", str(out))
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert (report["frameworks"], report["left_out"]) == (["numpy"], ["torch"])
    assert "no model for torch, which was left out" in done.stdout


def test_a_case_without_any_model_is_a_bad_one(parity: Command, tmp_path: Path) -> None:
    case = write(tmp_path, "none.py", CASE.replace("    return [layers", "    return None and [layers"))
    done = parity(case, "--frameworks", "numpy")
    assert done.returncode == STATUSES["bad-case"]
    assert "build() has no model for numpy" in done.stderr


def test_a_rank_that_dies_has_a_status_of_its_own_and_is_named(parity: Command, tmp_path: Path) -> None:
    dies = (
        "    import os\n"
        "    if step == 2 and os.environ['POLYHVD_RANK'] == '1':\n"
        "        os.kill(os.getpid(), 9)\n"
    )
    case = write(tmp_path, "dies.py", CASE.replace("    inputs =", f"{dies}    inputs ="))
    done = parity(case, "--frameworks", "numpy", "--steps", "4")
    assert done.returncode == STATUSES["rank-died"]
    assert done.stderr.startswith("polyhvd parity: numpy: rank 1 on localhost was killed by SIGKILL"), (
        done.stderr
    )


def test_a_case_that_raises_while_it_trains_is_a_bad_case(parity: Command, tmp_path: Path) -> None:
    case = write(tmp_path, "raises.py", CASE.replace("    inputs =", "    1 / (step - 2)\n    inputs ="))
    done = parity(case, "--frameworks", "numpy", "--steps", "4")
    assert done.returncode == STATUSES["bad-case"]
    assert "batch('numpy', 2) has raised ZeroDivisionError" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("argmax(axis=1)", "argmax(axis=1) + 9", "in step 0 numpy cannot compute the model and its loss"),
        ("dense(4, 6)", "dense(5, 6)", r"of inputs \[12, 4\] and targets \[12\]: ValueError"),
        ("dense(4, 6)", "dense('4', 6)", r"numpy cannot make the model that build\('numpy'\) has returned"),
        (
            "    return inputs, ",
            "    return [['a']] * 12, ",
            "batch.*expected arrays of numbers, found one of <U1",
        ),
        ("    inputs =", "    raise SystemExit(0)\n    inputs =", "has raised SystemExit"),
    ],
)
def test_a_case_that_cannot_be_computed_is_a_bad_case(
    parity: Command, tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert old in CASE
    done = parity(write(tmp_path, "bad.py", CASE.replace(old, new)), "--frameworks", "numpy", "--steps", "2")
    assert done.returncode == STATUSES["bad-case"], done.stderr
    assert re.search(message, done.stderr)
    assert len(done.stderr.splitlines()) == 1


BLOCK = """
import numpy as np

def build(framework):
    if framework == "mxnet":
        from mxnet.gluon import nn
        net = nn.HybridSequential()
        net.add(nn.Dense(5, activation="tanh"), nn.Dense(3))
        return net
    from torch import nn
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.LazyLinear(3))

def batch(framework, step):
    inputs = np.random.default_rng(step).standard_normal((12, 4))
    return inputs, inputs[:, :3].argmax(axis=1)
"""


def test_a_block_of_gluon_gets_its_shapes_from_the_batch(parity_with_mxnet: Command, tmp_path: Path) -> None:
    done = parity_with_mxnet(
        write(tmp_path, "block.py", BLOCK), "--frameworks", "mxnet", "--steps", "1", "--np", "1"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_model_without_shapes_is_a_bad_case(tmp_path: Path) -> None:
    if not is_installed("torch"):
        pytest.skip("needs PyTorch, which is not installed")
    done = Command()(write(tmp_path, "block.py", BLOCK), "--frameworks", "torch", "--steps", "1")
    assert done.returncode == STATUSES["bad-case"], done.stderr
    assert "block: torch cannot make the model that build('torch') has returned" in done.stderr
    assert "2.weight has no shape yet; run the model once" in done.stderr


SCRIPT = """
import numpy as np
import polyhvd.numpy as hvd
from polyhvd import parity

hvd.init()
for _ in range(2):
    parity.compare("same", np.ones(3))
"""


def test_scripts_that_agree(tmp_path: Path) -> None:
    script, out = write(tmp_path, "a.py", SCRIPT), tmp_path / "report.json"
    done = Command()("--scripts", script, script, "--json", str(out))
    assert done.returncode == 0, done.stderr
    (check,) = json.loads(out.read_text())["checks"]
    assert (check["name"], check["times"], check["agree"]) == ("same", 2, True)


def test_a_report_of_scripts_has_measured_differences_and_what_the_scripts_print(
    parity: Command, tmp_path: Path
) -> None:
    text = (
        SCRIPT
        + 'parity.compare("near", np.ones(3) * (1 + 1e-15 * hvd.rank()))\nprint("printed", hvd.rank())\n'
    )
    script, out = write(tmp_path, "a.py", text), tmp_path / "report.json"
    done = parity("--scripts", script, script, "--json", str(out), "--html", str(tmp_path / "report.html"))
    assert done.returncode == 0, done.stderr
    same, near = json.loads(out.read_text())["checks"]
    assert (same["loss"], same["worst"], same["margin"]) == (None, {"values": 0.0}, 0.0)
    assert near["worst"]["values"] == pytest.approx(1.1e-15, rel=0.1)
    assert 0 < near["margin"] < 1
    assert re.search(r"^near +1 x +1.1e-15 +[0-9].*e-0[1-9] +agree$", done.stdout, re.MULTILINE), done.stdout
    assert {"printed 0", "printed 1"} <= set(done.stdout.splitlines())
    assert "0.0e+00" not in (tmp_path / "report.html").read_text().split("near")[-1]


WATCHING = """
import sys
import torch
import polyhvd.torch as hvd
from polyhvd import parity

hvd.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + hvd.rank() * float(sys.argv[1])))
with parity.watch(model, optimizer):
    for step in range(2):
        model(torch.ones(5, 4) * (1 + 1e-7 * hvd.rank())).sum().backward()
        optimizer.step()
"""


def test_a_report_of_a_watch_has_layers_margins_and_the_advice_of_the_kind(
    parity_with_torch: Command, tmp_path: Path
) -> None:
    script, out = write(tmp_path, "watching.py", WATCHING), tmp_path / "report.json"
    done = parity_with_torch("--scripts", f"{script} 0", f"{script} 1", "--json", str(out))
    assert done.returncode == STATUSES["differ"], done.stdout + done.stderr
    report = json.loads(out.read_text())
    (check,) = report["checks"]
    assert report["layers"] == {"parity.watch": ["0.weight", "1.weight"]}
    assert check["first"]["kind"] == "learning rate"
    assert "compare the schedules" in check["first"]["advice"]
    assert 0 < check["worst"]["input"] < 1e-6
    assert check["worst"]["learning rate"] == pytest.approx(1.0)
    assert [len(row) for row in check["cells"]] == [2, 2]
    assert check["margin"] == pytest.approx(max(map(max, check["cells"])))
    assert check["loss"] is None


def test_a_watch_of_weights_that_are_not_finite_proves_nothing(
    parity_with_torch: Command, tmp_path: Path
) -> None:
    text = WATCHING.replace("range(2)", "range(3)").replace("optimizer):", "optimizer) as watched:")
    text = text.replace(".sum()", ".sum().mul(float('nan') if step else 1)") + "print(watched)\n"
    script = write(tmp_path, "watching.py", text)
    done = parity_with_torch("--scripts", f"{script} 0", f"{script} 0")
    assert done.returncode == STATUSES["nan"], done.stderr
    message = "step 2: 0.weight has NaNs or infinities before the step, on every rank"
    assert message in done.stderr
    assert done.stdout.count(f"no divergence in 3 steps; {message}") == 2


@pytest.mark.parametrize(
    ("other", "outcome", "message"),
    [
        ('parity.compare("last", np.ones(3) * hvd.size())\n', "differ", "2 instead of 1"),
        ('parity.compare("last", np.array([1, np.nan, 1.0]))\n', "nan", "not finite"),
        ('parity.compare("last", np.ones(4))\n', "batches", "in shape"),
        ("raise SystemExit(9)\n", "rank-died", "rank 1 on localhost exited with status 9"),
    ],
)
def test_scripts_that_do_not_agree(
    parity: Command, tmp_path: Path, other: str, outcome: str, message: str
) -> None:
    one = write(tmp_path, "one.py", SCRIPT + 'parity.compare("last", np.ones(3))\n')
    two = write(tmp_path, "two.py", SCRIPT + other)
    done = parity("--scripts", one, two)
    assert done.returncode == STATUSES[outcome], done.stdout + done.stderr
    assert message in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ('parity.compare("lost", np.ones(3))\n', "rank 0 compares 'last', rank 1 compares 'lost'"),
        ("", "parity.compare 'last': .* needs rank 1, which has shut down"),
    ],
)
def test_scripts_that_compare_other_things_do_not_wait_for_each_other(
    parity: Command, tmp_path: Path, other: str, message: str
) -> None:
    one = write(tmp_path, "one.py", SCRIPT + 'parity.compare("last", np.ones(3))\n')
    two = write(tmp_path, "two.py", SCRIPT + other)
    begun = time.monotonic()
    done = parity("--scripts", one, two)
    assert time.monotonic() - begun < 120  # without an end of its own it would be --timeout
    assert done.returncode == STATUSES["bad-case" if other else "rank-died"], done.stdout + done.stderr
    assert re.search(message, done.stderr), done.stderr
    assert "(rank 0 is one.py, rank 1 is two.py)" in done.stderr
    assert done.stderr.count("Traceback") <= 1


def test_a_script_whose_model_cannot_be_watched_is_a_bad_case_in_one_line(
    parity: Command, tmp_path: Path
) -> None:
    script = write(tmp_path, "a.py", SCRIPT + "parity.watch(7)\n")
    done = parity("--scripts", script, script)
    assert done.returncode == STATUSES["bad-case"], done.stdout + done.stderr
    assert "parity.watch: expected a model of PyTorch, Gluon or Keras, built, found int" in done.stderr
    assert "Traceback" not in done.stderr


def test_scripts_are_given_their_arguments_and_named_where_they_differ(
    parity: Command, tmp_path: Path
) -> None:
    text = SCRIPT.replace("np.ones(3)", "np.full(3, float(sys.argv[1]))").replace(
        "import numpy", "import sys, numpy"
    )
    (tmp_path / "a folder").mkdir()
    script = write(tmp_path, "a folder/a.py", text)
    one = write(tmp_path, "one.py", SCRIPT)
    done = parity("--scripts", f"'{script}' 1", one)
    assert done.returncode == 0, done.stderr
    done = parity("--scripts", one, f"'{script}' 2")
    assert done.returncode == STATUSES["differ"], done.stderr
    assert "rank 1 (a.py, numpy) has" in done.stdout


def test_scripts_that_compare_nothing_are_no_proof(parity: Command, tmp_path: Path) -> None:
    script = write(tmp_path, "none.py", "import polyhvd.numpy as hvd\nhvd.init()\n")
    done = parity("--scripts", script, script)
    assert done.returncode == STATUSES["bad-case"]
    assert "have compared nothing" in done.stderr


def test_what_takes_too_long_is_ended(parity: Command, tmp_path: Path) -> None:
    case = write(
        tmp_path, "slow.py", CASE.replace("    inputs =", "    import time; time.sleep(600)\n    inputs =")
    )
    begun = time.monotonic()
    done = parity(case, "--frameworks", "numpy", "--timeout", "2")
    assert done.returncode == STATUSES["rank-died"]
    assert "was not ready in time" in done.stderr
    assert time.monotonic() - begun < 120


def test_a_folder_of_sources_does_not_hide_the_installed_package(tmp_path: Path) -> None:
    """As in a clone in which `pip install .` was run; other modules of that folder are found there."""
    hiding = tmp_path / "polyhvd"
    hiding.mkdir()
    (hiding / "__init__.py").write_text("raise ImportError('sources')")
    case = CASE.replace("def build(framework):", "def build(framework):\n    import sizes")
    write(tmp_path, "sizes.py", "")
    write(tmp_path, "case.py", case)
    words = [str(Path(sys.executable).with_name("polyhvd")), "parity", "case.py"]
    options = ["--frameworks", "numpy", "--steps", "1", "--np", "1"]
    done = subprocess.run([*words, *options], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_list_names_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list"]) == 0
    out = capsys.readouterr().out
    assert all(re.search(rf"^  {name} ", out, re.MULTILINE) for name in CASES)


# What is judged, with runs of NumPy ------------------------------------------------


def run(case: Case, mode: str = "plain", name: str = "numpy", part: tuple[int, int] = (0, 1)) -> Run:
    made = Run(name, mode)
    session = running.session_of("numpy", case, None, synchronized=False)
    running.train(session, made, 6, part, lambda: None)
    return made


def against(case: Case, other: Case) -> Verdict:
    return judge([run(case), run(other, name="other")])


def first_of(verdict: Verdict) -> tuple[int, str, int | None]:
    assert not verdict.problem, verdict.message
    (pair,) = verdict.pairs
    assert pair.first is not None
    return pair.first.step, pair.first.kind, pair.first.layer


def with_numbers(case: Case, **numbers: Any) -> Case:
    return replace(case, optimizer=replace(case.optimizer, **numbers))


def test_equal_runs_agree() -> None:
    assert against(CASES["mlp"], CASES["mlp"]).agree


@pytest.mark.parametrize(
    ("numbers", "other"),
    [
        ({"name": "adam"}, {"epsilon": 1e-4}),
        ({"name": "adam", "weight_decay": 0.1}, {"name": "adamw"}),
        ({"name": "momentum"}, {"name": "nesterov"}),
        ({"name": "rmsprop"}, {"rho": 0.95}),
        ({"clip_norm": 0.1}, {"clip_norm": 0.11}),
    ],
)
def test_another_optimizer_is_an_update_that_differs(numbers: dict[str, Any], other: dict[str, Any]) -> None:
    case = with_numbers(CASES["mlp"], **numbers)
    step, kind, _ = first_of(against(case, with_numbers(case, **other)))
    assert (step, kind) == (0, "update")


def test_a_warm_up_that_is_a_step_late_is_found_in_that_step() -> None:
    class Late(Optimizer):
        def rate_at(self, step: int, steps: int) -> float:
            return super().rate_at(max(step - 1, 0), steps)

    case = with_numbers(CASES["mlp"], schedule="warmup")
    late = replace(case, optimizer=Late(schedule="warmup"))
    assert first_of(against(case, late))[:2] == (1, "learning rate")


def test_one_batch_that_differs_is_found_in_its_step() -> None:
    case = CASES["mlp"]

    def batch(framework: str, step: int) -> Any:
        inputs, targets = case.batch(framework, step)
        return (inputs[::-1], targets[::-1]) if step == 3 else (inputs, targets)

    assert first_of(against(case, replace(case, batch=batch))) == (3, "data", None)


def test_another_target_is_a_batch_that_differs() -> None:
    case = CASES["mlp"]

    def batch(framework: str, step: int) -> Any:
        inputs, targets = case.batch(framework, step)
        return inputs, (targets + (step == 2)) % 5

    finding = against(case, replace(case, batch=batch)).pairs[0].first
    assert finding is not None
    assert (finding.step, finding.kind, finding.detail) == (2, "data", "targets")


def test_another_epsilon_of_a_normalization_is_found_in_its_layer() -> None:
    case = CASES["cnn"]

    def build(framework: str) -> Any:
        made = case.of(framework)
        made[4] = replace(made[4], options={**made[4].options, "epsilon": 1e-2})
        return made

    assert first_of(against(case, replace(case, build=build))) == (0, "activation", 3)


def biased(case: Case, factor: float) -> Case:
    """A bias that has no effect, and, with another sum of the same rows, a gradient of other roundings."""
    made = [
        layers.convolution(3, 8, 3),
        layers.batch_normalization(8),
        layers.activation("gelu"),
        layers.flatten(),
        layers.dense(8 * 36, 5),
    ]
    made[1] = replace(made[1], options={**made[1].options, "epsilon": factor})
    return with_numbers(replace(case, build=lambda _: list(made)), name="adam", rate=0.05)


def backwards(case: Case) -> Case:
    def batch(framework: str, step: int) -> Any:
        return tuple(part[::-1] for part in case.batch(framework, step))

    return replace(case, batch=batch)


def test_a_weight_without_effect_is_no_divergence() -> None:
    """Adam makes steps of full size of its gradient, which is rounding alone."""
    case = biased(CASES["cnn"], 1e-5)
    one, two = run(case), run(backwards(case), name="other")
    for steps in zip(one.steps, two.steps, strict=True):  # the rows in another order
        steps[1].traces.update(
            {key: steps[0].traces[key] for key in [("input", 0), ("data", 0), ("data", 1)]}
        )
    biases = [
        (a.traces["update", 1], b.traces["update", 1]) for a, b in zip(one.steps, two.steps, strict=True)
    ]
    assert any(abs(a.sketch - b.sketch).max() > 0.1 * a.norm for a, b in biases), "nothing was to be seen"
    kinds = ("activation",)  # whose rows are in another order
    for item in (one, two):
        for step in item.steps:
            step.traces = {key: trace for key, trace in step.traces.items() if key[0] not in kinds}
    (pair,) = judge([one, two]).pairs
    assert pair.first is None, pair.first


def test_models_that_do_not_match_are_a_problem_of_their_own() -> None:
    verdict = against(CASES["mlp"], CASES["linear"])
    assert verdict.problem == "models"
    assert "at weight 0, numpy has '0.kernel' (kernel float32 [32, 16]" in verdict.message
    assert not verdict.agree


def test_batches_of_different_sizes_are_a_problem_of_their_own() -> None:
    case = CASES["mlp"]
    fewer = replace(case, batch=lambda f, step: tuple(part[:-1] for part in case.batch(f, step)))
    verdict = against(case, fewer)
    assert verdict.problem == "batches"
    assert "numpy has 24 rows, other 23" in verdict.message


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nans_are_a_problem_of_their_own() -> None:
    case = CASES["mlp"]

    def batch(framework: str, step: int) -> Any:
        inputs, targets = case.batch(framework, step)
        return np.where(step == 1, np.nan, inputs), targets

    verdict = against(case, replace(case, batch=batch))
    assert verdict.problem == "nan"
    assert "in step 1, layer 0, data of the inputs of the batch" in verdict.message


def test_ranks_whose_weights_part_are_found() -> None:
    """The averaged gradients are the same on all ranks; here the second one's are not."""
    case = CASES["linear"]
    parts = [run(case, "all", part=(0, 2)), run(with_numbers(case, rate=0.5), "all", part=(1, 2))]
    (pair,) = judge([run(case), *parts]).pairs
    assert pair.first is not None
    assert (pair.first.step, pair.first.kind) == (0, "average")  # nobody has averaged them


def test_no_seed_of_the_clean_cases_gives_a_false_alarm() -> None:
    """Sums in another order are all that differs: what one rank adds up, and two do."""
    for seed in range(1, 21):
        case = Order("mlp", {}, 6, 1, "", seed).load()
        verdict = against(case, with_numbers(case, accumulate=2))
        assert verdict.agree, f"seed {seed}: {verdict.pairs[0].first}"
        assert verdict.pairs[0].worst["gradient"] > 0


# Reports ---------------------------------------------------------------------------


def report_of(verdict: Verdict) -> Report:
    pairs = [command._check(pair, 2) for pair in verdict.pairs]
    status = 0 if verdict.agree else 1
    outcome = "agree" if verdict.agree else "differ"
    layers, losses = verdict.layers, verdict.losses
    return Report(
        "<mlp> & co",
        status,
        outcome,
        "message",
        ["numpy", "other"],
        steps=6,
        ranks=2,
        checks=pairs,
        losses=losses,
        layers=layers,
    )


class _Page(HTMLParser):
    """Elements that are open, and those that have been seen."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_stands_alone_and_is_accessible() -> None:
    case = with_numbers(CASES["mlp"], name="adam")
    text = as_html(report_of(against(case, with_numbers(case, epsilon=1e-3))))
    page = _Page()
    page.feed(text)
    assert page.open == []
    assert "<mlp>" not in text
    assert not re.search(r"https?://|<script|<link|@import|url\(", text)
    identities = [attributes["id"] for _, attributes in page.seen if "id" in attributes]
    assert len(identities) == len(set(identities))
    for tag, attributes in page.seen:
        for name in (attributes.get("aria-labelledby") or "").split():
            assert name in identities
        if tag == "th":
            assert attributes.get("scope") in ("row", "col")
        if attributes.get("role") == "region":
            assert attributes.get("tabindex") == "0"
            assert attributes.get("aria-label")
    assert "prefers-color-scheme:dark" in text
    assert "step 0" in text
    assert "compare its settings with the table of optimizers" in text


def test_infinite_differences_are_valid_json_and_junit() -> None:
    found = report_of(against(CASES["mlp"], CASES["mlp"]))
    worse = replace(
        found, checks=[replace(found.checks[0], agree=False, loss=float("inf"), text="a \x00 \x1b[1m b")]
    )
    report = json.loads(as_json(worse), parse_constant=lambda name: pytest.fail(name))
    assert report["checks"][0]["loss"] == "inf"
    root = ElementTree.fromstring(as_junit(worse).encode())
    failure = root.find("testsuite/testcase/failure")
    assert failure is not None
    assert failure.text is not None
    assert failure.text.startswith("a ")
