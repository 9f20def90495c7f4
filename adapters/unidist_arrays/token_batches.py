"""This rank's batches of a budget of tokens, of samples that are asked for by number: for any framework."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Protocol

from unidist.errors import UsageError
from unidist.runtime import context
from unidist.training.division import global_batches, length_of_rank
from unidist.training.items import BudgetItems, Cost, DatasetItems, check_budget, lengths_of
from unidist.training.reading import timed
from unidist.training.sharding import Tail
from unidist.training.token_budget import TokenBudget

__all__ = ["EqualEpochs", "Samples", "TokenBatches"]


class Samples(Protocol):
    """Samples that batches pick by number.

    Attributes:
        count: their number.
        makes_arrays: batches are arrays, and not lists of samples.
    """

    count: int
    makes_arrays: bool

    def batch(self, indices: list[int]) -> Any:
        """Return the batch of these samples."""


class TokenBatches:
    """Batches of this rank; each iteration is the next epoch, in which each sample is in the batch of one rank.

    Args:
        items: the batches of all ranks, as indices of samples.
        samples: of which batches are made.
        tail: of batches that do not divide by the number of ranks.

    Attributes:
        epoch: the next one.
        samples: as above.

    Raises:
        UsageError: ranks have other lengths. Every rank makes these batches.
    """

    def __init__(self, items: BudgetItems, samples: Samples, *, tail: Tail) -> None:
        self.epoch = 0
        self.samples = samples
        self._items = items
        self._tail: Tail = tail
        items.draw(0)  # compares the lengths, once: they do not change

    @classmethod
    def of(
        cls,
        samples: Samples,
        *,
        cost: Cost | None,
        max_tokens: float,
        max_samples: int | None,
        window: int | None,
        shuffle: bool,
        seed: int,
        tail: Tail,
    ) -> TokenBatches:
        """Return batches of these samples; for the rest see `shard` of an adapter.

        Raises:
            UsageError: arguments that make no sense, a sample that is too long, or ranks with other lengths.
        """
        check_budget(cost, max_tokens, window)
        assert cost is not None
        if max_samples is not None and max_samples < 1:
            raise UsageError(f"batch_size={max_samples}: give at least 1")
        lengths = lengths_of(cost, samples.count)
        budget = TokenBudget.of(lengths, max_tokens=max_tokens, max_samples=max_samples, window=window)
        order = DatasetItems(samples.count, shuffle=shuffle, seed=seed)
        items = BudgetItems(order, lengths, budget, seed=seed if shuffle else None, drop_last=False)
        return cls(items, samples, tail=tail)

    def __iter__(self) -> Iterator[Any]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        return timed(self._batches(epoch))

    def _batches(self, epoch: int) -> Iterator[Any]:
        for indices in self.indices(epoch):
            context.current().elastic_data = self
            yield self.samples.batch(indices)

    @property
    def description(self) -> str:
        """The data and their order, in words."""
        return self._items.data

    def __len__(self) -> int:
        """Return the number of this rank's batches of the epoch that was begun last; it differs between epochs."""
        return self.length(max(self.epoch - 1, 0))

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be this epoch: after a restart, say."""
        self.epoch = epoch

    def indices(self, epoch: int) -> Iterator[list[int]]:
        """Yield the samples of each of this rank's batches."""
        rank, size = context.current().data_place()
        for step in global_batches(self._items.batches(epoch), batch_size=1, size=size, tail=self._tail):
            yield from step[rank::size]

    def length(self, epoch: int) -> int:
        """Return the number of this rank's batches of an epoch."""
        return length_of_rank(self._items.length(epoch), *context.current().data_place(), self._tail)

    def extremes(self) -> tuple[int, int]:
        """Return the shortest and the longest sample, by their numbers."""
        return self._items.extremes()


class EqualEpochs:
    """The same batches for a trainer to which all epochs have as many: `fit` of Keras.

    The epochs of `TokenBatches` follow each other without a gap, and each iteration takes the next `len()` batches: as
    many as the first epoch has. Which ones these are depends on the number of the iteration alone.

    Args:
        batches: with as many on each rank.

    Raises:
        UsageError: ranks may have different numbers of batches, there is none, or they are lists of samples.
    """

    def __init__(self, batches: TokenBatches, *, tail: Tail) -> None:
        if tail == "join":
            raise UsageError(
                "shard(max_tokens=, tail='join') in Keras: all ranks need as many batches, so use tail='pad' or 'drop'"
            )
        if not batches.samples.makes_arrays:
            raise UsageError(
                "shard(max_tokens=) of a sequence of samples: give collate=, a function of a list of samples that "
                "makes a batch, as fit takes it"
            )
        self._batches = batches
        self._length = batches.length(0)
        if self._length == 0:
            raise UsageError(
                f"shard(max_tokens=, tail={tail!r}): fewer batches than the {context.current().data_place()[1]} ranks "
                "that divide samples. Give more samples, a smaller max_tokens, or tail='pad'"
            )
        self.set_epoch(0)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return timed(map(self.batch, self.take()))

    @property
    def epoch(self) -> int:
        """The number of the next iteration."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be that of this number: after a restart, say."""
        self._following = itertools.chain.from_iterable(map(self._batches.indices, itertools.count()))
        self._epoch = 0
        while self._epoch < epoch:
            self.take()

    def batch(self, indices: list[int]) -> Any:
        """Return the batch of these samples."""
        return self._batches.samples.batch(indices)

    def take(self) -> list[list[int]]:
        """Return the samples of each batch of the next iteration."""
        self._epoch += 1
        return list(itertools.islice(self._following, self._length))
