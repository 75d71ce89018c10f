"""Turns samples into a page of tables, a JSON file and plots."""

from __future__ import annotations

import json
import os
import platform
import re
from pathlib import Path
from typing import Any

from benchmarks.interleave import QUIET, QUIET_BLOCKS_MIN, Results, Sample
from benchmarks.parts import Part
from benchmarks.peers import ENTRIES


def machine() -> dict[str, Any]:
    """The machine on which the figures were measured, and its other load."""
    model = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    return {
        "cores": os.cpu_count(),
        "cpu": model[1] if model else platform.machine(),
        "kernel": platform.release(),
        "load_before": os.getloadavg()[0],
    }


def number(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def cell(sample: Sample) -> str:
    spread = f"{number(sample.quantile(0.1))} to {number(sample.quantile(0.9))}"
    mark = "†" if sample.disturbed else ""
    return f"**{number(sample.median)}**{mark}<br>{spread}<br>{len(sample.times)} calls"


def heads(results: Results) -> list[str]:
    """Labels of the columns."""
    return [workload.label for workload, _ in results]


def table(part: Part, results: Results) -> list[str]:
    lines = ["| ms | " + " | ".join(heads(results)) + " |", "|---" + "|---:" * len(results) + "|"]
    for peer in part.peers:
        cells = [cell(samples[peer]) if peer in samples else "" for _, samples in results]
        if any(cells):
            lines.append(f"| {ENTRIES[peer].label} | " + " | ".join(cells) + " |")
    return lines


def ratios(part: Part, results: Results) -> list[str]:
    """How many times as long as the part's first peer the others take."""
    base = part.peers[0]
    lines = [
        f"| times as long as {ENTRIES[base].label} | " + " | ".join(heads(results)) + " |",
        "|---" + "|---:" * len(results) + "|",
    ]
    for peer in part.peers[1:]:
        cells = [
            number(samples[peer].median / samples[base].median) if peer in samples and base in samples else ""
            for _, samples in results
        ]
        if any(cells):
            lines.append(f"| {ENTRIES[peer].label} | " + " | ".join(cells) + " |")
    return lines if len(lines) > 2 else []


def section(part: Part, results: Results) -> list[str]:
    where = "two hosts" if part.hosts > 1 else "one host"
    lines = [f"## {part.name}: {part.title}", "", f"{part.size} ranks on {where}.", ""]
    lines += table(part, results)
    if comparison := ratios(part, results):
        lines += ["", *comparison]
    return [*lines, ""]


class Report:
    """The results of a run so far; written after each part, so that one that is cut off leaves something."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.facts = machine()
        self.parts: list[tuple[Part, Results]] = []
        self.notes: list[str] = []

    def note(self, line: str) -> None:
        """Something that was left out, and why, or what else a reader has to know."""
        if line not in self.notes:
            self.notes.append(line)

    def add(self, part: Part, results: Results) -> list[str]:
        """Take in a part and write everything; returns the part's section."""
        self.parts.append((part, results))
        self.facts["load_after"] = os.getloadavg()[0]
        lines = section(part, results)
        (self.folder / "bench.md").write_text("\n".join(self._page()))
        (self.folder / "bench.json").write_text(json.dumps(self._json(), indent=1) + "\n")
        return lines

    def _page(self) -> list[str]:
        facts = self.facts
        lines = [
            "# Benchmarks",
            "",
            f"{facts['cores']} cores of {facts['cpu']}, Linux {facts['kernel']}; load "
            f"{facts['load_before']:.2f} before and {facts['load_after']:.2f} after. Medians in ms, the 10th "
            "to the 90th percentile, and the number of calls. All peers of a part were alive at once and "
            "took turns in blocks of calls, another one first in each round. Blocks count in which other "
            f"processes had at most {100 * QUIET:.0f} % of the cores; † where there were fewer than "
            f"{QUIET_BLOCKS_MIN} such, and all count.",
            "",
        ]
        for part, results in self.parts:
            lines += section(part, results)
        return lines + [f"- {note}" for note in self.notes] + [""]

    def _json(self) -> dict[str, Any]:
        return {
            "machine": self.facts,
            "notes": self.notes,
            "parts": [
                {
                    "name": part.name,
                    "title": part.title,
                    "ranks": part.size,
                    "hosts": part.hosts,
                    "columns": [
                        {
                            "label": workload.label,
                            "path": workload.path,
                            "bytes": workload.bytes,
                            "peers": {name: sample.summary() for name, sample in samples.items()},
                        }
                        for workload, samples in results
                    ],
                }
                for part, results in self.parts
            ],
        }

    def plot(self) -> str:
        """Draw each part; returns what became of it."""
        try:
            from benchmarks import plots
        except ImportError as error:
            return f"no plots: {error}; pip install 'polyhvd[bench]'"
        names = [plots.draw(self.folder, part, results).name for part, results in self.parts if results]
        return f"plots: {', '.join(names)}"
