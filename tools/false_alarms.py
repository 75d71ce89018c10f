"""Run the clean cases of ``polyhvd parity`` over many seeds: nothing may be found to differ.

``python tools/false_alarms.py --seeds 20`` starts one job for each framework, which trains every case of the
catalogue with every seed, without polyhvd, on one rank, and on two. Seeds give other weights and other data.
What is found is printed, and is the exit status; for each case and kind, how near the nearest came.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from polyhvd.config import Launched
from polyhvd.parity.catalogue import CASES
from polyhvd.parity.command import _VARIABLES
from polyhvd.parity.judging import judge
from polyhvd.parity.limits import Bounds, differences
from polyhvd.parity.runs import FRAMEWORKS, Order, Run

_RANKS = 2
#: Of each run; those of a deep network take long.
_STEPS, _STEPS_OF = 10, {"resnet18": 3}
#: Each seed has the next of them, besides what the case has.
_OPTIMIZERS = ("sgd", "momentum", "nesterov", "adam", "adamw", "rmsprop", "adagrad")


def _order(case: str, seed: int) -> Order:
    options: dict[str, object] = {}
    if case not in ("resnet18", "embedding"):
        options = {"name": _OPTIMIZERS[seed % len(_OPTIMIZERS)]}
        if options["name"] in ("adam", "adamw", "rmsprop", "adagrad"):
            options["rate"] = 0.01
    return Order(case, options, _STEPS_OF.get(case, _STEPS), _RANKS, "", seed)


def _rank(framework: str, folder: Path, cases: Sequence[str], seeds: Sequence[int]) -> None:
    """The program of one rank of a framework's job."""
    from polyhvd.parity import running

    rank = Launched.from_environment().rank or 0
    hvd = importlib.import_module(f"polyhvd.{framework}")
    first = hvd.ProcessSet([0])
    hvd.init(process_sets=[first])
    for case in cases:
        for seed in seeds:
            order = _order(case, seed)
            made = []
            if rank == 0:
                made.append(running.run_mode(order, framework, "plain", None, (0, 1)))
                made.append(running.run_mode(order, framework, "one", first, (0, 1)))
            part = (rank, _RANKS)
            made.append(running.run_mode(order, framework, "all", hvd.global_process_set, part, rank))
            (folder / f"{case}.{seed}.{framework}.{rank}").write_bytes(pickle.dumps(made))
    hvd.shutdown()


def _nearest(runs: Sequence[Run]) -> Iterator[tuple[float, str, int, str]]:
    """How near the plain runs come to their limits: the ratio, its kind, step and name."""
    plain = [run for run in runs if run.mode == "plain"]
    for other in plain[1:]:
        for number, (one, two) in enumerate(zip(plain[0].steps, other.steps, strict=True)):
            bounds = Bounds(number, len(plain[0].layers))
            for key, relative, limit in differences(two.traces, one.traces, bounds):
                yield relative / limit, key[0], number, f"{other.framework} {one.traces[key].name}"


def main() -> int:
    """Run all, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--frameworks", default=",".join(FRAMEWORKS))
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    cases, seeds = options.cases.split(","), range(1, options.seeds + 1)
    if options.rank:
        _rank(options.rank[0], Path(options.rank[1]), cases, seeds)
        return 0
    frameworks = options.frameworks.split(",")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        _run_all(folder, frameworks)
        return _report(folder, frameworks, cases, seeds)


def _run_all(folder: Path, frameworks: Sequence[str]) -> None:
    jobs = []
    for name in frameworks:
        words = [sys.executable, "-m", "polyhvd.launch", "-np", str(_RANKS), "--no-tag"]
        program = [sys.executable, *sys.argv, "--rank", name, str(folder)]
        environment = {**os.environ, **dict(item.split("=") for item in _VARIABLES)}
        jobs.append(subprocess.Popen([*words, *program], env=environment))
    if any([job.wait() for job in jobs]):
        raise SystemExit("a job has failed")


def _report(folder: Path, frameworks: Sequence[str], cases: Sequence[str], seeds: Sequence[int]) -> int:
    alarms = comparisons = 0
    for case in cases:
        nearest: dict[str, tuple[float, str, int, str]] = {}
        for seed in seeds:
            paths = [folder / f"{case}.{seed}.{name}.{rank}" for name in frameworks for rank in range(_RANKS)]
            runs = [run for path in paths for run in pickle.loads(path.read_bytes())]
            verdict = judge(runs)
            comparisons += len(verdict.pairs)
            for text in [verdict.message] if verdict.problem else []:
                print(f"{case}, seed {seed}: {text}")
                alarms += 1
            for pair in verdict.pairs:
                for found in filter(None, (pair.first, pair.suspicious)):
                    print(f"{case}, seed {seed}: {pair.title(_RANKS)}: {found}")
                    alarms += 1
            for item in _nearest(runs):
                nearest[item[1]] = max(nearest.get(item[1], item), item)
        text = ", ".join(f"{kind} {ratio:.3f} (step {step})" for kind, (ratio, _, step, _) in nearest.items())
        print(f"{case}: nearest by the limit: {text}")
    print(f"{alarms} false alarms in {comparisons} comparisons of {len(cases)} cases over {len(seeds)} seeds")
    return min(alarms, 1)


if __name__ == "__main__":
    sys.exit(main())
