"""How the batches of a stream are dealt out to ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from unidist.errors import UsageError
from unidist_data_service import DataShard
from unidist_data_service.worker import Dealer, FunctionSource


def all_of(dealer: Dealer, readers: list[int]) -> dict[int, list[int]]:
    taken: dict[int, list[int]] = {reader: [] for reader in readers}
    number = 0
    while True:
        found = {reader: dealer.take(reader, number) for reader in readers}
        if all(each is None for each in found.values()):
            return taken
        for reader, each in found.items():
            assert each is not None, "all ranks get equally many"
            taken[reader] += each
        number += 1


def dealer(count: int, *, size: int, readers: dict[int, int], tail: str = "pad", ahead: int = 8) -> Dealer:
    return Dealer(iter(range(count)), size=size, readers=readers, tail=tail, ahead=ahead)  # type: ignore[arg-type]


def test_each_batch_goes_to_one_rank() -> None:
    assert all_of(dealer(6, size=2, readers={0: 0, 1: 1}), [0, 1]) == {0: [0, 2, 4], 1: [1, 3, 5]}


@pytest.mark.parametrize(("tail", "last"), [("pad", [[6], [0], [1]]), ("drop", [[], [], []])])
def test_batches_that_make_no_round_are_padded_or_left_out(tail: str, last: list[list[int]]) -> None:
    found = all_of(dealer(7, size=3, readers={0: 0, 1: 1, 2: 2}, tail=tail), [0, 1, 2])
    assert [found[rank][:2] for rank in range(3)] == [[0, 3], [1, 4], [2, 5]]
    assert [found[rank][2:] for rank in range(3)] == last


def test_a_stream_that_is_shorter_than_a_round_is_padded() -> None:
    assert all_of(dealer(1, size=3, readers={0: 0, 1: 1, 2: 2}), [0, 1, 2]) == {0: [0], 1: [0], 2: [0]}
    assert all_of(dealer(0, size=3, readers={0: 0, 1: 1, 2: 2}), [0, 1, 2]) == {0: [], 1: [], 2: []}


def test_ranks_of_one_model_get_the_same_batches() -> None:
    readers = {0: 0, 1: 0, 2: 1, 3: 1}
    assert all_of(dealer(4, size=2, readers=readers), [0, 1, 2, 3]) == {0: [0, 2], 1: [0, 2], 2: [1, 3], 3: [1, 3]}


def test_a_fast_rank_waits_for_a_slow_one() -> None:
    dealt = dealer(100, size=2, readers={0: 0, 1: 1}, ahead=3)
    number = 0
    while dealt.may_take(number):
        dealt.take(0, number)
        number += 1
    assert number == 3
    assert dealt.waits_for() == [1]
    dealt.take(1, 0)
    assert dealt.may_take(number)


def test_a_rank_that_leaves_early_holds_nobody_up() -> None:
    dealt = dealer(100, size=2, readers={0: 0, 1: 1}, ahead=2)
    dealt.take(1, 0)
    dealt.leave(1)
    for number in range(50):
        assert dealt.may_take(number)
        assert dealt.take(0, number) == (2 * number,)
    dealt.leave(0)
    assert dealt.is_done


def test_an_error_reaches_every_rank() -> None:
    def broken() -> Iterator[int]:
        yield 0
        raise KeyError("five")

    dealt = Dealer(broken(), size=2, readers={0: 0, 1: 1}, tail="pad", ahead=8)
    for rank in (0, 1, 1):
        with pytest.raises(KeyError, match="five"):
            dealt.take(rank, 0)


def test_a_generator_is_made_again_and_a_dataset_kept() -> None:
    calls = []

    def generator(shard: DataShard) -> Iterator[int]:
        calls.append(shard)
        yield shard.index

    source, part = FunctionSource(generator), DataShard(1, 2)
    assert [list(source.epoch(part)) for _ in range(3)] == [[1]] * 3
    assert len(calls) == 3
    made: list[DataShard] = []
    source = FunctionSource(lambda shard: made.append(shard) or [shard.index])  # type: ignore[func-returns-value]
    assert [list(source.epoch(part)) for _ in range(3)] == [[1]] * 3
    assert len(made) == 1
    with pytest.raises(UsageError, match="has returned a int"):
        FunctionSource(lambda shard: 3).epoch(part)  # type: ignore[arg-type, return-value]
