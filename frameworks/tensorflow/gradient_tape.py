"""A gradient tape whose gradients are reduced over the ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from polyhvd.tensorflow.compression import Compression
from polyhvd.tensorflow.gradients import accept_device, options_of
from polyhvd.tensorflow.names import do_not_convert
from polyhvd.tensorflow.reducer import TensorflowReducer

from polyhvd.collectives.adapter import ReduceOp
from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.runtime import current
from polyhvd.training.compression import Compressor

__all__ = ["DistributedGradientTape", "PartialDistributedGradientTape"]


class _Mixin:
    """What the subclass adds to the tape's own class."""

    _polyhvd: TensorflowReducer

    @do_not_convert
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
        use_generic_names: bool = False,
    ) -> Any:
        """As the tape's, then reduced over the ranks.

        Args:
            target, sources, output_gradients, unconnected_gradients: as of the tape.
            use_generic_names: accepted for Horovod's sake, also in the fourth place, and without effect:
                there it keeps names of variables out of those on the wire, where they never are here.
        """
        if isinstance(unconnected_gradients, bool):
            unconnected_gradients = tf.UnconnectedGradients.NONE
        gradients = super().gradient(  # type: ignore[misc]
            target, sources, output_gradients, unconnected_gradients
        )
        current.world()
        flat = self._polyhvd(tf.nest.flatten(gradients), tf.nest.flatten(sources))
        return tf.nest.pack_sequence_as(gradients, flat)

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


@do_not_convert  # whose locals() would have other names, too
def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = Compression.none,
    sparse_as_dense: bool = False,
    op: int = ReduceOp.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    mapping: Any = None,
) -> Any:
    """Wrap a ``tf.GradientTape`` so that ``gradient()`` returns gradients reduced over the ranks.

    Args:
        gradtape: the tape; it may have recorded already. Both share what was recorded.
        device_dense, device_sparse: accepted for Horovod's sake; collectives run on the host.
        compression: of the gradients on the wire: ``Compression.none``, ``.fp16``, ``.bf16``, one of your
            own, or an instance of :class:`polyhvd.training.compression.KeyedCompressor`, which keeps state
            from tape to tape.
        sparse_as_dense: reduce tf.IndexedSlices (of embeddings) as dense tensors; else their rows are
            gathered, and come back with each index once.
        op: Average, Sum or Adasum.
        gradient_predivide_factor: splits the division of an average around the sum.
        groups: how to split the gradients of a step into operations: into this many, or one for each list
            of variables and one for each variable in none; None: one for all.
        num_groups: the same as a number for ``groups``.
        process_set: the ranks that take part. Others keep their gradients as they are.
        scale_local_gradients: divide those of :meth:`register_local_source` by the number of ranks.
        mapping: of the model, by :func:`polyhvd.parity.mapping`, where ranks have different frameworks.

    Raises:
        InvalidArgumentError: an argument that is not supported.

    Example::

        with tf.GradientTape() as tape:
            loss = compute(model, batch)
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
    """
    return PartialDistributedGradientTape(**locals())


@do_not_convert  # whose locals() would have other names, too
def PartialDistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = Compression.none,
    sparse_as_dense: bool = False,
    op: int = ReduceOp.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    mapping: Any = None,
) -> Any:
    """A :func:`DistributedGradientTape` that leaves the gradients of some layers on their rank.

    Args:
        gradtape: the tape; it may have recorded already. Both share what was recorded.
        device_dense, device_sparse: accepted for Horovod's sake; collectives run on the host.
        compression: of the gradients on the wire: ``Compression.none``, ``.fp16``, ``.bf16``, one of your
            own, or an instance of :class:`polyhvd.training.compression.KeyedCompressor`, which keeps state
            from tape to tape.
        sparse_as_dense: reduce tf.IndexedSlices (of embeddings) as dense tensors; else their rows are
            gathered, and come back with each index once.
        op: Average, Sum or Adasum.
        gradient_predivide_factor: splits the division of an average around the sum.
        num_groups: the same as a number for ``groups``.
        groups: how to split the gradients of a step into operations: into this many, or one for each list of
            variables and one for each variable in none; None: one for all.
        process_set: the ranks that take part. Others keep their gradients as they are.
        local_layers: a layer of Keras, or a list of them, whose gradients stay on their rank; they need not
            be built yet.
        scale_local_gradients: divide their gradients by the number of ranks.
        mapping: of the model, by :func:`polyhvd.parity.mapping`, where ranks have different frameworks.

    Raises:
        InvalidArgumentError: an argument that is not supported.

    Example::

        tape = hvd.PartialDistributedGradientTape(tape, local_layers=model.layers[0])
    """
    options = options_of(locals())
    accept_device("DistributedGradientTape", device_dense=device_dense, device_sparse=device_sparse)
    base = type(gradtape)
    reducer = TensorflowReducer("DistributedGradientTape", options, local_layers, is_tape=True)
    wrapped: Any = object.__new__(type(base.__name__, (_Mixin, base), {"_polyhvd": reducer}))
    # Shared, so that a tape wrapped inside its `with` block sees the block end.
    object.__setattr__(wrapped, "__dict__", gradtape.__dict__)
    return wrapped
