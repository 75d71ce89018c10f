"""Elastic training with MXNet: ``hvd.elastic``."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import pickle
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.base import _LIB, MXNetError, check_call
from mxnet.gluon import Block, Parameter
from polyhvd.mxnet.errors import InvalidArgumentError
from polyhvd.mxnet.optimizer import DistributedOptimizer
from polyhvd.mxnet.state import (
    broadcast_optimizer_state,
    broadcast_parameters,
    optimizer_attributes,
    optimizer_of,
    update_attributes,
)
from polyhvd.mxnet.trainer import DistributedTrainer

from polyhvd.collectives.process_sets import ProcessSet
from polyhvd.elastic import exports
from polyhvd.elastic.exports import *
from polyhvd.elastic.loop import run, run_fn
from polyhvd.elastic.memory import like
from polyhvd.elastic.state import Handler, HandlersState
from polyhvd.elastic.train import train
from polyhvd.training.state import changed

__all__ = [
    "GluonState",
    "run",
    "run_fn",
    "train",
]
__all__ += exports.__all__


class _Parameters(Handler):
    """The parameters of a network, auxiliary ones included."""

    def __init__(self, value: Block) -> None:
        super().__init__(value)
        self._copies: list[Any] = []
        self._spare: list[Any] = []  # of the commit before: one that is cut short harms neither

    def _arrays(self) -> list[Any]:
        return [parameter.list_data()[0] for parameter in self.value.collect_params().values()]

    def save(self) -> None:
        arrays = self._arrays()
        spare = like(arrays, self._spare)
        for kept, array in zip(spare, arrays, strict=True):
            _copy_to(kept, array)
        self._copies, self._spare = spare, self._copies

    def restore(self) -> None:
        parameters: list[Parameter] = list(self.value.collect_params().values())
        for parameter, value in zip(parameters, self._copies, strict=True):
            arrays = [*parameter.list_data(), *(parameter.list_grad() if parameter._grad is not None else [])]
            for array in arrays:
                _settle(array)
            for array in parameter.list_data():
                array[:] = value
            if parameter.grad_req == "add":
                parameter.zero_grad()

    def exported(self) -> Any:
        return [array.asnumpy() for array in self._arrays()]

    def imported(self, value: Any) -> None:
        parameters: list[Parameter] = list(self.value.collect_params().values())
        if [parameter.shape for parameter in parameters] != [array.shape for array in value]:
            raise ValueError(
                f"it has {len(value)} parameters, here are {len(parameters)}, or of other shapes"
            )
        for parameter, array in zip(parameters, value, strict=True):
            parameter.set_data(mx.nd.array(array, dtype=array.dtype))

    def sync_from(self, root: int, *, among: ProcessSet | None) -> None:
        if among is not None:
            broadcast_parameters(self.value.collect_params(), root, "elastic.state.net", among)
            mx.nd.waitall()

    def keep_synced(self, *, kept: bool) -> None:
        if not kept:
            if not self._spare:  # an earlier commit is of no use any more, its memory is
                self._copies, self._spare = [], self._copies
            self.save()


class _Trainer(Handler):
    """The optimizer of a trainer: its states, its counters and what else it has changed."""

    def save(self) -> None:
        updater, optimizer = optimizer_of(self.value)
        scaler = getattr(self.value, "_amp_loss_scaler", None)
        rest = (optimizer_attributes(optimizer), None if scaler is None else vars(scaler))
        self._kept = pickle.dumps(updater.states), copy.deepcopy(rest)

    def restore(self) -> None:
        for owner in (self.value, self.value._optimizer):
            if isinstance(owner, (DistributedTrainer, DistributedOptimizer)):
                owner.begin_anew()
        updater, optimizer = optimizer_of(self.value)
        for state in updater.states.values():
            _settle(state)
        states, rest = self._kept
        attributes, scale = copy.deepcopy(rest)
        updater.states = pickle.loads(states)
        updater.states_synced = dict.fromkeys(updater.states, False)
        update_attributes(optimizer, attributes)
        scaler = getattr(self.value, "_amp_loss_scaler", None)
        if scaler is not None and scale is not None:
            vars(scaler).update(scale)

    def exported(self) -> Any:
        updater, optimizer = optimizer_of(self.value)
        scaler = getattr(self.value, "_amp_loss_scaler", None)
        attributes = optimizer_attributes(optimizer)
        scheduler = attributes.pop("lr_scheduler", None)
        kind = type(scheduler).__qualname__
        return {
            "states": changed(updater.states, lambda v: v.asnumpy() if isinstance(v, mx.nd.NDArray) else v),
            "attributes": attributes,
            "scheduler": None if scheduler is None else {"class": kind, "attributes": dict(vars(scheduler))},
            "scaler": None if scaler is None else dict(vars(scaler)),
        }

    def imported(self, value: Any) -> None:
        updater, optimizer = optimizer_of(self.value)
        scheduler, saved = getattr(optimizer, "lr_scheduler", None), value.get("scheduler")
        here = None if scheduler is None else type(scheduler).__qualname__
        if here != (saved and saved["class"]):
            raise ValueError(f"it has the lr_scheduler {saved and saved['class']}, expected {here}")

        def array(item: Any) -> Any:
            return mx.nd.array(item, dtype=item.dtype) if isinstance(item, np.ndarray) else item

        updater.states = changed(value["states"], array)
        updater.states_synced = dict.fromkeys(updater.states, False)
        vars(optimizer).update(value["attributes"])
        if saved is not None:
            vars(scheduler).update(saved["attributes"])
        scaler = getattr(self.value, "_amp_loss_scaler", None)
        if scaler is not None and value["scaler"] is not None:
            vars(scaler).update(value["scaler"])

    def sync_from(self, root: int, *, among: ProcessSet | None) -> None:
        if among is not None:
            broadcast_optimizer_state(self.value, root, among)
            mx.nd.waitall()

    def keep_synced(self, *, kept: bool) -> None:
        if not kept:
            self.save()


def _copy_to(target: np.ndarray[Any, Any], array: Any) -> None:
    """``target[:] = array.asnumpy()``, without the memory that this takes, which the system has to clear."""
    address = target.ctypes.data_as(ctypes.c_void_p)
    check_call(_LIB.MXNDArraySyncCopyToCPU(array.handle, address, ctypes.c_size_t(target.size)))


def _settle(value: Any) -> None:
    """Wait until nothing writes an array any more, and take out the error that it may hold.

    MXNet would skip what is written to it otherwise.
    """
    if isinstance(value, (list, tuple)):
        for item in value:
            _settle(item)
    elif isinstance(value, mx.nd.NDArray):
        with contextlib.suppress(MXNetError):
            value.wait_to_read()


class GluonState(HandlersState):
    """A network, its trainer and other attributes, by name.

    Args:
        net: a Gluon block whose parameters are initialised.
        trainer: a ``DistributedTrainer`` of one device, or None.
        kwargs: other attributes with their first values, which are pickled.

    Raises:
        InvalidArgumentError: parameters have no shape yet, or the trainer has several devices.

    Example::

        state = hvd.elastic.GluonState(net, trainer, epoch=0)

        @hvd.elastic.run
        def train(state):
            for state.epoch in range(state.epoch, 10):
                train_one_epoch()
                state.commit()
    """

    net: Block
    trainer: Any

    def __init__(self, net: Block, trainer: Any = None, **kwargs: Any) -> None:
        missing = [name for name, item in net.collect_params().items() if item._data is None]
        if missing:
            raise InvalidArgumentError(
                f"{missing[0]} and {len(missing) - 1} more parameters have no value yet, which an elastic "
                "state needs; initialize the network, and run it once before: net(mx.nd.zeros(shape))"
            )
        handlers: dict[str, Handler] = {"net": _Parameters(net)}
        if trainer is not None:
            handlers["trainer"] = _Trainer(trainer)
        super().__init__(handlers, **kwargs)
        if trainer is None:
            self.trainer = None

    def save(self) -> None:
        """Keep a copy of all attributes, when the pending updates have ended.

        Raises:
            HorovodInternalError: one of them has failed; the copy is what it was.

        Example::

            state.save()
        """
        mx.nd.waitall()
        super().save()

    def restore(self) -> None:
        """Give all attributes the values of the copy.

        Example::

            state.restore()
        """
        with contextlib.suppress(MXNetError):
            mx.nd.waitall()
        super().restore()

    def _end_background(self) -> None:
        mx.nd.waitall()


def __dir__() -> list[str]:
    return __all__
