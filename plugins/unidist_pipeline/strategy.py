"""The strategy `pipeline=N`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from typing_extensions import override

from unidist.cost_model.memory_interface import EstimatesMemory
from unidist.cost_model.step_interface import PredictsStepTime
from unidist.errors import ConfigurationError
from unidist.strategy.interface import KeepsDivision, NamesPlugins, Plan, RunsSteps, Strategy
from unidist_pipeline import planning
from unidist_pipeline.binding import KeepsStages
from unidist_pipeline.schedules.catalog import build_schedule
from unidist_pipeline.schedules.model import StageTimes
from unidist_pipeline.schedules.registration import ScheduleSpec

if TYPE_CHECKING:
    from unidist.cost_model.figures import Workload
    from unidist.cost_model.memory import RankMemory
    from unidist.cost_model.step import RankStep
    from unidist.cost_model.step_interface import RemainingRanks, SearchProblem
    from unidist.framework import Framework
    from unidist.optim.interface import MakesStepRunner
    from unidist.runtime_api import Plugins, RuntimeAPI
    from unidist_pipeline.binding import PipelineBinding
    from unidist_pipeline.schedules.model import Schedule

AXIS = planning.AXIS
MICROBATCHES_PER_RANK = 4
"""The default: with 1f1b a fifth of the time is idle then, and small micro-batches do not waste much."""
SPLIT_SEPARATOR = "+"
_CHECKED_MICROBATCHES = 64
"""A schedule is made in the launcher to see whether it exists, with no more than these."""

Balance = Literal["parameters", "time", "memory"]


@dataclass(frozen=True)
class Pipeline(Strategy, RunsSteps, KeepsDivision, NamesPlugins, EstimatesMemory, PredictsStepTime):
    """Gives consecutive layers to consecutive ranks, through which a batch goes in micro-batches.

    The loss is the mean over the samples, and every gradient that of one process. Needs `TrainStep` (on Keras
    `model.fit` too). `pipeline=N:microbatches=1` is plain placement of layers: one rank computes at a time.

    Args:
        stages: number of ranks that the model is divided over. Schedules with several stages on each rank cut it into
            so many times more stages.
        schedule: in which order a rank computes; `unidist pipeline list` shows the names. If in doubt, use 1f1b.
        microbatches: pieces of the batch that the script passes, at most one for each sample; as equal as possible.
            Default: 4 for each rank.
        stages_per_rank: default: the schedule's own.
        times: for schedules that are searched (zb-1p, zb-2p): what a stage takes for one micro-batch, as
            forward+input+weight+message, in any unit: the backward's two parts apart. `unidist pipeline show` tries
            them. Default: 1+1+1+0.
        limit: likewise, micro-batches that a rank may hold. Default: p, or 2p for zb-2p, on p ranks.
        kept: likewise, the part of a micro-batch that a rank still holds between the two parts of a backward.
        balance: stages get about equal numbers of "parameters", or equal "time" or "memory" as measured on rank 0 with
            `example`.
        split: names of modules (layers) at which a stage begins, with "+" between them: "blocks.4+blocks.8". Default:
            chosen by `balance`.
        example: in scripts only: inputs of the model, a micro-batch. For balance="time" and "memory", and for models of
            PyTorch that torch.fx cannot follow, but torch.export can.
    """

    name: ClassVar[str] = "pipeline"
    axis: ClassVar[str | None] = AXIS
    axis_order: ClassVar[int] = 0

    stages: int
    schedule: str = "1f1b"
    microbatches: int | None = None
    stages_per_rank: int | None = None
    times: str | None = None
    limit: float | None = None
    kept: float | None = None
    balance: Balance = "parameters"
    split: str | None = None
    example: Any = field(default=None, compare=False, repr=False)

    @property
    @override
    def axis_size(self) -> int | None:
        return self.stages

    @property
    def num_microbatches(self) -> int:
        """Pieces of a batch that has enough samples."""
        return MICROBATCHES_PER_RANK * self.stages if self.microbatches is None else self.microbatches

    @property
    def split_points(self) -> tuple[str, ...] | None:
        """Names of modules at which a stage begins, without the first stage; None: they are chosen."""
        if self.split is None:
            return None
        return tuple(part.strip() for part in self.split.split(SPLIT_SEPARATOR))

    @property
    def stage_times(self) -> StageTimes | None:
        """What the schedule is searched for; None: nothing was given."""
        if self.times is None and self.kept is None:
            return None
        given = StageTimes() if self.times is None else StageTimes(*self._numbers(self.times))
        return given if self.kept is None else replace(given, kept_for_weight=self.kept)

    def _numbers(self, text: str) -> list[float]:
        try:
            numbers = [float(word) for word in text.split(SPLIT_SEPARATOR)]
        except ValueError:
            numbers = []
        if len(numbers) not in (3, 4):
            raise ConfigurationError(
                f"pipeline:times={text!r}: give the times of forward, backward for the input, backward for the weights "
                "and, if it is known, of a message, with + between: 18.5+18.1+9.3+0.6"
            )
        return numbers

    def validate(self, plan: Plan) -> None:
        """Check the sizes, and that no strategy needs the whole model at once."""
        for option, value in (
            ("stages", self.stages),
            ("microbatches", self.num_microbatches),
            ("stages_per_rank", 1 if self.stages_per_rank is None else self.stages_per_rank),
        ):
            if value < 1:
                raise ConfigurationError(f"pipeline={self.stages}: {option}={value}; it must be 1 or more")
        if self.balance not in ("parameters", "time", "memory"):
            raise ConfigurationError(f"pipeline:balance={self.balance!r}; choices: parameters, time, memory")
        if self.split_points is not None and not all(self.split_points):
            raise ConfigurationError(
                f"pipeline:split={self.split!r} has an empty name. Syntax: NAME+NAME, for example blocks.4+blocks.8"
            )
        if isinstance(self.example, str):
            raise ConfigurationError(
                f"pipeline:example={self.example}: a command line cannot hold tensors. Give it in the script: "
                'TrainStep(..., strategy=Pipeline(2, balance="time", example=x))'
            )
        if self.balance != "parameters" and self.split is None and self.example is None:
            raise ConfigurationError(
                f"pipeline:balance={self.balance} measures the model, for which it needs inputs. Give them in the "
                f'script, TrainStep(..., strategy=Pipeline({self.stages}, balance="{self.balance}", example=x)), or '
                "use balance=parameters, or name the split points"
            )
        sharding = plan.shards_updates
        name = "" if sharding is None else sharding.name
        if self.stages > 1 and any(item.name == name and item.changes_model for item in plan.strategies):
            raise ConfigurationError(
                f"pipeline={self.stages} and {name!r} with sharded parameters (zero=3): each micro-batch would gather "
                "the parameters of its stage again. Use zero=1, or zero=2, beside a pipeline"
            )

    @override
    def check_plugins(self, plugins: Plugins) -> None:
        """See `NamesPlugins.check_plugins`: the schedule exists, for these sizes."""
        self.build(plugins, min(self.num_microbatches, _CHECKED_MICROBATCHES))

    def build(self, plugins: Plugins, num_microbatches: int) -> Schedule:
        """Return the schedule for so many micro-batches. Pure: every rank gets the same.

        Raises:
            ConfigurationError: there is no such schedule, or not for this size.
        """
        return build_schedule(
            self.schedule,
            plugins.registry(ScheduleSpec),
            num_ranks=self.stages,
            num_microbatches=num_microbatches,
            stages_per_rank=self.stages_per_rank,
            times=self.stage_times,
            limit=self.limit,
        )

    @override
    def partition(self, model: Any, context: RuntimeAPI) -> Any:
        """See `Strategy.partition`: stages of other ranks are removed from the model.

        Collective over all ranks if the model is measured.

        Raises:
            ConfigurationError: the model cannot be cut into so many stages, or not there; says why and what to do.
        """
        framework = context.plugins.framework_of(model)
        return self._binding(framework, context).partition(self, model, context)

    @override
    def step_runner(self, framework: Framework, context: RuntimeAPI) -> MakesStepRunner:
        return self._binding(framework, context).step_runner(self)

    @override
    def division(self, model: Any, context: RuntimeAPI) -> Any:
        return self._keeping(model, context).division(model)

    @override
    def before_joining(self, model: Any, context: RuntimeAPI) -> Any:
        return self._keeping(model, context).before_joining(model)

    @override
    def rejoin(self, model: Any, context: RuntimeAPI, division: Any) -> Any:
        return self._keeping(model, context).rejoin(self, model, context, division)

    @override
    def rebind(self, model: Any, context: RuntimeAPI) -> None:
        """See `KeepsDivision.rebind`: nothing, for the model itself does not communicate."""

    def _keeping(self, model: Any, context: RuntimeAPI) -> KeepsStages:
        framework = context.plugins.framework_of(model)
        binding = self._binding(framework, context)
        if not isinstance(binding, KeepsStages):
            raise ConfigurationError(
                f"pipeline={self.stages} in an elastic job: a model of {framework.name} cannot go on when ranks "
                "change, as one of PyTorch can"
            )
        return binding

    def _binding(self, framework: Framework, context: RuntimeAPI) -> PipelineBinding:
        binding: PipelineBinding = context.plugins.binding(self.name, framework)
        return binding

    @override
    def estimate(self, memory: RankMemory, workload: Workload, plan: Plan) -> RankMemory:
        return planning.estimated(memory, workload, self._pipe())

    @override
    def predict(self, step: RankStep, plan: Plan, problem: SearchProblem) -> RankStep:
        return planning.predicted(step, self._pipe(), problem)

    @classmethod
    @override
    def proposals(cls, remaining: RemainingRanks) -> Sequence[str]:
        return planning.proposed(remaining)

    def _pipe(self) -> planning.Pipe:
        kept = 1.0 if self.kept is None else self.kept
        return planning.Pipe(self.schedule, self.stages, self.num_microbatches, self.stages_per_rank, self.limit, kept)
