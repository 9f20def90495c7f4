"""The items of an epoch, in an order that is the same on every rank: indices of samples, or lists of them."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

import torch
from typing_extensions import override

from unidist.errors import UsageError
from unidist.negotiation.objects import allgather_object
from unidist.runtime import context
from unidist.training.division import fingerprint
from unidist.training.sharding import shuffled
from unidist.training.token_budget import TokenBudget
from unidist_torch.loading.random_states import RandomStates

_WINDOW = 2**14  # items that are drawn at a time; those of the first window are compared


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


class SamplerItems(Items):
    """The items that a sampler, or a batch sampler, draws. It draws the same on every rank, and when it is asked again.

    While it draws, the global generators are seeded with `seed` plus the epoch. A generator that the sampler, or one
    within it, has as its attribute `generator` is seeded with its initial seed plus the epoch. `set_epoch` is called
    on samplers that have it.

    Args:
        sampler: the user's.
        num_samples: of the dataset; None: not known.
        seed: of the global generators.
    """

    def __init__(self, sampler: Iterable[Any], *, num_samples: int | None, seed: int) -> None:
        self._sampler, self._seed = sampler, seed
        samplers = list(_within(sampler))
        self._with_epochs: list[Any] = [each for each in samplers if hasattr(each, "set_epoch")]
        found = {id(each): each for each in (getattr(sampler, "generator", None) for sampler in samplers)}
        self._generators = [(each, each.initial_seed()) for each in found.values() if isinstance(each, torch.Generator)]
        self.data = f"a {type(sampler).__name__} over {num_samples} samples, seed={seed}"

    @override
    def draw(self, epoch: int) -> Iterator[Any]:
        for generator, seed in self._generators:
            generator.manual_seed(seed + epoch)
        for each in self._with_epochs:
            each.set_epoch(epoch)
        states = RandomStates(self._seed + epoch)
        with states:
            items = iter(self._sampler)
        first = _window(items, states)
        self.fingerprint = fingerprint(first)
        name = type(self._sampler).__name__
        _compare(
            name,
            self.fingerprint,
            epoch,
            f"the {name} draws other items",
            "make the same sampler on every rank, with a generator of one seed; leave ud.shard() out if the sampler "
            "divides samples over ranks itself",
        )
        return chain(first, _following(items, states))

    @override
    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]  # a TypeError is right if it has no length


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
        batches = self._batches(epoch)
        self.fingerprint = zlib.crc32(f"{self._samples.fingerprint}".encode(), zlib.crc32(self._lengths.tobytes()))
        _compare("lengths", self.fingerprint, epoch, "the samples have other lengths", "give every rank the same cost=")
        return batches

    @override
    def __len__(self) -> int:
        """Return the number of batches of the epoch that was begun last; it differs a little between epochs."""
        if not isinstance(self._samples, DatasetItems):
            raise TypeError("the number of batches of max_tokens= is not known before a sampler has drawn the samples")
        if self._epoch not in self._counts:
            self._counts = {self._epoch: sum(1 for _ in self._batches(self._epoch))}
        return self._counts[self._epoch]

    def _batches(self, epoch: int) -> Iterator[list[int]]:
        seed = None if self._seed is None else self._seed + epoch
        return self._budget.batches(
            self._samples.draw(epoch), self._lengths.__getitem__, seed=seed, drop_last=self._drop_last
        )


def _compare(name: str, fingerprint: int, epoch: int, what: str, advice: str) -> None:
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


def _within(sampler: Any) -> Iterator[Any]:
    """Yield a sampler, and the samplers that it draws from."""
    seen: set[int] = set()
    waiting = [sampler]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        waiting += [getattr(each, "sampler", None), getattr(each, "batch_sampler", None)]


def _window(items: Iterator[Any], states: RandomStates) -> list[Any]:
    with states:
        return list(islice(items, _WINDOW))


def _following(items: Iterator[Any], states: RandomStates) -> Iterator[Any]:
    while window := _window(items, states):
        yield from window
