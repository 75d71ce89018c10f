"""The collectives as operators of torch, ``torch.ops.polyhvd``, for graphs: of forward and of backward.

Each is a call of the shared verbs when it runs. To a graph it is known by the shapes of its results, by its
gradient, which is another operator, and by its effect: effects stay in the order of the program.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from polyhvd.torch import derivatives
from polyhvd.torch.compiled import AVAILABLE

from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.errors import HorovodInternalError, InvalidArgumentError
from polyhvd.runtime import current

__all__ = ["LIBRARY"]

Tensor = torch.Tensor
_REDUCTION = "str? name, int op, float prescale, float postscale, int process_set"
_EXACT = "bool? exact_gradient"

#: Holds the operators; None where torch is too old for them.
LIBRARY: Any = torch.library.Library("polyhvd", "DEF") if AVAILABLE else None

_effectful: list[Any] = []  # operators that are not registered with inductor yet


def _operator(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register what runs, and ``fake``, which makes results of the right shapes and nothing else."""
    name = f"polyhvd::{schema.partition('(')[0]}"

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        if LIBRARY is None:
            return run

        def traced(*arguments: Any) -> Any:
            _keep_order_in_inductor()
            return fake(*arguments)

        @functools.wraps(run)
        def without_graph(*arguments: Any) -> Any:
            with torch.no_grad():
                return run(*arguments)

        LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        # On every device, as the adapter has the better error.
        LIBRARY.impl(name, without_graph, "CompositeExplicitAutograd")
        torch.library.register_fake(name, traced, lib=LIBRARY)
        _keep_order(name)
        return run

    return register


def _keep_order(name: str) -> None:
    """Without it, ranks whose graphs were optimized differently could wait for each other for ever."""
    register = getattr(torch.library, "_register_effectful_op", None)
    effects = getattr(torch.library, "EffectType", None)
    if register is not None and effects is not None:
        register(name, effects.ORDERED, lib=LIBRARY)
        _effectful.append(getattr(torch.ops.polyhvd, name.partition("::")[2]).default)


def _keep_order_in_inductor() -> None:
    """Inductor (torch 2.13) notes dependencies of effects under names that its scheduler does not look at."""
    lowering = sys.modules.get("torch._inductor.lowering")
    while lowering is not None and _effectful:
        operator = _effectful.pop()
        lowering.register_lowering(operator, type_promotion_kind=None)(functools.partial(_lower, operator))


def _lower(operator: Any, *arguments: Any) -> Any:
    from torch._inductor import lowering
    from torch._inductor.virtualized import V

    graph: Any = V.graph
    effects: Any = torch.library.EffectType  # type: ignore[attr-defined, unused-ignore]
    previous = graph.effectful_ops.get(effects.ORDERED)
    begin = len(graph.operations)
    result = lowering.fallback_handler(operator, add_to_fallback_set=False)(*arguments)
    for operation in graph.operations[begin:] if previous is not None else ():
        graph.additional_star_deps[operation.get_operation_name()].add(previous.get_name())
    return result


def _gradient(name: str, setup: Callable[..., None], backward: Callable[..., Any]) -> None:
    if LIBRARY is not None:
        torch.library.register_autograd(f"polyhvd::{name}", backward, setup_context=setup, lib=LIBRARY)


def _process_set(number: int) -> ProcessSet:
    if number == 0:
        return global_process_set
    ranks = current.world().process_sets().get(number)
    if ranks is None:
        raise InvalidArgumentError(f"process set {number} is no longer registered; compile again")
    found = ProcessSet(ranks)
    found.process_set_id = number
    return found


def _reduction(name: str | None, op: int, prescale: float, postscale: float, number: int) -> dict[str, Any]:
    return {
        "name": name,
        "op": op,
        "prescale_factor": prescale,
        "postscale_factor": postscale,
        "process_set": _process_set(number),
    }


def _like(tensors: Sequence[Tensor], *_: Any) -> list[Tensor]:
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]


def _with_rows(tensors: Sequence[Tensor], rows: Sequence[int], *_: Any) -> list[Tensor]:
    return [t.new_empty((count, *t.shape[1:])) for t, count in zip(tensors, rows, strict=True)]


def _checked(results: Sequence[Tensor], rows: Sequence[int]) -> list[Tensor]:
    """Check the number of rows: the graph reads as many as it was compiled for."""
    found = [t.shape[0] for t in results]
    if found != list(rows):
        raise HorovodInternalError(
            f"a compiled graph expects {list(rows)} rows, and the ranks have made {found}: there are not as "
            "many ranks as when it was compiled; call torch.compiler.reset()"
        )
    return list(results)


def _dense(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies in separate memory, which results of an operator must have."""
    return [t.clone(memory_format=torch.contiguous_format) for t in tensors]


# Reductions --------------------------------------------------------------------


@_operator(f"allreduce(Tensor[] tensors, {_REDUCTION}) -> Tensor[]", _like)
def _allreduce(tensors: Sequence[Tensor], *reduction: Any) -> list[Tensor]:
    return derivatives.simple.allreduce_group(tensors, **_reduction(*reduction))


@_operator(f"allreduce_gradient(Tensor[] gradients, {_REDUCTION}) -> Tensor[]", _like)
def _allreduce_gradient(gradients: Sequence[Tensor], *reduction: Any) -> list[Tensor]:
    return derivatives.allreduce_gradients(gradients, _reduction(*reduction))


def _keep_reduction(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.reduction = inputs[1:]


def _allreduce_backward(ctx: Any, gradients: Sequence[Tensor]) -> Any:
    chosen = derivatives.floating(gradients)
    own = torch.ops.polyhvd.allreduce_gradient([gradients[i] for i in chosen], *ctx.reduction)
    return derivatives.spread(len(gradients), chosen, own), *[None] * len(ctx.reduction)


_gradient("allreduce", _keep_reduction, _allreduce_backward)


@_operator(f"reducescatter(Tensor[] tensors, SymInt[] rows, {_REDUCTION}, {_EXACT}) -> Tensor[]", _with_rows)
def _reducescatter(tensors: Sequence[Tensor], rows: Sequence[int], *arguments: Any) -> list[Tensor]:
    *reduction, _ = arguments
    return _checked(derivatives.simple.reducescatter_group(tensors, **_reduction(*reduction)), rows)


@_operator(
    f"reducescatter_gradient(Tensor[] gradients, SymInt[] rows, {_REDUCTION}, {_EXACT}) -> Tensor[]",
    _with_rows,
)
def _reducescatter_gradient(
    gradients: Sequence[Tensor], rows: Sequence[int], *arguments: Any
) -> list[Tensor]:
    *reduction, exact = arguments
    return _checked(derivatives.reducescatter_gradients(gradients, rows, exact, _reduction(*reduction)), rows)


def _keep_rows_and_arguments(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.rows = [tensor.shape[0] for tensor in inputs[0]]
    ctx.arguments = inputs[2:]


def _reducescatter_backward(ctx: Any, gradients: Sequence[Tensor]) -> Any:
    chosen = derivatives.floating(gradients)
    own = torch.ops.polyhvd.reducescatter_gradient(
        [gradients[i] for i in chosen], [ctx.rows[i] for i in chosen], *ctx.arguments
    )
    return derivatives.spread(len(gradients), chosen, own), None, *[None] * len(ctx.arguments)


_gradient("reducescatter", _keep_rows_and_arguments, _reducescatter_backward)


# What moves tensors ------------------------------------------------------------


def _any_rows(tensors: Sequence[Tensor], *_: Any) -> list[Tensor]:
    counts: list[Any] = [torch.library.get_ctx().new_dynamic_size() for _ in tensors]
    return _with_rows(tensors, counts)


@_operator(f"allgather(Tensor[] tensors, str? name, int process_set, {_EXACT}) -> Tensor[]", _any_rows)
def _allgather(tensors: Sequence[Tensor], name: str | None, number: int, _exact: bool | None) -> list[Tensor]:
    return derivatives.simple.allgather_group(tensors, name=name, process_set=_process_set(number))


@_operator(
    "allgather_gradient(Tensor[] gradients, SymInt[] rows, str? name, int process_set, "
    f"{_EXACT}) -> Tensor[]",
    _with_rows,
)
def _allgather_gradient(
    gradients: Sequence[Tensor], rows: Sequence[int], name: str | None, number: int, exact: bool | None
) -> list[Tensor]:
    return _dense(derivatives.allgather_gradients(gradients, rows, name, _process_set(number), exact))


def _keep_rows(ctx: Any, inputs: Any, output: Any) -> None:
    tensors, *ctx.arguments = inputs
    ctx.rows = [tensor.shape[0] for tensor in tensors]


def _allgather_backward(ctx: Any, gradients: Sequence[Tensor]) -> Any:
    chosen = derivatives.floating(gradients)
    own = torch.ops.polyhvd.allgather_gradient(
        [gradients[i] for i in chosen], [ctx.rows[i] for i in chosen], *ctx.arguments
    )
    return derivatives.spread(len(gradients), chosen, own), *[None] * len(ctx.arguments)


_gradient("allgather", _keep_rows, _allgather_backward)


def _one_like(tensor: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


@_operator(
    f"broadcast(Tensor tensor, int root_rank, str? name, int process_set, {_EXACT}) -> Tensor", _one_like
)
def _broadcast(tensor: Tensor, root_rank: int, name: str | None, number: int, _exact: bool | None) -> Tensor:
    return derivatives.simple.broadcast_one(tensor, root_rank, name=name, process_set=_process_set(number))


@_operator(
    f"broadcast_gradient(Tensor gradient, int root_rank, str? name, int process_set, {_EXACT}) -> Tensor",
    _one_like,
)
def _broadcast_gradient(
    gradient: Tensor, root_rank: int, name: str | None, number: int, exact: bool | None
) -> Tensor:
    return derivatives.broadcast_gradient(gradient, root_rank, name, _process_set(number), exact)


def _keep_root(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.arguments = inputs[1:]


def _broadcast_backward(ctx: Any, gradient: Tensor) -> Any:
    return torch.ops.polyhvd.broadcast_gradient(gradient, *ctx.arguments), None, None, None, None


_gradient("broadcast", _keep_root, _broadcast_backward)


def _exchanged(tensor: Tensor, splits: Tensor | None, size: int, *_: Any) -> list[Tensor]:
    rows = torch.library.get_ctx().new_dynamic_size()
    return [tensor.new_empty((rows, *tensor.shape[1:])), tensor.new_empty((size,), dtype=torch.int32)]


# A list, not a tuple: inductor (torch 2.13) loses sizes in tuples of operators with effects.
@_operator(
    "alltoall(Tensor tensor, Tensor? splits, int size, str? name, int process_set) -> Tensor[]",
    _exchanged,
)
def _alltoall(
    tensor: Tensor, splits: Tensor | None, size: int, name: str | None, number: int
) -> list[Tensor]:
    process_set = _process_set(number)
    parts = derivatives.equal_parts(tensor, process_set) if splits is None else splits
    output, received = derivatives.simple.exchange(tensor, parts, name=name, process_set=process_set)
    _checked([received], [size])
    return [output, received]


@_operator(
    "alltoall_gradient(Tensor gradient, Tensor? splits, Tensor received, SymInt rows, str? name, "
    "int process_set) -> Tensor",
    lambda gradient, splits, received, rows, *_: gradient.new_empty((rows, *gradient.shape[1:])),
)
def _alltoall_gradient(
    gradient: Tensor, splits: Tensor | None, received: Tensor, rows: int, name: str | None, number: int
) -> Tensor:
    return derivatives.alltoall_gradient(
        gradient, rows, splits, received.tolist(), name, _process_set(number)
    )


def _keep_splits(ctx: Any, inputs: Any, output: Any) -> None:
    tensor, splits, _, *ctx.arguments = inputs
    ctx.rows = tensor.shape[0]
    ctx.save_for_backward(splits, output[1])


def _alltoall_backward(ctx: Any, gradients: Sequence[Tensor]) -> Any:
    splits, received = ctx.saved_tensors
    own = torch.ops.polyhvd.alltoall_gradient(gradients[0], splits, received, ctx.rows, *ctx.arguments)
    return own, None, None, None, None


_gradient("alltoall", _keep_splits, _alltoall_backward)
