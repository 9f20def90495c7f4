"""Costs of collectives: against what our algorithms send, against the papers, and where one overtakes another."""

from __future__ import annotations

import math
from typing import cast

import pytest

from unidist.algorithms import ALGORITHMS as IMPLEMENTED
from unidist.buffer import Buffer, DType
from unidist.communicator import Communicator, ReduceOp
from unidist.cost_model.collectives import ALGORITHMS, Cost, Link, cost, crossover, fastest
from unidist.cost_model.step import Operation
from unidist.errors import ConfigurationError
from unidist.testing.recording import RecordingCommunicator
from unidist.testing.threads import ThreadWorld

LINK = Link(latency=10e-6, bandwidth=1e9)


@pytest.mark.parametrize("size", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("name", sorted(IMPLEMENTED))
def test_our_algorithms_move_what_the_costs_say(name: str, size: int) -> None:
    """The rank that has most to do sends and receives, one after the other, what the cost counts."""
    count = 840  # whose halves and pieces come out even, for all of these sizes

    def run(inner: Communicator) -> tuple[int, int, int, int]:
        channel = RecordingCommunicator(inner)
        IMPLEMENTED[name](channel, Buffer.allocate(count, DType.FLOAT32), op=ReduceOp.SUM, scale=1.0)
        sent = [record for record in channel.records if record.operation == "send"]
        received = [record for record in channel.records if record.operation == "recv"]
        return (
            len(sent),
            len(received),
            sum(record.nbytes for record in sent),
            sum(record.nbytes for record in received),
        )

    with ThreadWorld(size) as world:
        ranks = world.run(run)
    expected, num_bytes = cost("allreduce", name, size), 4 * count
    sends, receives, sent, received = (max(rank[i] for rank in ranks) for i in range(4))
    if name in ("ring", "butterfly"):  # both directions at once, but for handing over what is beyond a power of two
        apart = int(name == "butterfly" and size & (size - 1) != 0)
        assert max(sends, receives) + apart == expected.latencies
        assert max(sent, received) + apart * num_bytes == pytest.approx(expected.moves * num_bytes, rel=0.02)
    else:  # up to rank 0, then down from it
        assert sends + receives == expected.latencies
        assert sent + received == expected.moves * num_bytes


def test_costs_of_thakur_et_al() -> None:
    """Sections 4 to 6, for 8 ranks: latencies, bytes moved and added up, as parts of the whole."""
    assert cost("allgather", "ring", 8) == Cost(7, 7 / 8)
    assert cost("allgather", "bruck", 8) == Cost(3, 7 / 8)
    assert cost("allgather", "bruck", 6) == Cost(3, 5 / 6)
    assert cost("broadcast", "tree", 8) == Cost(3, 3)
    assert cost("broadcast", "scatter-allgather", 8) == Cost(3 + 7, 2 * 7 / 8)
    assert cost("reducescatter", "halving", 8) == Cost(3, 7 / 8, 7 / 8)
    assert cost("reducescatter", "halving", 6) == Cost(2 + 2, 2, 1 + 5 / 6)
    assert cost("allreduce", "doubling", 8) == Cost(3, 3, 3)
    assert cost("allreduce", "butterfly", 8) == Cost(6, 2 * 7 / 8, 7 / 8)


@pytest.mark.parametrize("size", [2, 3, 16, 100])
def test_no_algorithm_moves_less_than_the_ring(size: int) -> None:
    """Patarasuk and Yuan 2009, section 3: an all-reduce moves at least 2 (p-1)/p of the data."""
    lowest = 2 * (size - 1) / size
    assert cost("allreduce", "ring", size).moves == pytest.approx(lowest)
    assert all(cost("allreduce", name, size).moves >= lowest - 1e-12 for name in ALGORITHMS["allreduce"])


@pytest.mark.parametrize("size", [4, 8, 32])
def test_small_is_for_trees_and_large_for_rings_and_butterflies(size: int) -> None:
    """Thakur et al., section 6: doubling for short messages, Rabenseifner's halving and doubling for long ones."""
    assert fastest("allreduce", size, 8, LINK)[0] == "doubling"
    assert fastest("allreduce", size, 1 << 26, LINK)[0] == "butterfly"
    assert fastest("allreduce", size - 1, 1 << 26, LINK)[0] == "ring"  # no power of two: the ring moves least
    assert fastest("broadcast", size, 8, LINK)[0] == "tree"
    assert fastest("broadcast", 32, 1 << 26, LINK)[0] == "scatter-allgather"


@pytest.mark.parametrize("size", [3, 5, 6, 8, 16, 48])
@pytest.mark.parametrize(("first", "second"), [("tree", "ring"), ("tree", "butterfly"), ("butterfly", "ring")])
def test_the_crossover_is_where_both_take_equally_long(first: str, second: str, size: int) -> None:
    point = crossover("allreduce", first, second, size, LINK)
    a, b = cost("allreduce", first, size), cost("allreduce", second, size)
    if point is None:
        assert not any(a.seconds(n, LINK) < b.seconds(n, LINK) for n in (1, 1e12)) or not any(
            b.seconds(n, LINK) < a.seconds(n, LINK) for n in (1, 1e12)
        )
        return
    assert a.seconds(point, LINK) == pytest.approx(b.seconds(point, LINK))
    assert a.seconds(point / 2, LINK) < b.seconds(point / 2, LINK)
    assert a.seconds(point * 2, LINK) > b.seconds(point * 2, LINK)


def test_the_crossover_of_tree_and_ring_by_its_equation() -> None:
    """2 log2(p) (a + n b) = 2 (p-1) (a + n b / p): n b / a = (p - 1 - log2 p) / (log2 p - (p-1)/p)."""
    for size in (8, 16, 64):
        rounds = math.log2(size)
        expected = (size - 1 - rounds) / (rounds - (size - 1) / size) * LINK.latency * LINK.bandwidth
        assert crossover("allreduce", "tree", "ring", size, LINK) == pytest.approx(expected)
    # On powers of two a butterfly is never behind either of them.
    assert crossover("allreduce", "butterfly", "ring", 16, LINK) is None
    assert crossover("allreduce", "tree", "butterfly", 16, LINK) is None
    # On others it moves two whole messages more, so that a ring overtakes it.
    assert crossover("allreduce", "butterfly", "ring", 48, LINK) is not None


def test_reductions_cost_time_of_their_own() -> None:
    slow = Link(10e-6, 1e9, reduction=2e9)
    assert cost("allreduce", "ring", 4).seconds(8e9, slow) == pytest.approx(6 * 10e-6 + 1.5 * 8 + 0.75 * 4)


def test_one_rank_exchanges_nothing() -> None:
    assert all(cost(operation, name, 1) == Cost(0, 0) for operation in ALGORITHMS for name in ALGORITHMS[operation])


def test_unknown_names_list_the_choices() -> None:
    with pytest.raises(ConfigurationError, match=r"star.*ring"):
        cost("allreduce", "star", 4)
    with pytest.raises(ConfigurationError, match=r"gossip.*allreduce"):
        cost(cast(Operation, "gossip"), "ring", 4)


@pytest.mark.parametrize(("latency", "bandwidth"), [(-1e-6, 1e9), (math.inf, 1e9), (1e-6, 0), (1e-6, -1)])
def test_a_link_has_a_latency_and_a_bandwidth(latency: float, bandwidth: float) -> None:
    with pytest.raises(ConfigurationError, match="give a number"):
        Link(latency, bandwidth)
