"""What ``polyhvd parity`` says of cases and command lines that it cannot use: one line each, and a status."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from test_parity_command import CASE, write

from polyhvd.parity import command, layers, migrating
from polyhvd.parity.case import BadCaseError, Case, from_file
from polyhvd.parity.statuses import STATUSES


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("def batch(framework, step): ...", r"has no function build\(framework\)"),
        ("def build(framework): ...", r"has no function batch\(framework, step\)"),
        ("build = ", "cannot be run: SyntaxError"),
        ("import nowhere_at_all", "cannot be run: ModuleNotFoundError"),
        ("raise SystemExit(0)", "cannot be run: SystemExit"),
        (CASE + "\nloss = 'hinge'", "loss='hinge': expected one of cross_entropy"),
        (CASE + "\noptimizer = {'name': 'lion'}", "name='lion': expected one of sgd"),
        (CASE + "\noptimizer = {'speed': 3}", "optimizer: .*speed"),
        (CASE + "\noptimizer = {'momentum': 1.5}", "momentum=1.5: expected a number from 0 to below 1"),
        (CASE + "\noptimizer = {'rho': -0.1}", "rho=-0.1: expected a number from 0 to below 1"),
        (CASE + "\noptimizer = {'betas': (0.9, 2)}", "betas=2: expected a number from 0 to below 1"),
        (CASE + "\noptimizer = {'betas': (0.9,)}", "expected two numbers"),
        (CASE + "\noptimizer = 'adam'", "expected an Optimizer or a dict"),
        (CASE + "\noptimizer = {'rate': 'fast'}", "optimizer: rate='fast': expected a number above 0$"),
        (CASE + "\noptimizer = {'rate': None}", "rate=None: expected a number above 0$"),
        (CASE + "\noptimizer = {'rate': True}", "rate=True: expected a number above 0$"),
        (CASE + "\noptimizer = {'clip_norm': [1]}", r"clip_norm=\[1\]: expected a number above 0$"),
        (CASE + "\noptimizer = {'betas': 0.9}", "betas=0.9: expected two numbers$"),
        (CASE + "\noptimizer = {'betas': ('a', 'b')}", "betas='a': expected a number from 0 to below 1$"),
        (CASE + "\noptimizer = {'accumulate': 2.5}", "accumulate=2.5: expected a whole number, 1 or more$"),
        (CASE + "\noptimizer = {'weight_decay': 'x'}", "weight_decay='x': expected a number, 0 or more$"),
        (CASE + "\noptimizer = {'name': ['adam']}", r"name=\['adam'\]: expected one of sgd"),
        (CASE + "\noptimizer = {'schedule': np.ones(2)}", r"schedule=array\(\[1., 1.\]\): expected one of"),
        (CASE + "\noptimizer = {3: 4}", "optimizer: there is no 3; expected of name, rate"),
        (CASE + "\nloss = None", "loss=None: expected one of cross_entropy, squared_error$"),
        (CASE + "\nloss = np.ones(3)", r"loss=array\(\[1"),
        (CASE + "\nsame_on_ranks = 'no'", "same_on_ranks='no': expected True or False$"),
        (CASE + "\nabout = 3", "about=3: expected a text$"),
        (
            CASE + "\nchannels_last = 'torch'",
            "channels_last='torch': expected a tuple of names of frameworks",
        ),
        (CASE + "\nchannels_last = ('keras',)", "channels_last=.*expected a tuple of names of frameworks"),
        (CASE + "\nprecision = 16", "precision=16: expected one of float32"),
        (CASE + "\nbuild = 7", r"has no function build\(framework\)"),
        ("import sys\nsys.exit(3)", "cannot be run: SystemExit: 3"),
        ("'\\ud800'.encode()", "cannot be run: UnicodeEncodeError"),
        ("raise ValueError('one\\ntwo')", "cannot be run: ValueError: one$"),
    ],
)
def test_a_file_that_is_no_case_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, pattern: str
) -> None:
    case = write(tmp_path, "bad.py", text)
    assert command.main([case, "--frameworks", "numpy"]) == STATUSES["bad-case"]
    said = capsys.readouterr().err
    assert re.search(pattern, said.rstrip("\n")), said
    assert len(said.splitlines()) == 1
    assert said.startswith(f"polyhvd parity: {case}: ")


@pytest.mark.parametrize(
    ("text", "options", "outcome", "pattern"),
    [
        (
            "import threading; threading.Event().wait(600)",
            ["--timeout", "0.5"],
            "rank-died",
            r"cannot be run: TimeoutError: it takes more than 0.5 s \(--timeout\)$",
        ),
        (
            CASE + "\ndef build(framework): raise RuntimeError('no')",
            ["--precision", "bfloat16"],
            "bad-case",
            r"build\('numpy'\) has raised RuntimeError: no$",
        ),
    ],
    ids=["hangs", "raises"],
)
def test_a_case_that_hangs_or_raises_in_the_process_of_the_command_is_reported_in_a_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str,
    options: list[str],
    outcome: str,
    pattern: str,
) -> None:
    case = write(tmp_path, "bad.py", text)
    assert command.main([case, "--frameworks", "numpy", *options]) == STATUSES[outcome]
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(pattern, line), line


@pytest.mark.parametrize(
    ("made", "pattern"),
    [
        ("7", r"or None where there is none; found int: 7$"),
        ("'dense'", "found str: 'dense'$"),
        ("dict", "found the class dict, of which an instance is needed$"),
        ("np.ones(3)", "found ndarray$"),
        ("[]", "found an empty list$"),
        ("[layers.dense(4, 3), 7]", "found a list with int in it$"),
        ("layers.dense", "found function$"),
        ("1 / 0", "has raised ZeroDivisionError: division by zero$"),
        ("layers.activation('swish')", "has raised InvalidArgumentError: activation.*expected one of relu"),
    ],
)
def test_a_build_that_returns_something_else_is_a_bad_case(made: str, pattern: str) -> None:
    case = Case("mine", lambda _: eval(made, {"np": np, "layers": layers}), lambda f, s: (f, s))
    for framework in ("numpy", "torch", "mxnet", "tensorflow"):
        with pytest.raises(BadCaseError, match=pattern) as caught:
            case.of(framework)
        assert str(caught.value).startswith(f"mine: build({framework!r}) has "), caught.value
        assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("made", "told"),
    [
        ("7", "has to return inputs and targets, two arrays; found int$"),
        ("(1.0, np.ones(3))", r"inputs and targets need as many rows, found shapes \[\] and \[3\]$"),
        ("(np.ones(3), 1.0)", r"found shapes \[3\] and \[\]$"),
        ("(np.ones((2, 3)), np.ones(3))", r"found shapes \[2, 3\] and \[3\]$"),
        ("(np.ones((0, 3)), np.ones(0))", r"found shapes \[0, 3\] and \[0\]$"),
        ("(['a'], [1])", "expected arrays of numbers, found one of <U1$"),
        ("([[1], [1, 2]], [1, 2])", "found a list that makes none"),
        ("1 / 0", "has raised ZeroDivisionError: division by zero$"),
    ],
)
def test_a_batch_that_is_no_pair_of_arrays_is_a_bad_case(made: str, told: str) -> None:
    case = Case("mine", lambda _: [layers.dense(3, 2)], lambda *_: eval(made, {"np": np}))
    with pytest.raises(BadCaseError, match=told) as caught:
        case.data("numpy", 4)
    assert str(caught.value).startswith("mine: batch('numpy', 4)")


def test_a_folder_is_no_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([str(tmp_path), "--frameworks", "numpy"]) == STATUSES["bad-case"]
    assert f"{tmp_path}: that is a folder; give a file, or a name of" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_refused() -> None:
    with pytest.raises(BadCaseError, match="there is no such file"):
        from_file(Path("nowhere.py"))


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["mlp", "--scripts", "a.py"],
        ["--scripts", "a.py"],
        ["mlp", "--frameworks", "jax"],
        ["mlp", "--np", "0"],
        ["mlp", "--rate", "-1"],
        ["mlp", "--momentum", "nan"],
        ["mlp", "--json", "-", "--html", "-"],
        ["mlp", "--seed", "-1"],
        ["mlp", "--timeout", "inf"],
        ["mlp", "--html", "no/such/folder/report.html"],
        ["mlp", "--frameworks", ""],
        ["mlp", "--steps", "-3"],
        ["mlp", "--steps", "1e3"],
        ["mlp", "--rate", "fast"],
        ["mlp", "--accumulate", "0"],
        ["mlp", "--precision", "float8"],
        ["--scripts"],
        ["--scripts", "a.py", "--frameworks", "torch"],
        ["--scripts", "a.py", "--rate", "0.1"],
        ["--scripts", "a.py", "--seed", "0"],
    ],
)
def test_a_wrong_command_line_is_a_usage_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main(words)
    assert caught.value.code == STATUSES["usage"]
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert said.startswith("polyhvd parity: ")


@pytest.mark.parametrize("limit", ["inf", "nan", "0"])
def test_a_migration_has_a_limit_of_time(limit: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main(["migrate", "a.pt", "b.params", "--model", "m.py", "--timeout", limit])
    assert caught.value.code == 2
    assert f"{limit!r} is not a number of seconds above 0" in capsys.readouterr().err


def test_outputs_that_are_not_finite_differ_by_no_number() -> None:
    found = migrating._compared([np.ones((2, 3))], [np.full((2, 3), np.nan)], 1e-4)
    assert not found.agrees
    assert np.isnan(found.largest)


def test_a_framework_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "is_installed", lambda package: package != "mxnet")
    assert command.main(["mlp", "--frameworks", "numpy,mxnet"]) == STATUSES["not-installed"]
    assert "mxnet needs mxnet, which is not installed" in capsys.readouterr().err


def test_keras_2_is_named_as_what_the_catalogue_cannot_use(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "is_installed", lambda package: True)
    monkeypatch.setattr(command.metadata, "version", lambda package: "2.13.1")
    assert command.main(["mlp", "--frameworks", "numpy,tensorflow"]) == STATUSES["not-installed"]
    assert "tensorflow needs Keras 3 (there is 2.13.1), which is not installed" in capsys.readouterr().err
