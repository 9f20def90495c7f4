"""Assigns each sample of an epoch to exactly one rank, even as ranks join and leave. Pure.

An epoch is a sequence of *global batches*. All ranks together process one in each step. The position in that sequence
does not depend on the number of ranks, so any number of ranks can divide the rest of the epoch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from unidist.errors import UsageError


@dataclass(frozen=True, order=True)
class Position:
    """A position in the training data, between two steps.

    Args:
        epoch: the current one.
        processed: samples of it that all ranks together have processed; always fewer than the epoch has.
    """

    epoch: int = 0
    processed: int = 0


@dataclass(frozen=True)
class BatchShare:
    """One rank's share of one global batch.

    Args:
        position: before the global batch.
        following: after it.
        rank: the rank whose share this is.
        size: number of ranks.
        total: samples of the global batch.
        indices: of this rank's samples; may be empty in an epoch's last batch.
    """

    position: Position
    following: Position
    rank: int
    size: int
    total: int
    indices: tuple[int, ...]

    def pieces(self, limit: int) -> list[tuple[int, int]]:
        """Return the bounds of micro-batches of at most `limit` samples. Every rank has as many; some may be empty.

        >>> start = Position()
        >>> BatchShare(start, start, rank=0, size=2, total=10, indices=(7, 1, 4, 9, 0)).pieces(2)
        [(0, 2), (2, 4), (4, 5)]
        """
        largest = -(-self.total // self.size)
        count = -(-largest // limit)
        small, num_larger = divmod(len(self.indices), count)
        ends = [small * (i + 1) + min(i + 1, num_larger) for i in range(count)]
        return list(zip([0, *ends], ends, strict=False))

    def weight(self, num_samples: int) -> float:
        """Return the weight of the mean loss of `num_samples` of the samples, if gradients are averaged over ranks."""
        return num_samples * self.size / self.total

    def micro_batches(self, limit: int, values: Sequence[Sequence[Any]]) -> list[tuple[Callable[[Any], Any], float]]:
        """Return a function for each micro-batch that cuts it out of an array, and the weight of its mean loss.

        Of an array without the samples along its first dim it returns all; where a micro-batch is empty, its weight is
        0, it cuts out a sample that does not count.

        Args:
            limit: samples of a micro-batch, at most.
            values: the leaves of each value that is to be cut: inputs and targets, say.

        Raises:
            UsageError: there are several, and a value has no array with this rank's samples along its first dim.
        """
        pieces, count = self.pieces(limit), max(len(self.indices), 1)
        for arrays in values if len(pieces) > 1 else ():
            if not any(_has_rows(array, count) for array in arrays):
                raise UsageError(
                    f"this rank has {count} samples of this step and takes them in {len(pieces)} micro-batches of at "
                    f"most {limit}, but no array has {count} samples along its first dim: "
                    f"{[list(each.shape) for each in arrays if hasattr(each, 'shape')]}. Give the samples along the "
                    "first dim, or use ud.elastic.Policy(global_batch='rescale')"
                )

        def cut(array: Any, piece: slice) -> Any:
            return array[piece] if _has_rows(array, count) else array

        return [
            (partial(cut, piece=slice(start, stop) if stop > start else slice(0, 1)), self.weight(stop - start))
            for start, stop in pieces
        ]


def _has_rows(array: Any, count: int) -> bool:
    return tuple(getattr(array, "shape", ())[:1]) == (count,)


@dataclass(frozen=True)
class SampleOrder:
    """The number of samples and the order in which they are used; equal on every rank.

    Args:
        count: samples of the dataset.
        seed: of the order.
        shuffle: use a different order in each epoch, else that of the dataset.
        drop_last: leave out an epoch's last global batch if it is smaller than the others.
    """

    count: int
    seed: int
    shuffle: bool
    drop_last: bool

    def length(self, global_batch: int) -> int:
        """Return the number of samples that an epoch uses."""
        return self.count - self.count % global_batch if self.drop_last else self.count

    def num_batches(self, global_batch: int) -> int:
        """Return the number of global batches of an epoch."""
        return -(-self.length(global_batch) // global_batch)

    def shares(self, position: Position, *, rank: int, size: int, global_batch: int) -> Iterator[BatchShare]:
        """Yield a rank's shares of the rest of an epoch.

        Args:
            position: where to begin.
            rank: the rank whose shares to yield.
            size: number of ranks.
            global_batch: samples that all ranks together process in a step.
        """
        epoch, length = position.epoch, self.length(global_batch)
        order = shuffled(self.count, seed=self.seed, epoch=epoch) if self.shuffle else range(self.count)
        for start in range(position.processed, length, global_batch):
            stop = min(start + global_batch, length)
            yield BatchShare(
                position=Position(epoch, start),
                following=Position(epoch, stop) if stop < length else Position(epoch + 1),
                rank=rank,
                size=size,
                total=stop - start,
                indices=tuple(order[start + rank : stop : size]),
            )


def shuffled(count: int, *, seed: int, epoch: int) -> list[int]:
    """Return the numbers below `count` in an order that depends on seed and epoch alone."""
    indices = list(range(count))
    random.Random(seed + epoch).shuffle(indices)
    return indices
