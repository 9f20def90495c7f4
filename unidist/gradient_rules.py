"""What becomes of reduced gradients before the inner step: unscale, look for overflows, clip; always in this order.

Framework-free: the rules work on the memory of the gradients (`GradientExchange.reduced`), through the arithmetic of
the `Framework`, so they hold for whole gradients and for shares of them alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unidist.context import Context
    from unidist.framework import Framework
    from unidist.gradients import ReducedGradients
    from unidist.strategy import Plan


class GradientRules:
    """The rules of one optimizer."""

    def apply(self, gradients: Sequence[ReducedGradients]) -> bool:
        """Change the gradients in place. Every rank of the model calls it alike.

        Returns:
            Whether a gradient is not finite on any rank and the update is to be left out, on every rank alike.
        """
        raise NotImplementedError


def rules_of(plan: Plan, context: Context, framework: Framework) -> GradientRules | None:
    """Return what the plan's strategies ask for, or None where they ask for nothing."""
    return None
