"""Runs the test suite as three pytest processes side by side, and says in one closing line what came of it.

The first has the tests that need processors, those of frameworks; most of the second's wait for launchers,
deadlines and ends of processes; the third has all others.
``python tools/suite.py -x -k allreduce`` hands its arguments to each.
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
from collections.abc import Sequence
from pathlib import Path

import costs

ROOT = Path(__file__).resolve().parent.parent
#: Folders and files of the first process, whose output is shown while it runs, and of the second.
FIRST = (
    "tests/parity",
    *sorted(
        f"tests/{path.name}"
        for path in (ROOT / "tests").iterdir()
        if (name := path.name.partition("_")[0]) and (ROOT / "frameworks" / name).is_dir()
    ),
    "tests/examples",
    "tests/launch/test_kubernetes.py",
)
SECOND = ("tests/launch", "tests/elastic", "tests/rendezvous")
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


def end_together(process: subprocess.Popen[str], others: list[subprocess.Popen[str]]) -> None:
    """Interrupt the others with -x if this process has failed, but not if it was interrupted."""
    if process.wait() not in (0, _NOTHING_COLLECTED, _INTERRUPTED) and "-x" in sys.argv:
        for other in others:
            with contextlib.suppress(ProcessLookupError):
                other.send_signal(signal.SIGINT)


def start_logged(name: str, arguments: list[str]) -> tuple[subprocess.Popen[str], Path]:
    """A pytest process with a separate cache, and the file that it writes its output to."""
    log = ROOT / "build" / f"suite-{name}.log"
    # The last to end would overwrite what the others had written to a common cache.
    cache = f"cache_dir={ROOT / 'build' / f'pytest-{name}'}"
    with log.open("w") as file:
        return start(name, [*arguments, "-o", cache], stdout=file, stderr=subprocess.STDOUT), log


def _without(paths: Sequence[str]) -> list[str]:
    return [f"--ignore={path}" for path in paths]


def main() -> None:
    """Run all, print the others' outputs when the first has ended, and add up counts and costs."""
    began = time.monotonic()
    shutil.rmtree(costs.FOLDER, ignore_errors=True)
    costs.FOLDER.mkdir(parents=True)
    common = [*sys.argv[1:], *_without(ELSEWHERE)]
    logged = [
        start_logged("second", [*common, *_without(FIRST), *SECOND]),
        start_logged("others", [*common, *_without(FIRST), *_without(SECOND)]),
    ]
    first = start("first", [*common, *FIRST], stdout=subprocess.PIPE)
    processes = [first, *(process for process, _ in logged)]
    signal.signal(signal.SIGTERM, lambda *_: [process.send_signal(signal.SIGINT) for process in processes])
    for process in processes:
        others = [other for other in processes if other is not process]
        threading.Thread(target=end_together, args=(process, others), daemon=True).start()
    assert first.stdout is not None
    shown = []
    try:
        for line in first.stdout:
            print(line, end="", flush=True)
            shown.append(line)
        statuses = [process.wait() for process in processes]
    except KeyboardInterrupt:  # which all have got from the terminal, too
        for process in processes:
            process.wait()
        sys.exit(130)
    outputs = ["".join(shown)]
    for _, log in logged:
        outputs.append(log.read_text(errors="replace"))
        print(outputs[-1], end="")
    print(costs.table(costs.added(costs.read(costs.FOLDER), costs.folder_of), "folder"))
    bad = {status for status in statuses if status not in (0, _NOTHING_COLLECTED)}
    failed = bad - {_INTERRUPTED} or bad  # with -x the failure of one has interrupted the others
    for status, output in zip(statuses, outputs, strict=True):
        if status in failed:  # the end of an output is what is looked at
            print(end_of(output))
    total = sum(map(counts, outputs), Counter())
    order = ("failed", "error", "errors", "passed")
    names = sorted(total, key=lambda name: order.index(name) if name in order else len(order))
    summary = ", ".join(f"{total[name]} {name}" for name in names) or "no tests ran"
    print(f"{f' total: {summary} in {time.monotonic() - began:.2f}s ':=^100}")
    sys.exit(min(bad, key=lambda status: status != 1) if bad else min(statuses))  # 1: tests have failed


if __name__ == "__main__":
    main()
