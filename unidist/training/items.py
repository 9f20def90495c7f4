"""The items of an epoch, in an order that is the same on every rank: indices of samples, or lists of them."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from typing_extensions import override

from unidist.errors import UsageError
from unidist.negotiation.objects import allgather_object
from unidist.runtime import context
from unidist.training.sharding import shuffled
from unidist.training.token_budget import TokenBudget

Cost = Sequence[float] | Callable[[Any], float]
"""A number for each sample, or a function of its index."""


class Items(ABC):
    """The items of each epoch.

    Attributes:
        data: what they are, in words; with it a saved position is recognised.
        fingerprint: of the items that were drawn last; None: `data` says all.
    """

    data: str
    fingerprint: int | None = None

    @abstractmethod
    def draw(self, epoch: int) -> Iterator[Any]:
        """Return the items of an epoch, the same on every rank. Every rank calls it.

        Raises:
            UsageError: ranks have different ones.
        """

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of items of an epoch.

        Raises:
            TypeError: it is not known.
        """


class DatasetItems(Items):
    """All samples of a dataset.

    Args:
        count: of samples.
        shuffle: in another order in each epoch, else in that of the dataset.
        seed: of the order.
    """

    def __init__(self, count: int, *, shuffle: bool, seed: int) -> None:
        self._count, self._shuffle, self._seed = count, shuffle, seed
        self.data = f"{count} samples, " + (f"shuffled with seed={seed}" if shuffle else "in their order")

    @override
    def draw(self, epoch: int) -> Iterator[int]:
        if not self._shuffle:
            return iter(range(self._count))
        return iter(shuffled(self._count, seed=self._seed, epoch=epoch))

    @override
    def __len__(self) -> int:
        return self._count


class BudgetItems(Items):
    """Batches of samples, each a list of indices, which fill a budget of tokens.

    Args:
        samples: of each epoch.
        lengths: of all samples, by index.
        budget: see `TokenBudget`.
        seed: of the order of the batches; None: the samples stay in about their order.
        drop_last: see `TokenBudget.batches`.
    """

    def __init__(
        self, samples: Items, lengths: array[float], budget: TokenBudget, *, seed: int | None, drop_last: bool
    ) -> None:
        self.data = f"{samples.data}, in {budget}" + (", without the last" if drop_last else "")
        self._samples, self._lengths, self._budget = samples, lengths, budget
        self._seed, self._drop_last = seed, drop_last
        self._epoch = 0
        self._counts: dict[int, int] = {}
        if isinstance(samples, DatasetItems):  # else one that is too long may never be drawn
            for index, length in enumerate(lengths):
                budget.check(index, length)

    @override
    def draw(self, epoch: int) -> Iterator[list[int]]:
        self._epoch = epoch
        batches = self.batches(epoch)
        self.fingerprint = zlib.crc32(f"{self._samples.fingerprint}".encode(), zlib.crc32(self._lengths.tobytes()))
        compare_items(
            "lengths",
            zlib.crc32(self.data.encode(), self.fingerprint),
            epoch,
            "shard() has other lengths or arguments",
            "give every rank the same cost= and the same arguments",
        )
        return batches

    @override
    def __len__(self) -> int:
        """Return the number of batches of the epoch that was begun last; it differs a little between epochs."""
        if not isinstance(self._samples, DatasetItems):
            raise TypeError("the number of batches of max_tokens= is not known before a sampler has drawn the samples")
        return self.length(self._epoch)

    def length(self, epoch: int) -> int:
        """Return the number of batches of an epoch."""
        if epoch not in self._counts:
            self._counts = {epoch: sum(1 for _ in self.batches(epoch))}
        return self._counts[epoch]

    def batches(self, epoch: int) -> Iterator[list[int]]:
        """Yield the batches of an epoch as `draw` does, without the comparison of lengths."""
        seed = None if self._seed is None else self._seed + epoch
        return self._budget.batches(
            self._samples.draw(epoch), self._lengths.__getitem__, seed=seed, drop_last=self._drop_last
        )

    def extremes(self) -> tuple[int, int]:
        """Return the shortest and the longest sample."""
        indices = range(len(self._lengths))
        return min(indices, key=self._lengths.__getitem__), max(indices, key=self._lengths.__getitem__)


def compare_items(name: str, fingerprint: int, epoch: int, what: str, advice: str) -> None:
    """Raise on every rank if ranks have drawn different items.

    Args:
        name: of the comparison.
        fingerprint: of this rank's.
        epoch: for messages.
        what: the difference, for messages.
        advice: what can be done about it.
    """
    runtime = context.current()
    if runtime.topology.world_size == 1:
        return
    everyone = allgather_object(runtime.negotiator, fingerprint, name=f"shard.{name}")
    differing = [rank for rank, each in enumerate(everyone) if each != everyone[0]]
    if differing:
        raise UsageError(
            f"{what} on rank {differing[0]} than on rank 0 in epoch {epoch} (seen on rank {runtime.topology.rank}). "
            f"ud.shard() gives each rank its part of one sequence: {advice}"
        )


def check_budget(cost: object, max_tokens: float | None, window: int | None) -> None:
    """Raise UsageError if arguments of `shard` about batches of a budget of tokens are there in part."""
    if max_tokens is None:
        check_no_budget(window=window)
    elif cost is None:
        raise UsageError(f"shard(max_tokens={max_tokens}): give the lengths of the samples too, cost=lengths")


def check_no_budget(**options: object) -> None:
    """Raise UsageError if an argument of `shard` is given that takes effect with `max_tokens` only."""
    for name, value in options.items():
        if value is not None:
            raise UsageError(f"shard({name}=) is about batches of max_tokens=: give that too, or leave {name}= out")


def lengths_of(cost: Cost, count: int) -> array[float]:
    """Return the lengths of all samples.

    Args:
        cost: one for each sample, or a function of its index.
        count: number of samples.

    Raises:
        UsageError: another number of lengths.
    """
    if callable(cost):
        return array("d", (cost(index) for index in range(count)))
    if len(cost) != count:
        raise UsageError(f"shard(cost=): {len(cost)} lengths of {count} samples; give one for each")
    return array("d", (float(each) for each in cost))
