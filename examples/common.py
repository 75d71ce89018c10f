"""Common code of the examples that needs no framework: arguments, data, progress and plot."""

from __future__ import annotations

import argparse
import gzip
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")  # of Debian's package
REDRAW_S = 0.1


def arguments(
    description: str, *, epochs: int, batch_size: int, lr: float, files: bool = False
) -> argparse.Namespace:
    """Reads the command line; those given here are the defaults. With ``files`` it may name weights."""
    parser = _parser(description, epochs, batch_size, lr)
    if files:
        parser.set_defaults(data="fashion-mnist")
        parser.add_argument("--images", type=_positive, default=60000, help="to train on and to test with")
        parser.add_argument("--start", metavar="FILE", help="weights to begin with")
        parser.add_argument("--save", metavar="FILE", help="where rank 0 writes the weights at the end")
    return parser.parse_args()


def elastic_arguments(description: str, *, epochs: int, batch_size: int, lr: float) -> argparse.Namespace:
    """Likewise, for jobs that are killed."""
    parser = _parser(description, epochs, batch_size, lr)
    parser.add_argument("--checkpoint", metavar="FOLDER", help="where to write checkpoints, and resume from")
    return parser.parse_args()


def ray_arguments(description: str, *, epochs: int, batch_size: int, lr: float) -> argparse.Namespace:
    """Likewise, for jobs on Ray."""
    parser = _parser(description, epochs, batch_size, lr)
    parser.add_argument("--workers", type=_positive, default=2, help="number of ranks")
    parser.add_argument(
        "--address", help="of a cluster, such as auto; without it, Ray starts on this machine"
    )
    parser.add_argument("--folder", help="where to write files that all nodes can read")
    return parser.parse_args()


def spark_arguments(description: str, *, epochs: int, batch_size: int, lr: float) -> argparse.Namespace:
    """Likewise, for jobs on Spark."""
    parser = _parser(description, epochs, batch_size, lr)
    parser.add_argument("--workers", type=_positive, default=2, help="number of ranks")
    parser.add_argument("--folder", help="path or URL that all executors can read and write")
    return parser.parse_args()


def spark_session(builders, args: argparse.Namespace):
    """The session of spark-submit; without it, one with a thread of this machine for each rank."""
    builder = builders.builder.appName("digits").config("spark.ui.showConsoleProgress", "false")
    if "PYSPARK_GATEWAY_PORT" not in os.environ:  # which spark-submit sets
        builder = builder.master(f"local[{args.workers}]").config("spark.ui.enabled", "false")
    return builder.getOrCreate()


def frame(spark, images: Images):
    """A DataFrame with columns ``pixels`` and ``label``."""
    rows = zip(images.pixels.reshape(len(images), -1).tolist(), images.labels.tolist(), strict=True)
    return spark.createDataFrame(list(rows), "pixels array<float>, label int")


def _parser(description: str, epochs: int, batch_size: int, lr: float) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--epochs", type=_positive, default=epochs, help="passes over the training images")
    parser.add_argument(
        "--batch-size", type=_positive, default=batch_size, help="images a step, on each rank"
    )
    parser.add_argument("--lr", type=float, default=lr, help="learning rate of one rank")
    parser.add_argument("--data", choices=["digits", "fashion-mnist"], default="digits", help="data set")
    parser.add_argument("--plot", metavar="FILE.png", help="where rank 0 draws the loss curve")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and the order of images")
    return parser


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)


@dataclass
class Images:
    """Grey images from 0 to 1, float32 [n, height, width], and their classes, int64 [n]."""

    pixels: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def first(self, number: int) -> Images:
        """So many of them."""
        return Images(self.pixels[:number], self.labels[:number])

    def shard(self, rank: int, size: int, *, even: bool = True) -> Images:
        """Every size-th image. All ranks get the same number if even, so all take as many steps."""
        end = len(self) // size * size if even else len(self)
        return Images(self.pixels[rank:end:size], self.labels[rank:end:size])


def load(name: str) -> tuple[Images, Images]:
    """Images to train on and to test with: the same ones on every rank and in every run."""
    return _digits() if name == "digits" else _fashion_mnist()


def _digits() -> tuple[Images, Images]:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    pixels = (pixels[order] / 16).astype(np.float32).reshape(-1, 8, 8)
    labels = labels[order].astype(np.int64)
    return Images(pixels[360:], labels[360:]), Images(pixels[:360], labels[:360])


def _fashion_mnist() -> tuple[Images, Images]:
    def read(name: str, header: int) -> np.ndarray:
        with gzip.open(FASHION_MNIST / f"{name}-ubyte.gz") as file:
            return np.frombuffer(file.read(), np.uint8, offset=header)

    def part(name: str) -> Images:
        pixels = read(f"{name}-images-idx3", 16).reshape(-1, 28, 28).astype(np.float32) / 255
        return Images(pixels, read(f"{name}-labels-idx1", 8).astype(np.int64))

    try:
        return part("train"), part("t10k")
    except FileNotFoundError as missing:
        sys.exit(f"{missing.filename} is missing; as root: apt-get install dataset-fashion-mnist")


class Progress:
    """A bar and a line per epoch on rank 0; silent elsewhere. ``images`` are those of this rank."""

    def __init__(self, args: argparse.Namespace, images: int, rank: int, size: int) -> None:
        self._args, self._rank, self._size = args, rank, size
        self._images = images * size
        self._losses: list[float] = []
        self._console = Console(width=72, highlight=False)
        # The launcher shows an unfinished line on a terminal, and its last state in a file.
        self._moves = rank == 0 and (self._console.is_terminal or size > 1)
        columns = TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn()
        self._bar = Bar(*columns, TextColumn("{task.fields[note]}"), console=self._console)
        self._task = self._bar.add_task("", total=-(-images // args.batch_size), note="")
        self._began = self._ended = self._drawn = time.perf_counter()
        self._begin_epoch()

    def step(self) -> None:
        """A batch is done."""
        self._bar.advance(self._task)
        if self._moves and time.perf_counter() - self._drawn > REDRAW_S:
            self._draw(end="")

    def end_epoch(self, loss: float) -> None:
        """All batches are done; their mean loss was ``loss``."""
        self._losses.append(loss)
        self._ended = time.perf_counter()
        if self._rank == 0:
            self._bar.update(self._task, note=f"loss {loss:.4f}")
            self._draw(end="\n")
        if len(self._losses) < self._args.epochs:
            self._begin_epoch()

    def finish(self, accuracy: float) -> None:
        """Prints the last line, after drawing the plot if one is wanted."""
        images_per_s = self._images * len(self._losses) / (self._ended - self._began)
        if self._rank == 0:
            if self._args.plot:
                self._plot(self._args.plot)
            ranks = f"{self._size} rank{'s' if self._size > 1 else ''}"
            print(f"test accuracy {accuracy:.4f}, {ranks}, {images_per_s:.0f} images/s", flush=True)

    def _begin_epoch(self) -> None:
        number = f"epoch {len(self._losses) + 1:>{len(str(self._args.epochs))}}/{self._args.epochs}"
        self._bar.reset(self._task, description=number, note="")

    def _draw(self, *, end: str) -> None:
        self._drawn = time.perf_counter()
        with self._console.capture() as captured:
            self._console.print(self._bar.get_renderable())
        start = "\r" if self._moves else ""
        print(start + captured.get().rstrip(), end=end, flush=True)

    def _plot(self, path: str) -> None:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt

        figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
        axes.plot(range(1, len(self._losses) + 1), self._losses, marker="o")
        axes.set(xlabel="epoch", ylabel="training loss", title=f"{self._args.data}, {self._size} ranks")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        figure.savefig(path, dpi=120)
