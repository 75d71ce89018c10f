"""The parameters of the estimators and of their models, in one table: Horovod's, by their names.

``python -m polyhvd.spark.estimators.params`` prints the tables of ``polyhvd docs spark``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pyspark.ml.param import Param, Params, TypeConverters

__all__ = ["ESTIMATORS", "MODELS", "Parameter", "describe", "has_params", "without_effect"]

#: Estimators by the names of their frameworks.
_ALL = ("torch", "lightning", "keras", "mxnet")
_TITLES = {"torch": "PyTorch", "lightning": "Lightning", "keras": "Keras", "mxnet": "Gluon"}
_OF_MODULE = {"lightning": "a LightningModule has its own"}
_Class = TypeVar("_Class", bound=type)


@dataclass(frozen=True)
class Parameter:
    """A parameter, with its getter and setter.

    Args:
        name: of the keyword argument.
        effect: what it does, in a line; empty: it has no effect.
        default: its value if it is not set.
        convert: raises TypeError for a value of a wrong type; None: any value will do.
        accessors: other ends of the names of getter and setter, which are ``getNumProc`` and ``setNumProc``
            for ``num_proc``.
        frameworks: that have it.
        ignored: by framework, why it has no effect there.
    """

    name: str
    effect: str
    default: Any = None
    convert: Callable[[Any], Any] | None = None
    accessors: tuple[str, ...] = ()
    frameworks: tuple[str, ...] = _ALL
    ignored: Mapping[str, str] = field(default_factory=dict)

    def endings(self) -> tuple[str, ...]:
        """The ends of the names of its getters and setters."""
        return ("".join(part[:1].upper() + part[1:] for part in self.name.split("_")), *self.accessors)


def _none(reason: str) -> dict[str, str]:
    return dict.fromkeys(_ALL, reason)


_INT, _BOOL, _TEXT = TypeConverters.toInt, TypeConverters.toBoolean, TypeConverters.toString
_TEXTS, _FLOATS = TypeConverters.toListString, TypeConverters.toListFloat

#: Of estimators, in the order of docs/spark.md.
ESTIMATORS = (
    Parameter("num_proc", "number of ranks; without it and `backend`: the slots of the cluster", None, _INT),
    Parameter(
        "elastic",
        "whether `fit` continues when ranks, tasks or executors are lost; see [below](#elastic-estimators)",
        False,
        _BOOL,
    ),
    Parameter("min_num_proc", "minimum number of ranks of an elastic `fit`; default: 1", None, _INT),
    Parameter(
        "max_num_proc",
        "maximum number of ranks of an elastic `fit`; default: those at the beginning",
        None,
        _INT,
    ),
    Parameter("model", "the model to train; it is not modified"),
    Parameter("backend", "runs the ranks: a `SparkBackend` or `LocalBackend`, in place of `num_proc`"),
    Parameter("store", "a `Store` for the rows of `fit`, and for checkpoints"),
    Parameter(
        "optimizer",
        "the optimizer; its learning rate is multiplied by the number of ranks",
        ignored=_OF_MODULE,
    ),
    Parameter("loss", "the loss, or a list with one for each label column", ignored=_OF_MODULE),
    Parameter(
        "loss_weights",
        "factors of the losses; without it, those of PyTorch and Gluon are averaged, and Keras's added",
        None,
        _FLOATS,
        ignored=_OF_MODULE,
    ),
    Parameter(
        "sample_weight_col",
        "column of the weights of rows; with Lightning, a tensor of the batch that `training_step` has to "
        "use",
        None,
        _TEXT,
    ),
    Parameter(
        "metrics",
        "metrics, computed over all ranks' rows for the history",
        [],
        ignored={"lightning": "the history has what the LightningModule logs"},
    ),
    Parameter("gradient_compression", "a `Compression` for the gradients"),
    Parameter(
        "compress_sparse_cols", "", False, _BOOL, ignored=_none("sparse vectors are written as dense arrays")
    ),
    Parameter("feature_cols", "columns of the model's inputs, in their order", None, _TEXTS),
    Parameter("label_cols", "columns of the labels, one for each output of the model", None, _TEXTS),
    Parameter("categorical_cols", "feature columns that stay integers; others become float32", None, _TEXTS),
    Parameter(
        "continuous_cols",
        "",
        None,
        _TEXTS,
        ignored=_none("all feature columns outside `categorical_cols` are continuous"),
    ),
    Parameter(
        "validation",
        "part of the rows for validation, between 0 and 1, or the name of a column that is true, or not 0, "
        "for them",
    ),
    Parameter(
        "callbacks",
        "callbacks of the framework, on every rank",
        [],
        ignored={
            "torch": "PyTorch has no callbacks; see `train_minibatch_fn`",
            "mxnet": "Gluon's are those of `gluon.contrib.estimator`, which is not used",
        },
    ),
    Parameter("batch_size", "rows of a step for each rank", 32, _INT),
    Parameter(
        "val_batch_size", "the same for validation and predictions; without it `batch_size`", None, _INT
    ),
    Parameter("epochs", "number of epochs", 1, _INT),
    Parameter(
        "train_steps_per_epoch",
        "steps of an epoch; default: each row is used once. With fewer steps and `shuffle=False`, all epochs "
        "use the same first rows",
        None,
        _INT,
    ),
    Parameter("validation_steps_per_epoch", "steps of a validation; without it all rows", None, _INT),
    Parameter("random_seed", "seed of the framework, and of the order of rows", None, _INT),
    Parameter("shuffle", "whether rows are shuffled in each epoch", True, _BOOL),
    Parameter(
        "shuffle_buffer_size",
        "0: rows are not shuffled; other numbers have no effect",
        None,
        _INT,
        ("ShufflingBufferSize",),
    ),
    Parameter("verbose", "0: ranks print nothing; else rank 0 prints the metrics of each epoch", 1, _INT),
    Parameter(
        "partitions_per_process",
        "tasks of Spark, for each rank, in which `fit` writes the rows, at most",
        10,
        _INT,
    ),
    Parameter(
        "run_id",
        "name of the run in the store: `fit` resumes an interrupted run of that name. Without it, each `fit` "
        "gets a new name",
        None,
        _TEXT,
    ),
    Parameter(
        "transformation_fn",
        "function of a batch, a dict of NumPy arrays by column, that returns such a dict; it is applied to "
        "training, validation and prediction",
    ),
    Parameter(
        "transformation_edit_fields",
        "",
        ignored=_none("the columns are those that `transformation_fn` returns"),
    ),
    Parameter(
        "transformation_removed_fields",
        "",
        ignored=_none("the columns are those that `transformation_fn` returns"),
    ),
    Parameter(
        "train_reader_num_workers",
        'processes that call `transformation_fn` ahead of the steps, with `reader_pool_type="process"`',
        2,
        _INT,
        ("TrainReaderNumWorker",),
    ),
    Parameter("val_reader_num_workers", "the same for validation", 2, _INT, ("ValReaderNumWorker",)),
    Parameter("reader_pool_type", '"thread" or "process"', "thread", _TEXT),
    Parameter("label_shapes", "a shape for each label column, without the axis of the rows"),
    Parameter(
        "inmemory_cache_all",
        "whether rows that were read stay in memory",
        False,
        _BOOL,
        ("InMemoryCacheAll",),
    ),
    Parameter(
        "use_gpu",
        "whether ranks use GPUs, if there are any",
        True,
        _BOOL,
        ignored={"lightning": "polyhvd's strategy trains on the CPU"},
    ),
    Parameter("mp_start_method", "", None, _TEXT, ignored=_none("no process is started by multiprocessing")),
    Parameter("backward_passes_per_step", "batches whose gradients are added before a step", 1, _INT),
    Parameter("backend_env", "environment variables of the ranks", {}),
    Parameter(
        "input_shapes",
        "a shape for each feature column, with -1 for the rows, as in `[[-1, 1, 28, 28]]`",
        frameworks=("torch", "lightning", "mxnet"),
    ),
    Parameter(
        "loss_constructors",
        "functions that return the losses, in place of `loss`",
        frameworks=("torch", "lightning"),
        ignored=_OF_MODULE,
    ),
    Parameter(
        "train_minibatch_fn",
        "a step of training: a function of `(model, optimizer, transform_outputs, loss_fn, inputs, labels, "
        "sample_weights)` that returns outputs and loss",
        frameworks=("torch", "lightning"),
        ignored={"lightning": "its `training_step` is called"},
    ),
    Parameter(
        "tensorflow_dataset_prefetch_buffer_size",
        "",
        None,
        _INT,
        ignored=_none("loaders read ahead by themselves"),
    ),
    Parameter("custom_objects", "classes and functions of the model, by name", {}, frameworks=("keras",)),
    Parameter(
        "checkpoint_callback",
        "a callback for rank 0, beside the store's checkpoints; with Lightning a `ModelCheckpoint`, on every "
        "rank",
        frameworks=("lightning", "keras"),
    ),
    Parameter(
        "trainer_args",
        "other arguments of Lightning's `Trainer`, by name",
        {},
        frameworks=("lightning",),
    ),
    Parameter("logger", "of the `Trainer`", frameworks=("lightning",)),
    Parameter("log_every_n_steps", "of the `Trainer`", 50, _INT, frameworks=("lightning",)),
    Parameter("profiler", "of the `Trainer`", frameworks=("lightning",)),
    Parameter(
        "terminate_on_nan",
        "whether a loss that is infinite or not a number is an error",
        False,
        _BOOL,
        frameworks=("lightning",),
    ),
    Parameter(
        "data_module",
        "a `LightningDataModule` in place of the loaders: a class or function, called with those it takes of "
        "`train_dir`, `val_dir`, `has_val`, `train_batch_size`, `val_batch_size`, `num_train_epochs`, "
        "`cur_shard` and `shard_count`",
        frameworks=("torch", "lightning", "keras"),
        ignored=dict.fromkeys(("torch", "keras"), "polyhvd's loaders read the rows"),
    ),
    Parameter(
        "num_gpus",
        "",
        None,
        _INT,
        ("NumGPUs",),
        ("lightning",),
        {"lightning": "polyhvd's strategy trains on the CPU"},
    ),
    Parameter(
        "loader_num_epochs",
        "",
        None,
        _INT,
        (),
        ("lightning",),
        {"lightning": "loaders read each row once in an epoch"},
    ),
    *(
        Parameter(
            name,
            "",
            None,
            None,
            (),
            ("lightning",),
            {"lightning": "loaders read ahead in threads by themselves"},
        )
        for name in (
            "debug_data_loader",
            "train_async_data_loader_queue_size",
            "val_async_data_loader_queue_size",
        )
    ),
)

#: Of the models that `fit` returns.
MODELS = (
    Parameter("history", "metrics of all epochs"),
    Parameter("model", "the trained model"),
    Parameter("feature_columns", "columns of the model's inputs", None, _TEXTS),
    Parameter("label_columns", "columns of the labels", None, _TEXTS, ("LabelColoumns",)),
    Parameter("outputCols", "names of the predictions; without it `LABEL__output`", None, _TEXTS),
    Parameter("run_id", "name of the run in the store", None, _TEXT),
    Parameter("_metadata", "types of the label columns and shapes of the outputs"),
    Parameter("batch_size", "rows of a batch of predictions", 32, _INT),
    Parameter("transformation_fn", "as of the estimator; label columns need not be there"),
    Parameter("categorical_cols", "as of the estimator", None, _TEXTS),
    Parameter("custom_objects", "as of the estimator", {}, frameworks=("keras",)),
    Parameter("optimizer", "the optimizer, with its state", frameworks=("torch",)),
    Parameter("input_shapes", "as of the estimator", frameworks=("torch", "lightning", "mxnet")),
    Parameter("loss", "as of the estimator", frameworks=("torch",)),
    Parameter("loss_constructors", "as of the estimator", frameworks=("torch",)),
)


def has_params(table: tuple[Parameter, ...], framework: str) -> Callable[[_Class], _Class]:
    """Decorate a class with the Params of a framework, their getters and setters, and its signature.

    Args:
        table: :data:`ESTIMATORS` or :data:`MODELS`.
        framework: such as "torch".
    """

    def decorate(cls: _Class) -> _Class:
        own = [parameter for parameter in table if framework in parameter.frameworks]
        for parameter in own:
            setattr(cls, parameter.name, Param(Params._dummy(), *_of_param(parameter)))
            for ending in parameter.endings():
                for name, make in ((f"get{ending}", _getter), (f"set{ending}", _setter)):
                    if not hasattr(cls, name):
                        setattr(cls, name, make(parameter.name))
        keyword = inspect.Parameter.KEYWORD_ONLY
        listed = [inspect.Parameter(item.name, keyword, default=item.default) for item in own]
        cls.__signature__ = inspect.Signature(listed)  # type: ignore[attr-defined]
        cls._table = {parameter.name: parameter for parameter in own}  # type: ignore[attr-defined]
        return cls

    return decorate


def _of_param(parameter: Parameter) -> tuple[str, str, Any]:
    return parameter.name, parameter.effect or "has no effect", parameter.convert


def _getter(name: str) -> Callable[[Any], Any]:
    def get(self: Any) -> Any:
        return self.getOrDefault(name)

    get.__doc__ = f"The value of ``{name}``."
    return get


def _setter(name: str) -> Callable[[Any, Any], Any]:
    def set_(self: Any, value: Any) -> Any:
        return self._set(**{name: value})

    set_.__doc__ = f"Set ``{name}``, and return this object."
    return set_


def without_effect(table: tuple[Parameter, ...], framework: str) -> dict[str, str]:
    """The parameters of a framework that are accepted and have no effect, with the reasons."""
    return {item.name: item.ignored[framework] for item in table if framework in item.ignored}


def describe() -> str:
    """The table of the estimators' parameters in Markdown."""
    rows = ["| parameter | default | effect |", "|---|---|---|"]
    for parameter in ESTIMATORS:
        reasons: dict[str, list[str]] = {}
        for name, reason in parameter.ignored.items():
            reasons.setdefault(reason, []).append(_TITLES[name])
        if parameter.effect:
            effects = [parameter.effect] + [
                f"no effect for {', '.join(names)}: {reason}" for reason, names in reasons.items()
            ]
        else:
            effects = [f"no effect: {reason}" for reason in reasons]
        if parameter.frameworks != _ALL:
            effects[0] = f"{', '.join(_TITLES[name] for name in parameter.frameworks)}: {effects[0]}"
        rows.append(f"| `{parameter.name}` | `{parameter.default!r}` | {'; '.join(effects)} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(describe(), end="")
