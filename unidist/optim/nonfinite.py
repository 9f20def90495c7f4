"""The first gradient that is not finite, by name: of which parameter, on which rank, at which update.

Each rank looks at its own gradients as its backward pass gives them, and at the reduced ones before the inner step. So
a number that a rank has computed is told from one that the exchange has made.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unidist.buffer import Buffer, DType
from unidist.communicator import Communicator, ReduceOp, format_ranks
from unidist.errors import NonfiniteError
from unidist.negotiation.objects import gather_objects

if TYPE_CHECKING:
    from unidist.framework import Framework
    from unidist.gradients.interface import ReducedGradients

_log = logging.getLogger("unidist")

_MOST_IN_A_ROW = 50
"""Updates that may be skipped one after the other; then the parameters themselves are not finite, or the data."""


@dataclass(frozen=True)
class _Found:
    """What a rank has found in an update.

    Args:
        rank: in the world.
        name: of the first parameter whose gradient was not finite after this rank's backward pass; "": none was.
        value: the largest absolute value of that gradient, NaN or infinite.
        is_reduced: whether a reduced gradient is not finite here.
        loss: of this rank's passes, if it is not finite and known; else 0.
    """

    rank: int
    name: str
    value: float
    is_reduced: bool
    loss: float = 0.0

    def __str__(self) -> str:
        """Return where it was, and what."""
        loss = f", and the loss there is {self.loss}" if self.loss else ""
        return f"of {self.name!r} on rank {self.rank} ({self.value}{loss})"


class NonfiniteWatch:
    """Looks at the gradients of one optimizer, and ends the training or leaves an update out.

    Args:
        framework: does arithmetic on gradients.
        everyone: over all ranks that hold a part of the gradient or update with it.
        rank: of this process in the world.
        skips: leave the update out; False: raise an error.
    """

    def __init__(self, framework: Framework, everyone: Communicator, rank: int, *, skips: bool) -> None:
        self._framework = framework
        self._everyone = everyone
        self._rank = rank
        self._skips = skips
        self._name, self._value, self._loss = "", 0.0, 0.0
        self._skipped = 0

    def look_at_own(self, name: str, gradient: Buffer) -> None:
        """Look at a gradient that the backward pass of this rank has given, before it is exchanged."""
        if not self._name and not math.isfinite(value := self._largest([gradient])):
            self._name, self._value = name, value

    def look_at_loss(self, loss: float) -> None:
        """Look at the loss of a pass of this rank, before the update."""
        if not math.isfinite(loss):
            self._loss = loss

    def is_skipped(self, reduced: Sequence[ReducedGradients], step: int) -> bool:
        """Return whether every rank leaves an update out. Collective.

        Args:
            reduced: the reduced gradients on this rank.
            step: number of the update, from 1.

        Raises:
            NonfiniteError: a gradient is not finite on some rank, and that is an error, or has been so for many updates
                in a row. On every rank.
        """
        is_reduced = not math.isfinite(self._largest([memory for part in reduced for memory in part.memory]))
        found = _Found(self._rank, self._name, self._value, is_reduced, self._loss)
        self._name, self._value, self._loss = "", 0.0, 0.0
        if not self._is_anywhere(bool(found.name) or is_reduced):
            self._skipped = 0
            return False
        self._skipped += 1
        text = _told(gather_objects(self._everyone, found), step)
        if not self._skips:
            raise NonfiniteError(
                f"{text} Parameters and optimizer are those before this update. Look at the batch and the loss there; "
                "--on-nonfinite skip leaves such updates out, off does not look"
            )
        if self._skipped == _MOST_IN_A_ROW:
            raise NonfiniteError(
                f"{text} {_MOST_IN_A_ROW} updates in a row were left out: this does not pass by itself"
            )
        if self._everyone.rank == 0:
            _log.warning("%s The update is left out on all ranks", text)
        return True

    def _largest(self, memory: Sequence[Buffer]) -> float:
        """Return the largest absolute value; NaN if there is one."""
        values = self._framework.norms([each for each in memory if each.count], math.inf)
        return math.nan if any(map(math.isnan, values)) else max(values, default=0.0)

    def _is_anywhere(self, is_here: bool) -> bool:
        if self._everyone.size == 1:
            return is_here
        exchanged = Buffer.allocate(1, DType.UINT8)
        exchanged.bytes()[0] = is_here
        self._everyone.allreduce(exchanged, exchanged, op=ReduceOp.MAX).wait()
        return bool(exchanged.bytes()[0])


def _told(found: Sequence[_Found], step: int) -> str:
    own = [each for each in found if each.name]
    if not own:
        ranks = format_ranks([each.rank for each in found if each.is_reduced])
        return (
            f"update {step}: the gradients of every rank's backward pass are finite, and their sum is not (seen on "
            f"rank(s) {ranks}): it is too large for its type, or what exchanges it is broken."
        )
    listed = "; ".join(map(str, own[:4]))
    more = f"; and on {len(own) - 4} more ranks" if len(own) > 4 else ""
    return f"update {step}: gradients are not finite after these ranks' own backward passes: {listed}{more}."
