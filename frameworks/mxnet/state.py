"""The root's parameters on all ranks, deferred initialisation included."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mxnet.gluon import Parameter
from mxnet.gluon.parameter import ParameterDict
from mxnet.ndarray import NDArray
from polyhvd.mxnet import ops

from polyhvd.process_sets import ProcessSet, global_process_set
from polyhvd.state_sync import broadcast_named

__all__ = ["broadcast_parameters"]


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
        RankMismatchError: shapes or dtypes differ. It is an MXNetError as well.
    """
    label = prefix or "broadcast_parameters"
    named = list(ops.adapter.named_parameters(params))
    for position, parameter in enumerate(params.values()):
        if isinstance(parameter, Parameter) and parameter._data is None:
            _broadcast_after_initialisation(parameter, root_rank, f"{label}.{position}", process_set)
    broadcast_named(ops.collectives, named, root_rank, process_set, label)


def _broadcast_after_initialisation(
    parameter: Parameter, root_rank: int, name: str, process_set: ProcessSet
) -> None:
    def init_and_broadcast(*args: Any, **kwargs: Any) -> None:
        del parameter._init_impl  # the class's own from now on
        parameter._init_impl(*args, **kwargs)
        first, *others = parameter.list_data()
        ops.broadcast_(first, root_rank, name=name, process_set=process_set)
        for other in others:
            first.copyto(other)

    parameter._init_impl = init_and_broadcast
