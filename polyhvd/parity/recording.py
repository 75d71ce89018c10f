"""Records a model in training, step by step: sketches of everything that can differ."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from polyhvd import _core
from polyhvd.parity.comparing import array_of
from polyhvd.parity.pages import Page
from polyhvd.parity.traces import Facts, Key, Trace, common_input
from polyhvd.training.mapping import Weight

__all__ = ["Recorder", "first_of", "layers_of", "view_of"]

Array = np.ndarray[Any, Any]
#: Dtype and shape, as the core has found them.
Form = tuple[str, tuple[int, ...]]
#: Frameworks have whole numbers of other kinds, so that all are taken for these.
_WHOLE = "float32"


def layers_of(weights: Sequence[Weight]) -> list[Weight]:
    """Return the first weight of each layer with weights."""
    found: list[Weight] = []
    for weight in weights:
        if weight.layer is not None and all(weight.layer is not known.layer for known in found):
            found.append(weight)
    return found


def view_of(tensor: Any) -> Any:
    """The tensor, if the core can read its type in place, on a CPU and dense; else None."""
    return tensor if hasattr(type(tensor), "__dlpack_c_exchange_api__") else None


def first_of(given: Any) -> Any:
    """The tensor itself, or the first one of several; None: there is none."""
    while not hasattr(type(given), "shape") and isinstance(given, (list, tuple, Mapping)):
        given = next(iter(given.values() if isinstance(given, Mapping) else given), None)
    return given if hasattr(type(given), "shape") else None


def _dense(array: Array) -> Array:
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


@dataclass
class _Passes:
    """The passes of a step in which a layer got an input.

    Args:
        count: how many.
        shape: of the first of them; where only the last counts, of that.
    """

    count: int
    shape: tuple[int, ...]


class Recorder:
    """Records sketches of a model and its optimizer.

    In a step: :meth:`begin`, :meth:`data`, the callbacks of :meth:`input_listener` and :meth:`record_output`
    in forward, :meth:`gradients` for those of this rank and for the averaged ones, :meth:`update`, and
    :meth:`take` or :meth:`page`.

    Tensors in common form in this process's memory are read in place, all of a kind in one call.

    Args:
        weights: of the model.
        batch_norm_of: what a layer keeps of its running statistics, as of
            :class:`polyhvd.parity.session.Session`.
        part: of the batch: which of how many.
        keeps_all: whether a step's passes have parts of one batch; else the last pass counts.
        joined: over how many ranks batch normalization is.
        view_of: returns a view of a tensor, or of a weight's source, that the core can read in place, when
            its values are complete; None: it has to be copied.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        batch_norm_of: Callable[[Any], tuple[float, bool] | None],
        *,
        part: tuple[int, int] = (0, 1),
        keeps_all: bool = True,
        joined: int = 1,
        view_of: Callable[[Any], Any] = view_of,
    ) -> None:
        self.weights = list(weights)
        self.layers = layers_of(self.weights)
        self._part = part
        self._keeps_all = keeps_all
        self._joined = joined
        self._view_of = view_of
        # Sketches of the step, each in the row that its key has got once for all; the first is the page's.
        self._rows = np.zeros((1 + 6 * len(self.weights) + 4, _core.SKETCH_NUMBERS))
        self._scratch = np.zeros((1, _core.SKETCH_NUMBERS))
        self._places: dict[Key, int] = {}
        self._facts: list[Facts] = []  # by row, from the second on
        self._forms: list[Form | None] = []  # likewise
        self._filled: set[int] = set()
        self._open_rows: dict[str, tuple[list[int], list[int]]] = {}  # places of weights and rows, by kind
        self._paged: tuple[list[int], int, tuple[Facts, ...]] | None = None  # None: facts have changed
        self._layer_passes: dict[Key, _Passes] = {}
        self._before: list[Any] = [None] * len(self.weights)
        self._rate = np.zeros(1, np.float32)
        numbers = {id(weight.layer): number for number, weight in reversed([*enumerate(self.layers)])}
        self._layer_of = [numbers.get(id(weight.layer), 0) for weight in self.weights]
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
        self._knows_running = True
        #: Running variances, as they were with those of the batches themselves.
        self._variances = {
            place: array.astype(np.float64)
            for place, array in self._running.items()
            if self.weights[place].role == "variance"
        }
        self._is_paused = False
        self._passes: Counter[int] = Counter()  # how often a layer was given something, by number
        self._open = [
            weight.is_whole and weight.layout.is_common and view_of(weight.source) is not None
            for weight in self.weights
        ]
        #: For copies of weights that are read where they lie.
        self._buffers = {
            place: np.empty(self._running.get(place, weight.read()).nbytes, np.uint8)
            for place, weight in enumerate(self.weights)
            if self._open[place] and place not in self._running
        }

    # Rows -----------------------------------------------------------------------

    def _row(self, kind: str, place: int, layer: int, name: str, detail: str = "") -> int:
        """The row of a key."""
        found = self._places.get((kind, place))
        if found is None:
            found = len(self._facts) + 1
            self._places[kind, place] = found
            self._facts.append(Facts(kind, place, layer, name, (), "", detail))
            self._forms.append(None)
            if found == len(self._rows):
                self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
        return found

    def _row_of_weight(self, kind: str, place: int, detail: str = "") -> int:
        if (found := self._places.get((kind, place))) is not None:
            return found
        return self._row(kind, place, self._layer_of[place], self.weights[place].name, detail)

    def _fill(self, rows: list[int], tensors: list[Any], dtype: str = "", **options: Any) -> list[int]:
        """Sketch tensors in place; returns the indices of those that the core cannot read.

        Args:
            rows: of the sketches.
            tensors: of which types the core reads.
            dtype: recorded instead of theirs; empty: theirs.
            options: of ``_core.sketch``.
        """
        forms = _core.sketch(tensors, self._rows, rows, **options)
        self._filled.update(rows)
        if None not in forms:
            for row, form in zip(rows, forms, strict=True):
                if self._forms[row - 1] != form:
                    self._describe(row, form, dtype)  # type: ignore[arg-type]
            return []
        closed = []
        for index, (row, form) in enumerate(zip(rows, forms, strict=True)):
            if form is None:
                self._filled.discard(row)
                closed.append(index)
            else:
                self._describe(row, form, dtype)
        return closed

    def _fill_array(self, row: int, array: Array, less: Any = None) -> None:
        """Sketch an array in common form."""
        dense = _dense(array)
        if self._fill([row], [dense], less=[less]):  # a type that the core does not know
            wide = None if less is None else less.astype(np.float64)
            self._fill([row], [dense.astype(np.float64)], array.dtype.name, less=[wide])

    def _describe(self, row: int, form: Form, dtype: str = "") -> None:
        if self._forms[row - 1] != form:
            self._forms[row - 1] = form
            self._facts[row - 1] = self._facts[row - 1]._replace(dtype=dtype or form[0], shape=form[1])
            self._paged = None

    # Hooks ----------------------------------------------------------------------

    def input_listener(self, number: int) -> Callable[[Any], None] | None:
        """The callback that records a layer's input; None: nothing is recorded for it.

        Args:
            number: of the layer.
        """
        weight = self.layers[number]
        if weight.role in ("input kernel", "state kernel"):
            return None
        key = ("activation" if number else "input", number)
        row = self._row(*key, max(number - 1, 0), self.layers[max(number - 1, 0)].name)
        common = weight.layout.common_shape
        inputs = common[1] if weight.role == "kernel" and len(common) == 2 else None
        is_plain = not weight.channels_last and not weight.rows

        def listener(tensor: Any) -> None:
            tensor = first_of(tensor)
            if tensor is None or self._is_paused:
                return
            if getattr(
                weight.layer, "training", True
            ):  # PyTorch's flag; in evaluation statistics do not change
                self._passes[number] += 1
            is_common = is_plain and (inputs is None or tensor.shape[-1] == inputs)
            view = self._view_of(tensor) if is_common else None
            if view is None or not self._keep(key, row, view, tensor.shape):
                self._keep_array(key, row, common_input(array_of(tensor)[1], weight))

        return listener

    def record_output(self, tensor: Any) -> None:
        """Record the output of the model; of several, or of a dict of them, the first one."""
        last, number = self.layers[-1], len(self.layers)
        key = ("activation", number)
        row = self._row(*key, number - 1, last.name)
        tensor = first_of(tensor)
        if tensor is None or self._is_paused:
            return
        view = None if last.channels_last else self._view_of(tensor)
        if view is not None and self._keep(key, row, view, tensor.shape):
            return
        array = array_of(tensor)[1]
        if last.channels_last and array.ndim > 3:
            array = np.moveaxis(array, -1, 1)
        self._keep_array(key, row, array)

    def _keep_array(self, key: Key, row: int, array: Array) -> None:
        if array.dtype.kind in "iub":
            array = array.astype(_WHOLE)
        if not self._keep(key, row, _dense(array), array.shape):
            self._keep(key, row, _dense(array.astype(np.float64)), array.shape, array.dtype.name)

    def _keep(self, key: Key, row: int, tensor: Any, shape: Sequence[int], dtype: str = "") -> bool:
        """Sketch a layer's input; False: the core cannot read it in place, or it has whole numbers."""
        passes = self._layer_passes.get(key) if self._keeps_all else None
        number, of = self._part
        part = (0 if passes is None else passes.count) * of + number
        begin = part * math.prod(shape) if part else 0
        (form,) = _core.sketch([tensor], self._scratch, [0], begins=[begin])
        if form is None or form[0].startswith(("int", "uint", "bool")):
            return False
        if passes is None:
            self._layer_passes[key] = _Passes(1, form[1])
            self._rows[row] = self._scratch[0]
            self._filled.add(row)
        else:
            passes.count += 1
            whole, more = self._rows[row], self._scratch[0]
            norm = math.hypot(whole[0], more[0])
            whole += more
            whole[0] = norm
            rows = (self._facts[row - 1].shape or (0,))[0] + (form[1] or (0,))[0]
            form = form[0], (rows, *form[1][1:]) if form[1] else ()
        self._describe(row, form, dtype)
        return True

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Record no inputs and outputs of layers within this block: its passes are not part of training."""
        was, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = was

    # A step ---------------------------------------------------------------------

    def forget_statistics(self) -> None:
        """Forget running statistics: another rank's have replaced them, before a forward pass or since.

        Their values before the step that begins are unknown, and are not recorded.
        """
        self._passes.clear()
        self._knows_running = False
        for place in self._running:
            self._running[place] = self.weights[place].read()
        for place in self._variances:
            self._variances[place] = self._running[place].astype(np.float64)

    def begin(self) -> None:
        """Record the weights before the step, and drop the records of a step that has failed."""
        if len(self._filled) > len(self._layer_passes):
            self._filled.intersection_update(self._places[key] for key in self._layer_passes)
        for place in self._sketch_open("weights", copies=True):
            weight = self.weights[place]
            array = self._running[place] if place in self._running else weight.read()
            if place in self._running:
                self._before[place] = array
            if place in self._running and not self._knows_running:
                continue
            if weight.role == "variance":  # frameworks have two definitions of it; see statistics
                continue
            common = _dense(weight.layout.array_to_common(array))
            if place not in self._running:
                self._before[place] = common
            self._fill_array(self._row_of_weight("weights", place, weight.role), common)

    def _sketch_open(self, kind: str, *, copies: bool) -> list[int]:
        """Sketch the weights that are read where they lie, or what has become of them; returns the others.

        Args:
            kind: of the sketches.
            copies: whether to copy weights; else what was copied is subtracted.
        """
        if copies:
            places = list(self._buffers)
            beside: dict[str, Any] = {"copies": list(self._buffers.values())}
        else:
            places = [
                place
                for place, buffer in self._buffers.items()
                if self.weights[place].trainable and self._before[place] is buffer
            ]
            beside = {"less": [self._buffers[place] for place in places]}
        known = self._open_rows.get(kind)
        if known is None or known[0] != places:
            details = [self.weights[place].role if copies else "" for place in places]
            found = [self._row_of_weight(kind, *each) for each in zip(places, details, strict=True)]
            known = self._open_rows[kind] = places, found
        rows = known[1]
        views = [self._view_of(self.weights[place].source) for place in places]
        closed = self._fill(rows, views, **beside)
        done = set(places) - {places[index] for index in closed}
        if copies:
            self._before = [self._buffers.get(place) for place in range(len(self.weights))]
            for index in closed:
                self._before[places[index]] = None
        return [place for place in range(len(self.weights)) if place not in done]

    def data(self, inputs: Array, targets: Array) -> None:
        """This rank's part of the batch, of which each pass has a part."""
        for place, (name, array) in enumerate((("inputs", inputs), ("targets", targets))):
            self._keep_array(
                ("data", place), self._row("data", place, 0, f"the {name} of the batch", name), array
            )

    def gradients(self, kind: str, gradient_of: Callable[[Weight], Any]) -> None:
        """Record the gradients of all weights.

        Args:
            kind: "gradient" or "average".
            gradient_of: a weight, as a tensor, or as one and by what it is multiplied; None: it has none.
        """
        found = [
            (place, {kind: tensor})
            for place, weight in enumerate(self.weights)
            if weight.trainable and (tensor := gradient_of(weight)) is not None
        ]
        self._sketch_beside(found)

    def update(self, rate: float, states_of: Callable[[Weight], dict[str, Any]]) -> None:
        """The weights after the optimizer's update, and the batches of running statistics.

        Args:
            rate: learning rate that was used.
            states_of: a weight, by kind: arrays, or tensors with the factor by which each is multiplied.
        """
        self.passes()
        self._rate[0] = rate
        self._fill([self._row("learning rate", 0, 0, "the learning rate")], [self._rate])
        for place in self._sketch_open("update", copies=False):
            weight = self.weights[place]
            if weight.trainable:
                common = _dense(weight.layout.array_to_common(weight.read()))
                self._fill_array(self._row_of_weight("update", place), common, less=self._before[place])
            elif place in self._running:
                after = weight.read()
                if self._knows_running:
                    self._note_statistics(place, after)
                self._running[place] = after
        trained = [
            (place, states_of(weight)) for place, weight in enumerate(self.weights) if weight.trainable
        ]
        self._sketch_beside(trained, _WHOLE)
        self._passes.clear()
        self._knows_running = True

    def _sketch_beside(self, found: Sequence[tuple[int, dict[str, Any]]], dtype: str = "") -> None:
        """Sketch tensors that lie as weights do.

        Args:
            found: of weights, by their places, tensors by kind, or with a factor each.
            dtype: as which they are recorded; empty: their own.
        """
        rows: list[int] = []
        views: list[Any] = []
        parts: list[tuple[str, int, Any, float]] = []
        for place, kept in found:
            for kind, value in kept.items():
                tensor, factor = value if isinstance(value, tuple) else (value, 1.0)
                view = self._view_of(tensor) if self._open[place] else None
                if view is None:
                    self._note_part(kind, place, tensor, factor, dtype)
                else:
                    rows.append(self._row_of_weight(kind, place))
                    views.append(view)
                    parts.append((kind, place, tensor, factor))
        for index in self._fill(rows, views, dtype, factors=[factor for *_, factor in parts]):
            self._note_part(*parts[index], dtype)

    def passes(self) -> None:
        """End the recording of layers' inputs and outputs of this step; keep their shapes for statistics."""
        self._shown = {key[1]: passes.shape for key, passes in self._layer_passes.items() if key[0] != "data"}
        self._layer_passes.clear()

    def _note_statistics(self, place: int, after: Array) -> None:
        """A running mean or variance after a step; the variance is computed from the batch's own.

        An unbiased variance is n / (n - 1) times that, with n values for each channel: what a step adds is
        divided by it.
        """
        weight, before = self.weights[place], self._before[place]
        if weight.role == "mean":
            self._note_weight("statistics", place, after - before, "mean")
            return
        known, layer = self._statistics[place], self._layer_of[place]
        shown, passes = self._shown.get(layer), self._passes[layer]
        if known is None or shown is None or len(shown) < 2:
            return
        keep = known[0] ** passes
        count = math.prod(shown) // shown[1] * self._joined
        factor = count / (count - 1) if known[1] and count > 1 else 1.0
        last = self._variances[place]
        new = keep * last + (after - keep * before.astype(np.float64)) / factor
        if np.array_equal(after, before):  # of a layer that is frozen
            new = last
        self._variances[place] = new
        self._note_weight("statistics", place, (new - last).astype(np.float32), "variance")

    def _note_part(self, kind: str, place: int, tensor: Any, factor: float, dtype: str) -> None:
        """Record a gradient, or a tensor that an optimizer keeps."""
        weight, shape = self.weights[place], tuple(tensor.shape)
        array = tensor if isinstance(tensor, np.ndarray) else array_of(tensor)[1]
        if dtype:
            array = np.asarray(array, dtype)
        if factor != 1.0:
            array = array * array.dtype.type(factor)
        if array.ndim > len(weight.layout.shape):  # both biases of a cell of Keras
            array = array[0 if weight.role == "input bias" else 1]
        if weight.role == "state bias" and not weight.is_whole and shape == weight.layout.shape:
            return  # of the one bias that Keras has, which is the other one's already
        self._note_weight(kind, place, array)

    def _note_weight(self, kind: str, place: int, array: Array, detail: str = "") -> None:
        common = self.weights[place].layout.array_to_common(array)
        self._fill_array(self._row_of_weight(kind, place, detail), common)

    def page(self) -> Page:
        """The step, which ends: it may be read until the next one begins."""
        is_full = len(self._filled) == len(self._facts)
        order = list(range(1, len(self._facts) + 1)) if is_full else sorted(self._filled)
        if self._paged is None or self._paged[0] != order:
            facts = tuple(self._facts[row - 1] for row in order)
            digest = hashlib.blake2b(repr(facts).encode(), digest_size=6).digest()
            self._paged = order, int.from_bytes(digest, "little"), facts
        self._filled.clear()
        _, number, facts = self._paged
        return Page(number, facts, self._rows[: len(order) + 1] if is_full else self._rows[[0, *order]])

    def take(self) -> dict[Key, Trace]:
        """The traces of the step, which ends."""
        return self.page().traces
