"""``polyhvd parity``: one case in several frameworks, on one and on several ranks; or a user's programs."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields, replace
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, NoReturn

from polyhvd.installed import is_installed
from polyhvd.parity import scripts
from polyhvd.parity.case import OPTIMIZERS, PRECISIONS, SCHEDULES, BadCaseError, Case, Optimizer
from polyhvd.parity.catalogue import CASES
from polyhvd.parity.folders import NoRoomError, WorkFolder, is_full, work_folder
from polyhvd.parity.jobs import Job, launcher, python, run_all, seconds
from polyhvd.parity.judging import Pair, Verdict, described, judge
from polyhvd.parity.layers import walk
from polyhvd.parity.report import Check, Report
from polyhvd.parity.report.findings import counted
from polyhvd.parity.report.terminal import Progress, print_report
from polyhvd.parity.runs import FRAMEWORKS, MODES, Order, Run, cannot_compute
from polyhvd.parity.statuses import STATUSES

__all__ = ["SUBCOMMANDS", "add_options", "main"]

#: Subcommands, accepted in the place of CASE, by the module whose ``main`` runs them.
SUBCOMMANDS: dict[str, str] = {"migrate": "polyhvd.parity.migrating"}
_INTERRUPTED_STATUS = 130
#: One thread for each rank: small networks gain nothing by more, and sums stay in one order.
_VARIABLES = ("OMP_NUM_THREADS=1", "TF_CPP_MIN_LOG_LEVEL=3", "TF_ENABLE_ONEDNN_OPTS=0")


#: Options that mean nothing to programs of a user's own.
_OF_CASES = (
    *("frameworks", "steps", "seed", "precision", "optimizer"),
    *("rate", "momentum", "epsilon", "weight_decay", "clip_norm", "accumulate", "schedule"),
)
_RANKS, _STEPS = 2, 20
#: Of a timer: eleven days.
_SECONDS_MAX = 1e6


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(
            STATUSES["usage"], f"polyhvd parity: {message}; run polyhvd parity --help for the options\n"
        )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _names(text: str) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    if wrong := [name for name in names if name not in FRAMEWORKS]:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r} is not one of {', '.join(FRAMEWORKS)}")
    return names


def _parser() -> argparse.ArgumentParser:
    statuses = "  ".join(f"{status} {name}" for name, status in STATUSES.items())
    parser = _Parser(
        prog="polyhvd parity",
        description="Train one network in several frameworks, in one process and on ranks, and report "
        "whether they agree, and where they first differ.",
        epilog=f"exit status: {statuses}. To convert trained weights: polyhvd parity "
        "migrate --help. More: polyhvd docs parity",
    )
    add_options(parser)
    return parser


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser of this command or of a subcommand."""
    add = parser.add_argument
    add(
        "case", nargs="?", metavar="CASE", help="name from --list, or a file that defines build() and batch()"
    )
    add("--list", action="store_true", help="list the included cases, optimizers and schedules")
    add(
        "--frameworks",
        type=_names,
        metavar="NAME,...",
        help=f"comma-separated list of {', '.join(FRAMEWORKS)}; default: all that are installed",
    )
    add("--steps", type=_positive, metavar="N", help="training steps; default: 20")
    add("--np", type=_positive, metavar="N", help="ranks of each framework; default: 2, with --scripts 1")
    add("--seed", type=int, metavar="N", help="seed of weights and data; default: 0")
    add("--optimizer", choices=OPTIMIZERS, help="optimizer; default: the case's")
    add("--rate", type=float, metavar="X", help="learning rate; default: the case's")
    add("--momentum", type=float, metavar="X", help="momentum of momentum and nesterov")
    add("--epsilon", type=float, metavar="X", help="epsilon of adam, adamw, rmsprop and adagrad")
    add("--weight-decay", type=float, metavar="X", help="decoupled in adamw, otherwise added to the gradient")
    add("--clip-norm", type=float, metavar="X", help="limit of the norm of all averaged gradients together")
    add(
        "--accumulate",
        type=_positive,
        metavar="N",
        help="number of parts into which each rank divides its batch, to accumulate their gradients",
    )
    add("--schedule", choices=SCHEDULES, help="schedule of the learning rate")
    add("--precision", choices=PRECISIONS, help="precision of the layers' computations; weights are float32")
    add(
        "--json",
        metavar="FILE",
        help="write the report as JSON to FILE; '-': to standard output, without the table",
    )
    add("--junit", metavar="FILE", help="write the report as JUnit XML to FILE, for CI servers")
    add("--html", metavar="FILE", help="write the report as one HTML page to FILE")
    add("--timeout", type=seconds, default=600.0, metavar="S", help="seconds for the whole run; default: 600")
    add(
        "--scripts",
        nargs="+",
        metavar="FILE",
        help="run these programs as one job, each on --np ranks (1), with calls of parity.compare in them; "
        "quote a program with arguments: 'train.py --lr 0.1'",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: after the word "parity"; None: those of this process.

    Returns:
        the exit status, one of :data:`polyhvd.parity.statuses.STATUSES`, or 130 after Ctrl-C.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in SUBCOMMANDS:
        status: int = import_module(SUBCOMMANDS[words[0]]).main(words[1:])
        return status
    parser = _parser()
    options = parser.parse_args(words)
    if options.seed is not None and options.seed < 0:
        parser.error(f"--seed {options.seed}: expected 0 or more")
    if options.list:
        print("\n".join(_listed()))
        return 0
    if (options.case is None) == (options.scripts is None):
        parser.error("give either a CASE or --scripts")
    if options.scripts is not None and (given := [n for n in _OF_CASES if getattr(options, n) is not None]):
        parser.error(
            f"--{given[0].replace('_', '-')} is for a CASE; with --scripts, the programs set it themselves"
        )
    if options.scripts is not None and len(options.scripts) * (options.np or 1) == 1:
        parser.error(
            "--scripts: one program on one rank has no other rank to compare with; name another, or --np 2"
        )
    for name in ("json", "junit", "html"):
        path = getattr(options, name)
        if path not in (None, "-") and not Path(path).absolute().parent.is_dir():
            parser.error(f"--{name} {path}: there is no folder {Path(path).parent}")
    if [options.json, options.junit, options.html].count("-") > 1:
        parser.error("standard output, -, takes one report: --json, --junit or --html")
    try:
        Optimizer(**_numbers(options))
    except ValueError as error:
        parser.error(str(error))
    begun = time.monotonic()
    try:
        with work_folder("polyhvd-parity-") as work:
            if options.scripts is not None:
                is_piped = "-" in (options.json, options.junit, options.html)
                printed = sys.stderr if is_piped else sys.stdout
                found = scripts.run(options.scripts, options.np or 1, options.timeout, work, printed)
            else:
                options.np = options.np or _RANKS
                options.steps, options.seed = options.steps or _STEPS, options.seed or 0
                found = _run_case(options, work)
            if found.outcome in ("rank-died", "bad-case") and is_full(work.path):
                raise OSError(errno.ENOSPC, "what a rank wrote")
    except KeyboardInterrupt:
        print("polyhvd parity: interrupted; all processes have ended", file=sys.stderr)
        return _INTERRUPTED_STATUS
    except NoRoomError as error:
        named = options.case or " : ".join(options.scripts)
        found = _failed(Report(named, 0, "agree", "", []), "no-room", str(error))
    found = replace(found, seconds=round(time.monotonic() - begun, 3), versions=_versions(found.frameworks))
    return _write(found, options)


def _listed() -> list[str]:
    width = max(map(len, CASES))
    lines = ["cases:", *(f"  {name:{width}}  {case.about}" for name, case in CASES.items())]
    for what, names in (("optimizers", OPTIMIZERS), ("schedules", SCHEDULES), ("frameworks", FRAMEWORKS)):
        lines.append(f"{what}: {', '.join(names)}")
    return lines


def _versions(frameworks: Sequence[str]) -> dict[str, str]:
    found = {}
    for package in ("polyhvd", *(package for item in frameworks for package, _ in _required(item))):
        for name in (package, f"{package}-cpu", f"{package}_cpu"):
            try:
                found[package] = metadata.version(name)
                break
            except metadata.PackageNotFoundError:
                continue
    return found


def _write(report: Report, options: argparse.Namespace) -> int:
    """All reports that were asked for; returns the exit status."""
    from polyhvd.parity.report import documents, page

    makers: dict[str, Callable[[Report], str]] = {
        "json": documents.as_json,
        "junit": documents.as_junit,
        "html": page.as_html,
    }
    status = report.status
    for name, make in makers.items():
        path = getattr(options, name)
        if path is None:
            continue
        made = make(report).encode("utf-8", "backslashreplace")  # names of files need not be UTF-8
        if path == "-":
            sys.stdout.flush()
            sys.stdout.buffer.write(made)  # as the document declares, whatever the terminal's encoding is
            continue
        try:
            Path(path).write_bytes(made)
        except OSError as error:
            print(f"polyhvd parity: --{name} {path}: {error.strerror}", file=sys.stderr)
            status = status or STATUSES["usage"]
    if "-" not in (options.json, options.junit, options.html):
        if report.outcome in ("agree", "differ"):
            print_report(report)
        else:
            print(f"polyhvd parity: {report.message}", file=sys.stderr)
    return status


def _numbers(options: argparse.Namespace) -> dict[str, Any]:
    """The optimizer's settings from the command line."""
    known = {item.name for item in fields(Optimizer)} - {"name"}
    given = {key: value for key, value in vars(options).items() if key in known and value is not None}
    return given if options.optimizer is None else {"name": options.optimizer, **given}


def _run_case(options: argparse.Namespace, work: WorkFolder) -> Report:
    begun, folder = time.monotonic(), work.path
    path = options.case if options.case in CASES else str(Path(options.case).absolute())
    order = Order(
        path, _numbers(options), options.steps, options.np, str(folder), options.seed, options.precision or ""
    )
    frameworks = options.frameworks or [name for name in FRAMEWORKS if not _missing(name)]
    report = Report(options.case, 0, "agree", "", list(frameworks), steps=options.steps, ranks=options.np)
    for name in frameworks:
        if missing := _missing(name):
            return _failed(
                report,
                "not-installed",
                f"{name} needs {missing}, which is not installed for {sys.executable}; install it with: "
                f"pip install 'polyhvd[{name}]', or leave it out of --frameworks",
            )
    try:
        with _limited(options.timeout):
            case = order.load()
            why = {name: cannot_compute(name, case.precision, _kinds(case, name)) for name in frameworks}
    except (BadCaseError, TimeoutError) as error:
        is_late = time.monotonic() - begun >= options.timeout
        return _failed(report, "rank-died" if is_late else "bad-case", str(error))
    report = replace(report, case=case.name, optimizer=asdict(case.optimizer), precision=case.precision)
    if cannot := [name for name in frameworks if why[name]]:
        frameworks = [name for name in frameworks if not why[name]]
        if options.frameworks or not frameworks:
            return _failed(
                report,
                "precision",
                f"{case.name} in {case.precision}: {cannot[0]}: {why[cannot[0]]}; "
                + (f"use --frameworks {','.join(frameworks)}" if frameworks else "use another case"),
            )
        reasons = {name: why[name] for name in cannot}
        report = replace(report, frameworks=frameworks, left_out=cannot, cannot_compute=reasons)
    (folder / "order.json").write_text(json.dumps(asdict(order)))
    left_s = max(options.timeout - (time.monotonic() - begun), 1.0)
    return _conclude(report, case, *_run_jobs(order, frameworks, left_s, work))


@contextlib.contextmanager
def _limited(limit_s: float) -> Iterator[None]:
    """Raise TimeoutError in the block, which runs code of the user's case, when the time is over."""

    def end(*_: object) -> None:
        raise TimeoutError(f"it takes more than {limit_s:g} s (--timeout)")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, min(limit_s, _SECONDS_MAX))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _kinds(case: Case, framework: str) -> set[str]:
    """Return the types of a case's layers; empty unless the case is described by its layers."""
    if case.precision == "float32" or (FRAMEWORKS[framework].made_by != "" and case.name not in CASES):
        return set()  # what builds a model of a framework imports it
    made = case.of(framework)
    return {layer.kind for layer in walk(made)} if isinstance(made, list) else set()


def _missing(framework: str) -> str:
    """The first package that a framework lacks; empty: it is installed."""
    for package, least in _required(framework):
        if not is_installed(package):
            return package
        if least and int(metadata.version(package).partition(".")[0]) < least:
            return f"{package.capitalize()} {least} (there is {metadata.version(package)})"
    return ""


def _required(framework: str) -> list[tuple[str, int]]:
    """The packages that a framework needs, each with the least major version; 0: any."""
    facts = FRAMEWORKS[framework]
    parts = (item.partition(">=") for item in facts.requires or facts.packages)
    return [(package, int(least or 0)) for package, _, least in parts]


def _failed(report: Report, outcome: str, message: str) -> Report:
    return replace(report, status=STATUSES[outcome], outcome=outcome, message=message)


def _run_jobs(
    order: Order, frameworks: Sequence[str], timeout_s: float, work: WorkFolder
) -> tuple[list[Run], Job | None]:
    """All frameworks side by side; what they have seen, and the job that has failed."""
    folder = work.path
    modes = 2 + (order.ranks > 1)
    progress = Progress(order.steps * modes * len(frameworks))
    jobs: list[Job] = []

    def show_progress() -> None:
        done = {
            name: path.stat().st_size if (path := folder / f"{name}.progress").exists() else 0
            for name in frameworks
        }
        texts = [f"{name} {100 * count // (order.steps * modes)}%" for name, count in done.items()]
        progress.show(sum(done.values()), "  ".join(texts))

    words = [item for variable in _VARIABLES for item in ("-x", variable)]
    try:
        for name in frameworks:
            program = [*python("polyhvd.parity.running"), str(folder / "order.json"), name]
            jobs.append(Job(name, [*launcher(order.ranks, timeout_s), *words, *program], work))
        failed = run_all(
            jobs, timeout_s, show_progress, lambda job: (folder / f"{job.name}.left-out").exists()
        )
    finally:
        progress.close()
    runs: list[Run] = []
    for name in frameworks:
        for mode in MODES:
            for rank in range(order.ranks):
                path = folder / f"{name}.{mode}.{rank}"
                if path.exists():
                    runs.append(pickle.loads(path.read_bytes()))  # of a process of this one's
    return runs, failed


def _conclude(report: Report, case: Case, runs: Sequence[Run], failed: Job | None) -> Report:
    """The outcome."""
    bad = next((run for run in runs if run.problem.startswith("bad case: ")), None)
    if bad is not None:
        return _failed(report, "bad-case", bad.problem.removeprefix("bad case: "))
    left_out = [run.framework for run in runs if run.problem == "none"]
    if failed is not None:
        return _failed(report, "rank-died", _died(failed))
    verdict = judge(runs, same_on_ranks=case.same_on_ranks, precision=case.precision)
    report = replace(
        report,
        frameworks=[name for name in report.frameworks if name not in left_out],
        left_out=[*report.left_out, *verdict.left_out],
        losses=verdict.losses,
        layers=verdict.layers,
        checks=[_check(pair, report.ranks) for pair in verdict.pairs],
    )
    if verdict.problem:
        return _failed(report, verdict.problem, verdict.message)
    if not verdict.pairs:
        named = ", ".join(verdict.left_out)
        return _failed(report, "bad-case", f"{report.case}: build() has no model for {named}")
    return _agreed(report, verdict)


def _agreed(report: Report, verdict: Verdict) -> Report:
    count, differing = len(report.checks), report.differing
    if verdict.agree:
        text = f"{report.case}: all {count} comparisons agree over {counted(report.steps, 'step')}"
        return replace(report, message=text)
    text = f"{report.case}: {len(differing)} of {count} comparisons differ"
    return _failed(report, "differ", text)


def _check(pair: Pair, ranks: int) -> Check:
    first = pair.first
    return Check(
        name=pair.title(ranks),
        question=pair.question,
        agree=pair.agree,
        first={} if first is None else {**asdict(first), "advice": first.advice},
        text="" if first is None else str(first),
        loss=pair.loss,
        worst=pair.worst,
        cells=pair.cells,
        suspicious=described(pair.suspicious),
    )


def _died(job: Job) -> str:
    launcher_lines = job.launcher_lines()
    if job.is_late:
        return f"{job.name}: was not ready in time; increase --timeout, or use fewer --steps"
    reason = launcher_lines[-1] if launcher_lines else f"the launcher has ended with status {job.status}"
    lines = [line for line in job.tail(30) if not line.startswith("polyhvdrun: ")][-10:]
    return "\n".join([f"{job.name}: {reason}", *(f"  {line}" for line in lines)])
