"""The decision which of two hosts that do not reach each other is left out."""

from __future__ import annotations

import pytest

from unidist.control.elastic.host_links import NUM_WATCHED, HostLinks


def links(*broken: tuple[int, int], now: float = 100.0) -> HostLinks:
    """Return the links of three hosts, of which these are broken."""
    made = HostLinks(1.0)
    for index in range(3):
        made.listens(index, 1000 + index)
    for first in range(3):
        for second in range(3):
            if first != second:
                made.told(first, second, reached=(first, second) not in broken, silent_sec=1.1, now=now)
    return made


@pytest.mark.parametrize(
    ("broken", "ranks", "left_out"),
    [
        (((0, 1), (1, 0)), {0: 1, 1: 1, 2: 1}, 1),  # the last of the two
        (((1, 0),), {0: 1, 1: 1, 2: 1}, 1),  # one direction is enough
        (((0, 1), (0, 2)), {0: 1, 1: 1, 2: 1}, 0),  # the one with the most broken links
        (((0, 1),), {0: 0, 1: 1, 2: 1}, 0),  # one without ranks
    ],
)
def test_the_host_that_costs_least_is_left_out(
    broken: tuple[tuple[int, int], ...], ranks: dict[int, int], left_out: int
) -> None:
    found = links(*broken).leave_out([0, 1, 2], ranks, 100.6)
    assert found is not None
    assert found.index == left_out


def test_nothing_is_decided_before_others_were_heard_nor_when_the_host_was_lost_or_is_reached_again() -> None:
    ranks = dict.fromkeys(range(3), 1)
    made = links((0, 1))
    assert made.leave_out([0, 1, 2], ranks, 100.4) is None
    made.lost(1)
    assert made.leave_out([0, 2], ranks, 101.0) is None
    made = links((0, 1))
    made.told(0, 1, reached=True, silent_sec=0.0, now=100.3)
    assert made.leave_out([0, 1, 2], ranks, 101.0) is None


def test_a_host_gets_ranks_when_it_reaches_all_others_and_they_it() -> None:
    made = HostLinks(1.0)
    assert made.is_proven(0, [0])
    assert not made.is_proven(1, [0, 1])  # not heard of yet
    made.listens(0, 1000)
    made.listens(1, 1001)
    made.told(0, 1, reached=True, silent_sec=0.0, now=0.0)
    assert not made.is_proven(1, [0, 1])
    made.told(1, 0, reached=True, silent_sec=0.0, now=0.0)
    assert made.is_proven(1, [0, 1])
    made.listens(2, 0)  # behind a router: nothing is known of it
    assert made.is_proven(1, [0, 1, 2])


def test_a_host_of_many_watches_a_few_others_who_watch_it() -> None:
    number = 40
    made = HostLinks(1.0)
    for index in range(number):
        made.listens(index, 1000 + index)
    watched = {index: set(made.peers(index)) for index in range(number)}
    assert {len(peers) for peers in watched.values()} == {NUM_WATCHED}
    assert all(index in watched[peer] for index, peers in watched.items() for peer in peers)
    reached, border = {0}, {0}
    while border:  # nobody is apart from the others
        border = {peer for index in border for peer in watched[index]} - reached
        reached |= border
    assert len(reached) == number
    # One that is cut off is left out, and those that watched it watch others.
    for index, peers in watched.items():
        for peer in peers:
            made.told(index, peer, reached=7 not in (index, peer), silent_sec=1.1, now=100.0)
    assert made.has_broken
    found = made.leave_out(range(number), dict.fromkeys(range(number), 8), 100.6)
    assert found is not None
    assert (found.index, set(found.unreached)) == (7, watched[7])
    made.lost(7)
    assert not made.has_broken
    assert made.leave_out([each for each in range(number) if each != 7], {}, 101.0) is None
    assert 7 not in {peer for index in range(number) for peer in made.peers(index)}


def test_links_that_are_not_watched_any_more_are_forgotten() -> None:
    made = HostLinks(1.0)
    for index in range(NUM_WATCHED + 1):
        made.listens(index, 1000 + index)
    made.told(0, 3, reached=False, silent_sec=1.1, now=100.0)
    assert made.has_broken
    for index in range(NUM_WATCHED + 1, 40):
        made.listens(index, 1000 + index)
    assert 3 not in made.peers(0)
    assert not made.has_broken


def test_hosts_of_a_large_job_gather_until_all_have_said_where_they_listen() -> None:
    made = HostLinks(1.0)
    size = NUM_WATCHED + 2
    for index in range(size - 1):
        made.listens(index, 40000 + index)
    assert not made.is_gathering(range(size - 1))
    assert made.is_gathering(range(size))
    made.listens(size - 1, 0)  # it cannot listen, and nothing more is to come of it
    assert not made.is_gathering(range(size))
    small = HostLinks(1.0)
    assert not small.is_gathering(range(NUM_WATCHED + 1))
