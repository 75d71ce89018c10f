"""Ray Train: a trainer whose workers are the ranks of a job. See ``polyhvd docs ray``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ray.train.backend import Backend, BackendConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from polyhvd.launch.init import leave_after, shutdown
from polyhvd.ray.meeting import join, locate

__all__ = ["PolyhvdBackend", "PolyhvdConfig", "PolyhvdTrainer"]


class PolyhvdBackend(Backend):
    """Gives each worker its place before Ray Train calls the training function."""

    #: A rank sees all GPUs of its job on its node.
    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: PolyhvdConfig) -> None:
        """Make workers the ranks of a new job, in Ray Train's order."""
        deadline = time.monotonic() + backend_config.workers_timeout_s
        submit = worker_group.execute_single_async
        variables = {"POLYHVD_START_TIMEOUT": f"{backend_config.timeout_s:g}"}
        join(submit, locate(submit, len(worker_group), deadline), deadline, variables)


@dataclass
class PolyhvdConfig(BackendConfig):
    """Settings of :class:`PolyhvdTrainer`.

    Args:
        timeout_s: seconds for all ranks to meet in ``init()``.
        workers_timeout_s: seconds for the workers of a new job to answer.
    """

    timeout_s: float = 30.0
    workers_timeout_s: float = 100.0

    @property
    def backend_cls(self) -> type[PolyhvdBackend]:
        """The class that Ray Train makes."""
        return PolyhvdBackend

    @property
    def train_func_context(self) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """The context in which Ray Train calls the training function."""
        return _leaving

    def to_dict(self) -> dict[str, Any]:
        """The settings for Ray's dashboard."""
        return asdict(self)


class PolyhvdTrainer(DataParallelTrainer):
    """Calls a training function on workers of Ray Train that are the ranks of a job.

    The function calls ``hvd.init()``. Its rank and size are those of ``ray.train.get_context()``.

    Args:
        train_loop_per_worker: the training function; it takes ``train_loop_config`` if there is one.
        polyhvd_config: settings; None: the defaults.
        options: the keyword arguments of Ray's ``DataParallelTrainer``, such as ``train_loop_config``,
            ``scaling_config``, ``run_config`` and ``datasets``.

    Example::

        result = PolyhvdTrainer(train, scaling_config=ray.train.ScalingConfig(num_workers=4)).fit()
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        polyhvd_config: PolyhvdConfig | None = None,
        **options: Any,
    ) -> None:
        super().__init__(train_loop_per_worker, backend_config=polyhvd_config or PolyhvdConfig(), **options)


@contextlib.contextmanager
def _leaving() -> Iterator[None]:
    """Leave the world at the end; after an exception the other ranks do not wait for this one."""
    try:
        yield
    except BaseException as error:
        leave_after(error)
        raise
    shutdown()
