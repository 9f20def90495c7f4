"""Announcements of a bound optimizer's exchanges to ranks that have joined (`ud.join`), so that they take part."""

from __future__ import annotations

from collections.abc import Callable

from unidist.negotiation.join import Announcement
from unidist.optim.update import Update
from unidist.runtime import context


class OptimizerAnnouncements:
    """The announcements of one optimizer. They cost a named operation of one byte each.

    Only an optimizer whose gradients go to every rank announces: a joined rank serves all that is announced. A local
    exchange (`GradientExchange.is_local`) is not announced.

    Args:
        update: of the optimizer.
        take_part: the part of a joined rank in an update's exchange.
        take_part_in_flush: the same for `flush`.
        take_part_in_loss: the same for the mean of a closure's loss.
        take_part_in_pass: the same for a pass that is not the last of its window, where that is exchanged.
        take_part_in_extra_pass: the same for one of several backward passes before a step.
    """

    def __init__(
        self,
        update: Update,
        take_part: Callable[[], None],
        take_part_in_flush: Callable[[], None],
        take_part_in_loss: Callable[[], None],
        take_part_in_pass: Callable[[], None],
        take_part_in_extra_pass: Callable[[], None],
    ) -> None:
        self._update = update
        self._announcements: list[Announcement] = []
        runtime = context.current()
        if update.options.process_set is None and 1 < update.num_ranks == runtime.topology.world_size:
            for served in (
                take_part, take_part_in_flush, take_part_in_loss, take_part_in_pass, take_part_in_extra_pass,
            ):  # fmt: skip
                self._announcements.append(runtime.announcements.register(served))

    def announce_update(self) -> None:
        """Announce the exchange of an update. Collective."""
        self._announce(0)

    def announce_flush(self) -> None:
        """Announce a `flush`. Collective."""
        self._announce(1)

    def announce_loss(self) -> None:
        """Announce the mean of a loss. Collective."""
        self._announce(2)

    def announce_end_of_pass(self) -> None:
        """Announce the end of a pass that is exchanged. Collective."""
        self._announce(3)

    def announce_end_of_extra_pass(self) -> None:
        """Announce the end of one of several backward passes before a step. Collective."""
        self._announce(4)

    def _announce(self, number: int) -> None:
        if self._announcements and not self._update.is_local:
            self._announcements[number].announce()
