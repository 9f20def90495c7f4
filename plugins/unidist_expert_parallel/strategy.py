"""The strategy `expert=N`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from unidist.cost_model import EstimatesMemory, PredictsStepTime
from unidist.errors import ConfigurationError
from unidist.mesh import DATA_AXIS, Divides
from unidist.strategy import Plan, Strategy
from unidist_expert_parallel import planning
from unidist_expert_parallel.layout.owners import AXIS

if TYPE_CHECKING:
    from unidist.cost_model import RankMemory, RankStep, RemainingRanks, SearchProblem, Workload
    from unidist.runtime_api import RuntimeAPI
    from unidist_expert_parallel.binding import ExpertBinding


@dataclass(frozen=True)
class ExpertParallel(Strategy, EstimatesMemory, PredictsStepTime):
    """Divides the experts of mixture-of-experts layers over ranks, which train on different samples.

    Everything else of the model is on every rank, as in data parallelism. In each layer tokens travel to the ranks of
    their experts and back, by two all-to-alls forward and two backward (Lepikhin et al. 2020,
    https://arxiv.org/abs/2006.16668). Divides the layers `unidist_expert_parallel.torch.MixtureOfExperts` and
    `.keras.MixtureOfExperts`, and the stacked experts of transformers' models (Mixtral, Qwen-MoE, OLMoE).

    Args:
        size: number of ranks that the experts of a layer are divided over; divides the number of experts.

    Attributes:
        stages_see_no_model: another strategy of the run runs the passes, and its loss sees outputs alone.
    """

    name: ClassVar[str] = "expert"
    axis: ClassVar[str | None] = AXIS
    axis_order: ClassVar[int] = 60
    axis_divides: ClassVar[tuple[Divides, ...]] = ("samples", "model")

    size: int
    stages_see_no_model: bool = field(default=False, init=False, repr=False, compare=False)

    @property
    @override
    def axis_size(self) -> int | None:
        return self.size

    @override
    def validate(self, plan: Plan) -> None:
        """Check the size, and that no other strategy takes the parameters out of the layers."""
        if self.size < 1:
            raise ConfigurationError(f"expert={self.size}: give a number of ranks, at least 1")
        object.__setattr__(self, "stages_see_no_model", plan.runs_steps is not None)
        for item in plan.strategies:
            if item.axis == DATA_AXIS and item.changes_model and self.size > 1:
                raise ConfigurationError(
                    f"strategies 'expert' and {item.name!r}: both take parameters out of their layers. Use zero=1 or "
                    "zero=2 with expert: a rank holds some of the experts anyhow"
                )

    @override
    def partition(self, model: Any, context: RuntimeAPI) -> Any:
        """See `Strategy.partition`: each layer keeps the experts of this rank.

        Raises:
            ConfigurationError: no experts were found, or the ranks do not divide them; says what to do.
        """
        if self.size == 1:
            return model
        return self._binding(model, context).partition(self, model, context)

    @override
    def output_obstacle(self, model: Any, context: RuntimeAPI) -> str:
        return "" if self.size == 1 else self._binding(model, context).output_obstacle(model)

    def _binding(self, model: Any, context: RuntimeAPI) -> ExpertBinding:
        binding: ExpertBinding = context.plugins.binding(self.name, context.plugins.framework_of(model))
        return binding

    @override
    def estimate(self, memory: RankMemory, workload: Workload, plan: Plan) -> RankMemory:
        return planning.estimated(memory, self.size, workload.model)

    @override
    def predict(self, step: RankStep, plan: Plan, problem: SearchProblem) -> RankStep:
        return planning.predicted(step, self.size, problem)

    @classmethod
    @override
    def proposals(cls, remaining: RemainingRanks) -> Sequence[str]:
        return planning.proposed(remaining)
