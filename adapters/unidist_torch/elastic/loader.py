"""A DataLoader whose samples can be redistributed when ranks join or leave: `shard` returns it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch.utils.data
from typing_extensions import override

from unidist.elastic.batches import BatchShare, Position
from unidist.elastic.step_training import Progress, Redistributable, sample_place
from unidist.errors import UsageError
from unidist.runtime import context
from unidist.training.loader_state import LoaderPosition
from unidist_torch.loading import Positioned, ShardedLoader

if TYPE_CHECKING:
    from unidist.elastic.batches import SampleOrder
    from unidist_torch.loading import Shards


class ElasticLoader(ShardedLoader, Redistributable):
    """An ordinary loader until an elastic `TrainStep` trains on it; from then on it follows the progress of training.

    The iteration in which that happens is epoch 0, or the first one that was asked for; the next one is the next epoch.
    Each gives what is left of its epoch, so nothing if others have completed it.

    Args:
        order: of the samples in elastic training.
        shards: this rank's part until then.
        options: of the DataLoader, as it is until then.
    """

    def __init__(self, order: SampleOrder, shards: Shards, **options: Any) -> None:
        super().__init__(shards, **options)
        self.order = order
        self._is_unread = True  # since it was made, or a state was loaded
        self._next_epoch = 0  # of elastic training
        self._progress: Callable[[], Progress] | None = None
        self._rest: list[BatchShare] = []
        self._share: Callable[[], BatchShare] | None = None
        common = {
            name: getattr(self, name)
            for name in (
                "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
                "generator", "prefetch_factor", "persistent_workers", "in_order",
            )
        }  # fmt: skip
        self._batches: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
            self.dataset, batch_sampler=_Batches(self), **common
        )

    @override
    def follow(self, progress: Callable[[], Progress]) -> None:
        self._progress = progress
        self._next_epoch = self.start.epoch  # in which the present iteration continues

    @override
    def take_share(self) -> BatchShare | None:
        share, self._share = self._share, None
        return None if share is None else share()

    @override
    def positioned(self) -> Iterator[Positioned]:
        if self._progress is None:
            yield from self._first()
        if self._progress is not None:
            self._next_epoch += 1
            yield from ((None, batch) for batch in self._following(self._progress, self._next_epoch - 1))

    @override
    def state_dict(self) -> dict[str, Any]:
        if self._progress is None:
            return super().state_dict()
        position = self._progress().position
        return self.shards.state(LoaderPosition(position.epoch, (position.processed,))).as_dict()

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._progress is not None:
            raise UsageError("load_state_dict() of data that elastic training has begun with: call it before")
        super().load_state_dict(state)
        self._is_unread = True

    def __len__(self) -> int:
        """Return the number of steps of an epoch."""
        if self._progress is None:
            return super().__len__()
        return self.order.num_batches(self._progress().global_batch)

    def _first(self) -> Iterator[Positioned]:
        """Yield the batches of an ordinary loader, until a `TrainStep` trains on it."""
        place = sample_place(context.current())  # for which the batches are made; later it may be another one
        begun = self.shards.position
        batches = super().positioned()
        for position, batch in batches:
            if is_first := self._is_unread:
                self.start, self._is_unread = Position(begun.epoch, begun.start), False
            self._share = functools.partial(self._first_share, place, is_first=is_first)
            yield position, batch
            if self._progress is not None:
                return

    def _first_share(self, place: tuple[int, int], *, is_first: bool) -> BatchShare:
        """Return the elastic batch that equals this one: the very first batch is the same in both ways.

        Unless it is the last one of its epoch, and padded.
        """
        assert self.batch_size is not None, "checked by shard"
        rank, size = place
        whole = self.batch_size * size
        if is_first:
            shares = self.order.shares(self.start, rank=rank, size=size, global_batch=whole)
            share = next(shares, None)
            if share is not None and share.total % size == 0:
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
            self._share = functools.partial(_itself, share)
            yield batch
            self._check_given()
            expected = (share.following, share.rank, share.size)
        if progress().position.epoch < epoch:
            raise UsageError(
                f"epoch {progress().position.epoch} was left before its end: in an elastic job the ranks go through "
                "all batches of an epoch. Use elastic=False and ud.elastic.run for another kind of loop"
            )

    def _check_given(self) -> None:
        if self._progress is not None and self._share is not None:
            raise UsageError(
                "a batch of the data that TrainStep trains on was not given to it: in an elastic job each batch has to "
                "be. For evaluation use a loader of its own"
            )


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
