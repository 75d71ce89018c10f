"""The order of numbers in tensors of Keras, followed through a graph of layers. Imports no Keras.

Keras has channels last where other frameworks have them first, so that rows made of images are in another
order. Layers that move axes in an unsupported manner are named.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

__all__ = ["CONVOLUTIONS", "DEPTHWISE", "SAME", "SEPARABLE", "Order", "Orders", "Shape", "is_a", "rows_of"]

#: Without the batch. Lengths that are not known are None, and match only themselves.
Shape = tuple[int, ...]

DEPTHWISE = ("BaseDepthwiseConv", "DepthwiseConv", "DepthwiseConv2D")
SEPARABLE = ("BaseSeparableConv", "SeparableConv")
CONVOLUTIONS = ("BaseConv", "Conv", "BaseConvTranspose", *DEPTHWISE, *SEPARABLE)
_DENSE = ("Dense", "EinsumDense")
#: These take and return sequences whose last axis is one of features in other frameworks, too.
_SEQUENCES = ("RNN", "Bidirectional", "Embedding", "MultiHeadAttention", "GroupQueryAttention", "Attention")
_RESHAPES = ("Flatten", "Reshape", "Ravel")
_TRANSPOSES = ("Permute", "Transpose")
_GLOBAL_POOLS = ("BaseGlobalPooling", "GlobalPooling1D", "GlobalPooling2D", "GlobalPooling3D")
#: These may change the number of channels.
_OF_CHANNELS = ("Concatenate", "Split", "GetItem", "SlicingOpLambda")
_REDUCTIONS = ("Mean", "Max", "Min", "Sum")


def is_a(layer: Any, *names: str) -> bool:
    """Return whether a layer is of a class of one of these names, or of one that derives from it."""
    return any(cls.__name__ in names for cls in type(layer).__mro__)


@dataclass(frozen=True)
class Order:
    """The order of the numbers of a tensor, beside that of the tensor in its place in other frameworks.

    Args:
        kind: "same"; "image": the last axis is the first one there; "rows": along the last axis are images
            that were flattened; "features": the last axis is the same, and the order of the others is not
            known; "unknown".
        parts: of rows: the shapes of the images, channels last. One axis: numbers in the same order.
        steps: of an image: how many axes before it are steps of time.
        by: the layer behind which the order is not known.
    """

    kind: str
    parts: tuple[Shape, ...] = ()
    steps: int = 0
    by: str = ""


SAME = Order("same")
_IMAGE = Order("image")


def rows_of(*parts: Shape) -> Order:
    """The order of images that were flattened, one after the other.

    Args:
        parts: their shapes, channels last.
    """
    joined: list[Shape] = []
    for part in parts:
        if _is_flat(part):
            flat = math.prod(part)
            if joined and len(joined[-1]) == 1:
                flat += joined.pop()[0]
            joined.append((flat,))
        else:
            joined.append(part)
    return SAME if all(len(part) == 1 for part in joined) else Order("rows", tuple(joined))


def _is_flat(shape: Shape) -> bool:
    """Return whether channels may come first or last."""
    return None in shape or shape[-1] == 1 or math.prod(shape[:-1]) == 1


def _name_of(operation: Any) -> str:
    return f"{type(operation).__name__} {operation.name!r}"


def _graph_of(layer: Any) -> Any:
    """The object that has the nodes of a model that is a graph; None: it is not a graph."""
    layer = getattr(layer, "_functional", None) or layer
    return layer if getattr(layer, "_nodes_by_depth", None) else None


def _shape_of(tensor: Any) -> Shape:
    return tuple(tensor.shape)[1:]


def _tensors(nest: Any) -> list[Any]:
    if isinstance(nest, dict):
        nest = list(nest.values())
    if isinstance(nest, (list, tuple)):
        return [tensor for each in nest for tensor in _tensors(each)]
    return [nest] if hasattr(nest, "shape") else []


@dataclass
class _Node:
    """One call of a layer, by its tensors' numbers. ``steps``: 1 drops an axis of time, -1 restores it."""

    operation: Any
    given: list[int]
    made: list[int]
    steps: int = 0


@dataclass
class _Flow:
    """The calls of a graph in order, with those of the graphs within it."""

    nodes: list[_Node] = field(default_factory=list)
    shapes: list[Shape] = field(default_factory=list)
    graphs: set[int] = field(default_factory=set)

    def inline(self, layer: Any, given: list[int] | None) -> list[int]:
        """Append the calls of a graph.

        Args:
            layer: the model.
            given: its inputs; None: those of the whole.

        Returns:
            its outputs.
        """
        graph = _graph_of(layer)
        self.graphs |= {id(layer), id(graph)}
        inputs = _tensors(graph.inputs)
        if given is None or len(given) != len(inputs):
            given = [self._new(_shape_of(tensor)) for tensor in inputs]
        known = {id(tensor): number for tensor, number in zip(inputs, given, strict=True)}
        for depth in sorted(graph._nodes_by_depth, reverse=True):
            for node in graph._nodes_by_depth[depth]:
                if not node.is_input:
                    self._call(node, known)
        return [known[id(tensor)] for tensor in _tensors(graph.outputs)]

    def _call(self, node: Any, known: dict[int, int]) -> None:
        operation = node.operation if hasattr(node, "operation") else node.layer
        tensors = node.input_tensors if hasattr(node, "operation") else node.keras_inputs
        given = [known[id(tensor)] for tensor in _tensors(tensors) if id(tensor) in known]
        outputs = _tensors(node.output_tensors)
        if _graph_of(operation) is not None:
            made = self.inline(operation, given)
        elif is_a(operation, "TimeDistributed") and len(given) == len(outputs) == 1:
            made = self._over_time(operation, given[0], _shape_of(outputs[0]))
        else:
            made = [self._new(_shape_of(tensor)) for tensor in outputs]
            self.nodes.append(_Node(operation, given, made))
        known.update((id(tensor), number) for tensor, number in zip(outputs, made, strict=False))

    def _over_time(self, operation: Any, given: int, shape: Shape) -> list[int]:
        step = self._new(self.shapes[given][1:])
        self.nodes.append(_Node(operation, [given], [step], steps=1))
        if _graph_of(operation.layer) is not None:
            within = self.inline(operation.layer, [step])
        else:
            within = [self._new(shape[1:])]
            self.nodes.append(_Node(operation.layer, [step], within))
        made = [self._new(shape)]
        self.nodes.append(_Node(operation, within, made, steps=-1))
        return made

    def _new(self, shape: Shape) -> int:
        self.shapes.append(shape)
        return len(self.shapes) - 1


class Orders:
    """The order of the inputs of all layers that are in graphs.

    Args:
        layers: of a model, with all within them.
    """

    def __init__(self, layers: Iterable[Any]) -> None:
        self._given: dict[int, Order] = {}
        self._units: dict[int, Shape] = {}
        seen = set[int]()
        for layer in layers:
            if id(layer) not in seen and _graph_of(layer) is not None:
                flow = _Flow()
                flow.inline(layer, None)
                seen |= flow.graphs
                self._follow(flow)

    def of(self, layer: Any) -> Order | None:
        """The inputs of a layer; None: it is in no graph."""
        return self._given.get(id(layer))

    def units_of(self, layer: Any) -> Shape | None:
        """The image, channels last, that a later layer makes of the units of a dense layer; None: none."""
        return self._units.get(id(layer))

    def _follow(self, flow: _Flow) -> None:
        images = _images_of_units(flow, self._units)
        orders = [_IMAGE if len(shape) > 2 else SAME for shape in flow.shapes]  # those of inputs stay
        for node in flow.nodes:
            given = [orders[number] for number in node.given]
            shapes = [flow.shapes[number] for number in node.given]
            if node.steps:
                moved = [_over_time(order, node.steps) for order in given]
            else:
                self._note(node.operation, given)
                moved = [self._made(node, given, shapes, flow.shapes[number], images) for number in node.made]
            for number, order in zip(node.made, moved, strict=True):
                orders[number] = order

    def _note(self, operation: Any, given: Sequence[Order]) -> None:
        """The inputs of a layer, and of those within it."""
        if not given:
            return
        waiting, seen = [operation], set[int]()
        while waiting:
            layer = waiting.pop()
            if id(layer) in seen:
                continue
            seen.add(id(layer))
            known = self._given.get(id(layer))
            first = given[0] if known is None else _common([known, given[0]], _name_of(layer))
            self._given[id(layer)] = first
            if is_a(layer, "StackedRNNCells"):
                waiting.append(layer.cells[0])
            elif is_a(layer, "RNN", "Bidirectional", "Wrapper", "MultiHeadAttention"):
                waiting += layer._layers if hasattr(layer, "_layers") else layer._flatten_layers()

    def _made(
        self,
        node: _Node,
        given: Sequence[Order],
        shapes: Sequence[Shape],
        shape: Shape,
        images: dict[int, Order],
    ) -> Order:
        """The order of what a call makes."""
        operation = node.operation
        name = _name_of(operation)
        if not given or is_a(operation, "ConvLSTM"):
            return Order("features", by=name) if given else SAME
        first = given[0]
        if is_a(operation, *CONVOLUTIONS):
            is_last = getattr(operation, "data_format", "channels_last") == "channels_last"
            return _IMAGE if is_last else SAME
        if is_a(operation, *_SEQUENCES):
            return SAME
        if is_a(operation, *_DENSE):
            units = self._units.get(id(operation))
            if units is not None and len(shape) == 1:
                return rows_of(units)
            if first.kind in ("image", "features") and len(shape) > 2:
                return Order("features", by=first.by or name)
            return SAME
        if is_a(operation, *_RESHAPES):
            if first == SAME and id(node) in images:
                return images[id(node)]
            if is_a(operation, "Flatten") and first == _IMAGE and _is_channels_first(operation):
                return SAME if _is_flat(shapes[0]) else Order("unknown", by=name)
            return _reshaped(first, shapes[0], shape, name)
        if is_a(operation, *_TRANSPOSES):
            return _permuted(operation, first, shapes[0], name)
        if is_a(operation, *_GLOBAL_POOLS):
            return first if first.kind in ("rows", "unknown") else SAME
        if is_a(operation, *_REDUCTIONS):
            axes = operation.axis if isinstance(operation.axis, (list, tuple)) else [operation.axis]
            keeps = None not in axes and all(axis % (len(shapes[0]) + 1) < len(shapes[0]) for axis in axes)
            return first if keeps or first == SAME else Order("unknown", by=name)
        if is_a(operation, "Concatenate") and len(shape) == 1:
            return _concatenated(given, shapes, name)
        return _passed(operation, given, shapes, shape)


def _is_channels_first(operation: Any) -> bool:
    return bool(getattr(operation, "data_format", None) == "channels_first")


def _over_time(order: Order, steps: int) -> Order:
    """Return the order of one step, or of all steps if ``steps`` is negative."""
    if order.kind == "image":
        return replace(order, steps=max(order.steps - steps, 0))
    return order


def _common(orders: Sequence[Order], name: str) -> Order:
    """Return the order of tensors that are combined element by element."""
    if all(order == orders[0] for order in orders):
        return orders[0]
    for order in orders:
        if order.kind == "unknown":
            return order
    if any(order.kind == "rows" for order in orders):
        return Order("unknown", by=name)
    return Order("features", by=next((order.by for order in orders if order.by), name))


def _concatenated(given: Sequence[Order], shapes: Sequence[Shape], name: str) -> Order:
    """Return the order of concatenated rows."""
    parts: list[Shape] = []
    for order, shape in zip(given, shapes, strict=True):
        if order.kind == "unknown":
            return order
        parts += order.parts if order.kind == "rows" else [shape]
    return rows_of(*parts)


def _passed(operation: Any, given: Sequence[Order], shapes: Sequence[Shape], shape: Shape) -> Order:
    """Return the order of the result of a layer that moves no axes, as far as shapes show."""
    name = _name_of(operation)
    if len(given) > 1:
        # A mask of channels, [1, 1, channels], lies as an image of one pixel does.
        of_size = [o for o, s in zip(given, shapes, strict=True) if not _is_flat(s)] or list(given)
    else:
        of_size = list(given)
    common = _common(of_size, name)
    if common == SAME or common.kind == "unknown":
        return common
    if common.kind == "rows":
        is_kept = shapes[0][-1:] == shape[-1:] and len(shape) <= len(shapes[0]) + 1
    else:
        is_kept = all(len(other) == len(shape) for other in shapes) and (
            shapes[0][-1] == shape[-1] or is_a(operation, *_OF_CHANNELS)
        )
    return common if is_kept else Order("unknown", by=name)


def _reshaped(order: Order, before: Shape, after: Shape, name: str) -> Order:
    if order.kind in ("same", "unknown") or before == after:
        return order
    if order.kind == "rows":
        if len(order.parts) == 1 and len(before) == 1:
            image = order.parts[0]
            if after == image or (len(after) > 1 and after[-1] == image[-1]):
                return _IMAGE
        if len(before) == 2 and len(after) == 1 and None not in before:
            return rows_of(*order.parts * before[0])
        return Order("unknown", by=name)
    if order.kind == "image":
        image = before[order.steps :]
        if before[: order.steps] == after[:-1] and None not in image and after[-1] == math.prod(image):
            return rows_of(image)
        if _is_flat(image) and None not in image and not order.steps:
            return SAME
    if order.steps == 0 and before[-1] == after[-1]:
        return order
    if order.kind == "features" and None not in before and _is_flat(before):
        return SAME
    return Order("unknown", by=order.by or name)


def _permuted(operation: Any, order: Order, shape: Shape, name: str) -> Order:
    axes = getattr(operation, "dims", None) or getattr(operation, "axes", None)
    if order == SAME or order.kind == "unknown":
        return order
    axes = tuple(axes or reversed(range(len(shape) + 1)))
    axes = axes if 0 not in axes else axes[1:]  # those of a batch stay
    if order.kind != "rows" and axes[-1:] == (len(shape),):
        return order
    if order == _IMAGE and axes == (len(shape), *range(1, len(shape))):
        return SAME  # channels come first now
    return Order("unknown", by=name)


# Dense layers whose units become images -------------------------------------------


def _images_of_units(flow: _Flow, units: dict[int, Shape]) -> dict[int, Order]:
    """The orders of what layers make that see units as an image, by their calls.

    Args:
        flow: the calls.
        units: is given the image of each dense layer.
    """
    makers = {number: node for node in flow.nodes for number in node.made}
    users: dict[int, list[_Node]] = {}
    for node in flow.nodes:
        for number in node.given:
            users.setdefault(number, []).append(node)
    found: dict[int, Order] = {}
    for node in flow.nodes:
        if node.steps or not is_a(node.operation, *_RESHAPES) or len(node.given) != 1:
            continue
        before, after = flow.shapes[node.given[0]], flow.shapes[node.made[0]]
        if len(before) != 1 or len(after) < 2 or _is_flat(after):
            continue
        kinds = _uses(flow, users, node.made[0])
        is_image = "convolution" in kinds or (not kinds and len(after) > 2)
        if not is_image:
            continue
        made = _dense_behind(flow, makers, node.given[0])
        by = _name_of(node.operation)
        if made is None or (len(after) == 2 and len(kinds) > 1):
            found[id(node)] = Order("unknown", by=by)
            continue
        for layer in made:
            if units.setdefault(id(layer), after) != after:
                found[id(node)] = Order("unknown", by=by)
    return found


def _uses(flow: _Flow, users: dict[int, list[_Node]], number: int) -> set[str]:
    """Which kinds of layers a tensor of images or sequences gets to: "convolution", "features"."""
    kinds, waiting, seen = set[str](), [number], set[int]()
    while waiting:
        tensor = waiting.pop()
        if tensor in seen:
            continue
        seen.add(tensor)
        for node in users.get(tensor, []):
            if is_a(node.operation, *CONVOLUTIONS):
                kinds.add("convolution")
            elif node.steps or is_a(node.operation, *_SEQUENCES, *_DENSE):
                kinds.add("features")
            elif not is_a(node.operation, *_RESHAPES):
                waiting += [each for each in node.made if len(flow.shapes[each]) == len(flow.shapes[tensor])]
    return kinds


def _dense_behind(flow: _Flow, makers: dict[int, _Node], number: int) -> list[Any] | None:
    """The dense layers that have made a row, element by element; None: something else has, too.

    A row of an input of the model, or of an image that was flattened, has none.
    """
    found, waiting = list[Any](), [number]
    while waiting:
        node = makers.get(waiting.pop())
        if node is None or is_a(node.operation, *_RESHAPES):
            continue
        if is_a(node.operation, "Dense"):
            found.append(node.operation)
            continue
        same = [each for each in node.given if flow.shapes[each] == flow.shapes[number]]
        if node.steps or is_a(node.operation, *_SEQUENCES) or len(same) != len(node.given):
            return None
        waiting += same
    return found
