"""polyhvdrun --config-file: horovodrun's YAML files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from polyhvd.launch.cli import main as cli
from polyhvd.launch.cli.config_file import KEYS, ConfigFileError, read, settings_of
from polyhvd.launch.cli.options import make_parser

#: Every key of horovodrun 0.28.1 (horovod/runner/common/util/config_parser.py), with a value.
FILE = """
controller: gloo
params:
  fusion_threshold_mb: 64
  cycle_time_ms: 2.5
  cache_capacity: 2048
  hierarchical_allreduce: true
  hierarchical_allgather: true
  torus_allreduce: false
autotune: {enabled: true, log_file: tuned.csv, warmup_samples: 3, steps_per_sample: 10,
  bayes_opt_max_samples: 20, gaussian_process_noise: 0.8}
timeline: {filename: timeline.json, mark_cycles: true}
stall_check: {enabled: true, warning_time_seconds: 120, shutdown_time_seconds: 0}
library_options:
  {mpi_threads_disable: false, num_nccl_streams: 2, thread_affinity: 0, gloo_timeout_seconds: 60}
logging: {level: INFO, with_timestamp: true}
"""
SAID = {
    "controller": "gloo",
    "FUSION_THRESHOLD": "64",
    "CYCLE_TIME": "2.5",
    "CACHE_CAPACITY": "2048",
    "HIERARCHICAL_ALLREDUCE": "1",
    "AUTOTUNE": "1",
    "AUTOTUNE_LOG": "tuned.csv",
    "AUTOTUNE_WARMUP_SAMPLES": "3",
    "AUTOTUNE_STEPS_PER_SAMPLE": "10",
    "AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "20",
    "AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "0.8",
    "TIMELINE": "timeline.json",
    "TIMELINE_MARK_CYCLES": "1",
    "STALL_CHECK_DISABLE": "0",
    "STALL_CHECK_TIME_SECONDS": "120",
    "STALL_SHUTDOWN_TIME_SECONDS": "0",
    "MPI_THREADS_DISABLE": "0",
    "THREAD_AFFINITY": "0",
    "DATA_TIMEOUT_SECONDS": "60",
    "LOG_LEVEL": "INFO",
    "LOG_HIDE_TIME": "0",
}


def written(folder: Path, text: str) -> str:
    path = folder / "config.yaml"
    path.write_text(text)
    return str(path)


def test_every_key_of_horovodrun_is_read(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    assert read(written(tmp_path, FILE), print) == SAID
    count = sum(len(keys) for keys in KEYS.values())
    assert count == len(SAID) - 1 + 3, "all keys are in the file; three have no effect"


def test_every_variable_of_the_file_is_an_option_of_the_command_line() -> None:
    options = vars(make_parser().parse_args(["true"]))
    assert {key.variable for keys in KEYS.values() for key in keys.values()} <= set(options)


def test_the_command_line_wins_wherever_it_stands(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    words = ["--no-autotune", "--config-file", written(tmp_path, FILE), "--cycle-time-ms", "7", "true"]
    options = make_parser().parse_args(words)
    cli._take_config_file(options)
    settings = cli._settings(options)
    assert settings["POLYHVD_AUTOTUNE"] == "0"
    assert settings["POLYHVD_CYCLE_TIME"] == "7"
    assert settings["POLYHVD_CACHE_CAPACITY"] == "2048"
    assert settings["POLYHVD_FUSION_THRESHOLD"] == str(64 << 20)


def test_the_controller_of_the_file_yields_to_the_command_line(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    path = written(tmp_path, "controller: mpi")
    for words, mpi in (([], True), (["--gloo"], False)):
        options = make_parser().parse_args([*words, "--config-file", path, "true"])
        cli._take_config_file(options)
        assert options.mpi is mpi


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], r"expected a mapping of sections, found \[1, 2\]"),
        ("text", "expected a mapping of sections, found 'text'"),
        ({"params": 3}, "params: expected a mapping, found 3"),
        (
            {"params": {"cycle_time_ms": "soon"}},
            "params.cycle_time_ms: expected a number, 0 or more, found 'soon'",
        ),
        ({"params": {"cache_capacity": -1}}, "expected a number, 0 or more, found -1"),
        ({"params": {"cache_capacity": True}}, "expected a number, 0 or more, found True"),
        ({"params": {"torus_allreduce": 1}}, "expected true or false, found 1"),
        ({"stall_check": {"enabled": "no"}}, "expected true or false, found 'no'"),
        ({"controller": "smoke"}, "controller: expected mpi or gloo, found 'smoke'"),
        ({"timeline": {"filename": ["a"]}}, "expected a string"),
        ({"timeline": {"filename": "a\0b"}}, "timeline.filename: a string with a zero byte cannot be"),
    ],
)
def test_what_cannot_be_used_is_named(content: Any, message: str) -> None:
    with pytest.raises(ConfigFileError, match=f"^x.yaml: .*{message}"):
        settings_of(content, "x.yaml", print)


@pytest.mark.parametrize(
    ("content", "warning"),
    [
        ({"parms": {}}, "unknown key 'parms' is ignored; was 'params' meant"),
        ({"params": {"cycle_time": 1}}, "params: unknown key 'cycle_time' is ignored; was 'cycle_time_ms'"),
        (
            {"logging": {"hide_timestamp": True}},
            "logging: unknown key 'hide_timestamp' is ignored; was 'with_",
        ),
        ({1: {}}, "unknown key 1 is ignored; known keys are controller"),
    ],
)
def test_keys_that_horovodrun_ignores_are_warned_of(content: Any, warning: str) -> None:
    warnings: list[str] = []
    assert settings_of({**content, "timeline": {"filename": "a"}}, "x.yaml", warnings.append) == {
        "TIMELINE": "a"
    }
    (line,) = warnings
    assert line.startswith("x.yaml: ")
    assert warning in line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "line 1: this is not YAML: "),
        ("params:\n  cycle_time_ms: 1\n  cycle_time_ms: 2\n", "line 3: 'cycle_time_ms' is repeated"),
        ("params: {}\nparams: {}\n", "line 2: 'params' is repeated"),
        ("? [1, 2]\n: 3\n", "YAML"),
        ("a: !!python/object/apply:os.system ['true']", "line 1: this is not YAML: could not determine"),
        ("x: 2001-99-99", "this is not valid YAML: month must be in 1..12"),
        ("\t", "line 1: this is not YAML"),
        ("--- 1\n--- 2", "this is not YAML"),
    ],
)
def test_what_is_no_yaml_is_said_in_a_line(tmp_path: Path, text: str, message: str) -> None:
    pytest.importorskip("yaml")
    with pytest.raises(ConfigFileError) as caught:
        read(written(tmp_path, text), print)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_endless_file_is_given_up() -> None:
    pytest.importorskip("yaml")
    with pytest.raises(ConfigFileError, match="/dev/zero, which is longer than 1048576 characters"):
        read("/dev/zero", print)


@pytest.mark.parametrize("text", ["", "# nothing\n", "params:\n", "params: {cycle_time_ms: }\n"])
def test_a_file_without_settings_sets_nothing(tmp_path: Path, text: str) -> None:
    pytest.importorskip("yaml")
    assert read(written(tmp_path, text), print) == {}


def test_numbers_may_have_exponents(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    assert read(written(tmp_path, "params: {cycle_time_ms: 1e3}"), print) == {"CYCLE_TIME": "1000.0"}


def test_without_pyyaml_the_error_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigFileError, match=r"pip install 'polyhvd\[launcher\]'"):
        read(written(tmp_path, FILE), print)
