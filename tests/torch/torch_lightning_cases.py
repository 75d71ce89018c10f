"""A Trainer on the ranks, against Lightning's own with the joined batch."""

from __future__ import annotations

import csv
import logging
import warnings
from pathlib import Path
from typing import Any

import lightning
import polyhvd.lightning
import polyhvd.torch as hvd
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torch_common import ROWS, assert_close, assert_same_bits, raises
from torchmetrics import CatMetric, MeanMetric

from polyhvd import RankMismatchError

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")
Tensor = torch.Tensor
STEPS = 4


def data(rows: int | None = None) -> TensorDataset:
    """Joined batches of ``STEPS`` steps, the same on every rank."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(rows or ROWS * hvd.size() * STEPS, 5, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True) + torch.arange(len(x))[:, None] / len(x))


class Regression(lightning.LightningModule):
    """Two layers. Its first weights differ between ranks, unless it is to train alone."""

    def __init__(self, *, alone: bool, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0 if alone else hvd.rank())
        middle = torch.nn.BatchNorm1d(7) if norm else torch.nn.Tanh()
        self.net = torch.nn.Sequential(torch.nn.Linear(5, 7), middle, torch.nn.Linear(7, 1))
        self.seen: list[Tensor] = []
        self.operations: list[int] = []

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        self.seen.append(x[:, 0])
        return (self.net(x) - y).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.operations.append(hvd.counters()["operations"])
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


def trainer(strategy: Any = "polyhvd", **arguments: Any) -> Any:
    quiet = {
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "enable_progress_bar": False,
        "logger": False,
        "max_epochs": 2,
    }
    return lightning.Trainer(strategy=strategy, accelerator="cpu", **{**quiet, **arguments})


def loader() -> Any:
    """Lightning divides it among the ranks."""
    return DataLoader(data(), ROWS)


def fit(model: Any, strategy: Any = "polyhvd", *, checkpoint: Any = None, **arguments: Any) -> Any:
    """Train on this rank's part of each joined batch, or, with Lightning's own strategy, on all of it."""
    joined = data()
    if strategy == "auto":
        batches = DataLoader(joined, ROWS * hvd.size())
    else:
        batches = DataLoader(joined, ROWS, sampler=DistributedSampler(joined, hvd.size(), hvd.rank(), False))
    trains = trainer(strategy, **arguments)
    trains.fit(model, batches, ckpt_path=checkpoint)
    return trains


def trains_like_one_process(arguments: dict[str, Any]) -> None:
    together, alone = Regression(alone=False), Regression(alone=True)
    fit(together, **arguments)
    fit(alone, "auto", **arguments)
    assert_same_bits(together)
    if arguments.get("precision"):
        torch.testing.assert_close(together.net[0].weight, alone.net[0].weight, rtol=0.05, atol=0.02)
    else:
        assert_close(together, alone)


def accumulates_without_exchanges() -> None:
    model = Regression(alone=False)
    trainer(accumulate_grad_batches=2).fit(model, loader())
    between = [after - before for before, after in zip(model.operations, model.operations[1:], strict=False)]
    assert between[::2] == [0] * STEPS
    assert all(between[1::2])
    everything = torch.cat(hvd.allgather_object(torch.cat(model.seen), name="seen")).sort()[0]
    assert torch.equal(everything, data()[:][0][:, 0].repeat(2).sort()[0]), "each rank has its own part"


def batch_norm_is_that_of_the_joined_batch() -> None:
    together, alone = Regression(alone=False, norm=True), Regression(alone=True, norm=True)
    fit(together, sync_batchnorm=True)
    fit(alone, "auto")
    assert_close(together, alone)
    torch.testing.assert_close(together.net[1].running_var, alone.net[1].running_var)
    together.eval()
    assert together.net(data()[:3][0]).shape == (3, 1)


class Manual(Regression):
    """An encoder and a head with an optimizer each, as in adversarial training."""

    def __init__(self, *, alone: bool) -> None:
        super().__init__(alone=alone)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        first, second = self.net[0].parameters(), self.net[2].parameters()
        return torch.optim.Adam(first, 0.05), torch.optim.SGD(second, 0.1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        self.manual_backward(self.loss(batch))
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)
        self.manual_backward(self.loss(batch))
        if batch_idx % 2:
            self.clip_gradients(second, gradient_clip_val=0.3)
            second.step()
            self.zero_grad()


def manual_optimization_of_two_optimizers() -> None:
    together, alone = Manual(alone=False), Manual(alone=True)
    fit(together)
    fit(alone, "auto")
    assert_same_bits(together)
    assert_close(together, alone)


class Shared(Manual):
    """Two losses of one encoder, each with an optimizer that trains the encoder, too."""

    def __init__(self, *, alone: bool, accumulate: bool) -> None:
        super().__init__(alone=alone)
        self.accumulate = accumulate
        self.other = torch.nn.Linear(7, 1)

    def configure_optimizers(self) -> Any:
        encoder = list(self.net[0].parameters())
        first = torch.optim.Adam([*encoder, *self.net[2].parameters()], 0.05)
        return first, torch.optim.SGD([*encoder, *self.other.parameters()], 0.1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        due = not self.accumulate or batch_idx % 2 == 1
        for optimizer, head in zip(self.optimizers(), (self.net[2], self.other), strict=True):
            with optimizer.toggle_model(sync_grad=due):
                self.manual_backward((head(self.net[:2](x)) - y).square().mean())
                if due:
                    optimizer.step()
                    optimizer.zero_grad()


def manual_optimization_of_shared_parameters(accumulate: bool) -> None:
    together, alone = (Shared(alone=alone, accumulate=accumulate) for alone in (False, True))
    fit(together)
    fit(alone, "auto")
    assert_same_bits([p.detach() for p in together.parameters()])
    assert_close(together, alone)


class Compiled(Regression):
    """Compiles its step by itself."""

    def __init__(self) -> None:
        super().__init__(alone=False)
        self.graphs = 0
        self.training_step = torch.compile(self.training_step, backend=self.count)

    def count(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward


def a_compiled_step_trains() -> None:
    together, alone = Compiled(), Regression(alone=True)
    fit(together)
    fit(alone, "auto")
    assert together.graphs
    assert_close(together, alone)


class MeasuredElsewhere(Regression):
    """Logs other metrics on rank 1, by each of the two ways."""

    def __init__(self, way: str, how: str = "mean") -> None:
        super().__init__(alone=False)
        self.way = way
        self.how = how
        self.first, self.second = MeanMetric(), MeanMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.way == "value":
            self.log(f"of rank {hvd.rank()}", 1.0, reduce_fx=self.how, sync_dist=True, batch_size=1)
        else:
            metric = self.second if hvd.rank() == 1 else self.first
            metric(1.0)
            self.log("metric", metric, on_epoch=True)


def metrics_of_other_names_are_refused() -> None:
    for how in ("mean", "sum", "min", "max"):
        with raises(RankMismatchError, "the ranks have different names: rank 0 has", "of rank"):
            trainer().validate(MeasuredElsewhere("value", how), loader(), verbose=False)
    with raises(RankMismatchError, "the ranks have different names: rank 0 has", "first"):
        trainer().validate(MeasuredElsewhere("torchmetric"), loader(), verbose=False)


class Measured(Regression):
    """Logs in every way."""

    def __init__(self) -> None:
        super().__init__(alone=False)
        self.mean = MeanMetric()
        self.all = CatMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        self.mean(x[:, 0], weight=1.0 + hvd.rank())
        self.all(x[: 1 + hvd.rank(), 1])
        self.log("torchmetric", self.mean, on_epoch=True)
        for how in ("mean", "sum", "min", "max"):
            self.log(how, float(hvd.rank() + batch_idx), reduce_fx=how, sync_dist=True, batch_size=1)
        self.log("own", float(hvd.rank()), sync_dist=False, batch_size=1)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])


def metrics_are_those_of_all_ranks() -> None:
    model, measures = Measured(), trainer()
    measures.validate(model, loader(), verbose=False)
    found = {name: float(value) for name, value in measures.callback_metrics.items()}
    size, last = hvd.size(), STEPS - 1
    assert found["own"] == hvd.rank()
    assert found["mean"] == (size - 1) / 2 + last / 2
    assert found["sum"] == STEPS * size * (size - 1) / 2 + size * STEPS * last / 2
    assert (found["min"], found["max"]) == (0.0, size - 1.0 + last)
    weights = [1.0 + row % size for row in range(len(data()))]  # the sampler deals rows out
    weighted = sum(w * float(x[0]) for w, (x, _) in zip(weights, data(), strict=True)) / sum(weights)
    assert abs(found["torchmetric"] - weighted) < 1e-6
    assert len(model.all.compute()) == STEPS * size * (size + 1) // 2
    predicted = measures.predict(model, loader())
    assert sum(map(len, predicted)) == len(data()) // size


def metrics_of_ranks_are_logged(folder: str) -> None:
    logger = CSVLogger(folder)
    callback = polyhvd.lightning.LogMetricsCallback(every_n_steps=2)
    trains = fit(Regression(alone=False), logger=logger, callbacks=[callback])
    if hvd.rank() == 0:
        path = Path(logger.log_dir) / "metrics.csv"
        lines = list(csv.DictReader(path.open()))
        found = [int(line["step"]) for line in lines if line["polyhvd/operations_total"]]
        assert found == [*range(2, trains.global_step + 1, 2)]
        assert float(lines[-1]["polyhvd/ranks"]) == hvd.size()
    with raises(hvd.InvalidArgumentError, "every_n_steps=0"):
        polyhvd.lightning.LogMetricsCallback(every_n_steps=0)


def exchanges_of_the_strategy() -> None:
    strategy = polyhvd.lightning.PolyhvdStrategy()
    rank, size = hvd.rank(), hvd.size()
    assert strategy.broadcast({"rank": rank}, src=1) == {"rank": 1}
    assert strategy.reduce("no tensor") == "no tensor"
    assert strategy.reduce(torch.tensor(rank)) == (size - 1) / 2  # as Lightning counts rows
    assert strategy.reduce(torch.tensor([rank]), reduce_op=torch.distributed.ReduceOp.SUM).tolist() == [
        size * (size - 1) / 2
    ]
    assert strategy.reduce_boolean_decision(rank > 0, all=False)
    assert not strategy.reduce_boolean_decision(rank > 0)
    x = torch.full((2,), float(rank), requires_grad=True)
    gathered = strategy.all_gather(x, sync_grads=True)
    assert gathered.tolist() == [[float(r)] * 2 for r in range(size)]
    (gathered * gathered).sum().backward()
    assert x.grad.tolist() == [2.0 * size * rank] * 2
    assert not strategy.all_gather(x).requires_grad
    strategy.barrier("here")
    with raises(hvd.InvalidArgumentError, "median", "mean"):
        strategy.reduce(x, reduce_op="median")
    with raises(hvd.InvalidArgumentError, "ProcessSet"):
        strategy.reduce(x, group=object())
    with raises(hvd.InvalidArgumentError, f"devices={size + 1}", f"{size} ranks", "polyhvdrun"):
        trainer(devices=size + 1)
    with raises(hvd.InvalidArgumentError, "num_nodes=2", "1 hosts"):
        trainer(num_nodes=2)
    ranked = trainer(devices=size)
    assert (ranked.global_rank, ranked.world_size, ranked.num_devices) == (rank, size, size)


class Counting(TorchCheckpointIO):
    """Counts the files that this rank writes."""

    def __init__(self) -> None:
        self.written = 0

    def save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        self.written += 1
        super().save_checkpoint(*arguments, **options)


class Tampering(Regression):
    """Ranks but the first restore something else than what was saved."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if hvd.rank() > 0:
            for state in checkpoint["optimizer_states"][0]["state"].values():
                state["momentum_buffer"].mul_(2)
            checkpoint["state_dict"] = {k: 3 * v for k, v in checkpoint["state_dict"].items()}


def resumes_from_a_checkpoint(folder: str) -> None:
    whole, half, alone = (Regression(alone=alone) for alone in (False, False, True))
    fit(whole, max_epochs=4)
    writes = Counting()
    strategy = polyhvd.lightning.PolyhvdStrategy(checkpoint_io=writes)
    # Each rank would write elsewhere, if it wrote.
    keeps = ModelCheckpoint(str(Path(folder) / str(hvd.rank())), filename="{epoch}")
    fit(half, strategy, enable_checkpointing=True, callbacks=[keeps])
    assert writes.written == (2 if hvd.rank() == 0 else 0)
    path = Path(keeps.best_model_path)
    assert path == Path(folder) / "0" / "epoch=1.ckpt"
    hvd.barrier()  # rank 0 removes the one before on its own
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    resumed = Tampering(alone=False)
    trains = fit(resumed, max_epochs=4, checkpoint=str(path))
    assert trains.current_epoch == 4
    assert_same_bits(resumed)
    states = trains.optimizers[0].state_dict()["state"].values()
    assert_same_bits([state["momentum_buffer"] for state in states])
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), whole.parameters(), strict=True))
    # A strategy without ranks goes on with the same file.
    fit(alone, "auto", max_epochs=4, checkpoint=str(path))
    assert_close(resumed, alone)
    with raises(hvd.InvalidArgumentError, "1 optimizers", "has 2"):
        fit(Manual(alone=False), checkpoint=str(path), max_epochs=4)


class Noting(Regression):
    """Notes the end of each epoch."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__(alone=False)
        self.calls = calls

    def on_train_epoch_end(self) -> None:
        self.calls.append("module")
        self.log("epoch", float(self.current_epoch))


class NotingCommits(polyhvd.lightning.elastic.LightningState):
    """Notes each commit."""

    def commit(self) -> None:
        self.trainer.lightning_module.calls.append("commit")


def elastic_commits_come_after_the_hooks_of_an_epoch() -> None:
    calls: list[str] = []
    model, stopping = Noting(calls), EarlyStopping("epoch", patience=5)
    stopping._run_early_stopping_check = lambda trainer: calls.append("stopping")
    trains = trainer(callbacks=[stopping])
    state = NotingCommits(trains, model)
    trains.fit(model, loader())
    assert calls == 2 * ["module", "stopping", "commit"]
    with raises(ValueError, "`ModelCheckpoint` is not configured"):
        trains.validate(model, loader(), ckpt_path="best")
    del state

    class Saves(ModelCheckpoint):  # type: ignore[misc]
        def on_train_epoch_end(self, *args: Any) -> None:
            calls.append("saves")

    calls.clear()
    model, saves = Noting(calls), Saves(monitor="epoch")
    model.configure_callbacks = lambda: saves  # comes after those of the Trainer
    trains = trainer(enable_checkpointing=True)
    state = NotingCommits(trains, model)
    trains.fit(model, loader())
    assert calls == 2 * ["module", "saves", "commit"]
    assert trains.checkpoint_callback is saves
    del state


def fabric_loop(strategy: str, rows: int, *, alone: bool, checkpoint: str | None = None) -> Any:
    """Train by a loop of the program: accumulate two batches, clip; with a checkpoint between two epochs."""
    fabric = lightning.Fabric(strategy=strategy, accelerator="cpu", devices=1)
    fabric.launch()
    net = Regression(alone=alone).net
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9))
    joined = data()
    operations = []
    for epoch in range(2):
        batches = DataLoader(joined, rows)
        if strategy == "polyhvd":
            batches = fabric.setup_dataloaders(DataLoader(joined, rows, sampler=_in_turns(joined)))
        for number, (x, y) in enumerate(batches):
            before = hvd.counters()["operations"]
            with fabric.no_backward_sync(model, enabled=number % 2 == 0):
                fabric.backward((model(x) - y).square().mean() / 2)
            operations.append(hvd.counters()["operations"] - before)
            if number % 2:
                fabric.clip_gradients(model, optimizer, max_norm=0.3)
                optimizer.step()
                optimizer.zero_grad()
        if checkpoint is not None and epoch == 0:
            fabric.save(checkpoint, {"model": model, "optimizer": optimizer})
            for parameter in net.parameters():
                parameter.data.zero_()
            fabric.load(checkpoint, {"model": model, "optimizer": optimizer})
    if strategy == "polyhvd":
        assert operations[::2] == [0] * STEPS
        assert all(operations[1::2])
    return net, fabric


def _in_turns(joined: TensorDataset) -> Any:
    return DistributedSampler(joined, hvd.size(), hvd.rank(), False)


def fabric_trains_like_one_process(folder: str) -> None:
    checkpoint = str(Path(folder) / "fabric.ckpt") if hvd.rank() == 0 else None
    together, fabric = fabric_loop(
        "polyhvd", ROWS, alone=False, checkpoint=hvd.broadcast_object(checkpoint, 0)
    )
    alone, _ = fabric_loop("auto", ROWS * hvd.size(), alone=True)
    assert_same_bits(together)
    assert_close(together, alone)
    assert (fabric.global_rank, fabric.world_size) == (hvd.rank(), hvd.size())
    value = torch.tensor([1.0 + hvd.rank()])
    assert fabric.all_reduce(value, reduce_op="sum").tolist() == [3.0]
    assert fabric.all_gather(value).tolist() == [[1.0], [2.0]]
    assert fabric.broadcast({"rank": hvd.rank()}) == {"rank": 0}
    # The loader of a Fabric gives each rank other rows.
    rows = torch.cat([x for x, _ in fabric.setup_dataloaders(DataLoader(data(), ROWS))])
    everything = torch.cat(hvd.allgather_object(rows[:, 0], name="seen")).sort()[0]
    assert torch.equal(everything, data()[:][0][:, 0].sort()[0])
    with raises(hvd.InvalidArgumentError, "Fabric(devices=3)", "polyhvdrun -np 3"):
        lightning.Fabric(strategy="polyhvd", accelerator="cpu", devices=3)
    with raises(hvd.InvalidArgumentError, "Fabric(num_nodes=2)", "polyhvdrun -H"):
        lightning.Fabric(strategy="polyhvd", accelerator="cpu", num_nodes=2)
