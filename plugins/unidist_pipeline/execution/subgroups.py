"""Communicators over some of the ranks of a pipeline: a sender and its receiver, or the holders of a parameter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from unidist.communicator import Communicator
from unidist.runtime_api import RuntimeAPI

Key = TypeVar("Key")


class Subgroups:
    """Splits communicators; the runtime, which owns the only object of this class, closes the parts.

    Args:
        context: the runtime.
    """

    def __init__(self, context: RuntimeAPI) -> None:
        self._made: list[Communicator] = []

    def split(self, communicator: Communicator, ranks: Sequence[int]) -> Communicator | None:
        """Return a part, see `Communicator.split`. Collective over the communicator."""
        made = communicator.split(ranks)
        if made is not None:
            self._made.append(made)
        return made

    def of_holders(
        self, communicator: Communicator, holders: Iterable[tuple[Key, Sequence[int]]]
    ) -> list[tuple[Communicator, list[Key]]]:
        """Return a communicator for each set of ranks that hold the same things, and these. Collective.

        Args:
            communicator: along the pipeline.
            holders: what is held, and by which ranks of the pipeline; the same, in the same order, on every rank.

        Returns:
            Those that this rank is in, in the same order on every rank. What one rank holds alone is in none.
        """
        together: dict[tuple[int, ...], list[Key]] = {}
        for key, ranks in holders:
            if len(ranks) > 1:
                together.setdefault(tuple(ranks), []).append(key)
        found = []
        for ranks, keys in together.items():
            group = self.split(communicator, ranks if communicator.rank in ranks else ())
            if group is not None:
                found.append((group, keys))
        return found

    def close(self) -> None:
        """See `unidist.runtime_api.Owned`."""
        for each in self._made:
            each.close()
