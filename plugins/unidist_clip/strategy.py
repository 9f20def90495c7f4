"""The strategies `clip_norm=LIMIT:p=P` and `clip_value=LIMIT`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from typing_extensions import override

from unidist.errors import ConfigurationError
from unidist.optim.rules import GradientRule, NormRule, ValueRule
from unidist.strategy.interface import ActsOnGradients, Plan, Strategy


@dataclass(frozen=True)
class ClipNorm(Strategy, ActsOnGradients):
    """Scales the gradient down where its norm is above a limit (Pascanu et al. 2013, https://arxiv.org/abs/1211.5063).

    The norm is that of the reduced gradient of the whole model, unscaled, over all elements together, however they are
    divided over ranks. Same numbers as `torch.nn.utils.clip_grad_norm_` in one process; on Keras as well, whose own
    `global_clipnorm` leaves out the 1e-6 below.

    Args:
        limit: the largest norm, above 0. The gradient is multiplied by limit / (norm + 1e-6) where that is below 1.
        p: order of the norm, above 0; "inf" for the largest absolute value.
    """

    name: ClassVar[str] = "clip_norm"

    limit: float
    p: float = field(default=2.0, metadata={"infinite": True})

    def validate(self, plan: Plan) -> None:
        """Limit and order are above 0."""
        _check_limit(self.name, self.limit)
        if not self.p > 0:
            raise ConfigurationError(
                f"clip_norm:p={self.p:g}: the order of a norm is above 0; inf is the largest element"
            )

    @override
    def gradient_rule(self) -> GradientRule:
        return NormRule(self.limit, self.p)


@dataclass(frozen=True)
class ClipValue(Strategy, ActsOnGradients):
    """Moves each element of the reduced, unscaled gradient into [-limit, limit].

    Args:
        limit: above 0.
    """

    name: ClassVar[str] = "clip_value"

    limit: float

    def validate(self, plan: Plan) -> None:
        """The limit is above 0."""
        _check_limit(self.name, self.limit)

    @override
    def gradient_rule(self) -> GradientRule:
        return ValueRule(self.limit)


def _check_limit(name: str, limit: float) -> None:
    if not 0 < limit < math.inf:
        raise ConfigurationError(f"{name}={limit:g}: give a limit above 0")
