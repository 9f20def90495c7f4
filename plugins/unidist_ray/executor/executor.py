"""`RayExecutor`: runs functions as the ranks of a job on a cluster of Ray's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from unidist.errors import ConfigurationError, UsageError
from unidist.jobs.pool import call_name, dump_call
from unidist_ray.callbacks import Callback, Callbacks
from unidist_ray.elastic import ElasticParams, run_elastic, with_files
from unidist_ray.executor.fixed_job import FixedJob
from unidist_ray.placement import WorkerSize
from unidist_ray.settings import RaySettings

_log = logging.getLogger("unidist.ray")


@dataclass(frozen=True)
class _Workers:
    """The number of workers, and the resources of each."""

    bundles: list[int]
    spread: bool
    size: WorkerSize


class RayExecutor:
    """The ranks of a job as actors of Ray's; with the names and arguments of Horovod's class.

        executor = RayExecutor(num_workers=4)
        executor.start()
        executor.run(train)

    Ranks of one node exchange data in shared memory, those of several nodes over TCP. `ray.init` comes before `start`.

    Args:
        settings: of `create_settings`; default: its defaults.
        num_workers: number of ranks, wherever there is room; nodes are filled up.
        num_hosts: number of nodes instead, each with `num_workers_per_host` ranks.
        num_workers_per_host: with `num_hosts`.
        cpus_per_worker: CPUs that each rank takes of its node.
        use_gpu: each rank takes GPUs as well. It sees those of all ranks of its node; `local_rank()` counts them.
        gpus_per_worker: how many; default: 1.
        use_current_placement_group: if the caller runs in a placement group, as a trial of Ray Tune does, workers go
            into it.
        min_workers: instead of `num_workers`: the job is elastic, and goes on with so many ranks if others are lost.
        max_workers: at most so many ranks of an elastic job; default: as many as Ray's nodes have room for.
        reset_limit: so often may the ranks of an elastic job change; default: any number of times.
        cooldown_range: shortest and longest pause in seconds before a place of an elastic job is used again in which a
            rank has failed.
        elastic_timeout: longest wait in seconds for `min_workers`.
        override_discovery: all nodes of Ray's are for an elastic job; False: those that `settings.discovery` finds, an
            object derived from `RayHostDiscovery`.
        strategy: as `--strategy`; default: UNIDIST_STRATEGY.
        engine: as `--engine`; default: UNIDIST_ENGINE, else shared memory in a node and TCP between nodes.

    Raises:
        ConfigurationError: numbers that do not go together.
    """

    def __init__(
        self,
        settings: RaySettings | None = None,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: float = 1,
        use_gpu: bool = False,
        gpus_per_worker: float | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: Sequence[float] | None = None,
        elastic_timeout: float = 600,
        override_discovery: bool = True,
        *,
        strategy: str | None = None,
        engine: str | None = None,
    ) -> None:
        self.settings = settings if settings is not None else RaySettings()
        if override_discovery:
            self.settings = replace(self.settings, discovery=None)
        elif min_workers is None or self.settings.discovery is None:
            raise ConfigurationError(
                f"override_discovery=False, min_workers={min_workers}, settings.discovery={self.settings.discovery}: "
                "it is for elastic jobs, with settings that have a discovery; leave it out, or give both."
            )
        size = WorkerSize.of(cpus_per_worker, use_gpu, gpus_per_worker)
        self._use_current = use_current_placement_group
        self._params: ElasticParams | None = None
        if min_workers is not None:
            if num_workers is not None or num_hosts is not None:
                raise ConfigurationError(
                    f"min_workers={min_workers} makes the job elastic: leave num_workers and num_hosts out."
                )
            self._params = ElasticParams(
                cpus_per_worker,
                use_gpu,
                gpus_per_worker,
                min_workers,
                max_workers,
                reset_limit,
                cooldown_range,
                elastic_timeout,
            )
        elif max_workers is not None or reset_limit is not None or cooldown_range is not None:
            raise ConfigurationError(
                "max_workers, reset_limit and cooldown_range are of elastic jobs: give min_workers."
            )
        else:
            self._workers = _workers(num_workers, num_hosts, num_workers_per_host, size)
        chosen = {"UNIDIST_STRATEGY": strategy, "UNIDIST_ENGINE": engine}
        self._env = {name: value for name, value in chosen.items() if value is not None}
        self._job: FixedJob | _ElasticJob | None = None

    @classmethod
    def create_settings(
        cls,
        timeout_s: float = 120,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: float = 100,
        nics: Sequence[str] | None = None,
    ) -> RaySettings:
        """Return settings, see `RaySettings`. Nothing goes by ssh: its two arguments are Horovod's, and a warning."""
        if ssh_identity_file is not None or ssh_str is not None:
            _log.warning("ssh_identity_file and ssh_str have no effect: Ray starts the ranks, without ssh")
        return RaySettings(timeout_s, placement_group_timeout_s, None if nics is None else sorted(nics))

    @property
    def num_workers(self) -> int:
        """Number of ranks; the smallest one of an elastic job."""
        return sum(self._workers.bundles) if self._params is None else self._params.min_workers

    def start(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Start the ranks.

        Args:
            executable_cls: class of an object that each rank makes and keeps, for `execute`.
            executable_args: its arguments.
            executable_kwargs: its keyword arguments.
            extra_env_vars: variables of every rank.

        Raises:
            ConfigurationError: there is no room for the workers in the cluster; says what there is.
            RemoteError: the object cannot be made; says on which rank, and why.
            UsageError: it has been started.
        """
        if self._job is not None:
            raise UsageError("this executor has been started; call shutdown() first")
        variables = {**self._env, **(extra_env_vars or {})}
        if self._params is not None:
            make = None
            if executable_cls is not None:
                make = (executable_cls, tuple(executable_args or ()), dict(executable_kwargs or {}))
            self._job = _ElasticJob(self._params, self.settings, variables, make)
            return
        self._job = FixedJob(
            self.settings,
            self._workers.size,
            self._workers.bundles,
            spread=self._workers.spread,
            use_current_placement_group=self._use_current,
            env=variables,
        )
        if executable_cls is not None:
            try:
                self._job.create(executable_cls, executable_args or (), executable_kwargs or {})
            except BaseException:
                self.shutdown()
                raise

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callback] | None = None,
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every rank and return the results in rank order.

        Args:
            fn: function.
            args: its arguments.
            kwargs: its keyword arguments.
            callbacks: each is called here, while the ranks run, with each value that a rank gives to `ray_logger.log`.
                If one raises, the ranks are ended.

        Raises:
            RemoteError: it raised, or a rank died; says which rank and why. The executor stays usable if every rank has
                answered.
            UsageError: the call cannot be pickled, or the executor is not started.
        """
        return self._started().run(fn, args or (), kwargs or {}, callbacks)

    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every rank and return references for `ray.get` at once, in rank order."""
        return self._fixed("run_remote").run_remote(fn, args or (), kwargs or {})

    def execute(self, fn: Callable[[Any], Any], callbacks: Sequence[Callback] | None = None) -> list[Any]:
        """Call `fn` on every rank with the object that `start` has made there; see `run`."""
        return self._started().execute(fn, callbacks)

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call `fn` on rank 0 alone, with the object that `start` has made there; returns its result."""
        return self._fixed("execute_single").execute(fn, ranks=[0])[0]

    def shutdown(self) -> None:
        """End the ranks and give their room back. Idempotent; `start` may be called again."""
        job, self._job = self._job, None
        if job is not None:
            job.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _started(self) -> FixedJob | _ElasticJob:
        if self._job is None:
            raise UsageError("this executor is not started; call start() first")
        return self._job

    def _fixed(self, method: str) -> FixedJob:
        job = self._started()
        if isinstance(job, _ElasticJob):
            raise UsageError(f"{method} is not for elastic jobs, whose ranks come and go: use run or execute")
        return job


class _ElasticJob:
    """An elastic job, in which each call starts its ranks and ends them."""

    def __init__(
        self,
        params: ElasticParams,
        settings: RaySettings,
        env: Mapping[str, str],
        make: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None,
    ) -> None:
        self._params = params
        self._settings = settings
        self._env = env
        self._make = make

    def run(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        callbacks: Sequence[Callback] | None = None,
    ) -> list[Any]:
        name = call_name(function)
        if callbacks:
            function, args, kwargs = with_files, (function, tuple(args), dict(kwargs)), {}
        call = dump_call(function, tuple(args), dict(kwargs), to_other_machines=True)
        with Callbacks(callbacks) as logged:
            return run_elastic(call, name, params=self._params, settings=self._settings, env=self._env, logged=logged)

    def execute(self, function: Callable[[Any], Any], callbacks: Sequence[Callback] | None = None) -> list[Any]:
        make = self._make

        def with_executable() -> Any:
            if make is None:
                return function(None)
            cls, args, kwargs = make
            return function(cls(*args, **kwargs))

        return self.run(with_executable, (), {}, callbacks)

    def close(self) -> None:
        """Nothing runs between two calls."""


def _workers(num_workers: int | None, num_hosts: int | None, per_host: int, size: WorkerSize) -> _Workers:
    if num_hosts is not None:
        if num_hosts < 1 or per_host < 1:
            raise ConfigurationError(
                f"num_hosts={num_hosts}, num_workers_per_host={per_host}: give at least 1 of each."
            )
        if num_workers is not None and num_workers != num_hosts * per_host:
            raise ConfigurationError(
                f"num_workers={num_workers}, but {num_hosts} hosts with {per_host} workers each are "
                f"{num_hosts * per_host}: leave num_workers out."
            )
        return _Workers([per_host] * num_hosts, spread=True, size=size)
    if num_workers is None:
        raise ConfigurationError("how many workers? Give num_workers, or num_hosts and num_workers_per_host.")
    if num_workers < 1:
        raise ConfigurationError(f"num_workers={num_workers}: a job has at least 1.")
    return _Workers([1] * num_workers, spread=False, size=size)
