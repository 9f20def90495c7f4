"""What an optimizer's sums of gradients are multiplied by: the mean over ranks and passes, the loss scale, the rules.

A part is a factor of the exchange itself, which costs nothing; the rest is due when the gradients are reduced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from unidist.optim.rules import NormRule

if TYPE_CHECKING:
    from unidist.gradients.interface import GradientExchange, ReducedGradients
    from unidist.gradients.series import ExchangeSeries
    from unidist.optim.accumulation import Accumulation
    from unidist.optim.loss_scaling import LossScaler
    from unidist.optim.rules import GradientRules

_WIDE_BYTES = 4
"""Types of so many bytes can be unscaled without loss."""


class GradientFactors:
    """The factors of one optimizer.

    Args:
        rules: what becomes of the reduced gradients before the inner step; None: nothing, and `clip_norm` is not used.
        num_ranks: that exchange gradients.
        average: the gradients of the ranks are averaged, else added up.

    Attributes:
        rules: what is done before every inner step; None: nothing.
        overflowed: a reduced gradient was not finite, and the rules say that no rank steps.
    """

    def __init__(self, rules: GradientRules | None, *, num_ranks: int, average: bool) -> None:
        self._arithmetic = rules
        self.rules = None if rules is None or rules.is_empty else rules
        self.overflowed = False
        self._num_ranks = num_ranks
        self._average = average

    @property
    def scaler(self) -> LossScaler | None:
        """The scaler of the loss, if it is scaled."""
        return None if self.rules is None else self.rules.scaler

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by now, 1 if it is not scaled."""
        return 1.0 if self.scaler is None else self.scaler.scale

    def keep_scaler(self, scaler: LossScaler | None) -> None:
        """Go on with the scaler of earlier factors, where the loss is still scaled: others hold on to it."""
        if self.rules is not None and scaler is not None:
            self.rules.scaler = scaler

    def of_window(self, accumulation: Accumulation) -> float:
        """Return the factor that turns a full window's sum into what the update uses."""
        return 1.0 / (self._divisor * (accumulation.passes if accumulation.average else 1))

    def of_short_window(self, accumulation: Accumulation, num_passes: int) -> float:
        """Return the same for a window that had `num_passes` passes, on all ranks together.

        With `average` the mean is over the passes that there were.
        """
        if not accumulation.average:
            return 1.0 / self._divisor
        return 1.0 / (num_passes if self._average else num_passes / self._num_ranks)

    @property
    def _divisor(self) -> int:
        return self._num_ranks if self._average else 1

    def of_exchange(self, exchange: GradientExchange, scale: float) -> float:
        """Return what the exchange itself multiplies its sum by, where `scale` is due: unscaled, or still scaled."""
        return scale * self._unscaled(exchange)

    def _unscaled(self, exchange: GradientExchange) -> float:
        """Return the part of one over the loss scale that the sum is multiplied by: all or none.

        Sums of 16 bits stay scaled until they are widened: what is small would vanish.
        """
        wide = all(parameter.dtype.itemsize >= _WIDE_BYTES for parameter in exchange.parameters)
        return 1.0 / self.loss_scale if wide else 1.0

    def conclude(self, series: ExchangeSeries, others: Sequence[ReducedGradients]) -> None:
        """See `Update.conclude`."""
        if self.rules is None:
            series.defer([1.0] * len(series.exchanges))  # `clip_norm` may have left others in the window before
            return
        unscaled = [self._unscaled(exchange) for exchange in series.exchanges]
        remaining = self.rules.apply(
            [*series.reduced(), *others],
            [*(1.0 / (self.loss_scale * factor) for factor in unscaled), *(1.0 for _ in others)],
        )
        self.overflowed = remaining is None
        series.defer(remaining or unscaled)

    def clip_norm(
        self, series: ExchangeSeries, limit: float, order: float, others: Sequence[ReducedGradients]
    ) -> float:
        """See `Update.clip_norm`."""
        assert self._arithmetic is not None, "made by planned_update, which gives it rules"
        if self.overflowed:
            return math.inf
        rule = NormRule(limit, order)
        remaining = self._arithmetic.apply_once(
            rule,
            [*series.reduced(), *others],
            [*(exchange.pending_factor for exchange in series.exchanges), *(1.0 for _ in others)],
        )
        series.defer(remaining)
        return rule.norm

    def close(self) -> None:
        """Give back the communicators of the rules."""
        if self._arithmetic is not None:
            self._arithmetic.close()
