"""Backends run the function of an estimator on ranks: as tasks of Spark, or as processes of this host."""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from polyhvd.launch import run as run_here
from polyhvd.spark.cluster import find
from polyhvd.spark.elastic import limits_of, run_elastic
from polyhvd.spark.running import require_static, run, wanted_size

__all__ = ["Backend", "LocalBackend", "SparkBackend"]


class Backend(abc.ABC):
    """Calls functions on the ranks of a job."""

    @abc.abstractmethod
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on every rank, and return the results in rank order.

        Args:
            fn: the function.
            args: its positional arguments.
            kwargs: its keyword arguments.
            env: environment variables of the ranks.
        """

    @abc.abstractmethod
    def num_processes(self) -> int:
        """The number of ranks."""

    def run_elastic(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        min_num_proc: int | None = None,
        max_num_proc: int | None = None,
    ) -> list[Any]:
        """The same in an elastic job; return the results of its last world in rank order.

        Args:
            fn: the function, as of :func:`polyhvd.spark.run_elastic`.
            args: its positional arguments.
            kwargs: its keyword arguments.
            env: environment variables of the ranks.
            min_num_proc: minimum number of ranks; None: 1.
            max_num_proc: maximum number of ranks; None: those at the beginning.

        Raises:
            ValueError: this backend has no elastic jobs, or the numbers contradict each other.
        """
        self._refuse_elastic_jobs()

    def require_usable(
        self, *, is_elastic: bool, min_num_proc: int | None = None, max_num_proc: int | None = None
    ) -> None:
        """Raise what :meth:`run` or :meth:`run_elastic` would raise before any rank starts, if it is known.

        Estimators call this before they write rows.

        Args:
            is_elastic: whether the job is an elastic one.
            min_num_proc: the argument of :meth:`run_elastic`.
            max_num_proc: likewise.

        Raises:
            RuntimeError: Spark cannot run the job.
            TypeError: the function that starts ranks does not accept an option of this backend.
            ValueError: this backend has no elastic jobs, or the numbers contradict each other.
        """
        if is_elastic and type(self).run_elastic is Backend.run_elastic:
            self._refuse_elastic_jobs()

    def _refuse_elastic_jobs(self) -> NoReturn:
        raise ValueError(
            f"fit(): {type(self).__qualname__} has no elastic jobs; use a SparkBackend or LocalBackend, or "
            "leave out elastic, min_num_proc and max_num_proc"
        )


class SparkBackend(Backend):
    """Ranks that tasks of Spark start, by :func:`polyhvd.spark.run`.

    Args:
        num_proc: number of ranks; None: the slots of the cluster.
        env: environment variables of the ranks.
        options: other arguments of :func:`polyhvd.spark.run`, such as ``start_timeout``; for elastic jobs,
            of :func:`polyhvd.spark.run_elastic`.

    Example::

        SparkBackend(num_proc=4, start_timeout=60).run(train)
    """

    def __init__(
        self, num_proc: int | None = None, env: Mapping[str, str] | None = None, **options: Any
    ) -> None:
        self._num_proc, self._env, self._options = num_proc, dict(env or {}), options

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Implement :meth:`Backend.run`; raises the errors of :func:`polyhvd.spark.run`."""
        variables = {**self._env, **(env or {})}
        return run(fn, args, kwargs, num_proc=self._num_proc, env=variables, **self._options)

    def run_elastic(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        min_num_proc: int | None = None,
        max_num_proc: int | None = None,
    ) -> list[Any]:
        """Implement :meth:`Backend.run_elastic`; raises the errors of :func:`polyhvd.spark.run_elastic`."""
        sizes = _sizes(self._num_proc, min_num_proc, max_num_proc)
        return run_elastic(fn, args, kwargs, env={**self._env, **(env or {})}, **sizes, **self._options)

    def require_usable(
        self, *, is_elastic: bool, min_num_proc: int | None = None, max_num_proc: int | None = None
    ) -> None:
        """Implement :meth:`Backend.require_usable`."""
        method = "run_elastic" if is_elastic else "run"
        if getattr(type(self), method) is not getattr(SparkBackend, method):
            return  # a subclass may accept other options
        function: Callable[..., Any] = run_elastic if is_elastic else run
        caller = f"polyhvd.spark.{function.__name__}()"
        sizes = _sizes(self._num_proc, min_num_proc, max_num_proc) if is_elastic else {}
        try:
            inspect.signature(function).bind(int, (), {}, env={}, **sizes, **self._options)
        except TypeError as error:
            raise TypeError(f"{caller}: {error}; check the options of the {type(self).__name__}") from None
        cluster = find(caller)
        if is_elastic:
            least = self._options.get("min_np", sizes["min_num_proc"])
            most = self._options.get("max_np", sizes["max_num_proc"])
            limits_of(cluster, (self._num_proc, least, most))
            return
        require_static(cluster)
        if self._num_proc is not None or cluster.slots() is None:  # executors may come later
            wanted_size(cluster, self._num_proc, caller)

    def num_processes(self) -> int:
        """Implement :meth:`Backend.num_processes`; 0: it is not known."""
        return (find("SparkBackend").slots() or 0) if self._num_proc is None else self._num_proc


class LocalBackend(Backend):
    """Ranks on this host, by :func:`polyhvd.run`.

    Args:
        num_proc: number of ranks.
    """

    def __init__(self, num_proc: int = 1) -> None:
        self._num_proc = num_proc

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Implement :meth:`Backend.run`; raises the errors of :func:`polyhvd.run`."""
        return run_here(fn, args, kwargs, num_proc=self._num_proc, env=env)

    def run_elastic(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        min_num_proc: int | None = None,
        max_num_proc: int | None = None,
    ) -> list[Any]:
        """Implement :meth:`Backend.run_elastic`; raises the errors of :func:`polyhvd.run`."""
        sizes = _sizes(self._num_proc, min_num_proc, max_num_proc)
        return run_here(fn, args, kwargs, env=env, **sizes)

    def num_processes(self) -> int:
        """Implement :meth:`Backend.num_processes`."""
        return self._num_proc


def _sizes(num_proc: int | None, min_num_proc: int | None, max_num_proc: int | None) -> dict[str, Any]:
    """The arguments of an elastic job that set its numbers of ranks."""
    return {"num_proc": num_proc, "min_num_proc": min_num_proc or 1, "max_num_proc": max_num_proc}
