"""A network in PyTorch that survives the loss of ranks, and of the job. To be killed by hand::

    polyhvdrun -np 3 --min-np 2 --spares 1 python examples/elastic_pytorch.py --checkpoint run

with ``--data fashion-mnist`` for more of it. Then ``kill -9`` any of the Python processes, or all of them
and start the job again.
"""

import common
import polyhvd.torch as hvd
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from polyhvd.data import ArrayLoader

args = common.elastic_arguments("digits in PyTorch", epochs=10, batch_size=16, lr=0.02)

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(args.seed)
train, test = common.load(args.data)
height, width = train.pixels.shape[1:]
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(16 * (height // 2) * (width // 2), 64),
    nn.ReLU(),
    nn.Linear(64, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer)


def scale():
    """A step averages over hvd.size() batches, so it may be as many times longer."""
    for group in optimizer.param_groups:
        group["lr"] = args.lr * hvd.size()


state.register_reset_callbacks([scale])


def images(pixels):
    return torch.from_numpy(pixels).unsqueeze(1)


def step(batch):
    pixels, labels = batch
    optimizer.zero_grad()
    # The weight makes the average over ranks that over rows, where ranks have different numbers of them.
    loss = batch.weight * cross_entropy(model(images(pixels)), torch.from_numpy(labels))
    loss.backward()
    optimizer.step()
    return loss.detach()


loader = ArrayLoader([train.pixels, train.labels], batch_size=args.batch_size, seed=args.seed)
hvd.elastic.train(step, state, loader, epochs=args.epochs, checkpoint=args.checkpoint)

with torch.no_grad():
    correct = model(images(test.pixels)).argmax(dim=1) == torch.from_numpy(test.labels)
if hvd.rank() == 0:
    print(f"test accuracy {correct.float().mean():.4f}", flush=True)
