"""Ray Train: `UnidistTrainer` runs a training function on the workers of Ray Train, which are the ranks of a job."""

from __future__ import annotations

import inspect
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray
import ray.train
from ray.train.backend import Backend, BackendConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from typing_extensions import override

from unidist.errors import ConfigurationError
from unidist.jobs import ClusterRank
from unidist.jobs.pool import dump_call
from unidist.runtime import current, is_initialized, shutdown

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

_LEAVE_SEC = 10.0


@dataclass
class UnidistConfig(BackendConfig):
    """Configures the workers of Ray Train as the ranks of a job.

    Args:
        strategy: as `--strategy`; default: UNIDIST_STRATEGY.
        engine: as `--engine`; default: UNIDIST_ENGINE, else shared memory in a node and TCP between nodes.
        timeout_s: longest wait of the ranks for each other in `init()`.
        nics: network interfaces; each node uses the first of them that it has. None: that by which Ray knows the node.
        env: variables of every rank.
    """

    strategy: str | None = None
    engine: str | None = None
    timeout_s: float = 120
    nics: Sequence[str] | None = None
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    @override
    def backend_cls(self) -> type[Backend]:
        return _UnidistBackend

    @property
    @override
    def train_func_context(self) -> Callable[[], AbstractContextManager[None]]:
        return _training

    def variables(self) -> dict[str, str]:
        """Return the variables of every rank."""
        chosen = {
            "UNIDIST_STRATEGY": self.strategy,
            "UNIDIST_ENGINE": self.engine,
            "UNIDIST_START_TIMEOUT_SEC": f"{self.timeout_s:g}",
        }
        return {**{name: value for name, value in chosen.items() if value is not None}, **self.env}


class UnidistTrainer(DataParallelTrainer):
    """A trainer of Ray Train whose workers are ranks; with the names and arguments of Ray's own `HorovodTrainer`.

        UnidistTrainer(train, scaling_config=ScalingConfig(num_workers=4)).fit()

    Each rank calls the function, which calls `init()` and may call `ray.train.report`. A rank that is lost ends the
    attempt; `RunConfig(failure_config=FailureConfig(max_failures=N))` has Ray start another one.

    Args:
        train_loop_per_worker: the training function, of no argument or of `train_loop_config`.
        train_loop_config: its argument.
        unidist_config: how the workers are ranks; default: its defaults.
        scaling_config: how many workers there are, and what each takes.
        options: further arguments of Ray's `DataParallelTrainer`: `run_config`, `datasets`, `dataset_config`, ...
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        train_loop_config: dict[str, Any] | None = None,
        unidist_config: UnidistConfig | None = None,
        scaling_config: ray.train.ScalingConfig | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            _sendable(train_loop_per_worker),
            train_loop_config=train_loop_config,
            backend_config=unidist_config or UnidistConfig(),
            scaling_config=scaling_config,
            **options,
        )


def _sendable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function for Ray to send, which brings along modules that are not installed where workers run."""
    call = dump_call(function, (), {}, to_other_machines=True)

    def with_config(config: dict[str, Any]) -> Any:
        return pickle.loads(call)[0](config)

    def without_config() -> Any:
        return pickle.loads(call)[0]()

    return with_config if inspect.signature(function).parameters else without_config  # as Ray asks


class _UnidistBackend(Backend):
    """Makes ranks of the workers. Called by Ray Train's controller, which need not reach them over the network."""

    share_cuda_visible_devices = True

    @override
    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        assert isinstance(backend_config, UnidistConfig)
        offers = worker_group.execute(_introduce, tuple(backend_config.nics or ()))
        ranks = worker_group.execute(_join, offers, backend_config.variables())
        if ranks != list(range(len(ranks))):
            raise ConfigurationError(
                f"Ray Train's workers 0 to {len(ranks) - 1} would be ranks {ranks}, as ranks of a node are next to "
                "each other. Does Ray start workers of one node apart from each other?"
            )

    @override
    def on_shutdown(self, worker_group: Any, backend_config: BackendConfig) -> None:
        ray.wait(worker_group.execute_async(_leave), num_returns=len(worker_group), timeout=_LEAVE_SEC)


_stack: ExitStack | None = None
_rank: ClusterRank | None = None


def _introduce(interfaces: Sequence[str]) -> str:
    global _stack, _rank
    _leave()
    _stack = ExitStack()
    _rank = _stack.enter_context(
        ClusterRank(
            node=ray.get_runtime_context().get_node_id(),
            address=ray.util.get_node_ip_address(),
            interfaces=interfaces,
        )
    )
    return _rank.offer


def _join(offers: Sequence[str], variables: Mapping[str, str]) -> int:
    assert _stack is not None
    assert _rank is not None
    # What Ray Train has chosen for the worker, such as its GPUs, stays.
    return _stack.enter_context(_rank.joined(offers, env={**variables, **_kept()})).rank


def _kept() -> dict[str, str]:
    return {name: os.environ[name] for name in ("CUDA_VISIBLE_DEVICES",) if name in os.environ}


def _leave() -> None:
    global _stack, _rank
    stack, _stack, _rank = _stack, None, None
    if stack is not None:
        stack.close()


@contextmanager
def _training() -> Iterator[None]:
    """Around the training function of each worker: when it fails, the ranks that wait for this one are told."""
    try:
        yield
    except BaseException as exc:
        if is_initialized():
            current().abort(f"rank {current().topology.rank} ended with {type(exc).__name__}: {exc}")
        raise
    finally:
        shutdown()
