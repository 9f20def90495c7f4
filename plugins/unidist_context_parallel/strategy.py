"""The strategy `context=N`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from typing_extensions import override

from unidist.cost_model import EstimatesMemory, PredictsStepTime
from unidist.errors import ConfigurationError
from unidist.mesh import Divides
from unidist.strategy import Plan, Strategy, SurvivesLoss
from unidist_context_parallel import planning

if TYPE_CHECKING:
    from unidist.cost_model import RankMemory, RankStep, RemainingRanks, SearchProblem, Workload
    from unidist.runtime_api import RuntimeAPI
    from unidist_context_parallel.binding import ContextBinding

AXIS = planning.AXIS


@dataclass(frozen=True)
class ContextParallel(Strategy, SurvivesLoss, EstimatesMemory, PredictsStepTime):
    """Divides the tokens of each sample over ranks, which compute them with the whole model. For long sequences.

    Each rank has a chunk from the front and one from the back of the sequence, so that all have as much to do under a
    causal mask. In attention they exchange keys and values (Liu et al. 2023, https://arxiv.org/abs/2310.01889).

    Args:
        size: number of ranks that the tokens of a sample are divided over.
        exchange: how attention gets keys and values. "ring": they go around, and the next ones arrive while the present
            ones are used. "gather": each rank has all of them in one layer at a time. "ulysses": each rank computes
            some of the heads for all tokens (Jacobs et al. 2023, https://arxiv.org/abs/2309.14509).
        inputs: names of the model's arguments that are divided, "src+tgt". Default: the first tensor.
        dim: of the sequence in them. Default: 1 of (batch, tokens, ...), or 0 if the model's attention has
            `batch_first=False`.
    """

    name: ClassVar[str] = "context"
    axis: ClassVar[str | None] = AXIS
    axis_order: ClassVar[int] = 90
    axis_divides: ClassVar[tuple[Divides, ...]] = ("sequence",)

    size: int
    exchange: Literal["ring", "gather", "ulysses"] = "ring"
    inputs: str | None = None
    dim: int | None = None

    @property
    @override
    def axis_size(self) -> int | None:
        return self.size

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the arguments to divide; none: the first tensor is."""
        return () if self.inputs is None else tuple(name.strip() for name in self.inputs.split("+"))

    def validate(self, plan: Plan) -> None:
        """Check the options."""
        if self.size < 1:
            raise ConfigurationError(f"context={self.size}: give a number of ranks, at least 1")
        if self.exchange not in ("ring", "gather", "ulysses"):
            raise ConfigurationError(f"context:exchange={self.exchange}: choices: ring, gather, ulysses")
        if not all(self.names):
            raise ConfigurationError(
                f"context:inputs={self.inputs!r} has an empty name. Syntax: NAME+NAME, for example src+tgt"
            )

    @override
    def elastic_obstacle(self, plan: Plan) -> str:
        if self.size == 1:
            return ""
        return (
            f"context={self.size}: {self.size} ranks have the tokens of one sample, and the others cannot go on "
            "without one of them. Train with data parallelism, or without --min-np and from checkpoints"
        )

    @override
    def partition(self, model: Any, context: RuntimeAPI) -> Any:
        """See `Strategy.partition`: the model stays, what it is called with is divided.

        Raises:
            ConfigurationError: the model cannot be followed; says why and what to do.
        """
        if self.size == 1:
            return model
        binding: ContextBinding = context.plugins.binding(self.name, context.plugins.framework_of(model))
        return binding.partition(self, model, context)

    @override
    def estimate(self, memory: RankMemory, workload: Workload, plan: Plan) -> RankMemory:
        return planning.estimated(memory, self.size)

    @override
    def predict(self, step: RankStep, plan: Plan, problem: SearchProblem) -> RankStep:
        return planning.predicted(step, self.size, problem, self.exchange)

    @classmethod
    @override
    def proposals(cls, remaining: RemainingRanks) -> Sequence[str]:
        return planning.proposed(remaining)
