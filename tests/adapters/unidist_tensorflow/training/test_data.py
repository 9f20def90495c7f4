"""`shard` for tf.data."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
from _keras_training import runtime

import unidist.tensorflow as ud
from unidist.errors import UsageError
from unidist.jobs.pool.pool import RankPool
from unidist_tensorflow.training.data import shard

Pool = Callable[..., RankPool]
pytestmark = pytest.mark.parallel


def test_arrays_are_a_dataset_too(pool: Pool) -> None:
    def on_rank() -> list[int]:
        with runtime():
            x = np.arange(6)
            batches = list(shard({"x": x, "y": -x}, batch_size=2))
            assert all((batch["x"] == -batch["y"]).numpy().all() for batch in batches)
            return [int(sample) for batch in batches for sample in batch["x"]]

    first, second = pool(2, "shm").run(on_rank)
    assert sorted(first + second) == list(range(6))


@pytest.mark.parametrize("count", [6, 7, 1])
def test_each_sample_on_one_rank_in_every_epoch(pool: Pool, count: int) -> None:
    def on_rank() -> dict[str, list[list[int]]]:
        with runtime():
            tf.random.set_seed(ud.rank())  # of the script; the order is not its business
            found = {}
            for tail in ("pad", "drop", "join"):
                dataset = shard(tf.data.Dataset.range(count), tail=tail)
                found[tail] = [[int(sample) for sample in dataset] for _ in range(3)]
            plain = shard(tf.data.Dataset.range(count), shuffle=False, tail="join")
            found["plain"] = [[int(sample) for sample in plain]]
            return found

    everyone = pool(2, "shm").run(on_rank)
    samples = list(range(count))
    for epoch in range(3):
        joined = [sample for each in everyone for sample in each["join"][epoch]]
        assert sorted(joined) == samples
        padded = [each["pad"][epoch] for each in everyone]
        assert len({len(each) for each in padded}) == 1
        assert sorted({sample for each in padded for sample in each}) == samples
        assert sum(map(len, padded)) == count + count % 2
        dropped = [each["drop"][epoch] for each in everyone]
        assert len({len(each) for each in dropped}) == 1
        assert len({sample for each in dropped for sample in each}) == count - count % 2
    assert [each["plain"][0] for each in everyone] == [samples[0::2], samples[1::2]]
    if count > 5:
        epochs = [tuple(everyone[0]["join"][epoch] + everyone[1]["join"][epoch]) for epoch in range(3)]
        assert len(set(epochs)) == 3


def test_batches_of_a_budget_of_tokens(pool: Pool) -> None:
    lengths = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]

    def on_rank() -> list[list[list[int]]]:
        with runtime():
            rows = {"x": tf.constant([[index] * 9 for index in range(10)]), "y": -np.arange(10)}

            def cut(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
                return batch | {"x": batch["x"][:, : max(lengths[index] for index in batch["x"][:, 0])]}

            batches = shard(rows, cost=lengths, max_tokens=10, collate=cut)
            assert batches.element_spec["x"].shape.as_list() == [None, None]
            assert batches.element_spec["y"].shape.as_list() == [None]
            epochs = [list(batches) for _ in range(3)]
            assert {len(epoch) for epoch in epochs} == {int(batches.cardinality())}
            for batch in epochs[0]:
                assert (batch["x"][:, 0] == tf.cast(-batch["y"], tf.int32)).numpy().all()
                assert batch["x"].shape[0] * batch["x"].shape[1] <= 10
            return [[(-batch["y"]).numpy().tolist() for batch in epoch] for epoch in epochs]

    first, second = pool(2, "shm").run(on_rank)
    assert len(first[0]) == len(second[0])
    assert sorted({sample for batch in (*first[0], *second[0]) for sample in batch}) == list(range(10))
    assert first[0] != first[1]


def test_says_what_it_cannot_deal_out(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime():
            unknown = tf.data.Dataset.range(5).filter(lambda number: number > 1)
            with pytest.raises(UsageError, match="length"):
                shard(unknown)
            assert len(list(shard(unknown, tail="join", buffer_size=4))) in (1, 2)
            with pytest.raises(UsageError, match="for ever"):
                shard(tf.data.Dataset.range(5).repeat())
            with pytest.raises(UsageError, match="choices: pad, drop, join"):
                shard(tf.data.Dataset.range(5), tail="cut")
            with pytest.raises(UsageError, match=r"of a generator \(rank \d\): .*from_generator"):
                shard(number for number in range(5))
            for wrong in ([[1, 2], [3]], 5, object(), {"x": np.arange(3), "y": np.arange(4)}):
                with pytest.raises(UsageError, match=rf"of a {type(wrong).__name__} \(rank \d\): .*one row for each"):
                    shard(wrong)
            assert len(list(shard([1, 2, 3, 4]))) == 2
            budget = {"cost": [1] * 5, "max_tokens": 3}
            with pytest.raises(UsageError, match=r"read in one order.*bucket_by_sequence_length"):
                shard(tf.data.Dataset.range(5), **budget)
            with pytest.raises(UsageError, match=r"max_tokens=\) of a generator \(rank \d\): it picks samples"):
                shard((number for number in range(5)), **budget)
            with pytest.raises(UsageError, match=r"buffer_size=4\): give window="):
                shard(np.arange(5), buffer_size=4, **budget)
            with pytest.raises(UsageError, match="give collate="):
                shard([[1], [2, 3], [4], [5], [6]], **budget)
            with pytest.raises(UsageError, match=r"shard\(window=\) is about batches of max_tokens="):
                shard(np.arange(5), window=4)

    pool(2, "shm").run(on_rank)


def test_a_dataset_goes_on_where_it_was(pool: Pool) -> None:
    """By `skip`, in a process that was started again: the order of each epoch is the same there."""

    def on_rank() -> tuple[list[list[int]], list[list[int]]]:
        def batches(epoch: int) -> list[list[int]]:
            dataset = shard(tf.data.Dataset.range(24), batch_size=2, seed=3)
            for _ in range(epoch):
                list(dataset)
            return [batch.numpy().tolist() for batch in dataset.skip(4)]

        with runtime():
            undisturbed = shard(tf.data.Dataset.range(24), batch_size=2, seed=3)
            list(undisturbed)
            wanted = [batch.numpy().tolist() for batch in undisturbed][4:]
        with runtime():
            return batches(1), wanted

    for found, wanted in pool(2, "shm").run(on_rank):
        assert found == wanted
