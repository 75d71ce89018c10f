"""A script as Horovod's documentation of elastic training has them for PyTorch, with its import changed.

Rank 1 is killed once, in the middle of the second epoch. Arguments: a file that is there then, and "late" to
have the next process join in the commit after the last batch of that epoch.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import polyhvd.torch as hvd
import torch
import torch.nn.functional as F

hvd.init()
torch.manual_seed(42)
torch.set_num_threads(1)

generator = torch.Generator().manual_seed(3)
inputs = torch.randn(256, 10, generator=generator)
targets = (inputs @ torch.randn(10, 3, generator=generator)).argmax(1)
dataset = torch.utils.data.TensorDataset(inputs, targets)

sampler = hvd.elastic.ElasticSampler(dataset)
loader = torch.utils.data.DataLoader(dataset, batch_size=16, sampler=sampler)

model = torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
lr = 0.05
optimizer = torch.optim.Adam(model.parameters(), lr=lr)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def on_state_reset() -> None:
    """Adjust the learning rate to the number of workers."""
    for group in optimizer.param_groups:
        group["lr"] = lr


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    for state.epoch in range(state.epoch, 4):  # noqa: B020 - as the documentation has it
        state.sampler.set_epoch(state.epoch)
        losses = []
        for batch, (data, target) in enumerate(loader):
            if hvd.rank() == 1 and state.epoch == 1 and batch == 2 and not os.path.exists(sys.argv[1]):
                open(sys.argv[1], "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            state.sampler.record_batch(batch, 16)
            state.batches += 1
            time.sleep(0.01)
            state.commit()
            while "late" in sys.argv and state.epoch == 1 and sampler.processed_num == len(dataset):
                state.commit()  # until it is interrupted, since the new process has come
        if losses:  # where a process has joined after its last batch, nothing is left of an epoch
            print(f"epoch {state.epoch} size {hvd.size()} loss {sum(losses) / len(losses):.3f}", flush=True)
        else:
            print(f"epoch {state.epoch} size {hvd.size()} is over", flush=True)


state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batches=0)
state.register_reset_callbacks([on_state_reset])
train(state)
total = sum(parameter.detach().double().sum() for parameter in model.parameters())
moments = sum(s["exp_avg"].double().sum() for s in optimizer.state.values())
print(f"end {state.epoch} {state.batches} {total.item().hex()} {moments.item().hex()}", flush=True)
