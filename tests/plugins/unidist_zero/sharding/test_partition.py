"""Cutting buckets into shards: every element has one owner, and what lies side by side is joined."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unidist.buffer import DType
from unidist.errors import UsageError
from unidist.gradients.buckets import ParameterInfo, plan_buckets
from unidist_zero.sharding.partition import Partition, join_segments, partition

QUICK = settings(max_examples=40, deadline=None)
COUNTS = st.lists(st.integers(0, 300), min_size=1, max_size=12)
DTYPES = st.sampled_from([DType.FLOAT32, DType.FLOAT64, DType.BFLOAT16])


def cut(counts: list[int], num_shards: int, *, whole: bool, dtypes: list[DType], bucket_bytes: int = 1000) -> Partition:
    parameters = [ParameterInfo(f"p{i}", (count,), dtypes[i % len(dtypes)]) for i, count in enumerate(counts)]
    layouts = plan_buckets(parameters, bucket_bytes=bucket_bytes, first_bucket_bytes=bucket_bytes // 3)
    return partition(layouts, num_shards, whole=whole)


@QUICK
@given(COUNTS, st.integers(1, 7), st.booleans(), st.lists(DTYPES, min_size=1, max_size=3))
def test_every_element_belongs_to_exactly_one_rank(
    counts: list[int], num_shards: int, whole: bool, dtypes: list[DType]
) -> None:
    cuts = cut(counts, num_shards, whole=whole, dtypes=dtypes)
    owned = [[0] * count for count in counts]
    seen = set()
    for piece in cuts.all_pieces():
        seen.add(piece.parameter)
        for element in range(piece.start, piece.start + piece.count):
            owned[piece.parameter][element] += 1
    assert all(times == 1 for elements in owned for times in elements)
    assert seen == set(range(len(counts))), "a parameter without elements has an owner too"


@QUICK
@given(COUNTS, st.integers(1, 7), st.booleans(), st.lists(DTYPES, min_size=1, max_size=3))
def test_pieces_lie_in_the_shard_of_their_owner_and_in_the_slot_of_their_parameter(
    counts: list[int], num_shards: int, whole: bool, dtypes: list[DType]
) -> None:
    cuts = cut(counts, num_shards, whole=whole, dtypes=dtypes)
    places = cuts.places()
    for piece in cuts.all_pieces():
        bucket = cuts.buckets[piece.bucket]
        number, slot = places[piece.parameter]
        begin = bucket.begin(piece.owner)
        assert number == piece.bucket
        assert piece.offset == slot.offset + piece.start
        if piece.count:
            assert begin <= piece.offset
            assert piece.offset + piece.count <= begin + bucket.counts[piece.owner]
        if whole:
            assert piece.count == slot.count


@QUICK
@given(COUNTS, st.integers(1, 7), st.booleans())
def test_slots_do_not_overlap_and_gaps_are_what_is_left(counts: list[int], num_shards: int, whole: bool) -> None:
    for bucket in cut(counts, num_shards, whole=whole, dtypes=[DType.FLOAT32]).buckets:
        covered = [0] * bucket.count
        for offset, count in [*bucket.gaps, *((slot.offset, slot.count) for slot in bucket.slots)]:
            for element in range(offset, offset + count):
                covered[element] += 1
        assert covered == [1] * bucket.count


@QUICK
@given(COUNTS, st.integers(1, 7))
def test_elementwise_shards_are_equal_and_padding_is_small(counts: list[int], num_shards: int) -> None:
    for bucket in cut(counts, num_shards, whole=False, dtypes=[DType.FLOAT32]).buckets:
        assert len(set(bucket.counts)) == 1
        assert bucket.counts[0] % 16 == 0, "shards begin at cache lines"
        end = max(slot.offset + slot.count for slot in bucket.slots)
        assert bucket.count < end + 16 * (num_shards + 1)


@QUICK
@given(st.lists(st.integers(1, 300), min_size=1, max_size=20), st.integers(1, 5))
def test_whole_parameters_are_shared_out_evenly(counts: list[int], num_shards: int) -> None:
    cuts = cut(counts, num_shards, whole=True, dtypes=[DType.FLOAT32], bucket_bytes=1 << 20)
    loads = [sum(bucket.counts[owner] for bucket in cuts.buckets) for owner in range(num_shards)]
    largest = max(-(-count // 16) * 16 for count in counts)
    assert max(loads) - min(loads) <= largest, "taking the largest first is never worse than one parameter"


@QUICK
@given(COUNTS, st.integers(1, 5), st.booleans(), st.integers(1, 4))
def test_runs_join_neighbours_with_equal_keys(counts: list[int], num_shards: int, whole: bool, num_keys: int) -> None:
    cuts = cut(counts, num_shards, whole=whole, dtypes=[DType.FLOAT32])
    for owner in range(num_shards):
        pieces = cuts.pieces(owner)
        keys = [piece.parameter % num_keys for piece in pieces]
        segments = join_segments(pieces, keys)
        assert [piece for segment in segments for piece in segment.pieces] == pieces
        for segment in segments:
            assert segment.offset == segment.pieces[0].offset
            assert segment.offset + segment.count == segment.pieces[-1].offset + segment.pieces[-1].count
            assert len({piece.parameter % num_keys for piece in segment.pieces}) == 1
        for segment, following in itertools.pairwise(segments):
            if segment.bucket == following.bucket:
                assert segment.pieces[-1].parameter % num_keys != following.pieces[0].parameter % num_keys


def test_one_rank_owns_everything() -> None:
    cuts = cut([3, 0, 70], 1, whole=False, dtypes=[DType.FLOAT64])
    assert sorted((piece.parameter, piece.start, piece.count) for piece in cuts.pieces(0)) == [
        (0, 0, 3),
        (1, 0, 0),
        (2, 0, 70),
    ]


def test_a_parameter_smaller_than_the_number_of_ranks_leaves_some_with_nothing() -> None:
    cuts = cut([3], 4, whole=False, dtypes=[DType.FLOAT64])
    assert [len(cuts.pieces(owner)) for owner in range(4)] == [1, 0, 0, 0]


def test_no_ranks_are_refused() -> None:
    with pytest.raises(UsageError, match="at least 1"):
        partition((), 0)


def test_parameters_can_be_numbered_otherwise() -> None:
    parameters = [ParameterInfo(str(number), (5,), DType.FLOAT32) for number in range(3)]
    made = partition(plan_buckets(parameters, bucket_bytes=1 << 20), 2)
    other = made.numbered([7, 3, 9])
    assert {slot.parameter for bucket in other.buckets for slot in bucket.slots} == {7, 3, 9}
    assert [replace(piece, parameter=0) for piece in other.all_pieces()] == [
        replace(piece, parameter=0) for piece in made.all_pieces()
    ]
