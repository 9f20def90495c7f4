"""The gradient exchanges of one optimizer, used as if they were one, with parameters numbered consecutively.

There are several if parameters were added later: layers were unfrozen, or groups were added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from unidist.gradients.buckets import ParameterInfo
from unidist.gradients.interface import NO_NOTICE, GradientExchange, ReducedGradients
from unidist.gradients.pieces import GradientPiece


class ExchangeSeries:
    """Exchanges, in the order in which they were added.

    Attributes:
        places: by parameter, its exchange, and its number in it.
    """

    def __init__(self) -> None:
        self._exchanges: list[GradientExchange] = []
        self._present: dict[GradientExchange, Sequence[bool]] = {}  # of the last round
        self.places: list[tuple[GradientExchange, int]] = []

    @property
    def exchanges(self) -> Sequence[GradientExchange]:
        """One for each call of `add`."""
        return self._exchanges

    @property
    def parameters(self) -> list[ParameterInfo]:
        """The parameters of all exchanges."""
        return [exchange.parameters[index] for exchange, index in self.places]

    @property
    def reduces_each_pass(self) -> bool:
        """Whether any of the exchanges reduces each pass."""
        return any(exchange.reduces_each_pass for exchange in self._exchanges)

    def add(self, exchange: GradientExchange) -> None:
        """Append an exchange; its parameters are numbered after the earlier ones."""
        self._exchanges.append(exchange)
        self.places += [(exchange, index) for index in range(len(exchange.parameters))]

    def replace(self, make: Callable[[Sequence[ParameterInfo]], GradientExchange]) -> None:
        """Replace every exchange with a new one for the same parameters, then close it. Collective, as `make` is."""
        old, self._exchanges, self.places = self._exchanges, [], []
        self._present.clear()
        for exchange in old:
            self.add(make(exchange.parameters))
            exchange.close()

    def end_pass(self, *, is_extra: bool = False) -> None:
        """Complete a pass, see `GradientExchange.end_pass`.

        Args:
            is_extra: it is one of several backward passes before a step, which all exchanges add up; else only those
                that reduce each pass of a window.
        """
        for exchange in self._exchanges:
            if is_extra or exchange.reduces_each_pass:
                exchange.end_pass()

    def finish(
        self, scale_of: Callable[[GradientExchange], float | None], *, notice: bytes, first_parameter: int
    ) -> tuple[list[bool], bytes]:
        """Complete the rounds of the exchanges from parameter `first_parameter` on; see `GradientExchange.finish`.

        Args:
            scale_of: the factor for the sums of an exchange; None: its own.
            notice: `NOTICE_BYTES` bytes; every rank learns the largest of all ranks' for each of them.
            first_parameter: the exchanges of the parameters before this one are complete already.

        Returns:
            Per parameter from `first_parameter` on, whether any rank had a gradient; and the largest bytes of
            all notices.
        """
        present: list[bool] = []
        largest = NO_NOTICE
        skipped = 0
        for exchange in self._exchanges:
            if skipped < first_parameter:
                skipped += len(exchange.parameters)
                continue
            result = exchange.finish(scale=scale_of(exchange), notice=notice)
            self._present[exchange] = result.present
            present += result.present
            largest = bytes(map(max, largest, result.notice))
        return present, largest

    def reduced(self) -> list[ReducedGradients]:
        """Return the reduced gradients of each exchange."""
        return [
            replace(exchange.reduced(), parameters=exchange.parameters, pieces=partial(self._pieces, exchange))
            for exchange in self._exchanges
        ]

    def _pieces(self, exchange: GradientExchange) -> list[GradientPiece]:
        """Return an exchange's pieces of gradients that are not missing on all ranks."""
        present = self._present.get(exchange, ())
        return [piece for piece in exchange.pieces() if not present or present[piece.number]]

    def defer(self, factors: Sequence[float]) -> None:
        """Set the `pending_factor` of each exchange; factors beyond the number of exchanges are ignored."""
        for exchange, factor in zip(self._exchanges, factors, strict=False):
            exchange.pending_factor = factor

    def close(self) -> None:
        """Release buffers and communicators."""
        for exchange in self._exchanges:
            exchange.close()
        self._exchanges.clear()
        self._present.clear()
