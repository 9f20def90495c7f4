"""Which ranks wait for each other: the rule, without ranks."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unidist.waits.detection import Activity, BlockedCall, RankState, find_deadlock, waiting_line


def _blocked(rank: int, awaited: tuple[int, ...], *, entered: tuple[int, ...] = (), text: str = "") -> RankState:
    """Return a rank that is blocked in one call, and has entered those of some other ranks."""
    call = BlockedCall(1, awaited, text or f"call {rank}", asked="")
    return RankState(Activity.BLOCKED, (call,), f"train.py:{rank}", {(other, 1) for other in entered})


def test_two_ranks_in_different_calls() -> None:
    found = find_deadlock({0: _blocked(0, (1,), text="allreduce 'loss'"), 1: _blocked(1, (0,), text="barrier")})
    assert found is not None
    assert found.ranks == (0, 1)
    assert "rank 0 waits in allreduce 'loss' at train.py:0, for rank 1" in found.text
    assert "rank 1 waits in barrier at train.py:1, for rank 0" in found.text


def test_one_call_that_all_have_entered_is_under_way() -> None:
    states = {
        0: _blocked(0, (1, 2), entered=(1, 2)),
        1: _blocked(1, (0, 2), entered=(0, 2)),
        2: _blocked(2, (0, 1), entered=(0, 1)),
    }
    assert find_deadlock(states) is None


def test_a_rank_that_computes_may_come() -> None:
    running = RankState(Activity.RUNNING)
    assert find_deadlock({0: _blocked(0, (1,)), 1: running}) is None
    # Rank 0 waits for rank 1, which waits for rank 2, which computes.
    assert find_deadlock({0: _blocked(0, (1,)), 1: _blocked(1, (2,)), 2: running}) is None


def test_a_rank_that_left_does_not_come() -> None:
    found = find_deadlock({0: _blocked(0, (1,)), 1: RankState(Activity.LEFT)})
    assert found is not None
    assert found.ranks == (0,)
    assert "rank 1 has ended" in found.text
    assert find_deadlock({0: _blocked(0, (1,)), 1: RankState(Activity.LEFT, entered={(0, 1)})}) is None


def test_a_rank_of_which_nothing_is_known_may_come() -> None:
    assert find_deadlock({0: _blocked(0, (1,))}) is None


def test_two_ranks_are_in_a_deadlock_while_a_third_computes() -> None:
    states = {0: _blocked(0, (1,)), 1: _blocked(1, (0,)), 2: RankState(Activity.RUNNING, where="train.py:7")}
    found = find_deadlock(states)
    assert found is not None
    assert found.ranks == (0, 1)
    assert "rank 2 runs at train.py:7" in found.text


def test_a_rank_goes_on_when_one_of_its_calls_does() -> None:
    calls = (BlockedCall(1, (1,), "a"), BlockedCall(2, (2,), "b"))
    states = {0: RankState(Activity.BLOCKED, calls), 1: _blocked(1, (0,)), 2: RankState(Activity.RUNNING)}
    assert find_deadlock(states) is None
    assert find_deadlock({**states, 2: _blocked(2, (0,))}) is not None


def test_what_to_call_is_in_the_words_of_the_script() -> None:
    call = BlockedCall(1, (1,), "optimizer.state_dict() (allgather on shm)", "optimizer.state_dict()")
    found = find_deadlock({0: RankState(Activity.BLOCKED, (call,)), 1: _blocked(1, (0,))})
    assert found is not None
    assert found.text.endswith("Every rank must make this call in its turn: optimizer.state_dict().")


def test_many_ranks_share_lines() -> None:
    states: dict[int, RankState] = {rank: RankState(Activity.LEFT) for rank in range(1, 64)}
    found = find_deadlock({0: _blocked(0, tuple(range(1, 64))), **states})
    assert found is not None
    assert "ranks 1-63: has ended" in found.text.replace("have", "has")
    assert len(found.text.splitlines()) < 6


@pytest.mark.parametrize(
    ("waiting", "expected"), [((1,), "rank 1 has waited 61 s"), ((1, 2), "ranks 1, 2 have waited 61 s")]
)
def test_the_line_says_who_waits_for_whom(waiting: tuple[int, ...], expected: str) -> None:
    states = {rank: _blocked(rank, (0,)) for rank in (1, 2)} | {
        0: RankState(Activity.RUNNING, where="eval.py:17 in evaluate")
    }
    line = waiting_line(states[1].calls[0], 61.2, waiting, [0], states)
    assert line.startswith(expected)
    assert line.endswith("for rank 0, which runs at eval.py:17 in evaluate")
    states[0] = RankState(Activity.RUNNING, where="eval.py:17 in evaluate", inside="data/dataloader.py:9 in next")
    line = waiting_line(states[1].calls[0], 61.2, waiting, [0], states)
    assert line.endswith("for rank 0, which runs at eval.py:17 in evaluate (data/dataloader.py:9 in next)")


@given(
    st.integers(2, 6).flatmap(
        lambda size: st.lists(
            st.tuples(st.booleans(), st.sets(st.integers(0, size - 1)), st.sets(st.integers(0, size - 1))),
            min_size=size,
            max_size=size,
        )
    )
)
def test_the_rule_agrees_with_playing_it(ranks: list[tuple[bool, set[int], set[int]]]) -> None:
    """A rank is dead exactly if it never goes on, when all that can go on do so and then enter every call."""
    states: Mapping[int, RankState] = {
        rank: _blocked(rank, tuple(sorted(awaited - {rank})), entered=tuple(entered - {rank}))
        if blocked
        else RankState(Activity.RUNNING, entered={(other, 1) for other in entered})
        for rank, (blocked, awaited, entered) in enumerate(ranks)
    }
    free = {rank for rank, state in states.items() if not state.calls}
    for _ in ranks:
        for rank, state in states.items():
            if state.calls:
                missing = [peer for peer in state.calls[0].awaited if (rank, 1) not in states[peer].entered]
                if all(peer in free for peer in missing):
                    free.add(rank)
    found = find_deadlock(states)
    assert (found.ranks if found else ()) == tuple(rank for rank in states if rank not in free)
