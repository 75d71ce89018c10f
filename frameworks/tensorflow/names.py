"""Names of operations in graphs, and the lines they come from.

Ranks match operations by name, so a name must be the same on all ranks, the same in every step, and
different for two operations that may be in flight together. It is made of the Python function's name
and the operation's place in it, never of TensorFlow's process-wide counters.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import tensorflow as tf

import polyhvd

__all__ = ["caller_line", "do_not_convert", "graph_of_call", "in_graph", "unnamed_in_graph"]

F = TypeVar("F", bound=Callable[..., Any])

_COUNTED = "_polyhvd_names"
_GENERATED = re.compile(r"^__(forward|backward|inference)_(.*)_\d+$")
_CONTROL_FLOW = ("CondBranchFuncGraph", "WhileCondFuncGraph", "WhileBodyFuncGraph")
_NOT_CALLERS = ("polyhvd", "tensorflow", "keras", "tf_keras")
_OURS = "|".join(re.escape(str(Path(path).parent)) for path in (__file__, polyhvd.__file__))
_IN_A_FRAMEWORK = re.compile(rf"^({_OURS})/|/site-packages/({'|'.join(_NOT_CALLERS)})/|^<")


def do_not_convert(function: F) -> F:
    """Mark what a user may call in a ``tf.function``: AutoGraph is not to rewrite polyhvd.

    Unlike TensorFlow's public decorator this adds no call in between, which would cost time and stand
    for the caller in the core's messages.
    """
    from tensorflow.python.autograph.impl import api

    mark = getattr(api, "autograph_artifact", tf.autograph.experimental.do_not_convert)
    marked: F = mark(function)
    return marked


def in_graph(name: str, process_set: int) -> str:
    """``name``, or ``name_1`` and so on when this graph has it already for the process set.

    Each set counts for itself, since only its members trace its operations.
    """
    graph = tf.compat.v1.get_default_graph()
    counts = getattr(graph, _COUNTED, None)
    if counts is None:
        counts = Counter[tuple[str, int]]()
        setattr(graph, _COUNTED, counts)
    number = counts[name, process_set]
    counts[name, process_set] += 1
    return f"{name}_{number}" if number else name


def graph_of_call() -> Any:
    """The graph that is being made, or the one that has it as a branch or the body of a loop."""
    graph = tf.compat.v1.get_default_graph()
    while type(graph).__name__ in _CONTROL_FLOW:
        graph = graph.outer_graph
    return graph


def unnamed_in_graph(kind: str, process_set: int) -> str:
    """Such as ``allreduce.train_step.0``."""
    parts: list[str] = []
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        name = getattr(graph, "name", "") or "graph"
        if type(graph).__name__ in _CONTROL_FLOW:
            # A branch or body is traced again with its function; its name ends in a counter.
            parts.append(re.sub(r"_\d+$", "", name))
            graph = getattr(graph, "outer_graph", None)
            continue
        generated = _GENERATED.match(name)
        parts.append(f"{generated[1]}_{generated[2]}" if generated else name)
        break
    return in_graph(f"{kind}.{'.'.join(reversed(parts))}.0", process_set)


def caller_line() -> str:
    """``train.py:88``: the innermost line outside polyhvd, TensorFlow and Keras."""
    frame: Any = sys._getframe(1)
    if not tf.executing_eagerly() and _all_utf8(frame):
        return _traced_line()
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _NOT_CALLERS:
            return _line(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return ""


def _all_utf8(frame: Any) -> bool:
    """Return whether TensorFlow can read the names of the files of a stack; at others it may crash."""
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.isascii() and path != path.encode("utf-8", "replace").decode():
            return False
        frame = frame.f_back
    return True


def _line(path: str, number: int) -> str:
    """Return the file name and the number, as valid UTF-8: a name in another encoding is escaped."""
    name = path.rpartition("/")[2].encode("utf-8", "backslashreplace").decode()
    return f"{name}:{number}"


def _traced_line() -> str:
    """While a function is traced, AutoGraph runs a copy of it: TensorFlow knows the lines it came from."""
    from tensorflow.python.util import tf_stack

    for frame in reversed(list(tf_stack.extract_stack())):
        if not _IN_A_FRAMEWORK.search(frame.filename):
            return _line(frame.filename, frame.lineno)
    return ""
