"""Assignment of samples to ranks that join and leave."""

from __future__ import annotations

import itertools
import random

import pytest

from unidist.elastic.batches import BatchShare, Position, SampleOrder
from unidist.errors import UsageError
from unidist.training.sharding import share


def everyone(order: SampleOrder, position: Position, size: int, global_batch: int) -> list[list[BatchShare]]:
    """Return the shares of all ranks, by step."""
    shares = [order.shares(position, rank=rank, size=size, global_batch=global_batch) for rank in range(size)]
    return [list(step) for step in zip(*shares, strict=True)]


@pytest.mark.parametrize("seed", range(20))
def test_each_sample_comes_once_in_an_epoch_whoever_comes_and_goes(seed: int) -> None:
    chance = random.Random(seed)
    order = SampleOrder(chance.randrange(1, 200), seed, shuffle=chance.random() < 0.8, drop_last=False)
    batch, position, seen = chance.randrange(1, 9), Position(), []
    global_batch = batch * chance.randrange(1, 6)
    while position.epoch < 2:
        size = chance.randrange(1, 7)
        steps = everyone(order, position, size, global_batch)
        for step in steps[: chance.randrange(1, 8)]:
            assert all(share.position == position for share in step)
            assert sum(len(share.indices) for share in step) == step[0].total <= global_batch
            seen += [(position.epoch, index) for share in step for index in share.indices]
            position = step[0].following
    assert sorted(seen) == list(itertools.product(range(2), range(order.count)))


@pytest.mark.parametrize(("shuffle", "drop_last"), [(True, False), (False, True)])
def test_a_global_batch_has_the_same_samples_for_any_number_of_ranks(shuffle: bool, drop_last: bool) -> None:
    order = SampleOrder(59, 3, shuffle=shuffle, drop_last=drop_last)
    alone = [set(step[0].indices) for step in everyone(order, Position(1), 1, 12)]
    assert len(alone) == order.num_batches(12) == (4 if drop_last else 5)
    for size in (2, 5):
        steps = everyone(order, Position(1), size, 12)
        assert [set(itertools.chain(*(share.indices for share in step))) for step in steps] == alone
    assert (order.length(12), steps[-1][0].following) == (48 if drop_last else 59, Position(2))


@pytest.mark.parametrize(("total", "size", "limit"), [(12, 3, 4), (12, 2, 4), (12, 5, 4), (1, 3, 2), (33, 2, 16)])
def test_micro_batches_are_small_enough_as_many_on_every_rank_and_count_by_their_samples(
    total: int, size: int, limit: int
) -> None:
    order = SampleOrder(total, 0, shuffle=False, drop_last=False)
    (step,) = everyone(order, Position(), size, total)
    pieces = [share.pieces(limit) for share in step]
    assert len({len(each) for each in pieces}) == 1
    for own, each in zip(step, pieces, strict=True):
        assert [index for start, stop in each for index in own.indices[start:stop]] == list(own.indices)
        assert all(stop - start <= limit for start, stop in each)
    # The mean over the ranks of the weighted means is the mean over all samples.
    weights = [share.weight(stop - start) for share, each in zip(step, pieces, strict=True) for start, stop in each]
    assert sum(weights) / size == pytest.approx(1.0)


def test_the_order_is_that_of_the_plain_shards() -> None:
    order = SampleOrder(24, 7, shuffle=True, drop_last=False)
    for rank in range(3):
        plain = share(24, rank=rank, size=3, seed=7, epoch=2, shuffle=True, tail="pad")
        shares = order.shares(Position(2), rank=rank, size=3, global_batch=12)
        assert [index for share in shares for index in share.indices] == plain


class Rows:
    """An array of samples."""

    def __init__(self, *samples: int) -> None:
        self.samples, self.shape = samples, (len(samples), 2)

    def __getitem__(self, part: slice) -> tuple[int, ...]:
        return self.samples[part]


def test_micro_batches_are_cut_out_of_what_has_samples() -> None:
    start = Position()
    share_of_rank = BatchShare(start, start, rank=0, size=2, total=9, indices=(7, 1, 4))
    rows, other = Rows(7, 1, 4), Rows(1, 2)
    parts = share_of_rank.micro_batches(1, [[other, rows]])
    assert [cut(rows) for cut, _ in parts] == [(7,), (1,), (4,), (7,), (7,)]
    assert [weight for _, weight in parts] == [2 / 9] * 3 + [0.0] * 2  # every rank has as many
    assert all(cut(each) is each for cut, _ in parts for each in (other, 5, None))
    assert len(share_of_rank.micro_batches(5, [[other]])) == 1  # which is not cut


def test_a_value_without_samples_is_not_cut_into_micro_batches() -> None:
    start = Position()
    share_of_rank = BatchShare(start, start, rank=0, size=1, total=3, indices=(7, 1, 4))
    with pytest.raises(UsageError, match=r"has 3 samples .* in 2 micro-batches of at most 2, .*: \[\[2, 2\]\]"):
        share_of_rank.micro_batches(2, [[Rows(7, 1, 4)], [Rows(1, 2)]])
