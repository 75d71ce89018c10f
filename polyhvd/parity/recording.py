"""What is written down of a model in training, step by step: traces of all that can differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from polyhvd.parity.comparing import array_of
from polyhvd.parity.traces import Key, Trace, common_input, joined, trace_of
from polyhvd.training.mapping import Weight

__all__ = ["Recorder", "layers_of"]

Array = np.ndarray[Any, Any]


def layers_of(weights: Sequence[Weight]) -> list[Weight]:
    """Of each layer with weights the first one."""
    found: list[Weight] = []
    for weight in weights:
        if weight.layer is not None and all(weight.layer is not known.layer for known in found):
            found.append(weight)
    return found


class Recorder:
    """Writes down the traces of a model and its optimizer.

    In a step: :meth:`begin`, :meth:`data`, the hooks of :meth:`hears` and :meth:`hears_output` in forward,
    :meth:`gradients` for those of this rank and for the averaged ones, :meth:`update`, and :meth:`take`.

    Args:
        weights: of the model.
        batch_norm_of: what a layer keeps of its running statistics, as of
            :class:`polyhvd.parity.session.Session`.
        part: of the batch: which of how many.
        keeps_all: whether a step's passes have parts of one batch; else the last pass counts.
        joined: over how many ranks batch normalization is.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        batch_norm_of: Callable[[Any], tuple[float, bool] | None],
        *,
        part: tuple[int, int] = (0, 1),
        keeps_all: bool = True,
        joined: int = 1,
    ) -> None:
        self.traces: dict[Key, Trace] = {}
        #: Most that are added up for one element: of a layer's inputs, or of a batch for a gradient.
        self.terms = 0
        self.weights = list(weights)
        self.layers = layers_of(self.weights)
        self._part = part
        self._keeps_all = keeps_all
        self._joined = joined
        self._parts: dict[Key, list[tuple[int, str, Array]]] = {}
        self._before: list[Array] = []
        self._statistics = [
            batch_norm_of(weight.layer) if weight.role in ("mean", "variance") else None
            for weight in self.weights
        ]
        #: Running statistics at the end of the last step: a forward pass changes them.
        self._running = {
            place: weight.read()
            for place, weight in enumerate(self.weights)
            if weight.role in ("mean", "variance")
        }
        #: Running variances, as they were with those of the batches themselves.
        self._variances = {
            place: array.astype(np.float64)
            for place, array in self._running.items()
            if self.weights[place].role == "variance"
        }
        self._heard: Counter[int] = Counter()  # how often a layer was given something, by number

    # Hooks ----------------------------------------------------------------------

    def hears(self, number: int) -> Callable[[Any], None] | None:
        """What is to be told of the input of a layer; None: nothing.

        Args:
            number: of the layer.
        """
        weight = self.layers[number]
        if weight.role in ("input kernel", "state kernel"):
            return None
        made_by = self.layers[max(number - 1, 0)]

        def tell(tensor: Any) -> None:
            array = common_input(array_of(tensor)[1], weight)
            key = ("activation" if number else "input", number)
            self._keep(key, max(number - 1, 0), made_by.name, array)

        return tell

    def hears_output(self, tensor: Any) -> None:
        """Is to be told of the output of the model."""
        number = len(self.layers)
        array = array_of(tensor[0] if isinstance(tensor, (list, tuple)) else tensor)[1]
        if self.layers[-1].channels_last and array.ndim > 3:
            array = np.moveaxis(array, -1, 1)
        self._keep(("activation", number), number - 1, self.layers[-1].name, array)

    def _keep(self, key: Key, layer: int, name: str, array: Array) -> None:
        parts = self._parts.setdefault(key, [])
        if key[0] != "data":
            self._heard[key[1]] += 1
        if not self._keeps_all:
            parts.clear()
        parts.append((layer, name, array))

    # A step ---------------------------------------------------------------------

    def begin(self) -> None:
        """What the weights are before the step."""
        self._before = [
            self._running[place] if place in self._running else weight.read()
            for place, weight in enumerate(self.weights)
        ]
        for place, weight in enumerate(self.weights):
            if weight.role != "variance":  # which frameworks define in two ways; see statistics
                self._note_weight("weights", place, self._before[place], weight.role)

    def data(self, inputs: Array, targets: Array) -> None:
        """This rank's part of the batch, of which each pass has a part."""
        for place, (name, array) in enumerate((("inputs", inputs), ("targets", targets))):
            self._keep(("data", place), 0, f"the {name} of the batch", array)

    def gradients(self, kind: str, gradient_of: Callable[[Weight], Any]) -> None:
        """Of all weights.

        Args:
            kind: "gradient" or "average".
            gradient_of: a weight, as a tensor; None: it has none.
        """
        for place, weight in enumerate(self.weights):
            tensor = gradient_of(weight) if weight.trainable else None
            if tensor is not None:
                self._note_part(kind, place, array_of(tensor)[1], tuple(tensor.shape))

    def update(self, rate: float, states_of: Callable[[Weight], dict[str, Any]]) -> None:
        """What the optimizer has made of the weights, and batches of running statistics; after the update.

        Args:
            rate: learning rate that was used.
            states_of: a weight, by kind.
        """
        self.passes()
        self._note(trace_of("learning rate", 0, 0, "the learning rate", np.array([rate], np.float32)))
        for place, weight in enumerate(self.weights):
            after = weight.read()
            if weight.trainable:
                self._note_weight("update", place, after - self._before[place])
                for kind, array in states_of(weight).items():
                    self._note_part(kind, place, np.asarray(array, np.float32), tuple(array.shape))
            elif place in self._running:
                self._note_statistics(place, after)
                self._running[place] = after
        self._heard.clear()

    def passes(self) -> None:
        """What layers were given and made since the last step."""
        self._shown = {key[1]: parts[0][2] for key, parts in self._parts.items() if key[0] != "data"}
        shapes = [weight.layout.common_shape for weight in self.weights]
        self.terms = max([0, *(int(np.prod(shape[1:])) for shape in shapes if len(shape) > 1)])
        for (kind, place), parts in self._parts.items():
            layer, name, first = parts[0]
            features = first.shape[1 if first.ndim == 4 else -1] if first.ndim > 1 else 1
            if kind != "data":
                self.terms = max(self.terms, first.size // max(features, 1) * len(parts))
            number, of = self._part
            passes = []
            for index, (_, _, array) in enumerate(parts):
                if array.dtype.kind in "iub":  # frameworks have whole numbers of other kinds
                    array = array.astype(np.float32)
                part = (index * of + number, of * len(parts))
                detail = ("inputs", "targets")[place] if kind == "data" else ""
                passes.append(trace_of(kind, place, layer, name, array, part, detail))
            self._note(joined(passes))
        self._parts.clear()

    def _note_statistics(self, place: int, after: Array) -> None:
        """What a step has made of a running mean or variance, the latter by the batch's own variance.

        An unbiased variance is n / (n - 1) times that, with n values for each channel: what a step adds is
        divided by it.
        """
        weight, before = self.weights[place], self._before[place]
        if weight.role == "mean":
            self._note_weight("statistics", place, after - before, "mean")
            return
        known, layer = self._statistics[place], self._layer_of(weight)
        shown, passes = self._shown.get(layer), self._heard[layer]
        if known is None or shown is None or shown.ndim < 2:
            return
        keep = known[0] ** passes
        count = shown.size // shown.shape[1] * self._joined
        factor = count / (count - 1) if known[1] and count > 1 else 1.0
        last = self._variances[place]
        new = keep * last + (after - keep * before.astype(np.float64)) / factor
        self._variances[place] = new
        self._note_weight("statistics", place, (new - last).astype(np.float32), "variance")

    def _layer_of(self, weight: Weight) -> int:
        return next((i for i, known in enumerate(self.layers) if known.layer is weight.layer), 0)

    def _note_part(self, kind: str, place: int, array: Array, shape: tuple[int, ...]) -> None:
        weight = self.weights[place]
        if array.ndim > len(weight.layout.shape):  # both biases of a cell of Keras
            array = array[0 if weight.role == "input bias" else 1]
        if weight.role == "state bias" and not weight.is_whole and shape == weight.layout.shape:
            return  # of the one bias that Keras has, which is the other one's already
        self._note_weight(kind, place, array)

    def _note_weight(self, kind: str, place: int, array: Array, detail: str = "") -> None:
        weight = self.weights[place]
        common = weight.layout.array_to_common(array)
        self._note(trace_of(kind, place, self._layer_of(weight), weight.name, common, detail=detail))

    def _note(self, trace: Trace) -> None:
        self.traces[trace.key] = trace

    def take(self) -> dict[Key, Trace]:
        """The traces of the step, which ends."""
        taken, self.traces = self.traces, {}
        return taken
