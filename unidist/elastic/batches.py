"""How samples are dealt out to ranks that come and go: each of an epoch once, whoever is there. Pure.

An epoch is a row of *global batches*, each of which all ranks take together, in one step. How far training has come is
a position in that row, which does not depend on the number of ranks: so those that are there deal out what is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from unidist.training.sharding import shuffled


@dataclass(frozen=True, order=True)
class Position:
    """How far training has come.

    Args:
        epoch: the present one.
        processed: samples of it that have been processed, by all ranks together; always fewer than it has.
    """

    epoch: int = 0
    processed: int = 0


@dataclass(frozen=True)
class Deal:
    """One rank's share of one global batch.

    Args:
        position: before it.
        following: after it.
        rank: whose share.
        size: number of ranks.
        total: samples of the global batch.
        indices: of this rank's samples; maybe none, in an epoch's last batch.
    """

    position: Position
    following: Position
    rank: int
    size: int
    total: int
    indices: tuple[int, ...]

    def pieces(self, limit: int) -> list[tuple[int, int]]:
        """Return the bounds of micro-batches of at most `limit` samples: equally many on every rank, maybe empty ones.

        >>> start = Position()
        >>> Deal(start, start, rank=0, size=2, total=10, indices=(7, 1, 4, 9, 0)).pieces(2)
        [(0, 2), (2, 4), (4, 5)]
        """
        largest = -(-self.total // self.size)
        count = -(-largest // limit)
        small, num_larger = divmod(len(self.indices), count)
        ends = [small * (i + 1) + min(i + 1, num_larger) for i in range(count)]
        return list(zip([0, *ends], ends, strict=False))

    def weight(self, num_samples: int) -> float:
        """Return what the mean loss of some of the samples counts, where gradients are averaged over the ranks."""
        return num_samples * self.size / self.total


@dataclass(frozen=True)
class SampleOrder:
    """Which samples there are, and the order that they come in; equal on every rank.

    Args:
        count: samples of the dataset.
        seed: of the order.
        shuffle: in another order in each epoch, else in that of the dataset.
        drop_last: leave out an epoch's last global batch where it is smaller than the others.
    """

    count: int
    seed: int
    shuffle: bool
    drop_last: bool

    def length(self, global_batch: int) -> int:
        """Return the samples that an epoch uses."""
        return self.count - self.count % global_batch if self.drop_last else self.count

    def num_batches(self, global_batch: int) -> int:
        """Return the global batches of an epoch."""
        return -(-self.length(global_batch) // global_batch)

    def deals(self, position: Position, *, rank: int, size: int, global_batch: int) -> Iterator[Deal]:
        """Return a rank's shares of what is left of an epoch.

        Args:
            position: where to begin.
            rank: whose shares.
            size: number of ranks.
            global_batch: samples that all ranks take together in a step.
        """
        epoch, length = position.epoch, self.length(global_batch)
        order = shuffled(self.count, seed=self.seed, epoch=epoch) if self.shuffle else range(self.count)
        for start in range(position.processed, length, global_batch):
            stop = min(start + global_batch, length)
            yield Deal(
                position=Position(epoch, start),
                following=Position(epoch, stop) if stop < length else Position(epoch + 1),
                rank=rank,
                size=size,
                total=stop - start,
                indices=tuple(order[start + rank : stop : size]),
            )
