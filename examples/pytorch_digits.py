"""A small convolutional network in PyTorch, trained on handwritten digits.

On two ranks::

    polyhvdrun -np 2 python examples/pytorch_digits.py
"""

import common
import polyhvd.torch as hvd
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

args = common.arguments("digits with PyTorch", epochs=15, batch_size=16, lr=0.02)

# Each process is one rank of the job.
hvd.init()
torch.manual_seed(args.seed)

# The sampler gives every rank its own part of the images, shuffled again in each epoch.
train, test = common.load(args.data)
images = TensorDataset(torch.from_numpy(train.pixels).unsqueeze(1), torch.from_numpy(train.labels))
sampler = DistributedSampler(images, hvd.size(), hvd.rank(), seed=args.seed, drop_last=True)
loader = DataLoader(images, args.batch_size, sampler=sampler)

height, width = train.pixels.shape[1:]
model = nn.Sequential(
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

# A step averages over hvd.size() batches, so it may be as many times longer. The
# optimizer averages each gradient over the ranks while backward() computes the next.
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

# All ranks start from the weights of rank 0.
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

progress = common.Progress(args, len(sampler), hvd.rank(), hvd.size())
for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    total = torch.zeros(())
    for x, y in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.detach() * len(x)
        progress.step()
    progress.end_epoch(hvd.allreduce(total / len(sampler), name="loss").item())

# Every rank tests its part of the test images; the sum over ranks covers them all.
mine = test.shard(hvd.rank(), hvd.size(), even=False)
with torch.no_grad():
    classes = model(torch.from_numpy(mine.pixels).unsqueeze(1)).argmax(dim=1)
correct = (classes == torch.from_numpy(mine.labels)).sum()
accuracy = hvd.allreduce(correct, name="correct", op=hvd.Sum).item() / len(test)
progress.finish(accuracy)
