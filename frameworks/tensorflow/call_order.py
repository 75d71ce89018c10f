"""The order of calls in a graph that have names of collectives in common.

Names are counted in the graph that a function is traced to, so two calls of one function have the same
ones, and so may calls of two. TensorFlow runs calls in parallel whenever their data allow it, in an order
that each rank decides for itself, and ranks would match one call with the other. Hence each such call,
whatever graph it is made in, waits for the one before it: the order is that of the program, equal on all
ranks. Calls without a name in common stay free, and so do the collectives of one function.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from polyhvd.errors import HorovodVersionMismatchError

__all__ = ["keep_calls_in_order", "names_in"]

Names = frozenset[tuple[int, str]]

#: Ops that run functions as a part of the graph that they are in, and may have effects.
_CALLS = frozenset({"StatefulPartitionedCall", "If", "While", "Case"})
_OURS = "Polyhvd"
_NO_COLLECTIVE = "PolyhvdGeneration"
_LAST = "_polyhvd_last_of_name"
_KNOWN = "_polyhvd_names_in"


def keep_calls_in_order(tensorflow_version: str) -> None:
    """Have every graph of a function order its calls, as soon as they are made.

    TensorFlow makes all its ops in one place: those of the user's function, of its gradient, of branches
    and of bodies. Imported graphs have their order, and that of a graph of tf.compat.v1 is not changed, as
    only fetched operations run there. The function below is not on the stack that TensorFlow keeps for ops.
    """
    from tensorflow.python.framework import ops

    original = getattr(ops.Graph, "_create_op_helper", None)
    if original is None:
        raise HorovodVersionMismatchError(
            f"polyhvd.tensorflow does not support this TensorFlow ({tensorflow_version}): calls of functions "
            "cannot be kept in order; TensorFlow 2.13 and later are supported"
        )

    @functools.wraps(original)
    def create(graph: Any, operation: Any, compute_device: bool = True) -> None:
        original(graph, operation, compute_device)
        if compute_device and _is_relevant(operation.type) and graph.building_function:
            _order(graph, operation)

    ops.Graph._create_op_helper = create


def _order(graph: Any, operation: Any) -> None:
    names = _names_of(graph, operation)
    if not names:
        return
    last = getattr(graph, _LAST, None)
    if last is None:
        last = {}
        setattr(graph, _LAST, last)
    # Within the frame of a loop of tf.compat.v1 no op can wait for one outside.
    frame = operation._control_flow_context
    before = dict.fromkeys(
        last[name] for name in sorted(names) if name in last and last[name]._control_flow_context is frame
    )
    operation._add_control_inputs(list(before))
    last.update(dict.fromkeys(names, operation))
    if getattr(graph, "experimental_acd_manager", None) is None:
        # Nothing else makes a call of this function, such as a gradient, end after its collectives.
        graph.control_outputs.append(operation)


def names_in(graph: Any) -> Names:
    """The process sets and names of all collectives that a graph runs, also in the functions it calls."""
    version = graph.version
    known: tuple[int, Names] | None = getattr(graph, _KNOWN, None)
    if known is None or known[0] != version:
        found = [_names_of(graph, op) for op in graph.get_operations() if _is_relevant(op.type)]
        known = version, frozenset().union(*found)
        setattr(graph, _KNOWN, known)
    return known[1]


def _is_relevant(op_type: str) -> bool:
    return op_type in _CALLS or (op_type.startswith(_OURS) and op_type != _NO_COLLECTIVE)


def _names_of(graph: Any, operation: Any) -> Names:
    if operation.type.startswith(_OURS):
        name = operation.get_attr("tensor_name").decode()
        return frozenset({(operation.get_attr("process_set"), name)})
    called = (_graph_of(graph, name) for name in _functions(operation.node_def))
    return frozenset().union(*(names_in(function) for function in called if function is not None))


def _functions(node: Any) -> Iterable[str]:
    for value in node.attr.values():
        if value.HasField("func"):
            yield value.func.name
        for function in value.list.func:
            yield function.name


def _graph_of(graph: Any, name: str) -> Any:
    while graph is not None:
        function = graph._get_function(name)
        if function is not None:
            return getattr(function, "graph", None)
        graph = getattr(graph, "outer_graph", None)
    return None
