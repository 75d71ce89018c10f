"""The command ``python -m benchmarks``: measures polyhvd beside its peers, in turns, in one run."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import data, elastic, launch, on_ray, on_spark, parity
from benchmarks.interleave import Effort, Results, interleaved
from benchmarks.launchers import CannotStart, Place
from benchmarks.parts import PARTS, Part, chosen
from benchmarks.peers import ENTRIES
from benchmarks.report import Report
from benchmarks.workloads import MB
from benchmarks.worlds import World, here
from polyhvd.launch.hosts.findings import huge_pages

#: What has no peers to take turns with.
ALONE = ("data", "elastic", "launch", "parity", "ray", "spark")
NO_HOSTS = "two hosts are namespaces: that needs root, and ip and tc of iproute2"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    names = [*(part.name for part in PARTS), *ALONE]
    parser.add_argument("--only", metavar="PART,...", default="", help=f"of {', '.join(names)}")
    parser.add_argument("--peers", metavar="PEER,...", default="", help=f"of {', '.join(ENTRIES)}")
    parser.add_argument(
        "--part", metavar="PART,...", default="", help=f"with --only elastic: of {', '.join(elastic.PARTS)}"
    )
    parser.add_argument("--max-mb", type=int, default=256, metavar="N", help="largest vector")
    parser.add_argument("--quick", action="store_true", help="three short rounds, and at most 16 MB")
    parser.add_argument("--rounds", type=int, metavar="N", help="blocks of each peer (7)")
    parser.add_argument(
        "--priority",
        action="store_true",
        help="as root, on a machine with other work: let the ranks go first while they are timed, and leave "
        "twice as long to the others after each block",
    )
    parser.add_argument(
        "--horovod",
        metavar="PYTHON",
        default=os.environ.get("BENCH_HOROVOD", sys.executable),
        help="a Python that has Horovod with PyTorch (this one)",
    )
    parser.add_argument("--pin", action="store_true", help="keep each rank on one core")
    parser.add_argument("--output", type=Path, default=Path("build/bench"), metavar="FOLDER")
    options = parser.parse_args()
    if options.priority and os.geteuid() != 0:
        parser.error("--priority needs root")
    horovod = shutil.which(options.horovod)
    if horovod is None:
        parser.error(f"--horovod {options.horovod}: no such program")
    options.horovod = os.path.abspath(horovod)  # ranks start in another folder
    options.only = [name for name in options.only.split(",") if name]
    options.peers = [name for name in options.peers.split(",") if name]
    options.part = [name for name in options.part.split(",") if name]
    listed = ((options.only, names), (options.peers, list(ENTRIES)), (options.part, list(elastic.PARTS)))
    for given, known in listed:
        if wrong := sorted(set(given) - set(known)):
            parser.error(f"{', '.join(wrong)}: not one of {', '.join(known)}")
    return options


@contextlib.contextmanager
def hosts(count: int) -> Iterator[Sequence[Place]]:
    """This host, or two that a cable joins; raises CannotStart if two cannot be made."""
    if count == 1:
        yield here()
        return
    from tests.harness import netns

    if not netns.available() or shutil.which("tc") is None:
        raise CannotStart(NO_HOSTS)
    with netns.two_hosts() as places:
        yield places


def limit(places: Sequence[Place], rate_mbit: int) -> None:
    """Limit both directions of the cable; 0 takes the limit away."""
    for place in places if len(places) > 1 else ():
        subprocess.run(place.command("tc", "qdisc", "del", "dev", "eth0", "root"), capture_output=True)
        if rate_mbit:
            bucket = ["tbf", "rate", f"{rate_mbit}mbit", "burst", "128kb", "latency", "50ms"]
            command = place.command("tc", "qdisc", "add", "dev", "eth0", "root", *bucket)
            subprocess.run(command, check=True)


class Worlds:
    """The peers of the parts that follow each other on equal terms, all alive at once."""

    def __init__(self, parts: Sequence[Part], places: Sequence[Place], report: Report) -> None:
        self.running: dict[str, World] = {}
        for peer in dict.fromkeys(peer for part in parts for peer in part.peers):
            try:
                world = World(peer, parts[0].size, places, report.folder / "logs")
            except CannotStart as error:
                say(report, f"without {ENTRIES[peer].label}: {error}")
                continue
            self.running[peer] = world
            if versions := world.launcher.versions:
                report.note(f"{world.label}: {versions}")

    def close(self) -> None:
        for world in self.running.values():
            world.close()


def say(report: Report, line: str) -> None:
    report.note(line)
    print(f"bench: {line}", file=sys.stderr, flush=True)


def run_part(part: Part, worlds: dict[str, World], effort: Effort, report: Report) -> Results:
    mine = {peer: worlds[peer] for peer in part.peers if peer in worlds}
    results: Results = []
    together = [part.workloads] if part.in_turns else [[workload] for workload in part.workloads]
    for workloads in together:
        labels = ", ".join(workload.label for workload in workloads)
        print(f"bench: {part.name}: {labels}", file=sys.stderr, flush=True)
        results += interleaved(mine, workloads, effort, lambda line: say(report, line))
    return results


def main() -> int:
    options = arguments()
    for name in sorted({*ALONE} & {*options.only}):
        if len(options.only) > 1:
            raise SystemExit(f"bench: --only {name} measures jobs, one after the other; pass no other --only")
        if name == "launch":
            return launch.main(options.output, quick=options.quick, priority=options.priority)
        if name == "data":
            return data.main(options.output, quick=options.quick)
        if name == "ray":
            return on_ray.main(options.output, quick=options.quick)
        if name == "spark":
            return on_spark.main(options.output, quick=options.quick)
        if name == "parity":
            return parity.main(options.output, quick=options.quick)
        return elastic.main(options.output, quick=options.quick, parts=options.part or elastic.PARTS)
    rounds = options.rounds or (3 if options.quick else 7)
    block_s = 0.05 if options.quick or options.priority else 0.15
    fixed = options.quick or options.priority
    effort = Effort(rounds, rounds if fixed else 3 * rounds, block_s, 2.0 if options.priority else 0.0)
    os.environ["BENCH_PRIORITY"] = "1" if options.priority else "0"
    bytes_max = min(options.max_mb, 16 if options.quick else options.max_mb) * MB
    os.environ["BENCH_HOROVOD"] = options.horovod
    os.environ["BENCH_PIN"] = "1" if options.pin else "0"
    report = Report(options.output)
    report.note(f"Transparent huge pages: {huge_pages() or 'unknown'}.")
    if options.pin:
        report.note("Each rank was kept on one core.")
    if options.priority:
        report.note("The ranks had priority over other processes of the machine while they were timed.")
    parts = [part for part in chosen(options.only, options.peers, bytes_max) if part.peers]
    for (_, count), group in itertools.groupby(parts, key=lambda part: (part.size, part.hosts)):
        together = list(group)
        try:
            with hosts(count) as places, contextlib.closing(Worlds(together, places, report)) as worlds:
                for part in together:
                    limit(places, part.rate_mbit)
                    results = run_part(part, worlds.running, effort, report)
                    print("\n".join(report.add(part, results)), flush=True)
        except CannotStart as error:
            say(report, f"without {', '.join(part.name for part in together)}: {error}")
    print(report.plot())
    print(f"written: {options.output / 'bench.md'}, {options.output / 'bench.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
