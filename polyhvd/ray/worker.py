"""The actors of executors: each is one rank of a job."""

from __future__ import annotations

import os
import signal
import socket
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
import ray.cloudpickle

from polyhvd.config import Launched
from polyhvd.elastic import process
from polyhvd.launch.init import leave_after, shutdown
from polyhvd.launch.job.function import last_place
from polyhvd.launch.providers.elastic import MemberProvider
from polyhvd.launch.providers.precedence import RAY
from polyhvd.ray import metrics
from polyhvd.ray.meeting import version
from polyhvd.ray.raylet import end_with_raylet

__all__ = [
    "BaseHorovodWorker",
    "Call",
    "ElasticWorker",
    "ExitedError",
    "Outcome",
    "PolyhvdWorker",
    "call_with_object",
]

#: A function of the user's, with its arguments.
Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class ExitedError(Exception):
    """A function has called ``sys.exit()``, with which Ray would end the actor."""


class BaseHorovodWorker:
    """An actor that keeps an object, and calls functions with it; its methods are Horovod's.

    Executors start such actors. Own ones become ranks by :func:`polyhvd.ray.rendezvous`.

    Args:
        world_rank: has no effect, and neither has ``world_size``: ranks get their places later.

    Example::

        actors = [ray.remote(BaseHorovodWorker).remote() for _ in range(4)]
        ray.get([actor.start_executable.remote(Trainer) for actor in actors])
        actors = polyhvd.ray.rendezvous(actors)
        ray.get([actor.execute.remote(lambda trainer: trainer.train()) for actor in actors])
    """

    def __init__(self, world_rank: int = 0, world_size: int = 1) -> None:
        self.executable: Any = None

    def node_id(self) -> str:
        """Ray's id of the node."""
        found: str = ray.get_runtime_context().get_node_id()
        return found

    def hostname(self) -> str:
        """The name of the host."""
        return socket.gethostname()

    def get_gpu_ids(self) -> list[str]:
        """The ids of the GPUs that Ray has assigned to the actor."""
        return list(ray.get_runtime_context().get_accelerator_ids().get("GPU", ()))

    def update_env_vars(self, env_vars: Mapping[str, Any]) -> None:
        """Set environment variables of the process."""
        RAY.set_variables({name: str(value) for name, value in env_vars.items()})

    def env_vars(self) -> dict[str, str]:
        """The environment variables of the process."""
        return RAY.variables()

    def start_executable(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Make the object, if there is a class for it."""
        if executable_cls is not None:
            self.executable = executable_cls(*(executable_args or ()), **(executable_kwargs or {}))

    def execute(self, func: Callable[[Any], Any]) -> Any:
        """Call a function with the object."""
        return func(self.executable)


class PolyhvdWorker(BaseHorovodWorker):
    """Runs functions as a rank of an executor's job."""

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of polyhvd's."""
        return function(*arguments)

    def construct(self, made: Call) -> None:
        """Make the executor's object."""
        self.executable = self.run(made)

    def execute(self, func: Callable[[Any], Any]) -> Any:
        """Call a function of the user's with the executor's object."""
        return self.run((func, (self.executable,), {}))

    def run(self, call: Call) -> Any:
        """Call a function of the user's; if it fails, leave the world, so that no rank waits for this one."""
        function, args, kwargs = call
        try:
            return function(*args, **kwargs)
        except SystemExit as error:
            failure = ExitedError(f"called sys.exit({error.code!r})")
            leave_after(failure)
            raise failure from error
        except BaseException as error:
            leave_after(error)
            raise

    def leave(self) -> None:
        """Leave the world in good order."""
        shutdown()

    def end(self) -> None:
        """End the process."""
        os._exit(0)


# Elastic jobs -----------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """How the function of a process of an elastic job has ended.

    Args:
        status: exit status that a process would have.
        progress: of the elastic functions, see :mod:`polyhvd.elastic.limits`.
        place: generation, rank and size of the last world of the process; without one, zero, the number of
            the process, and zero.
        value: what the function has returned.
        has_value: whether it has returned.
        error: pickled exception, or text why it cannot be pickled; empty: the function has raised none.
        text: traceback of the exception, or what the function has called.
    """

    status: int
    progress: bytes
    place: tuple[int, int, int]
    value: Any = None
    has_value: bool = False
    error: bytes = field(default=b"", repr=False)
    text: str = ""


class ElasticWorker:
    """Is one process of an elastic job: runs its function once, in world after world."""

    def ready(self) -> str:
        """Return the versions of polyhvd and Python, when Ray has started the actor."""
        return version()

    def end(self) -> None:
        """End the process."""
        os._exit(0)

    def work(self, launched: Launched, variables: Mapping[str, str], call: Call) -> Outcome:
        """Call the job's function.

        Args:
            launched: where the driver of the job is, the job's secret, and the number of this process.
            variables: to set in the environment.
            call: the function.
        """
        RAY.set_variables(variables)
        own = ray.get_runtime_context().get_accelerator_ids().get("GPU", ())
        gpus = list(own), gpus_of_node(own, _count_gpus() if own else 0)
        RAY.join_elastic(MemberProvider(launched, gpus), launched)
        signal.signal(
            signal.SIGTERM, signal.SIG_DFL
        )  # Ray's handler exits; init() sets one that gives notice
        end_with_raylet()
        metrics.publish()
        number = launched.member or 0
        function, args, kwargs = call
        try:
            value = function(*args, **kwargs)
        except SystemExit as exit:
            shutdown()
            status = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
            return Outcome(status, _progress(), last_place(number), text=f"sys.exit({exit.code!r})")
        except BaseException as error:
            leave_after(error)
            place = last_place(number)
            return Outcome(1, _progress(), place, error=_pickled(error), text=traceback.format_exc())
        place = last_place(number)
        shutdown()
        return Outcome(0, _progress(), place, value, has_value=True)


def _count_gpus() -> int:
    """Return the number of GPUs of this node."""
    own = ray.get_runtime_context().get_node_id()
    return sum(int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["NodeID"] == own)


def gpus_of_node(own: Sequence[str], count: int) -> list[str]:
    """Ids of the GPUs of a node, as far as they are known.

    Args:
        own: ids of those that Ray has assigned to this actor.
        count: number of GPUs of the node.
    """
    is_numbered = all(name.isdigit() for name in own)  # ids of other kinds cannot be guessed
    return [str(number) for number in range(count)] if is_numbered else list(own)


def call_with_object(made: Call | None, function: Callable[[Any], Any]) -> Any:
    """Make an object, if there is a class for it, and call a function of the user's with it."""
    if made is None:
        return function(None)
    cls, args, kwargs = made
    return function(cls(*args, **kwargs))


def _progress() -> bytes:
    member = process.find()
    return b"" if member is None else member.progress_made


def _pickled(error: BaseException) -> bytes:
    try:
        data = ray.cloudpickle.dumps(error)
        ray.cloudpickle.loads(data)
    except Exception as reason:
        data = ray.cloudpickle.dumps(f"its exception cannot be sent: {reason}")
    return bytes(data)
