"""Batches of arrays whose samples can be redistributed when ranks join or leave: `shard` returns them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from typing_extensions import override

from unidist.elastic.batches import BatchShare, Position, SampleOrder
from unidist.elastic.step_training import Progress, Redistributable
from unidist.errors import UsageError
from unidist.runtime import context
from unidist.topology import Topology
from unidist.training.reading import timed
from unidist.training.sharding import Tail, share


class ShardedArrays(Redistributable):
    """Batches of this rank's share of arrays; each iteration is an epoch. Made by `shard`.

    Until an elastic `TrainStep` trains on them; from then on they follow the progress of training. The iteration in
    which that happens is epoch 0, the next one epoch 1: each gives what is left of its epoch, so nothing where others
    have completed it.

    Args:
        arrays: a tree of arrays with one row per sample.
        count: number of rows.
        batch_size: samples of a batch of this rank.
        shuffle: in another order in each epoch.
        seed: of the order.
        tail: of samples that do not divide.
    """

    def __init__(self, arrays: Any, count: int, *, batch_size: int, shuffle: bool, seed: int, tail: Tail) -> None:
        self.epoch = 0
        self.order = SampleOrder(count, seed, shuffle, drop_last=tail == "drop")
        self.batch_size: int = batch_size
        self._arrays = arrays
        self._tail: Tail = tail
        self._iterations = 0
        self._progress: Callable[[], Progress] | None = None
        self._share: Callable[[], BatchShare] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be this epoch: after a restart, say. Elastic training knows its epoch itself."""
        self.epoch = epoch

    @override
    def follow(self, progress: Callable[[], Progress]) -> None:
        self._progress = progress
        self._iterations = 1  # this one is the first

    @override
    def take_share(self) -> BatchShare | None:
        made, self._share = self._share, None
        return None if made is None else made()

    def __iter__(self) -> Iterator[Any]:
        self._iterations += 1
        return timed(self._iterate(self._iterations - 1))

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        if self._progress is not None:
            return self.order.num_batches(self._progress().global_batch)
        return -(-len(self._own_rows()) // self.batch_size)

    def _iterate(self, index: int) -> Iterator[Any]:
        if self._progress is None:
            yield from self._first(index)
            index = 0
        if self._progress is not None:
            yield from self._following(self._progress, index)

    def _first(self, index: int) -> Iterator[Any]:
        """Yield the batches of this rank, until an elastic step trains on them."""
        place = context.current().topology  # for which the batches are made; later it may be another one
        rows = self._own_rows()
        self.epoch += 1
        for start in range(0, len(rows), self.batch_size):
            self._give(functools.partial(self._first_share, place, is_first=index == start == 0))
            yield self._batch(rows[start : start + self.batch_size])
            if self._progress is not None:
                return

    def _first_share(self, place: Topology, *, is_first: bool) -> BatchShare:
        """Return the elastic batch that equals this one: the very first batch is the same in both ways."""
        whole = self.batch_size * place.world_size
        shares = self.order.shares(Position(), rank=place.rank, size=place.world_size, global_batch=whole)
        found = next(shares, None) if is_first else None
        if found is not None and found.total == whole:
            return found
        nowhere = Position(-1)
        return BatchShare(nowhere, nowhere, place.rank, place.world_size, 0, ())

    def _following(self, progress: Callable[[], Progress], epoch: int) -> Iterator[Any]:
        """Yield the rest of an epoch, redistributed whenever progress is not where the last batch led to."""
        shares: Iterator[BatchShare] = iter(())
        expected: tuple[Position, int, int] | None = None
        self._check_given()
        while (now := progress()).position.epoch == epoch:
            topology = context.current().topology
            place = (now.position, topology.rank, topology.world_size)
            if place != expected:
                shares = self.order.shares(now.position, rank=place[1], size=place[2], global_batch=now.global_batch)
            found = next(shares)
            self._give(functools.partial(_itself, found))
            yield self._batch(found.indices or (0,))  # where this rank has none, one that does not count
            self._check_given()
            expected = (found.following, found.rank, found.size)
        if progress().position.epoch < epoch:
            raise UsageError(
                f"epoch {progress().position.epoch} was left before its end: in an elastic job the ranks go through "
                "all batches of an epoch. Use elastic=False and ud.elastic.run for another kind of loop"
            )

    def _own_rows(self) -> list[int]:
        rank, size = context.current().data_place()
        order = self.order
        return share(
            order.count,
            rank=rank,
            size=size,
            seed=order.seed,
            epoch=self.epoch,
            shuffle=order.shuffle,
            tail=self._tail,
        )

    def _batch(self, rows: Sequence[int]) -> Any:
        return jax.tree.map(operator.itemgetter(np.asarray(rows, np.int64)), self._arrays)

    def _give(self, made: Callable[[], BatchShare]) -> None:
        self._share = made
        context.current().elastic_data = self

    def _check_given(self) -> None:
        if self._share is not None:
            raise UsageError(
                "a batch of the data that TrainStep trains on was not given to it: in an elastic job each batch has to "
                "be. For evaluation use another ud.shard"
            )


def _itself(found: BatchShare) -> BatchShare:
    return found
