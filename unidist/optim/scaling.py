"""Factors of an optimizer's sums of gradients: the mean over ranks and passes, the loss scale, and the rules.

The exchange itself applies some of them at no cost; the others are applied to the reduced gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unidist.buffer import Buffer
    from unidist.gradients.interface import GradientExchange, ReducedGradients
    from unidist.gradients.series import ExchangeSeries
    from unidist.optim.accumulation import Accumulation
    from unidist.optim.loss_scaling import LossScaler
    from unidist.optim.loss_weights import LossWeights
    from unidist.optim.rules import GradientRule, GradientRules

_WIDE_BYTES = 4
"""Gradients of at least this many bytes per element can be unscaled without loss."""


class GradientFactors:
    """The factors of one optimizer.

    Args:
        rules: post-processing of the reduced gradients; None: there is none, and `apply_once` is not used.
        num_ranks: number of ranks that exchange gradients.
        average: the gradients of the ranks are averaged, else added up.

    Attributes:
        rules: applied before every inner step; None: there are none.
        overflowed: a reduced gradient was not finite, so no rank steps.
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
        """The present factor of the loss, 1 if it is not scaled."""
        return 1.0 if self.scaler is None else self.scaler.scale

    def keep_scaler(self, scaler: LossScaler | None) -> None:
        """Use the scaler of earlier factors if the loss is still scaled: other objects refer to it."""
        if self.rules is not None and scaler is not None:
            self.rules.scaler = scaler

    def of_window(self, accumulation: Accumulation) -> float:
        """Return the factor that turns a full window's sum into the gradient of the update."""
        return 1.0 / (self._divisor * (accumulation.passes if accumulation.average else 1))

    def of_weighted_window(self, weights: LossWeights) -> float:
        """Return the same for losses that were weighted, instead of a mean over the passes."""
        return weights.correction / self._divisor

    def of_short_window(self, accumulation: Accumulation, num_passes: int) -> float:
        """Return the same for a window that had `num_passes` passes, on all ranks together.

        With `average` the mean is over these passes. Several backward passes where one makes an update are a sum.
        """
        if accumulation.passes == 1:
            return self.of_window(accumulation)
        if not accumulation.average:
            return 1.0 / self._divisor
        return 1.0 / (num_passes if self._average else num_passes / self._num_ranks)

    @property
    def _divisor(self) -> int:
        return self._num_ranks if self._average else 1

    def of_exchange(self, exchange: GradientExchange, scale: float) -> float:
        """Return the factor for an exchange's sums: `scale`, divided by the loss scale if the gradients are wide."""
        return scale * self.unscaled(exchange)

    def unscaled(self, exchange: GradientExchange) -> float:
        """Return the unscaling factor that the exchange applies: one over the loss scale, or 1.

        16-bit sums stay scaled until they are widened: small values would vanish.
        """
        wide = all(parameter.dtype.itemsize >= _WIDE_BYTES for parameter in exchange.parameters)
        return 1.0 / self.loss_scale if wide else 1.0

    def conclude(
        self,
        series: ExchangeSeries,
        others: Sequence[ReducedGradients],
        *,
        step: int,
        values: Callable[[], Sequence[Buffer]],
    ) -> None:
        """Apply the rules to the reduced gradients, see `Update.conclude`. Collective over the ranks of the model.

        Args:
            series: the exchanges.
            others: gradients that the binding has reduced itself.
            step: number of the update, from 1.
            values: see `GradientRules.apply`.
        """
        if self.rules is None:
            series.defer([1.0] * len(series.exchanges))  # `clip_norm` may have left others in the window before
            return
        unscaled = [self.unscaled(exchange) for exchange in series.exchanges]
        remaining = self.rules.apply(
            [*series.reduced(), *others],
            [*(1.0 / (self.loss_scale * factor) for factor in unscaled), *(1.0 for _ in others)],
            step=step,
            values=values,
        )
        self.overflowed = remaining is None
        series.defer(remaining or unscaled)

    def apply_once(
        self,
        series: ExchangeSeries,
        rule: GradientRule,
        others: Sequence[ReducedGradients],
        *,
        step: int,
        values: Callable[[], Sequence[Buffer]],
    ) -> bool:
        """Apply another rule, see `Update.apply_once`. Collective like `conclude`."""
        assert self._arithmetic is not None, "planned updates have rules"
        if self.overflowed:
            return False
        remaining = self._arithmetic.apply_once(
            rule,
            [*series.reduced(), *others],
            [*(exchange.pending_factor for exchange in series.exchanges), *(1.0 for _ in others)],
            step=step,
            values=values,
        )
        series.defer(remaining)
        return True

    def close(self) -> None:
        """Release the communicators of the rules."""
        if self._arithmetic is not None:
            self._arithmetic.close()
