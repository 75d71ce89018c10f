"""Synchronized batch normalization in every Keras: its arguments, and which ranks are meant."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from polyhvd.collectives.membership import process_set_of
from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.errors import InvalidArgumentError

__all__ = ["SynchronizedNormalization"]


class SynchronizedNormalization:
    """``BatchNormalization`` whose statistics in training are those of all ranks' batches together.

    It is what ``BatchNormalization`` would be in one process on the joined batch: outputs, moving statistics
    and, once they are averaged, gradients. Ranks may have batches of different sizes; one may have none.
    Every rank has to call it equally often in training. Inference is local, and needs no ``init()``.
    Statistics are taken in float32 or more, of what a mask leaves. A step costs one operation forward and one
    backward, of a few numbers per channel.

    Args:
        axis, momentum, epsilon, center, scale and others: as of ``BatchNormalization``.
        fused: accepted for compatibility with Horovod; False.
        process_set: the ranks that share statistics, a ProcessSet or a list of their numbers.

    Raises:
        InvalidArgumentError: ``renorm``, ``virtual_batch_size``, ``fused`` or ``synchronized``, which are
            other ways to take statistics.

    Example::

        model = keras.Sequential([keras.layers.Conv2D(8, 3), hvd.SyncBatchNormalization()])
    """

    #: Makes the error for a bad argument.
    _polyhvd_invalid: Callable[[str], Exception] = InvalidArgumentError

    def __init__(
        self,
        *args: Any,
        fused: bool = False,
        process_set: ProcessSet | Iterable[int] = global_process_set,
        **kwargs: Any,
    ) -> None:
        options = {"fused": fused, **kwargs}
        for option in ("fused", "renorm", "synchronized", "virtual_batch_size"):
            if options.get(option):
                raise self._polyhvd_invalid(
                    f"SyncBatchNormalization({option}={options[option]!r}): leave it out"
                )
        super().__init__(*args, **kwargs)
        self._polyhvd_process_set = process_set

    def _polyhvd_members(self) -> ProcessSet:
        """The set itself; of a layer that was loaded, the one that these ranks are registered as now."""
        given = self._polyhvd_process_set
        if isinstance(given, ProcessSet):
            return given
        try:
            return process_set_of(given)
        except InvalidArgumentError as error:
            raise self._polyhvd_invalid(f"SyncBatchNormalization: {error}") from None

    def get_config(self) -> dict[str, Any]:
        """Return the base class's configuration, with the ranks of ``process_set`` unless these are all."""
        config: dict[str, Any] = super().get_config()  # type: ignore[misc]
        given = self._polyhvd_process_set
        if given is global_process_set:
            return config
        ranks = given.ranks if isinstance(given, ProcessSet) else given
        return config if ranks is None else {**config, "process_set": sorted(ranks)}
