"""Division of an epoch's items over ranks, from any position."""

from __future__ import annotations

import itertools
import random

import pytest

from unidist.training.division import balanced, fingerprint, global_batches, length_of_rank, part_of_rank
from unidist.training.sharding import Tail, share

TAILS: list[Tail] = ["pad", "drop", "join"]


def parts(count: int, rank: int, size: int, tail: Tail, *, batch_size: int = 2, start: int = 0) -> list[list[int]]:
    """Return a rank's items of each step."""
    batches = global_batches(range(count), batch_size=batch_size, size=size, tail=tail, start=start)
    return [part_of_rank(batch, rank, size) for batch in batches]


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(("count", "size"), [(12, 3), (13, 3), (2, 3), (0, 3), (5, 1)])
def test_a_rank_has_the_same_items_as_without_batches(count: int, size: int, tail: Tail) -> None:
    for rank in range(size):
        wanted = share(count, rank=rank, size=size, seed=0, epoch=0, shuffle=False, tail=tail)
        assert list(itertools.chain(*parts(count, rank, size, tail))) == wanted
        assert length_of_rank(count, rank, size, tail) == len(wanted)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("count", range(1, 14))
def test_the_rest_of_an_epoch_is_the_same_from_any_step(count: int, tail: Tail) -> None:
    for rank in range(3):
        whole = parts(count, rank, 3, tail)
        for steps in range(len(whole) + 1):
            assert parts(count, rank, 3, tail, start=steps * 6) == whole[steps:]


@pytest.mark.parametrize("seed", range(20))
def test_each_item_comes_once_if_the_number_of_ranks_and_the_batch_change(seed: int) -> None:
    chance = random.Random(seed)
    count, start, seen = chance.randrange(1, 60), 0, []
    while start < count:
        size, batch_size = chance.randrange(1, 5), chance.randrange(1, 4)
        steps = chance.randrange(1, 4)
        for rank in range(size):
            own = parts(count, rank, size, "join", batch_size=batch_size, start=start)
            seen += itertools.chain(*own[:steps])
        start += steps * size * batch_size
    assert sorted(seen) == list(range(count))


def test_the_padded_items_are_the_first_ones_of_the_epoch_also_in_its_middle() -> None:
    assert parts(7, 1, 2, "pad", start=4) == [[5, 0]]
    assert parts(1, 2, 3, "pad") == [[0]]


def test_a_sequence_without_end_is_read_step_by_step() -> None:
    batches = global_batches(itertools.count(), batch_size=2, size=2, tail="pad", start=100)
    assert [next(batches), next(batches)] == [[100, 101, 102, 103], [104, 105, 106, 107]]


@pytest.mark.parametrize("seed", range(10))
def test_balanced_parts_have_as_many_items_and_closer_costs(seed: int) -> None:
    chance = random.Random(seed)
    size = chance.randrange(2, 6)
    costs = [chance.lognormvariate(5, 1) for _ in range(chance.randrange(2 * size, 64))]
    places = balanced(costs, size)
    assert sorted(itertools.chain(*places)) == list(range(len(costs)))
    assert [len(each) for each in places] == [len(costs[rank::size]) for rank in range(size)]
    assert all(each == sorted(each) for each in places)
    sums = [sum(costs[place] for place in each) for each in places]
    plain = [sum(costs[rank::size]) for rank in range(size)]
    assert max(sums) <= max(plain)


def test_balanced_parts_of_a_step() -> None:
    tokens = [900, 800, 10, 20, 700, 600, 30, 40]
    assert [sum(part_of_rank(tokens, rank, 2, cost=float)) for rank in range(2)] == [1550, 1550]
    assert [sum(part_of_rank(tokens, rank, 2)) for rank in range(2)] == [1640, 1460]
    assert balanced([], 2) == balanced([3.0], 2)[1:] * 2 == [[], []]


def test_a_fingerprint_tells_sequences_apart() -> None:
    assert fingerprint([1, 23]) != fingerprint([12, 3]) != fingerprint([3, 12])
    assert fingerprint([[1, 2], [3]]) != fingerprint([[1], [2, 3]])
    assert fingerprint([object()]) == fingerprint([object()])  # which have other addresses in each process
