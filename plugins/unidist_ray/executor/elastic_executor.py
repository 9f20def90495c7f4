"""`ElasticRayExecutor`: an elastic `RayExecutor` with the names of Horovod's older class."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unidist_ray.callbacks import Callback
from unidist_ray.executor.executor import RayExecutor
from unidist_ray.settings import RaySettings

_log = logging.getLogger("unidist.ray")


@dataclass
class ElasticRaySettings(RaySettings):
    """Settings of an `ElasticRayExecutor`, whose `create_settings` makes them.

    Args:
        min_num_proc: with fewer ranks the job waits for others.
        max_num_proc: at most so many; None: as many as Ray's nodes have room for.
        reset_limit: so often may ranks come or go; None: any number of times.
        elastic_timeout: longest wait in seconds for `min_num_proc`.
    """

    min_num_proc: int = 1
    max_num_proc: int | None = None
    reset_limit: int | None = None
    elastic_timeout: float = 600


class ElasticRayExecutor:
    """Runs an elastic function on Ray's nodes; see `RayExecutor`, whose `min_workers` does the same.

        executor = ElasticRayExecutor(ElasticRayExecutor.create_settings(min_num_proc=2))
        executor.start()
        executor.run(train)

    Args:
        settings: of `create_settings`.
        use_gpu: each rank takes GPUs as well.
        cpus_per_slot: CPUs that each rank takes of its node.
        gpus_per_slot: how many GPUs; default: 1.
        env_vars: variables of every rank.
        override_discovery: False: `settings.discovery` says which nodes there are; see `RayExecutor`.

    Raises:
        ConfigurationError: arguments that do not go together, or cannot be followed.
    """

    def __init__(
        self,
        settings: ElasticRaySettings,
        use_gpu: bool = False,
        cpus_per_slot: float = 1,
        gpus_per_slot: float | None = None,
        env_vars: Mapping[str, str] | None = None,
        override_discovery: bool = True,
    ) -> None:
        self._env = dict(env_vars or {})
        self._executor = RayExecutor(
            settings,
            min_workers=settings.min_num_proc,
            max_workers=settings.max_num_proc,
            reset_limit=settings.reset_limit,
            elastic_timeout=settings.elastic_timeout,
            cpus_per_worker=cpus_per_slot,
            use_gpu=use_gpu,
            gpus_per_worker=gpus_per_slot,
            override_discovery=override_discovery,
        )

    @staticmethod
    def create_settings(
        min_num_proc: int = 1,
        max_num_proc: int | None = None,
        reset_limit: int | None = None,
        elastic_timeout: float = 600,
        timeout_s: float = 120,
        ssh_identity_file: str | None = None,
        nics: Sequence[str] | None = None,
        min_np: int | None = None,
        max_np: int | None = None,
        **kwargs: Any,
    ) -> ElasticRaySettings:
        """Return settings. `ssh_identity_file` and further arguments of Horovod's have no effect, and are a warning."""
        ignored = sorted([*(["ssh_identity_file"] if ssh_identity_file is not None else []), *kwargs])
        if ignored:
            _log.warning("ElasticRayExecutor.create_settings: %s have no effect", ", ".join(ignored))
        return ElasticRaySettings(
            timeout_s,
            nics=None if nics is None else sorted(nics),
            min_num_proc=min_num_proc if min_np is None else min_np,
            max_num_proc=max_num_proc if max_np is None else max_np,
            reset_limit=reset_limit,
            elastic_timeout=elastic_timeout,
        )

    def start(self) -> None:
        """Get ready for `run`. Raises as `RayExecutor.start`."""
        self._executor.start(extra_env_vars=self._env)

    def run(self, worker_fn: Callable[[], Any], callbacks: Sequence[Callback] | None = None) -> list[Any]:
        """Call an elastic function on the ranks, and return the results of those at the end; see `RayExecutor.run`."""
        return self._executor.run(worker_fn, callbacks=callbacks)
