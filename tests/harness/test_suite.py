"""tools/suite.py adds up the counts of three pytest processes, and tools/costs.py what their tests cost."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"

if not TOOLS.exists():  # the matrix has the tests alone
    pytest.skip("tools/ is not here", allow_module_level=True)


def load(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("suite")


@pytest.mark.parametrize(
    ("line", "counted"),
    [
        (
            "==== 2 failed, 25 passed, 1 skipped in 100.15s (0:01:40) ====",
            {"failed": 2, "passed": 25, "skipped": 1},
        ),
        ("3 passed, 7 deselected in 0.12s", {"passed": 3, "deselected": 7}),
        ("it took 3 passed in", {}),
    ],
)
def test_closing_lines_are_counted(
    monkeypatch: pytest.MonkeyPatch, line: str, counted: dict[str, int]
) -> None:
    assert dict(load(monkeypatch).counts(f"1 passed in 3 lines\n{line}\n")) == counted


#: One for each process.
TESTS = ("tests/torch/test_a.py", "tests/launch/test_c.py", "tests/test_b.py")


def tree(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A folder with the tools and three files of tests; the command that runs these."""
    for name in TESTS:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("def test_it():\n    pass\n\n\ndef test_more():\n    pass\n")
    suite = load(monkeypatch)
    for name in (*suite.FIRST, *suite.SECOND):
        path = folder / name
        if path.suffix:
            path.touch()
        else:
            path.mkdir(exist_ok=True)
    for name in ("frameworks/torch", "tools"):
        (folder / name).mkdir(parents=True)
    (folder / "pytest.ini").write_text("[pytest]\ntestpaths = tests\n")
    for name in ("suite.py", "costs.py"):
        shutil.copy(TOOLS / name, folder / "tools")
    return [sys.executable, str(folder / "tools" / "suite.py")]


@pytest.mark.parametrize("failing", [None, *TESTS])
def test_all_processes_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str | None) -> None:
    command = tree(tmp_path, monkeypatch)
    if failing:
        (tmp_path / failing).write_text("def test_it():\n    assert 0\n\n\ndef test_more():\n    pass\n")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    closing = done.stdout.splitlines()[-1]
    assert closing.startswith("=")
    if failing:
        assert "1 failed, 5 passed in " in closing, done.stdout
        assert done.returncode == 1
    else:
        assert "6 passed in " in closing, done.stdout
        assert done.returncode == 0


@pytest.mark.parametrize("failing", TESTS)
def test_with_x_a_failure_ends_the_other_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    command = tree(tmp_path, monkeypatch)
    begin = f"import pathlib, time\nhere = pathlib.Path({str(tmp_path)!r})\n\n\ndef test_it():\n"
    waiting = [name for name in TESTS if name != failing]
    for number, name in enumerate(waiting):
        (tmp_path / name).write_text(
            f"{begin}    it = here / 'mark{number}'\n    it.touch()\n    time.sleep(100)\n    it.unlink()\n"
        )
    (tmp_path / failing).write_text(
        f"{begin}    for _ in range(6000):\n        if len(list(here.glob('mark*'))) == 2:\n"
        "            break\n        time.sleep(0.01)\n    assert 'the reason' == ''\n"
    )
    done = subprocess.run([*command, "-x"], capture_output=True, text=True, check=False)
    assert len(list(tmp_path.glob("mark*"))) == 2, "another process was not ended"
    assert done.returncode == 1, done.stdout
    assert "the reason" in "".join(done.stdout.splitlines()[-50:]), done.stdout


@pytest.mark.parametrize("failing", TESTS)
def test_the_end_shows_the_failure_below_many_skipped_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    command = tree(tmp_path, monkeypatch)
    skipping = "import pytest\n\n\n" + "".join(
        f"def test_{number}():\n    pytest.skip('{number}')\n\n\n" for number in range(60)
    )
    for name in TESTS:
        (tmp_path / name).write_text(skipping)
    with (tmp_path / failing).open("a") as file:
        file.write("def test_it():\n    assert 'the reason' == ''\n")
    done = subprocess.run([*command, "-ra"], capture_output=True, text=True, check=False)
    end = done.stdout.splitlines()[-50:]
    assert any(line.startswith("E ") and "the reason" in line for line in end), done.stdout


def test_costs_of_a_test_are_those_of_all_its_processes(tmp_path: Path) -> None:
    child = "import numpy, time\nwhile time.process_time() < 0.5: pass"
    (tmp_path / "conftest.py").write_text(
        "import meter\n\n\ndef pytest_configure(config):\n    meter.register(config)\n"
    )
    (tmp_path / "test_it.py").write_text(
        "import subprocess, sys\n\n\ndef test_idle():\n    pass\n\n\ndef test_busy():\n"
        f"    subprocess.run([sys.executable, '-c', {child!r}], check=True)\n"
    )
    rows = tmp_path / "costs.jsonl"
    env = {**os.environ, "COSTS": str(rows), "PYTHONPATH": str(Path(__file__).parent)}
    pytest_command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "--rootdir", ".", "test_it.py"]
    done = subprocess.run(pytest_command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {row["test"]: row for row in map(json.loads, rows.read_text().splitlines())}
    busy = found["test_it.py::test_busy"]
    assert 0.4 < busy["cpu_s"] < 5.0, found
    assert (busy["events"]["p"], busy["events"]["n"]) == (1, 1), found


@pytest.mark.parametrize("failing", [False, True])
def test_run_of_steps_ends_with_costs_and_counts(tmp_path: Path, failing: bool) -> None:
    (tmp_path / "tools").mkdir()
    program = shutil.copy(TOOLS / "costs.py", tmp_path / "tools")
    said = "echo '=== total: 3 passed, 1 skipped in 2.00s ==='"
    steps = [("first", f"{said}; exit {int(failing)}"), ("second", said)]
    for name, command in steps[: 1 if failing else 2]:
        done = subprocess.run([sys.executable, program, "step", name, "sh", "-c", command], check=False)
        assert done.returncode == int(failing)
    done = subprocess.run(
        [sys.executable, program, "close", str(int(failing))], capture_output=True, text=True, check=True
    )
    *_, before, last = done.stdout.splitlines()
    expected = "3 passed, 1 skipped" if failing else "6 passed, 2 skipped"
    assert last.startswith(f"==== {expected} in "), done.stdout
    assert ("first has failed" in done.stdout) == failing, done.stdout
    assert before.startswith("=== total: 3" if failing else "all "), done.stdout


def test_marks_of_lines_are_kept_apart_from_closed_streams(tmp_path: Path) -> None:
    module, marks = tmp_path / "marked.py", tmp_path / "marks"
    module.write_text("import os\nimport sys\n")
    (tmp_path / "layout").write_text(f"{module}\t0\n")
    marks.write_bytes(bytes(4))
    counted = Path(__file__).resolve().parent / "counted"
    program = "import marked, os\ntry: os.write(2, b'xyz')\nexcept OSError: os._exit(7)"
    ended = subprocess.run(
        ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", sys.executable, "-c", program],
        env={**os.environ, "TEST_LINES": str(tmp_path), "PYTHONPATH": f"{counted}{os.pathsep}{tmp_path}"},
    )
    assert marks.read_bytes() == b"\0\1\1\0"
    assert ended.returncode == 7
