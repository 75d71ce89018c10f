"""A gradient tape whose gradients are reduced over the ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf
from polyhvd.tensorflow.drift import DriftOp, drift_of_tapes
from polyhvd.tensorflow.gradients import accept_device
from polyhvd.tensorflow.names import do_not_convert
from polyhvd.tensorflow.reducer import TensorflowReducer

from polyhvd.runtime import current
from polyhvd.training.options import Options

__all__ = ["distribute_tape"]


class _Mixin:
    """The methods that the subclass adds to the tape's own class."""

    _polyhvd: TensorflowReducer
    _polyhvd_compared: set[DriftOp]

    @do_not_convert
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
        use_generic_names: bool = False,
    ) -> Any:
        """Return the tape's gradients, reduced over the ranks.

        Args:
            target, sources, output_gradients, unconnected_gradients: as of the tape.
            use_generic_names: accepted for compatibility with Horovod, also in the fourth place, and without
                effect: there it keeps names of variables out of those on the wire, where they never are here.
        """
        if isinstance(unconnected_gradients, bool):
            unconnected_gradients = tf.UnconnectedGradients.NONE
        gradients = super().gradient(  # type: ignore[misc]
            target, sources, output_gradients, unconnected_gradients
        )
        current.world()
        flat_sources = tf.nest.flatten(sources)
        with self._comparison(flat_sources):
            flat = self._polyhvd(tf.nest.flatten(gradients), flat_sources)
        return tf.nest.pack_sequence_as(gradients, flat)

    def _comparison(self, sources: list[Any]) -> AbstractContextManager[Any]:
        """Compare variables in the first gradient() of a tape: others belong to the same step."""
        drift = drift_of_tapes(self._polyhvd, sources)
        if drift is None or drift in self._polyhvd_compared:
            return nullcontext()
        self._polyhvd_compared.add(drift)
        return drift.before(sources)

    @do_not_convert
    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """The gradients of :meth:`gradient`, those that stay on this rank apart from the others.

        Args:
            target, output_gradients: as of the tape.
            sources: a variable, or a list, a dict or a nest of them.
            use_generic_names: as of :meth:`gradient`.

        Returns:
            Two lists of pairs of a source and its gradient, in the order of ``tf.nest.flatten(sources)``: of
            the local sources, and of the others. A gradient is None where the target does not depend on the
            source.

        Example::

            tape = hvd.PartialDistributedGradientTape(tape, local_layers=model.layers[0])
            local, others = tape.get_local_and_global_gradients(loss, model.trainable_variables)
            optimizer.apply_gradients((gradient, variable) for variable, gradient in local + others)
        """
        gradients = self.gradient(target, sources, output_gradients, use_generic_names=use_generic_names)
        flat = tf.nest.flatten(sources)
        pairs = list(zip(flat, tf.nest.flatten(gradients), self._polyhvd.are_local(flat), strict=True))
        local = [(source, gradient) for source, gradient, stays in pairs if stays]
        others = [(source, gradient) for source, gradient, stays in pairs if not stays]
        return local, others

    def register_local_source(self, source: tf.Variable) -> None:
        """Leave the gradient of a variable on its rank."""
        self._polyhvd.keep_local(source)


def distribute_tape(
    gradtape: tf.GradientTape,
    device_dense: str,
    device_sparse: str,
    options: Options,
    local_layers: Any = None,
) -> Any:
    """A tape that has recorded the same, and reduces; see the wrappers for the arguments.

    Raises:
        InvalidArgumentError: another device is meant, or ``local_layers`` are not layers.
    """
    accept_device("DistributedGradientTape", device_dense=device_dense, device_sparse=device_sparse)
    base = type(gradtape)
    reducer = TensorflowReducer("DistributedGradientTape", options, local_layers, is_tape=True)
    attributes = {"_polyhvd": reducer, "_polyhvd_compared": set()}
    wrapped: Any = object.__new__(type(base.__name__, (_Mixin, base), attributes))
    # Shared, so that a tape wrapped inside its `with` block sees the block end.
    object.__setattr__(wrapped, "__dict__", gradtape.__dict__)
    return wrapped
