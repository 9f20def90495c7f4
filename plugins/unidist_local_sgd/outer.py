"""The outer optimizer: its step from the start point of a window to the next one, on flat memory.

The outer gradient is start - mean(parameters), so a plain step with the rate 1 is the mean (Stich 2019,
https://arxiv.org/abs/1805.09767), and Nesterov's momentum is DiLoCo (Douillard et al. 2023,
https://arxiv.org/abs/2311.08105, algorithm 1). Momentum is that of `torch.optim.SGD`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from unidist.buffer import Buffer
    from unidist.framework import Framework

OuterKind = Literal["average", "sgd", "momentum", "nesterov"]


@dataclass(frozen=True)
class OuterOptimizer:
    """A step of gradient descent, with momentum or without.

    Args:
        kind: "average" is "sgd" with the rate 1.
        rate: learning rate, above 0.
        momentum: at least 0 and below 1; 0 unless the kind has it.
    """

    kind: OuterKind
    rate: float = 1.0
    momentum: float = 0.0

    @property
    def has_momentum(self) -> bool:
        """Whether `step` needs a velocity."""
        return self.kind in ("momentum", "nesterov")

    def step(self, framework: Framework, start: Buffer, gradient: Buffer, velocity: Buffer | None) -> None:
        """Move the start point.

        Args:
            framework: does the arithmetic.
            start: `(n,)` floating-point elements, changed in place.
            gradient: of the same kind; has arbitrary values afterwards.
            velocity: of the same kind, changed in place; zeros before the first step. None without momentum.
        """
        if velocity is not None:
            framework.multiply(velocity, self.momentum)
            framework.add(gradient, velocity)
            look_ahead = self.kind == "nesterov"
            moved = framework.allocate(velocity.count, velocity.dtype, velocity.memory)
            framework.convert(velocity, moved)
            if look_ahead:
                framework.multiply(moved, self.momentum)
                framework.add(gradient, moved)
            gradient = moved
        framework.multiply(gradient, -self.rate)
        framework.add(gradient, start)
