"""`shard` for arrays, sequences and iterables."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _programs import on_one_rank, runtime
from part_pools import PartOfPool

import unidist.jax as ud
from unidist.errors import UsageError

pytestmark = pytest.mark.parallel


@pytest.mark.parametrize("count", [6, 7, 1])
def test_each_sample_on_one_rank_in_every_epoch(two: PartOfPool, count: int) -> None:
    def on_rank() -> dict[str, list[list[int]]]:
        with runtime():
            np.random.seed(ud.rank())  # of the script; the order is not its business
            found = {}
            for tail in ("pad", "drop", "join"):
                batches = ud.shard(np.arange(count), batch_size=2, tail=tail)
                found[tail] = [[int(row) for batch in batches for row in batch] for _ in range(3)]
            plain = ud.shard(jnp.arange(count), batch_size=4, shuffle=False, tail="join")
            found["plain"] = [[int(row) for batch in plain for row in batch]]
            return found

    everyone = two.run(on_rank)
    samples = list(range(count))
    for epoch in range(3):
        assert sorted(row for each in everyone for row in each["join"][epoch]) == samples
        padded = [each["pad"][epoch] for each in everyone]
        assert len({len(each) for each in padded}) == 1
        assert sorted({row for each in padded for row in each}) == samples
        dropped = [each["drop"][epoch] for each in everyone]
        assert len({len(each) for each in dropped}) == 1
        assert len({row for each in dropped for row in each}) == count - count % 2
    assert [each["plain"][0] for each in everyone] == [samples[0::2], samples[1::2]]
    if count > 5:
        epochs = [tuple(everyone[0]["join"][epoch] + everyone[1]["join"][epoch]) for epoch in range(3)]
        assert len(set(epochs)) == 3


def test_trees_keep_their_rows_together(two: PartOfPool) -> None:
    def on_rank() -> list[Any]:
        with runtime():
            data = {"x": np.arange(20).reshape(10, 2), "y": jnp.arange(10)}
            batches = ud.shard(data, batch_size=2)
            assert len(batches) == 3
            found = [jax.tree.map(np.asarray, batch) for batch in batches]
            assert [len(batch["y"]) for batch in found] == [2, 2, 1]
            for batch in found:
                np.testing.assert_array_equal(batch["x"][:, 0], 2 * batch["y"])
            batches.set_epoch(0)  # the order of the first epoch once more
            again = [batch["y"].tolist() for batch in batches]
            assert again == [batch["y"].tolist() for batch in found]
            other = ud.shard(data, batch_size=2, seed=1)
            assert [batch["y"].tolist() for batch in other] != again
            return [row for batch in again for row in batch]

    first, second = two.run(on_rank)
    assert sorted(first + second) == list(range(10))


def test_sequences_and_iterables(two: PartOfPool) -> None:
    def on_rank() -> list[Any]:
        with runtime():
            source = ud.shard([f"sample {index}" for index in range(5)])
            shuffled = ud.shard(range(6), shuffle=True, seed=3)
            assert len(source) == 3
            assert source[-1] == source[2]
            assert source[1:] == [source[1], source[2]]
            stream = ud.shard(iter(range(5)))
            joined = ud.shard((number for number in range(5)), tail="join")
            return [list(source), sorted(shuffled), list(stream), list(joined)]

    first, second = two.run(on_rank)
    assert first[0] == ["sample 0", "sample 2", "sample 4"]
    assert second[0] == ["sample 1", "sample 3", "sample 0"]
    assert sorted(first[1] + second[1]) == list(range(6))
    assert (first[2], second[2]) == ([0, 2], [1, 3])
    assert (first[3], second[3]) == ([0, 2, 4], [1, 3])


def test_batches_of_a_budget_of_tokens(two: PartOfPool) -> None:
    lengths = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]

    def on_rank() -> list[Any]:
        with runtime():
            budget: dict[str, Any] = {"cost": lengths, "max_tokens": 10, "seed": 2}
            rows = {"x": np.arange(20).reshape(10, 2), "y": jnp.arange(10)}
            found = list(ud.shard(rows, collate=lambda batch: batch["x"][:, 0] // 2 + 0 * batch["y"], **budget))
            listed = ud.shard([[index] * length for index, length in enumerate(lengths)], **budget)
            samples = [[sample[0] for sample in batch] for batch in listed]
            assert [batch.tolist() for batch in found] == samples
            assert len(listed) == len(samples)
            at_most_two = ud.shard(list(range(10)), batch_size=2, tail="join", shuffle=False, **budget)
            assert {len(batch) for batch in at_most_two} <= {1, 2}
            return samples

    first, second = two.run(on_rank)
    assert len(first) == len(second) > 1
    assert sorted({sample for batch in (*first, *second) for sample in batch}) == list(range(10))
    assert all(len(batch) * max(lengths[sample] for sample in batch) <= 10 for batch in (*first, *second))


@on_one_rank
def test_says_what_it_cannot_divide() -> None:
    with runtime():
        with pytest.raises(UsageError, match="give batch_size="):
            ud.shard((np.ones(3), np.ones(3)))
        with pytest.raises(UsageError, match=r"which have \[2, 3\] rows"):
            ud.shard((np.ones(3), np.ones(2)), batch_size=1)
        with pytest.raises(UsageError, match=r"which have \[0\] rows"):
            ud.shard(np.ones((0, 2)), batch_size=1)
        with pytest.raises(UsageError, match="batch_size=0: give at least 1"):
            ud.shard(np.ones(3), batch_size=0)
        with pytest.raises(UsageError, match="an iterable cannot be shuffled"):
            ud.shard(iter([1]), shuffle=True)
        with pytest.raises(UsageError, match=r"shard\(\) of a int \(rank 0\): give arrays"):
            ud.shard(5)
        with pytest.raises(UsageError, match=r"of a generator \(rank 0\): it divides the rows of arrays"):
            ud.shard((number for number in range(5)), batch_size=2)
        with pytest.raises(UsageError, match=r"of a list \(rank 0\): it divides the rows of arrays"):
            ud.shard([], batch_size=2)
        with pytest.raises(UsageError, match=r"shard\(cost=\) is about batches of max_tokens="):
            ud.shard([1, 2], cost=[1, 2])
        with pytest.raises(UsageError, match=r"shard\(collate=\) is about batches of max_tokens="):
            ud.shard([1, 2], collate=list)
        with pytest.raises(UsageError, match=r"max_tokens=\) of a generator \(rank 0\): it picks samples"):
            ud.shard((number for number in range(5)), cost=[1] * 5, max_tokens=3)
        with pytest.raises(UsageError, match="give the lengths of the samples too"):
            ud.shard([1, 2], max_tokens=3)
        with pytest.raises(UsageError, match="choices: pad, drop, join"):
            ud.shard([1, 2], tail="cut")  # type: ignore[arg-type]
