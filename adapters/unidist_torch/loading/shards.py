"""The interface between a sharded loader and the parts of its data that are this rank's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from unidist.training.loader_state import LoaderPosition, LoaderState


class Shards(ABC):
    """This rank's part of each epoch. The loader calls the methods, and makes the batches.

    Attributes:
        data: the data and their order, in words.
        position: at which the next iteration begins.
    """

    data: str
    position: LoaderPosition

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration."""
        return self.position.epoch

    @abstractmethod
    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be this epoch, from its beginning; if it is to be this one anyway, do nothing."""

    @abstractmethod
    def begin(self) -> LoaderPosition:
        """Return the position at which an iteration begins. Called just before it."""

    @abstractmethod
    def reached(self, position: LoaderPosition, batch: Any) -> tuple[LoaderPosition, Any]:
        """Return the position after a batch, and the batch for the user. Called for each, in order.

        Args:
            position: before the batch.
            batch: as the DataLoader made it.
        """

    def num_before(self, begun: LoaderPosition) -> int:
        """Return the number of this rank's batches of the epoch before a position, with this number of ranks."""
        return 0

    def num_batches(self) -> int | None:
        """Return the number of this rank's batches of a whole epoch; None: the DataLoader knows.

        Raises:
            TypeError: it is not known.
        """
        return None

    @abstractmethod
    def state(self, position: LoaderPosition | None) -> LoaderState:
        """Return the state of the loader at a position of the current epoch; None: before the next one."""

    @abstractmethod
    def load(self, state: LoaderState) -> None:
        """Let the next iteration continue there."""
