"""A strategy that acts on parameters, and trainings under it in each framework."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from unidist.optim import ActsOnParameters, TrainedState, Update
from unidist.strategy import Strategy

STEPS = 5


@dataclass(frozen=True)
class Halves(Strategy, ActsOnParameters):
    """Halves all parameters after every second update, and notes the sums of all before the first."""

    name: ClassVar[str] = "halves"
    seen: ClassVar[list[float]] = []

    def acts_before(self, step: int, update: Update) -> bool:
        """Return whether it is the first."""
        return step == 1

    def act_before(self, step: int, update: Update, state: TrainedState) -> None:
        """Note the sum."""
        self.seen.append(sum(sum(each.bytes().cast("d")) for each in state.values()))

    def acts_after(self, step: int, update: Update) -> bool:
        """Return whether it is a second one."""
        return step % 2 == 0

    def act_after(self, step: int, update: Update, state: TrainedState) -> None:
        """Halve."""
        values = state.values()
        for each in values:
            numbers = each.bytes().cast("d")
            for index, number in enumerate(numbers):
                numbers[index] = number / 2
        state.store(values)


def weights() -> Any:
    """Return the weights of a linear model with three inputs and two outputs."""
    import numpy as np

    return np.random.default_rng(3).standard_normal((3, 2))


def batch(step: int, rank: int = 0, size: int = 1) -> tuple[Any, Any]:
    """Return a rank's share of a batch of four."""
    import numpy as np

    generator = np.random.default_rng(step)
    x, y = generator.standard_normal((4, 3)), generator.standard_normal((4, 2))
    return x[rank::size], y[rank::size]


def expected(passes: int = 1) -> Any:
    """Return the weights after the training in one process, by gradient descent with a rate of 0.1."""
    found = weights()
    for step in range(STEPS):
        batches = [batch(passes * step + number) for number in range(passes)]
        found -= 0.1 * sum(2 * x.T @ (x @ found - y) / y.size for x, y in batches) / passes
        if (step + 1) % 2 == 0:
            found /= 2
    return found
