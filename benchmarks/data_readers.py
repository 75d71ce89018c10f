"""A process that reads an epoch whenever it is asked to:
``python -m benchmarks.data_readers READER FOLDER RANK SIZE``, with the interpreter that has the library.

It writes a line of JSON after each line that it gets: the rows that it has read, the seconds, and those of
all cores. Batches have 128 rows of 784 bytes and a label, or 16 images that are decoded. They are
shuffled, and the files are in the page cache.
"""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROWS, BYTES, BATCH = 60_000, 784, 128
IMAGES, IMAGE_BATCH = 160, 16
BUFFER = 8192
#: An epoch: the number of rows of each batch.
Epoch = Iterator[int]
Reader = Callable[[Path, int, int], Callable[[int], Epoch]]


def decoded(data: Any) -> Any:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(data)))


def floor(folder: Path, rank: int, size: int) -> Callable[[int], Epoch]:
    """A plain scan with a shuffle buffer."""
    from pyarrow import dataset

    files = sorted((folder / "rows").glob("*.parquet"))[rank::size]

    def epoch(number: int) -> Epoch:
        rng = np.random.default_rng(number)
        kept: list[tuple[Any, Any]] = []
        rows = 0
        for part in dataset.dataset(files).to_batches(batch_size=1024):
            column = part.column("image")
            image = np.frombuffer(column.buffers()[1], np.uint8, len(part) * BYTES, column.offset * BYTES)
            kept.append((image.reshape(-1, BYTES), part.column("label").to_numpy()))
            rows += len(part)
            if rows >= BUFFER:
                yield from mixed(kept, rng)
                kept, rows = [], 0
        if kept:
            yield from mixed(kept, rng)

    return epoch


def mixed(kept: list[tuple[Any, Any]], rng: Any) -> Epoch:
    images, labels = (np.concatenate(parts) for parts in zip(*kept, strict=True))
    order = rng.permutation(len(labels))
    for first in range(0, len(labels), BATCH):
        own = order[first : first + BATCH]
        _ = images[own]
        yield len(labels[own])


def polyhvd(folder: Path, rank: int, size: int) -> Callable[[int], Epoch]:
    from polyhvd.data import ParquetLoader

    loader = ParquetLoader(folder / "rows", batch_size=BATCH, seed=1, placement=lambda: (rank, size))

    def epoch(number: int) -> Epoch:
        loader.set_epoch(number)
        for batch in loader:
            yield len(batch["label"])

    return epoch


def arrow_rows(folder: Path, name: str) -> Any:
    """A table of Arrow IPC in a memory map."""
    import pyarrow as pa

    return pa.ipc.open_file(pa.memory_map(str(folder / f"{name}.arrow"))).read_all().combine_chunks()


def torch_with(workers: int, *, images: bool = False) -> Reader:
    """PyTorch's DataLoader over Arrow memory maps."""

    def reader(folder: Path, rank: int, size: int) -> Callable[[int], Epoch]:
        import torch
        from torch.utils.data import DataLoader, Dataset, DistributedSampler

        table = arrow_rows(folder, "images" if images else "rows")
        labels = table["label"].to_numpy()
        column = table["image"].chunk(0)

        class Rows(Dataset):  # type: ignore[type-arg]
            def __len__(self) -> int:
                return len(labels)

            def __getitem__(self, index: int) -> Any:
                if images:
                    return decoded(column[index].as_py()), labels[index]
                return whole[index], labels[index]

        if not images:
            whole = np.frombuffer(column.buffers()[1], np.uint8, len(labels) * BYTES).reshape(-1, BYTES)
        torch.set_num_threads(1)
        sampler = DistributedSampler(Rows(), size, rank, seed=1)
        batch = IMAGE_BATCH if images else BATCH
        keep = {"persistent_workers": True} if workers else {}
        loader = DataLoader(Rows(), batch, sampler=sampler, num_workers=workers, **keep)  # type: ignore[arg-type]

        def epoch(number: int) -> Epoch:
            sampler.set_epoch(number)
            for _, label in loader:
                yield len(label)

        return epoch

    return reader


def hf_datasets(folder: Path, rank: int, size: int) -> Callable[[int], Epoch]:
    """Hugging Face's, over its own memory map."""
    from datasets import Array2D, Dataset, Features, Value, disable_progress_bars
    from datasets.distributed import split_dataset_by_node

    disable_progress_bars()
    kept = folder / "hf"
    if not kept.exists():
        table = arrow_rows(folder, "rows")
        whole = np.frombuffer(table["image"].chunk(0).buffers()[1], np.uint8, len(table) * BYTES)
        columns = {"image": whole.reshape(-1, 28, 28), "label": table["label"].to_numpy()}
        features = Features({"image": Array2D((28, 28), "uint8"), "label": Value("int64")})
        Dataset.from_dict(columns, features=features).save_to_disk(str(kept))
    rows = Dataset.load_from_disk(str(kept)).to_iterable_dataset(num_shards=8)
    rows = split_dataset_by_node(rows, rank, size).with_format("numpy").shuffle(seed=1, buffer_size=BUFFER)
    batches = rows.batch(BATCH)

    def epoch(number: int) -> Epoch:
        batches.set_epoch(number)
        for batch in batches:
            yield len(batch["label"])

    return epoch


def tfdata(folder: Path, rank: int, size: int) -> Callable[[int], Epoch]:
    """tf.data from TFRecord files."""
    import tensorflow as tf

    names = sorted(map(str, (folder / "tfrecord").glob("*")))[rank::size]
    form = {"image": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}

    def parsed(rows: Any) -> Any:
        found = tf.io.parse_example(rows, form)
        return tf.io.decode_raw(found["image"], tf.uint8, fixed_length=BYTES), found["label"]

    def epoch(number: int) -> Epoch:
        rows = (
            tf.data.TFRecordDataset(names).shuffle(BUFFER, seed=number).batch(BATCH).map(parsed).prefetch(8)
        )
        for _, label in rows:
            yield int(label.shape[0])

    return epoch


def tfdata_images(folder: Path, rank: int, size: int) -> Callable[[int], Epoch]:
    """tf.data with TensorFlow's decoder, one call at a time."""
    import tensorflow as tf

    names = sorted(map(str, (folder / "tfrecord-images").glob("*")))[rank::size]
    form = {"image": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}

    def parsed(row: Any) -> Any:
        found = tf.io.parse_single_example(row, form)
        return tf.io.decode_jpeg(found["image"], 3), found["label"]

    def epoch(number: int) -> Epoch:
        for _, label in tf.data.TFRecordDataset(names).shuffle(IMAGES, number).map(parsed).batch(IMAGE_BATCH):
            yield int(label.shape[0])

    return epoch


def gluon(folder: Path, rank: int, size: int) -> Callable[[int], Epoch]:
    """Gluon's DataLoader over an array in memory."""
    import polyhvd.mxnet  # noqa: F401  which lets it work with this NumPy
    from mxnet.gluon.data import ArrayDataset, DataLoader

    table = arrow_rows(folder, "rows")
    whole = np.frombuffer(table["image"].chunk(0).buffers()[1], np.uint8, len(table) * BYTES)
    rows = ArrayDataset(whole.reshape(-1, BYTES)[rank::size], table["label"].to_numpy()[rank::size])
    loader = DataLoader(rows, batch_size=BATCH, shuffle=True)

    def epoch(number: int) -> Epoch:
        for _, label in loader:
            yield len(label)

    return epoch


def streaming(folder: Path, rank: int, size: int) -> Callable[[int], Epoch]:
    """MosaicML's, from its own format."""
    import torch
    from streaming import MDSWriter, StreamingDataset

    kept = folder / f"mds-{rank}-{size}"
    if not kept.exists():
        table = arrow_rows(folder, "rows")
        whole = np.frombuffer(table["image"].chunk(0).buffers()[1], np.uint8, len(table) * BYTES)
        labels = table["label"].to_numpy()
        form = {"image": f"ndarray:uint8:{BYTES}", "label": "int64"}
        with MDSWriter(out=str(kept), columns=form) as out:
            for index in range(rank, len(labels), size):
                out.write({"image": whole[index * BYTES : (index + 1) * BYTES], "label": labels[index]})
    rows = StreamingDataset(local=str(kept), shuffle=True, batch_size=BATCH, num_canonical_nodes=1)
    loader = torch.utils.data.DataLoader(rows, BATCH)

    def epoch(number: int) -> Epoch:
        for batch in loader:
            yield len(batch["label"])

    return epoch


def litdata(folder: Path, rank: int, size: int) -> Callable[[int], Epoch]:
    """LitData's, from its own format."""
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming.writer import BinaryWriter

    kept = folder / f"lit-{rank}-{size}"
    if not kept.exists():
        table = arrow_rows(folder, "rows")
        whole = np.frombuffer(table["image"].chunk(0).buffers()[1], np.uint8, len(table) * BYTES)
        labels = table["label"].to_numpy()
        kept.mkdir()
        out = BinaryWriter(str(kept), chunk_bytes=4 << 20)
        for place, index in enumerate(range(rank, len(labels), size)):
            image = whole[index * BYTES : (index + 1) * BYTES]
            out.add_item(place, {"image": image, "label": int(labels[index])})
        out.done()
        out.merge()
    loader = StreamingDataLoader(StreamingDataset(str(kept), shuffle=True), batch_size=BATCH)

    def epoch(number: int) -> Epoch:
        for batch in loader:
            yield len(batch["label"])

    return epoch


def petastorm(folder: Path, rank: int, size: int) -> Callable[[int], Epoch]:
    """Its reader of batches, which are row groups, made arrays and neither mixed nor cut."""
    from petastorm import make_batch_reader

    def epoch(number: int) -> Epoch:
        shard = {"cur_shard": rank, "shard_count": size} if size > 1 else {}
        url = f"file://{folder.resolve()}/rows"
        with make_batch_reader(url, shuffle_row_groups=True, workers_count=2, seed=number, **shard) as reader:
            for batch in reader:
                _ = np.frombuffer(b"".join(batch.image), np.uint8).reshape(-1, BYTES)
                yield len(batch.label)

    return epoch


def ray_data(folder: Path, rank: int, size: int) -> Callable[[int], Epoch]:
    """Ray Data's ``iter_batches`` with a shuffle buffer, in a cluster of this process."""
    import ray

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    files = sorted(map(str, (folder / "rows").resolve().glob("*.parquet")))[rank::size]
    rows = ray.data.read_parquet(files)

    def epoch(number: int) -> Epoch:
        batches = rows.iter_batches(
            batch_size=BATCH,
            batch_format="numpy",
            local_shuffle_buffer_size=BUFFER,
            local_shuffle_seed=number,
        )
        for batch in batches:
            _ = np.frombuffer(b"".join(batch["image"]), np.uint8).reshape(-1, BYTES)
            yield len(batch["label"])

    return epoch


def image_floor(folder: Path, rank: int, size: int) -> Callable[[int], Epoch]:
    """Decoding in a loop, and stacking."""
    images = arrow_rows(folder, "images")["image"].to_pylist()[rank::size]

    def epoch(number: int) -> Epoch:
        for first in range(0, len(images), IMAGE_BATCH):
            yield len(np.stack([decoded(data) for data in images[first : first + IMAGE_BATCH]]))

    return epoch


def polyhvd_images(workers: int) -> Reader:
    def reader(folder: Path, rank: int, size: int) -> Callable[[int], Epoch]:
        from polyhvd.data import ParquetLoader

        loader = ParquetLoader(
            folder / "images",
            batch_size=IMAGE_BATCH,
            seed=1,
            decode=["image"],
            workers=workers,
            placement=lambda: (rank, size),
        )

        def epoch(number: int) -> Epoch:
            loader.set_epoch(number)
            for batch in loader:
                yield len(batch["label"])

        return epoch

    return reader


ROW_READERS: dict[str, Reader] = {
    "polyhvd": polyhvd,
    "floor": floor,
    "torch, 0 workers": torch_with(0),
    "torch, 2 workers": torch_with(2),
    "tf.data": tfdata,
    "gluon": gluon,
    "datasets": hf_datasets,
    "streaming": streaming,
    "litdata": litdata,
    "petastorm": petastorm,
    "ray data": ray_data,
}
IMAGE_READERS: dict[str, Reader] = {
    "polyhvd ": polyhvd_images(0),
    "polyhvd, 2 workers": polyhvd_images(2),
    "decoding": image_floor,
    "torch, 0 workers ": torch_with(0, images=True),
    "torch, 2 workers ": torch_with(2, images=True),
    "tf.data ": tfdata_images,
}


def cpu_s(process: str = "self") -> float:
    """Seconds that all cores have worked for a process and those that it has started."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
        lists = [path.read_text() for path in Path(f"/proc/{process}/task").glob("*/children")]
    except OSError:  # it has just ended
        return 0.0
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own + sum(cpu_s(child) for children in lists for child in children.split())


def main() -> None:
    """Read an epoch for each line of the standard input."""
    name, folder, rank, size = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print
    epoch = {**ROW_READERS, **IMAGE_READERS}[name](folder, rank, size)
    rows = sum(epoch(0))  # what is done once
    print(json.dumps({"rows": rows}), file=out, flush=True)
    for number, _ in enumerate(sys.stdin, 1):
        begin, cpu = time.perf_counter(), cpu_s()
        rows = sum(epoch(number))
        found = {"rows": rows, "s": time.perf_counter() - begin, "cpu_s": cpu_s() - cpu}
        print(json.dumps(found), file=out, flush=True)


if __name__ == "__main__":
    main()
