"""A small convolutional network in Lightning, trained on handwritten digits.

On two ranks::

    polyhvdrun -np 2 python examples/lightning_digits.py
"""

import logging
import warnings

import common
import lightning
import polyhvd.lightning as hvd
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

args = common.arguments("digits with Lightning", epochs=15, batch_size=16, lr=0.02)
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")


class Digits(lightning.LightningModule):
    """Nothing in it knows of ranks, but for the learning rate."""

    def __init__(self, height: int, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
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

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = cross_entropy(self.net(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def test_step(self, batch, batch_idx):
        x, y = batch
        correct = (self.net(x).argmax(dim=1) == y).sum().float()
        self.log("correct", correct, reduce_fx="sum", sync_dist=True)

    def configure_optimizers(self):
        # A step averages over hvd.size() batches, so it may be as many times longer.
        return torch.optim.SGD(self.parameters(), lr=args.lr * hvd.size(), momentum=0.9)


class Lines(lightning.Callback):
    """Prints a line for each epoch."""

    def on_train_batch_end(self, *_):
        progress.step()

    def on_train_epoch_end(self, trainer, module):
        progress.end_epoch(trainer.callback_metrics["loss"].item())


def images(part):
    return TensorDataset(torch.from_numpy(part.pixels).unsqueeze(1), torch.from_numpy(part.labels))


# Each process is one rank of the job; Lightning gives it its part of the images.
lightning.seed_everything(args.seed, verbose=False)
trainer = lightning.Trainer(
    strategy="polyhvd",
    accelerator="cpu",
    max_epochs=args.epochs,
    callbacks=[Lines()],
    enable_checkpointing=False,
    enable_model_summary=False,
    enable_progress_bar=False,
    logger=False,
)
train, test = common.load(args.data)
model = Digits(*train.pixels.shape[1:])
progress = common.Progress(args, len(train) // hvd.size(), hvd.rank(), hvd.size())
trainer.fit(model, DataLoader(images(train), args.batch_size, shuffle=True))

# Every rank tests its part of the test images; the sum over ranks covers them all.
mine = test.shard(hvd.rank(), hvd.size(), even=False)
tester = lightning.Trainer(
    strategy="polyhvd",
    accelerator="cpu",
    enable_checkpointing=False,
    enable_model_summary=False,
    enable_progress_bar=False,
    logger=False,
    use_distributed_sampler=False,
)
(found,) = tester.test(model, DataLoader(images(mine), batch_size=len(mine)), verbose=False)
progress.finish(found["correct"] / len(test))
