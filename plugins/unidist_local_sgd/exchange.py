"""Exchanges of gradients between two synchronizations: over all ranks at the beginning, then within each host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from typing_extensions import override

from unidist.buffer import HOST
from unidist.communicator import ReduceOp
from unidist.gradients import NO_NOTICE, NOTICE_BYTES, LocalExchange, ParameterInfo, RoundResult

if TYPE_CHECKING:
    from unidist.communicator import Communicator
    from unidist.framework import Framework
    from unidist.optim import Update


class GroupExchange(LocalExchange):
    """Averages gradients over all ranks in the first updates, then over the ranks of a group.

    In the first updates the numbers are those of `data` (post-local SGD, Lin et al. 2020,
    https://arxiv.org/abs/1808.07217). Gradients are exchanged when all of a round are there, not as they become ready.

    Args:
        parameters: of the gradients.
        framework: allocates the memory, and multiplies.
        everyone: communicators over all ranks by kind of memory, "host" and, if needed, "device".
        group: the same over the ranks of the group; empty: this rank is alone.
        after: number of the first updates.

    Attributes:
        update: whose gradients these are; set when the exchange was made.
    """

    update: Update

    def __init__(
        self,
        parameters: Sequence[ParameterInfo],
        framework: Framework,
        everyone: Mapping[str, Communicator],
        group: Mapping[str, Communicator],
        after: int,
    ) -> None:
        super().__init__(parameters, framework, everyone[HOST].size)
        self._everyone = everyone
        self._group = group
        self._after = after
        self._status = everyone[HOST].allocate(len(self.parameters) + NOTICE_BYTES)

    @property
    @override
    def is_local(self) -> bool:
        return self.update.step >= self._after

    @property
    def shares_notice(self) -> bool:  # type: ignore[override]  # it changes with time
        """See `GradientExchange`: until the ranks begin to train alone."""
        return not self.is_local

    @override
    def finish(self, *, scale: float | None = None, notice: bytes = NO_NOTICE) -> RoundResult:
        own = super().finish(scale=scale, notice=notice)
        communicators = self._group if self.is_local else self._everyone
        if not communicators:
            return own
        status = self._status.bytes()
        for index, is_present in enumerate(own.present):
            status[index] = is_present
        status[-NOTICE_BYTES:] = notice
        works = [communicators[HOST].allreduce(self._status, self._status, op=ReduceOp.MAX)]
        for memory in self.reduced().memory:
            over = communicators[HOST if memory.memory == HOST else "device"]
            works.append(over.allreduce(memory, memory, scale=1.0 / over.size))
        for work in works:
            self.update.context.recorder.wait(work)
        values = status.tolist()
        return RoundResult(tuple(value > 0 for value in values[:-NOTICE_BYTES]), bytes(values[-NOTICE_BYTES:]))

    @override
    def close(self) -> None:
        super().close()
        for communicator in (*self._group.values(), *self._everyone.values()):
            communicator.close()


def ranks_of_host(communicator: Communicator, host: int) -> Communicator:
    """Return a communicator over the ranks of the same host. Collective.

    Args:
        communicator: over all ranks.
        host: number of this rank's.
    """
    from unidist.negotiation import gather_objects

    hosts = gather_objects(communicator, host)
    group = communicator.split([rank for rank, other in enumerate(hosts) if other == host])
    assert group is not None, "this rank is in its group"
    return group
