"""Seeded defects: runs `polyhvd parity` on each, and says whether it has found it, and where.

``python tools/defects.py`` runs all of tests/defects, holds what the command reports against the truth that
stands in each file, and writes the table in docs/parity.md. With names it runs only these, and writes
nothing. A defect is a program as a user would write it, and knows nothing of what looks for it.
``--control`` runs the same programs without their defects, in which nothing may be found.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tests" / "defects"
DOCUMENT = ROOT / "docs" / "parity.md"
MARKS = ("<!-- defects -->", "<!-- /defects -->")
#: Which kinds of a report say of a defect where it is. ``parity.watch`` knows neither batches nor losses nor
#: averages, and sees what comes of them: in the first layer's input, in gradients, in updates.
KINDS = {
    "weights": {"weights"},
    "data": {"data", "input"},
    "activation": {"activation"},
    "statistics": {"statistics"},
    "loss": {"loss", "gradient"},
    "gradient": {"gradient"},
    "averaging": {"average", "gradient", "update"},
    "clipping": {"average", "gradient", "update"},
    "learning rate": {"learning rate"},
    "update": {"update"},
}
#: Of 24 defects, at least 22 must be reported with their place.
LOCATED_MIN = 22 / 24
AGREE, FOUND = 0, {1, 6, 7, 8}
#: Of the command for one program.
_LIMIT_S = 300
FAULT = "FAULT = True\n"


@dataclass(frozen=True)
class Defect:
    """A program with a mistake in it, and where that shows first.

    Args:
        name: of its file.
        about: what the programmer did.
        case: what is trained.
        within: the framework whose program is wrong.
        layer: counted as docs/parity.md does; "all": every layer; None: in no layer.
        step: the first one in which it shows.
        kind: one of :data:`KINDS`.
        frameworks: of a case, separated by commas; empty: it is a script.
        scripts: those that make one job; a number: so many times this one.
        ranks: of each framework, or of each script.
        steps: of a case.
        question: of the comparison that has to find it, if it is one only.
        aside: whether whoever made the detector had not seen it before that was done.
    """

    name: str
    about: str
    case: str
    within: str
    layer: int | str | None
    step: int
    kind: str
    frameworks: str = ""
    scripts: int | list[str] = 0
    ranks: int = 1
    steps: int = 4
    question: str = ""
    aside: bool = False

    @property
    def place(self) -> str:
        """The truth in a few words."""
        return placed(self.step, self.kind, self.layer)

    def words(self, folder: Path, report: Path) -> list[str]:
        """The command's arguments, with this defect's file in ``folder``."""
        own = f"{self.name}.py"
        if self.frameworks:
            what = [str(folder / own), "--frameworks", self.frameworks, "--steps", str(self.steps)]
        else:
            scripts = [own] * self.scripts if isinstance(self.scripts, int) else self.scripts
            what = ["--scripts", *(str(folder / name) for name in scripts)]
        return [*what, "--np", str(self.ranks), "--json", str(report)]

    def ported(self) -> set[int]:
        """The ranks of a job of scripts whose program has the defect: those of the last script."""
        scripts = self.scripts if isinstance(self.scripts, int) else len(self.scripts)
        return set(range((scripts - 1) * self.ranks, scripts * self.ranks))


@dataclass(frozen=True)
class Finding:
    """The result of the command for a program."""

    defect: Defect
    status: int
    message: str
    check: str = ""
    question: str = ""
    first: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def detected(self) -> bool:
        """Whether the command has reported a fault in the training."""
        return self.status in FOUND

    @property
    def place(self) -> str:
        """The place of the first divergence that it reports."""
        first = self.first
        if "kind" not in first:
            return self.message if self.detected else "nothing"
        return placed(first["step"], first["kind"], first.get("layer"))

    @property
    def located(self) -> bool:
        """Whether framework or rank, layer, step and kind are right."""
        defect, first = self.defect, self.first
        if not self.detected or first.get("kind") not in KINDS[defect.kind]:
            return False
        if first.get("step") != defect.step or defect.question not in ("", self.question):
            return False
        if defect.frameworks and defect.within not in re.findall(r"\w+", self.check):
            return False
        if not defect.frameworks and first.get("rank") not in defect.ported():
            return False
        return defect.layer in (None, "all") or first.get("layer") == defect.layer


def placed(step: int, kind: str, layer: int | str | None) -> str:
    """A place, as the table has it."""
    return f"step {step}, {kind}" + (
        "" if layer is None else f", layer {layer}" if layer != "all" else ", all layers"
    )


def read(path: Path) -> Defect:
    """The defect that a file has, without running it.

    Raises:
        ValueError: the file says nothing of one, or not when it is to be one.
    """
    text = path.read_text()
    body = ast.parse(text)
    made = [
        node.value
        for node in body.body
        if isinstance(node, ast.Assign) and [ast.unparse(name) for name in node.targets] == ["DEFECT"]
    ]
    about = ast.get_docstring(body)
    if len(made) != 1 or not about or text.count(FAULT) != 1:
        raise ValueError(f"{path.name}: expected a docstring, `DEFECT = {{...}}` and `{FAULT.strip()}`")
    said = ast.literal_eval(made[0])
    said["within"] = said.pop("in")
    defect = Defect(path.stem, about.splitlines()[0], **said)
    if defect.kind not in KINDS or bool(defect.frameworks) == bool(defect.scripts):
        raise ValueError(f"{path.name}: expected a kind of {', '.join(KINDS)}, and frameworks or scripts")
    return defect


def defects() -> list[Defect]:
    """All, by name, those held out last."""
    paths = [path for path in FOLDER.glob("*.py") if not path.name.startswith("reference_")]
    return sorted(map(read, paths), key=lambda defect: (defect.aside, defect.name))


def run(defect: Defect, *, control: bool = False) -> Finding:
    """Have the command judge a defect.

    Args:
        defect: one of :func:`defects`.
        control: run the same program without it.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        programs, report = Path(scratch) / "programs", Path(scratch) / "report.json"
        shutil.copytree(FOLDER, programs, ignore=shutil.ignore_patterns("__pycache__"))
        own = programs / f"{defect.name}.py"
        if control:
            own.write_text(own.read_text().replace(FAULT, FAULT.replace("True", "False")))
        words = ["parity", *defect.words(programs, report), "--timeout", str(_LIMIT_S)]
        done = subprocess.run(
            [sys.executable, "-m", "polyhvd.cli", *words],
            cwd=ROOT,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "-1",
                "TF_CPP_MIN_LOG_LEVEL": "3",
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S + 60,
        )
        content = json.loads(report.read_text()) if report.exists() else {}
    differing = [check for check in content.get("checks", ()) if not check["agree"]]
    check = differing[0] if differing else {"name": "", "question": "", "first": {}}
    return Finding(
        defect,
        done.returncode,
        content.get("message") or done.stderr.strip()[-2000:],
        check["name"],
        check["question"],
        check["first"],
        time.monotonic() - began,
    )


def table(findings: Sequence[Finding]) -> str:
    """The table of the document."""
    lines = [
        "| defect | case | in | truth | detected | reported | located | held out |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for found in findings:
        defect = found.defect
        columns = [
            f"`{defect.name}`: {defect.about.rstrip('.')}",
            defect.case,
            defect.within,
            defect.place,
            "yes" if found.detected else "**no**",
            found.place,
            "yes" if found.located else "**no**",
            "yes" if defect.aside else "",
        ]
        lines.append("| " + " | ".join(column.replace("|", "\\|") for column in columns) + " |")
    return "\n".join(lines)


def counted(findings: Sequence[Finding]) -> str:
    """How many were found, of all and of those held out."""
    parts = []
    for what, some in (
        ("of all", findings),
        ("of those held out", [found for found in findings if found.defect.aside]),
    ):
        detected, located = (sum(getattr(found, name) for found in some) for name in ("detected", "located"))
        parts.append(f"{what} {len(some)}, {detected} are detected and {located} located")
    return "; ".join(parts)


def write(findings: Sequence[Finding]) -> None:
    """Put the table between the marks of the document."""
    text = DOCUMENT.read_text()
    begin, end = (text.index(mark) for mark in MARKS)
    sentence = counted(findings)
    made = f"{MARKS[0]}\n\n{sentence[0].upper()}{sentence[1:]}.\n\n{table(findings)}\n\n"
    DOCUMENT.write_text(text[:begin] + made + text[end:])


def enough(findings: Sequence[Finding]) -> bool:
    """Return whether all are detected, and as many located as have to be."""
    located = sum(found.located for found in findings)
    return all(found.detected for found in findings) and located >= math.ceil(LOCATED_MIN * len(findings))


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 if enough was found, and in control runs nothing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="of defects; default: all, and the document is written")
    parser.add_argument("--control", action="store_true", help="without the defects: nothing may be found")
    parser.add_argument("--jobs", type=int, default=1, help="so many at a time")
    options = parser.parse_args(arguments)
    known = {defect.name: defect for defect in defects()}
    unknown = sorted(set(options.names) - set(known))
    if unknown:
        parser.error(f"no such defect: {', '.join(unknown)}; there are {', '.join(known)}")

    def judged(name: str) -> Finding:
        found = run(known[name], control=options.control)
        said = "agrees" if found.status == AGREE else found.place
        if found.status == AGREE or not found.detected or "kind" not in found.first:
            said += f" (status {found.status}: {found.message})"
        truth = "" if options.control else f"; truth: {found.defect.place}; located: {found.located}"
        print(f"{name}: {said}{truth} [{found.check}] {found.seconds:.0f} s", flush=True)
        return found

    with ThreadPoolExecutor(options.jobs) as pool:
        findings = list(pool.map(judged, options.names or known))
    if options.control:
        return int(any(found.status != AGREE for found in findings))
    print(counted(findings))
    if not options.names:
        write(findings)
    return int(not enough(findings))


if __name__ == "__main__":
    sys.exit(main())
