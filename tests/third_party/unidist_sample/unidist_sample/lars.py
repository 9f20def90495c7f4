"""The ratios of LARS: norms by parameter, the example of docs/plugins.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from unidist.buffer import Buffer
from unidist.framework import Framework
from unidist.optim import GradientRule, Update, WholeGradient
from unidist.strategy import ActsOnGradients, Strategy


@dataclass
class Lars(Strategy, ActsOnGradients):
    """Gives the gradient of each parameter a norm in proportion to that of the parameter.

    Args:
        trust: the proportion.
    """

    name: ClassVar[str] = "lars"

    trust: float

    def prepare_update(self, update: Update, framework: Framework) -> None:
        self.framework = framework

    def gradient_rule(self) -> GradientRule:
        return LarsRule(self)


class LarsRule(GradientRule):
    def __init__(self, strategy: Lars) -> None:
        self.strategy = strategy

    def apply(self, gradient: WholeGradient) -> None:
        pieces = gradient.pieces()
        gradients = self._norms(gradient, [piece.memory for piece in pieces])
        parameters = self._norms(gradient, gradient.parameters())
        for piece, found, weight in zip(pieces, gradients, parameters, strict=True):
            if found and weight and piece.memory.count:
                ratio = self.strategy.trust * weight / found
                self.strategy.framework.multiply(piece.memory, ratio)

    def _norms(self, gradient: WholeGradient, memory: Sequence[Buffer]) -> list[float]:
        norm = self.strategy.framework.norm
        squares = [norm(each, 2.0) ** 2 if each.count else 0.0 for each in memory]
        return [math.sqrt(total) for total in gradient.sums(squares)]
