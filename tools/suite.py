"""Runs the test suite as two pytest processes side by side, and says in one closing line what came of it.

The first has the tests that need processors, such as those of frameworks; most of the second's wait for
launchers, deadlines and ends of processes.
``python tools/suite.py -x -k allreduce`` hands its arguments to both.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import costs

ROOT = Path(__file__).resolve().parent.parent
LOG = ROOT / "build" / "suite-others.log"
#: Folders of the first process; the second has all the others, and takes as long.
FIRST = (
    "tests/parity",
    *sorted(
        f"tests/{path.name}"
        for path in (ROOT / "tests").iterdir()
        if (name := path.name.partition("_")[0]) and (ROOT / "frameworks" / name).is_dir()
    ),
    "tests/data",
    "tests/surface",
    "tests/examples",
    "tests/gpu",
    "tests/mpi",
    "tests/harness",
    "tests/tracing",
)
#: Tests of tf_keras, which has an environment of the matrix, and of the sources, which make check has.
ELSEWHERE = (
    "tests/tensorflow/test_tensorflow_keras2.py",
    "tests/test_tidy.py",
    "tests/test_english.py",
    "tests/test_verbs.py",
)
_INTERRUPTED, _NOTHING_COLLECTED = 2, 5  # exit statuses of pytest
_LAST_LINES = 50


def start(name: str, arguments: list[str], **options: object) -> subprocess.Popen[str]:
    """A pytest process, which writes what its tests cost."""
    command = [sys.executable, "-m", "pytest", *arguments]
    env = {**os.environ, "COSTS": str(costs.FOLDER / f"{name}.jsonl")}
    # What a shell starts in the background ignores SIGINT, and so would this, which is ended by it.
    return subprocess.Popen(  # type: ignore[call-overload, no-any-return]
        command,
        cwd=ROOT,
        text=True,
        env=env,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        **options,
    )


def counts(output: str) -> Counter[str]:
    """The counts of pytest's last closing line: ``{"passed": 12, "skipped": 1}``."""
    lines = re.findall(r"^(?:=+ )?(\d+ \w+(?:, \d+ \w+)*) in [\d.]+s\b", output, re.MULTILINE)
    found = re.findall(r"(\d+) (\w+)", lines[-1]) if lines else []
    return Counter({what: int(number) for number, what in found})


def end_of(output: str) -> str:
    """The last lines of an output, without pytest's list of skipped tests, which follows the failures."""
    lines = [line for line in output.splitlines() if not line.startswith("SKIPPED [")]
    return "\n".join(lines[-_LAST_LINES:])


def end_together(process: subprocess.Popen[str], other: subprocess.Popen[str]) -> None:
    """With -x, interrupt the other process when this one has failed."""
    if process.wait() not in (0, _NOTHING_COLLECTED) and "-x" in sys.argv:
        with contextlib.suppress(ProcessLookupError):
            other.send_signal(signal.SIGINT)


def main() -> None:
    """Run both, print the second's output when the first has ended, and add up counts and costs."""
    began = time.monotonic()
    shutil.rmtree(costs.FOLDER, ignore_errors=True)
    costs.FOLDER.mkdir(parents=True)
    elsewhere = [f"--ignore={name}" for name in ELSEWHERE]
    ignored = [f"--ignore={folder}" for folder in FIRST]
    with LOG.open("w") as log:
        # Its cache is its own, since the last to end would overwrite what the other had written.
        others = start(
            "others",
            [*ignored, *elsewhere, "-o", f"cache_dir={ROOT / 'build' / 'pytest-others'}", *sys.argv[1:]],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    arguments = [*sys.argv[1:], *FIRST, *elsewhere]
    first = start("first", arguments, stdout=subprocess.PIPE)
    both = (first, others)
    signal.signal(signal.SIGTERM, lambda *_: [process.send_signal(signal.SIGINT) for process in both])
    for process, other in ((first, others), (others, first)):
        threading.Thread(target=end_together, args=(process, other), daemon=True).start()
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
    print(costs.table(costs.added(costs.read(costs.FOLDER), costs.folder_of), "folder"))
    bad = {status for status in statuses if status not in (0, _NOTHING_COLLECTED)}
    failed = bad - {_INTERRUPTED} or bad  # with -x the failure of one has interrupted the other
    for status, output in zip(statuses, ("".join(shown), said), strict=True):
        if status in failed:  # the end of an output is what is looked at
            print(end_of(output))
    total = counts("".join(shown)) + counts(said)
    order = ("failed", "error", "errors", "passed")
    names = sorted(total, key=lambda name: order.index(name) if name in order else len(order))
    summary = ", ".join(f"{total[name]} {name}" for name in names) or "no tests ran"
    print(f"{f' total: {summary} in {time.monotonic() - began:.2f}s ':=^100}")
    sys.exit(min(bad, key=lambda status: status != 1) if bad else min(statuses))  # 1: tests have failed


if __name__ == "__main__":
    main()
