"""A small convolutional network in PyTorch, trained on images in Parquet files.

On two ranks of one host, on handwritten digits::

    polyhvdrun -np 2 python examples/parquet_torch.py

with ``--data fashion-mnist --epochs 3 --batch-size 64`` on 60,000 images of clothes.
"""

import tempfile
from pathlib import Path

import common
import polyhvd.torch as hvd
import torch
from polyhvd.torch.data import Batches
from torch import nn
from torch.nn.functional import cross_entropy

from polyhvd.data import ParquetLoader, write_parquet

args = common.arguments("Parquet files with PyTorch", epochs=15, batch_size=16, lr=0.02)

# Each process is one rank of the job.
hvd.init()
torch.manual_seed(args.seed)
train, test = common.load(args.data)

with tempfile.TemporaryDirectory() as own:
    # Every rank writes its part of the images to a file of rank 0's folder.
    folder = Path(hvd.broadcast_object(own))
    mine = train.shard(hvd.rank(), hvd.size(), even=False)
    images = {"image": mine.pixels, "label": mine.labels}
    write_parquet(images, folder / f"{hvd.rank()}.parquet", rows_per_group=len(mine) // 20)
    hvd.barrier()

    # The ranks together read every image once in each epoch.
    loader = ParquetLoader(folder, batch_size=args.batch_size, seed=args.seed)
    batches = Batches(loader, x="image", y="label")

    height, width = train.pixels.shape[1:]
    model = nn.Sequential(
        nn.Unflatten(1, (1, height)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (height // 4) * (width // 4), 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    # All ranks start from the weights of rank 0.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    progress = common.Progress(args, len(train) // hvd.size(), hvd.rank(), hvd.size())
    for epoch in range(args.epochs):
        batches.set_epoch(epoch)
        losses = []
        for batch in batches:
            x, y = batch
            optimizer.zero_grad()
            # The last step of an epoch may have more rows on some ranks than on others.
            loss = batch.weight * cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            progress.step()
        progress.end_epoch(hvd.allreduce(torch.stack(losses).mean(), name="loss").item())
    hvd.barrier()  # rank 0 removes the folder

# Every rank tests its part of the test images; the sum over ranks covers them all.
mine = test.shard(hvd.rank(), hvd.size(), even=False)
with torch.no_grad():
    classes = model(torch.from_numpy(mine.pixels)).argmax(dim=1)
correct = (classes == torch.from_numpy(mine.labels)).sum()
accuracy = hvd.allreduce(correct, name="correct", op=hvd.Sum).item() / len(test)
progress.finish(accuracy)
