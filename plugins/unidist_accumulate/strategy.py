"""The strategy `accumulate=N`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from typing_extensions import override

from unidist.cost_model.step_interface import PredictsStepTime, RemainingRanks, divisors
from unidist.errors import ConfigurationError
from unidist.strategy.interface import Plan, Strategy, UpdateGate

if TYPE_CHECKING:
    from unidist.cost_model.step import RankStep
    from unidist.cost_model.step_interface import SearchProblem


@dataclass(frozen=True)
class Accumulate(Strategy, UpdateGate, PredictsStepTime):
    """Adds up gradients locally and exchanges them once per N passes: less communication, a larger batch.

    The script keeps calling `zero_grad`, `backward` and `step` for every batch; all but every N-th `step` do nothing.
    At the end of an epoch `optimizer.flush()` applies a window that was cut short; without it the window goes on
    with the next epoch's first batches. Every rank calls `step` equally often.

    Args:
        passes: backward passes per update, at least 1.
        reduction: "mean" over the passes, so that the learning rate needs no change, or their "sum".
    """

    name: ClassVar[str] = "accumulate"

    passes: int
    reduction: Literal["mean", "sum"] = "mean"

    def validate(self, plan: Plan) -> None:
        """At least one pass."""
        if self.passes < 1:
            raise ConfigurationError(f"accumulate={self.passes}: give at least 1 backward pass per update")
        if self.reduction not in ("mean", "sum"):
            raise ConfigurationError(f"accumulate:reduction={self.reduction!r}; choices: mean, sum")

    @override
    def predict(self, step: RankStep, plan: Plan, problem: SearchProblem) -> RankStep:
        return step.in_passes(self.passes)

    @classmethod
    def proposals(cls, remaining: RemainingRanks) -> Sequence[str]:
        """Every number of passes that divides a rank's samples, unless something else cuts them into pieces already."""
        if remaining.num_pieces > 1:
            return ()
        return tuple(f"accumulate={passes}" for passes in divisors(remaining.samples())[1:])

    @property
    @override
    def passes_per_update(self) -> int:
        return self.passes

    @property
    @override
    def averages_passes(self) -> bool:
        return self.reduction == "mean"
