"""``polyhvd parity --precision``: what computes in half types, what is refused, and what is left out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyhvd.parity import command, layers, running
from polyhvd.parity.case import Case
from polyhvd.parity.catalogue import CASES
from polyhvd.parity.judging import Verdict, judge
from polyhvd.parity.runs import FRAMEWORKS, Run, cannot_compute
from polyhvd.parity.statuses import STATUSES

HALVES = ("bfloat16", "float16")


def report(folder: Path, *words: str) -> dict[str, Any]:
    out = folder / "report.json"
    status = command.main([*words, "--json", str(out)])
    content: dict[str, Any] = json.loads(out.read_text())
    assert content["status"] == status
    return content


def run(case: Case, name: str = "numpy") -> Run:
    made = Run(name, "plain")
    session = running.session_of("numpy", case, None, synchronized=False)
    running.train(session, made, 4, (0, 1), lambda: None)
    return made


def against(case: Case, other: Case) -> Verdict:
    return judge([run(case), run(other, name="other")], precision=case.precision)


def test_what_computes_in_a_half_type_agrees_and_is_not_float32(tmp_path: Path) -> None:
    losses = {}
    for precision in ("float32", *HALVES):
        content = report(tmp_path, "mlp", "--frameworks", "numpy", "--steps", "4", "--precision", precision)
        assert (content["outcome"], content["precision"]) == ("agree", precision)
        assert len(content["checks"]) == 3
        losses[precision] = np.array(content["losses"]["numpy"]["all"])
    away = {name: abs(losses[name] / losses["float32"] - 1).max() for name in HALVES}
    assert 0.1 > away["bfloat16"] > 1e-6
    assert 0.01 > away["float16"] > 1e-6


@pytest.mark.parametrize("precision", HALVES)
def test_an_activation_that_is_another_one_is_found_in_a_half_type(precision: str) -> None:
    case = replace(CASES["mlp"], precision=precision)
    made = list(case.of("numpy") or ())
    place = next(number for number, layer in enumerate(made) if layer.kind == "activation")
    made[place] = layers.activation("sigmoid")
    assert against(case, case).agree
    (pair,) = against(case, replace(case, build=lambda _: list(made))).pairs
    assert pair.first is not None
    assert (pair.first.step, pair.first.layer, pair.first.kind) == (0, 0, "activation")


@pytest.mark.parametrize(
    ("case", "precision", "frameworks", "message"),
    [
        (
            "mlp",
            "float16",
            "mxnet,numpy",
            "mxnet: MXNet has no half types on processors; use --frameworks numpy",
        ),
        ("mlp", "bfloat16", "mxnet", "mxnet: MXNet has no half types on processors; use another case"),
        ("lstm", "float16", "torch,numpy", "torch: PyTorch has no LSTM in float16 on processors"),
        ("cnn", "bfloat16", "numpy", "numpy: max pooling selects any of several equal"),
        ("cnn", "float16", "torch,tensorflow", "torch: max pooling selects any"),
    ],
)
def test_what_cannot_be_computed_in_a_half_type_has_a_status_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    case: str,
    precision: str,
    frameworks: str,
    message: str,
) -> None:
    monkeypatch.setattr(command, "_missing", lambda framework: "")
    status = command.main([case, "--precision", precision, "--frameworks", frameworks])
    assert status == STATUSES["precision"] == 10
    err = capsys.readouterr().err
    assert err.startswith(f"polyhvd parity: {case} in {precision}: ")
    assert message in err
    assert len(err.splitlines()) == 1


def test_what_cannot_be_computed_is_left_out_where_frameworks_are_not_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed = ("mxnet", "numpy")
    monkeypatch.setattr(command, "_missing", lambda framework: "" if framework in installed else framework)
    content = report(tmp_path, "mlp", "--precision", "float16", "--steps", "2")
    assert (content["outcome"], content["frameworks"], content["left_out"]) == ("agree", ["numpy"], ["mxnet"])


def test_every_framework_computes_every_case_in_single_precision() -> None:
    for case in CASES.values():
        kinds = {layer.kind for layer in layers.walk(case.of("numpy") or ())}
        assert all(cannot_compute(name, "float32", kinds) == "" for name in FRAMEWORKS)


def test_a_file_may_ask_for_a_half_type_but_for_no_other_type(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (
        "import numpy as np\n"
        "from polyhvd.parity import layers\n"
        "def build(framework): return [layers.dense(4, 3)]\n"
        "def batch(framework, step): return np.full((4, 4), step + 0.3), np.zeros(4, int)\n"
        "precision = 'bfloat16'\n"
    )
    path = tmp_path / "half.py"
    path.write_text(text)
    words = [str(path), "--frameworks", "numpy", "--steps", "2"]
    assert report(tmp_path, *words)["precision"] == "bfloat16"
    assert report(tmp_path, *words, "--precision", "float16")["precision"] == "float16"
    capsys.readouterr()
    path.write_text(text.replace("bfloat16", "float8"))
    assert command.main(words) == STATUSES["bad-case"]
    assert "precision='float8': expected one of float32, bfloat16, float16" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("precision", HALVES)
@pytest.mark.parametrize("case", ["mlp", "lstm", "gru", "transformer", "embedding"])
def test_frameworks_agree_in_half_types(tmp_path: Path, case: str, precision: str) -> None:
    if missing := next(filter(None, map(command._missing, ("torch", "tensorflow"))), ""):
        pytest.skip(f"{missing} is not installed")
    content = report(tmp_path, case, "--precision", precision, "--steps", "4")
    assert content["outcome"] == "agree", content["message"]
    expected = {"tensorflow", "numpy"} | ({"torch"} if (case, precision) != ("lstm", "float16") else set())
    assert set(content["frameworks"]) == expected
