"""The cost of loading: ``python -m benchmarks --only data``.

Each reader of :mod:`benchmarks.data_readers` is a process, or two with half of the rows each. They read
epochs in turns, so that the machine's noise falls on all of them, and a ratio is the median of those of the
rounds. Readers whose library cannot be imported are left out; ``make bench-peers`` installs them.
"""

from __future__ import annotations

import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data_costs import COSTS
from benchmarks.data_readers import BYTES, IMAGE_READERS, IMAGES, ROW_READERS, ROWS
from benchmarks.launchers import ROOT

_FIRST_S, _EPOCH_S, _COST_S = 300.0, 120.0, 600.0
_ROUNDS = 7
PEERS = ROOT / "build" / "peers"
#: The environment of ``tools/bench_peers.py`` that has a reader; others are in this one.
ENVIRONMENTS = {
    "datasets": "data",
    "streaming": "streaming",
    "litdata": "data",
    "petastorm": "petastorm",
    "ray data": "ray",
}


def write(folder: Path, *, rows: int = ROWS, images: int = IMAGES) -> None:
    """Write files of Parquet and Arrow, of which readers make those of other formats."""
    import pyarrow as pa

    from polyhvd.data import write_parquet

    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (rows, BYTES), np.uint8)
    image[rng.random(image.shape) < 0.5] = 0
    label = rng.integers(0, 10, rows)
    for part in range(4):
        own = slice(part * rows // 4, (part + 1) * rows // 4)
        path = folder / "rows" / f"{part}.parquet"
        write_parquet({"image": image[own], "label": label[own]}, path, rows_per_group=1000)
    column = pa.FixedSizeBinaryArray.from_buffers(pa.binary(BYTES), rows, [None, pa.py_buffer(image)])
    _write_arrow(folder / "rows.arrow", pa.table({"image": column, "label": label}))
    pictures = [_jpeg(rng) for _ in range(images)]
    numbers = rng.integers(0, 10, images)
    for part in range(2):
        columns = {"image": pictures[part::2], "label": numbers[part::2]}
        write_parquet(columns, folder / "images" / f"{part}.parquet", rows_per_group=16)
    _write_arrow(folder / "images.arrow", pa.table({"image": pictures, "label": numbers}))


def _jpeg(rng: Any) -> bytes:
    """An image of 480 x 640 pixels and about 100 KB."""
    from PIL import Image

    small = Image.fromarray(rng.integers(0, 256, (80, 107, 3), np.uint8)).resize(
        (640, 480), Image.Resampling.BICUBIC
    )
    noisy = np.asarray(small, np.int16) + rng.integers(-8, 9, (480, 640, 3))
    file = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=82)
    return file.getvalue()


def _write_arrow(path: Path, table: Any) -> None:
    import pyarrow as pa

    with pa.ipc.new_file(path, table.schema) as out:
        out.write_table(table.combine_chunks())


def write_records(folder: Path) -> None:
    """Two files of TFRecord of each kind, where TensorFlow is installed."""
    import pyarrow as pa

    for source, target in (("rows", "tfrecord"), ("images", "tfrecord-images")):
        with pa.memory_map(str(folder / f"{source}.arrow")) as opened:
            table = pa.ipc.open_file(opened).read_all()
            images, labels = table["image"].to_pylist(), table["label"].to_pylist()
        with suppress(ImportError):
            _write_records(folder / target, images, labels)


def _write_records(folder: Path, images: list[bytes], labels: list[int]) -> None:
    import tensorflow as tf

    folder.mkdir()
    writers = [tf.io.TFRecordWriter(str(folder / str(part))) for part in range(2)]
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        feature = {
            "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[image])),
            "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
        }
        row = tf.train.Example(features=tf.train.Features(feature=feature))
        writers[number % 2].write(row.SerializeToString())
    for writer in writers:
        writer.close()


class Reader:
    """The processes of a reader."""

    def __init__(self, name: str, folder: Path, size: int) -> None:
        self.name = name
        self.speeds: list[float] = []  # rows a second, of each round
        self.by_cpu: list[float] = []  # rows for each second of a core
        environment = ENVIRONMENTS.get(name)
        python = sys.executable if environment is None else str(PEERS / environment / "bin" / "python")
        command = [python, "-m", "benchmarks.data_readers", name, str(folder)]
        quiet = {"CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONWARNINGS": "ignore"}
        #: What the processes print besides.
        self.log = (folder / f"{name.replace(' ', '_')}.log").open("w+")
        self._processes = [
            subprocess.Popen(
                [*command, str(rank), str(size)],
                cwd=ROOT,
                env={**os.environ, **quiet},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.log,
                text=True,
            )
            for rank in range(size)
        ]

    def answers(self, limit_s: float) -> list[dict[str, Any]]:
        """A line of each process; raises RuntimeError."""
        timer = threading.Timer(limit_s, self.close)
        timer.start()
        lines = [process.stdout.readline() for process in self._processes if process.stdout is not None]
        timer.cancel()
        if not all(lines):
            self.log.seek(0)
            raise RuntimeError(
                f"without {self.name}: {(self.log.read().strip() or 'no answer').splitlines()[-1]}"
            )
        return [json.loads(line) for line in lines]

    def read(self) -> None:
        """Read an epoch."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        answers = self.answers(_EPOCH_S)
        rows = sum(each["rows"] for each in answers)
        self.speeds.append(rows / max(each["s"] for each in answers))
        self.by_cpu.append(rows / max(0.01, sum(each["cpu_s"] for each in answers)))

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def measure(names: Iterable[str], folder: Path, size: int, rounds: int) -> list[Reader]:
    """Readers with their speeds; those that fail are reported and left out."""
    started = [reader for name in names if (reader := _started(name, folder, size)) is not None]
    readers = []
    for reader in started:
        try:
            reader.answers(_FIRST_S)
            readers.append(reader)
        except RuntimeError as error:
            print(f"bench: {error}", file=sys.stderr, flush=True)
            reader.close()
    try:
        for turn in range(rounds):
            for number in range(len(readers)):
                readers[(turn + number) % len(readers)].read()
    finally:
        for reader in readers:
            reader.close()
    return readers


def _started(name: str, folder: Path, size: int) -> Reader | None:
    try:
        return Reader(name, folder, size)
    except OSError:
        print(f"bench: without {name}: make bench-peers installs it", file=sys.stderr, flush=True)
        return None


def table(readers: list[Reader]) -> list[str]:
    """Rows of speeds and ratios; the first reader is compared with the others."""
    first, *_ = readers
    lines = ["| reader | rows/s | polyhvd / reader | rows by a core in 1 s | polyhvd / reader |"]
    lines += ["|---|---:|---:|---:|---:|"]
    for reader in readers:
        cells = []
        for own, its in ((first.speeds, reader.speeds), (first.by_cpu, reader.by_cpu)):
            ratio = statistics.median(one / other for one, other in zip(own, its, strict=True))
            cells += [f"{statistics.median(its):,.0f}", f"{ratio:.2f}"]
        lines.append(f"| {reader.name.strip()} | {' | '.join(cells)} |")
    return lines


def _cost(name: str, folder: Path) -> dict[str, float] | None:
    command = [sys.executable, "-m", "benchmarks.data_costs", name, str(folder)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=_COST_S)
    found: dict[str, float] | None = json.loads(done.stdout) if done.returncode == 0 else None
    return found


def main(
    folder: Path,
    *,
    quick: bool = False,
    readers: Iterable[str] = (*ROW_READERS, *IMAGE_READERS),
    costs: Iterable[str] = tuple(COSTS),
) -> int:
    """Measure the readers that are installed, print the tables, and write data.md and data.json."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    chosen = set(readers)
    lines = ["# Loading data", ""]
    kept: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        write(Path(scratch), rows=4_000 if quick else ROWS, images=32 if quick else IMAGES)
        if chosen & {"tf.data", "tf.data "}:
            write_records(Path(scratch))
        for what, names in (("rows of 784 bytes", ROW_READERS), ("images of 100 KB", IMAGE_READERS)):
            wanted = [name for name in names if name in chosen]
            for size in (1, 2):
                found = measure(wanted, Path(scratch), size, 2 if quick else _ROUNDS)
                lines += [f"## {what}, {size} process{'es' * (size > 1)}", "", *table(found), ""]
                kept.append(
                    {
                        "what": what,
                        "size": size,
                        "rows_s": {reader.name: reader.speeds for reader in found},
                        "rows_cpu_s": {reader.name: reader.by_cpu for reader in found},
                    }
                )
                print("\n".join(lines[-len(found) - 5 :]), flush=True)
        for name in costs:
            if (cost := _cost(name, Path(scratch))) is not None:
                kept.append({name: cost})
                lines.append(f"{name}: {json.dumps(cost)}")
                print(lines[-1], flush=True)
    (folder / "data.md").write_text("\n".join([*lines, ""]))
    (folder / "data.json").write_text(json.dumps(kept, indent=1) + "\n")
    return 0
