"""Which rank owns which element of which parameter. Pure arithmetic, the same on every rank.

A bucket of gradients (`unidist.gradients.buckets`) is cut into one *shard* for each rank, side by side in rank order,
so that a reduce-scatter of the bucket leaves each rank its shard, and an all-gather of the shards is the bucket. There
are two ways to cut. *Element-wise*: shards of equal size that may cut through parameters; the bucket is padded at its
end. *Whole*: every parameter belongs to one rank as a whole, for optimizers that look at a parameter's tensor (Muon,
Adafactor); the bucket is ordered by owner, and the shards differ in size.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from unidist.buffer import DType
from unidist.errors import UsageError
from unidist.gradients.buckets import ALIGNMENT_BYTES, BucketLayout, Slot


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive elements of a parameter that one rank owns.

    Args:
        parameter: its number.
        start: of the first element within the parameter, counted in memory order.
        count: number of elements; 0 only for an empty parameter.
        bucket: number of the bucket.
        offset: of the first element within the bucket.
        owner: the rank, counted within its shard group.
    """

    parameter: int
    start: int
    count: int
    bucket: int
    offset: int
    owner: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Pieces of one owner in one bucket that an element-wise optimizer may update as one flat tensor.

    Gaps between them are padding, which is zeros and stays zeros.

    Args:
        bucket: number of the bucket.
        offset: of the first element within the bucket.
        count: number of elements, padding between pieces included.
        pieces: in the order of their offsets.
    """

    bucket: int
    offset: int
    count: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class ShardedBucket:
    """One bucket and where it is cut.

    Args:
        dtype: of its elements.
        memory: kind of memory.
        slots: the place of each parameter; every element of the bucket in no slot is padding.
        counts: elements of each rank's shard; together the whole bucket.
    """

    dtype: DType
    memory: str
    slots: tuple[Slot, ...]
    counts: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of elements, padding included."""
        return sum(self.counts)

    def begin(self, owner: int) -> int:
        """Return the offset of a rank's shard."""
        return sum(self.counts[:owner])

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """Offset and count of each range that is padding."""
        found, end = [], 0
        for slot in sorted(self.slots, key=lambda slot: slot.offset):
            if slot.offset > end:
                found.append((end, slot.offset - end))
            end = max(end, slot.offset + slot.count)
        if end < self.count:
            found.append((end, self.count - end))
        return found


@dataclass(frozen=True)
class Partition:
    """All buckets of one exchange, cut for `num_shards` ranks.

    Args:
        num_shards: ranks of a shard group.
        whole: every parameter belongs to one rank as a whole.
        buckets: in the order in which they are exchanged.
    """

    num_shards: int
    whole: bool
    buckets: tuple[ShardedBucket, ...]

    def pieces(self, owner: int) -> list[Piece]:
        """Return the pieces that a rank owns, by bucket and offset."""
        found = []
        for number, bucket in enumerate(self.buckets):
            begin = bucket.begin(owner)
            end = begin + bucket.counts[owner]
            for slot in sorted(bucket.slots, key=lambda slot: slot.offset):
                first, last = max(begin, slot.offset), min(end, slot.offset + slot.count)
                if first < last:
                    found.append(Piece(slot.parameter, first - slot.offset, last - first, number, first, owner))
                elif not slot.count and _owner_of_empty(bucket, slot) == owner:
                    found.append(Piece(slot.parameter, 0, 0, number, slot.offset, owner))
        return found

    def numbered(self, numbers: Sequence[int]) -> Partition:
        """Return the same with other numbers for the parameters: number i becomes `numbers[i]`."""
        buckets = tuple(
            replace(bucket, slots=tuple(replace(slot, parameter=numbers[slot.parameter]) for slot in bucket.slots))
            for bucket in self.buckets
        )
        return replace(self, buckets=buckets)

    def all_pieces(self) -> list[Piece]:
        """Return the pieces of every rank: each element of each parameter is in exactly one of them."""
        return [piece for owner in range(self.num_shards) for piece in self.pieces(owner)]

    def places(self) -> dict[int, tuple[int, Slot]]:
        """Return the bucket and the slot of each parameter, by its number."""
        return {slot.parameter: (number, slot) for number, bucket in enumerate(self.buckets) for slot in bucket.slots}


def partition(layouts: Sequence[BucketLayout], num_shards: int, *, whole: bool = False) -> Partition:
    """Cut buckets into one shard for each of `num_shards` ranks.

    Args:
        layouts: as `plan_buckets` made them.
        num_shards: at least 1.
        whole: give every parameter to one rank as a whole; owners are chosen so that the shards are about equally
            large.

    Returns:
        Buckets of the same parameters, in the same order. Shards begin at multiples of `ALIGNMENT_BYTES`.
    """
    if num_shards < 1:
        raise UsageError(f"nothing can be sharded over {num_shards} ranks; give at least 1")
    if not whole:
        return Partition(num_shards, False, tuple(_cut_evenly(layout, num_shards) for layout in layouts))
    loads = [0] * num_shards
    return Partition(num_shards, True, tuple(_cut_between(layout, loads) for layout in layouts))


def join_segments(pieces: Sequence[Piece], keys: Sequence[Hashable]) -> list[Segment]:
    """Join neighbouring pieces of one owner that may be updated together.

    Args:
        pieces: as `Partition.pieces` returns them.
        keys: for each piece; neighbours in a bucket with equal keys are joined.
    """
    segments: list[Segment] = []
    last: Hashable = None
    for piece, key in zip(pieces, keys, strict=True):
        if segments and segments[-1].bucket == piece.bucket and key == last:
            before = segments.pop()
            count = piece.offset + piece.count - before.offset
            segments.append(Segment(before.bucket, before.offset, count, (*before.pieces, piece)))
        else:
            segments.append(Segment(piece.bucket, piece.offset, piece.count, (piece,)))
        last = key
    return segments


def _owner_of_empty(bucket: ShardedBucket, slot: Slot) -> int:
    """Return the owner of an empty parameter: without one its state would be lost."""
    last = 0
    for owner, end in enumerate(accumulate(bucket.counts)):
        if bucket.counts[owner]:
            last = owner
        if slot.offset < end:
            return owner
    return last


def _alignment(dtype: DType) -> int:
    return max(1, ALIGNMENT_BYTES // dtype.itemsize)


def _rounded(count: int, step: int) -> int:
    return -(-count // step) * step


def _cut_evenly(layout: BucketLayout, num_shards: int) -> ShardedBucket:
    shard = _rounded(-(-layout.count // num_shards), _alignment(layout.dtype))
    return ShardedBucket(layout.dtype, layout.memory, layout.slots, (shard,) * num_shards)


def _cut_between(layout: BucketLayout, loads: list[int]) -> ShardedBucket:
    """Give each parameter, the largest first, to the least loaded rank; `loads` are in bytes, over all buckets."""
    step = _alignment(layout.dtype)
    owned: list[list[Slot]] = [[] for _ in loads]
    for slot in sorted(layout.slots, key=lambda slot: -slot.count):  # stable, so the same on every rank
        owner = loads.index(min(loads))
        owned[owner].append(slot)
        loads[owner] += _rounded(slot.count, step) * layout.dtype.itemsize
    slots, counts, offset = [], [], 0
    for mine in owned:
        begin = offset
        for slot in mine:
            slots.append(Slot(slot.parameter, offset, slot.count))
            offset += _rounded(slot.count, step)
        counts.append(offset - begin)
    return ShardedBucket(layout.dtype, layout.memory, tuple(slots), tuple(counts))
