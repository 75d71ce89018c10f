"""The root's parameters and optimizer states on all ranks, deferred initialisation included."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mxnet as mx
from mxnet.gluon import Parameter, Trainer
from mxnet.gluon.parameter import ParameterDict
from mxnet.ndarray import NDArray
from polyhvd.mxnet.base import adapter, collectives
from polyhvd.mxnet.errors import InvalidArgumentError, RankMismatchError, as_mxnets
from polyhvd.mxnet.optimizer import DistributedOptimizer

from polyhvd.collectives.objects import broadcast_object
from polyhvd.collectives.operation import process_set_id
from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.runtime import current
from polyhvd.training.state import broadcast_named, by_rank, put_tensors, take_tensors

__all__ = [
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "optimizer_attributes",
    "optimizer_of",
    "update_attributes",
]


def broadcast_parameters(
    params: ParameterDict | Mapping[str, Parameter | NDArray],
    root_rank: int = 0,
    prefix: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrite parameters with the root's, in place.

    Those of Gluon that are not initialised yet are broadcast right after their initialisation, once.
    Gluon parameters meet by their position, which does not depend on the process, arrays by their key.

    Args:
        params: ``net.collect_params()``, or a dict of arrays such as those of ``module.get_params()``.
        root_rank: world rank of the sender.
        prefix: keeps several models apart when ranks broadcast them in different order.
        process_set: the ranks that take part.

    Raises:
        InvalidArgumentError: a bad call.
        RankMismatchError: names, numbers, shapes or dtypes differ. It is an MXNetError as well.

    Example::

        net.initialize()
        hvd.broadcast_parameters(net.collect_params(), root_rank=0)
    """
    if current.world().engine.behind:
        return  # before an elastic function, whose state has them
    label = prefix or "broadcast_parameters"
    named = list(adapter.named_parameters(params))
    for position, parameter in enumerate(params.values()):
        if isinstance(parameter, Parameter) and parameter._data is None:
            _broadcast_after_initialisation(parameter, root_rank, f"{label}.{position}", process_set)
    names = [
        f"parameter {i} of the network" if isinstance(value, Parameter) else str(key)
        for i, (key, value) in enumerate(params.items())
    ]
    with as_mxnets():
        broadcast_named(collectives, named, root_rank, process_set, label, names)


def _broadcast_after_initialisation(
    parameter: Parameter, root_rank: int, name: str, process_set: ProcessSet
) -> None:
    def init_and_broadcast(*args: Any, **kwargs: Any) -> None:
        del parameter._init_impl  # the class's own from now on
        parameter._init_impl(*args, **kwargs)
        first, *others = parameter.list_data()
        collectives.broadcast_async(first, root_rank, name=name, process_set=process_set, in_place=True)
        for other in others:
            first.copyto(other)

    parameter._init_impl = init_and_broadcast


def broadcast_optimizer_state(
    trainer: Trainer | mx.optimizer.Updater,
    root_rank: int = 0,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give every rank the root's optimizer states, counters and hyperparameters. Takes no step.

    To go on from a checkpoint that only the root can read, let it load both halves, then broadcast both.
    The optimizer stays the same object; multipliers of learning rate and weight decay stay as they are, and
    the scale of AMP is the root's as well.

    Args:
        trainer: a Gluon trainer, distributed or not, of the same parameters on every rank; or an updater,
            such as that of a module. Its states may be empty anywhere.
        root_rank: world rank of the sender.
        process_set: the ranks that take part.

    Raises:
        InvalidArgumentError: the trainer has a kvstore that updates, or several devices.
        RankMismatchError: the ranks' optimizers or parameters differ in kind.

    Example::

        if hvd.rank() == 0:
            net.load_parameters("net.params")
            trainer.load_states("trainer.states")
        hvd.broadcast_parameters(net.collect_params())
        hvd.broadcast_optimizer_state(trainer)
    """
    if current.world().engine.behind:
        return  # before an elastic function, whose state has them
    updater, optimizer = optimizer_of(trainer)
    _, parameters = _updater_of(trainer)
    # Gluon numbers parameters by names that hold counters of the process; positions agree between ranks.
    position_of = {number: position for position, number in enumerate(parameters)}
    scaler = getattr(trainer, "_amp_loss_scaler", None)
    is_root = current.world().placement.rank == root_rank
    whole = None
    if is_root:
        whole = (
            _renumbered(updater.states, position_of),
            _attributes(optimizer, position_of),
            None if scaler is None else vars(scaler),
        )
    with current.world().line("broadcast_optimizer_state", process_set_id(process_set)):
        _check_same(optimizer, parameters, root_rank, process_set)
        received = _broadcast_state(whole, root_rank, process_set)
    if is_root:
        return
    states, attributes, scale = received
    number_of = dict(enumerate(parameters))
    updater.states = _renumbered(states, number_of)
    updater.states_synced = dict.fromkeys(updater.states, False)
    update_attributes(optimizer, _numbered(attributes, number_of))
    if scaler is not None and scale is not None:
        vars(scaler).update(scale)


def _broadcast_state(state: Any, root_rank: int, process_set: ProcessSet) -> Any:
    """The root's nested containers of arrays and other values."""
    sent, arrays = take_tensors(state, lambda v: isinstance(v, NDArray) and v.stype == "default")
    kinds = [(array.dtype, array.shape) for array in arrays]
    sent, kinds = broadcast_object((sent, kinds), root_rank, "optimizer_state", process_set)
    if current.world().placement.rank != root_rank:
        arrays = [mx.nd.empty(shape, dtype=dtype) for dtype, shape in kinds]
    named = [(str(i), array) for i, array in enumerate(arrays)]
    broadcast_named(collectives, named, root_rank, process_set, "optimizer_state")
    return put_tensors(sent, arrays)


#: Of the optimizer, what is the program's own.
_KEPT = frozenset({"idx2name", "lr_mult", "param_dict", "sym_info", "wd_mult"})


def optimizer_of(trainer: Trainer | mx.optimizer.Updater) -> tuple[mx.optimizer.Updater, Any]:
    """The updater of a trainer, and its optimizer, without ours around it; raises InvalidArgumentError."""
    updater, _ = _updater_of(trainer)
    optimizer = updater.optimizer
    return updater, optimizer.wrapped if isinstance(optimizer, DistributedOptimizer) else optimizer


def optimizer_attributes(optimizer: Any) -> dict[str, Any]:
    """The attributes of an optimizer that training changes: its counters, its learning rate and the like."""
    return _attributes(optimizer, {})


def update_attributes(optimizer: Any, attributes: dict[str, Any]) -> None:
    """Give an optimizer what :func:`optimizer_attributes` has returned, maybe of another rank.

    A scheduler stays the object that the program knows, and may go on to change.
    """
    own, new = getattr(optimizer, "lr_scheduler", None), attributes.get("lr_scheduler")
    if own is not None and type(own) is type(new):
        vars(own).update(vars(new))
        attributes = {**attributes, "lr_scheduler": own}
    vars(optimizer).update(attributes)


def _updater_of(trainer: Any) -> tuple[mx.optimizer.Updater, dict[Any, Any]]:
    """The updater, and what is known of its parameters by their number, in an order that ranks share."""
    if isinstance(trainer, mx.optimizer.Updater):
        return trainer, {}
    if not isinstance(trainer, Trainer):
        found = type(trainer).__name__
        raise TypeError(f"broadcast_optimizer_state: expected a Gluon trainer or an updater, found {found}")
    if not trainer._kv_initialized:
        trainer._init_kvstore()
    if trainer._update_on_kvstore or len(trainer._updaters) != 1:
        raise InvalidArgumentError(
            "broadcast_optimizer_state: the trainer has several devices, or its kvstore makes the updates; "
            "use a DistributedTrainer"
        )
    in_order = getattr(trainer, "_in_order", trainer._params)
    return trainer._updaters[0], {trainer._param2idx[p.name]: p.shape for p in in_order}


def _check_same(optimizer: Any, parameters: dict[Any, Any], root_rank: int, process_set: ProcessSet) -> None:
    own = (type(optimizer).__name__, list(parameters.values()))
    with as_mxnets():
        every = by_rank("broadcast_optimizer_state", own, "optimizer_state.kind", root_rank, process_set)
    different = [rank for rank, other in every.items() if other != every[root_rank]]
    if different:
        raise RankMismatchError(
            f"broadcast_optimizer_state: ranks {different} have another optimizer or other parameters than "
            f"root rank {root_rank}, which has {every[root_rank][0]} of {len(every[root_rank][1])} "
            "parameters; make the same trainer on every rank"
        )


def _renumbered(values: dict[Any, Any], other: dict[Any, Any]) -> dict[Any, Any]:
    return {other.get(number, number): value for number, value in values.items()}


def _numbered(attributes: dict[str, Any], other: dict[Any, Any]) -> dict[str, Any]:
    """The optimizer's attributes with its counters under other numbers."""
    counts = {
        device: _renumbered(numbers, other)
        for device, numbers in attributes["_all_index_update_counts"].items()
    }
    return {**attributes, "_all_index_update_counts": counts, "_index_update_count": counts.get(0, {})}


def _attributes(optimizer: Any, other: dict[Any, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in vars(optimizer).items() if name not in _KEPT}
    return _numbered(kept, other)
