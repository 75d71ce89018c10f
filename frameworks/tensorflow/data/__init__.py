"""Batches of polyhvd's loaders as tensors of TensorFlow, and as a ``tf.data.Dataset``."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from polyhvd.data import batches
from polyhvd.data.loader import Batch, Loader

__all__ = ["Batches"]

_LAST_READ_S = 5.0  # how long the end of the program waits for the element that is being read


class Batches(batches.Batches):
    """Iterates over a loader, with batches of tensors; :meth:`dataset` is for ``fit``.

    The position is that of the loader, and a batch counts as with the loader: when the next one is asked
    for. ``hvd.elastic.train`` takes it as data.

    Args:
        loader: an :class:`polyhvd.data.ArrayLoader` or :class:`polyhvd.data.ParquetLoader`.
        x: the column of the inputs; several inputs are a tuple, a list or a dict of columns. A column is a
            name, or a number where the loader has a sequence of arrays. None: batches have all columns, in
            the form that the loader gives them. Else a batch is a sequence of x, y and sample_weight, as far
            as they are given.
        y: the column, or columns, of the targets.
        sample_weight: the column of the weights of rows.

    Raises:
        ValueError: an argument cannot be used; or, in the loop, a batch has no such column.

    Example::

        batches = Batches(loader, x="image", y="label")
        model.fit(batches.dataset(), epochs=10, callbacks=[hvd.callbacks.DataPositionCallback(loader)])
    """

    def dataset(self) -> Any:
        """A ``tf.data.Dataset`` of the steps that are left in the epoch, each time that it is gone through.

        Its elements are ``(x, y, sample_weight)``. The weights are those of the column, if there is one,
        times the weight of the batch, so that the average of gradients over ranks is exact; without y they
        are ``(x,)``. ``x`` and ``y`` may be left out if the loader has a sequence of two or three arrays.
        The loader's thread reads and shuffles rows; the pipeline adds no other thread. Its
        cardinality is the number of steps of a whole epoch; when the number of ranks has changed, make
        another dataset.

        The position moves by ``advance()`` of the loader, however far a pipeline has read ahead. In ``fit``
        a ``DataPositionCallback`` calls it. Errors of the loader arrive as errors of TensorFlow, whose text
        has theirs.

        Raises:
            ValueError: no columns are named, or there are no such columns; or rows go through a
                ``transform``, and there are none.

        Example::

            model.fit(batches.dataset(), callbacks=[hvd.callbacks.DataPositionCallback(batches.loader)])
        """
        template = batches.mapped(np.asarray, self._template())
        columns = tf.nest.flatten(template)
        types = [tf.as_dtype(column.dtype.type) for column in columns]
        steps = self.loader.steps_per_epoch
        read = _Passes(self, columns, steps).read

        def scan(number: Any, _: Any) -> Any:
            number, is_step, *tensors = tf.numpy_function(read, [number], [tf.int64, tf.bool, *types])
            number.set_shape(())
            is_step.set_shape(())
            for tensor, column in zip(tensors, columns, strict=True):
                tensor.set_shape((None, *(size or None for size in column.shape[1:])))  # 0: padded lists
            return number, (is_step, tf.nest.pack_sequence_as(template, tensors))

        # Unlike from_generator(), it calls nothing in Python when it is dropped, which can be when the
        # interpreter is being finalized. Nor may a thread of TensorFlow's call it in the background then.
        options = tf.data.Options()
        options.experimental_optimization.map_parallelization = False
        options.experimental_optimization.inject_prefetch = False
        data = tf.data.Dataset.from_tensors(0).repeat().scan(np.int64(0), scan)
        data = data.take_while(lambda is_step, _: is_step).map(lambda _, element: element)
        # The cardinality is that of an epoch, and is not asserted: the rest of one that was restored is
        # shorter. Repeating nothing ends at once, but counts as endless.
        ends = [tf.zeros((0, *column.shape[1:]), kind) for column, kind in zip(columns, types, strict=True)]
        nothing = tf.data.Dataset.from_tensors(tf.nest.pack_sequence_as(template, ends))
        data = data.concatenate(nothing.take_while(lambda *_: False).repeat())
        data = tf.data.Dataset.zip((data, tf.data.Dataset.range(steps))).map(lambda element, _: element)
        return data.with_options(options)

    def _tensor(self, array: Any) -> Any:
        return tf.convert_to_tensor(array)


class _Passes:
    """The rows that a dataset reads, which may be gone through several times, one after the other."""

    def __init__(self, batches: Batches, columns: list[Any], steps: int) -> None:
        self._batches = batches
        self._steps = steps  # of an epoch, for the ranks for which the dataset was made
        self._end = [column[:0] for column in columns]
        self._lock = threading.Lock()  # a pass that reads ahead may still be reading when the next one begins
        self._is_closed = False
        self._number = 0
        self._has_ended = False  # the latest pass has read all steps that were left in its epoch
        self._loader: Loader = batches.loader
        self._pass: Iterator[Batch] = iter(())

    def read(self, number: Any) -> list[Any]:
        """The next element: the number of its pass, whether there is one, and its columns.

        Args:
            number: of the pass, as returned with the element before; 0 begins one.

        Raises:
            RuntimeError: another pass has begun, or begins before the steps of the last one are done; the
                position was changed, or epochs have other numbers of steps now; and whatever loading raises.
        """
        with self._lock:
            if self._is_closed:
                return [number, False, *self._end]
            if number == 0:
                steps = self._loader.steps_per_epoch
                if steps != self._steps:
                    raise RuntimeError(
                        f"an epoch has {steps} steps with this number of ranks, and had {self._steps} when "
                        "the dataset was made: call Batches.dataset() again"
                    )
                if self._has_ended and (undone := self._loader._undone()):
                    raise RuntimeError(
                        f"a pass through the dataset begins, but {undone} steps of the last one are not "
                        "done: repeat() before prefetch() would read them twice. Omit repeat(), since fit() "
                        "begins each epoch itself; to begin a pass after leaving one, call "
                        "Batches.dataset() again"
                    )
                self._pass = self._loader._read_ahead()
                self._number += 1
            elif number != self._number:
                raise RuntimeError("another pass through the dataset has begun; make one loader for each")
            batch = next(self._pass, None)
            self._has_ended = batch is None
            if number == 0:
                # Before the loader's own end, since that would be an error here, and more would be read.
                _open.add(self)
                atexit.unregister(_close_all)
                atexit.register(_close_all)
        values = self._end if batch is None else tf.nest.flatten(self._batches._element(batch))
        return [np.int64(self._number), batch is not None, *values]

    def close(self) -> None:
        """End the pass at the end of the program: a ``prefetch()`` has a thread that reads on."""
        self._is_closed = True
        if self._lock.acquire(timeout=_LAST_READ_S):  # that thread has left Python
            self._lock.release()


_open: weakref.WeakSet[_Passes] = weakref.WeakSet()


def _close_all() -> None:
    for passes in list(_open):
        passes.close()


def __dir__() -> list[str]:
    return __all__
