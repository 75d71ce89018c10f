"""Spark ML estimator for modules of Lightning; users import it as ``polyhvd.spark.lightning``."""

from __future__ import annotations

import functools
import inspect
import io
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from polyhvd.lightning import elastic
from polyhvd.lightning.base import pl
from polyhvd.lightning.strategy import PolyhvdStrategy
from polyhvd.torch.base import Compression
from polyhvd.torch.spark import called, input_of, predictor_of, tensor_of

import polyhvd
from polyhvd.spark.estimators.checkpoint import Checkpoint
from polyhvd.spark.estimators.estimator import FrameworkEstimator, shapes_of
from polyhvd.spark.estimators.model import FrameworkModel, Predict
from polyhvd.spark.estimators.params import ESTIMATORS, MODELS, has_params
from polyhvd.spark.estimators.training import Run, Trainer, require_columns_of

__all__ = ["LightningEstimator", "LightningModel"]

#: What stands for the run's checkpoint in ``Trainer.fit(ckpt_path=...)``.
_RESUMED = "polyhvd-spark-checkpoint"
#: Key in a checkpoint: the weights of the fitted model, if a resumed fit must begin with others.
_FITTED = "polyhvd-spark-fitted"
#: Arguments of the Trainer that the estimator sets, with the parameter that has them.
_SET = {
    "strategy": "gradient_compression",
    "accelerator": "num_proc",
    "devices": "num_proc",
    "num_nodes": "num_proc",
    "max_epochs": "epochs",
    "min_epochs": "epochs",
    "max_steps": "train_steps_per_epoch",
    "limit_train_batches": "train_steps_per_epoch",
    "limit_val_batches": "validation_steps_per_epoch",
    "accumulate_grad_batches": "backward_passes_per_step",
    "callbacks": "callbacks",
    "logger": "logger",
    "log_every_n_steps": "log_every_n_steps",
    "profiler": "profiler",
}


@has_params(MODELS, "lightning")
class LightningModel(FrameworkModel):
    """A trained module of Lightning, which adds the results of its ``forward`` to a DataFrame.

    ``transform(df)`` returns the DataFrame with a column for each label column: of the label's type if the
    output has one number for each row, else vectors of Spark ML. Tasks predict on their processors.

    Args:
        values: of the parameters, by name; see ``polyhvd docs spark``.

    Example::

        model = LightningModel.load("hdfs://host/model")
        model.transform(df).select("label__output")
    """

    _framework = "lightning"

    def _predictor(self) -> Callable[[], Predict]:
        return predictor_of(self)


@has_params(ESTIMATORS, "lightning")
class LightningEstimator(FrameworkEstimator):
    """Fits a LightningModule to a DataFrame, with a Trainer on ranks that tasks of Spark start.

    Rows are written to the store, and read by the ranks. A batch is a dict of tensors by column, for
    ``training_step`` and ``validation_step``. Feature columns are float32; labels that are integers are
    int64, and others float32. ``transform`` calls ``forward`` with the feature columns in their order. The
    learning rate is that of ``configure_optimizers``, which may multiply it by ``hvd.size()``.

    Args:
        values: of the parameters, by name; see ``polyhvd docs spark``.

    Raises:
        TypeError: there is no such parameter, or a value has a wrong type.

    Example::

        estimator = LightningEstimator(num_proc=2, store=store, model=module, feature_cols=["x"],
                                       label_cols=["y"], epochs=5)
        predictions = estimator.fit(df).transform(df)
    """

    _framework = "lightning"
    _model_class = LightningModel

    @property
    def _trainer(self) -> type[Trainer]:
        return _LightningTrainer

    def _imported(self) -> Any:
        return pl

    def _payload(self) -> bytes:
        module = self.getOrDefault("model")
        if not isinstance(module, pl.LightningModule):
            advice = (
                "use polyhvd.spark.torch.TorchEstimator for other modules of PyTorch"
                if isinstance(module, torch.nn.Module)
                else f"expected a {pl.__name__}.LightningModule"
            )
            raise ValueError(f"fit(): model is a {type(module).__qualname__}; {advice}")
        arguments = dict(self.getOrDefault("trainer_args") or {})
        for name in arguments:
            if name in _SET:
                raise ValueError(f"fit(): trainer_args has {name!r}, which {_SET[name]} sets; leave it out")
        if self._is_elastic() and self.getOrDefault("data_module") is not None:
            raise ValueError(
                "fit(): pass data_module or elastic=True, not both: the position in a data module's rows "
                "is not known"
            )
        if unknown := set(arguments) - set(inspect.signature(pl.Trainer).parameters):
            raise ValueError(f"fit(): trainer_args has {min(unknown)!r}, not an argument of a Trainer")
        shapes_of(self.getOrDefault("input_shapes"), self._list("feature_cols"))
        shapes_of(self.getOrDefault("label_shapes"), self._list("label_cols"))
        names: tuple[str, ...] = (
            *("input_shapes", "gradient_compression", "backward_passes_per_step", "data_module"),
            *("logger", "log_every_n_steps", "profiler", "terminate_on_nan"),
        )
        values = {name: self.getOrDefault(name) for name in names}
        values["callbacks"] = [*(self.getOrDefault("callbacks") or ())]
        if (callback := self.getOrDefault("checkpoint_callback")) is not None:
            values["callbacks"].append(callback)
        return bytes(cloudpickle.dumps((module, arguments, values)))

    def _identity_of_framework(self) -> dict[str, Any]:
        module, arguments = self.getOrDefault("model"), self.getOrDefault("trainer_args") or {}
        return {
            "model": {name: list(value.shape) for name, value in module.state_dict().items()},
            "trainer_args": {name: _comparable(value) for name, value in sorted(arguments.items())},
        }

    def _fitted(self, payload: bytes, checkpoint: Checkpoint) -> dict[str, Any]:
        module, _, values = cloudpickle.loads(payload)
        if checkpoint.state:
            loaded = _loaded(checkpoint.state)
            module.load_state_dict(loaded.get(_FITTED, loaded["state_dict"]))
        return {"model": module.eval(), "input_shapes": values["input_shapes"]}


def _comparable(value: Any) -> Any:
    """Return a value, or its class if two fits cannot compare it."""
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__qualname__


class _LightningTrainer(Trainer):
    """Training on a rank."""

    def train(self, run: Run) -> None:
        """Train all epochs that are left."""
        module, arguments, values = cloudpickle.loads(run.job.payload)
        _seed(run, run.epochs.start)
        data, validation = _Data(run, values["input_shapes"]), None
        if run.has_validation:
            validation = _Data(run, values["input_shapes"], is_training=False)
        compression = values["gradient_compression"] or Compression.none
        strategy = _Strategy(compression, data, run.checkpoint.state, ends_on_nan=values["terminate_on_nan"])
        callbacks = values["callbacks"]
        with tempfile.TemporaryDirectory() as folder:
            trainer = pl.Trainer(
                **{
                    "accelerator": "cpu",
                    "strategy": strategy,
                    "max_epochs": run.epochs.stop,
                    "accumulate_grad_batches": values["backward_passes_per_step"],
                    "callbacks": [_Beginning(run), *callbacks],
                    "logger": values["logger"] or False,
                    "log_every_n_steps": values["log_every_n_steps"],
                    "profiler": values["profiler"],
                    "default_root_dir": folder,
                    "enable_checkpointing": any(
                        isinstance(one, pl.callbacks.Checkpoint) for one in callbacks
                    ),
                    "enable_model_summary": False,
                    "enable_progress_bar": False,
                    "num_sanity_val_steps": 0,
                    "use_distributed_sampler": False,
                    **arguments,
                }
            )
            noting = _Noting(run, data, validation)
            trainer.callbacks.append(noting)  # after those that change the state
            make, loaders = values["data_module"], {}
            if make is None:
                data.trainer = trainer
                loaders = {"train_dataloaders": data, "val_dataloaders": validation}
            else:
                loaders = {"datamodule": _data_module(make, run)}
                trainer.callbacks.insert(0, _Weighing(data))
            resumed = _RESUMED if run.checkpoint.state else None
            _log_over_ranks(module, *((None, None) if make else (data, validation)))
            if run.job.is_elastic:
                run.train.set_epoch(run.epochs.start)
                history = list(run.checkpoint.history or ())
                state: Any = elastic.LightningState(trainer, module, sampler=run.train, history=history)
                noting.kept = state

                @elastic.run
                def fit(state: elastic.LightningState) -> None:
                    if run.train.epoch < run.epochs.stop:
                        trainer.fit(module, **loaders, ckpt_path=state.ckpt_path or resumed)

                fit(state)
            else:
                trainer.fit(module, **loaders, ckpt_path=resumed)
            noting.keep_weights(module)
            if polyhvd.rank() == 0:
                run.keep_files(Path(folder))


def _log_over_ranks(module: Any, data: _Data | None, validation: _Data | None) -> None:
    """Have ``self.log()`` reduce the metrics of an epoch over ranks, for schedulers and early stops.

    Args:
        module: of the user.
        data: the rows for training, to weight means by; None: they are not known.
        validation: those for validation.
    """
    log = module.log
    signature = inspect.signature(log)

    @functools.wraps(log)
    def log_over_ranks(*args: Any, **given: Any) -> None:
        arguments = signature.bind(*args, **given).arguments
        is_training = module.trainer.training
        on_epoch = arguments.get("on_epoch")
        if (not is_training if on_epoch is None else on_epoch) and not arguments.get("rank_zero_only"):
            rows = data if is_training else validation
            arguments.setdefault("sync_dist", True)
            if rows is not None:
                arguments.setdefault("batch_size", rows.batch_rows)
        log(**arguments)

    module.log = log_over_ranks


def _data_module(make: Callable[..., Any], run: Run) -> Any:
    """The user's data module."""
    params, validation = run.params, run.job.validation
    rows = params["batch_size"]
    known = {
        "train_dir": run.job.train.source,
        "val_dir": None if validation is None else validation.source,
        "has_val": validation is not None,
        "train_batch_size": rows,
        "val_batch_size": params["val_batch_size"] or rows,
        "num_train_epochs": params["epochs"],
        "cur_shard": polyhvd.rank(),
        "shard_count": polyhvd.size(),
    }
    return called(make, known)


class _Strategy(PolyhvdStrategy):
    """Weights the losses of steps whose rows are not split equally, and resumes from the run's checkpoint.

    Args:
        compression: of the gradients.
        data: with the batch of the step.
        state: of the run's checkpoint.
        ends_on_nan: whether a loss that is not finite is an error.
    """

    def __init__(self, compression: Any, data: _Data, state: bytes, *, ends_on_nan: bool) -> None:
        super().__init__(compression=compression)
        self._data, self._state, self._ends_on_nan = data, state, ends_on_nan

    def backward(self, closure_loss: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the gradients of the weighted loss."""
        if self._ends_on_nan and not torch.isfinite(closure_loss).all():
            raise ValueError(f"fit(): the loss is {float(closure_loss.sum())}, and terminate_on_nan is set")
        return super().backward(closure_loss * self._data.weight, optimizer, *args, **kwargs)

    def load_checkpoint(self, checkpoint_path: Any, **kwargs: Any) -> Any:
        """The run's checkpoint, or what is in another file."""
        if checkpoint_path == _RESUMED:
            return _loaded(self._state)
        return super().load_checkpoint(checkpoint_path, **kwargs)


def _saved(checkpoint: Any) -> bytes:
    """Return the bytes of a checkpoint."""
    data = io.BytesIO()
    torch.save(checkpoint, data)
    return data.getvalue()


def _loaded(state: bytes) -> Any:
    """Return the checkpoint of these bytes."""
    # Optimizers and callbacks of users may keep objects of any class.
    return torch.load(io.BytesIO(state), map_location="cpu", weights_only=False)


def _are_equal(weights: dict[str, Any], others: dict[str, Any]) -> bool:
    """Return whether two state dicts have the same tensors, and nothing else."""
    return weights.keys() == others.keys() and all(
        torch.is_tensor(one)
        and torch.is_tensor(other)
        and one.dtype == other.dtype
        and torch.equal(one, other)
        for one, other in ((value, others[name]) for name, value in weights.items())
    )


class _Data:
    """A data loader of the rows of a run, whose batches are dicts of tensors.

    Args:
        run: of this rank.
        shapes: of the feature columns; None: as they are.
        is_training: whether its rows are those for training.
    """

    def __init__(self, run: Run, shapes: Any, *, is_training: bool = True) -> None:
        self._run, params = run, run.params
        self._is_training = is_training
        #: The Trainer, whose epoch the rows are those of.
        self.trainer: Any = None
        #: Of the loss of the current batch.
        self.weight = 1.0
        #: Rows of this rank in the latest epoch, and in the current batch.
        self.rows = self.batch_rows = 0
        self._features = dict(
            zip(params["feature_cols"], shapes_of(shapes, params["feature_cols"]), strict=True)
        )
        self._labels = dict(
            zip(params["label_cols"], shapes_of(params["label_shapes"], params["label_cols"]), strict=True)
        )
        self._whole = frozenset(params["categorical_cols"] or ())
        name = "train_steps_per_epoch" if is_training else "validation_steps_per_epoch"
        loader = run.train if is_training else run.validation
        assert loader is not None
        steps = params[name]
        if steps is None or not is_training:
            steps = min(loader.steps_per_epoch, steps or loader.steps_per_epoch)
        self._steps = steps

    def __len__(self) -> int:
        """The steps of an epoch, or of what is left of it in an elastic job."""
        is_rest = self._is_training and self._run.job.is_elastic
        return len(self._run.train) if is_rest else self._steps

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The batches of an epoch."""
        run = self._run
        self.rows = 0
        batches = (
            run.train_batches(self.trainer.current_epoch) if self._is_training else run.validation_batches()
        )
        for batch in batches:
            self.weight = batch.weight
            self.batch_rows = len(batch.indices) if batch.weight else 0
            self.rows += self.batch_rows
            yield self._tensors(batch.arrays)
        self.weight = 1.0

    def _tensors(self, arrays: dict[str, Any]) -> dict[str, Any]:
        require_columns_of(arrays, [*self._features, *self._labels])
        found = {
            name: input_of(arrays[name], shape, name in self._whole) for name, shape in self._features.items()
        }
        for name, shape in self._labels.items():
            label = tensor_of(arrays[name], True)
            found[name] = label if shape is None else label.reshape(len(label), *shape)
        if (column := self._run.params["sample_weight_col"]) is not None:
            found[column] = tensor_of(arrays[column], False)
        return found


def _seed(run: Run, epoch: int) -> None:
    """Seed Lightning for an epoch, so that one that is resumed is the same."""
    if run.params["random_seed"] is not None:
        pl.seed_everything(run.params["random_seed"] + epoch, verbose=False)


class _Beginning(pl.Callback):  # type: ignore[misc]
    """Seeds each epoch."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        _seed(self._run, trainer.current_epoch)


class _Weighing(pl.Callback):  # type: ignore[misc]
    """Weights the loss of each batch of a data module by its rows, of which ranks may have different numbers.

    Args:
        data: whose weight the strategy uses.
    """

    def __init__(self, data: _Data) -> None:
        self._data = data

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        try:
            rows = float(pl.utilities.data.extract_batch_size(batch))
        except pl.utilities.exceptions.MisconfigurationException:  # it contains no tensor
            rows = 0.0
        total = float(trainer.strategy.reduce(torch.tensor(rows), reduce_op="sum"))
        self._data.weight = rows * polyhvd.size() / total if total else 1.0


def _averaged(sums: dict[str, tuple[float, int]]) -> dict[str, float]:
    """Averages over the rows of the ranks that have logged the metric.

    Args:
        sums: by name, the sum of the values of this rank's rows, and their number.
    """
    by_rank = polyhvd.allgather_object(sums, name="fit().metrics")
    averages = {}
    for name in dict.fromkeys(name for other in by_rank for name in other):
        values, rows = zip(*(other[name] for other in by_rank if name in other), strict=True)
        averages[name] = sum(values) / sum(rows)
    return averages


class _Noting(pl.callbacks.Checkpoint):  # type: ignore[misc]
    """Writes a checkpoint after each epoch.

    Lightning calls ``on_train_epoch_end`` of checkpoint callbacks after that of the module.

    Args:
        run: of this rank.
        data: the rows for training.
        validation: those for validation; None: there are none.
    """

    def __init__(self, run: Run, data: _Data, validation: _Data | None) -> None:
        self._run, self._data, self._validation = run, data, validation
        self._trainer: Any = None  # None: no epoch has ended in this process
        self._has_state = False
        #: Of an elastic job, with the history.
        self.kept: Any = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Move behind the callbacks of the module."""
        trainer.callbacks = [*(each for each in trainer.callbacks if each is not self), self]

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._trainer, self._has_state = trainer, polyhvd.rank() == 0
        names = {name: float(value) for name, value in trainer.callback_metrics.items() if value.numel() == 1}
        averages = _averaged(
            {name: (value * self._rows(name), self._rows(name)) for name, value in names.items()}
        )
        entry = {"epoch": trainer.current_epoch, **averages}
        if self._run.is_printing:
            print(entry, flush=True)
        before = self._run.checkpoint.history if self.kept is None else self.kept.history
        history = [*(before or ()), entry]
        if self.kept is not None:
            self.kept.history = history
        self._run.finish_epoch(trainer.current_epoch, history, [], self.state)

    def keep_weights(self, module: Any) -> None:
        """Keep the weights at the end of training, which hooks may have changed, for the fitted model.

        Args:
            module: the trained one.
        """
        run, kept = self._run, self.kept
        if polyhvd.rank() != 0:
            return
        if not self._has_state and kept is not None and kept.ckpt_path is not None:
            # Another rank of an elastic job had been rank 0, and was lost. Every rank has the last commit.
            run.checkpoint.epochs = run.train.epoch
            run.conclude(kept.history, [], lambda: _saved(kept.checkpoint()))
        if self._trainer is None:
            return
        loaded, weights = _loaded(run.checkpoint.state), module.state_dict()
        if not _are_equal(loaded["state_dict"], weights):
            run.replace_state(lambda: _saved({**loaded, _FITTED: weights}))

    def _rows(self, name: str) -> int:
        """Return the number of this rank's rows, over which a metric is averaged."""
        validation = self._validation
        return max(1, self._data.rows if validation is None or name[:3] != "val" else validation.rows)

    def state(self) -> bytes:
        """Return the state of the module, the optimizers and the loops in the format of Lightning's files."""
        return _saved(self._trainer._checkpoint_connector.dump_checkpoint(weights_only=False))
