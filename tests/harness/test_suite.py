"""tools/suite.py: what two pytest processes count is added up, and a failure of either is one of both."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "tools" / "suite.py"

if not PROGRAM.exists():  # the matrix has the tests alone
    pytest.skip("tools/ is not here", allow_module_level=True)


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("suite", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    suite = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(suite)
    return suite


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
def test_closing_lines_are_counted(line: str, counted: dict[str, int]) -> None:
    assert dict(load().counts(f"1 passed in 3 lines\n{line}\n")) == counted


@pytest.mark.parametrize("failing", [None, "tests/torch/test_a.py", "tests/test_b.py"])
def test_both_processes_count(tmp_path: Path, failing: str | None) -> None:
    for name in ("tests/torch/test_a.py", "tests/test_b.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"def test_it():\n    assert {name != failing}\n\n\ndef test_more():\n    pass\n")
    for folder in load().FRAMEWORKS:
        (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / "tools").mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = tests\n")
    shutil.copy(PROGRAM, tmp_path / "tools")
    done = subprocess.run(
        [sys.executable, str(tmp_path / "tools" / "suite.py")],
        capture_output=True,
        text=True,
        check=False,
    )
    closing = done.stdout.splitlines()[-1]
    assert closing.startswith("=")
    if failing:
        assert "1 failed, 3 passed in " in closing, done.stdout
        assert done.returncode == 1
    else:
        assert "4 passed in " in closing, done.stdout
        assert done.returncode == 0
