"""The programs of the guides print what their pages show."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from fork_servers import IMPORTS, SETTINGS, ForkServers  # tests/harness, on the path by tests/conftest.py

from polyhvd.testing.stand_ins import is_installed

ROOT = Path(__file__).resolve().parents[2]
#: The framework that a program's module imports.
FRAMEWORKS = {"keras": "tensorflow", "tensorflow.keras": "tensorflow"}
DOCS = ROOT / "docs"
PAGES = sorted([DOCS / "index.md", *DOCS.glob("guides/*.md"), *DOCS.glob("moving-from-*.md")])
FENCE = re.compile(r"^( *)```(\w+)([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
TITLE = re.compile(r'title="([\w.-]+)"')
NUMBER = re.compile(r"-?\b\d+\.\d+(?:e-?\d+)?\b")
TIME = re.compile(r"\b\d+ s ago")
RANK = re.compile(r"\[(\d+)\] ")
COMMAND = "polyhvdrun -np 2 python {}"
DEADLINE_S = 240
#: A line of the page that stands for any number of lines.
ANYTHING = "..."


@dataclass
class Session:
    """Commands of a page, the files that they need, and what the page says they print."""

    page: str
    number: int
    files: dict[str, str]
    module: str
    commands: str
    output: str

    def __str__(self) -> str:
        return f"{self.page}-{self.number}"


def changed(program: str, difference: str) -> str:
    """The program after a difference, whose unchanged and removed lines must be in it, one after the other.

    A blank line separates differences at several places.
    """
    for part in difference.split("\n\n"):
        lines = [line for line in part.splitlines() if line]
        before = "".join(f"{line[1:]}\n" for line in lines if line[0] in " -")
        after = "".join(f"{line[1:]}\n" for line in lines if line[0] in " +")
        assert program.count(before) == 1, f"the program has this {program.count(before)} times:\n{before}"
        program = program.replace(before, after)
    return program


def sessions(path: Path) -> list[Session]:
    """A program, its commands and its output; or a difference to the program above, and the output then.

    Commands that are followed by their output, but do not follow a program, use the last one as it is.
    """
    found: list[Session] = []
    files: dict[str, str] = {}
    name = commands = ""
    for indent, kind, options, body in FENCE.findall(path.read_text()):
        text = "".join(line.removeprefix(indent) for line in body.splitlines(keepends=True))
        titles = TITLE.findall(options)
        if titles and kind in ("python", "diff"):
            (name,) = titles
            if kind == "python":
                files[name] = text
            changes = text if kind == "diff" else ""
            commands = COMMAND.format(name)
        elif kind == "sh" and files:
            commands = text
            if not name:
                name, changes = [*files][-1], ""
        elif kind == "text" and name:
            program = changed(files[name], changes) if changes else files[name]
            imported = re.findall(r"import polyhvd\.([\w.]+) as hvd", program)
            module = imported[0] if imported else "torch" if "import torch" in program else "numpy"
            session = {**files, name: program}
            found.append(Session(path.stem, len(found) + 1, session, module, commands, text))
            name = ""
        else:
            name = ""
    return found


SESSIONS = [session for path in PAGES for session in sessions(path)]


def in_order(lines: list[str]) -> list[str]:
    """Lines without a rank after those of each rank, as ranks print at the same time."""

    def rank(line: str) -> int:
        found = RANK.match(line)
        return int(found[1]) if found else sys.maxsize

    return sorted((line.rstrip() for line in lines if line.strip()), key=rank)


def is_like(line: str, shown: str) -> bool:
    """Return whether a line is that of the page, but for the last digits of fractions."""
    line, shown = TIME.sub("", line), TIME.sub("", shown)
    if NUMBER.split(line) != NUMBER.split(shown):
        return False
    numbers = [float(number) for number in NUMBER.findall(line)]
    return numbers == pytest.approx([float(number) for number in NUMBER.findall(shown)], rel=0.02, abs=2e-3)


def assert_prints(printed: str, shown: str) -> None:
    """Compare all lines, or only those of the page if it leaves lines out.

    The page may continue a long line in the next one, indented by four spaces.
    """
    shown = re.sub(r"\n {4,}", " ", shown)
    expected = in_order([line for line in shown.splitlines() if line != ANYTHING])
    lines = in_order(printed.splitlines())
    if ANYTHING in shown.splitlines():
        left = iter(lines)
        absent = [line for line in expected if not any(is_like(found, line) for found in left)]
        assert not absent, printed
    else:
        assert len(lines) == len(expected), printed
        assert all(map(is_like, lines, expected)), printed


def executable(path: Path, *command: str) -> None:
    path.write_text(f"""#!/bin/sh\nexec {" ".join(command)} "$@"\n""")
    path.chmod(0o755)


def run(session: Session, python: list[str], folder: Path) -> str:
    """What the commands print in a folder with the files."""
    for name, text in session.files.items():
        (folder / name).write_text(text)
    commands = folder / "bin"
    commands.mkdir()
    executable(commands / "python", *python)
    executable(commands / "polyhvdrun", sys.executable, "-m", "polyhvd.launch")
    process = subprocess.Popen(
        ["sh", "-c", session.commands],
        cwd=folder,
        env={
            **os.environ,
            **SETTINGS,
            "PYTHONPATH": str(ROOT),
            "PATH": f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        return process.communicate(timeout=DEADLINE_S)[0]
    finally:
        with contextlib.suppress(ProcessLookupError):  # what still runs if the deadline has passed
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_every_guide_has_a_program() -> None:
    without = {path.stem for path in PAGES} - {session.page for session in SESSIONS}
    assert without <= {"moving-from-mxnet"}  # whose commands other tests run


# One framework's follow each other, since its fork servers may end when others are needed.
@pytest.mark.parametrize(
    "session",
    [
        pytest.param(session, id=str(session), marks=pytest.mark.slow)
        for session in sorted(SESSIONS, key=lambda session: session.module, reverse=True)
    ],
)
def test_program_prints_what_the_page_shows(
    session: Session, fork_servers: ForkServers, tmp_path: Path
) -> None:
    framework = FRAMEWORKS.get(session.module, session.module)
    if not is_installed(framework):
        pytest.skip(f"{framework} is not installed")
    has_server = framework in IMPORTS and framework != "numpy"
    python = fork_servers.python(2, IMPORTS[framework]) if has_server else [sys.executable]
    assert_prints(run(session, python, tmp_path), session.output)


STALLS = """\
import time
import numpy as np
import polyhvd.numpy as hvd
hvd.init()
def train(step):
    if hvd.rank() == 1 and step == 1:
        time.sleep(600)
    hvd.allreduce(np.ones(3), name="gradient")
for step in range(2):
    train(step)
"""
DIES = STALLS.replace("import time", "import os").replace("time.sleep(600)", "os.kill(os.getpid(), 9)")
#: What differs from run to run.
VARIES = re.compile(r"\d{4}-\d\d-\d\d [\d:,]+ |pid \d+ on [^\s)]+|\b\d+ s\b")


@pytest.mark.parametrize(
    ("number", "program", "options"),
    [
        (0, STALLS, "--stall-check-warning-time-seconds 1 --stall-check-shutdown-time-seconds 3"),
        (1, DIES, ""),
    ],
    ids=["stalls", "dies"],
)
def test_page_of_symptoms_shows_what_is_printed(
    number: int, program: str, options: str, tmp_path: Path
) -> None:
    text = (DOCS / "troubleshooting.md").read_text()
    shown = [body for _, kind, _, body in FENCE.findall(text) if kind == "text"][number]
    command = f"polyhvdrun -np 2 {options} python train.py"
    session = Session("troubleshooting", number, {"train.py": program}, "numpy", command, shown)
    printed = run(session, [sys.executable], tmp_path).replace(str(tmp_path), "/app")
    found = [VARIES.sub("", line) for line in printed.splitlines()]
    assert [line for line in shown.splitlines() if VARIES.sub("", line) not in found] == [], printed
