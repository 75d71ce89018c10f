"""A model that ``hvd.elastic.train`` trains, in any framework, with kills where a test says so.

Arguments: the framework, a folder, and places at which a process kills itself, each once in the whole job:

    before:RANK:STEP   in the step, before its collectives; other ranks may still be in the step before
    committed:RANK:STEP   the same, but not until the other ranks have committed so many steps
    raise:RANK:STEP    the same, but this rank raises an exception
    after:RANK:STEP    in the step, when the weights are updated
    commit:RANK:STEP   within the commit of the step, when half of the state was copied
    write:RANK:STEP    while the checkpoint of that step is written
    set:RANK:STEP      before a collective of the process set of the first ranks 0 and 1, but not until the
                       other ranks have committed so many steps
    others:RANK:STEP   in the step: this rank kills all others
    late:RANK:STEP     this rank does not die: its step fails because another rank dies, as if its last
                       collective had failed. ``committed`` and ``set`` do not wait for its commit
    sync:RANK:STEP     while the state is sent, after so many steps
    join:STAGE, meet:RANK:GENERATION:STAGE   see dying.py

It tells a digest of the weights, how often each row has counted, and how many steps there were. ``TRAIN``
in the environment says what else is done: see :func:`main`. With ``TRAIN_DATA=parquet`` rows are read from a
file.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from dying import Kills, die_in_meetings

from polyhvd.data import ArrayLoader, DistributedBatchSampler, ParquetLoader, write_parquet
from polyhvd.data.arrays import Batch
from polyhvd.elastic import checkpoint
from polyhvd.elastic.train import Training
from polyhvd.runtime import current

FRAMEWORK, FOLDER = sys.argv[1], Path(sys.argv[2])
KILLS = Kills(FOLDER, sys.argv[3:])
ROWS, INPUTS, OUTPUTS, BATCH = int(os.environ.get("TRAIN_ROWS", "107")), 6, 3, 4

random = np.random.default_rng(5)
x = random.normal(size=(ROWS, INPUTS)).astype(np.float32)
y = (x @ random.normal(size=(INPUTS, OUTPUTS))).argmax(1)
first_w = random.normal(size=(INPUTS, OUTPUTS)).astype(np.float32)

hvd = importlib.import_module("polyhvd." + FRAMEWORK)
die_in_meetings(KILLS)
#: Of the ranks of the first world, those that are left.
pair = hvd.ProcessSet([0, 1]) if "set:1" in " ".join(sys.argv[3:]) else None
hvd.init(process_sets=[pair] if pair else [])


def numpy_model() -> Any:
    state = hvd.elastic.ArrayState(w=first_w.copy(), m=np.zeros_like(first_w), counts=np.zeros(ROWS))

    def update(batch: Any) -> float:
        inputs, classes = batch
        scores = np.exp(inputs @ state.w)
        wrong = scores / scores.sum(1, keepdims=True) - np.eye(OUTPUTS, dtype=np.float32)[classes]
        gradient = np.float32(batch.weight / len(inputs)) * (inputs.T @ wrong)
        state.m[:] = 0.9 * state.m + hvd.allreduce(gradient, name="gradient")
        state.w -= 0.1 * state.m
        return float(np.abs(wrong).mean())

    return state, update, lambda: [state.w, state.m]


def torch_model() -> Any:
    import torch

    model = torch.nn.Linear(INPUTS, OUTPUTS)
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(first_w.T))
        model.bias.zero_()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, counts=np.zeros(ROWS))

    def update(batch: Any) -> Any:
        inputs, classes = map(torch.from_numpy, batch)
        optimizer.zero_grad()
        loss = batch.weight * torch.nn.functional.cross_entropy(model(inputs), classes)
        loss.backward()
        optimizer.step()
        return loss

    def values() -> list[Any]:
        moments = [part[key] for part in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
        return [item.detach().numpy() for item in (model.weight, model.bias, *moments)]

    return state, update, values


def tensorflow_model() -> Any:
    import tensorflow as tf

    w, b = tf.Variable(first_w), tf.Variable(tf.zeros(OUTPUTS))
    moments = [tf.Variable(tf.zeros_like(v)) for v in (w, b)]
    state = hvd.elastic.TensorFlowState([w, b, *moments], counts=np.zeros(ROWS))

    @tf.function(reduce_retracing=True)
    def graph(inputs: Any, classes: Any, weight: Any) -> Any:
        with tf.GradientTape() as tape:
            scores = inputs @ w + b
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(classes, scores)
            loss = weight * tf.reduce_mean(losses)
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, [w, b])
        for variable, moment, gradient in zip((w, b), moments, gradients, strict=True):
            moment.assign(0.9 * moment + gradient)
            variable.assign_sub(0.1 * moment)
        return loss

    def update(batch: Any) -> Any:
        return graph(tf.constant(batch[0]), tf.constant(batch[1]), tf.constant(batch.weight, tf.float32))

    return state, update, lambda: [item.numpy() for item in (w, b, *moments)]


def keras_model() -> Any:
    if FRAMEWORK == "keras":
        import keras
    else:
        import tensorflow as tf

        keras = tf.keras
    model = keras.Sequential([keras.Input((INPUTS,)), keras.layers.Dense(OUTPUTS)])
    model.set_weights([first_w, np.zeros(OUTPUTS, np.float32)])
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.05)), loss_of)
    state = hvd.elastic.KerasState(model, counts=np.zeros(ROWS))

    def update(batch: Any) -> float:
        inputs, classes = batch
        return float(model.train_on_batch(inputs, classes, np.full(len(inputs), batch.weight, np.float32)))

    return state, update, lambda: [*model.get_weights(), *map(np.asarray, model.optimizer.variables)]


def mxnet_model() -> Any:
    import mxnet as mx
    from mxnet import autograd, gluon

    net = gluon.nn.Dense(OUTPUTS, in_units=INPUTS)
    net.initialize()
    net.weight.set_data(mx.nd.array(first_w.T))
    net.bias.set_data(mx.nd.zeros(OUTPUTS))
    trainer = hvd.DistributedTrainer(net.collect_params(), "adam", {"learning_rate": 0.05})
    state = hvd.elastic.GluonState(net, trainer, counts=np.zeros(ROWS))
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()

    def update(batch: Any) -> Any:
        inputs, classes = map(mx.nd.array, batch)
        with autograd.record():
            loss = batch.weight * loss_of(net(inputs), classes).mean()
        loss.backward()
        trainer.step(1)
        return loss

    def values() -> list[Any]:
        moments = [part for pair in trainer._updaters[0].states.values() for part in pair]
        return [item.asnumpy() for item in (net.weight.data(), net.bias.data(), *moments)]

    return state, update, values


MODELS = {
    "numpy": numpy_model,
    "torch": torch_model,
    "tensorflow": tensorflow_model,
    "tensorflow.keras": keras_model,
    "keras": keras_model,
    "mxnet": mxnet_model,
}
numpy_hvd = importlib.import_module("polyhvd.numpy")
train_module = importlib.import_module("polyhvd.elastic.train")
made: list[Training] = []


class KilledTraining(Training):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        super().__init__(*args, **kwargs)

    def save(self) -> None:
        self._inner.save()
        KILLS.die_at("commit", hvd.rank(), self.steps)
        super().save()

    def _committed(self) -> None:
        super()._committed()
        if KILLS.pending("committed", "raise", "set"):
            commit_file(hvd.rank(), self.steps).touch()

    def _sync_from(self, root: int, *, among: Any) -> None:
        KILLS.die_at("sync", hvd.rank(), self.steps)
        super()._sync_from(root, among=among)


class KilledFolder(checkpoint.Folder):
    def write(self, steps: int, value: Any) -> None:
        real = os.fsync

        def fsync(descriptor: int) -> None:
            if hvd.is_initialized():
                KILLS.die_at("write", hvd.rank(), steps)
            real(descriptor)

        os.fsync = fsync
        try:
            super().write(steps, value)
        finally:
            os.fsync = real


train_module.Training = KilledTraining  # type: ignore[attr-defined]
train_module.Folder = KilledFolder  # type: ignore[attr-defined]


def rows_file() -> Path:
    """The file of the rows, which the process writes that is the first to have it ready."""
    own, file = FOLDER / f"rows-{os.getpid()}.parquet", FOLDER / "rows.parquet"
    write_parquet({"x": x, "y": y}, own, rows_per_group=5)
    with contextlib.suppress(FileExistsError):
        os.link(own, file)
    own.unlink()
    return file


def loader_of() -> tuple[Any, Any]:
    """A loader, and what makes a Batch of what it yields."""
    if os.environ.get("TRAIN_DATA") == "parquet":
        files = ParquetLoader(rows_file(), batch_size=BATCH, seed=3)
        return files, lambda batch: Batch((batch["x"], batch["y"]), batch.indices, batch.weight)
    if FRAMEWORK not in ("torch", "mxnet"):
        return ArrayLoader([x, y], batch_size=BATCH, seed=3), lambda batch: batch
    sampler = DistributedBatchSampler(ROWS, batch_size=BATCH, seed=3)
    numbers = np.arange(ROWS)
    if FRAMEWORK == "torch":
        import torch

        data: Any = torch.utils.data.TensorDataset(*map(torch.from_numpy, (x, y, numbers)))
        loader: Any = torch.utils.data.DataLoader(data, batch_sampler=sampler)
    else:
        from mxnet import gluon

        loader = gluon.data.DataLoader(gluon.data.ArrayDataset(x, y, numbers), batch_sampler=sampler)

    def as_batch(items: Any) -> Batch:
        inputs, classes, rows = (item.numpy() if FRAMEWORK == "torch" else item.asnumpy() for item in items)
        return Batch((inputs, classes), rows.astype(np.int64), sampler.weight)

    return loader, as_batch


def commit_file(rank: int, steps: int) -> Path:
    """The file that exists once a rank of the present world has committed so many steps."""
    return FOLDER / f"commit of generation {current.world().placement.generation} rank {rank} steps {steps}"


def die_when_others_have_committed(kind: str, number: int) -> None:
    """Die at this place, but not until every other rank has committed ``number`` steps.

    A collective may return on one rank before it returns on the others. If that rank then dies at once, the
    same collective can fail on the others, and their last commit is one step older.
    """
    if f"{kind}:{hvd.rank()}:{number}" not in KILLS.pending(kind):
        return
    others = [rank for rank in range(hvd.size()) if rank != hvd.rank()]
    while not all(
        commit_file(rank, number).exists() or KILLS.is_done("late", rank, number - 1) for rank in others
    ):
        time.sleep(0.01)
    if kind == "raise":
        KILLS.kill_at([], kind, hvd.rank(), number)
        raise LookupError(f"there is no row {number}")
    KILLS.die_at(kind, hvd.rank(), number)


def fail_if_late(number: int) -> None:
    """Fail the step on this rank: start a collective that no other rank joins, until one of them dies."""
    place = ("late", hvd.rank(), number)
    if KILLS.is_wanted(*place) and not KILLS.is_done(*place):
        KILLS.kill_at([], *place)
        numpy_hvd.barrier()


def use_the_pair(number: int) -> None:
    """A collective of a process set, for as long as one of its ranks is left."""
    if pair is not None and pair.process_set_id is not None and pair.included():
        die_when_others_have_committed("set", number)
        assert len(hvd.allgather_object(number, process_set=pair)) == len(pair.ranks)


def kill_others(number: int) -> None:
    """All ranks meet before, so that nobody has heard of a loss."""
    if any(place.endswith(f":{number}") for place in KILLS.pending("others")):
        pids = numpy_hvd.allgather_object(os.getpid(), name="pids")
        KILLS.kill_at([pid for pid in pids if pid != os.getpid()], "others", hvd.rank(), number)


def train(epochs: int, in_step: Any = lambda number: None, **options: Any) -> str:
    """Train a model from the beginning, or from a checkpoint; what has become of it."""
    state, update, values = MODELS[FRAMEWORK]()

    loader, as_batch = loader_of()

    def step(items: Any) -> Any:
        batch = as_batch(items)
        number = made[-1].steps
        KILLS.die_at("before", hvd.rank(), number)
        for kind in ("committed", "raise"):
            die_when_others_have_committed(kind, number)
        in_step(number)
        kill_others(number)
        use_the_pair(number)
        rows = np.zeros(ROWS)
        np.add.at(rows, batch.indices, 1.0 if batch.weight else 0.0)
        state.counts = state.counts + numpy_hvd.allreduce(rows, op=numpy_hvd.Sum, name="rows")
        result = update(batch)
        fail_if_late(number)
        KILLS.die_at("after", hvd.rank(), number)
        return result

    hvd.elastic.train(step, state, loader, epochs=epochs, progress=False, **options)
    everything = b"".join(np.ascontiguousarray(item).tobytes() for item in values())
    counts = sorted(set(state.counts.tolist()))
    return f"{hashlib.sha256(everything).hexdigest()[:16]} counts {counts} steps {made[-1].steps}"


def fail(number: int) -> None:
    """An exception of the program's own, in one of its ranks."""
    if (hvd.rank(), number) == (1, 4):
        raise LookupError("there is no row 4")


def disagree(number: int) -> None:
    """Ranks of which one has another tensor."""
    if number == 4:
        numpy_hvd.allreduce(np.ones(2 + hvd.rank()), name="uneven")


def change_hosts(number: int) -> None:
    """Make room for a third rank, and take it back when there is one. Steps are slow meanwhile."""
    wanted, size = (3, 2)[len(seen) - 1], hvd.size()
    if size == wanted and wanted == 3:
        seen.append(size)
        wanted = 2
    if hvd.rank() == 0 and f"localhost:{wanted}" not in HOSTS.read_text():
        new = HOSTS.with_suffix(".new")
        new.write_text(f"localhost:{wanted}\n")
        new.rename(HOSTS)
    if size != wanted:
        time.sleep(0.1)


HOSTS = FOLDER / "hosts"
seen = [2]  # sizes of the world


def main() -> None:
    """Train as ``TRAIN`` says.

    once, checkpoint: with options of ``hvd.elastic.train`` and their values.
    twice: another afterwards, which nothing happens to.
    resumes: from disk, and then another without.
    hosts: longer, while hosts come and go.
    fail, disagree: a rank, or all of them, find an error.
    """
    folder = str(FOLDER / "checkpoints")
    mode, *arguments = os.environ.get("TRAIN", "once").split()
    words = zip(arguments[::2], arguments[1::2], strict=True)
    options: dict[str, Any] = {name: int(value) for name, value in words}
    if mode in ("checkpoint", "resumes"):
        options["checkpoint"] = folder
    if mode == "hosts":
        print("end", train(20, change_hosts, **options), f"size {hvd.size()}", flush=True)
        return
    in_step = {"fail": fail, "disagree": disagree}.get(mode, lambda number: None)
    print("end", train(2, in_step, **options), f"size {hvd.size()}", flush=True)
    if mode in ("twice", "resumes"):
        print("end", train(2), f"size {hvd.size()}", flush=True)


if __name__ == "__main__":
    main()
