"""The strategy `parameter_server=sync|async`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from typing_extensions import override

from unidist.cost_model.memory_interface import EstimatesMemory
from unidist.cost_model.step_interface import PredictsStepTime
from unidist.errors import ConfigurationError
from unidist.gradients.interface import GradientExchange
from unidist.launcher import SideProcess
from unidist.mesh import DATA_AXIS
from unidist.optim.interface import ChecksBeforeSave, OutlivesGenerations
from unidist.optim.rules import ValueRule
from unidist.strategy.interface import (
    ActsOnGradients,
    GradientOwner,
    OutlivesRanks,
    OwnsParameters,
    Plan,
    RunsSideProcesses,
    Strategy,
    SurvivesLoss,
)
from unidist_parameter_server.steps import StoreSteps
from unidist_parameter_server.store.shards import size_in_bytes
from unidist_parameter_server.wire import SERVER_ROLE

if TYPE_CHECKING:
    from unidist.cost_model import RankMemory, RankStep, SearchProblem, Workload
    from unidist.framework import Framework
    from unidist.gradients.buckets import ParameterInfo
    from unidist.gradients.options import ExchangeOptions
    from unidist.optim.interface import MakesInnerStep
    from unidist.runtime_api import RuntimeAPI
    from unidist_parameter_server.binding import ParameterServerBinding
    from unidist_parameter_server.planning import ServerOptions
    from unidist_parameter_server.workers.worker import WorkerOptions

_MAX_SERVERS = 1000


@dataclass
class ParameterServer(
    Strategy,
    GradientOwner,
    OwnsParameters,
    RunsSideProcesses,
    ChecksBeforeSave,
    SurvivesLoss,
    OutlivesRanks,
    OutlivesGenerations,
    PredictsStepTime,
    EstimatesMemory,
):
    """Keeps the parameters in one place, in memory that all ranks of a host share, to which workers push gradients.

    With sync, updates are made of the mean gradient of all workers: the numbers of `data`. With async, each gradient is
    applied as it comes, and nobody waits (Li et al. 2014, parameter server; Dean et al. 2012, Downpour SGD). The
    parameters are in shards, which are changed one by one. SGD, Adagrad, Adam and AdamW run on the store; other
    optimizers on the workers, with push=delta.

    Args:
        mode: sync or async.
        staleness: with async: a worker waits when it is more than so many steps ahead of the slowest, 0 is sync.
            Stale synchronous parallel (Ho et al. 2013). Default: it never waits.
        backup: with sync: number of gradients of a step that are not waited for, and dropped when they come too late.
            Backup workers (Chen et al. 2016).
        push: gradients, or (delta) the differences that the worker's own optimizer has made, which may be any.
        push_every: with async: push the sum of the gradients of so many steps.
        fetch_every: with async: fetch parameters after so many steps. In between, workers step by themselves; with
            push=grad by plain gradient descent.
        modulate: with async: "staleness" divides the learning rate of a push by the number of updates since its
            parameters were fetched. Zhang et al. 2015, https://arxiv.org/abs/1511.05950.
        scale: with async: "mean" divides the learning rate (or the difference) by the number of workers, so that a
            step of all of them is as long as one of sync; "none" does not, as other parameter servers.
        shard_size: size of a shard, with its unit: 256KiB.
        servers: number of server processes that keep the parameters, for workers on any host; 0: memory that all
            workers of one host share.
        replicas: 1: each server's parameters are on another server, too, which goes on with them if it is lost.
        sparse: with Keras on TensorFlow: "dense" adds up the rows of sparse gradients (of an Embedding). Default: an
            optimizer that takes each occurrence of a row by itself is refused.
    """

    name: ClassVar[str] = "parameter_server"
    axis: ClassVar[str | None] = DATA_AXIS
    axis_order: ClassVar[int] = 50
    keeps_replicas: ClassVar[bool] = False

    mode: Literal["sync", "async"]
    staleness: int | None = None
    backup: int = 0
    push: Literal["grad", "delta"] = "grad"
    push_every: int = 1
    fetch_every: int = 1
    modulate: Literal["none", "staleness"] = "none"
    scale: Literal["mean", "none"] = "mean"
    shard_size: str = "256KiB"
    servers: int = 0
    replicas: int = 0
    sparse: str | None = None
    _steps: StoreSteps = field(default_factory=StoreSteps, init=False, repr=False, compare=False)

    @property
    def is_together(self) -> bool:
        """Whether a step of all workers is one update."""
        return self.mode == "sync" or self.staleness == 0

    @property
    @override
    def steps_alone(self) -> bool:
        return not self.is_together or self.backup > 0

    def validate(self, plan: Plan) -> None:
        """Check the options, and that no other strategy needs what there is not."""
        self._check_options()
        workers = plan.mesh.size(DATA_AXIS)
        if not 0 <= self.backup < max(workers, 1):
            raise ConfigurationError(
                f"{self.name}:backup={self.backup}: of {workers} gradients at least 1 must count; "
                f"give 0 to {workers - 1}"
            )
        if plan.dividers:
            raise ConfigurationError(
                f"{self.name} keeps whole models, which are divided by {' and '.join(map(repr, plan.dividers))}; leave "
                "either out"
            )
        for rule in plan.gradient_rules:
            self._check_rule(rule)
        if plan.precision is not None and plan.precision.scaling is not None:
            raise ConfigurationError(
                f"{self.name} and a precision that scales the loss (fp16): workers would have to agree on overflows; "
                "use precision=bf16"
            )

    def _check_options(self) -> None:
        if self.mode not in ("sync", "async"):
            raise ConfigurationError(f"{self.name}={self.mode}; choices: sync, async")
        for name, choices in (
            ("push", ("grad", "delta")),
            ("modulate", ("none", "staleness")),
            ("scale", ("mean", "none")),
        ):
            if getattr(self, name) not in choices:
                raise ConfigurationError(f"{self.name}:{name}={getattr(self, name)}; choices: {', '.join(choices)}")
        if self.sparse not in (None, "dense"):
            raise ConfigurationError(f"{self.name}:sparse={self.sparse!r}; choices: dense")
        for name in ("push_every", "fetch_every"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{self.name}:{name}={getattr(self, name)}: give 1 step or more")
        if self.staleness is not None and self.staleness < 0:
            raise ConfigurationError(f"{self.name}:staleness={self.staleness}: give 0 steps or more")
        size_in_bytes(self.shard_size, f"{self.name}:shard_size")
        if not 0 <= self.servers <= _MAX_SERVERS:
            raise ConfigurationError(f"{self.name}:servers={self.servers}: give 0 to {_MAX_SERVERS} servers")
        if not 0 <= self.replicas <= min(1, max(0, self.servers - 1)):
            raise ConfigurationError(
                f"{self.name}:replicas={self.replicas} with servers={self.servers}: give 0, or 1 with 2 servers or more"
            )
        if self.mode == "sync" and self.staleness is not None:
            raise ConfigurationError(f"{self.name}=sync:staleness={self.staleness}: workers of async may be ahead")
        if self.mode == "async" and self.backup:
            raise ConfigurationError(f"{self.name}=async:backup={self.backup}: nobody waits for gradients; use sync")
        changed = [
            f"{name}={getattr(self, name)}"
            for name, default in (("push_every", 1), ("fetch_every", 1), ("modulate", "none"), ("scale", "mean"))
            if getattr(self, name) != default
        ]
        if self.is_together and changed:
            raise ConfigurationError(
                f"{self.name}={self.mode}:{':'.join(changed)}: in a synchronous step every worker pushes and fetches, "
                "and the mean is taken; use async"
            )
        if self.staleness is not None and (self.push_every > 1 or self.fetch_every > 1):
            raise ConfigurationError(
                f"{self.name}:staleness={self.staleness} bounds how old parameters are, and push_every and fetch_every "
                "above 1 would make them older; leave either out"
            )
        if self.push == "delta" and self.modulate != "none":
            raise ConfigurationError(
                f"{self.name}:push=delta:modulate={self.modulate}: a difference has no learning rate; use push=grad"
            )

    def _check_rule(self, strategy: ActsOnGradients) -> None:
        name = getattr(strategy, "name", type(strategy).__name__)
        if self.is_together:
            raise ConfigurationError(
                f"{self.name}={self.mode} and {name!r}: the mean gradient is in the store alone; use data with {name}"
            )
        if not isinstance(strategy.gradient_rule(), ValueRule):
            raise ConfigurationError(
                f"{self.name}={self.mode} and {name!r}: every worker pushes by itself, so there is no gradient of all "
                "of them; use clip_value, or clip each worker's own by ud.clip_grad_norm_(optimizer, max_norm)"
            )

    @override
    def elastic_obstacle(self, plan: Plan) -> str:
        return ""

    @override
    def predict(self, step: RankStep, plan: Plan, problem: SearchProblem) -> RankStep:
        from unidist_parameter_server import planning

        return planning.predicted(step, self._for_planning(), plan.mesh, problem)

    @override
    def estimate(self, memory: RankMemory, workload: Workload, plan: Plan) -> RankMemory:
        from unidist_parameter_server import planning

        return planning.estimated(memory, workload, self._for_planning(), plan.mesh)

    def _for_planning(self) -> ServerOptions:
        from unidist_parameter_server.planning import ServerOptions

        return ServerOptions(
            self.servers, self.is_together, self.push_every, self.fetch_every, 1 + self.replicas, self.push == "grad"
        )

    @override
    def tolerates_lost_ranks(self, plan: Plan) -> bool:
        """Return True in asynchronous modes: nobody waits for a worker that is gone."""
        return not self.is_together

    @property
    def completes_in_backward(self) -> bool:
        """False: there are no gradients of all workers for the script to look at after backward."""
        return False

    @override
    def make_exchange(
        self, parameters: Sequence[ParameterInfo], context: RuntimeAPI, framework: Framework, options: ExchangeOptions
    ) -> GradientExchange:
        from unidist_parameter_server.workers.exchange import PushExchange

        options.check_supported_by(self.name)
        # Shared memory serves gradients that are pushed as they are, and stay as they are until they are applied.
        leaves_gradients = self.push == "grad" and self.push_every == 1 and not self.backup and not self.servers
        return PushExchange(
            parameters,
            framework,
            options.num_ranks(context),
            is_mean=self.is_together,
            is_local=self.steps_alone,
            communicator=options.communicator(context) if leaves_gradients else None,
        )

    @override
    def inner_step(self, framework: Framework, context: RuntimeAPI) -> MakesInnerStep:
        binding: ParameterServerBinding = context.plugins.binding(self.name, framework)
        make = binding.inner_step(self)

        def made(optimizer: Any, *args: Any) -> Any:
            step: Any = make(optimizer, *args)
            self._steps.add(optimizer, step, is_elastic=context.is_elastic)
            return step

        return made

    @override
    def pull(self) -> None:
        for step in self._steps.present:
            step.pull()

    @override
    def before_save(self) -> None:
        for step in self._steps.present:
            step.settle()

    @override
    def kept(self) -> None:
        """Return nothing: a commit has the parameters as this rank has fetched them, and the optimizer's state."""
        for step in self._steps.present:
            step.before_commit()

    @override
    def restore(self, kept: Any) -> None:
        """Do nothing: see `synchronize_generation`."""

    @override
    def make_equal(self) -> None:
        self.before_save()

    @override
    def synchronize_generation(self, context: RuntimeAPI) -> None:
        """See `OutlivesGenerations`. With async, training goes on with the store, so that no push is lost.

        A synchronous training goes on with the last commit, as the other ranks do: then a step is made once.
        """
        self._steps.follow(context, is_wanted=not self.is_together and context.topology.rank == 0)

    def worker_options(self) -> WorkerOptions:
        """Return the options as a worker uses them."""
        from unidist_parameter_server.client.meeting import Servers
        from unidist_parameter_server.workers.worker import WorkerOptions

        return WorkerOptions(
            together=self.is_together,
            bound=self.staleness,
            backup=self.backup,
            difference=self.push == "delta",
            push_every=self.push_every,
            fetch_every=self.fetch_every,
            scales=self.scale == "mean",
            modulates=self.modulate == "staleness",
            partition_bytes=size_in_bytes(self.shard_size, f"{self.name}:shard_size"),
            servers=Servers(self.servers, self.replicas),
        )

    @override
    def side_processes(self, plan: Plan) -> Sequence[SideProcess]:
        command = (sys.executable, "-m", "unidist_parameter_server.server")
        return [SideProcess(command, SERVER_ROLE, index=number) for number in range(self.servers)]


@dataclass
class CentralStorage(ParameterServer):
    """Keeps the parameters in one place, as `tf.distribute.CentralStorageStrategy` does: `parameter_server=sync`.

    That one has options. The numbers are those of `data`.
    """

    name: ClassVar[str] = "central_storage"

    mode: Literal["sync", "async"] = field(default="sync", init=False)
    staleness: int | None = field(default=None, init=False)
    backup: int = field(default=0, init=False)
    push: Literal["grad", "delta"] = field(default="grad", init=False)
    push_every: int = field(default=1, init=False)
    fetch_every: int = field(default=1, init=False)
    modulate: Literal["none", "staleness"] = field(default="none", init=False)
    scale: Literal["mean", "none"] = field(default="mean", init=False)
    shard_size: str = field(default="256KiB", init=False)
    servers: int = field(default=0, init=False)
    replicas: int = field(default=0, init=False)
    sparse: str | None = field(default=None, init=False)
