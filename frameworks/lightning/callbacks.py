"""Callbacks for Lightning's Trainer."""

from __future__ import annotations

from typing import Any

from polyhvd.lightning.base import pl

from polyhvd.training.metrics_log import MetricsLog

__all__ = ["LogMetricsCallback"]


class LogMetricsCallback(pl.callbacks.Callback):  # type: ignore[misc]
    """Passes the numbers of ``hvd.metrics()`` to the Trainer's loggers, on rank 0.

    Their names begin with ``polyhvd/``. They are those of rank 0.

    Args:
        every_n_steps: batches between two entries.

    Raises:
        InvalidArgumentError: ``every_n_steps`` is not a whole number above 0.

    Example::

        trainer = lightning.Trainer(strategy="polyhvd", callbacks=[hvd.LogMetricsCallback()])
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        self._trainer: Any = None
        self._metrics = MetricsLog(self._write, every_n_steps)

    def _write(self, values: dict[str, float], step: int) -> None:
        for logger in self._trainer.loggers:
            logger.log_metrics(values, step=self._trainer.global_step)

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Write an entry if it is due."""
        self._trainer = trainer
        self._metrics.add_steps()
        self._trainer = None
