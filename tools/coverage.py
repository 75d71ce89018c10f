"""Runs the test suite and reports which lines of the product have run: ``make coverage``.

``tests/harness/counted/line_marks.py`` marks the lines, also in ranks that are killed. The report shows the
share of each folder; build/coverage/missed.txt lists the lines of each file that did not run.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COUNTED = ROOT / "tests" / "harness" / "counted"
sys.path.insert(0, str(COUNTED))

import line_marks  # noqa: E402

FOLDER = ROOT / "build" / "coverage"
_GENERATED = ("verbs.py", "wrappers.py")


def sources() -> list[Path]:
    """The product's files in Python, without generated ones."""
    found = [path for top in ("polyhvd", "frameworks") for path in sorted((ROOT / top).rglob("*.py"))]
    return [path for path in found if path.name not in _GENERATED]


def begin() -> None:
    """Lay out an empty file of marks: a byte for each line of each source."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    offset = 0
    with (FOLDER / "layout").open("w") as layout:
        for path in sources():
            layout.write(f"{path}\t{offset}\n")
            offset += path.read_bytes().count(b"\n") + 2
    (FOLDER / "marks").write_bytes(bytes(offset))
    for path in (FOLDER, FOLDER / "marks"):
        os.chmod(path, 0o777)  # some tests' processes have another user


def lines() -> Iterator[tuple[Path, list[int], list[int]]]:
    """Each source with the lines of its statements, and those of them that did not run."""
    marks = (FOLDER / "marks").read_bytes()
    for row in (FOLDER / "layout").read_text().splitlines():
        name, offset = row.split("\t")
        able = sorted(line_marks.statements(ast.parse(Path(name).read_bytes())))
        yield Path(name).relative_to(ROOT), able, [line for line in able if not marks[int(offset) + line]]


def ranges(missed: list[int], able: list[int]) -> str:
    """``3-7, 12``: runs of statements that follow each other."""
    after = dict(zip(able, [*able[1:], 0], strict=True))
    found: list[list[int]] = []
    for line in missed:
        if found and after[found[-1][1]] == line:
            found[-1][1] = line
        else:
            found.append([line, line])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def report() -> None:
    """Print the share of lines that ran, by folder, and write those that did not."""
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    with (FOLDER / "missed.txt").open("w") as file:
        for path, able, missed in lines():
            for folder in ("all", "/".join(path.parts[:2]) if len(path.parts) > 2 else path.parts[0]):
                totals[folder][0] += len(able)
                totals[folder][1] += len(missed)
            if missed:
                file.write(f"{path} ({len(missed)} of {len(able)}): {ranges(missed, able)}\n")
    print(f"{'folder':28}{'lines':>8}{'not run':>9}{'run':>8}")
    for folder, (able_n, missed_n) in sorted(totals.items(), key=lambda item: (item[0] == "all", item[0])):
        print(f"{folder:28}{able_n:8}{missed_n:9}{1 - missed_n / max(1, able_n):8.1%}")


def main() -> None:
    """Run the suite with these arguments for pytest, report, and end with the suite's status."""
    begin()
    paths = [str(COUNTED), *filter(None, [os.environ.get("PYTHONPATH")])]
    # pytest compiles modules itself, here and on ranks, to explain their assertions.
    options = " ".join(filter(None, ["--assert=plain", os.environ.get("PYTEST_ADDOPTS")]))
    env = {**os.environ, "TEST_LINES": str(FOLDER), "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(ROOT / "tools" / "suite.py"), *sys.argv[1:]]
    status = subprocess.run(command, env={**env, "PYTEST_ADDOPTS": options}, check=False).returncode
    report()
    sys.exit(status)


if __name__ == "__main__":
    main()
