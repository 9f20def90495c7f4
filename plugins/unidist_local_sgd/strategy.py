"""The strategy `local_sgd=H`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from typing_extensions import override

from unidist.buffer import HOST, device_kind
from unidist.cost_model import EstimatesMemory, Exchange, PredictsStepTime, WorkingMemory, allreduced
from unidist.errors import ConfigurationError
from unidist.gradients import CompressorSpec, LocalExchange, build_compressor
from unidist.mesh import DATA_AXIS
from unidist.strategy import GradientOwner, NamesPlugins, Plan, Strategy, SurvivesLoss
from unidist_local_sgd.outer import OuterKind, OuterOptimizer
from unidist_local_sgd.schedule import SynchronizationSchedule

if TYPE_CHECKING:
    from unidist.cost_model import RankMemory, RankStep, SearchProblem, Workload
    from unidist.framework import Framework
    from unidist.gradients import ExchangeOptions, GradientCompressor, GradientExchange, ParameterInfo
    from unidist.optim import Update
    from unidist.runtime_api import Plugins, RuntimeAPI


@dataclass(frozen=True)
class LocalSGD(Strategy, GradientOwner, NamesPlugins, SurvivesLoss, EstimatesMemory, PredictsStepTime):
    """Lets every rank make H updates without communication, then synchronizes the parameters.

    Without an outer optimizer a synchronization averages the parameters (local SGD, Stich 2019,
    https://arxiv.org/abs/1805.09767). With one it takes the way from the start of the window to the average for a
    gradient (DiLoCo, Douillard et al. 2023, https://arxiv.org/abs/2311.08105). The state of the optimizer, and buffers
    such as those of batch normalization, stay each rank's own. A checkpoint ends the window by an early
    synchronization, at which the optimizer's state is averaged as well. Every rank calls `step` equally often.

    Args:
        every: H, the updates from one synchronization of a parameter to the next, at least 1.
        after: the gradients of so many first updates are averaged over the ranks, as `data` does (post-local SGD, Lin
            et al. 2020, https://arxiv.org/abs/1808.07217).
        outer: what a synchronization does with the outer gradient, start - mean(parameters): "average" subtracts it,
            "sgd" multiplies it by a rate before, "momentum" and "nesterov" are those of PyTorch's SGD.
        outer_lr: rate of the outer optimizer, above 0; default: 1 for sgd, 0.7 for the others.
        outer_momentum: from 0 to below 1; default: 0.9.
        fragments: the parameters are divided into so many parts of about equal size, synchronized one after another
            (streaming DiLoCo, Douillard et al. 2025, https://arxiv.org/abs/2501.18512). At most H.
        delay: updates between sending a fragment and applying the result, below H, so that the exchange overlaps with
            training.
        mix: weight of a rank's own values when a result is applied, from 0 to below 1: useful with a delay, whose
            updates are lost otherwise.
        compression: name of a registered compressor, and its options, for outer gradients: "bf16", "powersgd/rank=2".
        across: "hosts" lets the ranks of a host average their gradients in every update, so that a host trains as one,
            and only hosts are synchronized: for fast connections inside and slow ones between them. Default: each
            rank by itself.
    """

    name: ClassVar[str] = "local_sgd"
    axis: ClassVar[str | None] = DATA_AXIS
    axis_order: ClassVar[int] = 50
    keeps_replicas: ClassVar[bool] = False

    every: int
    after: int = 0
    outer: OuterKind = "average"
    outer_lr: float | None = None
    outer_momentum: float | None = None
    fragments: int = 1
    delay: int = 0
    mix: float = 0.0
    compression: str | None = None
    across: Literal["ranks", "hosts"] = "ranks"

    @property
    def schedule(self) -> SynchronizationSchedule:
        """When which fragment is synchronized."""
        return SynchronizationSchedule(self.every, self.fragments, self.delay)

    @property
    def outer_optimizer(self) -> OuterOptimizer:
        """The step of a synchronization, without state."""
        has_momentum = self.outer in ("momentum", "nesterov")
        default = 0.7 if has_momentum else 1.0
        momentum = 0.9 if self.outer_momentum is None else self.outer_momentum
        return OuterOptimizer(
            self.outer, default if self.outer_lr is None else self.outer_lr, momentum if has_momentum else 0.0
        )

    @property
    @override
    def steps_alone(self) -> bool:
        return True

    @override
    def validate(self, plan: Plan) -> None:
        """Check the options, and that the model is whole on every rank."""
        self._check_options()
        if plan.dividers:
            raise ConfigurationError(
                f"{self.name} averages whole models, and {plan.dividers[0]!r} divides the model; use one of them"
            )

    def _check_options(self) -> None:
        every, has_momentum = self.every, self.outer in ("momentum", "nesterov")
        faults = {
            f"={every}: give at least 1 update between two synchronizations": every < 1,
            f":after={self.after}: give 0 or more updates": self.after < 0,
            f":outer={self.outer!r}; choices: average, sgd, momentum, nesterov": self.outer
            not in ("average", "sgd", "momentum", "nesterov"),
            f":outer_lr={self.outer_lr}: give a rate above 0": self.outer_lr is not None and not self.outer_lr > 0,
            f":outer_lr={self.outer_lr} with outer=average: a mean has no rate; use outer=sgd, momentum or nesterov": (
                self.outer_lr is not None and self.outer == "average"
            ),
            f":outer_momentum={self.outer_momentum}: give 0 or more, and less than 1": (
                self.outer_momentum is not None and not 0 <= self.outer_momentum < 1
            ),
            f":outer_momentum={self.outer_momentum} with outer={self.outer}: use outer=momentum or outer=nesterov": (
                self.outer_momentum is not None and not has_momentum
            ),
            f":fragments={self.fragments}: give 1 to {every}, the updates between two synchronizations": not (
                1 <= self.fragments <= every
            ),
            f":delay={self.delay}: give 0 to {every - 1}, less than the updates between two synchronizations": not (
                0 <= self.delay < every
            ),
            f":across={self.across!r}; choices: hosts, ranks": self.across not in ("ranks", "hosts"),
            f":mix={self.mix:g}: give 0 or more, and less than 1": not 0 <= self.mix < 1,
        }
        for fault, is_there in faults.items():
            if is_there:
                raise ConfigurationError(f"{self.name}{fault}")

    @override
    def check_plugins(self, plugins: Plugins) -> None:
        self.compressor(plugins)

    def compressor(self, plugins: Plugins) -> GradientCompressor | None:
        """Return the compressor of the outer gradients; None: they travel as they are.

        Raises:
            ConfigurationError: it is not registered; lists the choices.
        """
        if self.compression is None:
            return None
        return build_compressor(self.compression, plugins.registry(CompressorSpec))

    @property
    def is_relative(self) -> bool:
        """Whether differences to the start of the window are exchanged, not the parameters themselves."""
        return self.outer != "average" or self.compression is not None

    @override
    def predict(self, step: RankStep, plan: Plan, problem: SearchProblem) -> RankStep:
        """A synchronization moves as much as an all-reduce of the gradients, in one of H updates.

        With across="hosts" it is counted as plain data parallelism, which is slower.
        """
        if self.across == "hosts":
            return allreduced(step)
        beside = self.delay > 0
        return step.exchanging(
            Exchange("synchronization", "allreduce", DATA_AXIS, "gradients", "update", 1 / self.every, beside=beside)
        )

    @override
    def estimate(self, memory: RankMemory, workload: Workload, plan: Plan) -> RankMemory:
        names = ["values that are synchronized"]
        names += ["start of the window"] if self.is_relative else []
        names += ["outer momentum"] if self.outer_optimizer.has_momentum else []
        trained = workload.model.trained or workload.model.parameters
        return memory.add(*(WorkingMemory(name, trained) for name in names))

    @override
    def elastic_obstacle(self, plan: Plan) -> str:
        return ""

    @override
    def make_exchange(
        self, parameters: Sequence[ParameterInfo], context: RuntimeAPI, framework: Framework, options: ExchangeOptions
    ) -> GradientExchange:
        options.check_supported_by(self.name)
        if not self.after and self.across == "ranks":
            return LocalExchange(parameters, framework, options.num_ranks(context))
        from unidist_local_sgd.exchange import GroupExchange, ranks_of_host

        everyone = {HOST: options.communicator(context)}
        if (device := device_kind(parameter.memory for parameter in parameters)) is not None:
            everyone["device"] = options.communicator(context, memory=device)
        group = {}
        if self.across == "hosts":
            host = context.topology.node_rank
            group = {memory: ranks_of_host(communicator, host) for memory, communicator in everyone.items()}
        return GroupExchange(parameters, framework, everyone, group, self.after)

    @override
    def prepare_update(self, update: Update, framework: Framework) -> None:
        from unidist_local_sgd.synchronization import Synchronizer

        update.options = replace(update.options, sparse_as_dense=True)  # sparse gradients would be exchanged
        Synchronizer(self, update, framework)

    @override
    def attach(self, model: Any, update: Update, framework: Framework) -> None:
        """Begin now where the parameters are known (PyTorch), so that errors come before the first step."""
        from unidist_local_sgd.synchronization import synchronizer_of

        synchronizer = synchronizer_of(update)
        assert synchronizer is not None, "`prepare_update` has made it"
        assert update.trained is not None, "raises where a binding has none"
        if update.parameters:
            synchronizer.begin(update.parameters)
