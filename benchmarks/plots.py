"""Draws the parts of a run. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.parts import Part
from benchmarks.peers import ENTRIES
from benchmarks.report import Results


def draw(folder: Path, part: Part, results: Results) -> Path:
    """Write a PNG of a part: lines over the size where there are sizes, else bars."""
    sized = all(workload.path in ("blocking", "async") for workload, _ in results) and part.name != "dtypes"
    figure, axes = plt.subplots(figsize=(9, 5))
    axes.set_prop_cycle(color=plt.get_cmap("tab20").colors)  # there are more peers than default colours
    (_lines if sized else _bars)(axes, part, results)
    axes.set_title(part.title)
    axes.set_ylabel("ms")
    axes.set_yscale("log")
    axes.grid(True, alpha=0.3)
    axes.legend(fontsize="small")
    path = folder / f"{part.name}.png"
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _lines(axes: plt.Axes, part: Part, results: Results) -> None:
    for peer in part.peers:
        points = [(w.bytes, samples[peer]) for w, samples in results if peer in samples]
        if not points:
            continue
        sizes = [size for size, _ in points]
        (line,) = axes.plot(sizes, [s.median for _, s in points], marker="o", label=ENTRIES[peer].label)
        low, high = ([s.quantile(q) for _, s in points] for q in (0.1, 0.9))
        axes.fill_between(sizes, low, high, color=line.get_color(), alpha=0.15)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("bytes")


def _bars(axes: plt.Axes, part: Part, results: Results) -> None:
    shown = [peer for peer in part.peers if any(peer in samples for _, samples in results)]
    width = 0.8 / max(1, len(shown))
    for position, peer in enumerate(shown):
        at = [c + position * width for c, (_, samples) in enumerate(results) if peer in samples]
        found = [samples[peer] for _, samples in results if peer in samples]
        middle = [s.median for s in found]
        spread = [
            [max(0.0, m - s.quantile(0.1)) for m, s in zip(middle, found, strict=True)],
            [max(0.0, s.quantile(0.9) - m) for m, s in zip(middle, found, strict=True)],
        ]
        axes.bar(at, middle, width, yerr=spread, label=ENTRIES[peer].label)
    axes.set_xticks(
        range(len(results)), [w.label for w, _ in results], rotation=30, ha="right", fontsize="small"
    )
