"""The items that a sampler of PyTorch draws, the same on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

import torch
from typing_extensions import override

from unidist.training.division import fingerprint
from unidist.training.items import Items, compare_items
from unidist_torch.loading.random_states import RandomStates

_WINDOW = 2**14  # items that are drawn at a time; those of the first window are compared


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
        compare_items(
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
