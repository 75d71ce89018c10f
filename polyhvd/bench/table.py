"""Prints rows as they come, in the form of nccl-tests, and keeps them for JSON."""

from __future__ import annotations

from typing import Any, TextIO

import polyhvd
from polyhvd.bench.collectives import Framework, Row
from polyhvd.bench.limits import Link

__all__ = ["Table"]

_HEAD = (
    f"#{'size':>11} {'count':>11} {'type':>9} {'redop':>8} {'root':>5} "
    f"{'time':>10} {'algbw':>8} {'busbw':>8} {'copy':>10} {'of limit':>9} {'iters':>6}\n"
    f"#{'(B)':>11} {'(elements)':>11} {'':>9} {'':>8} {'':>5} "
    f"{'(us)':>10} {'(GB/s)':>8} {'(GB/s)':>8} {'(us)':>10}"
)


class Table:
    """Lines for rank 0's output; none on other ranks, or if only JSON was requested."""

    def __init__(self, out: TextIO | None) -> None:
        self._out = out
        self.rows: list[tuple[Row, float]] = []
        self._link: Link | None = None

    def _line(self, text: str) -> None:
        if self._out is not None:
            print(text, file=self._out, flush=True)

    def head(self, framework: Framework, link: Link | None) -> None:
        """The title: the measurement, and the hardware."""
        self._link = link
        self._line(
            f"# polyhvd {polyhvd.__version__}, {polyhvd.size()} ranks, {polyhvd.local_size()} on the host of "
            f"rank 0, {framework.name}; the median of the iterations on the slowest rank"
        )
        if link is not None:
            self._line(
                f"# limit: the link between ranks 0 and {link.peer}: {link.gigabytes_per_s:.2f} GB/s each "
                "way at once by one connection, compared with busbw"
            )
        else:
            self._line("# limit: a copy of as many bytes in memory, by all ranks at once")

    def op(self, op: str) -> None:
        """The rows of a collective follow."""
        self._line(f"#\n# {op}")
        self._line(_HEAD)

    def row(self, row: Row) -> None:
        """Print a row and keep it."""
        part = self.part_of_limit(row)
        self.rows.append((row, part))
        self._line(
            f" {row.bytes:>11} {row.count:>11} {row.dtype:>9} {row.redop:>8} {row.root:>5} "
            f"{1e6 * row.seconds:>10.2f} {row.algbw:>8.3f} {row.busbw:>8.3f} {1e6 * row.copy_s:>10.2f} "
            f"{100 * part:>8.1f}% {row.iterations:>6}"
        )

    def part_of_limit(self, row: Row) -> float:
        """1 where nothing could be faster, by the limit that the head names."""
        if self._link is not None:
            return row.busbw / self._link.gigabytes_per_s
        return row.copy_s / row.seconds

    def foot(self) -> None:
        """The average, as nccl-tests gives it."""
        if self.rows:
            average = sum(row.busbw for row, _ in self.rows) / len(self.rows)
            self._line(f"#\n# average bus bandwidth: {average:.4g} GB/s")

    def as_json(self, framework: Framework) -> dict[str, Any]:
        """Everything, with times in microseconds."""
        return {
            "polyhvd": polyhvd.__version__,
            "ranks": polyhvd.size(),
            "framework": framework.name,
            "link_gb_per_s": None if self._link is None else self._link.gigabytes_per_s,
            "rows": [
                {
                    "op": row.op,
                    "bytes": row.bytes,
                    "count": row.count,
                    "dtype": row.dtype,
                    "redop": row.redop,
                    "root": row.root,
                    "iterations": row.iterations,
                    "time_us": 1e6 * row.seconds,
                    "min_us": 1e6 * row.fastest_s,
                    "max_us": 1e6 * row.slowest_s,
                    "algbw_gb_per_s": row.algbw,
                    "busbw_gb_per_s": row.busbw,
                    "copy_us": 1e6 * row.copy_s,
                    "part_of_limit": part,
                }
                for row, part in self.rows
            ],
        }
