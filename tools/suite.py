"""Runs the test suite as two pytest processes side by side, and says in one closing line what came of it.

Frameworks' tests need processors; most others wait for launchers, deadlines and ends of processes.
``python tools/suite.py -x -k allreduce`` hands its arguments to both.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOG = ROOT / "build" / "suite-others.log"
#: Folders of the first process; the second has all the others.
FRAMEWORKS = (
    "tests/parity",
    *sorted(
        f"tests/{path.name}"
        for path in (ROOT / "tests").iterdir()
        if (ROOT / "frameworks" / path.name.partition("_")[0]).is_dir()
    ),
    "tests/data",
    "tests/surface",
    "tests/examples",
)
#: Only about a version, tf_keras, which has an environment of the matrix.
OF_THE_MATRIX = "tests/tensorflow/test_tensorflow_keras2.py"
_NOTHING_COLLECTED = 5  # exit status of pytest


def start(arguments: list[str], **options: object) -> subprocess.Popen[str]:
    """A pytest process."""
    command = [sys.executable, "-m", "pytest", *arguments]
    return subprocess.Popen(command, cwd=ROOT, text=True, **options)  # type: ignore[call-overload, no-any-return]


def counts(output: str) -> Counter[str]:
    """What pytest's last closing line counts: ``{"passed": 12, "skipped": 1}``."""
    lines = re.findall(r"^(?:=+ )?(\d+ \w+(?:, \d+ \w+)*) in [\d.]+s\b", output, re.MULTILINE)
    found = re.findall(r"(\d+) (\w+)", lines[-1]) if lines else []
    return Counter({what: int(number) for number, what in found})


def main() -> None:
    """Run both, print the output of the second when the first has ended, and add up their counts."""
    began = time.monotonic()
    LOG.parent.mkdir(exist_ok=True)
    ignored = [f"--ignore={folder}" for folder in FRAMEWORKS]
    with LOG.open("w") as log:
        # Its cache is its own, since the last to end would overwrite what the other had written.
        others = start(
            [*ignored, "-o", f"cache_dir={ROOT / 'build' / 'pytest-others'}", *sys.argv[1:]],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    first = start([*sys.argv[1:], *FRAMEWORKS, f"--ignore={OF_THE_MATRIX}"], stdout=subprocess.PIPE)
    both = (first, others)
    signal.signal(signal.SIGTERM, lambda *_: [process.send_signal(signal.SIGINT) for process in both])
    assert first.stdout is not None
    shown = []
    try:
        for line in first.stdout:
            print(line, end="", flush=True)
            shown.append(line)
        statuses = [process.wait() for process in both]
    except KeyboardInterrupt:  # which both have got from the terminal, too
        for process in both:
            process.wait()
        sys.exit(130)
    said = LOG.read_text(errors="replace")
    print(said, end="")
    total = counts("".join(shown)) + counts(said)
    order = ("failed", "error", "errors", "passed")
    names = sorted(total, key=lambda name: order.index(name) if name in order else len(order))
    summary = ", ".join(f"{total[name]} {name}" for name in names) or "no tests ran"
    print(f"{f' total: {summary} in {time.monotonic() - began:.2f}s ':=^100}")
    bad = [status for status in statuses if status not in (0, _NOTHING_COLLECTED)]
    sys.exit(bad[0] if bad else min(statuses))


if __name__ == "__main__":
    main()
