"""The plans of collectives, carried out for all ranks in this process, in every order that the network might choose."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

_tcp = pytest.importorskip("unidist_tcp._tcp", reason="the C code is not built")

ALLREDUCE, ALLGATHER, BROADCAST, REDUCESCATTER, ALLTOALL, BARRIER = range(6)
SEND, RECV, RECV_REDUCE, COPY, REDUCE, REDUCE_ALL = range(6)
ITEM = 8
Array = npt.NDArray[np.int64]


class Rank:
    """One rank that carries out its plan."""

    def __init__(self, plan: tuple[list[Any], int], rank: int, source: Array, target: Array) -> None:
        self.steps, scratch_bytes = plan
        self.rank = rank
        self.spaces = [source.view(np.uint8), target.view(np.uint8), np.zeros(scratch_bytes, np.uint8)]
        self.is_complete = [False] * len(self.steps)

    def at(self, place: tuple[int, int], nbytes: int) -> Array:
        space, offset = place
        assert offset + nbytes <= len(self.spaces[space]), "a step reaches beyond its memory"
        return self.spaces[space][offset : offset + nbytes].view(np.int64)

    def is_ready(self, index: int) -> bool:
        """Return whether a send or a local step may begin."""
        kind, *_, after, stream = self.steps[index]
        if kind in (COPY, REDUCE, REDUCE_ALL):
            return all(self.is_complete[:index])
        return all(self.is_complete[: after + 1]) and (stream < 0 or self.is_complete[stream])

    def run(self, index: int, size: int) -> None:
        """Carry out a local step."""
        kind, _, _, nbytes, target, own, other, stride, *_ = self.steps[index]
        if kind == COPY:
            self.at(target, nbytes)[:] = self.at(own, nbytes)
        elif kind == REDUCE:
            self.at(target, nbytes)[:] = self.at(own, nbytes) + self.at(other, nbytes)
        else:
            slots = [
                self.at((other[0], other[1] + rank * stride), nbytes) if rank != self.rank else self.at(own, nbytes)
                for rank in range(size)
            ]
            self.at(target, nbytes)[:] = np.sum(slots, axis=0)
        self.is_complete[index] = True

    def receive(self, source: int, tag: int, data: Array) -> None:
        """Take what a peer has sent."""
        (index,) = [
            i
            for i, step in enumerate(self.steps)
            if step[0] in (RECV, RECV_REDUCE) and step[1] == source and step[2] == tag and not self.is_complete[i]
        ]
        kind, _, _, nbytes, target, own, *_ = self.steps[index]
        assert data.nbytes == nbytes, f"rank {source} sent {data.nbytes} bytes for {nbytes}"
        self.at(target, nbytes)[:] = data if kind == RECV else self.at(own, nbytes) + data
        self.is_complete[index] = True


def carry_out(ranks: list[Rank], seed: int) -> None:
    """Do what is possible in a random order; what is sent stays on its way for some time."""
    order, travelling = random.Random(seed), []
    sent: set[tuple[int, int]] = set()
    while True:
        moves: list[tuple[str, int, int]] = [("arrive", i, 0) for i in range(len(travelling))]
        for rank in ranks:
            for index, step in enumerate(rank.steps):
                if rank.is_complete[index] or not rank.is_ready(index):
                    continue
                if step[0] == SEND and (rank.rank, index) not in sent:
                    moves.append(("send", rank.rank, index))
                elif step[0] in (COPY, REDUCE, REDUCE_ALL):
                    moves.append(("run", rank.rank, index))
        if not moves:
            break
        what, first, index = order.choice(moves)
        if what == "arrive":
            source, to, tag, data = travelling.pop(first)
            ranks[to].receive(source, tag, data)
        elif what == "run":
            ranks[first].run(index, len(ranks))
        else:
            step = ranks[first].steps[index]
            sent.add((first, index))
            ranks[first].is_complete[index] = True  # with the kernel
            travelling.append((first, step[1], step[2], ranks[first].at(step[4], step[3]).copy()))
    waiting = [(rank.rank, i) for rank in ranks for i, done in enumerate(rank.is_complete) if not done]
    assert not waiting, f"nothing is possible any more, but (rank, step) wait: {waiting}"


def inputs(size: int, counts: list[int], seed: int) -> list[Array]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 1000, count) for count in counts]


sizes = st.integers(1, 9)
# From what all ranks send at once to what goes around a ring.
elements = st.sampled_from([0, 1, 2, 5, 63, 500, 3000, 9000, 40_000, 300_000])
seeds = st.integers(0, 1000)


@settings(max_examples=150, deadline=None)
@given(size=sizes, count=elements, seed=seeds, in_place=st.booleans())
def test_allreduce_adds_up_everywhere(size: int, count: int, seed: int, in_place: bool) -> None:
    sources = inputs(size, [count] * size, seed)
    expected = np.sum(sources, axis=0)
    given_to = [source.copy() for source in sources]
    targets = given_to if in_place else [np.zeros(count, np.int64) for _ in sources]
    ranks = [
        Rank(_tcp.plan(ALLREDUCE, i, size, 0, count, ITEM, None, None, in_place), i, given_to[i], targets[i])
        for i in range(size)
    ]
    carry_out(ranks, seed)
    for i, target in enumerate(targets):
        assert np.array_equal(target, expected)
        assert in_place or np.array_equal(given_to[i], sources[i]), "a source was changed"


@settings(max_examples=100, deadline=None)
@given(size=sizes, count=elements, seed=seeds, is_even=st.booleans())
def test_allgather_and_reducescatter(size: int, count: int, seed: int, is_even: bool) -> None:
    generator = np.random.default_rng(seed)
    counts = [count // size] * size if is_even else generator.integers(0, 2 * count // size + 1, size).tolist()
    pieces, total = inputs(size, counts, seed), sum(counts)
    targets = [np.zeros(total, np.int64) for _ in pieces]
    plans = [_tcp.plan(ALLGATHER, i, size, 0, total, ITEM, tuple(counts), None, False) for i in range(size)]
    carry_out([Rank(plans[i], i, pieces[i], targets[i]) for i in range(size)], seed)
    for target in targets:
        assert np.array_equal(target, np.concatenate(pieces))

    sources = inputs(size, [total] * size, seed)
    kept = [np.zeros(count, np.int64) for count in counts]
    plans = [_tcp.plan(REDUCESCATTER, i, size, 0, total, ITEM, tuple(counts), None, False) for i in range(size)]
    before = [source.copy() for source in sources]
    carry_out([Rank(plans[i], i, sources[i], kept[i]) for i in range(size)], seed)
    ends = np.cumsum(counts)
    for i in range(size):
        assert np.array_equal(kept[i], np.sum(sources, axis=0)[ends[i] - counts[i] : ends[i]])
        assert np.array_equal(sources[i], before[i]), "a source was changed"


@settings(max_examples=80, deadline=None)
@given(size=sizes, count=elements, seed=seeds)
def test_broadcast_from_any_root(size: int, count: int, seed: int) -> None:
    root = seed % size
    buffers = inputs(size, [count] * size, seed)
    expected = buffers[root].copy()
    plans = [_tcp.plan(BROADCAST, i, size, root, count, ITEM, None, None, True) for i in range(size)]
    carry_out([Rank(plans[i], i, buffers[i], buffers[i]) for i in range(size)], seed)
    for buffer in buffers:
        assert np.array_equal(buffer, expected)


@settings(max_examples=80, deadline=None)
@given(size=sizes, seed=seeds)
def test_alltoall_of_any_counts(size: int, seed: int) -> None:
    counts = np.random.default_rng(seed).integers(0, 50, (size, size))  # [from, to]
    sources = inputs(size, counts.sum(axis=1).tolist(), seed)
    targets = [np.zeros(total, np.int64) for total in counts.sum(axis=0)]
    plans = [
        _tcp.plan(ALLTOALL, i, size, 0, 0, ITEM, tuple(counts[i].tolist()), tuple(counts[:, i].tolist()), False)
        for i in range(size)
    ]
    carry_out([Rank(plans[i], i, sources[i], targets[i]) for i in range(size)], seed)
    for i in range(size):
        pieces = [np.split(sources[j], np.cumsum(counts[j])[:-1])[i] for j in range(size)]
        assert np.array_equal(targets[i], np.concatenate(pieces))


@pytest.mark.parametrize("size", range(2, 10))
def test_a_barrier_is_over_when_all_have_come(size: int) -> None:
    """Without one rank nobody gets to the end."""
    empty = np.zeros(0, np.int64)
    for absent in range(size):
        ranks = [Rank(_tcp.plan(BARRIER, i, size, 0, 0, 1, None, None, True), i, empty, empty) for i in range(size)]
        ranks[absent].is_ready = lambda index: False  # type: ignore[method-assign]
        with pytest.raises(AssertionError, match="nothing is possible any more"):
            carry_out(ranks, size)
        assert not any(all(rank.is_complete) for rank in ranks if rank.rank != absent)
    ranks = [Rank(_tcp.plan(BARRIER, i, size, 0, 0, 1, None, None, True), i, empty, empty) for i in range(size)]
    carry_out(ranks, size)


def test_the_number_of_messages_follows_the_size() -> None:
    """What is small takes few rounds, what is large moves few bytes."""

    def sends(size: int, count: int) -> list[int]:
        steps, _ = _tcp.plan(ALLREDUCE, 1, size, 0, count, ITEM, None, None, True)
        return [step[3] for step in steps if step[0] == SEND]

    assert len(sends(8, 100)) == 7  # to each other rank, at once
    assert len(sends(16, 100)) == 4  # recursive doubling
    assert len(sends(8, 10_000)) == 6  # halving and doubling
    assert sum(sends(8, 10_000)) == 2 * 7 * 10_000  # 8 bytes each, over 8 ranks
    assert len(sends(8, 1_000_000)) == 14  # ring
    assert sum(sends(8, 1_000_000)) == 2 * 7 * 1_000_000
