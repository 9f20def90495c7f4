"""The strategy `zero=1|2|3`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from typing_extensions import override

from unidist.buffer import HOST
from unidist.cost_model.exchange_cost import sharded as sharded_step
from unidist.cost_model.memory_interface import EstimatesMemory
from unidist.cost_model.step_interface import PredictsStepTime
from unidist.errors import ConfigurationError
from unidist.gradients.buckets import plan_buckets
from unidist.gradients.interface import GradientExchange
from unidist.mesh import DATA_AXIS, REPLICA_AXES
from unidist.strategy.interface import GradientOwner, Plan, ShardsUpdates, Strategy, SurvivesLoss
from unidist.strategy.lazy_init import InitializesModels
from unidist_zero.memory_figures import offloaded, sharded

if TYPE_CHECKING:
    from unidist.cost_model.figures import Workload
    from unidist.cost_model.memory import RankMemory
    from unidist.cost_model.step import RankStep
    from unidist.cost_model.step_interface import SearchProblem
    from unidist.framework import Framework
    from unidist.gradients.buckets import ParameterInfo
    from unidist.gradients.options import ExchangeOptions
    from unidist.optim.interface import MakesInnerStep
    from unidist.optim.update import Update
    from unidist.runtime_api import RuntimeAPI
    from unidist_zero.binding import ZeroBinding

_NOT_ASKED = (None, "auto", "false")


@dataclass(frozen=True)
class Zero(Strategy, GradientOwner, ShardsUpdates, SurvivesLoss, InitializesModels, EstimatesMemory, PredictsStepTime):
    """Shards optimizer state, gradients and parameters over the ranks: less memory, the same numbers, the same traffic.

    Each rank updates its shard of the parameters and sends it to the others (Rajbhandari et al. 2020,
    https://arxiv.org/abs/1910.02054). Stage 1 shards the optimizer's state, stage 2 the gradients too, stage 3 the
    parameters.

    Args:
        stage: 1, 2 or 3.
        bucket_mb: size of a gradient bucket in MiB; default: what suits the engine.
        whole: "true" gives every parameter to one rank as a whole, for optimizers that look at a parameter's tensor
            (Muon, Adafactor); "false" cuts through parameters; "auto" tries the optimizer on a small one.
        shard: size of a shard group, whose ranks are neighbours; the groups hold the same and add up their gradients.
            Divides the data axis. Default: all of it.
        shared: parameters of PyTorch are in memory that the ranks of a host share, so that nothing is gathered: "auto"
            if the engine can do it, and not in elastic jobs; "true" or an error, "false" never.
        offload: where optimizer state, copies that the optimizer steps on and, at stage 3 if parameters are gathered,
            the shards of parameters are kept: "host", beside an accelerator (with PyTorch); or a folder, in files that
            are mapped to memory. Default: where the parameters are.
        units: with PyTorch, at stage 3: paths of the modules that are FSDP units, gathered one by one, `*` for any
            name, several with + between them ("encoder.layers.*+decoder.layers.*"). Default: members of lists in which
            a class repeats.
        prefetch: with PyTorch, at stage 3: number of units to prefetch, 0 or more; default: 1. With either of these
            two, parameters are gathered even if shared=auto would share them.
        sparse: with Keras on TensorFlow: "dense" adds up the rows of sparse gradients (of an Embedding) before the
            optimizer sees them. Default: an optimizer that takes each occurrence of a row by itself gets it so, which
            stage 3 refuses.
    """

    name: ClassVar[str] = "zero"
    axis: ClassVar[str | None] = DATA_AXIS
    axis_order: ClassVar[int] = 50

    stage: Literal[1, 2, 3]
    bucket_mb: float | None = None
    whole: Literal["auto", "true", "false"] = "auto"
    shard: int | None = None
    shared: Literal["auto", "true", "false"] = "auto"
    offload: str | None = None
    units: str | None = None
    prefetch: int | None = None
    sparse: str | None = None

    def validate(self, plan: Plan) -> None:
        """Check the stage, and that sizes fit the mesh."""
        if self.stage not in (1, 2, 3):
            raise ConfigurationError(f"zero={self.stage}: there are the stages 1, 2 and 3")
        if self.bucket_mb is not None and self.bucket_mb <= 0:
            raise ConfigurationError(f"zero:bucket_mb={self.bucket_mb:g}: give a size above 0, in MiB")
        if self.whole not in ("auto", "true", "false"):
            raise ConfigurationError(f"zero:whole={self.whole!r}; choices: auto, true, false")
        if self.sparse not in (None, "dense"):
            raise ConfigurationError(f"zero:sparse={self.sparse!r}; choices: dense")
        if self.shared not in ("auto", "true", "false"):
            raise ConfigurationError(f"zero:shared={self.shared!r}; choices: auto, true, false")
        self._check_units()
        size = plan.mesh.size(REPLICA_AXES)
        if self.shard is not None and (self.shard < 1 or size % self.shard):
            raise ConfigurationError(
                f"zero:shard={self.shard} does not divide the {size} ranks that hold the same parameters; choices: "
                + ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
            )

    def _check_units(self) -> None:
        given = [f"{name}={value}" for name in ("units", "prefetch") if (value := getattr(self, name)) is not None]
        if given and self.stage != 3:
            raise ConfigurationError(
                f"zero={self.stage}:{':'.join(given)}: at stages 1 and 2 parameters stay where they are; use zero=3"
            )
        if given and self.shared == "true":
            raise ConfigurationError(
                f"zero=3:shared=true:{':'.join(given)}: parameters that ranks share are not gathered; leave out either"
            )
        if self.prefetch is not None and self.prefetch < 0:
            raise ConfigurationError(f"zero:prefetch={self.prefetch}: give 0 or more units")

    @override
    def estimate(self, memory: RankMemory, workload: Workload, plan: Plan) -> RankMemory:
        replicas = plan.mesh.size(REPLICA_AXES)
        shared_by = replicas if self._surely_shares else 1
        num_ranks = self.shard or replicas
        memory = sharded(memory, stage=self.stage, num_ranks=num_ranks, model=workload.model, shared_by=shared_by)
        return memory if self.offload is None else offloaded(memory, to_host=self.offload == "host", stage=self.stage)

    @override
    def predict(self, step: RankStep, plan: Plan, problem: SearchProblem) -> RankStep:
        return sharded_step(step, stage=self.stage, shared=self._surely_shares, prefetched=self.prefetch != 0)

    @property
    def _surely_shares(self) -> bool:
        """Parameters are in memory that ranks share, whatever the engine; with shared=auto only the engine can tell."""
        return self.shared == "true" and self.shard != 1

    @classmethod
    @override
    def alternatives(cls) -> Sequence[str]:
        return ("zero=1", "zero=2", "zero=3")

    @property
    def completes_in_backward(self) -> bool:
        """False: there are no whole gradients for the script to look at after backward."""
        return False

    @override
    def make_exchange(
        self, parameters: Sequence[ParameterInfo], context: RuntimeAPI, framework: Framework, options: ExchangeOptions
    ) -> GradientExchange:
        from unidist_zero.sharding.partition import partition
        from unidist_zero.sharding.reduce_scatter import ReduceScatterExchange
        from unidist_zero.sharding.shard_groups import make_shard_group

        options.check_supported_by(self.name)
        everyone = options.communicator(context)
        # Of parameters that fewer ranks hold (experts) the shard groups are smaller, too.
        num_shards = math.gcd(self.shard, everyone.size) if self.shard else everyone.size
        shard_groups = {HOST: make_shard_group(everyone, num_shards)}
        for kind in sorted({parameter.memory for parameter in parameters} - {HOST}):
            shard_groups[kind] = make_shard_group(options.communicator(context, memory=kind), num_shards)
        lead = shard_groups[parameters[0].memory if parameters else HOST].communicator
        bucket_bytes = options.bucket_bytes or (int(self.bucket_mb * 2**20) if self.bucket_mb is not None else None)
        layouts = plan_buckets(parameters, bucket_bytes=bucket_bytes or lead.capabilities.bucket_bytes)
        return ReduceScatterExchange(
            parameters,
            partition(layouts, num_shards, whole=options.whole_tensors),
            framework=framework,
            shard_groups=shard_groups,
            everyone=everyone,
            keeps_buckets=self.stage == 1,
            recorder=context.recorder,
            precision=options.precision,
        )

    @property
    @override
    def changes_model(self) -> bool:
        """See `Strategy.changes_model`: at stage 3."""
        return self.stage == 3

    @property
    @override
    def initializes(self) -> bool:
        """See `InitializesModels.initializes`: at stage 3."""
        return self.stage == 3

    @override
    def partition(self, model: Any, context: RuntimeAPI) -> Any:
        """See `Strategy.partition`: at stage 3 a model of PyTorch is prepared; others are divided by `attach`."""
        if self.stage < 3:
            return model
        return self._binding(context.plugins.framework_of(model), context).partition(self, model, context)

    @override
    def elastic_obstacle(self, plan: Plan) -> str:
        """See `SurvivesLoss.elastic_obstacle`: what a lost rank had another one has a copy of, since the commit."""
        if self.shard is not None:
            return f"shard={self.shard} is for one number of ranks, and it changes; leave shard out"
        if self.shared == "true":
            return "a lost rank may have been writing to the pages that all share; leave shared=true out"
        return ""

    def sharing(self, context: RuntimeAPI) -> str:
        """Return the option `shared` as it is meant in this job: in an elastic one nothing is shared."""
        return "false" if context.is_elastic else self.shared

    def shares_pages(self, context: RuntimeAPI, memory_kinds: set[str]) -> bool:
        """Return whether a model's parameters go to memory that the ranks share. Collective; the same on all ranks.

        Args:
            context: of the run.
            memory_kinds: where the parameters are.

        Raises:
            ConfigurationError: they shall be, and cannot.
        """
        from unidist_zero.sharding.shared_pages import may_share

        if self.shard == 1 or self.units is not None or self.prefetch is not None:
            return False
        return may_share(self.sharing(context), context.axis(REPLICA_AXES), memory_kinds, self.shard)

    @override
    def attach(self, model: Any, update: Update, framework: Framework) -> None:
        """See `Strategy.attach`: at stage 3 the model is divided, now that the optimizer's needs are known."""
        if self.stage == 3:
            self._binding(framework, update.context).attach(self, model, update)

    @override
    def inner_step(self, framework: Framework, context: RuntimeAPI) -> MakesInnerStep:
        binding = self._binding(framework, context)
        asked = [f"{name}={value}" for name in binding.unsupported if (value := getattr(self, name)) not in _NOT_ASKED]
        if asked:
            raise ConfigurationError(f"zero:{':'.join(asked)} does not work with {framework.name}; leave it out")
        return binding.inner_step(self)

    def _binding(self, framework: Framework, context: RuntimeAPI) -> ZeroBinding:
        binding: ZeroBinding = context.plugins.binding(self.name, framework)
        return binding
