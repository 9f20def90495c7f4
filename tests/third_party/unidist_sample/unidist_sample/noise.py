"""Noise on gradients: a rule that looks at single elements, the one of docs/plugins.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from unidist.optim import GradientRule, WholeGradient
from unidist.strategy import ActsOnGradients, Strategy


@dataclass(frozen=True)
class Noise(Strategy, ActsOnGradients):
    """Adds normal noise to each element of the gradient.

    Args:
        deviation: of the noise.
        seed: another one gives other noise.
    """

    name: ClassVar[str] = "noise"

    deviation: float
    seed: int = 0

    def gradient_rule(self) -> GradientRule:
        return NoiseRule(self)


class NoiseRule(GradientRule):
    def __init__(self, strategy: Noise) -> None:
        self.strategy = strategy

    def apply(self, gradient: WholeGradient) -> None:
        for piece in gradient.pieces():
            elements = piece.array()  # in its own memory
            elements += self.strategy.deviation * piece.normal(self.strategy.seed, gradient.step)
