"""A DataLoader whose samples can be redistributed when ranks join or leave: `shard` returns it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch.utils.data
from torch.utils.data._utils.pin_memory import pin_memory
from typing_extensions import override

from unidist.elastic.batches import BatchShare, Position
from unidist.elastic.step_training import Progress, Redistributable, sample_place
from unidist.errors import UsageError
from unidist.runtime import context
from unidist.training.reading import read_ahead, timed

if TYPE_CHECKING:
    from unidist.elastic.batches import SampleOrder


class ElasticLoader(torch.utils.data.DataLoader[Any], Redistributable):
    """An ordinary loader until an elastic `TrainStep` trains on it; from then on it follows the progress of training.

    The iteration in which that happens is epoch 0, the next one epoch 1: each gives what is left of its epoch, so
    nothing where others have completed it.

    Args:
        order: of the samples in elastic training.
        options: of the DataLoader, as it is until then.
    """

    def __init__(self, order: SampleOrder, **options: Any) -> None:
        super().__init__(**options)
        self.order = order
        self._iterations = 0
        self._progress: Callable[[], Progress] | None = None
        self._rest: list[BatchShare] = []
        self._share: Callable[[], BatchShare] | None = None
        common = {
            name: getattr(self, name)
            for name in (
                "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
                "generator", "prefetch_factor", "persistent_workers",
            )
        }  # fmt: skip
        self._batches: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
            self.dataset, batch_sampler=_Batches(self), **common
        )

    @override
    def follow(self, progress: Callable[[], Progress]) -> None:
        self._progress = progress
        self._iterations = 1  # this one is the first

    @override
    def take_share(self) -> BatchShare | None:
        share, self._share = self._share, None
        return None if share is None else share()

    def __iter__(self) -> Any:
        return timed(self.unmeasured())

    def unmeasured(self) -> Iterator[Any]:
        """Return an iterator over the next epoch, of which nobody counts how long it is waited for."""
        self._iterations += 1
        return self._iterate(self._iterations - 1)

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

    def __len__(self) -> int:
        """Return the number of steps of an epoch."""
        if self._progress is None:
            return super().__len__()
        return self.order.num_batches(self._progress().global_batch)

    def _iterate(self, index: int) -> Iterator[Any]:
        if self._progress is None:
            yield from self._first(index)
            index = 0
        if self._progress is not None:
            yield from self._following(self._progress, index)

    def _first(self, index: int) -> Iterator[Any]:
        """Yield the batches of an ordinary loader, until a `TrainStep` trains on it."""
        place = sample_place(context.current())  # for which the batches are made; later it may be another one
        for number, batch in enumerate(super().__iter__()):
            self._give(functools.partial(self._first_share, place, is_first=index == number == 0))
            yield batch
            if self._progress is not None:
                return

    def _first_share(self, place: tuple[int, int], *, is_first: bool) -> BatchShare:
        """Return the elastic batch that equals this one: the very first batch is the same in both ways."""
        assert self.batch_size is not None, "checked by shard"
        rank, size = place
        whole = self.batch_size * size
        if is_first:
            start = Position()
            shares = self.order.shares(start, rank=rank, size=size, global_batch=whole)
            share = next(shares, None)
            if share is not None and share.total == whole:
                return share
        nowhere = Position(-1)
        return BatchShare(nowhere, nowhere, rank, size, 0, ())

    def _following(self, progress: Callable[[], Progress], epoch: int) -> Iterator[Any]:
        """Yield the rest of an epoch, redistributed whenever progress is not where the last batch led to."""
        batches: Iterator[Any] = iter(())
        expected: tuple[Position, int, int] | None = None
        self._check_given()
        while (now := progress()).position.epoch == epoch:
            place = (now.position, *sample_place(context.current()))
            if place != expected:
                self._rest = list(
                    self.order.shares(now.position, rank=place[1], size=place[2], global_batch=now.global_batch)
                )
                shares, batches = iter(self._rest), iter(self._batches)
            share = next(shares)
            batch = next(batches)
            self._give(functools.partial(_itself, share))
            yield batch
            self._check_given()
            expected = (share.following, share.rank, share.size)
        if progress().position.epoch < epoch:
            raise UsageError(
                f"epoch {progress().position.epoch} was left before its end: in an elastic job the ranks go through "
                "all batches of an epoch. Use elastic=False and ud.elastic.run for another kind of loop"
            )

    def _give(self, share: Callable[[], BatchShare]) -> None:
        self._share = share
        context.current().elastic_data = self

    def _check_given(self) -> None:
        if self._progress is not None and self._share is not None:
            raise UsageError(
                "a batch of the data that TrainStep trains on was not given to it: in an elastic job each batch has to "
                "be. For evaluation use a loader of its own"
            )


class PrefetchedBatches:
    """The batches of a loader, read ahead by a thread in each iteration. Made by `ElasticLoader.prefetch`.

    Args:
        loader: that makes the batches.
        count: how many are read ahead.
    """

    def __init__(self, loader: ElasticLoader, count: int) -> None:
        self._loader = loader
        self._count = count
        read_ahead((), count)  # it says what is wrong with it

    def __iter__(self) -> Iterator[Any]:
        pin = pin_memory if torch.cuda.is_available() and not self._loader.pin_memory else None
        return timed(read_ahead(self._loader.unmeasured(), self._count, pin))

    def __len__(self) -> int:
        """Return the number of steps of an epoch."""
        return len(self._loader)


def _itself(share: BatchShare) -> BatchShare:
    return share


class _Batches(torch.utils.data.Sampler[list[int]]):
    """The remaining batches of indices; one placeholder sample for a batch in which this rank has none."""

    def __init__(self, loader: ElasticLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(share.indices) or [0] for share in self._loader._rest])

    def __len__(self) -> int:
        return len(self._loader._rest)
