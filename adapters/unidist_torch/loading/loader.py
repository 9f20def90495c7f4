"""A DataLoader of this rank's part of the data, which can continue in the middle of an epoch: `shard` returns it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch.utils.data
from torch.utils.data._utils.pin_memory import pin_memory

from unidist.errors import UsageError
from unidist.runtime import context
from unidist.training.loader_state import LoaderPosition, LoaderState
from unidist.training.reading import read_ahead, timed
from unidist_torch.loading.random_states import as_before
from unidist_torch.loading.shards import Shards

Positioned = tuple[LoaderPosition | None, Any]
"""A batch, and the position after it; None: somebody else knows."""


class ShardedLoader(torch.utils.data.DataLoader[Any]):
    """This rank's batches of each epoch; every iteration is the next one.

    Args:
        shards: this rank's part of the data.
        options: of the DataLoader.

    Raises:
        UsageError: the options have another sampler, which would divide the samples again.
    """

    def __init__(self, shards: Shards, **options: Any) -> None:
        _check_sampler(shards, options.get("sampler"), options.get("batch_sampler"))
        super().__init__(**options)
        self.shards = shards
        self._reached: LoaderPosition | None = None

    @property
    def description(self) -> str:
        """The data and their order, in words."""
        return self.shards.data

    def __iter__(self) -> Any:
        return self.follow_reading(timed(self.positioned()))

    def __len__(self) -> int:
        """Return the number of steps of an epoch.

        Raises:
            TypeError: it is not known.
        """
        found = self.shards.num_batches()
        return super().__len__() if found is None else found

    def positioned(self) -> Iterator[Positioned]:
        """Yield the batches of the next epoch, of which the iterator may run ahead of training."""
        begun = self.shards.begin()
        # A DataLoader draws a number for each iteration; the epoch that goes on here has drawn its own already.
        with as_before() if begun.processed else nullcontext():
            batches = super().__iter__()
        yield from self.with_positions(begun, batches)

    def with_positions(self, begun: LoaderPosition, batches: Iterable[Any]) -> Iterator[Positioned]:
        """Yield the batches of an iteration, made by this loader or another, each with the position after it.

        Args:
            begun: where the iteration began.
            batches: in the order of this loader's indices.
        """
        position = begun
        for made in batches:
            position, batch = self.shards.reached(position, made)
            yield position, batch

    def follow_reading(self, batches: Iterable[Positioned]) -> Iterator[Any]:
        """Yield the batches of `positioned`; `state_dict` tells the position after the last one that was yielded."""
        for self._reached, batch in batches:
            context.current().elastic_data = self
            yield batch
        self._reached = None

    def state_dict(self) -> dict[str, Any]:
        """Return where this loader is: numbers, text and lists, the same on every rank.

        The last batch that was given to the loop is done. Behind the last one of an epoch, and still in the loop, it is
        the end of that epoch; after the loop, the beginning of the next one.

        Raises:
            UsageError: batches come in no order.
        """
        if self.num_workers and not getattr(self, "in_order", True):
            raise UsageError("state_dict() of a loader with in_order=False: which samples come next is not known")
        return self.shards.state(self._reached).as_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration continue where `state_dict` was called, with any number of ranks.

        Every rank calls it with the same state. The number of workers may differ, unless workers read parts of a
        stream.

        Raises:
            UsageError: the state is of other data. A sampler that draws other samples is an error of the iteration.
        """
        rank = context.current().topology.rank
        most_parts = max(1, self.num_workers)
        self.shards.load(LoaderState.of_dict(state, data=self.shards.data, most_parts=most_parts, rank=rank))
        self._begin_again()

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be this epoch, from its beginning: after a restart, say."""
        if epoch != self.shards.epoch:
            self.shards.set_epoch(epoch)
            self._begin_again()

    def _begin_again(self) -> None:
        self._reached = None
        self._iterator = None  # workers that persist count epochs themselves

    def prefetch(self, count: int = 2) -> PrefetchedBatches:
        """Return the same batches, which a thread reads ahead while a step runs; pinned where there is a GPU.

            for x, y in ud.shard(loader).prefetch(): ...

        For a loader without worker processes (`num_workers=0`); workers read ahead by themselves.

        Args:
            count: number of batches that are read ahead, at least 1.

        Raises:
            UsageError: `count` is below 1, or the job is elastic: batches depend on which ranks are in the job.
        """
        if context.current().is_elastic:
            raise UsageError(
                "prefetch() in an elastic job: a batch that was read ahead would be for ranks that are gone. Leave it "
                "out, and give the DataLoader num_workers="
            )
        return PrefetchedBatches(self, count)


class PrefetchedBatches:
    """The batches of a loader, read ahead by a thread in each iteration. Made by `ShardedLoader.prefetch`.

    Args:
        loader: that makes the batches.
        count: how many are read ahead.
    """

    def __init__(self, loader: ShardedLoader, count: int) -> None:
        self._loader = loader
        self._count = count
        read_ahead((), count)  # it says what is wrong with it

    def __iter__(self) -> Iterator[Any]:
        pin = _pin if torch.cuda.is_available() and not self._loader.pin_memory else None
        ahead = timed(read_ahead(self._loader.positioned(), self._count, pin))
        return self._loader.follow_reading(ahead)

    def __len__(self) -> int:
        """Return the number of steps of an epoch."""
        return len(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """See `ShardedLoader.state_dict`: batches that wait are not done."""
        return self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `ShardedLoader.load_state_dict`."""
        self._loader.load_state_dict(state)

    def set_epoch(self, epoch: int) -> None:
        """See `ShardedLoader.set_epoch`."""
        self._loader.set_epoch(epoch)


def _check_sampler(shards: Shards, *samplers: object) -> None:
    if isinstance(shards, torch.utils.data.Sampler) and not any(each is shards for each in samplers):
        found = next((type(each).__name__ for each in samplers if each is not None), "no sampler")
        raise UsageError(
            f"a loader of ud.shard() was rebuilt with {found} instead of the sampler that shards the data (rank "
            f"{context.current().topology.rank}): each rank would get a part of its part. With Lightning, give fit the "
            "plain DataLoader, or say Trainer(use_distributed_sampler=False)"
        )


def _pin(positioned: Positioned) -> Positioned:
    position, batch = positioned
    return position, pin_memory(batch)
