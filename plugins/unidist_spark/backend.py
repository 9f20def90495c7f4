"""Where ranks run, as an object that scripts hand on: `horovod.spark.common.backend`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from typing_extensions import override

from unidist.errors import ConfigurationError
from unidist_spark.runner import active_spark, run

__all__ = ["Backend", "SparkBackend", "default_num_proc"]


def default_num_proc() -> int:
    """Return `spark.default.parallelism` of the running Spark.

    Raises:
        UsageError: there is none.
    """
    return int(active_spark("default_num_proc").defaultParallelism)


class Backend(ABC):
    """Runs a function as ranks. Derive from it to have ranks run elsewhere than in Spark's tasks."""

    @abstractmethod
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on all ranks, and return the results in rank order.

        Args:
            fn: what each rank does.
            args: positional arguments.
            kwargs: keyword arguments.
            env: variables of every rank, besides those of the backend.
        """

    @abstractmethod
    def num_processes(self) -> int:
        """Return the number of ranks."""


class SparkBackend(Backend):
    """The ranks are tasks of Spark's, by `unidist.spark.run`.

    Args:
        num_proc: number of ranks; default: `spark.default.parallelism`.
        env: variables of every rank.
        options: further arguments of `run`.

    Raises:
        ConfigurationError: no process at all.
    """

    def __init__(self, num_proc: int | None = None, env: Mapping[str, str] | None = None, **options: Any) -> None:
        self._num_proc = default_num_proc() if num_proc is None else num_proc
        if self._num_proc < 1:
            raise ConfigurationError(f"SparkBackend: num_proc={num_proc}: a job has at least 1 process.")
        self._env = dict(env or {})
        self._options = options

    @override
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        variables = {**self._env, **(env or {})}
        return run(fn, args, kwargs, self._num_proc, env=variables, **self._options)

    @override
    def num_processes(self) -> int:
        return self._num_proc
