"""Loading of models, with their optimizer wrapped again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from polyhvd.tensorflow import Compression, DistributedOptimizer
from polyhvd.tensorflow.optimizer import is_distributed

from polyhvd.compression import Compressor

__all__ = ["model_loader"]


def model_loader(keras: Any) -> Callable[..., Any]:
    """``load_model`` for a Keras module, ``keras`` or ``tf.keras``."""

    def load_model(
        filepath: Any,
        custom_optimizers: Sequence[type] | None = None,
        custom_objects: dict[str, Any] | None = None,
        compression: Compressor = Compression.none,
        legacy_opts: bool = False,
    ) -> Any:
        """Load a saved model with its optimizer wrapped by ``DistributedOptimizer``, its state kept.

        Args:
            filepath: as of ``keras.models.load_model``; saved with a wrapped optimizer or a plain one.
            custom_optimizers: classes of optimizers that Keras does not know.
            custom_objects: other names that Keras does not know.
            compression: as of ``DistributedOptimizer``.
            legacy_opts: accepted for Horovod's sake.
        """
        names = {cls.__name__: cls for cls in custom_optimizers or ()}
        names.update(custom_objects or {})
        model = keras.models.load_model(filepath, custom_objects=names)
        optimizer = getattr(model, "optimizer", None)
        inner = getattr(optimizer, "inner_optimizer", None)
        if optimizer is None or is_distributed(optimizer) or is_distributed(inner):
            return model
        if inner is not None:
            optimizer.inner_optimizer = DistributedOptimizer(inner, compression=compression)
        else:
            model.optimizer = DistributedOptimizer(optimizer, compression=compression)
        if getattr(model, "jit_compile", False):
            model.jit_compile = False
        return model

    return load_model
