"""Layers with their gradients in NumPy, as the formulas have them: the reference for frameworks.

Slow and plain. Each class has ``forward``, which keeps what ``backward`` needs; gradients are added up in
``gradients``, beside ``weights``.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from math import erf, pi
from typing import Any

import numpy as np

__all__ = [
    "FUNCTIONS",
    "Attention",
    "BatchNorm",
    "Block",
    "Chain",
    "Convolution",
    "Dense",
    "Embedding",
    "Function",
    "Gru",
    "LayerNorm",
    "Lstm",
    "MaxPool",
    "Residual",
    "View",
    "rounded",
]

Array = np.ndarray[Any, Any]
_erf = np.vectorize(erf, otypes=[np.float64])


class Block(abc.ABC):
    """A layer, or several.

    Args:
        roles: of its weights, with their shapes; see :class:`polyhvd.training.mapping.Weight`.
    """

    def __init__(self, roles: dict[str, tuple[int, ...]] | None = None) -> None:
        self.weights = {role: np.zeros(shape, np.float32) for role, shape in (roles or {}).items()}
        self.gradients = {role: np.zeros_like(array) for role, array in self.weights.items()}
        self.input_listeners: list[Callable[[Array], None]] = []

    def __call__(self, x: Array) -> Array:
        """Call the input's listeners, then :meth:`forward`."""
        for listener in self.input_listeners:
            listener(x)
        return self.forward(x)

    @abc.abstractmethod
    def forward(self, x: Array) -> Array:
        """The output for an input."""

    @abc.abstractmethod
    def backward(self, g: Array) -> Array:
        """The gradient of the input, given the gradient of the output."""

    def blocks(self) -> list[Block]:
        """This one and all within it, in order."""
        return [self]


def rounded(block: Block, dtype: str) -> Block:
    """Have a block take weights, inputs and gradients as numbers of a half type, and make such.

    Products of them are added up in float32, and rounded once.

    Args:
        block: that is changed, and returned.
        dtype: "float16" or "bfloat16".
    """
    if dtype == "bfloat16":
        import ml_dtypes

        kind = np.dtype(ml_dtypes.bfloat16)
    else:
        kind = np.dtype(dtype)

    def computing(method: Callable[[Array], Array]) -> Callable[[Array], Array]:
        def compute(x: Array) -> Array:
            kept = {role: array.copy() for role, array in block.weights.items()}
            for array in block.weights.values():
                array[...] = array.astype(kind)
            made = method(x.astype(kind).astype(np.float32)).astype(kind).astype(np.float32)
            for role, array in block.weights.items():
                array[...] = kept[role]
            return made

        return compute

    block.forward = computing(block.forward)  # type: ignore[method-assign, assignment]
    block.backward = computing(block.backward)  # type: ignore[method-assign, assignment]
    return block


class Chain(Block):
    """One after the other."""

    def __init__(self, inner: Sequence[Block]) -> None:
        super().__init__()
        self.inner = list(inner)

    def forward(self, x: Array) -> Array:
        """Forward through all."""
        for block in self.inner:
            x = block(x)
        return x

    def backward(self, g: Array) -> Array:
        """Backward through all."""
        for block in reversed(self.inner):
            g = block.backward(g)
        return g

    def blocks(self) -> list[Block]:
        """All within it."""
        return [found for block in self.inner for found in block.blocks()]


class Residual(Block):
    """The sum of two paths."""

    def __init__(self, inner: Block, around: Block) -> None:
        super().__init__()
        self.inner, self.around = inner, around

    def forward(self, x: Array) -> Array:
        """Both."""
        made: Array = self.inner(x) + self.around(x)
        return made

    def backward(self, g: Array) -> Array:
        """Both."""
        made: Array = self.inner.backward(g) + self.around.backward(g)
        return made

    def blocks(self) -> list[Block]:
        """Return the blocks of both paths."""
        return self.inner.blocks() + self.around.blocks()


class Function(Block):
    """A function of each element.

    Args:
        function: returns its values and its derivatives.
    """

    def __init__(self, function: Callable[[Array], tuple[Array, Array]]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: Array) -> Array:
        """The values."""
        made, self._slope = self._function(x)
        return made

    def backward(self, g: Array) -> Array:
        """By the derivatives."""
        return g * self._slope


def _relu(x: Array) -> tuple[Array, Array]:
    return np.maximum(x, 0), (x > 0).astype(x.dtype)


def _tanh(x: Array) -> tuple[Array, Array]:
    y = np.tanh(x)
    return y, 1 - y * y


def _sigmoid(x: Array) -> tuple[Array, Array]:
    y = 1 / (1 + np.exp(-x))
    return y, y * (1 - y)


def _gelu(x: Array) -> tuple[Array, Array]:
    below = 0.5 * (1 + _erf(x / np.sqrt(2.0)))
    density = np.exp(-0.5 * x.astype(np.float64) ** 2) / np.sqrt(2 * pi)
    return (x * below).astype(x.dtype), (below + x * density).astype(x.dtype)


#: Of :data:`polyhvd.parity.layers.ACTIVATIONS`.
FUNCTIONS = {"relu": _relu, "tanh": _tanh, "sigmoid": _sigmoid, "gelu": _gelu}


class View(Block):
    """Operations that only move elements, or add them up.

    Args:
        forward, backward: the latter is given the shape of the input, too.
    """

    def __init__(
        self, forward: Callable[[Array], Array], backward: Callable[[Array, tuple[int, ...]], Array]
    ) -> None:
        super().__init__()
        self._forward, self._backward = forward, backward

    def forward(self, x: Array) -> Array:
        """Call the given ``forward``."""
        self._shape = x.shape
        return self._forward(x)

    def backward(self, g: Array) -> Array:
        """Call the given ``backward``."""
        return np.ascontiguousarray(self._backward(g, self._shape)).astype(g.dtype)


class Dense(Block):
    """A dense layer over the last axis."""

    def __init__(self, inputs: int, units: int, bias: bool) -> None:
        super().__init__({"kernel": (units, inputs)} | ({"bias": (units,)} if bias else {}))

    def forward(self, x: Array) -> Array:
        """x W' + b."""
        self._x = x
        made: Array = x @ self.weights["kernel"].T
        return made + self.weights["bias"] if "bias" in self.weights else made

    def backward(self, g: Array) -> Array:
        """Add the gradients of kernel and bias, and return that of the input."""
        rows, x = g.reshape(-1, g.shape[-1]), self._x.reshape(-1, self._x.shape[-1])
        self.gradients["kernel"] += rows.T @ x
        if "bias" in self.weights:
            self.gradients["bias"] += rows.sum(axis=0)
        made: Array = g @ self.weights["kernel"]
        return made


class Convolution(Block):
    """A convolution of images, as a sum over the places of its kernel."""

    def __init__(self, inputs: int, units: int, kernel: int, stride: int, padding: int, bias: bool) -> None:
        shape = (units, inputs, kernel, kernel)
        super().__init__({"kernel": shape} | ({"bias": (units,)} if bias else {}))
        self._size, self._stride, self._padding = kernel, stride, padding

    def _windows(self, x: Array) -> tuple[Array, int, int]:
        height, width = ((n - self._size) // self._stride + 1 for n in x.shape[2:])
        slide: Any = np.lib.stride_tricks.sliding_window_view  # whose types know one axis
        view: Array = slide(x, (self._size, self._size), axis=(2, 3))
        return view[:, :, :: self._stride, :: self._stride], height, width

    def forward(self, x: Array) -> Array:
        """Convolve an image, padded with zeros."""
        sides = (self._padding, self._padding)
        self._x = np.pad(x, ((0, 0), (0, 0), sides, sides))
        windows, _, _ = self._windows(self._x)
        made = np.tensordot(windows, self.weights["kernel"], axes=((1, 4, 5), (1, 2, 3)))
        made = np.ascontiguousarray(np.moveaxis(made, -1, 1))
        return made + self.weights["bias"][:, None, None] if "bias" in self.weights else made

    def backward(self, g: Array) -> Array:
        """Add the gradients of kernel and bias, and return that of the input."""
        windows, height, width = self._windows(self._x)
        self.gradients["kernel"] += np.tensordot(g, windows, axes=((0, 2, 3), (0, 2, 3)))
        if "bias" in self.weights:
            self.gradients["bias"] += g.sum(axis=(0, 2, 3))
        of_x = np.zeros_like(self._x)
        for i in range(self._size):
            for j in range(self._size):
                part = np.tensordot(g, self.weights["kernel"][:, :, i, j], axes=((1,), (0,)))
                rows = slice(i, i + self._stride * height, self._stride)
                columns = slice(j, j + self._stride * width, self._stride)
                of_x[:, :, rows, columns] += np.moveaxis(part, -1, 1)
        edge = self._padding
        return of_x[:, :, edge : of_x.shape[2] - edge, edge : of_x.shape[3] - edge]


class BatchNorm(Block):
    """Batch normalization over all axes but the second, always in training.

    Args:
        units, epsilon, keep: as of :func:`polyhvd.parity.layers.batch_normalization`.
        average: of an array over the ranks whose batches are joined, all of one size.
    """

    def __init__(self, units: int, epsilon: float, keep: float, average: Callable[[Array], Array]) -> None:
        roles = ("scale", "offset", "mean", "variance")
        super().__init__({role: (units,) for role in roles})
        self._epsilon, self.keep, self._average = epsilon, keep, average

    def forward(self, x: Array) -> Array:
        """By mean and variance of the batch."""
        self._axes = (0, *range(2, x.ndim))
        self._form = (1, -1, *(1 for _ in range(2, x.ndim)))
        wide = x.astype(np.float64)
        mean = self._average(wide.mean(axis=self._axes))
        variance = self._average(((wide - mean.reshape(self._form)) ** 2).mean(axis=self._axes))
        self._inverse = (1 / np.sqrt(variance + self._epsilon)).reshape(self._form)
        self._normal = ((wide - mean.reshape(self._form)) * self._inverse).astype(x.dtype)
        for role, value in (("mean", mean), ("variance", variance)):
            self.weights[role][...] = self.keep * self.weights[role] + (1 - self.keep) * value
        scale, offset = (self.weights[role].reshape(self._form) for role in ("scale", "offset"))
        made: Array = self._normal * scale + offset
        return made

    def backward(self, g: Array) -> Array:
        """Add this rank's part of the gradients of scale and offset, and return the gradient of the input."""
        self.gradients["scale"] += (g * self._normal).sum(axis=self._axes)
        self.gradients["offset"] += g.sum(axis=self._axes)
        by_scale = g * self.weights["scale"].reshape(self._form)
        mean = self._average(by_scale.mean(axis=self._axes)).reshape(self._form)
        slope = self._average((by_scale * self._normal).mean(axis=self._axes)).reshape(self._form)
        made: Array = ((by_scale - mean - self._normal * slope) * self._inverse).astype(g.dtype)
        return made


class LayerNorm(Block):
    """Layer normalization over the last axis."""

    def __init__(self, units: int, epsilon: float) -> None:
        super().__init__({"scale": (units,), "offset": (units,)})
        self._epsilon = epsilon

    def forward(self, x: Array) -> Array:
        """By mean and variance of each row."""
        centred = x - x.mean(axis=-1, keepdims=True)
        self._inverse = 1 / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + self._epsilon)
        self._normal = centred * self._inverse
        made: Array = self._normal * self.weights["scale"] + self.weights["offset"]
        return made

    def backward(self, g: Array) -> Array:
        """Add the gradients of scale and offset, and return that of the input."""
        axes = tuple(range(g.ndim - 1))
        self.gradients["scale"] += (g * self._normal).sum(axis=axes)
        self.gradients["offset"] += g.sum(axis=axes)
        by_scale = g * self.weights["scale"]
        mean = by_scale.mean(axis=-1, keepdims=True)
        slope = (by_scale * self._normal).mean(axis=-1, keepdims=True)
        made: Array = ((by_scale - mean - self._normal * slope) * self._inverse).astype(g.dtype)
        return made


class MaxPool(Block):
    """The largest of each square."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    def forward(self, x: Array) -> Array:
        """Rows and columns that fill no square are left out."""
        self._shape, n = x.shape, self._size
        height, width = x.shape[2] // n, x.shape[3] // n
        squares = x[:, :, : height * n, : width * n].reshape(*x.shape[:2], height, n, width, n)
        squares = squares.transpose(0, 1, 2, 4, 3, 5).reshape(*x.shape[:2], height, width, n * n)
        self._chosen = squares.argmax(axis=-1)
        made: Array = squares.max(axis=-1)
        return made

    def backward(self, g: Array) -> Array:
        """To the first of the largest."""
        n, (height, width) = self._size, g.shape[2:]
        squares = np.zeros((*g.shape, n * n), g.dtype)
        np.put_along_axis(squares, self._chosen[..., None], g[..., None], axis=-1)
        squares = squares.reshape(*g.shape, n, n).transpose(0, 1, 2, 4, 3, 5)
        made = np.zeros(self._shape, g.dtype)
        made[:, :, : height * n, : width * n] = squares.reshape(*g.shape[:2], height * n, width * n)
        return made


class Embedding(Block):
    """A row of a table for each number."""

    def __init__(self, words: int, units: int) -> None:
        super().__init__({"table": (words, units)})

    def forward(self, x: Array) -> Array:
        """The rows."""
        self._x = x
        made: Array = self.weights["table"][x]
        return made

    def backward(self, g: Array) -> Array:
        """Add the gradient of the table; numbers do not have a gradient."""
        np.add.at(self.gradients["table"], self._x, g)
        return g


class _Recurrent(Block):
    """Over [batch, time, units], from a state of zeros."""

    gates = 1

    def __init__(self, inputs: int, units: int) -> None:
        rows = self.gates * units
        super().__init__(
            {"input kernel": (rows, inputs), "state kernel": (rows, units)}
            | {"input bias": (rows,), "state bias": (rows,)}
        )
        self._units = units

    def _parts(self, x: Array, which: str) -> list[Array]:
        rows: Array = x @ self.weights[f"{which} kernel"].T + self.weights[f"{which} bias"]
        return np.split(rows, self.gates, axis=-1)

    def _back(self, which: str, g: Sequence[Array], x: Array) -> Array:
        rows = np.concatenate(g, axis=-1)
        self.gradients[f"{which} kernel"] += rows.T @ x
        self.gradients[f"{which} bias"] += rows.sum(axis=0)
        made: Array = rows @ self.weights[f"{which} kernel"]
        return made


def _s(x: Array) -> Array:
    made: Array = 1 / (1 + np.exp(-x))
    return made


class Lstm(_Recurrent):
    """Gates: input, forget, cell, output."""

    gates = 4

    def forward(self, x: Array) -> Array:
        """All states."""
        h = c = np.zeros((len(x), self._units), x.dtype)
        self._kept, states = [], []
        for t in range(x.shape[1]):
            sums = [
                a + b for a, b in zip(self._parts(x[:, t], "input"), self._parts(h, "state"), strict=True)
            ]
            i, f, o, new = _s(sums[0]), _s(sums[1]), _s(sums[3]), np.tanh(sums[2])
            before, c = c, f * c + i * new
            self._kept.append((x[:, t], h, before, c, i, f, new, o))
            h = o * np.tanh(c)
            states.append(h)
        return np.stack(states, axis=1)

    def backward(self, g: Array) -> Array:
        """Back through time."""
        of_h = of_c = np.zeros((len(g), self._units), g.dtype)
        made = []
        for t in reversed(range(g.shape[1])):
            x, h, before, c, i, f, new, o = self._kept[t]
            of_h, y = of_h + g[:, t], np.tanh(c)
            of_c = of_c + of_h * o * (1 - y * y)
            of_gates = [
                of_c * new * i * (1 - i),
                of_c * before * f * (1 - f),
                of_c * i * (1 - new * new),
                of_h * y * o * (1 - o),
            ]
            made.append(self._back("input", of_gates, x))
            of_h, of_c = self._back("state", of_gates, h), of_c * f
        return np.stack(made[::-1], axis=1)


class Gru(_Recurrent):
    """Gates: reset, update, new."""

    gates = 3

    def forward(self, x: Array) -> Array:
        """All states."""
        h = np.zeros((len(x), self._units), x.dtype)
        self._kept, states = [], []
        for t in range(x.shape[1]):
            (xr, xz, xn), (hr, hz, hn) = self._parts(x[:, t], "input"), self._parts(h, "state")
            r, z = _s(xr + hr), _s(xz + hz)
            n = np.tanh(xn + r * hn)
            self._kept.append((x[:, t], h, r, z, n, hn))
            h = (1 - z) * n + z * h
            states.append(h)
        return np.stack(states, axis=1)

    def backward(self, g: Array) -> Array:
        """Back through time."""
        of_h = np.zeros((len(g), self._units), g.dtype)
        made = []
        for t in reversed(range(g.shape[1])):
            x, h, r, z, n, hn = self._kept[t]
            of_h = of_h + g[:, t]
            of_n = of_h * (1 - z) * (1 - n * n)
            of_z, of_r = of_h * (h - n) * z * (1 - z), of_n * hn * r * (1 - r)
            made.append(self._back("input", [of_r, of_z, of_n], x))
            of_h = of_h * z + self._back("state", [of_r, of_z, of_n * r], h)
        return np.stack(made[::-1], axis=1)


class Attention(Block):
    """Self-attention with several heads."""

    def __init__(self, heads: int, layers: Sequence[Block]) -> None:
        super().__init__()
        self._heads = heads
        self._query, self._key, self._value, self._out = layers

    def _split(self, x: Array) -> Array:
        batch, steps, units = x.shape
        return x.reshape(batch, steps, self._heads, units // self._heads).transpose(0, 2, 1, 3)

    def _join(self, x: Array) -> Array:
        batch, heads, steps, units = x.shape
        return x.transpose(0, 2, 1, 3).reshape(batch, steps, heads * units)

    def forward(self, x: Array) -> Array:
        """softmax(Q K' / sqrt(units)) V."""
        self._q, self._k, self._v = (self._split(layer(x)) for layer in (self._query, self._key, self._value))
        self._factor = float(1 / np.sqrt(self._q.shape[-1]))
        scores = self._q @ self._k.swapaxes(2, 3) * self._factor
        raised = np.exp(scores - scores.max(axis=-1, keepdims=True))
        self._a = raised / raised.sum(axis=-1, keepdims=True)
        return self._out(self._join(self._a @ self._v))

    def backward(self, g: Array) -> Array:
        """Add the gradients of all four layers, and return that of the input."""
        of_mixed = self._split(self._out.backward(g))
        of_v, of_a = self._a.swapaxes(2, 3) @ of_mixed, of_mixed @ self._v.swapaxes(2, 3)
        of_scores = self._a * (of_a - (of_a * self._a).sum(axis=-1, keepdims=True)) * self._factor
        of_q, of_k = of_scores @ self._k, of_scores.swapaxes(2, 3) @ self._q
        sides = ((self._query, of_q), (self._key, of_k), (self._value, of_v))
        made: Array = np.sum([layer.backward(self._join(part)) for layer, part in sides], axis=0)
        return made

    def blocks(self) -> list[Block]:
        """The four layers."""
        return [self._query, self._key, self._value, self._out]
