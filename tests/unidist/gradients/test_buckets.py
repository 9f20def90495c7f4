"""Packing gradients into buckets."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unidist.buffer import DType
from unidist.errors import UsageError
from unidist.gradients.buckets import ALIGNMENT_BYTES, BucketLayout, ParameterInfo, plan_buckets


def info(count: int, dtype: DType = DType.FLOAT32, memory: str = "host") -> ParameterInfo:
    return ParameterInfo("p", (count,), dtype, memory)


def order(buckets: tuple[BucketLayout, ...]) -> list[list[int]]:
    return [[slot.parameter for slot in bucket.slots] for bucket in buckets]


def test_parameters_come_in_reverse() -> None:
    assert order(plan_buckets([info(10)] * 4, bucket_bytes=1 << 20)) == [[3, 2, 1, 0]]


def test_the_first_bucket_is_small_and_the_others_are_full() -> None:
    # 100 bytes fit into a first bucket of 100, two gradients of 100 into the later ones of 300.
    buckets = plan_buckets([info(25)] * 6, bucket_bytes=300, first_bucket_bytes=100)
    assert order(buckets)[0] == [5]
    assert [len(bucket.slots) for bucket in buckets[1:]] == [2, 2, 1]


def test_a_gradient_larger_than_a_bucket_gets_one_of_its_own() -> None:
    assert order(plan_buckets([info(1), info(1000), info(1)], bucket_bytes=64)) == [[2], [1], [0]]


def test_dtypes_and_memories_do_not_mix() -> None:
    parameters = [info(4), info(4, DType.BFLOAT16), info(4, memory="cuda:0"), info(4), info(4, DType.BFLOAT16)]
    buckets = plan_buckets(parameters, bucket_bytes=999)
    kinds = {(bucket.dtype, bucket.memory): slots for bucket, slots in zip(buckets, order(buckets), strict=True)}
    assert kinds == {
        (DType.BFLOAT16, "host"): [4, 1],
        (DType.FLOAT32, "host"): [3, 0],
        (DType.FLOAT32, "cuda:0"): [2],
    }


def grouped(group: int | None, count: int = 8, dtype: DType = DType.FLOAT32) -> ParameterInfo:
    return ParameterInfo("p", (count,), dtype, group=group)


def test_gradients_of_a_group_share_a_bucket_of_whatever_size() -> None:
    parameters = [grouped(1), grouped(None), grouped(0, 1000), grouped(1, 1000), grouped(0), grouped(None)]
    assert order(plan_buckets(parameters, bucket_bytes=64)) == [[5], [4, 2], [1], [3, 0]]


def test_a_bucket_comes_when_its_last_gradient_does() -> None:
    """Which is that of its first parameter; a bucket that waited for it would hold up the later ones."""
    parameters = [grouped(0), grouped(1), grouped(None), grouped(1), grouped(0)]
    assert order(plan_buckets(parameters, bucket_bytes=64)) == [[2], [3, 1], [4, 0]]


def test_a_group_of_several_types_has_a_bucket_of_each() -> None:
    parameters = [grouped(0), grouped(0, dtype=DType.FLOAT64), grouped(0)]
    assert order(plan_buckets(parameters, bucket_bytes=1 << 20)) == [[1], [2, 0]]


def test_no_parameters_need_no_bucket() -> None:
    assert plan_buckets([], bucket_bytes=1) == ()


def test_a_bucket_holds_something() -> None:
    with pytest.raises(UsageError, match="bucket_bytes=0"):
        plan_buckets([info(1)], bucket_bytes=0)


@given(
    st.lists(st.tuples(st.integers(0, 300), st.sampled_from([DType.FLOAT32, DType.FLOAT64, DType.INT8])), max_size=30),
    st.integers(1, 2000),
    st.integers(1, 2000),
)
def test_every_gradient_has_one_aligned_place_and_none_overlap(
    sizes: list[tuple[int, DType]], bucket_bytes: int, first: int
) -> None:
    parameters = [info(count, dtype) for count, dtype in sizes]
    buckets = plan_buckets(parameters, bucket_bytes=bucket_bytes, first_bucket_bytes=first)
    assert sorted(i for part in order(buckets) for i in part) == list(range(len(parameters)))
    for bucket in buckets:
        end = 0
        for slot in bucket.slots:
            assert slot.offset >= end
            assert slot.offset * bucket.dtype.itemsize % ALIGNMENT_BYTES == 0
            assert slot.count == parameters[slot.parameter].count
            end = slot.offset + slot.count
        assert end <= bucket.count
        assert (
            len(bucket.slots) == 1
            or bucket.slots[-1].offset * bucket.dtype.itemsize <= max(bucket_bytes, first) + ALIGNMENT_BYTES
        )


def test_what_several_ranks_hold_has_buckets_of_its_own() -> None:
    once, twice = info(4), replace(info(4), copies=2)
    buckets = plan_buckets([once, twice, once, twice], bucket_bytes=999)
    assert sorted((bucket.copies, slots) for bucket, slots in zip(buckets, order(buckets), strict=True)) == [
        (1, [2, 0]),
        (2, [3, 1]),
    ]
