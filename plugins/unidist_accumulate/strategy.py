"""The strategy `accumulate=N`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from unidist.errors import ConfigurationError
from unidist.strategy import Plan, Strategy, UpdateGate


@dataclass(frozen=True)
class Accumulate(Strategy, UpdateGate):
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

    @property
    def passes_per_update(self) -> int:
        """See `UpdateGate.passes_per_update`."""
        return self.passes

    @property
    def averages_passes(self) -> bool:
        """See `UpdateGate.averages_passes`."""
        return self.reduction == "mean"
