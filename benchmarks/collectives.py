"""Latency of allreduce through the whole queue, beside torch.distributed on gloo, interleaved.

Run with ``make bench``, or for other numbers of ranks::

    polyhvdrun -np 4 python benchmarks/collectives.py --output build/bench.md

Every figure is a median over calls of float32 in place, in milliseconds. The peers take turns call
by call, so that the machine's noise falls on all alike.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

SIZES = (1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20)
BUDGET_S = 3.0  # per size, for all peers together

Call = Callable[[], None]


def resnet50_sizes() -> list[int]:
    """Elements of the 161 parameters of ResNet-50 (He et al. 2015, arXiv:1512.03385)."""
    sizes = [9408, 64, 64]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            out = width * 4
            sizes += [width * channels, width, width, width * width * 9, width, width, out * width, out, out]
            if block == 0:
                sizes += [out * channels, out, out]
            channels = out
    return [*sizes, 2048 * 1000, 1000]


def label(size: int) -> str:
    return f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} KB"


def interleaved(calls: dict[str, Call], barrier: Call, agree: Callable[[int], int]) -> dict[str, float]:
    """Median milliseconds of each call, all in turn."""
    slowest = 0.0
    for call in calls.values():
        call()
        start = time.perf_counter()
        call()
        slowest += time.perf_counter() - start
    rounds = agree(max(5, min(2000, int(BUDGET_S / max(slowest, 1e-6)))))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            barrier()
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: 1e3 * statistics.median(values) for name, values in times.items()}


def back_to_back(call: Call, count: int = 20000) -> float:
    """Median milliseconds of one small call after the other, as in a training loop."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


class Peers:
    """The libraries under test, each as functions of a tensor and of a list of tensors."""

    def __init__(self) -> None:
        import polyhvd.numpy

        self.hvd = polyhvd.numpy
        self.hvd.init()
        self.torch_hvd = None
        self.torch = None
        try:
            import polyhvd.torch
            import torch
            import torch.distributed as dist

            torch.set_num_threads(1)
            self.torch, self.torch_hvd = torch, polyhvd.torch
            if self.hvd.size() > 1 and dist.is_available() and dist.is_gloo_available():
                port = self.hvd.broadcast_object(_free_port() if self.hvd.rank() == 0 else None)
                dist.init_process_group(
                    "gloo",
                    init_method=f"tcp://127.0.0.1:{port}",
                    rank=self.hvd.rank(),
                    world_size=self.hvd.size(),
                )
                self.gloo = dist
            else:
                self.gloo = None
        except ImportError:
            self.gloo = None

    def single(self, size: int) -> dict[str, Call]:
        hvd = self.hvd
        array = np.ones(size // 4, np.float32)
        name = f"bench.{size}"
        calls: dict[str, Call] = {"polyhvd.numpy": lambda: hvd.allreduce_(array, name=name, op=hvd.Sum)}
        if self.torch is not None:
            tensor = self.torch.ones(size // 4)
            torch_hvd = self.torch_hvd
            calls["polyhvd.torch"] = lambda: torch_hvd.allreduce_(tensor, name=name, op=hvd.Sum)
            if self.gloo is not None:
                other = self.torch.ones(size // 4)
                calls["torch gloo"] = lambda: self.gloo.all_reduce(other)
        return calls

    def many(self, sizes: list[int]) -> dict[str, Call]:
        hvd = self.hvd
        arrays = [np.ones(n, np.float32) for n in sizes]

        def one_by_one(module: object, tensors: list[object]) -> None:
            handles = [
                module.allreduce_async_(t, name=f"gradient.{i}", op=hvd.Sum)  # type: ignore[attr-defined]
                for i, t in enumerate(tensors)
            ]
            for handle in handles:
                module.synchronize(handle)  # type: ignore[attr-defined]

        calls: dict[str, Call] = {"polyhvd.numpy": lambda: one_by_one(hvd, arrays)}
        if self.torch is not None:
            tensors = [self.torch.ones(n) for n in sizes]
            calls["polyhvd.torch"] = lambda: one_by_one(self.torch_hvd, tensors)
            if self.gloo is not None:
                others = [self.torch.ones(n) for n in sizes]

                def gloo() -> None:
                    work = [self.gloo.all_reduce(t, async_op=True) for t in others]
                    for item in work:
                        item.wait()

                calls["torch gloo"] = gloo
        return calls


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def table(rows: dict[str, dict[str, float]], peers: list[str], ranks: int) -> str:
    columns = list(rows)
    lines = [
        f"{ranks} ranks, {os.cpu_count()} cores, {platform.machine()}, float32 in place, medians in ms",
        "",
        "| | " + " | ".join(columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for peer in peers:
        cells = [f"{rows[c][peer]:.4g}" if peer in rows[c] else "-" for c in columns]
        lines.append(f"| {peer} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def measure(output: Path | None) -> None:
    peers = Peers()
    hvd = peers.hvd
    rows: dict[str, dict[str, float]] = {}
    small = peers.single(1 << 10)
    rows["1 KB back to back"] = {
        name: back_to_back(call, 2000 if "gloo" in name else 20000) for name, call in small.items()
    }
    for size in SIZES:
        rows[label(size)] = interleaved(peers.single(size), hvd.barrier, hvd.broadcast_object)
    rows["161 tensors (102 MB)"] = interleaved(
        peers.many(resnet50_sizes()), hvd.barrier, hvd.broadcast_object
    )
    if hvd.rank() == 0:
        text = table(rows, list(small), hvd.size())
        print(text)
        if output is not None:
            output.write_text(text)
    hvd.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    parser.add_argument("-np", type=int, default=2, help="ranks, when it is not run by polyhvdrun")
    arguments = parser.parse_args()
    if "POLYHVD_RANK" in os.environ:
        measure(arguments.output)
        return
    command = [sys.executable, "-m", "polyhvd.launch", "-np", str(arguments.np), sys.executable, *sys.argv]
    sys.exit(subprocess.call(command))


if __name__ == "__main__":
    main()
